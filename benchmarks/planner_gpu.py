"""Measures on a CUDA device how well the planner foretells the peak, and what its plans cost beside uniform policies.

First part, a process per model: steps under plans with and without offloading, for shares of the activations and of
the plain step's peak, and under other policies, each timed in turn with the plain step. Second part, a process per
model and precision: the plain step and a plan for half of its activations, as predicted from the device's profile
alone (on fake tensors) and after measuring on the device, against ``torch.cuda.max_memory_allocated``. A step is
forward, backward and fused AdamW.

    python benchmarks/planner_gpu.py [--models gpt2 gpt2-1.5b bert-large llama-1b] [--profile h200] [--minutes 9]
        [--pareto gpt2] [--shares 0.5 ...] [--others] [--out FOLDER] [--name NAME]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from capture_gpu import captures_of, failure
from device import Cuda, device_for
from jobs import Jobs, answer, arguments, cell
from planner import OURS, Method, different, draw, every, quartiles, transformers_own
from report import header, table, write
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from graphckpt import Graph, plan
from graphckpt.planning.candidates import options as rules
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.planner import Planner
from graphckpt.planning.search import PolicySearch
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import FakeStep
from graphckpt.planning.sweep import measure
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile, profile_names
from graphckpt.units import format_bytes, format_seconds

# Legend: B batch, T tokens

WITH_OFFLOAD = f"{OURS}, with offload"
HALF_OF_PEAK = "50% of the plain peak"
PARETO_SECONDS = 400
OFF = 0.01
"""Of the peak: a prediction that is further off has the allocations of its steps recorded."""


def gpt2(**sizes: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(use_cache=False, loss_type="ForCausalLM", **sizes))


def bert_large() -> nn.Module:
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return BertForMaskedLM(config)


def llama_1b() -> nn.Module:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, tie_word_embeddings=True, **heads, **sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "gpt2": (gpt2, (8, 1024)),
    "gpt2-1.5b": (partial(gpt2, n_embd=1600, n_layer=48, n_head=25), (4, 1024)),
    "bert-large": (bert_large, (16, 512)),
    "llama-1b": (llama_1b, (2, 2048)),
    "tiny": (partial(gpt2, n_embd=64, n_layer=6, n_head=2, vocab_size=64, n_positions=64), (4, 64)),
}
"""How to build, with dropout as the model has it, and batch and tokens. The last one is for dry runs."""
JOBS = [
    {"model": "tiny", "precision": "autocast", "is_captured": False},
    {"model": "tiny", "precision": "autocast", "is_captured": True},
    {"model": "gpt2", "precision": "autocast", "is_captured": False},
    {"model": "gpt2", "precision": "bfloat16", "is_captured": False},
    {"model": "gpt2", "precision": "autocast", "is_captured": True},
    {"model": "bert-large", "precision": "autocast", "is_captured": False},
    {"model": "bert-large", "precision": "autocast", "is_captured": True},
    {"model": "llama-1b", "precision": "autocast", "is_captured": False},
    {"model": "llama-1b", "precision": "bfloat16", "is_captured": False},
    {"model": "gpt2-1.5b", "precision": "autocast", "is_captured": False},
    {"model": "gpt2-1.5b", "precision": "bfloat16", "is_captured": False},
]


# ---- a step, on the device or on fake tensors


class Training:
    """A model, an optimizer and a batch, and the step that they make; it is built on the current device."""

    def __init__(self, model_name: str, precision: str, kind: str = "cuda", *, is_captured: bool = False) -> None:
        build, (batch, length) = MODELS[model_name]
        torch.manual_seed(0)
        model = build().train()
        self.model = model.to(torch.bfloat16) if precision == "bfloat16" else model
        self.kind = kind
        self.autocasts = precision == "autocast"
        self.ids_BT = torch.zeros(batch, length, dtype=torch.int64) + 7
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=is_captured)

    def forward_backward(self) -> Tensor:
        with torch.autocast(self.kind, dtype=torch.bfloat16) if self.autocasts else nullcontext():
            loss: Tensor = self.model(input_ids=self.ids_BT, labels=self.ids_BT).loss
        loss.backward()
        return loss

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Captured(Graph):
    """The same step as one capture."""

    def __init__(self, training: Training, capture: Any) -> None:
        super().__init__()
        self.model = training.model
        self.add_optimizer(training.optimizer)
        if training.autocasts:
            self.config.enable_amp(dtype=torch.bfloat16)
        self.config.capture = capture

    def build(self, ids_BT: Tensor) -> Tensor:
        """Runs forward and backward."""
        loss: Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        return loss


# ---- predictions


def foretell(model: str, precision: str, profile: str) -> Planner:
    """Returns what is known of a step from the device's profile alone."""
    device = FakeDevice(load_profile(profile), is_padded=False)
    with device:
        training = Training(model, precision)
    step = FakeStep(device, training.model, training.step, training.optimizer)
    measured = measure(step, Blocks(find_blocks(training.model, None)), rules(False))
    return Planner(PolicySearch(measured), device=profile)


