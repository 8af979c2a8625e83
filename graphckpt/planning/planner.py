"""Plans a measured step for any budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, final

from torch import nn

from graphckpt.planning import budget as budgets
from graphckpt.planning.errors import GroupError, PlanError
from graphckpt.planning.model.measured_step import MeasuredStep
from graphckpt.planning.option import JOINED
from graphckpt.planning.plan import Plan
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.planning.solve.search import CopyRates, PolicyChoice, PolicySearch, interval_name
from graphckpt.units import format_bytes


@final
class Planner:
    """Plans one measured step for any budget."""

    def __init__(
        self,
        measured: MeasuredStep,
        *,
        model: nn.Module | None = None,
        device: str = "cpu",
        rates: CopyRates | None = None,
        host_budget: int | None = None,
        joins: bool = True,
        notes: Iterable[str] = (),
        extra_rows: tuple[PlanRow, ...] = (),
        compiles: bool | dict[str, Any] | None = None,
        has_slabs: bool = False,
    ) -> None:
        self.measured = measured
        self.search = PolicySearch(measured, rates, host_budget, joins=joins)
        self.plain = self.search.evaluate((0,) * len(measured.names))
        self.model = model
        self.extra_rows = extra_rows
        """The rows of plans for other blocks, active when the step was measured."""
        self.compiled: dict[str, Any] = {} if compiles is None else {"compile": compiles}
        """The fields of all layers beside their options."""
        self._has_slabs = has_slabs
        self._device = device
        self._notes = tuple(notes)
        self._without = " without offloading" if rates is not None else ""

    @cached_property
    def floor(self) -> PolicyChoice:
        """The choice with the lowest peak."""
        return self.search.floor()

    def least(self) -> int:
        """Returns the lowest peak of any plan."""
        return self.floor.peak

    def bytes_of(self, budget: int | str, available: int) -> int:
        """Returns a budget in bytes; ``available`` is the memory of the device."""
        return budgets.budget_bytes(
            budget,
            floor=self.floor.peak if budget == "min" else 0,
            static=self.measured.model.static_bytes,
            plain_peak=self.plain.peak,
            available=available,
        )

    def plan(self, budget: int, correction: int = 0) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        Args:
            budget: of the whole step.
            correction: the measured peak of a step minus the prediction, in bytes.

        Raises:
            PlanError: There is none.
        """
        choice = self.search.fastest(budget - correction)
        if choice is None:
            raise PlanError(self.infeasible(budget, self.floor.peak + correction))
        return self.to_plan(choice, budget, correction)

    def front(self, correction: int = 0) -> list[tuple[int, float, Plan]]:
        """Returns peak in bytes, seconds of a step and plan, for all Pareto-optimal plans, lowest peak first."""
        plans = [self.to_plan(choice, choice.peak + correction, correction) for choice in self.search.pareto()]
        return [(p.predicted_peak_bytes, p.predicted_step_seconds, p) for p in plans]

    def uniform(self) -> list[tuple[str, int, float]]:
        """Returns name, peak in bytes and seconds of a step for each uniform policy."""
        found = ((o, self.to_plan(choice, choice.peak)) for o, choice in self.search.uniform())
        return [(self.measured.options[o].name, p.predicted_peak_bytes, p.predicted_step_seconds) for o, p in found]

    def to_plan(self, choice: PolicyChoice, budget: int, correction: int = 0) -> Plan:
        """Returns a choice as a plan."""
        known, names = self.measured, self.measured.names
        joined = {block for first, end in choice.runs for block in range(first + 1, end)}
        extra = self.search.extra_seconds(choice)
        chosen = [
            JOINED if block in joined else known.options_of[block][option] for block, option in enumerate(choice.plan)
        ]
        rows = tuple(
            PlanRow(
                block=names[block],
                option=f"{chosen[block].name}, compiled" if self.compiled else chosen[block].name,
                fields={**self.compiled, **chosen[block].fields},
                extra_seconds=extra[block],
                moved_bytes=known.far_bytes[block][option],
            )
            for block, option in enumerate(choice.plan)
        )
        if self._has_slabs:
            rows = tuple(map(_with_slab, rows))
        return Plan(
            rows=rows + self.extra_rows,
            predicted_peak_bytes=choice.peak + correction,
            predicted_step_seconds=known.step_seconds + choice.seconds - self.plain.seconds,
            binding=self._name(choice),
            floor_bytes=min(self.floor.peak + max(0, correction), choice.peak + correction),
            budget_bytes=budget,
            plain_peak_bytes=self.plain.peak + correction,
            plain_step_seconds=known.step_seconds,
            correction_bytes=correction,
            device=self._device,
            stages=tuple(
                Stage(
                    name=interval_name(level.interval, names, known.model.block_of_call),
                    start_bytes=level.start,
                    peak_bytes=level.peak,
                )
                for level in self.search.levels(choice.plan, choice.runs)
            ),
            notes=(*known.notes, *self._notes),
            model=self.model,
        )

    def _name(self, choice: PolicyChoice) -> str:
        return interval_name(choice.interval, self.measured.names, self.measured.model.block_of_call)

    def infeasible(self, budget: int, lowest: int) -> str:
        """Returns the message of a budget that no plan fits, and what helps; ``lowest`` is the lowest peak in bytes."""
        where, correction = self._name(self.floor), lowest - self.floor.peak
        static = self.measured.model.static_bytes
        fix = "a smaller batch, or a larger budget"
        container = self._sequential()
        if container is not None and max(static, self.floor.peak - self._input_bytes()) + correction <= budget:
            where_to = repr(container) if container else f"the {type(self.model).__name__}"
            fix = f"segments='log' on {where_to} (less memory, more time), {fix}"
        if "head" in where:
            fix = f"compute the loss in slices (set `head` to its block and `Tiles`), {fix}"
        return (
            f"memory_budget {format_bytes(budget)}: no plan fits · the lowest possible peak is "
            f"{format_bytes(lowest)}{self._without}, set by {where}; "
            f"{format_bytes(static)} of it are weights, optimizer state and inputs · fix: {fix}"
        )

    def _input_bytes(self) -> int:
        """Returns what the blocks hold at the lowest peak, which segments of segments hold in part."""
        model, options = self.measured.model, self.floor.plan
        held = {s for call, block in enumerate(model.block_of_call) for s in model.holds(call, options[block])}
        return sum(model.base.sizes.get(storage, 0) for storage in held)

    def _sequential(self) -> str | None:
        """Returns the name of the ``nn.Sequential`` whose children are planned, if there is one."""
        parent, *others = {name.rpartition(".")[0] for name in self.measured.names}
        if self.model is None or others:
            return None
        return parent if isinstance(self.model.get_submodule(parent), nn.Sequential) else None


