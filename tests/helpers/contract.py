"""The contract of every policy: steps under it are the plain ones in every bit, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from fuzz.bench import Bench, differing, run
from fuzz.shapes import SHAPES
from torch import nn

Shape = Callable[[Bench], None]


def seen_in(make_model: Callable[[], nn.Module], rules: dict[Any, Any] | None, steps: Iterable[str | Shape]) -> Any:
    """Returns outputs, gradients, parameters, buffers, attributes and random states of steps of a new model.

    A step is the name of one of the fuzzer's, or a function of what it runs on. Without ``rules`` they are plain ones.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        return make_model()

    return run(make, rules, [(SHAPES[step] if isinstance(step, str) else step, {}) for step in steps])


def assert_same_steps(
    make_model: Callable[[], nn.Module], rules: dict[Any, Any], steps: Iterable[str | Shape] = ("plain",) * 3
) -> None:
    steps = list(steps)
    assert differing(seen_in(make_model, rules, steps), seen_in(make_model, None, steps)) == []