def predict(
    model: str, precision: str, profile: str, folder: str, device: Cuda, *, is_captured: bool
) -> Iterator[dict[str, Any]]:
    """Runs one job of the predictions in this process."""
    begin = perf_counter()
    planner = foretell(model, precision, profile)
    result: dict[str, Any] = {"model": model, "precision": precision, "is_captured": is_captured}
    result["foretelling_seconds"] = perf_counter() - begin
    static = planner.measured.model.static_bytes
    limit = static + (planner.plain.peak - static) // 2
    alone = planner.plan(limit)
    before = device.bytes_now()
    with torch.device(device.kind):
        training = Training(model, precision, device.kind, is_captured=is_captured)
    result |= {"budget_bytes": limit, "plain_foretold_bytes": planner.plain.peak}
    calls: dict[str, Callable[[], object]] = {}
    begin = perf_counter()
    if is_captured:  # the first calls run as they are, a later one is captured
        graph = Captured(training, device.capture)
        found = graph.plan(training.ids_BT, memory_budget=limit, determinism_check="none")
        found.apply()
        result["planning_seconds"] = perf_counter() - begin
        calls["plan"] = partial(graph, training.ids_BT)
        result |= device.peak_of(calls["plan"], before, times=6)
        result |= captures_of(graph)
    else:
        for _ in range(3):
            training.step()
        result |= device.peak_of(training.step, before, "plain")
        with alone.apply(training.model):
            training.step()
            result |= device.peak_of(training.step, before, "alone")
            result["alone_foretold_bytes"] = alone.predicted_peak_bytes
        begin = perf_counter()
        found = plan(training.model, training.step, memory_budget=limit, determinism_check="none")
        result["planning_seconds"] = perf_counter() - begin
        with found.apply():
            training.step()
            result |= device.peak_of(training.step, before)
        calls["plain"] = training.step

        def planned() -> None:
            with found.apply():
                training.step()

        calls["plan"] = planned
    result |= {"foretold_bytes": found.predicted_peak_bytes, "correction_bytes": found.correction_bytes}
    result |= {"reserved_bytes": found.measured_reserved_bytes or None}
    result |= {"reserved_foretold_bytes": found.predicted_reserved_bytes}
    yield result
    if abs(result["foretold_bytes"] / result["peak_bytes"] - 1) > OFF:
        for name, call in calls.items():
            kind = "captured" if is_captured else "eager"
            device.save_snapshot(call, Path(folder, f"snapshot_{model}_{precision}_{kind}_{name}.pickle"))


# ---- plans beside other policies


