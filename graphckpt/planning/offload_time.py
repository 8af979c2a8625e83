"""Times a plan whose blocks move bytes to host memory and back beside the computation, and looks for a faster one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from graphckpt.errors import ConfigError
from graphckpt.planning.levels import Chain, Plan, peak
from graphckpt.planning.offload_milp import solve_milp
from graphckpt.planning.offload_window import Known, Windowed
from graphckpt.planning.solve import Front

_BLOCKS_PER_SECOND = 20_000  # that are judged, of all plans together, for each second that `improve` is given
_LEVELS_OF_BYTES = (
    6  # sizes of pieces that the dynamic programme tells apart; rounded up, so that it stays within bounds
)
_LABELS = 512  # fewer than usual, as there are many states


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the options of each block compute and move; the first index is the block, the second the option.

    Note [The window counts blocks that move]: a host store lets go of a block's tensors when later blocks that move
    something end their forward, and sends for the next block *that moves* in backward. Blocks between, which move
    nothing, give no signal, and the bytes stay in flight as long as they run.

    Raises:
        ConfigError: A rate or a window is out of range.
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
    slots: int = 2
    """Blocks whose bytes may wait on the device at a time, from the beginning of their forward on. 2: a block's copies
    run while the next one computes. 1: each block waits for its own."""
    ahead: int = 1
    """How many blocks are sent for before backward comes to them."""
    head_seconds: float = 0.0
    """Between the last block's forward and its backward."""

    def __post_init__(self) -> None:
        if not (self.out_rate > 0 and self.back_rate > 0):
            raise ConfigError(f"rates {self.out_rate}, {self.back_rate}: not above 0 · fix: give bytes per second")
        if self.slots < 1 or self.ahead < 0:
            raise ConfigError(f"slots {self.slots}, ahead {self.ahead}: out of range · fix: slots >= 1, ahead >= 0")


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
    stall_seconds: float
    """How much of ``seconds`` the computation waits for copies."""


def schedule(timing: Timing, plan: Sequence[int]) -> Schedule:
    """Returns the times of a plan, with one copy engine in each direction.

    ::

        compute  F0 |F1 |F2 .. wait |F3 |head |B3 |B2 .. wait |B1 |B0      slots=2: F3 waits until block 1 is out
        out         |o0 |o1      |o2 |                                     ahead=1: r1 begins when B2 would begin
        back                                  |r2     |r1     |r0

    A copy out begins when the block's forward has ended and the copy before it has. After its forward, a block that
    moves waits for the copy of the block ``slots - 1`` before it, see Note [The window counts blocks that move].
    When backward comes to a block that moves, it sends for it, if nobody has, and for the ``ahead`` blocks before it.
    """
    num_blocks = len(plan)
    sizes = [timing.moved_bytes[block][option] for block, option in enumerate(plan)]
    moving = [block for block in range(num_blocks) if sizes[block] > 0]
    stay = moving[max(0, len(moving) - timing.slots + 1) :]
    now = engine = computed = 0.0
    forward_ends, out_ends, in_flight, done = [], {}, [], 0
    for block, option in enumerate(plan):
        in_flight.append(sum(sizes[other] for other in moving[max(0, done - timing.slots + 1) : done]))
        now += timing.forward_seconds[block][option]
        computed += timing.forward_seconds[block][option]
        forward_ends.append(now)
        if sizes[block] > 0:
            out_ends[block] = engine = max(engine, now) + sizes[block] / timing.out_rate
            done += 1
            if done >= timing.slots:
                now = max(now, out_ends[moving[done - timing.slots]])
    on_device = set(stay)  # of blocks whose backward is to come
    in_flight.append(sum(sizes[other] for other in on_device))
    now += timing.head_seconds
    computed += timing.head_seconds
    backward_ends, back_ends, engine = [0.0] * num_blocks, {}, 0.0
    for block in reversed(range(num_blocks)):
        if sizes[block] > 0:
            done -= 1
            for other in reversed(moving[max(0, done - timing.ahead) : done + 1]):
                if other not in on_device:
                    on_device.add(other)
                    back_ends[other] = engine = max(engine, now) + sizes[other] / timing.back_rate
            on_device.remove(block)
            now = max(now, back_ends.get(block, now))
        in_flight.append(sum(sizes[other] for other in on_device))
        now += timing.backward_seconds[block][plan[block]]
        computed += timing.backward_seconds[block][plan[block]]
        backward_ends[block] = now
    ends = tuple(forward_ends), tuple(backward_ends), out_ends, back_ends
    return Schedule(*ends, tuple(in_flight), now, max(0.0, now - computed))


@final
@dataclass(frozen=True, slots=True)
class Improved:
    """What :func:`improve` has found."""

    plan: Plan | None
    """``None``: no plan was found that fits."""
    seconds: float
    """With everything that waits; infinite without a plan."""
    peak: int
    """In bytes, with what is in flight."""
    notes: tuple[str, ...]
    """What was left out, and why."""


def improve(
    chain: Chain, timing: Timing, budget: int, plan: Sequence[int] | None = None, limit_seconds: float = 1.0
) -> Improved:
    """Looks for a plan that ends early, with its copies, and whose peak, with what is in flight, fits in ``budget``.

    The result is never slower than ``plan``, if that fits, and never over the budget: :func:`schedule` and
    :func:`~graphckpt.planning.levels.peak` judge every candidate. Candidates come from the dynamic programme over
    :class:`~graphckpt.planning.offload_window.Windowed`, from a mixed-integer programme, if that is small and scipy is
    installed, and from changes of one block and swaps of near ones.

    The same input gives the same plan: all effort is counted, in nodes and trials that ``limit_seconds`` stands for.
    Only a programme that takes four times as long as it says is stopped by the clock, and a note tells so.

    Args:
        chain: The step; what moves is not ``kept``, and ``backward_peak`` has it back.
        timing: What the options take and move.
        budget: The bound on the peak, in bytes.
        plan: Where to begin.
        limit_seconds: About how long to look, beside the dynamic programme.
    """
    known = Known(chain)
    judge = _Judge(known, timing, budget)
    starts: list[Plan] = [] if plan is None else [tuple(plan)]
    quantum = min((second for row in timing.forward_seconds for second in row), default=0.0) / 2
    for moves in (False, True):
        found = Front(Windowed(known, timing, moves=moves, quantum=quantum), _LABELS).cheapest(budget)
        starts += [] if found is None else [found]
    notes: list[str] = []
    if starts:
        start = min(starts, key=judge)
        bound = judge(start)[1] if judge(start)[0] == 0 else None
        found, notes = solve_milp(known, timing, budget, bound, limit_seconds)
        starts += [] if found is None else [found]
        start = _search(
            min(starts, key=judge), chain, judge, int(limit_seconds * _BLOCKS_PER_SECOND / max(1, chain.num_blocks))
        )
        over, total, highest, _ = judge(start)
        if over == 0:
            return Improved(start, total, highest, tuple(notes))
    return Improved(None, float("inf"), 0, (*notes, "no plan was found that fits with its bytes in flight"))


_Verdict = tuple[int, float, int, Plan]


@final
class _Judge:
    """Bytes over the budget, seconds, peak, and the plan, so that the least of all is the best."""

    def __init__(self, chain: Chain, timing: Timing, budget: int) -> None:
        self._chain = chain
        self._timing = timing
        self._budget = budget
        self._seen: dict[Plan, _Verdict] = {}

    @property
    def num_trials(self) -> int:
        return len(self._seen)

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
