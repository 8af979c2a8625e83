"""Compares a training with and without policies: peak, seconds of a step, losses and weights. The recipes import it."""

import argparse
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.units import format_bytes, format_seconds


def make_parser(
    description: str | None, *, small_budget: str, full_budget: str | float = 0.5
) -> argparse.ArgumentParser:
    """Returns a parser with the flags of all recipes, given the memory budgets of both sizes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=["small", "full"], default="small", help="small runs on a CPU in seconds, full needs a GPU")
    budgets = f"{small_budget}, {full_budget} with --size full, or max with --predict"
    add("--memory-budget", help=f"peak of a step under a plan, by default {budgets}".replace("%", "%%"))
    parser.set_defaults(budgets={"small": small_budget, "full": full_budget})
    add("--model", metavar="NAME", help="load this model with from_pretrained, in place of random weights")
    add("--steps", type=int, default=4, help="steps of each training: 3 or more, %(default)s by default")
    add(
        "--predict",
        metavar="DEVICE",
        help="train nothing: predict batch sizes for a device such as h100, absent or not",
    )
    add("--deterministic", action="store_true", help="choose deterministic kernels, without which CUDA's losses differ")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the command line, and adds the device on which to build the model."""
    args = parser.parse_args()
    if args.steps < 3:
        parser.error(f"argument --steps: expected 3 or more, got {args.steps}")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to run otherwise
        torch.use_deterministic_algorithms(True)
    args.memory_budget = args.memory_budget or ("max" if args.predict else args.budgets[args.size])
    args.device = "cuda" if args.predict or torch.cuda.is_available() else "cpu"
    return args


class Training(Protocol):
    """A model, its optimizer and a batch; a call is one training step, and returns the loss."""

    model: nn.Module
    optimizer: Optimizer

    def __call__(self) -> Tensor: ...


Policies = Callable[[Training], AbstractContextManager[Any]]
"""Applies policies to the model of a training."""


@dataclass(frozen=True)
class Result:
    """What a training took and computed."""

    name: str
    peak_bytes: int
    step_seconds: float
    losses: tuple[float, ...]
    state_digest: str
    """A hash of all parameters and buffers at the end."""

    def computes_same(self, other: "Result") -> bool:
        """Returns whether losses and state are bitwise equal."""
        return (self.losses, self.state_digest) == (other.losses, other.state_digest)


class StepPeak:
    """Measures the peak of the steps in a ``with`` block: that of CUDA's allocator, or of all tensors on a CPU."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        states = (value for state in optimizer.state.values() for value in state.values())
        self._alive = [*model.parameters(), *model.buffers(), *(value for value in states if torch.is_tensor(value))]
        self._live = LiveBytes(record_timeline=False)
        self.num_bytes = 0

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._live.track(self._alive)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.cuda.is_available():
            self.num_bytes = torch.cuda.max_memory_allocated()
        else:
            self._live.__exit__(*exc)
            self.num_bytes = self._live.peak_bytes


def seconds() -> float:
    """Returns a time at which all kernels have run."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def digest(model: nn.Module) -> str:
    """Returns a hash of the bits of all parameters and buffers."""
    hashed = hashlib.sha256()
    for value in model.state_dict().values():
        hashed.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def train(name: str, make: Callable[[], Training], num_steps: int, policies: Policies | None = None) -> Result:
    """Runs a few steps: one that creates the optimizer's state, one that is measured, and others that are timed."""
    gc.collect()  # the training before
    training = make()
    times, losses = [], []
    with nullcontext() if policies is None else policies(training):
        losses.append(training().item())
        with StepPeak(training.model, training.optimizer) as peak:
            losses.append(training().item())
        for _ in range(num_steps - 2):
            started = seconds()
            losses.append(training().item())
            times.append(seconds() - started)
    return Result(name, peak.num_bytes, min(times), tuple(losses), digest(training.model))


def show(results: Sequence[Result], samples: int) -> None:
    """Prints a row for each training, and whether all computed the same as the first."""
    width = max(len("policy"), *(len(result.name) for result in results))
    print(f"{'policy':{width}}  {'peak':>8}  {'step':>8}  {'samples/s':>9}  last loss")
    print("-" * (width + 42))
    for result in results:
        peak, step = format_bytes(result.peak_bytes), format_seconds(result.step_seconds)
        rate = samples / result.step_seconds
        print(f"{result.name:{width}}  {peak:>8}  {step:>8}  {rate:9.3g}  {result.losses[-1]:9.6f}")
    show_equality((results[0], result) for result in results[1:])


def show_equality(pairs: Iterable[tuple[Result, Result]]) -> None:
    """Prints whether both trainings of each pair computed the same."""
    different = [other.name for first, other in pairs if not other.computes_same(first)]
    if different:
        print(f"losses or weights differ: {', '.join(different)}")
        print("CUDA's default kernels are not deterministic: pass --deterministic")
    else:
        print("losses, weights and buffers: bitwise equal")


def predict(make: Callable[[int], Training], args: argparse.Namespace, **options: Any) -> graphckpt.Fit:
    """Predicts peak and throughput of each batch size for a device that need not be present."""

    def make_step(size: int) -> tuple[nn.Module, Training]:
        training = make(size)
        return training.model, training

    return graphckpt.find_batch_size(make_step, memory_budget=args.memory_budget, device=args.predict, **options)