def pareto(model: str, shares: list[float], turns: int, device: Cuda, *, has_others: bool) -> Iterator[dict[str, Any]]:
    """Times plans and other policies on one model; yields a row per method as soon as it is known."""
    before = device.bytes_now()
    with torch.device(device.kind):
        training = Training(model, "autocast", device.kind)
    for _ in range(3):
        training.step()
    plain = Method("plain", "plain", training.forward_backward)

    def row_of(method: Method) -> dict[str, Any]:
        with method.on():
            training.step()
            method.row |= device.peak_of(training.step, before, "allocator_peak")
        seconds: dict[str, list[float]] = {method.name: [], plain.name: []}
        for _ in range(turns):
            for one in random.sample([method, plain], 2) if method is not plain else [plain]:
                with one.on():
                    training.step()
                    seconds[one.name] += device.seconds_of(training.step, 1)
        ratios = [a / b for a, b in zip(seconds[method.name], seconds[plain.name], strict=True)]
        row = {"model": model, "method": method.name, "family": method.family, "knob": method.knob, **method.row}
        row["peak_share"] = row["allocator_peak_bytes"] / plain.row["allocator_peak_bytes"]
        return {**row, "seconds": quartiles(seconds[method.name]), "ratio": quartiles(ratios), "ratios": ratios}

    yield row_of(plain)
    peak = plain.row["allocator_peak_bytes"]
    static = device.bytes_now().allocated - before.allocated  # weights, optimizer states, workspaces of cuBLAS
    targets = [(f"{share:.0%} of activations", static + int(share * (peak - static)), share) for share in shares]
    for target, budget, share in [*targets, (HALF_OF_PEAK, peak // 2, 0.5)]:
        for offload, family in ((False, OURS), (True, WITH_OFFLOAD)):
            name = f"{target}{', offload' * offload}"
            begin = perf_counter()
            try:
                # The sketches of a step whose values are compared do not belong to the peak of a plan.
                limit: Any = before.allocated + budget if device.kind == "cuda" else 0.75  # a CPU counts no bytes
                options = {"memory_budget": limit, "offload": offload, "determinism_check": "none"}
                found = plan(training.model, training.step, **options)
                method = Method(name, family, training.forward_backward, found.apply, share)
                method.row = {"budget_bytes": budget, "foretold_bytes": found.predicted_peak_bytes - before.allocated}
                method.row |= {"target": target, "planning_seconds": perf_counter() - begin}
                yield row_of(method)
            except Exception as error:  # the other plans still count
                yield {"model": model, "method": name, "family": family, "target": target, **failure(error)}
    if not has_others:
        return
    blocks = [name for name, _ in find_blocks(training.model, None)]
    own = "Transformers' own"
    yield row_of(Method(own, own, plain.call, partial(transformers_own, training.model)))
    for k in different(len(blocks)):
        yield row_of(Method(f"every {k}", "every k-th layer", plain.call, partial(every, training.model, blocks, k), k))


# ---- all


def do(job: dict[str, Any], device: Cuda) -> Iterator[dict[str, Any]]:
    """Runs a job in this process."""
    return (pareto if "shares" in job else predict)(**job, device=device)


def inside(peak: int | None, budget: int | None) -> str:
    """Returns whether a peak is within its budget, or a dash."""
    return "-" if peak is None or budget is None else "yes" if peak <= budget else "no"


def errors(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields the cells of the first table."""
    for row in rows:
        name = [row["model"], row["precision"], "captured" if row["is_captured"] else "eager"]
        if "failed" in row:
            yield [*name, f"failed: {row['failed']}", *["-"] * 8]
            continue
        pairs = [("plain_bytes", "plain_foretold_bytes"), ("alone_bytes", "alone_foretold_bytes")]
        cells = []
        pairs += [("peak_bytes", "foretold_bytes"), ("reserved_bytes", "reserved_foretold_bytes")]
        for real, foretold in pairs:
            if row.get(real) is not None:
                off = f"{row[foretold] / row[real] - 1:+.2%}".replace("%", " %")
                cells += [format_bytes(row[real]), off]
            else:
                cells += ["-", "-"]
        yield [*name, *cells, inside(row["peak_bytes"], row["budget_bytes"])]


def front(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields the cells of the second table."""
    for row in rows:
        if "failed" in row:
            yield [row.get("method", "all"), "-", "-", "-", f"failed: {row['failed']}", "-"]
            continue
        fits = inside(row["allocator_peak_bytes"], row.get("budget_bytes"))
        ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"])
        peak, seconds = cell(row["allocator_peak_bytes"], format_bytes), format_seconds(row["seconds"]["median"])
        share = f"{row['peak_share']:.0%}".replace("%", " %")
        yield [row["method"], peak, share, fits, seconds, ratio]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--profile", choices=profile_names(), default="h200", help="the device's")
    parser.add_argument("--pareto", nargs="*", choices=MODELS, default=["gpt2"], help="models of the second part")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--shares", nargs="*", type=float, default=[n / 10 for n in range(9, 1, -1)])
    parser.add_argument("--others", action="store_true", help="time other policies than plans too")
    parser.add_argument("--precisions", nargs="+", choices=["autocast", "bfloat16"], default=["autocast", "bfloat16"])
    arguments(parser, minutes=9)
    options = parser.parse_args()
    logging.set_verbosity_error()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        answer(do(options.job, device))
        return
    if options.dry_run:
        options.models, options.pareto = ["tiny"] * bool(options.models), ["tiny"] * bool(options.pareto)
        options.shares, options.turns = [0.5], 2
    head = header(**device.header(), profile=options.profile, turns=options.turns)
    jobs = Jobs(__file__, options, head)
    text = []
    for model in options.pareto:
        job = {"model": model, "shares": options.shares, "turns": options.turns, "has_others": options.others}
        rows = jobs.run(job, PARETO_SECONDS)
        columns = ["method", "peak", "of plain's", "inside", "step", "x plain (quartiles)"]
        text.append(f"## {model}, bfloat16 autocast: plans and other policies\n\n{table(columns, list(front(rows)))}\n")
        if timed := [row for row in rows if row.get("allocator_peak_bytes") is not None]:
            draw(f"{model}, {head['device']}", timed, options.out / f"{jobs.name}_{model}.svg", clock="time")
            text.append(f"![time against peak]({jobs.name}_{model}.svg)\n")
    found = [job for job in JOBS if job["model"] in options.models and job["precision"] in options.precisions]
    more = {"profile": options.profile, "folder": str(options.out.resolve())}
    predicted = [row for job in found for row in jobs.run({**job, **more})]
    columns = [
        "model", "precision", "step", "plain", "predicted from the profile", "plan from the profile", "predicted",
        "plan after measuring", "predicted", "reserved under it", "predicted", "inside",
    ]  # fmt: skip
    note = (
        "Peaks are the most that torch.cuda.max_memory_allocated saw in a step above what was there before the model; "
        "beside each, how far above it the prediction was. Captured: of the calls up to the one that is captured."
    )
    text.insert(0, f"## Predicted and real peaks\n\n{note}\n\n{table(columns, list(errors(predicted)))}\n")
    write(jobs.name, head, jobs.rows, "\n".join(text), options.out)


if __name__ == "__main__":
    main()
