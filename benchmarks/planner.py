"""Measures what plans for memory budgets take, in bytes and time, beside what people do without a planner.

One model at a time, in one process: every method is put on the same model, one after the other, in a new random order
each turn; a ratio compares a method's step and the plain step right after it. A step is forward and backward, gradients
are zeroed in place. The planner measures the model once and plans for all budgets from that.

    OMP_NUM_THREADS=1 python benchmarks/planner.py [--models toy-gpt gpt2 bert-large resnet101 t5] [--turns 7]
"""

from __future__ import annotations

import argparse
import gc
import random
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch
from memory import InOrder, bert_large, gpt2
from report import RESULTS, header, table, write
from rotor import Rotor
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning import PlanError, PlanOptions
from graphckpt.planning.candidates import compiled_forwards as compiled_layers
from graphckpt.planning.candidates import options as rules
from graphckpt.planning.candidates import parse_compile
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.planner import Planner
from graphckpt.planning.search import PolicySearch
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import RealStep
from graphckpt.planning.sweep import measure

# Legend: B batch, T tokens

MIB = 2**20
OURS = "graphckpt plan"
TOLERANCE = 0.01  # as in graphckpt.plan: a plan that is further off when it runs, or over its budget, is corrected
MOST_CORRECTIONS = 3  # another plan may run other ops at its peak


# ---- the models


@dataclass
class Case:
    """A model with a batch, and how to call its layers in a row, where they can be."""

    model: nn.Module
    inputs: dict[str, Tensor]
    in_order: nn.Module | None = None
    """The same modules; ``torch_runs`` is in how many runs ``checkpoint_sequential`` takes them."""
    layers: str | None = None
    """Selector of the layers, where the planner is to be told them."""


def tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape)


def toy_gpt() -> nn.Module:
    """Eight layers of width 256 and 2048 tokens, without dropout."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 8, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 2048}
    more = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **more))
    model.loss_type = "ForCausalLM"  # without it Transformers warns in forward, which cannot be compiled
    return model


def language(build: Callable[[], nn.Module], batch: int, length: int) -> Case:
    model = build()
    ids_BT = tokens(model.config.vocab_size, batch, length)
    labels_BT = ids_BT if isinstance(model, GPT2LMHeadModel) else tokens(model.config.vocab_size, batch, length)
    return Case(model, {"input_ids": ids_BT, "labels": labels_BT}, InOrder(model))


class ResNetInOrder(nn.Module):
    """The same model; one ``nn.Sequential`` calls the layers of all stages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.Sequential(*(layer for stage in model.resnet.encoder.stages for layer in stage.layers))
        self.torch_runs = 1

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        resnet = self.model.resnet
        hidden = resnet.embedder(pixel_values)
        hidden = checkpoint_sequential(self.layers, self.torch_runs, hidden, use_reentrant=False)
        return nn.functional.cross_entropy(self.model.classifier(resnet.pooler(hidden)), labels)


def resnet(batch: int, side: int) -> Case:
    model = ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], num_labels=1000))
    inputs = {"pixel_values": torch.randn(batch, 3, side, side), "labels": tokens(1000, batch)}
    # by itself the planner takes each convolution, as Transformers names no layer of this model
    return Case(model, inputs, ResNetInOrder(model), "resnet.encoder.stages.*.layers.*")


def t5(batch: int, length: int) -> Case:
    config = T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8, use_cache=False, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    ids_BT, labels_BT = (tokens(config.vocab_size, batch, length) for _ in range(2))
    return Case(model, {"input_ids": ids_BT, "labels": labels_BT})


MODELS: dict[str, tuple[Callable[[int, int], Case], tuple[int, int], str]] = {
    "toy-gpt": (partial(language, toy_gpt), (4, 256), "8 layers of width 256, 2048 tokens, no dropout"),
    "gpt2": (partial(language, gpt2), (2, 128), "GPT-2 124M, dropout 0.1"),
    "bert-large": (partial(language, bert_large), (2, 64), "335M, dropout 0.1"),
    "resnet101": (resnet, (2, 128), "ResNet-101, 1000 classes; the second number is the side of an image"),
    "t5": (t5, (2, 128), "T5 of 6 + 6 layers of width 512, dropout 0.1; encoder and decoder have as many tokens"),
}
"""How to build, batch and length, and what it is."""


