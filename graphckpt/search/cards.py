"""Compares all devices for the training of a model: the largest batch on each, or the fastest policy for one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, final

import torch
from rich.console import RenderableType
from rich.text import Text

from graphckpt.blocks.apply import apply
from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.ledger.table import Column, bullet, show, table_of, text_of
from graphckpt.planning.plan_step import find_blocks, frozen_objects
from graphckpt.planning.steps import FakeStep
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.pretrained import EXTRA, PretrainedModel, read_model, step_errors
from graphckpt.search.search import Report
from graphckpt.search.sized_runs import Figures, SizedRun, SizedRuns
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.op_costs import OpCost
from graphckpt.simulation.profile import DeviceProfile, packaged_gpus
from graphckpt.units import format_bytes, format_rate, format_seconds

# Above it the backward of an embedding sorts the tokens, in buffers that grow with them: see `_CUDA_TEMPORARIES` of
# op_costs.py. Sizes on both sides of it are not on one line, so that runs are above it.
_SORTED_TOKENS = 3072


@final
@dataclass(frozen=True, kw_only=True)
class CardRow:
    """One device."""

    device: str
    memory_bytes: int
    attention: tuple[str, ...]
    """The fused kernels of attention."""
    policies: Mapping[str, Figures | None]
    """By policy of all layers: the figures of the largest batch that fits, or of the given one; ``None``: none fits."""
    least_bytes: int
    """What ``nvidia-smi`` shows under the policy that takes least, for the given batch, or for the largest one."""

    @property
    def fastest(self) -> str | None:
        """The policy with the most samples per second; ``None`` if nothing fits."""
        fitting = {name: one.batch / one.seconds for name, one in self.policies.items() if one is not None}
        return max(fitting, key=fitting.__getitem__) if fitting else None

    def to_dict(self, tokens: int | None) -> dict[str, Any]:
        """Returns plain values; ``tokens`` are those of a sample."""

        def values(one: Figures) -> dict[str, Any]:
            rate = one.batch / one.seconds
            rates = {"samples_per_second": rate, "tokens_per_second": None if tokens is None else tokens * rate}
            return one._asdict() | rates

        policies = {name: None if one is None else values(one) for name, one in self.policies.items()}
        return {
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "attention": list(self.attention),
            "fastest": self.fastest,
            "least_bytes": self.least_bytes,
            "policies": policies,
        }


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class CardTable:
    """The devices for the training of a model, smallest memory first, as ``graphckpt estimate --cards`` prints them."""

    model: str
    architecture: str
    seq: int | None
    """Tokens of a sample; ``None`` for images."""
    batch: int | None
    """The samples of a step; ``None``: each row has the largest batch."""
    rows: tuple[CardRow, ...]
    assumptions: tuple[str, ...] = ()
    policy: str = "full"
    """The policy of all layers besides everything kept."""

    def __str__(self) -> str:
        """Returns the table, in plain text."""
        return text_of(_parts_of(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        fitting = sum(row.fastest is not None for row in self.rows)
        return f"<CardTable of {self.model}: fits on {fitting} of {len(self.rows)} devices>"

    def explain(self) -> Self:
        """Prints the table."""
        show(_parts_of(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "seq": self.seq,
            "batch": self.batch,
            "cards": [row.to_dict(self.seq) for row in self.rows],
            "assumptions": list(self.assumptions),
        }


def compare_cards(model: Any, options: EstimateOptions, batch: int | None, begin: Report) -> CardTable:
    """Compares all packaged device profiles of GPUs.

    The step is simulated with everything kept, and under ``options.policy``, by default with every layer recomputed, at
    two batch sizes for each group of devices that have the same kernels of attention: these tell all other sizes, and
    the seconds on each device follow from the costs of the ops.

    Args:
        model: As :func:`graphckpt.estimate` takes it.
        options: The step, of one process.
        batch: The samples of a step; ``None`` finds the largest number on each device.
        begin: Gets a line about each run.

    Raises:
        ConfigError: The model does not exist, or an option cannot be used.
    """
    require(EXTRA, "transformers", "yaml", "numpy", "networkx")
    if options.accumulation > 1:
        name, value = options.named("accumulation"), options.accumulation
        raise ConfigError(f"--cards: expected one batch a step, got {name} {value} · fix: leave it out")
    for name, default in (("world_size", None), ("memory", None), ("memory_budget", "max")):
        if (value := getattr(options, name)) != default:
            what = f"expected one process with all memory of each device, got {options.setting(name, value)}"
            raise ConfigError(f"--cards: {what} · fix: leave it out, or name one --device")
    begin("reading the config of the model")
    source = read_model(model, options)
    cards = packaged_gpus()
    # Of 19 packaged devices the first, an rtx3080, chooses flash attention, as 12 others do; the first of the rest is a
    # t4 without a fused kernel, then an h100 with that of cuDNN. Which kernels a device chooses depends on the model,
    # so it is seen only when the step runs.
    rows: dict[str, CardRow] = {}
    while missing := [card for card in cards if card.name not in rows]:
        alike = _Cards(source, missing, begin)
        rows |= {row.device: row for row in alike.rows(batch)}
    return CardTable(
        model=source.name,
        architecture=source.architecture,
        seq=source.seq,
        batch=batch,
        rows=tuple(rows[card.name] for card in cards),
        assumptions=tuple(_assumptions(source)),
        policy=options.policy or "full",
    )


class _Cards:
    """The devices with the kernels of the first one, and the runs of a step on these."""

    def __init__(self, source: PretrainedModel, missing: list[DeviceProfile], begin: Report) -> None:
        self._source = source
        self._begin = begin
        self._machine, *others = missing
        self._fake = FakeDevice(self._machine, is_padded=False, others=others)
        self._inputs: dict[str, torch.Tensor] = {}
        begin(f"building {source.architecture} for {self._machine.name}")
        with step_errors(source), self._fake.building():
            self._model, step_fn, optimizers = source.make(self._machine.kind, self._inputs)
            self._fill_inputs(1)
        with step_errors(source):
            self._step = FakeStep(self._fake, self._model, step_fn, optimizers)
        find_blocks(self._model, None)  # raises for a model without layers

    def _fill_inputs(self, batch: int) -> None:
        source = replace(self._source, options=replace(self._source.options, batch=batch))
        self._inputs.clear()
        self._inputs |= source.inputs()

    def rows(self, batch: int | None) -> list[CardRow]:
        """Returns the rows of the first device, and of all that run the same kernels."""
        policy = self._source.options.policy or "full"
        tokens = self._source.seq
        small = 2 if tokens is None else max(2, -(-(_SORTED_TOKENS + 1) // tokens))
        runs = {
            name: SizedRuns(partial(self._run, name), small, self._machine.workspace_bytes)
            for name in dict.fromkeys(("keep", policy))
        }
        first = small if batch is None else batch
        for each in runs.values():
            each.run(first)  # from here on it is known which devices are alike
        cards = [self._machine, *self._fake.alike]
        if batch is not None:
            return [_row(card, runs, dict.fromkeys(runs, batch), first) for card in cards]
        # The largest size of all these devices runs, to see whether two smaller ones have told it right. If they have
        # not, `check` gives up on lines, the sizes are searched once more by runs, and the second `check` is content.
        while True:
            sizes = [{name: each.largest(card) for name, each in runs.items()} for card in cards]
            tops = {name: max(size[name] for size in sizes) for name in runs}
            checks = {name: each.check(tops[name]) for name, each in runs.items() if tops[name]}
            if all(checks.values()):
                return [_row(card, runs, size, first) for card, size in zip(cards, sizes, strict=True)]

    def _run(self, policy: str, batch: int) -> SizedRun:
        self._begin(f"simulating {policy} at batch size {batch}, with the kernels of {self._machine.name}")
        with step_errors(self._source), frozen_objects(), without_value_checks():
            with self._fake.building():
                self._fill_inputs(batch)
            costs: list[OpCost] = []
            with nullcontext() if policy == "keep" else apply(self._model, policy):
                run = self._step.run(costs=costs)
        assert run.allocations is not None
        return SizedRun.of(batch, run.allocations, costs)


def _row(card: DeviceProfile, runs: Mapping[str, SizedRuns], sizes: Mapping[str, int], first: int) -> CardRow:
    figures = {name: each.figures(sizes[name] or 1, card) for name, each in runs.items()}
    policies = {
        name: one if sizes[name] and runs[name].fits(one.batch, card) else None for name, one in figures.items()
    }
    return CardRow(
        device=card.name,
        memory_bytes=card.memory_bytes,
        attention=next(iter(runs.values())).run(first).attention,
        policies=policies,
        least_bytes=min(one.nvidia_smi_bytes for one in figures.values()),
    )


def _assumptions(source: PretrainedModel) -> Iterator[str]:
    options = source.options
    yield f"weights in {str(source.dtype).removeprefix('torch.')}"
    yield f"autocast {options.autocast or 'off'}"
    yield f"optimizer {options.optimizer}"
    if options.quantization is not None:
        yield f"frozen weights in {options.quantization}"
    if options.lora is not None:
        yield f"LoRA of rank {options.lora}"
    if options.loss != "model":
        yield f"the loss of {options.loss}"
    yield f"one process, {'gradients clipped' if options.clip else 'no gradient clipping'}, no accumulation"


def _parts_of(table: CardTable) -> Iterator[RenderableType]:
    step = f"{table.seq} tokens" if table.seq else "images"
    batch = "" if table.batch is None else f"batch {table.batch}, "
    yield Text(f"{table.model} ({table.architecture}): {batch}samples of {step}, each device simulated")
    yield from _largest(table) if table.batch is None else _with_batch(table)
    kernels: dict[tuple[str, ...], list[str]] = {}
    for row in table.rows:
        kernels.setdefault(row.attention, []).append(row.device)
    if len(kernels) > 1:
        for attention, names in kernels.items():
            yield bullet(f"attention {' and '.join(attention) or 'without a fused kernel'} on {', '.join(names)}", "*")
    yield bullet("policies of single layers, which are faster than one for all: name the device by --device", "*")
    yield bullet(f"assumptions: {'; '.join(table.assumptions)}", "*")


def _rate(table: CardTable, one: Figures) -> str:
    samples = one.batch / one.seconds
    return format_rate(samples) if table.seq is None else f"{samples * table.seq:,.0f}".replace(",", " ")


def _largest(table: CardTable) -> Iterator[RenderableType]:
    unit = "samples/s" if table.seq is None else "tokens/s"
    names = {"keep": "kept", table.policy: "recomputed" if table.policy == "full" else table.policy}
    columns = [Column("device"), Column("memory", is_number=True)]
    for name in names.values():
        columns += [Column(each, is_number=True) for each in (name, "step", unit)]
    cells = []
    for row in table.rows:
        cells.append([row.device, format_bytes(row.memory_bytes)])
        for one in row.policies.values():
            cells[-1] += ["-"] * 3 if one is None else [str(one.batch), format_seconds(one.seconds), _rate(table, one)]
    yield table_of(columns, cells)
    yield bullet("kept: the largest batch without checkpointing", "*")
    if table.policy != "keep":
        how = "with every layer recomputed" if table.policy == "full" else f"with {table.policy} on every layer"
        yield bullet(f"{names[table.policy]}: the largest batch {how}", "*")


def _with_batch(table: CardTable) -> Iterator[RenderableType]:
    unit = "samples/s" if table.seq is None else "tokens/s"
    titles = ("device", "memory", "nvidia-smi", "policy", "step", unit)
    cells, fitting = [], {}
    for row in table.rows:
        one = None if row.fastest is None else row.policies[row.fastest]
        needed = row.least_bytes if one is None else one.nvidia_smi_bytes
        cells.append([row.device, *map(format_bytes, (row.memory_bytes, needed)), row.fastest or "does not fit"])
        cells[-1] += ["-"] * 2 if one is None else [format_seconds(one.seconds), _rate(table, one)]
        if one is not None:
            fitting[row.device] = one
    yield table_of([Column(title, is_number=title not in ("device", "policy")) for title in titles], cells)
    if fitting:
        fastest = min(fitting, key=lambda name: fitting[name].seconds)
        yield Text(
            f"fits on {len(fitting)} of {len(table.rows)}: the smallest is {next(iter(fitting))}, the fastest {fastest}"
        )
    else:
        yield Text("fits on none of these · fix: a smaller --batch, or --world-size")
    if any(name == "full" for name in (row.fastest for row in table.rows)):
        yield bullet("full: every layer recomputed; keep: no checkpointing", "*")
