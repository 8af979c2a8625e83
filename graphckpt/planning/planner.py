"""From a model, a step and a budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.layers import layers
from graphckpt.blocks.select import select
from graphckpt.errors import ConfigError
from graphckpt.planning import budget as budgets
from graphckpt.planning.below_floor import plan_below_floor
from graphckpt.planning.choose import Choice, Chooser, Rates, described
from graphckpt.planning.joined import JOINED
from graphckpt.planning.measure import Measured, PlanError, measure
from graphckpt.planning.options import options
from graphckpt.planning.plan import Plan, PlanRow, Stage
from graphckpt.planning.real import RealStep
from graphckpt.planning.run import Blocks
from graphckpt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from graphckpt.blocks.select import Selector

Progress = Callable[[int, int], None]
"""Called with the runs of the step that are done, and how many there are."""

_TOLERANCE = 0.01  # a check that is further off than this is taken into account
_MOST_CHECKS = 3  # another plan may run other ops at its peak


def plan(
    model: nn.Module,
    step_fn: Callable[[], object],
    *,
    memory_budget: budgets.Budget,
    offload: bool | str = False,
    host_budget: int | str | None = None,
    blocks: Selector | Iterable[Selector] | None = None,
    rules: Iterable[Any] | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Chooses the policy of each block, so that a step is as fast as it can be within a budget of bytes.

    The step runs a few times under different policies; parameters, buffers, gradients, optimizers and random state
    are put back in the end. What else ``step_fn`` changes, such as a scheduler, stays changed.

    Args:
        model: on the device on which it will train, with no policies on it.
        step_fn: runs forward and backward of ``model`` once, and the optimizer if it is to count.
        memory_budget: the whole peak of the step in bytes, or as ``"12GiB"``; ``"max"`` is what the device has,
            ``"min"`` the least peak possible; a float from above 0 to 1 is a share of the plain step's activations.
        offload: where kept tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``.
        host_budget: the most bytes that may be there at once.
        blocks: selectors of the blocks to decide about; ``None`` finds the model's layers.
        rules: what to consider beside ``keep``, as ``activation_checkpointing`` takes it; ``None`` is all of
            ``full`` and three levels of ``selective``.
        check: run the step under the plan, and plan again if it is over the budget, or more than 1 % off.
        progress: told how many runs are done.

    Raises:
        ConfigError: an argument cannot be read, or the model has no layers that can be found.
        PlanError: no plan fits; the message names the least peak and what sets it.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model, x = nn.Sequential(*layers), torch.ones(512, 64)
    >>> found = plan(model, lambda: model(x).sum().backward(), memory_budget=0.6)
    >>> found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    True
    """
    step = RealStep(model, step_fn)
    return plan_step(
        step,
        model,
        found_blocks(model, blocks),
        step.undone(),
        memory_budget=memory_budget,
        offload=offload,
        host_budget=host_budget,
        rules=rules,
        check=check,
        progress=progress,
    )


