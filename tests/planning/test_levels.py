"""A table of levels predicts the peak of any plan: as the memory model does, or off by what stands here.

The figures are also in docs/decisions/025-table-of-levels.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.layer_stacks import Layer
from helpers.levels import TwoModels, differences, differences_of_joined, mixed_plans, two_models
from helpers.odd_steps import STEPS, OddChain, Views
from helpers.plans import stepped_once
from helpers.thinning import slow_unless
from torch import Tensor

from graphckpt.planning.candidates import options
from graphckpt.planning.levels import LevelTable, level_log
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.program import (
    BlockCall,
    EventKind,
    Interval,
    Phase,
    StepLog,
    StorageEvent,
    TraceLog,
    TraceSpan,
)

SELECTIVE = [{"rule": "selective", "save": ops} for ops in ("attention", "matmul", "matmul+attention")]
FIVE = options(False, ["full", *SELECTIVE])  # fixed ones: which levels a plan finds depends on times
EXACT = 0.0, 0.0

OFF: dict[str, tuple[float, float]] = {
    "bloom": (0.0, 0.3),
    "cohere": (0.0, 0.6),
    "fnet": (0.0, 1.3),
    "gemma2": (0.0, 0.2),
    "gpt_neo": (0.0, 1.0),
    "gpt_oss": (0.0, 0.1),
    "gptj": (0.0, 1.6),
    "modernbert": (0.0, 0.1),
    "mpt": (-0.7, 0.0),
    "resnet": (-0.4, 0.0),
    "whisper": (0.0, 0.7),
    "bert in_autocast": (0.0, 0.6),
    "t5 in_autocast": (-1.6, 0.2),
    "t5 in_micro_batches": (0.0, 0.8),
    "vit in_autocast": (0.0, 0.4),
    "chain 0": (0.0, 9.5),
    "chain 2": (0.0, 3.0),
    "chain 4": (0.0, 20.6),
    "chain 5": (0.0, 12.5),
}
"""The lowest and the highest difference, in percent of the peak, rounded outwards; what is not here is exact."""
JOINED_OFF: dict[str, tuple[float, float]] = {
    "bloom": (-0.6, 0.5),
    "cohere": (-0.2, 0.6),
    "fnet": (-0.9, 0.9),
    "gemma2": (0.0, 0.2),
    "gpt_neo": (-0.4, 1.0),
    "gpt_oss": (0.0, 0.1),
    "gptj": (-0.8, 0.8),
    "mpt": (-0.7, 0.0),
    "recurrent_gemma": (-0.1, 0.0),
    "resnet": (-0.6, 0.0),
    "swin": (-0.4, 0.0),
    "whisper": (-0.9, 0.0),
    "bert in_autocast": (-0.6, 0.6),
    "t5 in_autocast": (-1.6, 0.2),
    "t5 in_micro_batches": (0.0, 0.8),
    "chain 0": (-5.4, 7.1),
    "chain 1": (-0.7, 0.0),
    "chain 2": (-0.1, 2.9),
    "chain 3": (-0.3, 0.0),
    "chain 4": (-0.2, 0.0),
    "chain 5": (-0.6, 0.0),
}
"""The same for plans in which runs of blocks are recomputed as one."""

FAST = {"albert", "gpt2", "gptj", "llama", "mpt", "resnet", "t5"}


def traced(num_kept: int) -> StepLog:
    """A step of two blocks that allocate 10 bytes of output each, and under ``keep`` 20 more until their backward."""
    saved = [20 * (call < num_kept) for call in range(2)]
    of_phase = {
        Phase.FORWARD: lambda call: [(EventKind.BORN, call, 10), (EventKind.BORN, 2 + call, saved[call])],
        Phase.BACKWARD: lambda call: [
            (EventKind.BORN, 4 + call, 25 - saved[call]),  # a recomputation allocates more
            *((EventKind.GONE, 4 + call, 25 - saved[call]), (EventKind.GONE, 2 + call, saved[call])),
            (EventKind.GONE, call, 10),
        ],
        Phase.AFTER_FORWARD: lambda call: [],
    }
    order = [(phase, call) for call in range(2) for phase in (Phase.FORWARD, Phase.AFTER_FORWARD)]
    order += [(Phase.BACKWARD, 1), (Phase.BACKWARD, 0)]
    spans = [
        TraceSpan(Interval(phase, call), [StorageEvent(*event, op=0) for event in of_phase[phase](call)])
        for phase, call in order
    ]
    return StepLog(TraceLog(spans, [BlockCall(0), BlockCall(1)]))


def test_an_example_to_read_first() -> None:
    table = LevelTable(traced(0), 1, [0, 0], [(traced(2), [0, 0])])
    assert [(level.start, level.peak) for level in table.levels([0, 1])] == [
        (0, 30),  # forward of 0, which is kept
        (30, 30),
        (30, 40),  # forward of 1, which is recomputed
        (40, 40),
        (40, 65),  # backward of 1
        (30, 35),  # backward of 0
    ]
    assert [level.peak for level in table.levels([0, 1])] == [span.peak for span in level_log(traced(1)).values()]
    assert [table.peak(plan) for plan in ([1, 1], [0, 1], [0, 0])] == [45, 65, 65]


def within(models: TwoModels, name: str) -> None:
    for bounds, (low, high) in ((OFF, differences(models)), (JOINED_OFF, differences_of_joined(models))):
        least, most = bounds.get(name, EXACT)
        assert least <= low, (name, low, high)
        assert high <= most, (name, low, high)


def of_architecture(
    architecture: Architecture, run: Callable[[Callable[[], Tensor]], Tensor] = lambda loss: loss()
) -> TwoModels:
    """Measures a step of an architecture; ``run`` calls the function that computes the loss."""
    model, inputs = architecture.build(), architecture.inputs()
    step, _ = stepped_once(model, lambda model: run(lambda: architecture.loss(model(**inputs))))
    return two_models(model, step, list(architecture.layer_modules(model).items()), FIVE)


BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(name in FAST)) for name in BY_NAME])
def test_architectures(name: str) -> None:
    within(of_architecture(BY_NAME[name]), name)


def in_autocast(loss: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss()


def in_micro_batches(loss: Callable[[], Tensor]) -> Tensor:
    for _ in range(2):
        loss().backward()
    return loss()


@pytest.mark.parametrize("run", [in_autocast, in_micro_batches])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=slow_unless(n == "gpt2")) for n in ("gpt2", "llama", "bert", "albert", "t5", "vit")]
)
def test_autocast_and_micro_batches(name: str, run: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    within(of_architecture(BY_NAME[name], run), f"{name} {run.__name__}")


def test_a_run_decides_where_the_memory_model_is_an_estimate() -> None:
    """ResNet under autocast: the memory model is up to 9 % high, and says so in its notes."""
    models = of_architecture(BY_NAME["resnet"], in_autocast)
    assert models.measured.notes
    for plan in mixed_plans(models.measured, 3):
        chosen = [own[option] for own, option in zip(models.measured.options_of, plan, strict=True)]
        real = models.step.sample(models.blocks, chosen).peak_bytes
        assert 0.995 * real <= models.table.peak(plan) <= real, plan


@pytest.mark.parametrize("name", STEPS)
def test_odd_steps(name: str) -> None:
    torch.manual_seed(0)
    model = Views()
    step, _ = STEPS[name](model)
    within(two_models(model, step, find_blocks(model, Layer), FIVE), name)


@pytest.mark.parametrize("seed", range(6))
def test_chains_of_single_blocks(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = OddChain(seed), torch.randn(160, 8)
    step, _ = stepped_once(model, lambda model: model(x).square().mean())
    within(two_models(model, step, find_blocks(model, "layers.*"), FIVE), f"chain {seed}")
