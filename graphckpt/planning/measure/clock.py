"""Times the intervals of a step on a real device, and its ops.

On CUDA times are those of events, which are read once the step has ended: to wait for the device at each of them would
add the time of a launch, 15 to 25 us, to every interval and every op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, process_time
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch.autograd.graph import saved_tensors_hooks

from graphckpt._compat import call_with_autocast
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.engine.block import BlockContext
from graphckpt.engine.saved import KEEP_ON_DEVICE
from graphckpt.planning.candidates import OpTimes, Option
from graphckpt.planning.measure.instrument import Blocks, StepListener
from graphckpt.planning.model.events import Interval, OpSeconds, Phase
from graphckpt.rules.base import Rule
from graphckpt.rules.ops import is_counted

TimeMark: TypeAlias = "float | torch.cuda.Event"
"""A moment of a step: seconds, or an event on CUDA's current stream."""


def time_mark(device: torch.device) -> TimeMark:
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
class StepClock(StepListener):
    """Times the intervals of a step; ``seconds`` and ``total`` are there after :meth:`stop`.

    With one thread on the CPU, the CPU time of the process is used: other processes affect it least.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_seen_end = False
        self._interval = Interval(Phase.BEFORE)
        self._marks: list[tuple[Interval, TimeMark]] = []  # with the interval that begins there
        self._marks.append((self._interval, time_mark(device)))
        self.seconds: dict[Interval, float] = {}
        self.total = 0.0
        self.order: list[int] = []
        """The numbers of the blocks, in the order of their calls."""

    def begin_call(self, block: int, leaves: Sequence[Any], *, are_passed_on: bool) -> None:
        del leaves, are_passed_on
        self.order.append(block)

    def mark(self, interval: Interval) -> None:
        if interval.phase is Phase.OPTIMIZER:
            self._leave_backward()
        elif interval.phase is Phase.BACKWARD:
            self._has_seen_end = False
        self._interval = interval
        self._marks.append((interval, time_mark(self._device)))

    def parameter_done(self) -> None:
        """Extends the backward of a first block until its last parameter gradient."""
        self.mark(self._interval)
        self._has_seen_end = True

    def stop(self) -> None:
        self._leave_backward()
        self._marks.append((self._interval, time_mark(self._device)))
        for (interval, begin), (_, end) in pairwise(self._marks):
            self.seconds[interval] = self.seconds.get(interval, 0.0) + seconds_between(begin, end)
        self.total = seconds_between(self._marks[0][1], self._marks[-1][1])

    def _leave_backward(self) -> None:
        """Excludes what follows the last gradient of a first block, such as waiting for other processes."""
        if self._has_seen_end and self._interval.phase is Phase.BACKWARD:
            self._interval = Interval(Phase.AFTER_BACKWARD, self._interval.call)
            self._marks[-1] = self._interval, self._marks[-1][1]


def now(device: torch.device) -> float:
    """Waits for the device, and returns a time in seconds, of which only differences are meaningful."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return process_time()
    return perf_counter()


def fastest(clocks: Sequence[StepClock]) -> dict[Interval, float]:
    return {i: min(clock.seconds.get(i, 0.0) for clock in clocks) for i in clocks[0].seconds}


@final
@dataclass(frozen=True, eq=False)
class OpObserver(Rule, is_registered=False):
    """Runs a block as it is and records its ops.

    Args:
        seen: receives the ops of each call.
        marks: receives where each op began and ended, beside its :class:`OpTimes` and its number.
        device: on which the ops run.
        op_seconds: returns the seconds of an op, where a clock cannot; then there are no marks.
    """

    name: ClassVar[str] = "look"
    seen: list[OpTimes]
    marks: list[tuple[OpTimes, int, TimeMark, TimeMark]]
    device: torch.device
    op_seconds: OpSeconds | None = None

    def run(self, context: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        del context
        ops = OpTimes()
        self.seen.append(ops)

        @never_compiled
        def pack(tensor: Any) -> Any:
            ops.log.saves(tensor)
            return KEEP_ON_DEVICE[0](tensor)

        with saved_tensors_hooks(pack, KEEP_ON_DEVICE[1]), _OpTimer(ops, self):
            output = function(*args, **kwargs)
        ops.log.close()
        return output


@final
class _OpTimer(DispatchMode):
    def __init__(self, ops: OpTimes, observer: OpObserver) -> None:
        super().__init__()
        self._ops = ops
        self._observer = observer
        self._calls: dict[Any, int] = defaultdict(int)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        observer, seconds = self._observer, 0.0
        if observer.op_seconds is not None:
            output = call_with_autocast(func, args, kwargs)
            if not is_counted(func, args, kwargs):
                return output
            seconds = observer.op_seconds(func, args, kwargs, output)
        else:
            begin = time_mark(observer.device)
            output = call_with_autocast(func, args, kwargs)
            end = time_mark(observer.device)
            if not is_counted(func, args, kwargs):
                return output
            observer.marks.append((self._ops, len(self._ops.seconds), begin, end))
        number = self._calls[func]
        self._calls[func] = number + 1
        self._ops.log.add(func, number, args, kwargs, output)
        self._ops.seconds.append(seconds)
        return output


def record_ops(
    blocks: Blocks, run: Callable[[], object], device: torch.device, op_seconds: OpSeconds | None = None
) -> list[list[OpTimes]]:
    """Returns, by block, the ops of each forward during ``run``; see :class:`OpObserver` for the arguments."""
    ops_of_blocks: list[list[OpTimes]] = [[] for _ in blocks.names]
    marks: list[tuple[OpTimes, int, TimeMark, TimeMark]] = []
    observers = [OpObserver(ops, marks, device, op_seconds) for ops in ops_of_blocks]
    with blocks.under([Option("look", {}, observer) for observer in observers], lambda _: None):
        run()
    for ops, number, begin, end in marks:
        ops.seconds[number] = seconds_between(begin, end)
    return ops_of_blocks
