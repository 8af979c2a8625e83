"""Makes the step of each batch size, on the device of its model or on one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.blocks.select import Selector
from graphckpt.errors import ConfigError
from graphckpt.planning import budget as budgets
from graphckpt.planning.check_plan import plan_and_check
from graphckpt.planning.device.fake_device import FakeDevice
from graphckpt.planning.device.profile import DeviceProfile
from graphckpt.planning.measure.clock import now
from graphckpt.planning.measure.fake_step import FakeStep
from graphckpt.planning.measure.real_step import RealStep, on_optimizer_step
from graphckpt.planning.measure.sweep import MeasurableStep
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.planner import Planners

MakeStep = Callable[[int], tuple[nn.Module, Callable[[], object]]]


_TIMED_RUNS = 2  # of which the fastest counts


@final
@dataclass(frozen=True, slots=True)
class PlanRun:
    """A step that ran under its plan."""

    plan: Plan
    """The plan, corrected if its peak had differed from the prediction."""
    peak_bytes: int
    seconds: float


class SizedStep(Protocol):
    """The step of one batch size."""

    @property
    def measurable(self) -> MeasurableStep:
        """The step to measure."""

    @property
    def model(self) -> nn.Module:
        """The model that it trains."""

    @property
    def blocks(self) -> Sequence[tuple[str, nn.Module]]:
        """The blocks to plan, by name."""

    def restoring(self) -> AbstractContextManager[None]:
        """Restores at the end what runs of the step change."""

    def run(self, planners: Planners, budget: int, correction: int = 0) -> PlanRun | None:
        """Runs the step under its plan; returns ``None`` if that cannot be done.

        Args:
            planners: the planners of this size.
            budget: the largest peak in bytes.
            correction: what the step takes beyond the prediction, in bytes.

        Raises:
            PlanError: the peak exceeds the budget, and no other plan fits.
        """


class StepSource(Protocol):
    """Makes the step of each batch size."""

    @property
    def can_run_any(self) -> bool:
        """Whether steps may need more memory than there is."""

    @property
    def can_accumulate(self) -> bool:
        """Whether a step can accumulate gradients."""

    @property
    def notes(self) -> Sequence[str]:
        """What plans should mention."""

    def step(self, size: int, accumulation: int = 1) -> SizedStep:
        """Returns the step of a batch size."""

    def available_bytes(self, step: SizedStep, static: int) -> int:
        """Returns the memory that a step may use, given what it holds already."""


@final
class RealSteps:
    """Steps on the device of their model.

    Args:
        make_step: returns the model and the step of a batch size.
        selectors: the blocks to plan; ``None`` finds the layers.
    """

    can_run_any = False
    can_accumulate = False
    notes = ()

    def __init__(self, make_step: MakeStep, selectors: Selector | Iterable[Selector] | None = None) -> None:
        self._make_step = make_step
        self._selectors = selectors

    def step(self, size: int, accumulation: int = 1) -> RealSizedStep:
        """Returns the step of a batch size."""
        assert accumulation == 1
        model, step_fn = made_step(self._make_step, size)
        return RealSizedStep(model, step_fn, _blocks(model, self._selectors))

    def available_bytes(self, step: SizedStep, static: int) -> int:
        """Returns the free memory of the device and what the step holds."""
        assert isinstance(step, RealSizedStep)
        return budgets.available_bytes(step.measurable.device, static)


@final
class RealSizedStep:
    """A step on the device of its model."""

    def __init__(
        self, model: nn.Module, step_fn: Callable[[], object], blocks: Sequence[tuple[str, nn.Module]]
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.measurable = RealStep(model, step_fn)
        self._step_fn = step_fn

    def restoring(self) -> AbstractContextManager[None]:
        """Restores parameters, buffers, gradients, optimizers and random state at the end."""
        return self.measurable.restoring()

    def run(self, planners: Planners, budget: int, correction: int = 0) -> PlanRun:
        """Runs the step under its plan, and plans again if the peak differs from the prediction."""
        assert not correction

        def checked(planner: Any) -> Plan:
            step, known = self.measurable, planners.known
            return plan_and_check(planner, self.model, step, budget, group=PlanGroup(), known=known, check=True)

        with self.restoring():
            plan = planners.best_of(checked)
            with plan.apply(self.model):
                return PlanRun(plan, self.measurable.peak(), min(self._seconds() for _ in range(_TIMED_RUNS)))

    def _seconds(self) -> float:
        device = self.measurable.device
        started = now(device)
        self._step_fn()
        return now(device) - started


@final
class FakeSteps:
    """Steps on a device that need not be present; ``make_step`` is called inside of it.

    Args:
        make_step: returns the model and the step of a batch size.
        machine: the profile of the device.
        selectors: the blocks to plan; ``None`` finds the layers.
    """

    can_run_any = True
    can_accumulate = False
    notes = ()

    def __init__(
        self, make_step: MakeStep, machine: DeviceProfile, selectors: Selector | Iterable[Selector] | None = None
    ) -> None:
        self._make_step = make_step
        self._selectors = selectors
        self._device = FakeDevice(machine)

    def step(self, size: int, accumulation: int = 1) -> FakeSizedStep:
        """Returns the step of a batch size."""
        assert accumulation == 1
        optimizers: dict[int, Optimizer] = {}
        with self._device, on_optimizer_step(lambda optimizer: optimizers.update({id(optimizer): optimizer})):
            model, step_fn = made_step(self._make_step, size)
            step_fn()  # creates the state of the optimizers
        fake = FakeStep(self._device, model, step_fn, list(optimizers.values()))
        return FakeSizedStep(fake, model, _blocks(model, self._selectors))

    def available_bytes(self, step: SizedStep, static: int) -> int:
        """Returns the memory of the device."""
        del step, static
        return self._device.machine.memory_bytes


@final
class FakeSizedStep:
    """A step on a device that need not be present."""

    def __init__(self, fake: FakeStep, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self.model = model
        self.blocks = blocks
        self.measurable = fake

    def restoring(self) -> AbstractContextManager[None]:
        """Does nothing: a fake step has no values."""
        return nullcontext()

    def run(self, planners: Planners, budget: int, correction: int = 0) -> PlanRun | None:
        """Runs the step under its plan, unless it offloads, since the copies take memory that traces do not show."""
        plan = planners.best_of(lambda planner: planner.plan(budget, correction=correction))
        if any(row.moved_bytes for row in plan.rows):
            return None
        with plan.apply(self.model):
            return PlanRun(plan, *self.measurable.run())


def made_step(make_step: MakeStep, size: int) -> tuple[nn.Module, Callable[[], object]]:
    """Returns what ``make_step`` returns.

    Raises:
        ConfigError: it is not a model and a step.
    """
    made: Any = make_step(size)
    fix = "def make_step(batch_size): ...; return model, step_fn"
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ConfigError(f"make_step: expected a model and a step function, got {type(made).__name__} · fix: {fix}")
    model, step_fn = made
    if not isinstance(model, torch.nn.Module) or not callable(step_fn):
        kinds = f"{type(model).__name__} and {type(step_fn).__name__}"
        raise ConfigError(f"make_step: expected a model and a step function, got {kinds} · fix: {fix}")
    return model, step_fn


def _blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> Sequence[tuple[str, nn.Module]]:
    from graphckpt.planning.api import find_blocks  # noqa: PLC0415 - imports most of the planner

    return find_blocks(model, selectors)
