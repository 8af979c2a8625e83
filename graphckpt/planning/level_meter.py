"""Reads the level of live bytes at the borders of blocks.

The step is one that is measured, one that runs under a plan, or an update that a training loop runs itself::

    intervals   before | forward 0 | forward 1 | loss | backward 1 | backward 0 | optimizer
    marks       ^      ^           ^           ^      ^            ^            ^          ^
                each reads the level, the peak since the mark before, the bytes allocated so far, and the time

On a CPU a counter knows the level, and on an absent device the log of its allocations. On CUDA the allocator knows it:
that takes neither a dispatch mode nor a synchronization, and includes what kernels allocate and what is rounded up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import nn

from graphckpt._compat import storage_of
from graphckpt.blocks.forward import policy_of
from graphckpt.engine.block import BlockContext
from graphckpt.engine.sampling import without_value_checks
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.intervals import Interval, LevelLog, LevelSpan, Phase, StepReadings
from graphckpt.planning.step_clock import Blocks, StepClock
from graphckpt.simulation.allocations import AllocationTrace
from graphckpt.simulation.allocator import up_to_blocks
from graphckpt.undo import Undo, enter, scope


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


class _MarkReading(NamedTuple):
    level: int
    peak: int
    """Since the reading before."""
    allocated: int
    """All bytes that were allocated so far."""
    of_blocks: int = 0
    """The part of the level that forwards of blocks have allocated, on an absent device."""
    seconds: float = 0.0
    """Of the ops since the reading before, on an absent device: equal ops take equal seconds to the last bit."""


@final
@dataclass(eq=False)
class _PassedStorage:
    """A storage that blocks are passed, or return."""

    reference: ref[torch.UntypedStorage]
    num_bytes: int
    calls: set[int] = field(default_factory=set)
    """Those that are passed it, or return it."""


@final
class LevelMeter(StepClock):
    """Reads levels and times of one step, within :meth:`metering`.

    Args:
        device: The device of the model.
        counter: Counts the bytes of tensors op by op, within :meth:`metering`; ``None`` where the allocator of
            ``device`` does.
    """

    def __init__(self, device: torch.device, counter: LiveBytes | None) -> None:
        super().__init__(device)
        self._counter = counter
        self._trace = counter if isinstance(counter, AllocationTrace) else None
        """The counter of an absent device, which also knows the seconds of ops and what allocates."""
        self._rounded: Callable[[int], int] = up_to_blocks if counter is None else int
        if self._trace is not None:
            self._rounded = self._trace.rounded
        self.reserved_bytes = 0
        """The most that the allocator of ``device`` has reserved."""
        self.far_bytes: Counter[int] = Counter()
        self.ahead_bytes: Counter[int] = Counter()
        """Of :class:`StepReadings`; the stores of a measured step add to both."""
        self._readings: list[_MarkReading] = []
        self._signatures: list[str] = []
        self._are_typical: list[bool] = []
        self._dropped: set[int] = set()
        self._recomputed: dict[int, int] = {}
        self._contexts: list[BlockContext] = []
        self._storages: dict[int, _PassedStorage] = {}
        """By the id of a storage that is alive, or was."""
        self._ends: dict[int, Interval] = {}
        """By the id of the reference to a storage: the interval in which it was freed."""
        self._arguments: list[set[_PassedStorage]] = []
        self._outputs: list[set[_PassedStorage]] = []
        self._passed_on: list[set[_PassedStorage]] = []
        """By call: those of the arguments that are the very tensors which the call before has returned."""
        self._returned: list[tuple[ref[torch.Tensor], int]] = []
        """The tensors that the last call has returned, with their versions."""

    @scope
    def metering(self, undo: Undo, blocks: Blocks) -> Iterator[None]:
        enter(undo, without_value_checks())
        undo.append((self._release_contexts, ()))
        with self._counter or nullcontext(), super().metering(blocks):
            yield

    def levels(self, start: int = 0) -> dict[Interval, LevelSpan]:
        """Returns the levels above ``start``, after the step."""
        spans: dict[Interval, LevelSpan] = {}
        for interval, (begin, end) in zip(self._spans, pairwise(self._readings), strict=True):
            span = LevelSpan(begin.level, end.peak, end.level).raised(-start)
            before = spans.get(interval, span)
            spans[interval] = LevelSpan(before.start, max(before.peak, span.peak), span.end)
        return spans

    def result(self) -> StepReadings:
        """Returns the levels of the step that is over."""
        start, spans = self._readings[0].level, self._spans
        allocated, seconds = Counter[Interval](), dict[Interval, float]()
        for interval, (begin, end) in zip(spans, pairwise(self._readings), strict=True):
            allocated[interval] += end.allocated - begin.allocated
            seconds[interval] = seconds.get(interval, 0.0) + end.seconds
        levels, at_start = self.levels(start), zip(reversed(spans), reversed(self._readings[:-1]), strict=True)
        return StepReadings(
            block_of_call=self.order,
            spans=levels,
            seconds=seconds if self._trace is not None else self.seconds,
            total_seconds=self.total,
            start_bytes=start,
            allocated=allocated,
            of_blocks={interval: reading.of_blocks for interval, reading in at_start},
            dropped=frozenset(self._dropped),
            joinable=frozenset(call for call in range(1, len(self.order)) if self._is_joinable(call, levels)),
            is_repeated=any(len(backwards) > 1 for backwards in self._backwards.values()),
            passed_on=[sum(storage.num_bytes for storage in storages) for storages in self._passed_on],
            far_bytes=self.far_bytes,
            ahead_bytes=self.ahead_bytes,
            recomputed=self._recomputed,
            signatures=self._signatures,
            are_typical=self._are_typical,
        )

    def _is_joinable(self, call: int, levels: LevelLog) -> bool:
        """Returns whether nothing but a call and the one before it uses or holds what that one returns."""
        before = call - 1
        inputs = (self._arguments[call] & self._outputs[before]) - self._arguments[before]
        # A joined block frees the input that the one before it has returned. So they are neighbours in one pass, and
        # nothing but these two calls reads that tensor, or has it when the second one is over.
        return (
            self.order[before] == self.order[call] - 1
            and (call in self._dropped) == (before in self._dropped)
            and all(Interval(Phase.BACKWARD, each) in levels for each in (before, call))
            and len(inputs) == 1
            and inputs <= self._passed_on[call]
            and all(len(storage.calls) == 2 for storage in inputs)
            and all(
                end is not None and (end.call == call or end == (Phase.BACKWARD, before))  # a kept one saves its output
                for end in (self._ends.get(id(storage.reference)) for storage in self._passed_on[call])
            )
        )

    # Note [Dropped graphs]
    # A step may drop the graph of a call without a backward: m(x).detach(), or an output that is not used. The moment
    # becomes the backward of the call. Autograd frees all tensors of the graph first, and then the hooks, those of the
    # first call first. So the graphs of several calls that end at one level are dropped as one, in the order of
    # backwards; what they retain is gone at the start of the first one:
    #
    #     after the forward of 5 (all is freed) | backward of 5 | backward of 4 | backward of 3 | after it | ...

    def end_graph(self, call: int) -> None:
        """Marks that the graph of a call was freed, which is of interest if no backward has begun."""
        if not self._is_on or call in self._in_backward:
            return
        self._in_backward.add(call)
        self._dropped.add(call)
        now, last, place = self._read_level(), self._readings[-1], len(self._spans) - 1
        if not self._is_drop(place - 1) or (now.level, now.allocated) != (last.level, last.allocated):
            before = self.interval
            self._mark(Phase.BACKWARD, call)
            self._mark(*(before if before.is_of_block else Interval(Phase.AFTER_BACKWARD, call)))
            return
        while self._is_drop(place - 1) and self._spans[place - 1].call < call:
            place -= 1
        self._spans.insert(place, Interval(Phase.BACKWARD, call))
        self._readings.insert(place + 1, last._replace(peak=last.level, seconds=0.0))
        self._times.insert(place + 1, self._times[place])

    def _is_drop(self, place: int) -> bool:
        phase, call = self._spans[max(0, place)]
        return phase is Phase.BACKWARD and call in self._dropped

    def _end_recomputation(self) -> None:
        phase, call = self.interval
        if self._is_on and phase is Phase.BACKWARD:
            added = self._read_level().level - self._readings[-1].level
            self._recomputed[call] = max(self._recomputed.get(call, 0), added)

    def _read_level(self) -> _MarkReading:
        counter, trace = self._counter, self._trace
        if counter is not None:
            reading = _MarkReading(counter.live_bytes, counter.peak_bytes, counter.allocated_bytes)
            if trace is not None:
                return reading._replace(of_blocks=trace.bytes_of_blocks, seconds=trace.seconds)
            return reading
        stats = torch.cuda.memory_stats(self._device)
        self.reserved_bytes = max(self.reserved_bytes, stats["reserved_bytes.all.peak"])
        # A block of the allocator may be up to 1 MiB larger than what was asked for, and equal calls get other blocks.
        allocated = stats["requested_bytes.all.allocated"]
        return _MarkReading(stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"], allocated)

    def _read(self) -> None:
        """Reads the level, the peak since the last reading, and the time."""
        self._readings.append(self._read_level())
        if self._counter is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._counter.peak_bytes = self._readings[-1].level
            if self._trace is not None:
                self._trace.seconds = 0.0
        super()._read()

    def _mark(self, phase: Phase, call: int) -> None:
        super()._mark(phase, call)
        if self._trace is not None:
            self._trace.is_in_block = phase is Phase.FORWARD

    def _release_contexts(self) -> None:
        for context in self._contexts:
            context.on_recomputed = None
        self._contexts.clear()

    def _log_arguments(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        # At the call and not before the update: a Graph installs its policies within it.
        if (wrapper := policy_of(module)) is not None:
            # The level right after a recomputation is the most that any policy can retain of the block: it bounds
            # options that no update has shown yet.
            wrapper.context.on_recomputed = self._end_recomputation
            self._contexts.append(wrapper.context)
        # Joined blocks free their argument, so it has to be the very tensor of the block before, unmodified. Hooks
        # around the backward of a module wrap its arguments: forward gets views.
        before = [] if module._backward_hooks or module._backward_pre_hooks else self._returned
        passed_on = (t for t in tensors if any(same() is t and version == t._version for same, version in before))
        self._passed_on.append(self._storages_of(passed_on))
        self._arguments.append(self._storages_of(tensors))
        self._signatures.append(" ".join(f"{[*tensor.shape]}{tensor.dtype}" for tensor in tensors))
        self._are_typical.append(any(tensor.requires_grad and not tensor.is_leaf for tensor in tensors))

    def _log_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        self._outputs.append(self._storages_of(tensors))
        self._returned = [(ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]
        with_history = [tensor for tensor in tensors if tensor.requires_grad]
        if with_history:
            end: Callable[[torch.Tensor], None] = _GraphEnd(self, self.call)
            for tensor in with_history:
                tensor.register_hook(end)

    def _end_storage(self, reference: ref[torch.UntypedStorage]) -> None:
        self._ends[id(reference)] = self.interval

    def _storages_of(self, tensors: Iterable[torch.Tensor]) -> set[_PassedStorage]:
        """Counts tensors that the present call is passed, or returns; returns their storages."""
        result, tensors = set(), list(tensors)
        if self._counter is not None:  # else the first op that uses an input would seem to allocate it
            self._counter.track(tensors)
        # Wrappers, such as a DTensor, have a storage without memory: blocks that pass them on are not joined.
        plain = (tensor for tensor in tensors if not hasattr(tensor, "__tensor_flatten__"))
        for storage in filter(None, map(storage_of, plain)):
            passed = self._storages.get(id(storage))
            if passed is None or passed.reference() is not storage:  # an id may be that of an earlier one
                passed = _PassedStorage(ref(storage, self._end_storage), self._rounded(storage.nbytes()))
                self._storages[id(storage)] = passed
            passed.calls.add(self.call)
            result.add(passed)
        return result


def block_classes(blocks: Blocks, levels: StepReadings, *, by_bytes: bool = False) -> list[int]:
    """Returns the class of each block: blocks of one class are built alike, and are called alike in the step.

    With ``by_bytes`` their forwards and backwards also allocate as many bytes, in a step in which all have one option.
    Without it, a block that is not called is like one that is built alike.
    """
    calls: list[list[Any]] = [[] for _ in blocks.modules]
    for call, (block, signature) in enumerate(zip(levels.block_of_call, levels.signatures, strict=True)):
        of_phases = (Interval(phase, call) for phase in (Phase.FORWARD, Phase.BACKWARD) if by_bytes)
        calls[block].append((signature, *(levels.allocated.get(interval, 0) for interval in of_phases)))
    alike: dict[Any, int] = {}
    classes = []
    for module, called in zip(blocks.modules, calls, strict=True):
        tensors = [*module.named_parameters(), *module.named_buffers()]
        structure = (
            tuple((name, type(child), child.training) for name, child in module.named_modules()),
            tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
        )
        keys = [(structure, *called)] if called or by_bytes else [key for key in alike if key[0] == structure]
        classes.append(alike.setdefault(keys[0] if keys else (structure,), len(alike)))
    return classes