# ---- the methods


@dataclass
class Method:
    """A way to save memory: how to put it on, and what is to be called then."""

    name: str
    family: str
    call: Callable[[], Tensor]
    on: Callable[[], AbstractContextManager[Any]] = nullcontext
    knob: float | None = None
    is_compiled: bool = False
    row: dict[str, Any] = field(default_factory=dict)
    """What was found."""

    @property
    def is_ours(self) -> bool:
        """Whether it is a plan."""
        return self.family.startswith(OURS)


@contextmanager
def transformers_own(model: nn.Module) -> Iterator[None]:
    """The model's own switch."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()  # type: ignore[operator]


def every(model: nn.Module, blocks: list[str], k: int) -> AbstractContextManager[Any]:
    """Rule ``full`` on each ``k``-th layer."""
    return graphckpt.apply(model, {name: {"activation_checkpointing": True} for name in blocks[k - 1 :: k]})


def different(num_blocks: int) -> list[int]:
    """Returns some ``k`` that recompute different numbers of layers; of equal ones the largest, with the widest gaps.

    >>> different(8)
    [1, 2, 4, 8]
    """
    largest = {num_blocks // k: k for k in (1, 2, 3, 4, 6, 8, 12, 24) if k <= num_blocks}
    return sorted(largest.values())


def sequential(case: Case, runs: int) -> Tensor:
    """``checkpoint_sequential`` over all layers."""
    assert case.in_order is not None
    case.in_order.torch_runs = runs
    loss: Tensor = case.in_order(**case.inputs)
    return loss


def compiled(case: Case, name: str, backend: str, *, returns_logits: bool = False) -> Callable[[], Tensor]:
    """Returns the model's loss as one compiled function of its own: compiled code hangs on the code of a function.

    With ``returns_logits`` it computes what the model returns, the loss and the logits.
    """

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor]:
        return (model(**inputs).loss,)

    def loss_and_logits(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        result = model(**inputs)
        return result.loss, result.logits

    code = (loss_and_logits if returns_logits else loss).__code__
    own = types.FunctionType(code.replace(co_name=name), globals())
    compiled_loss = torch.compile(own, backend=backend, fullgraph=True, dynamic=False)
    return lambda: compiled_loss(case.model, case.inputs)[0]


def peers(case: Case, blocks: list[str], arguments: argparse.Namespace, model_name: str) -> Iterator[Method]:
    """Yields all methods but ours; the plain step first."""
    model = case.model

    def call() -> Tensor:
        loss: Tensor = model(**case.inputs).loss
        return loss

    yield Method("plain", "plain", call)
    for k in different(len(blocks)):
        yield Method(f"every {k}", "every k-th layer", call, partial(every, model, blocks, k), k)
    if getattr(model, "supports_gradient_checkpointing", False):
        yield Method("Transformers' own", "Transformers' own", call, partial(transformers_own, model))
    if case.in_order is not None:
        runs = round(sqrt(len(blocks)))
        name = f"checkpoint_sequential({runs})"
        yield Method(name, "checkpoint_sequential, sqrt(n) runs", partial(sequential, case, runs), knob=runs)
    if model_name in arguments.compiled:
        for backend in arguments.backends:
            call_compiled = compiled(case, f"loss_and_logits_{backend}", backend, returns_logits=True)
            yield Method(
                f"compile, logits returned ({backend})", f"torch.compile, {backend}", call_compiled, is_compiled=True
            )
            for solver in arguments.solvers:
                for budget in arguments.knobs if solver == "dp" else arguments.ilp_knobs:
                    name = f"compile {budget} ({backend}, {solver})"
                    call_compiled = compiled(case, f"loss_{backend}_{solver}_{budget}", backend)
                    options = {"activation_memory_budget": budget, "activation_memory_budget_solver": solver}
                    family = f"torch.compile memory budget, {backend}"
                    yield Method(name, family, call_compiled, partial(functorch.patch, options), budget, True)


# ---- one step


@dataclass
class Measurer:
    """Runs steps of one case."""

    case: Case

    def step(self, method: Method) -> Tensor:
        """Runs forward and backward; gradients stay where they are."""
        self.case.model.zero_grad(set_to_none=False)
        loss = method.call()
        loss.backward()
        return loss.detach()

    def bytes_of(self, method: Method) -> dict[str, Any]:
        """Returns the peak by live tensors and by the allocator, and what was computed."""
        with method.on():
            begin = process_time()
            if method.is_compiled:
                self.step(method)
            first = process_time() - begin
            torch.manual_seed(1)
            with LiveBytes(record_timeline=False) as live:
                live.track(self.standing())
                static = live.live_bytes
                if not method.is_compiled:  # what runs within compiled code, live bytes do not see
                    loss = self.step(method)
            if method.is_compiled:
                loss = self.step(method)
            return {
                "loss": loss.item(), "gradients": self.digest(), "compile_cpu_seconds": first, "static_bytes": static,
                "live_peak_bytes": None if method.is_compiled else live.peak_bytes,
                "allocator_peak_bytes": static + self.allocated(method),
            }  # fmt: skip

    def allocated(self, method: Method) -> int:
        """Returns how far above its beginning a step gets, by the CPU allocator's own record."""
        gc.collect()
        gc.disable()
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
                self.step(method)
        finally:
            gc.enable()
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return max(accumulate(event.nbytes() for event in events), default=0)

    def seconds(self, method: Method, warm_up: int) -> float:
        """Returns the CPU seconds of one step."""
        with method.on():
            for _ in range(warm_up):
                self.step(method)
            torch.manual_seed(1)
            begin = process_time()
            self.step(method)
            return process_time() - begin

    def standing(self) -> Iterator[Tensor | None]:
        """Yields what is there before a step."""
        yield from self.case.inputs.values()
        yield from self.case.model.buffers()
        for parameter in self.case.model.parameters():
            yield from (parameter, parameter.grad)

    def digest(self) -> int:
        """Names the bits of all gradients by one number."""
        parts = (p.grad.view(torch.int32).sum().item() for p in self.case.model.parameters() if p.grad is not None)
        return hash(tuple(parts))


