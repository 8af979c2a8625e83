"""Times a plan whose blocks move bytes to host memory and back beside the computation, and looks for a faster one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from graphckpt.errors import ConfigError
from graphckpt.planning.levels import Chain, Plan, peak
from graphckpt.planning.offload_window import Known, Windowed
from graphckpt.planning.solve import Front

_BLOCKS_PER_SECOND = 20_000  # that are judged, of all plans together, for each second that `improve` is given
_LABELS = 512  # fewer than usual, as there are many states


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the options of each block compute and move; the first index is the block, the second the option.

    Note [The window counts blocks that move]: a host store frees a block's tensors when the next block that moves
    something ends its forward, and prefetches the block *that moves* before it in backward. Blocks between, which move
    nothing, give no signal, and the bytes stay in flight while they run.

    Raises:
        ConfigError: A rate is not above 0.
    """

    forward_seconds: Sequence[Sequence[float]]
    """Of the block's forward alone."""
    backward_seconds: Sequence[Sequence[float]]
    """Of the block's backward, with what is computed again; nothing waits."""
    moved_bytes: Sequence[Sequence[int]]
    """Bytes that go to host memory and come back; 0: the option moves nothing."""
    out_rate: float
    """Bytes per second to the host, measured beside a computation."""
    back_rate: float
    """Bytes per second from the host."""

    def __post_init__(self) -> None:
        if not (self.out_rate > 0 and self.back_rate > 0):
            raise ConfigError(f"rates {self.out_rate}, {self.back_rate}: not above 0 · fix: give bytes per second")


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """When each thing of a plan ends, in seconds from the step's first forward."""

    forward_ends: tuple[float, ...]
    backward_ends: tuple[float, ...]
    out_ends: dict[int, float]
    """Of the copies to the host, by block."""
    back_ends: dict[int, float]
    """Of the copies back. The last blocks that move have none: their bytes are on the device still."""
    in_flight: tuple[int, ...]
    """Bytes that other blocks have on the device, in the order of :func:`~graphckpt.planning.levels.levels`."""
    seconds: float


def schedule(timing: Timing, plan: Sequence[int]) -> Schedule:
    """Returns the times of a plan, with one copy engine in each direction.

    ::

        compute  F0 |F1 |F2 .. wait |F3 |head |B3 |B2 .. wait |B1 |B0      F3 waits until block 1 has been copied
        out         |o0 |o1      |o2 |                                     r1 begins when B2 would begin
        back                                  |r2     |r1     |r0

    A copy to the host begins when the block's forward and the copy before it have ended. After its forward, a block
    that moves waits for the copy of the block that moved before it, see Note [The window counts blocks that move].
    When backward reaches a block that moves, it loads that block, unless it was prefetched, and prefetches the one
    before it.
    """
    num_blocks = len(plan)
    sizes = [timing.moved_bytes[block][option] for block, option in enumerate(plan)]
    moving = [block for block in range(num_blocks) if sizes[block] > 0]
    now = engine = 0.0
    forward_ends, out_ends, in_flight, done = [], {}, [], 0
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
    in_flight.append(sum(sizes[other] for other in on_device))
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
    return Schedule(tuple(forward_ends), tuple(backward_ends), out_ends, back_ends, tuple(in_flight), now)


@final
@dataclass(frozen=True, slots=True)
class Improved:
    """What :func:`improve` has found."""

    plan: Plan
    seconds: float
    """With everything that waits."""
    peak: int
    """In bytes, with what is in flight."""


def improve(
    chain: Chain, timing: Timing, budget: int, plan: Sequence[int] | None = None, limit_seconds: float = 1.0
) -> Improved | None:
    """Looks for a plan that ends early, with its copies, and whose peak, with what is in flight, fits in ``budget``.

    The result is never slower than ``plan``, if that fits, and never over the budget: :func:`schedule` and
    :func:`~graphckpt.planning.levels.peak` judge every candidate. Candidates come from the dynamic programme over
    :class:`~graphckpt.planning.offload_window.Windowed`, and from changes of one block and swaps of near ones.

    The same input gives the same plan: the effort is counted in trials.

    Args:
        chain: The step; what moves is not ``kept``, and ``backward_peak`` has it back.
        timing: What the options take and move.
        budget: The bound on the peak, in bytes.
        plan: Where to begin.
        limit_seconds: About how long the search around the best candidate takes.
    """
    known = Known(chain)
    judge = _Judge(known, timing, budget)
    starts: list[Plan] = [] if plan is None else [tuple(plan)]
    quantum = min((second for row in timing.forward_seconds for second in row), default=0.0) / 2
    for moves in (False, True):
        found = Front(Windowed(known, timing, moves=moves, quantum=quantum), _LABELS).cheapest(budget)
        starts += [] if found is None else [found]
    if starts:
        trials = int(limit_seconds * _BLOCKS_PER_SECOND / max(1, chain.num_blocks))
        over, total, highest, best = judge(_search(min(starts, key=judge), chain, judge, trials))
        if over == 0:
            return Improved(best, total, highest)
    return None


_Verdict = tuple[int, float, int, Plan]


@final
class _Judge:
    """Bytes over the budget, seconds, peak, and the plan, so that the least of all is the best."""

    def __init__(self, chain: Chain, timing: Timing, budget: int) -> None:
        self._chain = chain
        self._timing = timing
        self._budget = budget
        self._seen: dict[Plan, _Verdict] = {}

    def __call__(self, plan: Plan) -> _Verdict:
        verdict = self._seen.get(plan)
        if verdict is None:
            times = schedule(self._timing, plan)
            try:
                highest = peak(self._chain, plan, times.in_flight)
            except ConfigError:  # an option that is not allowed after those before it
                highest = 2 * self._budget + 2**62
            verdict = self._seen[plan] = (max(0, highest - self._budget), times.seconds, highest, plan)
        return verdict


def _search(start: Plan, chain: Chain, judge: Callable[[Plan], _Verdict], trials: int) -> Plan:
    """Takes the first neighbour that is better, until none is, or the trials are spent."""
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


def _neighbours(plan: Plan, chain: Chain) -> Iterator[Plan]:
    for distance in (1, 2, 3):
        for block in range(len(plan) - distance):
            one, other = plan[block], plan[block + distance]
            if one != other and max(one, other) < min(len(chain.options(b)) for b in (block, block + distance)):
                yield (*plan[:block], other, *plan[block + 1 : block + distance], one, *plan[block + distance + 1 :])
    for block in range(len(plan)):
        for option in range(len(chain.options(block))):
            if option != plan[block]:
                yield (*plan[:block], option, *plan[block + 1 :])
