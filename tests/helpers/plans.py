"""Steps that are measured and planned as ``graphckpt.plan`` does, with what the planner knows in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.blocks.select import Selector
from graphckpt.planning.candidates import NEAR, Option
from graphckpt.planning.intervals import LevelLog, LevelSpan
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.planner import Planner
from graphckpt.planning.search import PolicySearch
from graphckpt.planning.step_clock import NO_BLOCKS, Blocks
from graphckpt.planning.steps import RealStep, peak_of
from graphckpt.planning.sweep import measure

M = TypeVar("M", bound=nn.Module)
Selectors = Selector | Iterable[Selector] | None


def stepped_once(model: M, loss: Callable[[M], Tensor]) -> tuple[Callable[[], None], list[Optimizer]]:
    """Returns a step that updates a model by AdamW, and its optimizers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        torch.manual_seed(5)
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, [optimizer]


def measured_step(
    model: nn.Module, step: Callable[[], object], blocks: Selectors = None, options: Sequence[Option] = NEAR
) -> MeasuredStep:
    return measure(RealStep(model, step), Blocks(find_blocks(model, blocks)), options)


def planner_of(model: nn.Module, step: Callable[[], object], blocks: Selectors = None) -> Planner:
    return Planner(PolicySearch(measured_step(model, step, blocks)), model=model)


def change_levels(monkeypatch: pytest.MonkeyPatch, change: Callable[[int], int]) -> list[int]:
    """Lets each check of a plan read other levels; returns its peaks."""
    peaks, read = list[int](), RealStep.levels

    def levels(step: RealStep, blocks: Blocks = NO_BLOCKS) -> LevelLog:
        spans = {interval: LevelSpan(*map(change, span)) for interval, span in read(step, blocks).items()}
        peaks.append(peak_of(spans))
        return spans

    monkeypatch.setattr(RealStep, "levels", levels)
    return peaks


def fields_of(measured: MeasuredStep, plan: Sequence[int]) -> dict[str, Any]:
    """Returns the policies of a plan, as ``graphckpt.apply`` takes them."""
    return {name: own[o].fields for name, own, o in zip(measured.names, measured.options_of, plan, strict=True)}
