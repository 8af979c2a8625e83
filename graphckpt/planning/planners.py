"""Plans of one step that was measured in several ways: with its loss computed at once, and in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from graphckpt.planning.measure import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphckpt.planning.budget import Budget
    from graphckpt.planning.plan import Plan
    from graphckpt.planning.planner import Planner


@final
class Planners:
    """Answers as a :class:`Planner` does, with the best that any of several says.

    Args:
        planners: the first one is of the step as it is.
    """

    def __init__(self, planners: Sequence[Planner]) -> None:
        self._planners = planners

    def bytes_of(self, budget: Budget, available: int) -> int:
        """Returns a budget in bytes; ``available`` are those of the device."""
        if budget == "min":
            return min(planner.least() for planner in self._planners)
        return self._planners[0].bytes_of(budget, available)

    def plan(self, budget: int) -> Plan:
        """Returns the fastest plan whose peak is at most ``budget`` bytes.

        Raises:
            PlanError: There is none.
        """
        found: list[Plan] = []
        faults: list[tuple[int, PlanError]] = []
        for planner in self._planners:
            try:
                found.append(planner.plan(budget))
            except PlanError as fault:
                faults.append((planner.least(), fault))
        if not found:
            raise min(faults, key=lambda row: row[0])[1]
        return min(found, key=lambda plan: plan.predicted_step_seconds)

    def front(self) -> list[tuple[int, float, Plan]]:
        """Returns peaks in bytes, seconds of a step and plans, of which none is better in both, lowest peak first."""
        rows = sorted((row for planner in self._planners for row in planner.front()), key=lambda row: row[:2])
        return [row for number, row in enumerate(rows) if all(row[1] < other[1] for other in rows[:number])]

    def uniform(self) -> list[tuple[str, int, float]]:
        """Returns name, peak and seconds of a step in which all blocks have the same policy, and the loss is whole."""
        return self._planners[0].uniform()
