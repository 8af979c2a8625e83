"""Compares plans with those of another checkout: budgets that are met, seconds of the step, and runs of the step.

Both planners have one table of seconds for each kind of layer, in place of measured ones, so that no noise decides. The
budgets are at five places between the lowest possible and the plain peak. A step that the other planner refuses, or
that is over its budget, counts as not met.

    python benchmarks/plans.py --other TREE [--kinds real fake odd autocast] [--names gpt2 llama]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = {
    "real": "56 architectures with 8 layers",
    "fake": "the same on a simulated H100",
    "odd": "odd steps, and chains of unequal layers",
    "autocast": "autocast, and three micro-batches",
}
PLACES = 0.02, 0.2, 0.45, 0.7, 0.92
EXTRA_SECONDS = 0, 1.0, 0.9, 0.35, 0.25
"""What a recomputation adds to the backward of a layer, whose forward takes a second and whose backward two."""
SELECTIVE = [{"rule": "selective", "save": ops} for ops in ("attention", "matmul", "matmul+attention")]
WITH_AUTOCAST = "gpt2", "llama", "bert", "albert", "t5", "vit", "resnet"
LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers"
LAYERS_OF_EACH_SIDE = "num_decoder_layers", "encoder_layers", "decoder_layers"

Make = Callable[[], tuple[Any, Callable[[], object], Any]]
"""Returns a model, its step, and its layers as `select` takes them."""


def deeper(architecture: Any) -> Any:
    """Returns an architecture with 8 layers, 5 on each side of an encoder-decoder, where its class allows."""
    config = architecture.config
    change = {key: 8 for key in LAYERS if key in config} | {key: 5 for key in LAYERS_OF_EACH_SIDE if key in config}
    if "num_decoder_layers" in config:
        change["num_layers"] = 5
    try:
        other = replace(architecture, config=config | change)
        other.loss(other.build()(**other.inputs()))
    except Exception:
        return architecture
    return other


def steps(kind: str) -> Iterator[tuple[str, Make]]:
    """Yields the name of each step of a kind, and what makes it."""
    import torch  # noqa: PLC0415 - the first process needs none of this
    from helpers import odd_steps  # noqa: PLC0415
    from helpers.architectures import ARCHITECTURES  # noqa: PLC0415
    from helpers.plans import stepped_once  # noqa: PLC0415

    def plain(loss: Callable[[], Any]) -> Any:
        return loss()

    def in_autocast(loss: Callable[[], Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    def in_micro_batches(loss: Callable[[], Any]) -> Any:
        for _ in range(2):
            loss().backward()
        return loss()

    def of(architecture: Any, run: Callable[[Callable[[], Any]], Any] = plain) -> Make:
        def make() -> tuple[Any, Callable[[], object], Any]:
            chosen = deeper(architecture)
            model, inputs = chosen.build(), chosen.inputs()
            step, _ = stepped_once(model, lambda m: run(lambda: chosen.loss(m(**inputs))))
            return model, step, [*chosen.layer_modules(model)]

        return make

    def odd(name: str) -> Make:
        def make() -> tuple[Any, Callable[[], object], Any]:
            torch.manual_seed(0)
            model = odd_steps.Views()
            return model, odd_steps.STEPS[name](model)[0], odd_steps.ResidualLayer

        return make

    def chain(seed: int) -> Make:
        def make() -> tuple[Any, Callable[[], object], Any]:
            torch.manual_seed(seed)
            model, x = odd_steps.OddChain(seed), torch.randn(160, 8)
            return model, stepped_once(model, lambda m: m(x).square().mean())[0], "layers.*"

        return make

    if kind in ("real", "fake"):
        yield from ((architecture.name, of(architecture)) for architecture in ARCHITECTURES)
    elif kind == "odd":
        yield from ((name, odd(name)) for name in odd_steps.STEPS)
        yield from ((f"chain {seed}", chain(seed)) for seed in range(6))
    else:
        for architecture in ARCHITECTURES:
            if architecture.name in WITH_AUTOCAST:
                yield f"autocast {architecture.name}", of(architecture, in_autocast)
                yield f"micro-batches {architecture.name}", of(architecture, in_micro_batches)


def set_seconds() -> None:
    """Gives every layer the seconds of one table."""
    from graphckpt.planning import sweep  # noqa: PLC0415 - of the checkout that this process measures

    def by_block(self: Any, phase: Any, of_class: Any) -> tuple[tuple[float, ...], ...]:
        is_forward, count = phase.name == "FORWARD", len(next(iter(of_class.values())))
        extra = EXTRA_SECONDS[:count]
        return tuple(
            tuple((1 + 0.13 * kind) * (1.0 if is_forward else 2.0 + each) for each in extra) for kind in self.classes
        )

    collector: Any = getattr(sweep, "SampleCollector", None) or getattr(sweep, "TraceCollector", None)
    collector._by_block = by_block


def job(kind: str, names: list[str], budgets_file: Path) -> None:
    """Plans all steps of a kind in the checkout of this process, and prints a line for each."""
    warnings.filterwarnings("ignore")
    from transformers.utils import logging  # noqa: PLC0415

    import graphckpt  # noqa: PLC0415

    logging.set_verbosity_error()
    set_seconds()
    budgets = json.loads(budgets_file.read_text()) if budgets_file.exists() else {}
    for name, make in steps(kind):
        if names and name.rpartition(" ")[2] not in names:
            continue
        begin = process_time()

        def planned(budget: Any, make: Make = make) -> Any:
            model, step, layers = make()
            options = {"candidates": ["full", *SELECTIVE], "select": layers, "progress": False}
            if kind == "fake":
                return graphckpt.plan(lambda: on_device(make), memory_budget=budget, device="h100", **options)
            return graphckpt.plan(model, Counted(step), memory_budget=budget, **options)

        try:
            if name not in budgets:
                low = planned("min")
                place_of = low.plain_peak_bytes - low.predicted_peak_bytes
                budgets[name] = [int(low.predicted_peak_bytes + place * place_of) for place in PLACES]
            Counted.runs = 0
            rows = [seconds_of(planned, budget) for budget in budgets[name]]
        except Exception as error:
            print(json.dumps({"step": name, "error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
            continue
        print(
            json.dumps({"step": name, "seconds": rows, "runs": Counted.runs, "cpu": process_time() - begin}), flush=True
        )
    budgets_file.write_text(json.dumps(budgets))


class Counted:
    """A step that counts how often it runs. Planning restores what a step changes, but no class."""

    runs = 0

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def __call__(self) -> None:
        Counted.runs += 1
        self._step()


def on_device(make: Make) -> tuple[Any, Callable[[], object]]:
    """Builds a model and its step on an absent device."""
    model, step, _ = make()
    return model, Counted(step)


def seconds_of(planned: Callable[[int], Any], budget: int) -> float | None:
    """Returns the seconds of the layers under the plan for a budget; ``None`` if there is none that stays within it."""
    from graphckpt.errors import PlanError  # noqa: PLC0415

    try:
        plan = planned(budget)
    except PlanError:
        return None
    if plan.predicted_peak_bytes > budget:
        return None
    return 3.0 * len(plan.rows) + sum(row.extra_seconds for row in plan.rows)


def main() -> None:
    """Plans in both checkouts, and writes the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--other", type=Path, help="the checkout to compare with")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--names", nargs="+", default=[], help="only these architectures")
    parser.add_argument("--job", nargs=2, metavar=("KIND", "BUDGETS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.job[0], options.names, Path(options.job[1]))
        return
    if options.other is None:
        parser.error("expected --other TREE, another checkout")
    from report import header, table, write  # noqa: PLC0415 - it imports PyTorch

    head = header(other=revision(options.other))
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            budgets = Path(folder) / f"{kind}.json"
            # The other one first: the budgets are between its lowest and its plain peak.
            other, own = (run(tree.resolve(), kind, options.names, budgets) for tree in (options.other, ROOT))
            pairs = [(other[name], own[name]) for name in other if name in own]
            ratios = {
                (one["step"], place): new / old
                for one, another in pairs
                for place, old, new in zip(PLACES, one["seconds"], another["seconds"], strict=True)
                if old is not None and new is not None
            }
            slower = [
                f"{name} at {place:.0%}: {ratio:.3f}" for (name, place), ratio in ratios.items() if ratio > 1.0001
            ]
            sides = [*zip(*pairs, strict=True)]
            met = [sum(s is not None for row in side for s in row["seconds"]) for side in sides]
            runs, cpu = ([sum(row[key] for row in side) for side in sides] for key in ("runs", "cpu"))
            rows += [{"kind": kind, "other": one, "own": another} for one, another in pairs]
            lines.append(
                [
                    KINDS[kind], f"{len(pairs) * len(PLACES)}", f"{met[1]} ({met[0]})",
                    f"{sum(abs(ratio - 1) <= 1e-4 for ratio in ratios.values())}",
                    f"{sum(ratios.values()) / len(ratios):.4f}", f"{max(ratios.values()):.3f}",
                    f"{runs[1]} ({runs[0]})", f"{cpu[1]:.0f} ({cpu[0]:.0f})", "; ".join(slower) or "-",
                ]
            )  # fmt: skip
    columns = [
        "steps", "plans", "budgets met (other)", "as fast", "mean", "worst", "runs of the step (other)",
        "CPU s (other)", "slower",
    ]  # fmt: skip
    write("plans", head, rows, table(columns, lines))


def run(tree: Path, kind: str, names: list[str], budgets: Path) -> dict[str, Any]:
    """Returns the rows of a checkout, by step."""
    script = ROOT / "benchmarks" / "plans.py"
    command = [sys.executable, str(script), "--job", kind, str(budgets), *(["--names", *names] if names else [])]
    paths = os.pathsep.join([str(tree), str(tree / "tests")])
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        if "error" in row:
            print(f"{tree.name}: {row['step']}: {row['error']}", file=sys.stderr)
    return {row["step"]: row for row in rows if "error" not in row}


def revision(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
