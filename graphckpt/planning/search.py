"""Searches for the fastest policies of a measured step within a budget in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import permutations, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from graphckpt.errors import ConfigError
from graphckpt.extras import LazyPackage
from graphckpt.planning.frontier import Chain, ChainPlan, Frontier, peak
from graphckpt.planning.intervals import Interval, LevelLog, Phase
from graphckpt.planning.levels import KEEP_NUMBER, IntervalLevel, Runs
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.step_chain import JoinedRuns, StepChain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = LazyPackage("numpy", "plan")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTiming:
    """The seconds and offloaded bytes of options; the first index is the block, the second the option.

    Note [The window counts blocks that offload]: a host store frees a block's tensors when the next block that offloads
    ends its forward, and prefetches the previous block *that offloads* in backward. Blocks between them, which offload
    nothing, trigger neither, and the bytes stay on the device while they run.
    """

    forward_seconds: Sequence[Sequence[float]]
    """Seconds of the block's forward."""
    backward_seconds: Sequence[Sequence[float]]
    """Seconds of the block's backward, with the recomputation, without waiting."""
    moved_bytes: Sequence[Sequence[int]]
    """Bytes that are offloaded; 0 if the option offloads nothing."""
    out_rate: float
    """Bytes per second to the host, during a computation."""
    back_rate: float
    """Bytes per second from the host."""


@final
@dataclass(frozen=True, slots=True)
class CopySchedule:
    forward_ends: tuple[float, ...]
    backward_ends: tuple[float, ...]
    out_ends: dict[int, float]
    """The ends of the copies to the host, by block."""
    back_ends: dict[int, float]
    """The ends of the copies back. The last block that offloads has none: its bytes are still on the device."""
    in_flight: tuple[int, ...]
    """Bytes that other blocks hold on the device, in the order of :func:`~graphckpt.planning.frontier.levels`. Those of
    the last forward count what is held after it too."""
    seconds: float


def schedule_copies(timing: CopyTiming, plan: Sequence[int]) -> CopySchedule:
    """Returns the times of a plan with one copy engine in each direction.

    ::

        compute  F0 |F1 |F2 .. wait |F3 |head |B3 |B2 .. wait |B1 |B0      F3 waits until block 1 has been copied
        out         |o0 |o1      |o2 |                                     r1 begins when B2 would begin
        back                                  |r2     |r1     |r0

    A copy to the host begins when the block's forward and the copy before it have ended. After its forward, a block
    that offloads waits for the copy of the previous one, see Note [The window counts blocks that offload]. When
    backward reaches a block that offloads, it loads that block, unless it was prefetched, and prefetches the one before
    it.
    """
    num_blocks = len(plan)
    sizes = [timing.moved_bytes[block][option] for block, option in enumerate(plan)]
    moving = [block for block in range(num_blocks) if sizes[block] > 0]
    now = engine = 0.0
    forward_ends, out_ends, in_flight, done = [], {}, [], 0
    # `done` counts the blocks in `moving` whose forward is over; in backward those whose backward has not begun.
    for block, option in enumerate(plan):
        in_flight.append(sizes[moving[done - 1]] if done else 0)
        now += timing.forward_seconds[block][option]
        forward_ends.append(now)
        if sizes[block] > 0:
            out_ends[block] = engine = max(engine, now) + sizes[block] / timing.out_rate
            done += 1
            if done > 1:
                now = max(now, out_ends[moving[done - 2]])
    on_device = set(moving[-1:])  # of blocks whose backward is to come
    in_flight[-1:] = [max(in_flight[-1], *(sizes[other] for other in on_device))] if on_device else in_flight[-1:]
    backward_ends, back_ends, engine = [0.0] * num_blocks, {}, 0.0
    for block in reversed(range(num_blocks)):
        if sizes[block] > 0:
            done -= 1
            for other in reversed(moving[max(0, done - 1) : done + 1]):
                if other not in on_device:
                    on_device.add(other)
                    back_ends[other] = engine = max(engine, now) + sizes[other] / timing.back_rate
            on_device.remove(block)
            now = max(now, back_ends.get(block, now))
        in_flight.append(sum(sizes[other] for other in on_device))
        now += timing.backward_seconds[block][plan[block]]
        backward_ends[block] = now
    return CopySchedule(tuple(forward_ends), tuple(backward_ends), out_ends, back_ends, tuple(in_flight), now)


