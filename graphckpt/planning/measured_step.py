"""The samples of a step, and predictions from them: the level of live bytes and the seconds under any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from graphckpt.planning.intervals import Interval, Phase, StepReadings
from graphckpt.planning.levels import LevelTable

if TYPE_CHECKING:
    from graphckpt.planning.candidates import Option


@final
@dataclass(frozen=True, slots=True)
class StepSample:
    """One run of the step with one option on each block."""

    levels: StepReadings
    peak_bytes: int
    """The highest of all processes that measure together."""
    seconds: dict[Interval, float]
    step_seconds: float
    """Seconds of the step without policies, if it was run, or else with these."""
    plain_seconds: dict[Interval, float] | None = None
    """Seconds without policies, timed together with ``seconds``; ``None`` if times are estimated and do not vary."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of a step, from which any plan can be predicted."""

    names: tuple[str, ...]
    options: tuple[Option, ...]
    """The options in general; ``options_of`` holds those of each block."""
    options_of: tuple[tuple[Option, ...], ...]
    """The options by block."""
    model: LevelTable
    forward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its forwards in a step."""
    backward_seconds: tuple[tuple[float, ...], ...]
    """By block and option: the seconds of all its backwards in a step, with the recomputation."""
    far_bytes: tuple[tuple[int, ...], ...]
    """By block and option: the bytes that are offloaded in a step."""
    step_seconds: float
    """Seconds of the step with everything kept."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer in that step, if it was timed."""
    num_runs: int = 0
    """The number of runs whose levels were read."""
    ahead_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By call and option: the bytes of an all-gather that begins before the backward of the call."""
    joinable: frozenset[int] = frozenset()
    """The calls that can be recomputed as one with the call before."""
    banned: frozenset[tuple[int, int]] = frozenset()
    """Blocks and options that plans must not have; each block has another one."""
    uncalled: Mapping[int, int | None] = field(default_factory=dict)
    """By block that the step did not call, but another one may: an equal block, whose option it has in a plan."""
    runs: tuple[tuple[int, ...], ...] = ()
    """The options of the blocks in each run of the step that is a plan."""
    notes: tuple[str, ...] = ()
    """Where the prediction is not exact, and why."""

    def completed(self, plan: Sequence[int]) -> tuple[int, ...]:
        """Returns a plan without options that are banned, and with those of blocks that the step did not call.

        Without an equal one such a block keeps everything if all others do, and else is recomputed.
        """
        base = self.model.base_option
        numbers = sorted(range(len(self.options)), key=lambda number: number != base)
        options = [
            next(each for each in (option, *numbers) if (block, each) not in self.banned)
            for block, option in enumerate(plan)
        ]
        called = {option for block, option in enumerate(options) if block not in self.uncalled}
        for block, equal in self.uncalled.items():
            options[block] = (0 if called == {0} else base) if equal is None else options[equal]
        return tuple(options)

    def interval_name(self, interval: Interval) -> str:
        """Returns the name of an interval for tables and messages, such as ``"backward of h.1"``."""
        if interval.call < 0 or interval.phase is Phase.OPTIMIZER:
            return interval.phase.value
        block_of_call = self.model.block_of_call
        name = self.names[block_of_call[interval.call]]
        if interval.phase is Phase.AFTER_FORWARD and interval.call == len(block_of_call) - 1:
            return f"the head and the loss, after {name}"
        return f"{interval.phase.value} {name}"