def _with_slab(row: PlanRow) -> PlanRow:
    """Returns a row whose layer keeps in a slab what it keeps on the device."""
    if JOINED.fields.items() <= row.fields.items() or "offload" in row.fields:
        return row
    return replace(row, option=f"{row.option} + slab", fields={**row.fields, "contiguous": True})


@final
class Planners:
    """Plans of one step that was measured in several ways: with its loss computed at once, and in slices.

    Args:
        planners: the first one is of the step as it is.
        known: the fields of policies that all processes have.
    """

    def __init__(self, planners: Sequence[Planner], known: Sequence[Mapping[str, Any]] = ()) -> None:
        self._planners = planners
        self.known = known

    @property
    def plain(self) -> Planner:
        """The planner of the step as it is."""
        return self._planners[0]

    def bytes_of(self, budget: int | str, available: int) -> int:
        """Returns a budget in bytes; ``available`` is the memory of the device."""
        if budget == "min":
            return min(planner.least() for planner in self._planners)
        return self.plain.bytes_of(budget, available)

    def plan(self, budget: int) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        Raises:
            PlanError: There is none.
        """
        return self.best_of(lambda planner: planner.plan(budget))

    def best_of(
        self,
        plan_with: Callable[[Planner], Plan],
        *,
        floor_of: Callable[[Planner], int] = Planner.least,
        is_least: bool = False,
    ) -> Plan:
        """Returns the fastest plan of all planners.

        Args:
            plan_with: returns the plan of a planner.
            floor_of: returns the lowest peak of any plan of a planner; called for those without a plan.
            is_least: return the plan with the lowest peak instead.

        Raises:
            PlanError: no planner has a plan; the error is that of the planner with the lowest peak.
        """
        found: list[Plan] = []
        faults: list[tuple[int, PlanError]] = []
        for planner in self._planners:
            try:
                found.append(plan_with(planner))
            except GroupError:
                raise
            except PlanError as fault:
                faults.append((floor_of(planner), fault))
        if not found:
            raise min(faults, key=lambda row: row[0])[1]
        best = min(found, key=lambda plan: plan.predicted_peak_bytes if is_least else plan.predicted_step_seconds)
        return replace(best, front=lambda: [plan for _, _, plan in self.front(max(0, best.correction_bytes))])

    def front(self, correction: int = 0) -> list[tuple[int, float, Plan]]:
        """Returns peak in bytes, seconds of a step and plan, for all Pareto-optimal plans, lowest peak first.

        ``correction`` is the measured peak of a step minus the prediction, in bytes.
        """
        planners = self._planners
        rows = sorted((row for planner in planners for row in planner.front(correction)), key=lambda row: row[:2])
        return [row for number, row in enumerate(rows) if all(row[1] < other[1] for other in rows[:number])]

    def uniform(self) -> list[tuple[str, int, float]]:
        """Returns name, peak in bytes and seconds of a step for each uniform policy, with the loss computed at once."""
        return self.plain.uniform()
