"""Searches for a fast plan whose blocks copy bytes to host memory and back while others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from graphckpt.errors import ConfigError
from graphckpt.planning.solve.chain import Chain, ChainPlan, peak
from graphckpt.planning.solve.copy_schedule import CopyTiming, schedule_copies
from graphckpt.planning.solve.frontier import Frontier
from graphckpt.planning.solve.offload_chain import CachedChain, OffloadChain

_BLOCKS_PER_SECOND = 20_000  # that are evaluated, over all plans, for each second of a search
_LABELS = 512  # fewer than usual, as there are many states


@final
@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What :func:`search_offload` has found."""

    plan: ChainPlan
    seconds: float
    """Seconds with all waiting."""
    peak: int
    """Bytes, with those of copies in flight."""


def search_offload(
    chain: Chain, timing: CopyTiming, budget: int, plan: Sequence[int] | None = None, limit_seconds: float = 1.0
) -> OffloadPlan | None:
    """Searches for a fast plan whose peak, with copies in flight, fits; ``None`` if there is none.

    The result is never slower than ``plan``, if that fits, and never over the budget: :func:`schedule_copies` and
    :func:`~graphckpt.planning.solve.chain.peak` evaluate every candidate. Candidates come from the dynamic programme
    over :class:`~graphckpt.planning.solve.offload_chain.OffloadChain`, and from changes of one block and swaps of near
    ones.

    The same input gives the same plan: the effort is counted in trials.

    Args:
        chain: The step; offloaded bytes are not in ``kept``, but in ``backward_peak``.
        timing: The seconds and offloaded bytes of options.
        budget: The bound on the peak, in bytes.
        plan: A first candidate.
        limit_seconds: About how long the search around the best candidate takes.
    """
    known = CachedChain(chain)
    judge = _Evaluator(known, timing, budget)
    starts: list[ChainPlan] = [] if plan is None else [tuple(plan)]
    quantum = min((second for row in timing.forward_seconds for second in row), default=0.0) / 2
    for moves in (False, True):
        with suppress(ConfigError):  # blocks that run several times may have no option but one that offloads
            found = Frontier(OffloadChain(known, timing, moves=moves, quantum=quantum), _LABELS).fastest(budget)
            starts += [] if found is None else [found]
    if starts:
        trials = int(limit_seconds * _BLOCKS_PER_SECOND / max(1, chain.num_blocks))
        over, total, highest, best = judge(_search(min(starts, key=judge), chain, judge, trials))
        if over == 0:
            return OffloadPlan(best, total, highest)
    return None


_Verdict = tuple[int, float, int, ChainPlan]


@final
class _Evaluator:
    """Returns bytes over the budget, seconds, peak, and the plan, so that the smallest is the best."""

    def __init__(self, chain: Chain, timing: CopyTiming, budget: int) -> None:
        self._chain = chain
        self._timing = timing
        self._budget = budget
        self._seen: dict[ChainPlan, _Verdict] = {}

    def __call__(self, plan: ChainPlan) -> _Verdict:
        verdict = self._seen.get(plan)
        if verdict is None:
            times = schedule_copies(self._timing, plan)
            try:
                highest = peak(self._chain, plan, times.in_flight)
            except ConfigError:  # an option is not allowed after those before it
                highest = 2 * self._budget + 2**62
            verdict = self._seen[plan] = (max(0, highest - self._budget), times.seconds, highest, plan)
        return verdict


def _search(start: ChainPlan, chain: Chain, judge: Callable[[ChainPlan], _Verdict], trials: int) -> ChainPlan:
    """Moves to the first better neighbour, until there is none, or the trials are spent."""
    best = judge(start)
    while True:
        for candidate in _neighbours(best[3], chain):
            trials -= 1
            if trials < 0:
                return best[3]
            verdict = judge(candidate)
            if verdict < best:
                best = verdict
                break
        else:
            return best[3]


def _neighbours(plan: ChainPlan, chain: Chain) -> Iterator[ChainPlan]:
    for distance in (1, 2, 3):
        for block in range(len(plan) - distance):
            one, other = plan[block], plan[block + distance]
            if one != other and max(one, other) < min(len(chain.options(b)) for b in (block, block + distance)):
                yield (*plan[:block], other, *plan[block + 1 : block + distance], one, *plan[block + distance + 1 :])
    for block in range(len(plan)):
        for option in range(len(chain.options(block))):
            if option != plan[block]:
                yield (*plan[:block], option, *plan[block + 1 :])
