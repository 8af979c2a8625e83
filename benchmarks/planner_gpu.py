"""Measures on a CUDA device how well the planner foretells the peak, and what its plans cost beside uniform policies.

First part, a process per model and precision: the plain step and a plan for half of its activations, as foretold from
the device's profile alone (on fake tensors) and after measuring on the device, against
``torch.cuda.max_memory_allocated``. A step is forward, backward and fused AdamW. Second part, one process: steps under
plans with and without offloading and under uniform policies, timed in turn.

    python benchmarks/planner_gpu.py [--models gpt2 gpt2-1.5b bert-large llama-1b] [--profile h200] [--minutes 9]
        [--pareto gpt2] [--shares 0.5 ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from device import Cuda, device_for
from jobs import Jobs, arguments, cell
from planner import OURS, Method, different, draw, every, quartiles, transformers_own
from report import header, table, write
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from graphckpt import Graph, PlanError, plan
from graphckpt.planning.api import find_blocks
from graphckpt.planning.candidates import options as rules
from graphckpt.planning.device.fake_device import FakeDevice
from graphckpt.planning.device.profile import load_profile, profile_names
from graphckpt.planning.measure.fake_step import FakeStep
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.measure.sweep import measure
from graphckpt.planning.planner import Planner
from graphckpt.units import format_bytes, format_seconds

# Legend: B batch, T tokens

WITH_OFFLOAD = f"{OURS}, with offload"


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
    "tiny": (partial(gpt2, n_embd=64, n_layer=4, n_head=2, vocab_size=64, n_positions=64), (8, 64)),
}
"""How to build, with dropout as the model has it, and batch and tokens. The last one is for dry runs."""
JOBS = [
    {"model": "tiny", "precision": "autocast", "is_captured": False},
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
    """The same step as one recording."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model = training.model
        self.add_optimizer(training.optimizer)
        if training.autocasts:
            self.config.enable_amp(dtype=torch.bfloat16)
        self.config.capture = "cuda_graph"

    def build(self, ids_BT: Tensor) -> Tensor:
        """Runs forward and backward."""
        loss: Tensor = self.model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        return loss


# ---- first part


def foretell(model: str, precision: str, profile: str) -> Planner:
    """Returns what is known of a step from the device's profile alone."""
    device = FakeDevice(load_profile(profile), is_padded=False)
    with device:
        training = Training(model, precision)
    step = FakeStep(device, training.model, training.step, training.optimizer)
    measured = measure(step, Blocks(find_blocks(training.model, None)), rules(False))
    return Planner(measured, device=profile)


def predict(model: str, precision: str, profile: str, device: Cuda, *, is_captured: bool) -> dict[str, Any]:
    """Runs one job of the first part in this process."""
    begin = perf_counter()
    planner = foretell(model, precision, profile)
    result: dict[str, Any] = {"model": model, "precision": precision, "is_captured": is_captured}
    result["foretelling_seconds"] = perf_counter() - begin
    limit = planner.bytes_of("50%", available=0)
    alone = planner.plan(limit)
    before = device.allocated()
    with torch.device(device.kind):
        training = Training(model, precision, device.kind, is_captured=is_captured)
    result |= {"budget_bytes": limit, "plain_foretold_bytes": planner.plain.peak}
    begin = perf_counter()
    if is_captured:  # the first calls run as they are, a later one is recorded
        graph = Captured(training)
        found = graph.plan(training.ids_BT, memory_budget=limit)
        found.apply()
        result["planning_seconds"] = perf_counter() - begin
        result["peak_bytes"] = device.peak_of(lambda: graph(training.ids_BT), before, times=6)
        result["capture"] = graph.explain(show=False).capture
    else:
        for _ in range(3):
            training.step()
        result["plain_bytes"] = device.peak_of(training.step, before)
        with alone.apply(training.model):
            training.step()
            result["alone_bytes"] = device.peak_of(training.step, before)
            result["alone_foretold_bytes"] = alone.predicted_peak_bytes
        begin = perf_counter()
        found = plan(training.model, training.step, memory_budget=limit)
        result["planning_seconds"] = perf_counter() - begin
        with found.apply():
            training.step()
            result["peak_bytes"] = device.peak_of(training.step, before)
    return {**result, "foretold_bytes": found.predicted_peak_bytes, "correction_bytes": found.correction_bytes}


# ---- second part


