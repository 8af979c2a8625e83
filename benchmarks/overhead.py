"""Times steps of small models, where a library's own work shows: a Graph, and recompute, against peers.

All variants of a model run in one process, in turns and in a new random order each turn, so that load on
the machine hits them alike. Each variant has a model of its own, and all are built anew several times,
because the place of a model in memory alone changes its speed by a percent or two. A ratio compares two
variants of one turn.

In every run, recompute is beside the peers and `empty_engine.py`, an engine on saved-tensor hooks that does nothing but
recompute: what is between that and `torch.utils.checkpoint` is a library's own work.

    python benchmarks/overhead.py [--builds 6] [--turns 40] [--subjects 0,1,2,3]
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import empty_engine
import torch
from report import header, spread, table, write
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import graphckpt
from graphckpt.rules.selective import PRESETS

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model to time, and how to reach the blocks that recompute."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]
    """From ``(model, *inputs)``."""
    blocks: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    """Steps per variant and turn."""


class TwoBlocks(nn.Module):
    """The network of OneFlow's tutorial on activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
                nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """A module of its own class, whose attributes a library may have to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class BlockOf100(nn.Module):
    """One block of a hundred modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(*[Residual() for _ in range(33)])])
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x))


def gpt2(n_layer: int, n_embd: int, n_head: int, n_positions: int) -> nn.Module:
    """A GPT-2 without dropout and without a cache."""
    config = GPT2Config(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        vocab_size=512,
        n_positions=n_positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


SUBJECTS = (
    Subject(
        name="MLP 256-128-64 | 64-32-10, batch 32",
        build=TwoBlocks,
        inputs=lambda: (torch.randn(32, 256), torch.randint(0, 10, (32,))),
        loss=lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        blocks="blocks.*",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        steps=40,
    ),
    Subject(
        name="one block of 100 modules, batch 32 x 64",
        build=BlockOf100,
        inputs=lambda: (torch.randn(32, 64), torch.randint(0, 10, (32,))),
        loss=lambda model, x, y: nn.functional.cross_entropy(model(x), y),
        blocks="blocks.*",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        steps=10,
    ),
    Subject(
        name="GPT-2, 12 layers of width 64, batch 4 x 64",
        build=partial(gpt2, 12, 64, 4, 64),
        inputs=lambda: (torch.randint(0, 512, (4, 64)),),
        loss=lambda model, ids: model(ids, labels=ids).loss,
        blocks="transformer.h.*",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        steps=4,
    ),
    Subject(
        name="GPT-2, 4 layers of width 768, batch 1 x 512",
        build=partial(gpt2, 4, 768, 12, 512),
        inputs=lambda: (torch.randint(0, 512, (1, 512)),),
        loss=lambda model, ids: model(ids, labels=ids).loss,
        blocks="transformer.h.*",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        steps=1,
    ),
)


# ---- (a) a whole step: plain loop and Graph


def plain_loop(subject: Subject, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Step:
    """Forward, backward, optimizer step, gradients off."""
    optimizer = subject.optimizer(model)

    def step() -> torch.Tensor:
        loss = subject.loss(model, *inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def graph_off(subject: Subject, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Step:
    """The same step as a Graph in which no flag is set."""

    class TrainStep(graphckpt.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(subject.optimizer(model))

        def build(self, *inputs: torch.Tensor) -> torch.Tensor:
            loss = subject.loss(self.model, *inputs)
            loss.backward()
            return loss

    step = TrainStep()
    return lambda: step(*inputs)


# ---- (b) forward and backward with every block recomputed


def forward_backward(subject: Subject, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Step:
    """Forward and backward, without the optimizer's time, which would hide differences."""

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = subject.loss(model, *inputs)
        loss.backward()
        return loss

    return step


def blocks_of(subject: Subject, model: nn.Module) -> nn.ModuleList:
    """Returns the list that holds the blocks."""
    return model.get_submodule(subject.blocks.removesuffix(".*"))  # type: ignore[return-value]


def use_torch(subject: Subject, model: nn.Module, **options: Any) -> None:
    """``torch.utils.checkpoint`` around each block's forward."""
    for block in blocks_of(subject, model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def use_empty_engine(subject: Subject, model: nn.Module) -> None:
    """The empty engine around each block's forward."""
    for block in blocks_of(subject, model):
        block.forward = partial(empty_engine.checkpoint, block.forward)


def use_fairscale(subject: Subject, model: nn.Module) -> None:
    """FairScale's wrapper around each block."""
    from fairscale.nn import checkpoint_wrapper  # noqa: PLC0415 - only this variant needs it

    blocks = blocks_of(subject, model)
    for at, block in enumerate(blocks):
        blocks[at] = checkpoint_wrapper(block)


def use_transformers(_subject: Subject, model: nn.Module) -> None:
    """The model's own switch."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


def use_graphckpt(subject: Subject, model: nn.Module, **options: Any) -> None:
    """Rule ``full`` on each block."""
    graphckpt.apply(model, {subject.blocks: {"activation_checkpointing": True}}, **options)


def use_torch_selective(subject: Subject, model: nn.Module) -> None:
    """PyTorch's selective checkpointing, which keeps the results of the ops of the preset ``matmul``."""
    ops: Any = list(PRESETS["matmul"])
    use_torch(subject, model, context_fn=lambda: create_selective_checkpoint_contexts(ops))


def use_graphckpt_selective(subject: Subject, model: nn.Module) -> None:
    """Rule ``selective`` with the preset ``matmul`` on each block."""
    graphckpt.apply(model, {subject.blocks: {"activation_checkpointing": graphckpt.Selective("matmul")}})


def blocks_twice(subject: Subject, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Step:
    """No recompute, and each block's forward once more: what recompute would take if a library did nothing itself."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def see(block: nn.Module, args: Any, kwargs: Any) -> None:
        own = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        calls.append((block, own, kwargs))

    hooks = [block.register_forward_pre_hook(see, with_kwargs=True) for block in blocks_of(subject, model)]
    subject.loss(model, *inputs)
    for hook in hooks:
        hook.remove()
    plain = forward_backward(subject, model, inputs)

    def step() -> torch.Tensor:
        loss = plain()
        for block, args, kwargs in calls:
            block(*args, **kwargs)
        return loss

    return step


def recompute(switch: Callable[[Subject, nn.Module], None]) -> Callable[..., Step]:
    """Makes a variant of forward and backward from a function that switches recompute on."""

    def variant(subject: Subject, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Step:
        switch(subject, model)
        return forward_backward(subject, model, inputs)

    return variant


WHOLE_STEP = {"plain loop": plain_loop, "Graph, all flags off": graph_off}
RECOMPUTE = {
    "torch.utils.checkpoint": recompute(use_torch),
    "graphckpt full": recompute(use_graphckpt),
    "graphckpt full, determinism_check='none'": recompute(partial(use_graphckpt, determinism_check="none")),
    "empty engine": recompute(use_empty_engine),
    "torch.utils.checkpoint, preserve_rng_state=False": recompute(partial(use_torch, preserve_rng_state=False)),
    "FairScale checkpoint_wrapper": recompute(use_fairscale),
    "Transformers gradient_checkpointing_enable": recompute(use_transformers),
    "no recompute, each block's forward twice": blocks_twice,
    "no recompute": forward_backward,
}
SELECTIVE = {
    "create_selective_checkpoint_contexts": recompute(use_torch_selective),
    "graphckpt selective(matmul)": recompute(use_graphckpt_selective),
    "graphckpt full": recompute(use_graphckpt),
}


if importlib.util.find_spec("fairscale") is None:
    del RECOMPUTE["FairScale checkpoint_wrapper"]


def build(subject: Subject, variants: dict[str, Callable[..., Step]]) -> dict[str, Step]:
    """Builds every variant with the same weights and inputs, and checks that all do the same to the bit."""
    steps, results = {}, {}
    for name in random.sample(list(variants), len(variants)):
        torch.manual_seed(0)
        model, inputs = subject.build(), subject.inputs()
        if name.startswith("Transformers") and not hasattr(model, "gradient_checkpointing_enable"):
            continue
        steps[name] = variants[name](subject, model, inputs)
        losses = [steps[name]().detach() for _ in range(5)]
        results[name] = [
            *losses,
            *model.parameters(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
    first, *others = results.values()
    for other in others:
        if len(first) != len(other) or not all(map(torch.equal, first, other)):
            raise SystemExit(f"{subject.name}: the variants {list(results)} do not compute the same")
    return {name: steps[name] for name in variants if name in steps}


def measure(subject: Subject, variants: dict[str, Callable[..., Step]], options: Any) -> dict[str, list[float]]:
    """Returns the CPU seconds of one step of each variant, one entry per turn."""
    seconds = defaultdict(list)
    for _ in range(options.builds):
        steps = build(subject, variants)
        for turn in range(options.turns + 2):
            for name in random.sample(list(steps), len(steps)):
                step = steps[name]
                begin = process_time()
                for _ in range(subject.steps):
                    step()
                if turn >= 2:  # turns to warm up
                    seconds[name].append((process_time() - begin) / subject.steps)
    return {name: seconds[name] for name in variants if name in seconds}


def middle(values: list[float]) -> tuple[float, float, float]:
    """Returns the median and its 95 % interval, from the order of the values alone."""
    values = sorted(values)
    half_width = 0.98 * len(values) ** 0.5  # of the binomial distribution of the number of values below the median
    low, high = int(len(values) / 2 - half_width), int(len(values) / 2 + half_width)
    return median(values), values[max(low, 0)], values[min(high, len(values) - 1)]


def main() -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=6, help="how often the models are built anew")
    parser.add_argument("--turns", type=int, default=40, help="turns per build")
    numbers = ",".join(map(str, range(len(SUBJECTS))))
    parser.add_argument("--subjects", default=numbers, help="numbers of the models, from 0; default: all")
    options = parser.parse_args()
    subjects = [SUBJECTS[int(number)] for number in options.subjects.split(",")]
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    head = header(
        n=f"{options.builds} builds x {options.turns} turns x {', '.join(str(s.steps) for s in subjects)} steps",
        time="CPU time of the process, which other processes on the machine lengthen least",
        ratio="of two variants in the same turn; median, its 95 % interval, and (min to max) over all turns",
    )
    rows, texts = [], []
    for title, variants in (
        ("Whole step (forward, backward, optimizer, zero_grad)", WHOLE_STEP),
        ("Forward and backward, every block recomputed", RECOMPUTE),
        ("Forward and backward, all but matrix products recomputed", SELECTIVE),
    ):
        for subject in subjects:
            seconds = measure(subject, variants, options)
            base, *_ = seconds
            lines = []
            for name, values in seconds.items():
                paired = [ours / theirs for ours, theirs in zip(values, seconds[base], strict=True)]
                center, low, high = middle(paired)
                ratios = spread(paired) | {"low": low, "high": high}
                rows.append(
                    {"part": title, "subject": subject.name, "variant": name, "against": base}
                    | {"seconds": spread(values), "ratio": ratios, "n": len(values)}
                )
                ratio = f"{center:.3f}, {low:.3f} to {high:.3f} ({ratios['min']:.2f} to {ratios['max']:.2f})"
                least = min(values) / min(seconds[base])
                lines.append([name, f"{median(values) * 1e6:.0f}", f"{min(values) * 1e6:.0f}", ratio, f"{least:.3f}"])
            columns = ["variant", "median us", "min us", f"ratio to {base}", "ratio of minima"]
            texts.append(f"## {title}: {subject.name}\n\n{table(columns, lines)}\n")
    write("overhead", head, rows, "\n".join(texts))


if __name__ == "__main__":
    main()
