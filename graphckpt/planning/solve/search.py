"""Searches for the fastest policies of a measured step within a budget in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import final

from graphckpt.planning.model.events import Interval, Phase
from graphckpt.planning.model.joined_runs import JoinedRuns, Runs
from graphckpt.planning.model.memory_model import IntervalLevel, MeasuredStep, with_gathers
from graphckpt.planning.solve.frontier import Frontier
from graphckpt.planning.solve.offload_search import CopyTiming, schedule_copies, search_offload
from graphckpt.planning.solve.step_chain import StepChain

_CUTS = 16  # positions at which one option may end and another begin
_BUDGETS_WITH_COPIES = 12  # each search takes about a second
_ATTEMPTS = 6  # a step whose backward takes another order than its forward needs more than one


@final
@dataclass(frozen=True, slots=True)
class CopyRates:
    """Rates of copies from and to a device, in bytes per second."""

    out: float
    back: float


@final
@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """One option for each block, with its predicted peak and time."""

    plan: tuple[int, ...]
    peak: int
    interval: Interval
    seconds: float
    """Seconds of all blocks, with the time that the step waits for copies."""
    runs: Runs = ()
    """Joined blocks; in ``plan`` each of them is recomputed."""


@final
class PolicySearch:
    """Searches for the fastest policies of a measured step, for any budget.

    Args:
        measured: the step.
        rates: the rates of copies, if options offload tensors.
        host_budget: the most bytes that may be offloaded at a time.
        joins: whether consecutive blocks may be joined.
    """

    def __init__(
        self,
        measured: MeasuredStep,
        rates: CopyRates | None = None,
        host_budget: int | None = None,
        *,
        joins: bool = True,
    ) -> None:
        self.measured = measured
        self.joined_runs = JoinedRuns(measured) if joins else None
        """The events of joined blocks."""
        self._rates = rates
        self._host_budget = host_budget
        self._offloading = frozenset(
            (block, number)
            for number, option in enumerate(measured.options)
            for block in range(len(measured.names))
            if option.is_far
        )
        """Blocks and options that offload, to ban where nothing should be offloaded."""
        self._fronts: list[tuple[StepChain, Frontier]] | None = None
        self._simple: list[PolicyChoice] | None = None
        self._repeated = [block for block, count in Counter(StepChain(measured).blocks).items() if count > 1]

    @property
    def fronts(self) -> list[tuple[StepChain, Frontier]]:
        """The Pareto-optimal plans, for each option of the blocks that run several times, which must be equal."""
        if self._fronts is None:
            banned = self._offloading if self._rates is not None else frozenset()
            self._fronts = [(chain, Frontier(chain)) for chain in self._chains(banned, self.joined_runs)]
        return self._fronts

    @property
    def baselines(self) -> list[PolicyChoice]:
        """Choices without copies that a search in a chain may miss: one option for all blocks, or for the first ones.

        Two options are combined if blocks run several times, since a chain has one option for all of these.
        """
        if self._simple is None:
            options = [o for o in range(len(self.measured.options)) if not self.measured.options[o].is_far]
            num_blocks = len(self.measured.names)
            plans = [(option,) * num_blocks for option in options]
            if len(self._repeated) > 1:
                cuts = sorted({n * num_blocks // _CUTS for n in range(1, _CUTS)} - {0})
                plans += [(a,) * cut + (b,) * (num_blocks - cut) for a, b in permutations(options, 2) for cut in cuts]
            self._simple = [self.evaluate(plan) for plan in plans]
        return self._simple

    def floor(self) -> PolicyChoice:
        """Returns the choice with the lowest peak, without copies."""
        found = [self._evaluate(chain, front.least_peak()[0]) for chain, front in self.fronts]
        return min(found + self.baselines, key=lambda choice: (choice.peak, choice.seconds, choice.plan))

    def fastest(self, budget: int) -> PolicyChoice | None:
        """Returns the fastest choice whose peak is at most ``budget``, or ``None`` if there is none."""
        found = [choice for chain, front in self.fronts if (choice := self._fitting(chain, front, budget)) is not None]
        found += [choice for choice in (self.floor(), *self.baselines) if choice.peak <= budget]
        best = min(found, key=_better, default=None)
        if self._rates is None:
            return best
        moved = self._with_copies(budget, best)
        return min((c for c in (best, moved) if c is not None), key=_better, default=None)

    def pareto(self, most: int = 24) -> list[PolicyChoice]:
        """Returns the choices of which none is better in peak and time, from the lowest peak up."""
        candidates = [self._evaluate(chain, plan) for chain, f in self.fronts for plan in f.plans(most)]
        candidates += self.baselines
        if self._rates is not None and candidates:
            low, high = min(c.peak for c in candidates), max(c.peak for c in candidates)
            most = min(most, _BUDGETS_WITH_COPIES)
            steps = [low - (high - low) // 4 + (high - low) * 5 * n // (4 * most) for n in range(most + 1)]
            candidates += [choice for budget in steps if (choice := self.fastest(budget)) is not None]
        front: list[PolicyChoice] = []
        for choice in sorted(candidates, key=lambda c: (c.peak, c.seconds, c.plan)):
            if not front or choice.seconds < front[-1].seconds:
                front.append(choice)
        return front

    def uniform(self) -> Iterator[tuple[int, PolicyChoice]]:
        """Yields each option, and the choice in which all blocks have it."""
        for option in range(len(self.measured.options)):
            yield option, self.evaluate((option,) * len(self.measured.names))

    def evaluate(self, plan: Sequence[int], runs: Runs = ()) -> PolicyChoice:
        plan = tuple(plan)
        seconds, flight = self._seconds(plan)
        highest = max(self.levels(plan, runs), key=lambda level: level.peak)
        if self.joined_runs is not None:
            seconds += self.joined_runs.seconds(runs)
        return PolicyChoice(plan, highest.peak + flight, highest.interval, seconds, runs=runs)

    def extra_seconds(self, choice: PolicyChoice) -> list[float]:
        """Returns, by block, the extra seconds of its option over ``keep``."""
        known = self.measured
        extra = [
            forward[option] + backward[option] - forward[0] - backward[0]
            for option, forward, backward in zip(
                choice.plan, known.forward_seconds, known.backward_seconds, strict=True
            )
        ]
        for first, end in choice.runs:
            assert self.joined_runs is not None
            for block in range(first, end - 1):
                extra[block] += self.joined_runs.extra_seconds[block]
        return extra

    def levels(self, plan: Sequence[int], runs: Runs) -> Iterator[IntervalLevel]:
        """Yields the levels of a step, interval by interval."""
        joined = {} if self.joined_runs is None else self.joined_runs.steps_of(runs)
        return self.measured.model.levels(plan, with_gathers(self.measured, plan, joined))

    def _evaluate(self, chain: StepChain, choices: Sequence[int]) -> PolicyChoice:
        return self.evaluate(chain.plan(choices), chain.runs(choices))

    def _fitting(self, chain: StepChain, front: Frontier, budget: int) -> PolicyChoice | None:
        """The chain assumes that backward visits the blocks in reverse order; the memory model has the real one."""
        limit = budget
        for _ in range(_ATTEMPTS):
            plan = front.fastest(limit)
            if plan is None:
                return None
            choice = self._evaluate(chain, plan)
            if choice.peak <= budget:
                return choice
            limit -= max(1, choice.peak - budget)
        return None

    def _with_copies(self, budget: int, best: PolicyChoice | None) -> PolicyChoice | None:
        """Returns the fastest choice with copies that fits on the device and on the host."""
        banned: set[tuple[int, int]] = set()
        for _ in range(len(self.measured.names) + 1):
            found = None
            for chain in self._chains(frozenset(banned)):
                timing = self._timing(chain)
                start = None if best is None or best.runs else [best.plan[block] for block in chain.blocks]
                improved = search_offload(chain, timing, budget, start)
                if improved is not None and (found is None or improved.seconds < found.seconds):
                    plan = chain.plan(improved.plan)
                    highest = max(self.levels(plan, ()), key=lambda level: level.peak)
                    peak = max(improved.peak, highest.peak)
                    if peak <= budget:
                        found = PolicyChoice(plan, peak, highest.interval, improved.seconds)
            if found is None or self._host_budget is None:
                return found
            moved = [self.measured.far_bytes[block][option] for block, option in enumerate(found.plan)]
            if sum(moved) <= self._host_budget:
                return found
            largest = max(range(len(moved)), key=lambda block: (moved[block], block))
            banned |= {(b, o) for b, o in self._offloading if b == largest}
        return None

    def _chains(self, banned: frozenset[tuple[int, int]], joined_runs: JoinedRuns | None = None) -> list[StepChain]:
        if not self._repeated:
            return [StepChain(self.measured, banned=banned, joined_runs=joined_runs)]
        allowed = [o for o in range(len(self.measured.options)) if (self._repeated[0], o) not in banned]
        return [StepChain(self.measured, dict.fromkeys(self._repeated, option), banned) for option in allowed]

    def _timing(self, chain: StepChain) -> CopyTiming:
        assert self._rates is not None
        known = self.measured
        return CopyTiming(
            forward_seconds=[known.forward_seconds[block] for block in chain.blocks],
            backward_seconds=[known.backward_seconds[block] for block in chain.blocks],
            moved_bytes=[known.far_bytes[block] for block in chain.blocks],
            out_rate=self._rates.out,
            back_rate=self._rates.back,
        )

    def _seconds(self, plan: Sequence[int]) -> tuple[float, int]:
        """Returns the seconds of all blocks, and the most bytes that copies hold on the device."""
        known = self.measured
        if self._rates is not None and any(known.far_bytes[b][o] for b, o in enumerate(plan)):
            chain = StepChain(known)
            times = schedule_copies(self._timing(chain), [plan[block] for block in chain.blocks])
            return times.seconds, max(times.in_flight, default=0)
        return sum(known.forward_seconds[b][o] + known.backward_seconds[b][o] for b, o in enumerate(plan)), 0


def interval_name(interval: Interval, names: Sequence[str], block_of_call: Sequence[int]) -> str:
    """Returns the name of an interval for tables and messages.

    >>> interval_name(Interval(Phase.BACKWARD, 1), ["h.0", "h.1", "h.2"], [0, 1, 2])
    'backward of h.1'
    >>> interval_name(Interval(Phase.AFTER_FORWARD, 2), ["h.0", "h.1", "h.2"], [0, 1, 2])
    'the head and the loss, after h.2'
    """
    if interval.call < 0 or interval.phase is Phase.OPTIMIZER:
        return interval.phase.value
    name = names[block_of_call[interval.call]]
    if interval.phase is Phase.AFTER_FORWARD and interval.call == len(block_of_call) - 1:
        return f"the head and the loss, after {name}"
    return f"{interval.phase.value} {name}"


def _better(choice: PolicyChoice) -> tuple[float, int, tuple[int, ...]]:
    return choice.seconds, choice.peak, choice.plan