# ---- ours


def plans(
    case: Case, measurer: Measurer, plain: Method, budgets: dict[float, int], backend: str | None = None
) -> Iterator[Method]:
    """Yields a method for each budget, planned from one measurement.

    Args:
        case: the model.
        measurer: runs its steps.
        plain: the step that keeps everything.
        budgets: bytes by share; those that are 0 are filled in.
        backend: of ``torch.compile``, which compiles each layer; ``None`` runs them as they are.
    """
    blocks = Blocks(find_blocks(case.model, case.layers))
    step = RealStep(case.model, lambda: measurer.step(plain))
    code = parse_compile(None if backend is None else {"backend": backend})
    family, ending = (OURS, "plan") if backend is None else (f"{OURS}, layers by {backend}", f"plan, {backend}")
    with step.restoring():
        begin = process_time()
        with compiled_layers(blocks.modules, code.options):
            measured = measure(step, blocks, rules(code=code))
        measuring = process_time() - begin
        options = PlanOptions(compile=None if backend is None else {"backend": backend})
        planner = Planner(PolicySearch(measured), options=options, model=case.model)
        plain.row.setdefault("planner_seconds", planner.measured.step_seconds)
        rotor = Rotor(measured) if case.in_order is not None and backend is None else None
        static = measured.model.static_bytes
        for share, known_budget in budgets.items():
            budget = budgets[share] = known_budget or static + int(share * (planner.plain.peak - static))
            method = Method(f"{share:.0%} {ending}".replace("%", " %"), family, plain.call, knob=share)
            begin = process_time()
            row = {"share": share, "budget_bytes": budget, "measuring_cpu_seconds": measuring}
            row["floor_bytes"] = planner.floor.peak
            try:
                found = planner.plan(budget)
                row["planning_cpu_seconds"] = process_time() - begin
                method.on = found.apply
                row |= measurer.bytes_of(method)
                row["off_bytes"] = row["live_peak_bytes"] - found.predicted_peak_bytes
                for row["corrections"] in range(1, 1 + MOST_CORRECTIONS):
                    # by the allocator, which knows what ops take within, as `graphckpt.plan` does on CUDA
                    off = row["allocator_peak_bytes"] - (found.predicted_peak_bytes - found.correction_bytes)
                    is_near = abs(off - found.correction_bytes) <= TOLERANCE * found.predicted_peak_bytes
                    if row["allocator_peak_bytes"] <= budget and is_near:
                        break
                    found = planner.plan(budget, correction=off)
                    method.on = found.apply
                    row |= measurer.bytes_of(method)
            except PlanError as error:
                row["infeasible"] = str(error)
            else:
                row |= {
                    "predicted_peak_bytes": found.predicted_peak_bytes,
                    "predicted_ratio": found.predicted_step_seconds / plain.row["planner_seconds"],
                    "binding": found.binding,
                    "options": dict(_counts(planrow.option for planrow in found.rows)),
                }
            if rotor is not None:
                row["rotor_predicted_ratio"] = rotor.ratio(budget)
            method.row = row
            yield method


