"""Records the ops of blocks, and how long each takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat_autocast import call_with_autocast
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine.block import BlockContext
from graphckpt.engine.saved import KEEP_ON_DEVICE
from graphckpt.planning.candidates import OpTimes, Option
from graphckpt.planning.measure.clock import TimeMark, seconds_between, time_mark
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.model.events import OpSeconds
from graphckpt.rules.base import Rule
from graphckpt.rules.ops.contexts import is_counted


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
        """Runs the block and keeps everything."""
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
class _OpTimer(TorchDispatchMode):
    def __init__(self, ops: OpTimes, observer: OpObserver) -> None:
        super().__init__()
        self._ops = ops
        self._observer = observer
        self._calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled code runs as such, and its ops are not visible."""
        return True

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        observer, seconds = self._observer, 0.0
        if observer.op_seconds is not None:
            output = call_with_autocast(func, args, kwargs)
            if not is_counted(func, args):
                return output
            seconds = observer.op_seconds(func, args, kwargs, output)
        else:
            begin = time_mark(observer.device)
            output = call_with_autocast(func, args, kwargs)
            end = time_mark(observer.device)
            if not is_counted(func, args):
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
