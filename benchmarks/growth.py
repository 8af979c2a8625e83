"""Measures how time and memory grow with the number of blocks and of saved tensors, and fits exponents.

Each size is measured in a process of its own, and its row is written as it comes. Times are CPU seconds of the process,
the least of the repeats; a block is a tiny linear layer, so that only the library's own work grows. The exponent of a
quantity is the slope of its logarithm over that of the size, between the last two sizes and over all from 100 on.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--blocks 10 100 1000 5000] [--tensors 100 1000 10000 100000]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from report import RESULTS, header, table, write
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphckpt
from graphckpt.train.snapshot import dcp

WIDTH = 8
MOST_PLANNED = 1000  # blocks: the solver is not linear, and its own benchmark is solve.py
BLOCKS = {
    "apply": "apply and remove",
    "apply_bytes": "Python's memory of apply",
    "plain": "the plain step, for comparison",
    "step": "a step with full, beyond the plain one",
    "step_no_gc": "the same with Python's garbage collector off",
    "torch_step": "a step with torch.utils.checkpoint, beyond the plain one",
    "measure": "a measured step, beyond one that is not",
    "explain": "explain()",
    "plan": "plan(): runs of the step and solver",
    "snapshot": "writing the weights",
    "resume": "reading the weights",
}
TENSORS = {"step": "a measured step, beyond the plain one", "explain": "explain()", "plot": "explain(plot)"}


class Layers(nn.Module):
    """Blocks that are called one after the other, each of which saves the given number of tensors."""

    def __init__(self, num_blocks: int, num_tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_tensors) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """A linear layer, and a sine for each further tensor to save."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_tensors = num_tensors

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.num_tensors - 1):
            x = x.sin()
        return x


def least(function: Callable[[], object], repeats: int) -> float:
    """Returns the least CPU seconds of some calls."""
    found = []
    for _ in range(repeats):
        gc.collect()
        before = process_time()
        function()
        found.append(process_time() - before)
    return min(found)


def step_of(model: nn.Module) -> Callable[[], object]:
    x = torch.ones(64, WIDTH)
    return lambda: model(x).sum().backward()


def of_blocks(number: int) -> Iterator[tuple[str, float]]:
    """Yields what ``number`` blocks take, by the keys of ``BLOCKS``."""
    repeats = max(3, min(20, 5000 // number))
    model = Layers(number, 4)
    step = step_of(model)
    step()
    plain = least(step, repeats)
    yield "plain", plain
    yield "apply", least(lambda: graphckpt.apply(model, {"layers.*": True}).remove(), repeats)
    tracemalloc.start()
    handle = graphckpt.apply(model, {"layers.*": True})
    yield "apply_bytes", tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    step()  # the first step learns
    checkpointed = least(step, repeats)
    yield "step", checkpointed - plain
    gc.disable()
    yield "step_no_gc", least(step, repeats) - plain
    gc.enable()

    def measured() -> None:
        with handle.measure():
            step()

    yield "measure", least(measured, repeats) - checkpointed
    yield "explain", least(lambda: handle.explain(show=False), min(repeats, 3))
    handle.remove()
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    yield "torch_step", least(step, repeats) - plain
    for layer in model.layers:
        del layer.forward
    if number <= MOST_PLANNED:
        budget = 0.8
        yield "plan", least(lambda: graphckpt.plan(model, step, memory_budget=budget, check=False), 1)
    with tempfile.TemporaryDirectory() as name:
        tensors = {key: value.detach() for key, value in model.state_dict().items()}
        numbers = iter(range(repeats))
        folders = [Path(name, str(n)) for n in range(repeats)]
        for folder in folders:
            folder.mkdir()
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # there is one process
        yield "snapshot", least(lambda: dcp.write(folders[next(numbers)], tensors, None), repeats)
        yield "resume", least(lambda: dcp.read(folders[0], tensors, None), repeats)


def of_tensors(number: int) -> Iterator[tuple[str, float]]:
    """Yields what a measured step takes whose ten blocks keep ``number`` tensors, by the keys of ``TENSORS``."""
    repeats = max(3, min(10, 10_000 // number))
    model = Layers(10, number // 10)
    step = step_of(model)
    step()
    plain = least(step, repeats)
    handle = graphckpt.apply(model, {"layers.*": False})

    def measured() -> None:
        with handle.measure():
            step()

    yield "step", least(measured, repeats) - plain
    yield "explain", least(lambda: handle.explain(show=False), min(repeats, 3))
    with tempfile.TemporaryDirectory() as name:
        yield "plot", least(lambda: handle.explain(Path(name, "step.png"), show=False), 1)


KINDS = {"blocks": (of_blocks, BLOCKS), "tensors": (of_tensors, TENSORS)}


def measured(kind: str, size: int) -> dict[str, Any]:
    """Measures one size in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, str(size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {"kind": kind, "size": size, **json.loads(done.stdout.splitlines()[-1])}


def exponents(rows: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Returns the slopes of ``key`` in double logarithms: of the last two sizes, and of all from 100 on."""
    points = [(row["size"], row[key]) for row in rows if key in row and row["size"] >= 100]
    x, y = np.log([size for size, _ in points]), np.log([max(value, 1e-9) for _, value in points])
    return float((y[-1] - y[-2]) / (x[-1] - x[-2])), float(np.polyfit(x, y, 1)[0])


def report(rows: list[dict[str, Any]]) -> str:
    texts = []
    for kind, (_, names) in KINDS.items():
        own = [row for row in rows if row["kind"] == kind]
        lines = []
        for key, name in names.items():
            each = [_per_one(row[key], row["size"], key) if key in row else "-" for row in own]
            last, fitted = exponents(own, key)
            lines.append([name, *each, f"{last:.2f}", f"{fitted:.2f}"])
        columns = [f"per {kind[:-1]}", *(f"{row['size']:,}" for row in own), "exponent, last two", "fitted"]
        texts.append(f"## By the number of {kind}\n\n{table(columns, lines)}")
    return "\n\n".join(texts)


def _per_one(value: float, size: int, key: str) -> str:
    return f"{value / size / 1024:.1f} KiB" if key.endswith("bytes") else f"{value / size * 1e6:,.1f} us"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": "graphckpt", "font.size": 9}):
        figure, both = plt.subplots(1, 2, figsize=(10, 4))
        for axes, (kind, (_, names)) in zip(both, KINDS.items(), strict=True):
            own = [row for row in rows if row["kind"] == kind]
            for key, name in names.items():
                if not key.endswith("bytes"):
                    points = [(row["size"], row[key]) for row in own if key in row]
                    axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            axes.set(xlabel=f"number of {kind}", ylabel="CPU seconds")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100, 1000, 5000])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, size = arguments.one
        print(json.dumps(dict(KINDS[kind][0](int(size)))))
        return
    head = header(time="CPU time of the process, the least of the repeats")
    rows = []
    for kind in KINDS:
        for size in getattr(arguments, kind):
            rows.append(measured(kind, size))
            print(json.dumps(rows[-1]), flush=True)
    draw(rows, RESULTS / "growth.svg")
    write("growth", head, rows, report(rows))


if __name__ == "__main__":
    main()