def _counts(names: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return counts


# ---- all of one model


def run(model_name: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Measures all methods on one model; returns the rows and the text."""
    build, shape, _ = MODELS[model_name]
    random.seed(0)
    torch.manual_seed(0)
    case = build(*(arguments.batch or shape))
    case.model.train()
    blocks = [name for name, _ in find_blocks(case.model, case.layers)]
    measurer = Measurer(case)
    methods = list(peers(case, blocks, arguments, model_name))
    plain = methods[0]
    measurer.step(plain)  # gradients are there from now on
    budgets = {share / 100: 0 for share in arguments.budgets}
    backends = [None, *(b for b in arguments.backends if b == "inductor" and model_name in arguments.compiled)]
    methods[1:1] = [each for backend in backends for each in plans(case, measurer, plain, budgets, backend)]
    left_out = [method for method in methods if "infeasible" in method.row]
    methods = [method for method in methods if "infeasible" not in method.row]
    for method in list(methods):
        try:
            if not method.is_ours:  # those were run when they were planned
                method.row |= measurer.bytes_of(method)
        except Exception as error:  # a peer that cannot run is a row as well
            if method.is_ours:
                raise
            method.row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            methods.remove(method)
            left_out.append(method)
        print(f"{model_name}: {method.name}: {_brief(method)}", flush=True)
    seconds: dict[str, list[float]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)  # of a plain step right after each: the machine's speed drifts
    for turn in range(arguments.turns):
        for method in random.sample(methods, len(methods)):
            seconds[method.name].append(measurer.seconds(method, arguments.warm_up))
            beside[method.name].append(measurer.seconds(plain, warm_up=0))
        print(f"{model_name}: turn {turn + 1} of {arguments.turns}", flush=True)
    rows = []
    for method in methods:
        ratios = [a / b for a, b in zip(seconds[method.name], beside[method.name], strict=True)]
        rows.append(
            {
                "model": model_name, "method": method.name, "family": method.family, "knob": method.knob, **method.row,
                "has_plain_bits": method.row["gradients"] == plain.row["gradients"],
                "cpu_seconds": quartiles(seconds[method.name]), "ratio": quartiles(ratios), "ratios": ratios,
            }
        )  # fmt: skip
    more = [{"model": model_name, "method": m.name, "family": m.family, "knob": m.knob, **m.row} for m in left_out]
    return rows + more, text(model_name, rows, more)


def _brief(method: Method) -> str:
    row = method.row
    return row.get("failed") or f"{row['allocator_peak_bytes'] / MIB:.1f} MiB"


def quartiles(values: list[float]) -> dict[str, float]:
    """Returns the middle of ``values`` and the quartiles around it."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"low": low, "median": median(values), "high": high}


# ---- what it says


def better_in_both(row: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Returns how sure it is that a method is below ours in peak and time; ``None`` if by the medians it is not."""
    if row["allocator_peak_bytes"] >= ours["allocator_peak_bytes"]:
        return None
    paired = quartiles([a / b for a, b in zip(row["ratios"], ours["ratios"], strict=True)])
    if paired["median"] >= 1:
        return None
    return "clearly" if paired["high"] < 1 else "within noise"


def fastest_inside(rows: list[dict[str, Any]], budget: int) -> dict[str, Any] | None:
    """Returns the fastest method whose peak is at most ``budget``."""
    fits = [row for row in rows if row["allocator_peak_bytes"] <= budget]
    return min(fits, key=lambda row: row["ratio"]["median"], default=None)


def text(model_name: str, rows: list[dict[str, Any]], left_out: list[dict[str, Any]]) -> str:
    """Returns the tables of one model."""
    plain = rows[0]
    others = [row for row in rows if not row["family"].startswith(OURS)]
    lines, num_kept = [], [0, 0]
    losses: dict[str, list[str]] = defaultdict(list)
    ours = [row for row in rows if row["family"].startswith(OURS)]
    for row in ours:
        budget = row["budget_bytes"]
        kept = [row[key] <= budget for key in ("live_peak_bytes", "allocator_peak_bytes")]
        num_kept = [count + is_kept for count, is_kept in zip(num_kept, kept, strict=True)]
        best = fastest_inside(others, budget)
        cells = [best["method"], _mib(best["allocator_peak_bytes"]), _ratio(best)] if best else ["none", "-", "-"]
        rotor = row.get("rotor_predicted_ratio")
        lines.append(
            [
                row["method"], _mib(budget), _mib(row["live_peak_bytes"]),
                _mib(row["allocator_peak_bytes"]), ", ".join("yes" if is_kept else "no" for is_kept in kept),
                _ratio(row), *cells,
                f"{row['predicted_ratio']:.2f}", "-" if rotor is None else f"{rotor:.2f}",
            ]
        )  # fmt: skip
        for peer in others:
            if loss := better_in_both(peer, row):
                is_eager = row["family"] == OURS and peer["live_peak_bytes"] is None
                kind = "eager layers beside compiled ones" if is_eager else "like beside like, or compiled beside eager"
                losses[kind].append(f"{row['method']}: {peer['method']} is below it in peak and time ({loss})")
    for row in left_out:
        if "infeasible" in row:
            rotor = row.get("rotor_predicted_ratio")
            best = fastest_inside(others, row["budget_bytes"])
            cells = [best["method"], _mib(best["allocator_peak_bytes"]), _ratio(best)] if best else ["none", "-", "-"]
            lines.append([row["method"], _mib(row["budget_bytes"]), "-", "-", "no plan fits", "-", *cells, "-"])
            lines[-1].append("-" if rotor is None else f"{rotor:.2f}")
            if best:
                losses["no plan fits"].append(f"{row['method']}: {best['method']} does")
    columns = [
        "ours", "budget, MiB", "live MiB", "allocator MiB", "inside", "x plain", "fastest peer inside", "its MiB",
        "its x plain", "predicted", "rotor DP, predicted",
    ]  # fmt: skip
    every_one = []
    for row in rows:
        live = "-" if row["live_peak_bytes"] is None else _mib(row["live_peak_bytes"])
        cells = [row["method"], live, _mib(row["allocator_peak_bytes"]), f"{row['cpu_seconds']['median'] * 1e3:.0f}"]
        every_one.append([*cells, _ratio(row), "same" if row["has_plain_bits"] else "other"])
    failed = [f"- {row['method']}: {row['failed']}" for row in left_out if "failed" in row]
    first = next((row for row in [*ours, *left_out] if "floor_bytes" in row), {"floor_bytes": 0})
    took = [row["planning_cpu_seconds"] for row in ours]
    cost = f"Measuring took {first.get('measuring_cpu_seconds', 0.0):.0f} CPU seconds"
    cost += f", a plan from that {median(took) * 1e3:.0f} ms." if took else "."
    about = (
        f"Plain: {_mib(plain['allocator_peak_bytes'])} MiB, of which {_mib(plain['static_bytes'])} MiB stand there "
        f"before the step. The least a plan can do is {_mib(first['floor_bytes'])} MiB, by its own prediction. {cost}"
    )
    verdict = (
        f"Inside the budget: {num_kept[0]} of {len(ours)} plans by live tensors, {num_kept[1]} by the allocator. "
        f"Losses, where a method is below a plan in both peak and time, or fits where no plan does: "
        f"{sum(map(len, losses.values()))}."
    )
    columns_of_all = ["method", "live MiB", "allocator MiB", "CPU ms", "x plain", "gradient bits"]
    return "\n".join(
        [
            f"## {model_name}: {MODELS[model_name][2]}", "", about, "", table(columns, lines), "", verdict, "",
            *(line for kind, found in losses.items() for line in (f"{kind.capitalize()}:", "", *_listed(found), "")),
            table(columns_of_all, every_one), "", *failed, "",
        ]
    )  # fmt: skip


def _listed(lines: list[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


def _ratio(row: dict[str, Any]) -> str:
    return "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"])


def draw(title: str, rows: list[dict[str, Any]], path: Path, clock: str = "CPU time") -> None:
    """Draws time against peak, one point per method, with quartiles."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    marks = dict(zip(dict.fromkeys(row["family"] for row in rows), "so^Dx+*v", strict=False))
    with mpl.rc_context({"svg.hashsalt": "graphckpt", "font.size": 9}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for family, mark in marks.items():
            mine = [(row["allocator_peak_bytes"] / MIB, row["ratio"]) for row in _measured(rows, family)]
            mine.sort(key=lambda point: (point[0], point[1]["median"]))
            if not mine:
                continue
            middle = [ratio["median"] for _, ratio in mine]
            bars = [
                [ratio["median"] - ratio["low"] for _, ratio in mine],
                [ratio["high"] - ratio["median"] for _, ratio in mine],
            ]
            axes.errorbar(
                [peak for peak, _ in mine], middle, yerr=bars, fmt=mark, label=family, markersize=5, elinewidth=0.7,
                linestyle="-" if OURS in family else "none", linewidth=1, zorder=3 if OURS in family else 2,
            )  # fmt: skip
        axes.set(xlabel="peak, MiB, by the allocator", ylabel=f"{clock}, x plain", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        figure.savefig(path, metadata={"Date": None})


def _measured(rows: list[dict[str, Any]], family: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["family"] == family and "ratio" in row]


def main() -> None:
    """Measures all and writes one result per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", nargs=2, type=int, metavar=("BATCH", "TOKENS"), help="for all models")
    parser.add_argument("--budgets", nargs="+", type=int, default=list(range(90, 10, -10)), help="%% of activations")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1, help="steps before each timed one")
    parser.add_argument("--compiled", nargs="*", choices=MODELS, default=["toy-gpt"], help="models to compile")
    parser.add_argument("--backends", nargs="+", choices=["aot_eager", "inductor"], default=["aot_eager"])
    parser.add_argument("--solvers", nargs="+", choices=["dp", "ilp"], default=["dp", "ilp"])
    knobs = [1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0]
    parser.add_argument("--knobs", nargs="+", type=float, default=knobs, help="activation_memory_budget")
    parser.add_argument("--ilp-knobs", nargs="+", type=float, default=[0.5, 0.3, 0.1], help="the same, for ilp")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 1000  # policies come and go on the model, and its compiled code with them
    logging.set_verbosity_error()
    for model_name in arguments.models:
        batch, length = arguments.batch or MODELS[model_name][1]
        head = header(
            batch=f"{batch} x {length}, float32, forward and backward, gradients zeroed in place",
            turns=f"{arguments.turns}, all methods in each, in random order, on one model in one process",
            time="CPU time of the process; x plain: of a plain step right after it; median (quartiles)",
            budget="share of what the plain step takes above what stands there before it, plus the latter",
            inside="whether the peak of live tensors, and that of the CPU allocator, are at most the budget",
        )
        rows, found = run(model_name, arguments)
        name = f"planner_{model_name}"
        write(name, head, rows, f"{found}\n![time against peak]({name}.svg)")
        draw(model_name, rows, RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
