"""The layouts of a run over the ranks of a cluster, with the plan of each; their table."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from rich.text import Text

from graphckpt.budget import Budget
from graphckpt.ledger.table import WIDTH, Column, bullet, bytes_or_dash, show, table_of, text_of
from graphckpt.planning.rows import byte_values, second_values
from graphckpt.search.fit_result import policy_counts
from graphckpt.search.layouts import Layout
from graphckpt.search.search import pareto
from graphckpt.simulation.cluster_profile import ClusterProfile, cluster_note
from graphckpt.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphckpt.planning.plan import Plan

_NAMED = 5  # layouts that a line names; it counts the others
_NUMBER = re.compile(r"\d[\d.]*( [KMGTP]?i?B)?")
_COLUMNS = (
    Column("layout"),
    *(
        Column(name, is_number=True)
        for name in ("batch", "peak", "reserved", "step", "exposed", "bubble", "each", "all")
    ),
)
_SECTION = "train.activation_checkpoint"


class StagePlan(NamedTuple):
    """The plan of one pipeline stage."""

    stages: tuple[int, ...]
    """The numbers of stages with equal layers, of which the first was simulated: it keeps the most micro-batches."""
    plan: Plan


class SkippedLayout(NamedTuple):
    """A layout without a plan, and why."""

    layout: Layout
    reason: str

    @staticmethod
    def grouped(skipped: Iterable[SkippedLayout]) -> Iterator[str]:
        """Yields a line for each kind of reason; reasons that differ in numbers alone are of one kind.

        >>> some = [SkippedLayout(Layout(size), f"{size} is too many") for size in range(2, 9)]
        >>> list(SkippedLayout.grouped(some))
        ['dp=2, dp=3, dp=4, dp=5, dp=6 and 2 more: 2 is too many']
        """
        kinds: dict[str, list[SkippedLayout]] = {}
        for each in skipped:
            kinds.setdefault(_NUMBER.sub("#", each.reason), []).append(each)
        for same in kinds.values():
            more = f" and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
            yield f"{', '.join(str(each.layout) for each in same[:_NAMED])}{more}: {same[0].reason}"


@final
@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """A layout that was simulated, each stage under the best plan that fits."""

    layout: Layout
    micro_batch: int
    """Samples in one forward."""
    accumulation: int
    """Forwards of an update; in a pipeline its micro-batches."""
    stages: tuple[StagePlan, ...] = field(repr=False)
    """One plan, or those of the stages of a pipeline, equal ones once."""

    @property
    def slowest(self) -> Plan:
        """The plan of the slowest stage, for which the others wait."""
        return max((stage.plan for stage in self.stages), key=lambda plan: plan.predicted_step_seconds)

    @property
    def seconds(self) -> float:
        """Seconds of an update."""
        return self.slowest.predicted_step_seconds

    @property
    def peak_bytes(self) -> int:
        """The highest predicted peak of any stage."""
        return max(stage.plan.predicted_peak_bytes for stage in self.stages)

    @property
    def reserved_bytes(self) -> int:
        """The most that PyTorch's allocator reserves on a rank; 0 if it is not known."""
        return max(stage.plan.predicted_reserved_bytes for stage in self.stages)

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks."""
        return self.micro_batch * self.accumulation * self.layout.data_parallel_size / self.seconds

    @property
    def policies(self) -> str:
        """The number of layers with each policy: ``"28 keep, 4 full"``."""
        # One plan stands for all equal stages: with 8 layers kept, and three such stages, it is "24 keep".
        counts: Counter[str] = Counter()
        for stage in self.stages:
            counts += Counter({name: n * len(stage.stages) for name, n in policy_counts(stage.plan).items()})
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        of_stages = [
            {
                "stages": list(numbers),
                **byte_values(plan),
                **second_values(plan),
                "policies": plan.policies,
            }
            for numbers, plan in self.stages
        ]
        return {
            **self.layout.to_dict(),
            "micro_batch_size": self.micro_batch,
            "accumulation_steps": self.accumulation,
            "allocated_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes or None,
            **second_values(self.slowest),
            "samples_per_second": self.samples_per_second,
            "samples_per_second_of_rank": self.samples_per_second / self.layout.num_ranks,
            "stages": of_stages,
        }


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LayoutComparison:
    """The result of :func:`~graphckpt.config.layouts.compare_layouts`."""

    device: str
    cluster: ClusterProfile
    world_size: int
    memory_budget: Budget
    limit_bytes: int
    """The memory of a rank, of which ``"max"`` leaves some for the buffers of NCCL as well."""
    global_batch: int
    """Samples of an update, the same in all layouts."""
    rows: tuple[LayoutRow, ...]
    """The layouts that were simulated and fit, fastest first."""
    ruled_out: tuple[SkippedLayout, ...] = ()
    """Layouts that cannot run, or do not fit."""
    left_out: tuple[SkippedLayout, ...] = ()
    """Layouts that may fit, but are slower by arithmetic than the simulated ones."""
    train_arguments: tuple[str, ...] = ()
    """Arguments of ``graphckpt train`` for any layout: the config and its overrides."""

    @property
    def best(self) -> LayoutRow:
        """The layout with the most samples per second."""
        return self.rows[0]

    @cached_property
    def front(self) -> tuple[LayoutRow, ...]:
        """The Pareto-optimal rows: no other one is better in step time or peak without being worse in the other."""
        return pareto(self.rows, costs=lambda row: (row.seconds, row.peak_bytes))

    def command(self, row: LayoutRow) -> list[str]:
        """Returns the words of the command line that trains with the layout of a row."""
        per_node = self.cluster.ranks_per_node
        # torchrun starts equally many on each node: 12 ranks on nodes of 8 are 2 nodes of 6.
        per_node = max(n for n in range(1, per_node + 1) if self.world_size % n == 0)
        num_nodes = self.world_size // per_node
        nodes = [] if num_nodes == 1 else ["--nnodes", str(num_nodes)]
        sizes = [*row.layout.overrides(), *size_overrides(row.micro_batch, row.accumulation, self.global_batch)]
        keys = {word.partition("=")[0] for word in sizes}
        return [
            *("torchrun", *nodes, "--nproc-per-node", str(per_node), "-m", "graphckpt", "train"),
            *(word for word in self.train_arguments if word.partition("=")[0] not in keys),
            *sizes,
            f"{_SECTION}.memory_budget={self.memory_budget}",
        ]

    def __str__(self) -> str:
        """Returns the table, in plain text."""
        return text_of(_renderables(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        what = f"{len(self.rows)} layouts of {self.world_size} ranks on {self.device}"
        return f"<LayoutComparison of {what}: {self.best.layout} is the fastest>"

    def explain(self) -> Self:
        """Prints the table."""
        show(_renderables(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "device": self.device,
            "cluster": self.cluster.name,
            "world_size": self.world_size,
            "memory_budget": self.memory_budget,
            "limit_bytes": self.limit_bytes,
            "global_batch_size": self.global_batch,
            "best": str(self.best.layout),
            "command": shlex.join(self.command(self.best)),
            "rows": [{**row.to_dict(), "is_pareto_optimal": row in self.front} for row in self.rows],
            "ruled_out": [{**each.layout.to_dict(), "reason": each.reason} for each in self.ruled_out],
            "left_out": [{**each.layout.to_dict(), "reason": each.reason} for each in self.left_out],
            "notes": list(_notes(self)),
        }


def size_overrides(micro_batch: int, accumulation: int, global_batch: int) -> list[str]:
    """Returns the overrides that set the batch sizes of a config."""
    return [
        f"train.train_micro_batch_size={micro_batch}",
        f"train.num_accumulation_steps={accumulation}",
        f"train.global_batch_size={global_batch}",
    ]


def option_overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns the overrides that set options of the planner in a config.

    >>> option_overrides({"offload": "cpu", "candidates": ["full"]})
    ['train.activation_checkpoint.offload=cpu', 'train.activation_checkpoint.candidates=["full"]']
    """
    return [f"{_SECTION}.{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]


def _renderables(comparison: LayoutComparison) -> Iterator[RenderableType]:
    rows, front = comparison.rows, comparison.front
    yield table_of(_COLUMNS, (_cells(row, is_optimal=row in front) for row in rows))
    best, size = comparison.best, comparison.world_size
    limit = format_bytes(comparison.limit_bytes)
    yield Text(f"{comparison.global_batch} samples in an update, {limit} on {comparison.device}, {size} ranks")
    yield Text(f"fastest: {best.layout}, {format_rate(best.samples_per_second)} samples/s")
    for policies, names in _by_policies(rows).items():
        yield Text(f"policies of {', '.join(names)}: {policies}")
    for head, skipped in (("ruled out", comparison.ruled_out), ("not simulated", comparison.left_out)):
        if skipped:
            yield Text(f"{head}: {len(skipped)}")
            yield from (bullet(line) for line in SkippedLayout.grouped(skipped))
    yield from (bullet(note, "*") for note in _notes(comparison))
    yield Text("train with it:")
    yield Text(_on_lines(comparison.command(best)))


def _by_policies(rows: Iterable[LayoutRow]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.policies, []).append(str(row.layout))
    return names


def _on_lines(arguments: Sequence[str]) -> str:
    r"""Returns a command line of several lines, which a shell joins.

    >>> print(_on_lines(["train", "a" * 40, "b" * 40]))
    train aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \
        bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
    """
    lines = [""]
    for word in map(shlex.quote, arguments):
        if lines[-1].strip() and len(lines[-1]) + len(word) > WIDTH - 3:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _cells(row: LayoutRow, *, is_optimal: bool) -> list[str]:
    total, slowest = row.samples_per_second, row.slowest
    return [
        f"{row.layout} *" if is_optimal else str(row.layout),
        f"{row.micro_batch} x {row.accumulation}",
        format_bytes(row.peak_bytes),
        bytes_or_dash(row.reserved_bytes),
        *map(format_seconds, (row.seconds, slowest.exposed_seconds)),
        format_seconds(slowest.bubble_seconds) if slowest.bubble_seconds else "-",
        *map(format_rate, (total / row.layout.num_ranks, total)),
    ]


def _notes(comparison: LayoutComparison) -> Iterator[str]:
    yield "layouts with a star are Pareto-optimal: no other one has a shorter step without a higher peak"
    yield "each, all: samples per second of one rank and of all ranks"
    yield "peak and reserved are those of one rank, in a pipeline of the stage that needs most"
    yield "micro-batches are those of the config, or the next smaller ones that divide the samples of a rank"
    yield cluster_note(comparison.cluster)
    if assumptions := comparison.best.slowest.assumptions:
        yield f"assumed: {', '.join(assumptions)}"
