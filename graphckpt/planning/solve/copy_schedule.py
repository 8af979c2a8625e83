"""Times a plan whose blocks copy bytes to host memory and back while others compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from graphckpt.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTiming:
    """The seconds and offloaded bytes of options; the first index is the block, the second the option.

    Note [The window counts blocks that offload]: a host store frees a block's tensors when the next block that offloads
    ends its forward, and prefetches the previous block *that offloads* in backward. Blocks between them, which offload
    nothing, trigger neither, and the bytes stay on the device while they run.

    Raises:
        ConfigError: A rate is not above 0.
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

    def __post_init__(self) -> None:
        if not (self.out_rate > 0 and self.back_rate > 0):
            got = f"{self.out_rate}, {self.back_rate}"
            raise ConfigError(f"rates: expected above 0, got {got} · fix: give bytes per second")


@final
@dataclass(frozen=True, slots=True)
class CopySchedule:
    """The ends of forwards, backwards and copies of a plan, in seconds from the first forward."""

    forward_ends: tuple[float, ...]
    backward_ends: tuple[float, ...]
    out_ends: dict[int, float]
    """Of the copies to the host, by block."""
    back_ends: dict[int, float]
    """Of the copies back. The last block that offloads has none: its bytes are still on the device."""
    in_flight: tuple[int, ...]
    """Bytes that other blocks hold on the device, in the order of :func:`~graphckpt.planning.solve.chain.levels`."""
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