_BLOCKS_PER_SECOND = 20_000  # that are evaluated, over all plans, for each second of a search


class OffloadPlan(NamedTuple):
    bytes_over_budget: int
    seconds: float
    """Seconds with all waiting."""
    peak: int
    """Bytes, with those of copies in flight."""
    plan: ChainPlan


def search_offload(
    chain: Chain, timing: CopyTiming, budget: int, plan: Sequence[int] | None = None, limit_seconds: float = 1.0
) -> OffloadPlan | None:
    """Searches for a fast plan whose peak, with copies in flight, fits; ``None`` if there is none.

    The result is never slower than ``plan``, if that fits, and never over the budget: :func:`schedule_copies` and
    :func:`~graphckpt.planning.frontier.peak` evaluate every candidate. The best one of ``plan``, the uniform plans, and
    those that a frontier finds where copies take no time, each with one option for its first blocks, is improved by
    swaps of near blocks and changes of one, as long as one helps.

    The same input gives the same plan: the effort is counted in trials.

    Args:
        chain: The step; offloaded bytes are not retained, but are in ``backward_peak``.
        timing: The seconds and offloaded bytes of options.
        budget: The bound on the peak, in bytes.
        plan: A first candidate.
        limit_seconds: About how long the search around the best candidate takes.
    """

    @cache
    def judge(candidate: ChainPlan) -> OffloadPlan:
        times = schedule_copies(timing, candidate)
        try:
            highest = peak(chain, candidate, times.in_flight)
        except ConfigError:  # an option is not allowed
            highest = 2 * budget + 2**62
        return OffloadPlan(max(0, highest - budget), times.seconds, highest, candidate)

    starts: list[ChainPlan] = [] if plan is None else [tuple(plan)]
    num_blocks, options = chain.num_blocks, range(len(timing.moved_bytes[0]))
    ends = sorted({n * num_blocks // _CUTS for n in range(1, _CUTS + 1)} - {0})
    frontier = Frontier(chain)
    in_flight = max((size for row in timing.moved_bytes for size in row), default=0)
    starts += [fast for less in (0, in_flight) if (fast := frontier.fastest(budget - less)) is not None]
    # One block that offloads alone saves nothing: its bytes are on the device until the next one that does has run.
    rests = [*starts, *((option,) * num_blocks for option in options)]
    starts += [(option,) * end + rest[end:] for option in options for end in ends for rest in rests]
    best = min(map(judge, starts))
    trials = int(limit_seconds * _BLOCKS_PER_SECOND / max(1, chain.num_blocks))
    candidates = _neighbours(best.plan, chain)
    for _ in range(trials):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if judge(candidate) < best:
            best = judge(candidate)
            candidates = _neighbours(best.plan, chain)
    return best if best.bytes_over_budget == 0 else None


def _neighbours(plan: ChainPlan, chain: Chain) -> Iterator[ChainPlan]:
    # Measured on 24 plans: without these changes one is 0.4 % slower; without the dynamic programme four are, by up to
    # 3.8 %.
    for distance in (1, 2, 3):
        for block in range(len(plan) - distance):
            one, other = plan[block], plan[block + distance]
            if one != other and max(one, other) < min(len(chain.options(b)) for b in (block, block + distance)):
                yield (*plan[:block], other, *plan[block + 1 : block + distance], one, *plan[block + distance + 1 :])
    for block in range(len(plan)):
        for option in range(len(chain.options(block))):
            if option != plan[block]:
                yield (*plan[:block], option, *plan[block + 1 :])


_CUTS = 16  # positions at which one option may end and another begin
_BUDGETS_WITH_COPIES = 12  # each search takes about a second
_CLOSE = 0.003  # of what the plain plan saves, by which one near to it may seem too large
_MOST_NEAR = 3  # runs to which plans may be near
_ATTEMPTS = 6  # a step whose backward takes another order than its forward needs more than one


class CopyRates(NamedTuple):
    out: float
    back: float


PolicyKey: TypeAlias = "tuple[tuple[int, ...], Runs]"


@final
@dataclass(frozen=True, slots=True)
class PolicyChoice:
    plan: tuple[int, ...]
    peak: int
    seconds: float
    """Seconds of all blocks, with the time that the step waits for copies."""
    runs: Runs = ()
    """Joined blocks; in ``plan`` each of them is recomputed."""

    @property
    def key(self) -> PolicyKey:
        """What it sets, without what is predicted for it."""
        return self.plan, self.runs


_Fronts: TypeAlias = "list[tuple[StepChain, Frontier]]"
"""The Pareto-optimal plans of each pass of a step."""


@final
class PolicySearch:
    """The fastest policies of a measured step, for any budget. The table of levels judges each choice.

    Without ``rates`` the frontiers of the chains have the choice for every budget. With them copies are scheduled,
    which these chains cannot express: then no plan of a frontier offloads, and :func:`search_offload` looks for one
    that does, for each budget anew.

    Each run of the step under a choice changes what is predicted for the others: see :meth:`add_run`.
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
        self.joined_runs = JoinedRuns(measured, joins=joins)
        self.rates = rates
        self._host_budget = host_budget
        offloading = [number for number, option in enumerate(measured.options) if option.is_far]
        self._offloading = frozenset(product(range(len(measured.names)), offloading))
        """Blocks and options that offload, to ban where nothing should be offloaded."""
        block_of_call = measured.model.block_of_call
        self._passes: list[Sequence[int]] = []
        """The calls of each pass that has no block of a later one, from the last pass on: each is a chain."""
        covered: list[int] = []
        for calls in reversed(measured.model.calls.passes):
            blocks = [block_of_call[call] for call in calls]
            if set(covered).isdisjoint(blocks):
                self._passes.append(calls)
                covered += blocks
        self._blocks = [block_of_call[call] for call in self._passes[0]]
        """In the order of the last chain."""
        self._repeated = [block for block, count in Counter(covered).items() if count > 1]
        self._has_others = len(self._repeated) > 1 or not set(covered).issuperset(block_of_call)
        """Whether blocks have options that no chain gives them."""
        self._fronts: dict[tuple[frozenset[tuple[int, int]], bytes], list[_Fronts]] = {}
        self._ran: dict[PolicyKey, None] = {(plan, ()): None for plan in measured.runs}
        """The choices under which the step has run."""

    def add_run(self, choice: PolicyChoice, peak: int, levels: LevelLog) -> None:
        """Adds the levels of a run of the step under a choice, as it was predicted.

        Its peak counts as ``peak`` bytes, also where the levels are lower: copies that are in flight are at other
        places in each run.
        """
        table, gathered = self.measured.model, self._gathered_bytes(choice.plan)
        rows = [
            row if span is None else IntervalLevel(row.interval, span.start, span.peak).raised(-num_bytes)
            for row in table.levels(choice.plan, choice.runs)
            for span, num_bytes in [(levels.get(row.interval), gathered.get(row.interval, 0))]
        ]
        off = peak - max(row.peak + gathered.get(row.interval, 0) for row in rows)
        table.add_run([row.raised(off) for row in rows], *choice.key)
        self._ran[choice.key] = None
        for name in ("floor", "baselines", "ran"):  # the next time anew
            self.__dict__.pop(name, None)

    @cached_property
    def ran(self) -> list[PolicyChoice]:
        """The choices under which the step has run, with the peaks of these runs."""
        return [self.evaluate(*key) for key in self._ran]

    def fronts(
        self, banned: frozenset[tuple[int, int]] = frozenset(), rest: NDArray[np.int64] | None = None
    ) -> list[_Fronts]:
        """Returns the Pareto-optimal plans of each pass, for each option of blocks that run several times.

        These have one option. Where copies are scheduled, no plan of a front offloads. ``rest`` is what is added to the
        peaks, by interval; by default what runs near to the plan with everything kept were off by.
        """
        banned = banned if self.rates is None else self._offloading
        if rest is None:
            rest = self.measured.model.beyond([KEEP_NUMBER] * len(self.measured.names))
        key = banned, rest.tobytes()
        if key not in self._fronts:
            by_interval = dict(zip(self.measured.model.calls.base, rest.tolist(), strict=True))
            alternatives = self._chains(banned, self.joined_runs, by_interval)
            self._fronts[key] = [[(chain, Frontier(chain)) for chain in chains] for chains in alternatives]
        return self._fronts[key]

    @cached_property
    def baselines(self) -> list[PolicyChoice]:
        """Choices without scheduled copies that chains may miss: those that have run, and one option for all blocks.

        If chains do not give blocks all mixes of options, two options are combined too: one for the first blocks.
        """
        options = [n for n, option in enumerate(self.measured.options) if self.rates is None or not option.is_far]
        num_blocks = len(self.measured.names)
        plans = [(option,) * num_blocks for option in options]
        if self._has_others:
            ends = sorted({n * num_blocks // _CUTS for n in range(1, _CUTS)} - {0})
            plans += [(a,) * end + (b,) * (num_blocks - end) for a, b in permutations(options, 2) for end in ends]
        return [*self.ran, *(self.evaluate(plan) for plan in plans)]

    @cached_property
    def floor(self) -> PolicyChoice:
        choices = list(self.baselines)
        for number, front in enumerate(self.fronts()):
            for _ in range(2):  # the second one counts in what runs near to the first were off by
                choices.append(self._evaluate([(chain, f.least_peak()) for chain, f in front]))
                rest = self.measured.model.beyond(choices[-1].plan, choices[-1].runs)
                front = self.fronts(rest=rest)[number]  # noqa: PLW2901
        return min(choices, key=lambda choice: (choice.peak, choice.seconds, choice.plan))

    def fastest(self, budget: int) -> PolicyChoice | None:
        """Returns the fastest choice whose peak is at most ``budget`` bytes, and whose copies fit on the host."""
        banned: frozenset[tuple[int, int]] = frozenset()
        while (choice := self._fastest(budget, banned)) is not None and self._host_budget is not None:
            moved = [self.measured.far_bytes[block][option] for block, option in enumerate(choice.plan)]
            if sum(moved) <= self._host_budget:
                break
            # Greedy, and the same on all processes: each round is a search, and bans all offloads of one block.
            largest = max(range(len(moved)), key=lambda block: (moved[block], block))
            banned |= {pair for pair in self._offloading if pair[0] == largest}
        return choice

    def _fastest(self, budget: int, banned: frozenset[tuple[int, int]]) -> PolicyChoice | None:
        fitting = self._fitting(banned, budget)
        fitting += [
            c for c in (self.floor, *self.baselines) if c.peak <= budget and banned.isdisjoint(enumerate(c.plan))
        ]
        best = min(fitting, key=_better, default=None)
        moved = None if self.rates is None else self._with_copies(budget, best, banned)
        return min((c for c in (best, moved) if c is not None), key=_better, default=None)

    def pareto(self, count: int = 24) -> list[PolicyChoice]:
        candidates = list(self.baselines)
        for passes_of_step in self.fronts():
            plans = [(chain, frontier.plans(count)) for chain, frontier in passes_of_step]
            candidates += [
                self._evaluate([(chain, each[min(n, len(each) - 1)]) for chain, each in plans])
                for n in range(max(len(each) for _, each in plans))
            ]
        if self.rates is not None and candidates:
            low, high = min(c.peak for c in candidates), max(c.peak for c in candidates)
            count = min(count, _BUDGETS_WITH_COPIES)
            # Offloads may go below the lowest peak without them: from a quarter of the range below it.
            steps = [low - (high - low) // 4 + (high - low) * 5 * n // (4 * count) for n in range(count + 1)]
            candidates += [choice for budget in steps if (choice := self.fastest(budget)) is not None]
        front: list[PolicyChoice] = []
        for choice in sorted(candidates, key=lambda c: (c.peak, c.seconds, c.plan)):
            if not front or choice.seconds < front[-1].seconds:
                front.append(choice)
        return front

    def uniform(self) -> list[PolicyChoice]:
        return [self.evaluate([option] * len(self.measured.names)) for option in range(len(self.measured.options))]

    def evaluate(self, plan: Sequence[int], runs: Runs = ()) -> PolicyChoice:
        plan = self.measured.completed(plan)
        seconds, flight = self._seconds(plan)
        return PolicyChoice(plan, self._peak(plan, runs) + flight, seconds + self.joined_runs.seconds(runs), runs)

    def extra_seconds(self, choice: PolicyChoice) -> list[float]:
        seconds = zip(self.measured.forward_seconds, self.measured.backward_seconds, choice.plan, strict=True)
        extra = [fwd[option] + bwd[option] - fwd[0] - bwd[0] for fwd, bwd, option in seconds]
        for first, end in choice.runs:
            for block in range(first, end - 1):
                extra[block] += self.joined_runs.extra_seconds[block]
        return extra

    def _peak(self, plan: Sequence[int], runs: Runs = ()) -> int:
        return max(level.peak for level in self.levels(plan, runs))

    def levels(self, plan: Sequence[int], runs: Runs) -> Iterator[IntervalLevel]:
        gathered = self._gathered_bytes(plan)
        for level in self.measured.model.levels(plan, runs):
            num_bytes = gathered.get(level.interval, 0)
            yield level._replace(start=level.start + num_bytes, peak=level.peak + num_bytes)

    def _gathered_bytes(self, plan: Sequence[int]) -> Mapping[Interval, int]:
        """Returns the bytes of the all-gathers that begin one block ahead of their use, by interval.

        A step under a plan prefetches the parts of the next block while a block's backward runs::

            backward of   3         2         1      of these 3 and 1 keep parts
            gathered      [ 1's ------------- ]
        """
        model, ahead = self.measured.model, self.measured.ahead_bytes
        gathered: dict[Interval, int] = {}
        waiting: list[Interval] = []
        """The intervals since the backward of the last block that keeps parts."""
        for interval in model.calls.base if ahead else ():
            is_backward = interval.phase is Phase.BACKWARD and interval.call not in model.calls.dropped
            if is_backward and (num_bytes := ahead.get((interval.call, plan[model.block_of_call[interval.call]]))):
                gathered.update(dict.fromkeys(waiting, num_bytes))
                waiting = [interval]
            elif waiting:
                waiting.append(interval)
        return gathered

    def _evaluate(self, parts: Iterable[tuple[StepChain, Sequence[int]]]) -> PolicyChoice:
        """Returns the choice of these choices in chains."""
        plan = [KEEP_NUMBER] * len(self.measured.names)
        runs = tuple(run for chain, choices in parts for run in chain.put(choices, plan))
        return self.evaluate(plan, runs)

    def _fitting(self, banned: frozenset[tuple[int, int]], budget: int) -> list[PolicyChoice]:
        """Returns choices that fit, among them the fastest of each front.

        What runs were off by depends on the plan, and so it is found in turns. A chain assumes that backward visits the
        blocks in reverse order, and no gathers; the table has the real order.
        """
        fitting = []
        for number in range(len(self.fronts(banned))):
            rest, limit = None, budget
            for _ in range(_ATTEMPTS):
                front = self.fronts(banned, rest)[number]
                parts = [(chain, plan) for chain, frontier in front if (plan := frontier.fastest(limit)) is not None]
                if len(parts) < len(front):
                    break
                choice = self._evaluate(parts)
                if choice.peak <= budget:
                    fitting.append(choice)
                after = self.measured.model.beyond(choice.plan, choice.runs)
                higher = after if rest is None else np.maximum(rest, after)
                if rest is not None and np.array_equal(higher, rest):
                    if choice.peak <= budget:
                        break
                    limit -= max(1, choice.peak - budget)
                rest = higher
        return fitting

    def hopeful(self, budget: int) -> PolicyChoice | None:
        """Returns the fastest choice that fits if predictions are a little too high, and that has not run.

        Those of fronts are off by the least of all runs; those near to the plain plan by a share of what that saves.
        """
        choices = []
        for front in self.fronts(rest=self.measured.model.lowest_rest()[:, 1]):
            parts = [(chain, plan) for chain, frontier in front if (plan := frontier.fastest(budget)) is not None]
            if len(parts) == len(front) and (choice := self._evaluate(parts)).key not in self._ran:
                choices.append(choice)
        # No plan of a front is worse than the plain one in bytes and seconds, though a run may have refuted its bytes.
        saved_bytes, plain = self.measured.model.saved_bytes, self.evaluate((KEEP_NUMBER,) * len(self.measured.names))
        limit = budget + int(_CLOSE * saved_bytes(plain.plan))
        most_saved = limit - plain.peak + saved_bytes(plain.plan)
        plans = (plan for plan in self._with_one_change([plain.plan]) if saved_bytes(plan) <= most_saved)
        choices += [choice for choice in map(self.evaluate, plans) if choice.peak <= limit]
        return min(choices, key=_better, default=None)

    def nearest(self, budget: int) -> PolicyChoice | None:
        """Returns the choice that is nearest to fit, of those that differ in one block from the lowest runs."""
        lowest = sorted((c for c in self.ran if not c.runs), key=lambda choice: choice.peak)[:_MOST_NEAR]
        choices = map(self.evaluate, self._with_one_change([choice.plan for choice in lowest]))
        return min(choices, key=lambda choice: (max(choice.peak, budget), *_better(choice)), default=None)

    def _with_one_change(self, plans: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the plans that differ from one of these in one block, and under which no step has run."""
        options = enumerate(self.measured.options)
        numbers = [n for n, option in options if self._host_budget is None or not option.is_far]
        changed = {(*plan[:b], o, *plan[b + 1 :]) for plan in plans for b in range(len(plan)) for o in numbers}
        return [plan for plan in changed if (plan, ()) not in self._ran]

    def _with_copies(
        self, budget: int, best: PolicyChoice | None, banned: frozenset[tuple[int, int]]
    ) -> PolicyChoice | None:
        """Returns the fastest choice with copies that fits on the device."""
        best_moved = None
        for chain, *_ in self._chains(banned):
            # The chain here joins no blocks: it cannot express the runs of `best`, which is compared with the result
            # anyway.
            start = None if best is None or best.runs else [best.plan[block] for block in self._blocks]
            improved = search_offload(chain, self._timing, budget, start)
            if improved is not None and (best_moved is None or improved.seconds < best_moved.seconds):
                plan = [KEEP_NUMBER] * len(self.measured.names)
                chain.put(improved.plan, plan)
                peak = max(improved.peak, self._peak(plan))
                if peak <= budget:
                    best_moved = PolicyChoice(tuple(plan), peak, improved.seconds)
        return best_moved

    def _chains(
        self,
        banned: frozenset[tuple[int, int]],
        joined_runs: JoinedRuns | None = None,
        rest: Mapping[Interval, int] | None = None,
    ) -> list[list[StepChain]]:
        """Returns the chain of each pass, from the last one on, for each option of blocks that run several times."""
        bans = [banned]
        if self._repeated:
            joined_runs, pairs = None, set(product(self._repeated, range(len(self.measured.options))))
            refused = {option for _, option in pairs & (banned | self.measured.banned)}
            options = [option for option in range(len(self.measured.options)) if option not in refused]
            bans = [banned | {pair for pair in pairs if pair[1] != option} for option in options]
        return [[StepChain(self.measured, each, joined_runs, calls, rest) for calls in self._passes] for each in bans]

    @cached_property
    def _timing(self) -> CopyTiming:
        assert self.rates is not None
        measured = self.measured
        return CopyTiming(
            forward_seconds=[measured.forward_seconds[block] for block in self._blocks],
            backward_seconds=[measured.backward_seconds[block] for block in self._blocks],
            moved_bytes=[measured.far_bytes[block] for block in self._blocks],
            out_rate=self.rates.out,
            back_rate=self.rates.back,
        )

    def _seconds(self, plan: Sequence[int]) -> tuple[float, int]:
        """Returns the seconds of all blocks, and the most bytes that copies hold on the device."""
        measured = self.measured
        if self.rates is not None and any(measured.far_bytes[b][o] for b, o in enumerate(plan)):
            times = schedule_copies(self._timing, [plan[block] for block in self._blocks])
            return times.seconds, max(times.in_flight, default=0)
        return sum(measured.forward_seconds[b][o] + measured.backward_seconds[b][o] for b, o in enumerate(plan)), 0


def _better(choice: PolicyChoice) -> tuple[float, int, tuple[int, ...]]:
    return choice.seconds, choice.peak, choice.plan