def plan_step(
    step: RealStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    undone: AbstractContextManager[None],
    *,
    memory_budget: budgets.Budget,
    offload: bool | str = False,
    host_budget: int | str | None = None,
    rules: Iterable[Any] | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plans a step that can be run; ``undone`` puts back what runs change. See :func:`plan`."""
    budgets.check(memory_budget)
    host_bytes = None if host_budget is None else parse_bytes(host_budget)
    rates = None
    considered = options(offload, rules)
    notes = []
    if any(option.is_far for option in considered):
        rates = _rates_of(step, offload)
        if rates is None:
            considered = options(False, rules)
            notes.append("offload='cpu' does nothing here: the tensors are in host memory already")
    with undone:
        measured = measure(step, Blocks(blocks), considered, progress)
        planner = Planner(
            measured,
            model=model,
            device=str(step.device),
            rates=rates,
            host_budget=host_bytes,
            notes=notes,
        )
        available = budgets.available_bytes(step.device, measured.model.static_bytes)
        limit = planner.bytes_of(memory_budget, available)
        try:
            found = planner.plan(limit)
        except PlanError:
            below = plan_below_floor(step, model, blocks, planner, limit)
            if below is None:
                raise
            return below
        for _ in range(_MOST_CHECKS if check else 0):
            with found.apply():
                off = step.peak() - (found.predicted_peak_bytes - found.correction_bytes)
            surprise = off - found.correction_bytes
            is_over = found.predicted_peak_bytes + surprise > found.budget_bytes
            if not is_over and abs(surprise) <= _TOLERANCE * found.predicted_peak_bytes:
                break
            found = planner.plan(limit if memory_budget != "min" else limit + max(0, off), correction=off)
    return found


@final
class Planner:
    """Plans of one measured step for any budget."""

    def __init__(
        self,
        measured: Measured,
        *,
        model: nn.Module | None = None,
        device: str = "cpu",
        rates: Rates | None = None,
        host_budget: int | None = None,
        joins: bool = True,
        notes: Iterable[str] = (),
    ) -> None:
        self.measured = measured
        self.chooser = Chooser(measured, rates, host_budget, joins=joins)
        self.plain = self.chooser.judged((0,) * len(measured.names))
        self.floor = self.chooser.floor()
        self._model = model
        self._device = device
        self._notes = tuple(notes)
        self._without = " without moving any" if rates is not None else ""

    def bytes_of(self, budget: budgets.Budget, available: int) -> int:
        """Returns a budget in bytes; ``available`` are those of the device."""
        return budgets.in_bytes(
            budget,
            floor=self.floor.peak,
            static=self.measured.model.static_bytes,
            plain_peak=self.plain.peak,
            available=available,
        )

    def plan(self, budget: int, correction: int = 0) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        Args:
            budget: of the whole step.
            correction: how many bytes a real step takes beyond the prediction.

        Raises:
            PlanError: There is none.
        """
        choice = self.chooser.cheapest(budget - correction)
        if choice is None:
            raise PlanError(self._infeasible(budget, correction))
        return self.described(choice, budget, correction)

    def front(self) -> list[tuple[int, float, Plan]]:
        """Returns peaks in bytes, seconds of a step and plans, of which none is better in both, lowest peak first."""
        plans = [self.described(choice, choice.peak) for choice in self.chooser.pareto()]
        return [(p.predicted_peak_bytes, p.predicted_step_seconds, p) for p in plans]

    def uniform(self) -> list[tuple[str, int, float]]:
        """Returns name, peak in bytes and seconds of a step in which all blocks have the same policy."""
        found = ((o, self.described(choice, choice.peak)) for o, choice in self.chooser.uniform())
        return [(self.measured.options[o].name, p.predicted_peak_bytes, p.predicted_step_seconds) for o, p in found]

    def described(self, choice: Choice, budget: int, correction: int = 0) -> Plan:
        """Returns a choice as a plan."""
        known, names = self.measured, self.measured.names
        joined = {block for first, end in choice.runs for block in range(first + 1, end)}
        extra = self.chooser.extra_seconds(choice)
        chosen = [JOINED if block in joined else known.options[option] for block, option in enumerate(choice.plan)]
        rows = tuple(
            PlanRow(
                block=names[block],
                option=chosen[block].name,
                fields=chosen[block].fields,
                extra_seconds=extra[block],
                moved_bytes=known.far_bytes[block][option],
            )
            for block, option in enumerate(choice.plan)
        )
        return Plan(
            rows=rows,
            predicted_peak_bytes=choice.peak + correction,
            predicted_step_seconds=known.step_seconds + choice.seconds - self.plain.seconds,
            binding=self._name(choice),
            floor_bytes=self.floor.peak + correction,
            budget_bytes=budget,
            plain_peak_bytes=self.plain.peak + correction,
            plain_step_seconds=known.step_seconds,
            correction_bytes=correction,
            device=self._device,
            stages=tuple(
                Stage(
                    name=described(level.interval, names, known.model.block_of_call),
                    start_bytes=level.start,
                    peak_bytes=level.peak,
                )
                for level in self.chooser.levels(choice.plan, choice.runs)
            ),
            notes=(*known.notes, *choice.notes, *self._notes),
            model=self._model,
        )

    def _name(self, choice: Choice) -> str:
        return described(choice.interval, self.measured.names, self.measured.model.block_of_call)

    def _infeasible(self, budget: int, correction: int) -> str:
        where = self._name(self.floor)
        static = self.measured.model.static_bytes
        fix = "a smaller batch, or a larger budget"
        if "head" in where:
            fix = f"compute the loss in slices (a block of head and loss with `tiles`), {fix}"
        return (
            f"memory_budget {format_bytes(budget)}: no plan fits · the least possible is "
            f"{format_bytes(self.floor.peak + correction)}{self._without}, set by {where}; "
            f"{format_bytes(static)} of it are weights, optimizer state and inputs · fix: {fix}"
        )


def found_blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> list[tuple[str, nn.Module]]:
    """Returns the blocks to decide about, none inside of another.

    Raises:
        ConfigError: a selector matches nothing, or no layers can be found.
    """
    if selectors is None:
        names = layers(model)
        if not names:
            raise ConfigError(
                f"{type(model).__name__}: no list of layers is in it · fix: blocks='name.of.layers.*', or their class"
            )
    else:
        listed = [selectors] if isinstance(selectors, str) or not isinstance(selectors, Iterable) else list(selectors)
        wanted = {name for selector in listed for name, _ in select(model, selector)}
        order = [name for name, _ in model.named_modules()]
        names = [n for n in order if n in wanted and not any(n != w and n.startswith(f"{w}.") for w in wanted if w)]
    found = [(name, model.get_submodule(name)) for name in names]
    for name, module in found:
        if any(isinstance(part.forward, BlockForward) for part in module.modules()):
            raise ConfigError(f"{name}: it has a policy already · fix: remove() the handle before planning")
    for name, part in model.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"{name or type(model).__name__}: its own gradient checkpointing is on, and would act beside a plan · "
                "fix: model.gradient_checkpointing_disable()"
            )
    return found


def _rates_of(step: RealStep, offload: bool | str) -> Rates | None:
    """Returns how fast the machine copies; ``None`` if offloading has no meaning on it."""
    from graphckpt.planning.profile_device import copy_rates  # noqa: PLC0415 - measures when it is asked

    place = "disk" if str(offload).startswith("disk") else "host"
    if step.device.type == "cpu" and place == "host":
        return None
    return Rates(*copy_rates(step.device, place))
