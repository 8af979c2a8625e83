"""A table of levels predicts the peak of any plan: as it is tracked, or off by what stands here.

The figures are also in docs/decisions/025-table-of-levels.md and 027-plans-from-the-table.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.layer_stacks import ResidualLayer
from helpers.levels import Sampled, differences, sampled
from helpers.modules import as_module
from helpers.odd_steps import STEPS, OddChain, Views
from helpers.plans import stepped_once
from helpers.thinning import slow_unless
from torch import Tensor, nn

from graphckpt.planning.candidates import options
from graphckpt.planning.intervals import Interval, LevelSpan, Phase, StepReadings
from graphckpt.planning.levels import LevelTable
from graphckpt.planning.plan_step import find_blocks

SELECTIVE = [{"rule": "selective", "save": ops} for ops in ("attention", "matmul", "matmul+attention")]
FIVE = options(False, ["full", *SELECTIVE])  # fixed ones: which levels a plan finds depends on times
EXACT = 0.0, 0.0

OFF: dict[str, tuple[float, float]] = {
    "cohere": (-0.6, 0.0),
    "fnet": (-0.9, 0.0),
    "gemma2": (0.0, 0.3),
    "gptj": (0.0, 0.6),
    "gpt_oss": (0.0, 0.1),
    "qwen2_moe": (-0.1, 0.0),
    "bert in_autocast": (-0.6, 0.6),
}
"""The lowest and the highest difference, in percent of the peak, rounded outwards; what is not here is exact."""
FAST = {"albert", "gpt2", "gptj", "llama", "mpt", "resnet", "t5"}


def stepped(num_kept: int) -> StepReadings:
    """A step of two blocks that allocate 10 bytes of output each, and under ``keep`` 20 more until their backward."""
    saved = [20 * (call < num_kept) for call in range(2)]
    spans, level = dict[Interval, LevelSpan](), 0
    for call in range(2):
        spans[Interval(Phase.FORWARD, call)] = LevelSpan(level, level + 10 + saved[call], level + 10 + saved[call])
        level += 10 + saved[call]
        spans[Interval(Phase.AFTER_FORWARD, call)] = LevelSpan(level, level, level)
    for call in (1, 0):  # a recomputation allocates more
        spans[Interval(Phase.BACKWARD, call)] = LevelSpan(level, level + 25 - saved[call], level - 10 - saved[call])
        level -= 10 + saved[call]
    return StepReadings([0, 1], spans, {}, 0.0, 0)


def test_an_example_to_read_first() -> None:
    table = LevelTable.of_runs([(stepped(0), [1, 1]), (stepped(2), [0, 0])], 1, [0, 0])
    assert [(level.start, level.peak) for level in table.levels([0, 1])] == [
        (0, 30),  # forward of 0, which is kept
        (30, 30),
        (30, 40),  # forward of 1, which is recomputed
        (40, 40),
        (40, 65),  # backward of 1
        (30, 35),  # backward of 0
    ]
    assert [level.peak for level in table.levels([0, 1])] == [span.peak for span in stepped(1).levels.values()]
    assert [table.peak(plan) for plan in ([1, 1], [0, 1], [0, 0])] == [45, 65, 65]


def within(models: Sampled, name: str) -> None:
    low, high = differences(models)
    least, most = OFF.get(name, EXACT)
    assert least <= low, (name, low, high)
    assert high <= most, (name, low, high)


def of_architecture(
    architecture: Architecture, run: Callable[[Callable[[], Tensor]], Tensor] = lambda loss: loss()
) -> Sampled:
    """Measures a step of an architecture; ``run`` calls the function that computes the loss."""
    model, inputs = architecture.build(), architecture.inputs()
    step, _ = stepped_once(model, lambda model: run(lambda: architecture.loss(model(**inputs))))
    return sampled(model, step, list(architecture.layer_modules(model).items()), FIVE)


BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(name in FAST)) for name in BY_NAME])
def test_architectures(name: str) -> None:
    within(of_architecture(BY_NAME[name]), name)


def in_autocast(loss: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss()


def in_micro_batches(loss: Callable[[], Tensor]) -> Tensor:
    loss().backward()
    return loss()


@pytest.mark.parametrize("run", [in_autocast, in_micro_batches])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=slow_unless(n == "gpt2")) for n in ("gpt2", "llama", "bert", "albert", "t5", "vit")]
)
def test_autocast_and_micro_batches(name: str, run: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    within(of_architecture(BY_NAME[name], run), f"{name} {run.__name__}")


@pytest.mark.parametrize("name", STEPS)
def test_odd_steps(name: str) -> None:
    torch.manual_seed(0)
    model = Views()
    step, _ = STEPS[name](model)
    within(sampled(model, step, find_blocks(model, ResidualLayer), FIVE), name)


@pytest.mark.parametrize("seed", range(6))
def test_chains_of_single_blocks(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = OddChain(seed), torch.randn(160, 8)
    step, _ = stepped_once(model, lambda model: model(x).square().mean())
    within(sampled(model, step, find_blocks(model, "layers.*"), FIVE), f"chain {seed}")


@as_module(lambda: {"project": nn.Linear(16, 16)})
def Attention(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(self.project(x) @ x.T, dim=-1)
    return weights @ x, weights


@as_module(lambda: {"layers": nn.ModuleList(Attention() for _ in range(6))})
def Returning(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x, _weights = layer(x)  # `_weights` lives until the next layer has returned
    return x


def test_a_tensor_that_a_loop_variable_holds_while_the_next_block_runs() -> None:
    model, x = Returning(), torch.randn(64, 16)
    step, _ = stepped_once(model, lambda model: model(x).square().mean())
    models = sampled(model, step, find_blocks(model, Attention), FIVE)
    assert differences(models) == EXACT
    base = models.measured.model.base_option
    plan = [0, 0, base, 0, 0, base]  # what the second and the fifth hold is freed in recomputed layers
    assert models.measured.model.peak(plan) == models.real_peak(plan)
