"""Times a plan whose blocks copy bytes to host memory and back while others compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from graphckpt.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTiming:
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
class CopySchedule:
    """When each thing of a plan ends, in seconds from the step's first forward."""

    forward_ends: tuple[float, ...]
    backward_ends: tuple[float, ...]
    out_ends: dict[int, float]
    """Of the copies to the host, by block."""
    back_ends: dict[int, float]
    """Of the copies back. The last blocks that move have none: their bytes are on the device still."""
    in_flight: tuple[int, ...]
    """Bytes that other blocks have on the device, in the order of :func:`~graphckpt.planning.solve.chain.levels`."""
    seconds: float


def schedule_copies(timing: CopyTiming, plan: Sequence[int]) -> CopySchedule:
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
    return CopySchedule(tuple(forward_ends), tuple(backward_ends), out_ends, back_ends, tuple(in_flight), now)
