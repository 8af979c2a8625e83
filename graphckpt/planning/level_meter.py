"""Reads the level of live bytes at the borders of blocks, in a step or in an update that a training loop runs itself.

::

    intervals   before | forward 0 | forward 1 | loss | backward 1 | backward 0 | optimizer
    marks       ^      ^           ^           ^      ^            ^            ^          ^
                each reads the level, the peak since the mark before, and the time

On a CPU a counter knows the level, and on an absent device the log of its allocations. On CUDA the allocator knows it:
that takes neither a dispatch mode nor a synchronization, and includes what kernels allocate and what is rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self, final
from weakref import ref

import torch
from torch import nn

from graphckpt.blocks.forward import policy_of
from graphckpt.engine.block import BlockContext
from graphckpt.engine.sampling import without_value_checks
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.program import Interval, LevelLog, LevelSpan, Phase
from graphckpt.planning.trace import Blocks, StepMarks, TimeMark, seconds_between, time_mark
from graphckpt.undo import Undo, enter, scope


@final
@dataclass(frozen=True)
class UpdateLevels:
    """The levels of one update, in bytes, and its seconds."""

    block_of_call: Sequence[int]
    """In the order of forwards."""
    spans: LevelLog
    """Relative to the level at the start of the update."""
    seconds: Mapping[Interval, float]
    total_seconds: float
    start_bytes: int
    """The level at the start of the update: weights, optimizer states, and gradients that are not freed."""
    dropped: frozenset[int] = frozenset()
    """The calls whose graph was freed without a backward. An empty interval of their backward says when."""
    recomputed: Mapping[int, int] = field(default_factory=dict)
    """By call: what its recomputation has added to the level, which is the most that any policy retains of it."""
    signatures: Sequence[str] = ()
    """By call: the shapes that it was called with."""
    are_typical: Sequence[bool] = ()
    """By call: whether an argument has history. The backward of a call without it computes less."""

    @property
    def peak_bytes(self) -> int:
        return self.start_bytes + max(span.peak for span in self.spans.values())

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + next(reversed(list(self.spans.values()))).end

    @property
    def has_backward(self) -> bool:
        return any(i.phase is Phase.BACKWARD and i.call not in self.dropped for i in self.spans)

    def to_message(self) -> list[Any]:
        """Returns plain values, for JSON."""
        rows = [(*i, *span, self.seconds.get(i, 0.0)) for i, span in self.spans.items()]
        calls = [*self.block_of_call], sorted(self.dropped), [*self.signatures], [*self.are_typical]
        recomputed = [*self.recomputed.items()]
        return [rows, self.total_seconds, self.start_bytes, *calls, recomputed]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Self:
        rows, total, start, blocks, dropped, signatures, typical, recomputed = message
        spans, seconds = {}, {}
        for phase, call, begin, peak, end, spent in rows:
            interval = Interval(Phase(phase), call)
            spans[interval], seconds[interval] = LevelSpan(begin, peak, end), spent
        return cls(blocks, spans, seconds, total, start, frozenset(dropped), dict(recomputed), signatures, typical)


@final
class _GraphEnd:
    """A hook on the outputs of a call, which reports that their graph is freed."""

    # Autograd does not report that a graph is dropped, but a graph holds the hooks of its tensors: this one is freed
    # with it. The reference to the meter is weak, as a graph may outlive the update.

    def __init__(self, meter: LevelMeter, call: int) -> None:
        self._meter = ref(meter)
        self._call = call

    def __call__(self, gradient: torch.Tensor) -> None:
        del gradient

    def __del__(self) -> None:
        if (meter := self._meter()) is not None:
            meter.end_graph(self._call)


def level_counter(device: torch.device, tensors: Iterable[torch.Tensor | None]) -> LiveBytes | None:
    """Returns a counter of the live bytes on ``device``; ``None`` where its allocator counts.

    ``tensors`` are alive before the step: weights, buffers, gradients, states of optimizers.
    """
    if device.type == "cuda":
        return None
    counter = LiveBytes(device.type, record_timeline=False)
    counter.track(tensors)
    return counter


@final
class LevelMeter(StepMarks):
    """Reads levels and times of one update, within :meth:`metering`.

    Args:
        device: The device of the model.
        counter: Counts the bytes of tensors op by op, within :meth:`metering`; ``None`` where the allocator of
            ``device`` does.
    """

    def __init__(self, device: torch.device, counter: LiveBytes | None) -> None:
        super().__init__()
        self._device = device
        self._counter = counter
        self.reserved_bytes = 0
        """The most that the allocator of ``device`` has reserved."""
        self._levels: list[int] = []
        self._peaks: list[int] = []
        self._times: list[TimeMark] = []
        self._signatures: list[str] = []
        self._are_typical: list[bool] = []
        self._dropped: set[int] = set()
        self._recomputed: dict[int, int] = {}
        self._contexts: list[BlockContext] = []
        self._is_on = False

    @scope
    def metering(self, undo: Undo, blocks: Blocks) -> Iterator[None]:
        enter(undo, without_value_checks())
        enter(undo, blocks.marked(self))
        undo.append((self._release_contexts, ()))
        undo.append((setattr, (self, "_is_on", False)))
        with self._counter or nullcontext():
            self._is_on = True
            self._read()
            self._peaks.clear()  # of what was before the update
            try:
                yield
            finally:
                self._read()
                self._is_on = False

    def levels(self, intervals: Iterable[Interval] | None = None, start: int = 0) -> dict[Interval, LevelSpan]:
        """Returns the levels above ``start`` of what is over, by default with the intervals of a trace."""
        spans: dict[Interval, LevelSpan] = {}
        named = (span.interval for span in self.log.spans) if intervals is None else intervals
        for interval, borders, peak in zip(named, pairwise(self._levels), self._peaks, strict=True):
            begin, end = (level - start for level in borders)
            before = spans.get(interval, LevelSpan(begin, peak - start, end))
            spans[interval] = LevelSpan(before.start, max(before.peak, peak - start), end)
        return spans

    def update(self) -> UpdateLevels:
        """Returns the levels of the update that is over."""
        start, seconds = self._levels[0], dict[Interval, float]()
        for interval, marks in zip(self.intervals, pairwise(self._times), strict=True):
            seconds[interval] = seconds.get(interval, 0.0) + seconds_between(*marks)
        return UpdateLevels(
            block_of_call=self.order,
            spans=self.levels(self.intervals, start),
            seconds=seconds,
            total_seconds=seconds_between(self._times[0], self._times[-1]),
            start_bytes=start,
            dropped=frozenset(self._dropped),
            recomputed=self._recomputed,
            signatures=self._signatures,
            are_typical=self._are_typical,
        )

    def end_graph(self, call: int) -> None:
        """Marks that the graph of a call was freed, which is of interest if no backward has begun."""
        if self._is_on and call not in self._in_backward:
            self._in_backward.add(call)
            self._dropped.add(call)
            before = self._interval
            self._mark(Phase.BACKWARD, call)
            self._mark(*(before if before.is_of_block else Interval(Phase.AFTER_BACKWARD, call)))

    def _end_recomputation(self) -> None:
        phase, call = self._interval
        if self._is_on and phase is Phase.BACKWARD:
            self._recomputed[call] = max(self._recomputed.get(call, 0), self._level() - self._levels[-1])

    def _level(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._counter is None else self._counter.live_bytes

    def _read(self) -> None:
        """Reads the level, the peak since the last reading, and the time."""
        self._levels.append(self._level())
        if self._counter is None:
            self._peaks.append(torch.cuda.max_memory_allocated(self._device))
            self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._peaks.append(self._counter.peak_bytes)
            self._counter.peak_bytes = self._levels[-1]
        self._times.append(time_mark(self._device))

    def _mark(self, phase: Phase, call: int) -> None:
        if self._is_on:
            super()._mark(phase, call)
            self._read()

    def _release_contexts(self) -> None:
        for context in self._contexts:
            context.on_recomputed = None
        self._contexts.clear()

    def _log_arguments(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        # At the call and not before the update: a Graph installs its policies within it.
        if (wrapper := policy_of(module)) is not None:
            # The level right after a recomputation is the most that any policy can retain of the block: it bounds
            # options that no update has shown yet.
            wrapper.context.on_recomputed = self._end_recomputation
            self._contexts.append(wrapper.context)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._signatures.append(" ".join(f"{[*tensor.shape]}{tensor.dtype}" for tensor in tensors))
        self._are_typical.append(any(tensor.requires_grad and not tensor.is_leaf for tensor in tensors))

    def _log_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        with_history = [tensor for tensor in tensors if tensor.requires_grad]
        if with_history:
            end: Callable[[torch.Tensor], None] = _GraphEnd(self, self.call)
            for tensor in with_history:
                tensor.register_hook(end)


def block_classes(blocks: Blocks, update: UpdateLevels) -> list[int]:
    """Returns the class of each block: blocks of one class are built alike, and are called alike in the update."""
    calls: list[list[str]] = [[] for _ in blocks.modules]
    for block, signature in zip(update.block_of_call, update.signatures, strict=True):
        calls[block].append(signature)
    structures = [_structure(module) for module in blocks.modules]
    alike: dict[Any, int] = {}
    classes = []
    for structure, called in zip(structures, calls, strict=True):
        keys = [(structure, *called)] if called else [key for key in alike if key[0] == structure]
        classes.append(alike.setdefault(keys[0] if keys else (structure,), len(alike)))
    return classes


def _structure(module: nn.Module) -> Any:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        tuple((name, type(child), child.training) for name, child in module.named_modules()),
        tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
    )
