"""Times what the engine adds to a recomputed block, beside `torch.utils.checkpoint`, for one or two checkouts.

Five blocks in which a library's own work shows, with the default value check. Two trees run in turns, each in a process
of its own; within a process, the two kinds of recomputation run in turns, and the minimum of each counts, since load on
the machine can only lengthen a step.

    python benchmarks/engine.py [--other TREE] [--rounds 5] [--turns 25]

A second table has what the steps of a call take, of the MLP: the functions of the engine are timed where they are
called, one after the other, and the clock's own time is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTH = 64
COPIES = 4
"""How often a block stands in a row: what a call costs beside others of its kind, not in a hot loop."""


STEPS = (
    ("the call of a block, with its forward", "frame:Frame.run"),
    ("are the modules the same", "call_state:ModuleState.is_stale"),
    ("context variables", "frame:context_of_call"),
    ("the state of the modules is copied", "call_state:ModuleState.take"),
    ("arguments are taken apart", "saved:Arguments.__init__"),
    ("arguments are kept", "saved:Arguments.keep"),
    ("state of generators (three times)", "frame:get_rng_state"),
    ("autocast and defaults (twice)", "frame:take_ambient"),
    ("after forward", "frame:Frame._after_forward"),
    ("a recomputation, with its forward", "frame:Frame._recompute"),
    ("the arguments are taken", "saved:Arguments.take"),
    ("the state of the modules is put in place", "call_state:ModuleState.put_in_place"),
    ("what was there is put back", "frame:put_back"),
)
"""What is timed, and where it is in ``graphckpt.engine``; what another tree has not is left out."""


def blocks() -> dict[str, tuple[Callable[[], Any], tuple[int, ...], int]]:
    """Returns for each subject what makes a block, the shape of its input, and steps for each turn."""
    from torch import nn  # noqa: PLC0415 - the first process needs none of this
    from transformers import GPT2Config, LlamaConfig  # noqa: PLC0415
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaModel  # noqa: PLC0415

    linear, width = partial(nn.Linear, WIDTH, WIDTH), WIDTH
    gpt2 = GPT2Config(n_layer=1, n_embd=width, n_head=4, vocab_size=8, n_positions=64, bos_token_id=0, eos_token_id=0)
    llama = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1, num_attention_heads=4, vocab_size=8
    )

    class LlamaLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            model = LlamaModel(llama)
            self.layer, self.rotary = model.layers[0], model.rotary_emb

        def forward(self, x: Any) -> Any:
            import torch  # noqa: PLC0415

            places = torch.arange(x.shape[1])[None]
            return self.layer(x, position_embeddings=self.rotary(x, places), position_ids=places)

    return {
        "MLP of 3 layers": (
            lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear()), (32, width), 30,
        ),
        "with 2 batch norms": (
            lambda: nn.Sequential(linear(), nn.BatchNorm1d(width), nn.ReLU(), linear(), nn.BatchNorm1d(width)),
            (32, width), 30,
        ),
        "100 modules": (
            lambda: nn.Sequential(*[linear() if number % 2 else nn.Tanh() for number in range(100)]), (32, width), 10,
        ),
        "Llama layer": (LlamaLayer, (2, 32, width), 6),
        "GPT-2 layer": (lambda: GPT2Model(gpt2).h[0], (2, 32, width), 6),
    }  # fmt: skip


def measure(turns: int) -> dict[str, tuple[float, float]]:
    """Returns the seconds of a step of ours and of PyTorch's, for each subject, in this process."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    import graphckpt  # noqa: PLC0415

    torch.set_num_threads(1)
    seconds = {}
    for name, (make, shape, steps) in blocks().items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        plain, ours = (nn.ModuleList([make() for _ in range(COPIES)]).train() for _ in range(2))
        graphckpt.apply(ours, {"*": True})

        def step(layers: nn.ModuleList, call: Callable[..., Any], x: torch.Tensor = x) -> None:
            for layer in layers:
                x = call(layer, x)
                x = x[0] if isinstance(x, tuple) else x
            x.sum().backward()

        variants: list[Callable[[], None]] = [
            partial(step, ours, lambda layer, x: layer(x)),
            partial(step, plain, lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
        ]
        best = [float("inf")] * len(variants)
        for turn in range(turns + 2):
            for number, variant in enumerate(variants):
                begin = process_time()
                for _ in range(steps):
                    variant()
                if turn >= 2:  # the first ones warm up, and have their values compared
                    best[number] = min(best[number], (process_time() - begin) / steps)
        seconds[name] = (best[0], best[1])
    return seconds


def time_steps(turns: int) -> dict[str, float]:
    """Returns the microseconds that each step takes of a call of the MLP, the medians of many calls."""
    import importlib  # noqa: PLC0415

    import torch  # noqa: PLC0415

    import graphckpt  # noqa: PLC0415

    torch.set_num_threads(1)
    make, shape, _ = blocks()["MLP of 3 layers"]
    model = torch.nn.ModuleList([make() for _ in range(COPIES)]).train()
    graphckpt.apply(model, {"*": True})
    x = torch.randn(shape)

    def step() -> None:
        y = x
        for layer in model:
            y = layer(y)
        y.sum().backward()

    def timed(function: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                times.append(perf_counter_ns() - begin)

        return call

    empty: list[int] = []
    nothing = timed(lambda: None, empty)
    for _ in range(1000):
        nothing()
    found = {}
    for step_name, place in STEPS:
        module, _, name = place.partition(":")
        owner = importlib.import_module(f"graphckpt.engine.{module}")
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        function = getattr(owner, last, None)
        if function is None:
            continue
        times: list[int] = []
        setattr(owner, last, timed(function, times))
        for _ in range(40 * turns):
            step()
        setattr(owner, last, function)
        times = times[len(times) // 4 :]
        per_call = len(times) / (30 * turns * COPIES)
        found[step_name] = (median(times) - median(empty)) * per_call / 1000
    return found


def main() -> None:
    """Runs the trees in turns, and writes the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--other", type=Path, help="another checkout, which runs in turns with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps([measure(options.turns), time_steps(options.turns)]))
        return
    from report import header, table, write  # noqa: PLC0415 - it imports PyTorch

    trees = {"here": ROOT} | ({} if options.other is None else {"other": options.other.resolve()})
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    steps: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for tree, place in trees.items():
            environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--job", "--turns", str(options.turns)]
            done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=True)
            pairs, times = json.loads(done.stdout.splitlines()[-1])
            for subject, pair in pairs.items():
                found.setdefault((subject, tree), []).append(tuple(pair))
            for name, microseconds in times.items():
                steps.setdefault((name, tree), []).append(microseconds)
    rows, lines = [], []
    for (subject, tree), pairs in found.items():
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        best = [min(values) for values in zip(*pairs, strict=True)]
        row = {"subject": subject, "tree": tree, "ratios": ratios, "ratio": median(ratios), "seconds": best}
        rows.append(row)
        lines.append(
            [subject, tree, f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"]
            + [f"{value / COPIES * 1e6:.0f}" for value in best]
        )
    columns = ["block", "tree", "ratio to torch.utils.checkpoint", "us a block", "us of PyTorch's"]
    text = (
        "Forward and backward of four blocks in a row, every one recomputed, with the default value check. ratio: the "
        "median of the rounds, and the range.\n\n" + table(columns, lines)
    )
    rows += [{"step": name, "tree": tree, "microseconds": each} for (name, tree), each in steps.items()]
    names = dict.fromkeys(name for name, _ in steps)
    lines = [[n, *(f"{min(steps[n, tree]):.1f}" if (n, tree) in steps else "" for tree in trees)] for n in names]
    text += "\n\nMicroseconds of the steps of one call of the MLP, the least of the rounds.\n\n"
    text += table(["step", *trees], lines)
    write("engine", header(rounds=options.rounds, turns=options.turns, copies=COPIES), rows, text)


if __name__ == "__main__":
    main()