def pareto(model: str, shares: list[float], turns: int, device: Cuda) -> list[dict[str, Any]]:
    """Times plans and uniform policies on one model; returns a row per method."""
    before = device.allocated()
    with torch.device(device.kind):
        training = Training(model, "autocast", device.kind)
    blocks = [name for name, _ in find_blocks(training.model, None)]
    plain = Method("plain", "plain", training.forward_backward)
    methods = [plain]
    methods += [
        Method(f"every {k}", "every k-th layer", plain.call, partial(every, training.model, blocks, k), k)
        for k in different(len(blocks))
    ]
    methods.append(
        Method("Transformers' own", "Transformers' own", plain.call, partial(transformers_own, training.model))
    )
    for _ in range(3):
        training.step()
    failed = []
    for share in shares:
        for offload, family in ((False, OURS), (True, WITH_OFFLOAD)):
            method = Method(
                f"{share:.0%} {family.removeprefix(OURS)}".replace("%", " %"), family, plain.call, knob=share
            )
            try:
                found = plan(training.model, training.step, memory_budget=share, offload=offload)
            except PlanError as error:
                failed.append({"model": model, "method": method.name, "family": family, "failed": str(error)})
                continue
            method.on = found.apply
            method.row = {"budget_bytes": found.budget_bytes, "foretold_bytes": found.predicted_peak_bytes}
            methods.append(method)
    for method in methods:
        with method.on():
            training.step()
            method.row["allocator_peak_bytes"] = device.peak_of(training.step, before)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        for method in random.sample(methods, len(methods)):
            with method.on():
                training.step()
                device.synchronize()
                begin = perf_counter()
                training.step()
                device.synchronize()
                seconds[method.name].append(perf_counter() - begin)
    rows = []
    for method in methods:
        ratios = [a / b for a, b in zip(seconds[method.name], seconds["plain"], strict=True)]
        row = {"model": model, "method": method.name, "family": method.family, "knob": method.knob, **method.row}
        rows.append({**row, "seconds": quartiles(seconds[method.name]), "ratio": quartiles(ratios), "ratios": ratios})
    return rows + failed


# ---- all


def do(job: dict[str, Any], device: Cuda) -> Any:
    """Runs a job in this process."""
    if "shares" in job:
        return pareto(**job, device=device)
    return predict(**job, device=device)


def inside(peak: int | None, budget: int | None) -> str:
    """Returns whether a peak is within its budget, or a dash."""
    return "-" if peak is None or budget is None else "yes" if peak <= budget else "no"


def errors(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields the cells of the first table."""
    for row in rows:
        name = [row["model"], row["precision"], "captured" if row["is_captured"] else "eager"]
        if "failed" in row:
            yield [*name, f"failed: {row['failed']}", *["-"] * 6]
            continue
        pairs = [("plain_bytes", "plain_foretold_bytes"), ("alone_bytes", "alone_foretold_bytes")]
        cells = []
        for real, foretold in [*pairs, ("peak_bytes", "foretold_bytes")]:
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
            yield [row.get("method", "all"), "-", "-", f"failed: {row['failed']}", "-"]
            continue
        fits = inside(row["allocator_peak_bytes"], row.get("budget_bytes"))
        ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"])
        peak, seconds = cell(row["allocator_peak_bytes"], format_bytes), format_seconds(row["seconds"]["median"])
        yield [row["method"], peak, fits, seconds, ratio]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--profile", choices=profile_names(), default="h200", help="the device's")
    parser.add_argument("--pareto", nargs="*", choices=MODELS, default=["gpt2"], help="models of the second part")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--shares", nargs="*", type=float, default=[n / 10 for n in range(9, 1, -1)])
    arguments(parser, minutes=9)
    options = parser.parse_args()
    logging.set_verbosity_error()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        print(json.dumps(do(options.job, device)))
        return
    if options.dry_run:
        options.models, options.pareto, options.shares, options.turns = ["tiny"], ["tiny"], [0.5], 2
    head = header(**device.header(), profile=options.profile, turns=options.turns)
    jobs = Jobs(__file__, options, head)
    text = []
    for model in options.pareto:
        rows = jobs.run({"model": model, "shares": options.shares, "turns": options.turns})
        columns = ["method", "peak", "inside", "step", "x plain (quartiles)"]
        text.append(
            f"## {model}, bfloat16 autocast: plans and uniform policies\n\n{table(columns, list(front(rows)))}\n"
        )
        if timed := [row for row in rows if row.get("allocator_peak_bytes") is not None]:
            draw(f"{model}, {head['device']}", timed, options.out / f"planner_gpu_{model}.svg", clock="time")
            text.append(f"![time against peak](planner_gpu_{model}.svg)\n")
    found = [job for job in JOBS if job["model"] in options.models]
    predicted = [row for job in found for row in jobs.run({**job, "profile": options.profile})]
    columns = [
        "model", "precision", "step", "plain", "foretold from the profile", "plan from the profile", "foretold",
        "plan after measuring", "foretold", "inside",
    ]  # fmt: skip
    note = (
        "Peaks are the most that torch.cuda.max_memory_allocated saw in a step above what was there before the model; "
        "beside each, how far above it the prediction was. Captured: of the calls up to the one that is recorded."
    )
    text.insert(0, f"## Foretold and real peaks\n\n{note}\n\n{table(columns, list(errors(predicted)))}\n")
    write("planner_gpu", head, jobs.rows, "\n".join(text), options.out)


if __name__ == "__main__":
    main()
