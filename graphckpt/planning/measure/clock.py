"""Times the intervals of a step on a real device.

On CUDA times are those of events, which are read once the step has ended: to wait for the device at each of them would
add the time of a launch, 15 to 25 us, to every interval and every op.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter, process_time
from typing import TypeAlias, final

import torch

from graphckpt.planning.model.events import Interval, Phase

TimeMark: TypeAlias = "float | torch.cuda.Event"
"""A moment of a step: seconds, or an event on CUDA's current stream."""


def time_mark(device: torch.device) -> TimeMark:
    """Marks the present moment."""
    if device.type != "cuda":
        return now(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: TimeMark, end: TimeMark) -> float:
    """Returns the seconds from one mark to the next; waits until the device has passed them."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@final
class StepClock:
    """Times the intervals of a step; ``seconds`` and ``total`` are there after :meth:`stop`.

    With one thread on the CPU, the CPU time of the process is used: other processes affect it least.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls = 0
        self._running: list[int] = []
        self._begun: set[int] = set()
        self._has_seen_end = False
        self._interval = Interval(Phase.BEFORE)
        self._marks: list[tuple[Interval, TimeMark]] = []  # with the interval that begins there
        self._marks.append((self._interval, time_mark(device)))
        self.seconds: dict[Interval, float] = {}
        self.total = 0.0

    @property
    def is_in_block(self) -> bool:
        """Whether the forward of a block runs now."""
        return bool(self._running)

    def begin_call(self, block: int, tensors: Sequence[torch.Tensor], *, are_passed_on: bool) -> int:
        """Begins the forward of a block."""
        del block, tensors, are_passed_on
        call = self._calls
        self._calls += 1
        self._running.append(call)
        self._mark(Interval(Phase.FORWARD, call))
        return call

    def end_call(self, tensors: Sequence[torch.Tensor]) -> int:
        """Ends the forward of the last block."""
        del tensors
        call = self._running.pop()
        self._mark(Interval(Phase.AFTER_FORWARD, call))
        return call

    def gradient_of(self, call: int, output: int, gradient: torch.Tensor) -> None:
        """Begins the backward of a block."""
        del output, gradient
        if call not in self._begun:
            self._begun.add(call)
            self._has_seen_end = False
            self._mark(Interval(Phase.BACKWARD, call))

    def backward_ends(self, call: int) -> None:
        """Ends the backward of a block."""
        if self._interval == (Phase.BACKWARD, call):
            self._mark(Interval(Phase.AFTER_BACKWARD, call))

    def parameter_done(self, call: int) -> None:
        """Extends the backward of a first block until its last parameter gradient."""
        if self._interval == (Phase.BACKWARD, call):
            self._mark(self._interval)
            self._has_seen_end = True

    def optimizer_begins(self) -> None:
        """Begins an optimizer step."""
        self._leave_backward()
        self._mark(Interval(Phase.OPTIMIZER))

    def stop(self) -> None:
        """Ends the step."""
        self._leave_backward()
        self._mark(self._interval)
        for (interval, begin), (_, end) in pairwise(self._marks):
            self.seconds[interval] = self.seconds.get(interval, 0.0) + seconds_between(begin, end)
        self.total = seconds_between(self._marks[0][1], self._marks[-1][1])

    def _leave_backward(self) -> None:
        """Excludes what follows the last gradient of a first block, such as waiting for other processes."""
        if self._has_seen_end and self._interval.phase is Phase.BACKWARD:
            self._interval = Interval(Phase.AFTER_BACKWARD, self._interval.call)
            self._marks[-1] = self._interval, self._marks[-1][1]

    def _mark(self, interval: Interval) -> None:
        self._marks.append((interval, time_mark(self._device)))
        self._interval = interval


def now(device: torch.device) -> float:
    """Waits for the device, and returns a time in seconds, of which only differences are meaningful."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return process_time()
    return perf_counter()


def fastest(clocks: Sequence[StepClock]) -> dict[Interval, float]:
    """Returns the shortest time of each interval."""
    return {i: min(clock.seconds.get(i, 0.0) for clock in clocks) for i in clocks[0].seconds}
