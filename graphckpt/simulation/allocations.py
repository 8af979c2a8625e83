"""Births and deaths of storages in the first steps of a process, and the bytes that an allocator reserves for them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeAlias, final, get_args

import torch

from graphckpt._compat import is_fake
from graphckpt._compat_compiler import never_compiled
from graphckpt._compat_fake import OF_DEVICE, without_torch_functions
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.simulation.allocator import DEFAULT_RULES, AllocatorRules, CachingAllocator, CapacityError, SegmentBlock
from graphckpt.tree import storages_of

OpSeconds: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""Returns the seconds of an op from the op, its arguments and its result."""

StorageKind: TypeAlias = Literal["weights", "gradients", "optimizer states", "workspaces", "activations"]
"""``"weights"`` are parameters and buffers; ``"activations"`` is all that is of no other kind: saved tensors, inputs,
results that are alive for a moment."""

# Steps that are replayed: the first creates optimizer states, the second is the first that has them, and later ones
# repeat the second. Reserved bytes of the models tried do not grow after the third.
NUM_STEPS = 3
_TEMPORARY, _ADDED = -1, -2  # not ids of storages
_NOTHING = nullcontext()
_PRECISION = 2 * 2**20  # bytes: the smallest segment


@final
@dataclass(slots=True)
class AllocationLog:
    """The births and deaths of storages on a device, in their order.

    >>> log = AllocationLog([[0], [1, ~1]], [1024, 4096])
    >>> replay(log).reserved_bytes
    2097152
    """

    steps: list[list[int]] = field(default_factory=lambda: [[]])
    """What happens before the first step, in the first step, and so on: ``n`` where storage ``n`` is born, and ``~n``
    where it is freed."""
    sizes: list[int] = field(default_factory=list)
    """The bytes of each storage."""
    streams: dict[int, int] = field(default_factory=dict)
    """By storage: the stream on which it is born; those without an entry are born on 0, which most ops run on."""
    kinds: dict[int, StorageKind] = field(default_factory=dict)
    """By storage; those without an entry are activations."""

    def begin_step(self) -> None:
        self.steps.append([])

    def parts_at_peak(self, rounded: Callable[[int], int] = int, step: int = -1) -> dict[StorageKind, int]:
        """Returns the bytes of each kind at the peak of a step, by default the last; their sum is the peak.

        Args:
            rounded: Returns the bytes that the allocator of the device counts for a size.
            step: The index of the step in :attr:`steps`.

        >>> parts = AllocationLog([[0], [1, ~1]], [1024, 4096], kinds={0: "weights"}).parts_at_peak()
        >>> parts["weights"], parts["activations"], parts["gradients"]
        (1024, 4096, 0)
        """
        *before, last = self.steps[: step % len(self.steps) + 1]
        level: dict[StorageKind, int] = dict.fromkeys(get_args(StorageKind), 0)

        def change(entry: int) -> int:
            storage = max(entry, ~entry)
            num_bytes = rounded(self.sizes[storage]) if entry >= 0 else -rounded(self.sizes[storage])
            level[self.kinds.get(storage, "activations")] += num_bytes
            return num_bytes

        total = highest = sum(map(change, chain.from_iterable(before)))
        peak = level.copy()
        for entry in last:
            total += change(entry)
            if total > highest:
                highest, peak = total, level.copy()
        return peak

    def repeated(self, num_steps: int) -> AllocationLog:
        """Returns the log of ``num_steps`` steps, of which the last one that is logged is repeated.

        What it frees of the step before it, such as gradients that the next step sets to ``None``, its repetitions free
        of the steps before them.
        """
        # The gradient g is freed in the next step, which leaves another one:
        #
        #     logged      step 1: g1        step 2: free g1, g2
        #     repeated    step 3: free g2, g3        step 4: free g3, g4
        steps, sizes = [step.copy() for step in self.steps[: num_steps + 1]], self.sizes.copy()
        result = AllocationLog(steps, sizes, self.streams.copy(), self.kinds.copy())
        if len(self.steps) < 3 or num_steps < len(self.steps):
            return result
        last = self.steps[-1]
        replacements = self._replacements(self.steps[-2], last)
        births = [entry for entry in last if entry >= 0]
        names = {storage: storage for storage in births}  # of the last step's storages, in the present repetition
        for _ in range(num_steps + 1 - len(self.steps)):
            older = {old: names[new] for old, new in replacements.items()}
            names = {storage: number for number, storage in enumerate(births, len(sizes))}
            sizes += [self.sizes[storage] for storage in births]
            result.streams.update((names[one], stream) for one, stream in self.streams.items() if one in names)
            result.kinds.update((names[one], kind) for one, kind in self.kinds.items() if one in names)
            renamed = names | older
            # The last step may free what no other storage comes in place of. That happens once: it is not renamed.
            repeatable = (entry for entry in last if max(entry, ~entry) in renamed)
            steps.append([renamed[entry] if entry >= 0 else ~renamed[~entry] for entry in repeatable])
        return result

    def _replacements(self, before: Sequence[int], last: Sequence[int]) -> dict[int, int]:
        """Returns, for each storage of a step that the next step frees, the one that the next step leaves in its place.

        It is the one of equal size with the same number in the order of births.
        """
        # By size and order alone, as a storage has no name: of two gradients of one size it is the same which is which.
        freed = {~entry for entry in last if entry < 0}
        left: dict[int, deque[int]] = defaultdict(deque)
        for entry in last:
            if entry >= 0 and entry not in freed:
                left[self.sizes[entry]].append(entry)
        old = (entry for entry in before if entry >= 0 and entry in freed)
        return {entry: left[self.sizes[entry]].popleft() for entry in old if left[self.sizes[entry]]}


@final
@dataclass(frozen=True, kw_only=True)
class Replay:
    """The figures of an allocator for the first steps of a process, in bytes."""

    reserved_bytes: int
    """The most that it reserved."""
    allocated_bytes: int
    """The most in blocks in use."""
    retries: tuple[int, ...]
    """By step: how often it had to release free segments. The first entry is before the first step."""
    refused_bytes: int = 0
    """The least capacity with which it would have reserved a segment that it was refused; 0 if it was refused none."""

    @property
    def is_steady(self) -> bool:
        """Whether no step after the second has to release segments, each of which waits for the device."""
        return not any(self.retries[3:])  # before the first step, the first step, the second step, and from here on


def replay(
    log: AllocationLog,
    rules: AllocatorRules = DEFAULT_RULES,
    capacity: int | None = None,
    *,
    num_steps: int = NUM_STEPS,
    capture_after: int | None = None,
) -> Replay:
    """Replays the first steps of a process in a caching allocator that may reserve ``capacity`` bytes.

    Args:
        log: The allocations of at least one step.
        rules: Settings of the allocator.
        capacity: ``None`` is without a limit.
        num_steps: The steps to replay.
        capture_after: The steps that run eagerly, on the stream of a capture, before one is captured: from then on
            nothing is allocated. ``None`` captures none.

    Raises:
        CapacityError: It does not fit.
    """
    allocator = CachingAllocator(rules, capacity)
    blocks: dict[int, SegmentBlock] = {}
    retries: list[int] = []
    if capture_after is not None:
        num_steps = capture_after + 1
    log = log.repeated(num_steps)
    sizes, streams = log.sizes, log.streams
    for number, step in enumerate(log.steps):
        before, private_pool, main_stream = allocator.num_retries, 0, 0
        if capture_after is not None and number:
            # Warm-up steps run on the stream of the capture, whose blocks no other stream reuses; the capture itself
            # has a private pool, and begins with an emptied cache.
            main_stream = -1
            if number > capture_after:
                allocator.release_free_segments()
                private_pool = 1
        for entry in step:
            if entry >= 0:
                stream = streams.get(entry, main_stream)
                blocks[entry] = allocator.allocate(sizes[entry], stream=stream, private_pool=private_pool)
            else:
                allocator.free(blocks.pop(~entry))
        retries.append(allocator.num_retries - before)
    return Replay(
        reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.peak_allocated_bytes,
        retries=tuple(retries),
        refused_bytes=allocator.refused_bytes,
    )


def least_capacity(
    log: AllocationLog, rules: AllocatorRules = DEFAULT_RULES, enough: float = 0.0, precision: int = 0, **options: Any
) -> int:
    """Returns the least capacity, to 2 MiB or ``precision`` bytes, in which no step after the second releases segments.

    The search ends at a capacity below ``enough``, of which a smaller one is not looked for. See :func:`replay` for the
    options.
    """
    log = log.repeated(NUM_STEPS)  # once, not in each replay
    unlimited = replay(log, rules, **options)
    low, high = unlimited.allocated_bytes - 1, unlimited.reserved_bytes  # `low` is too small, `high` is enough
    while high >= enough and high - low > max(_PRECISION, precision):
        # Each replay decides a range: an allocator that reserves 40 MiB of 50, and is refused a segment that would
        # make it 60, does the same with any capacity from 40 to below 60.
        try:
            replayed = replay(log, rules, (low + high) // 2, **options)
        except CapacityError as error:
            low = error.refused_bytes - 1
        else:
            if replayed.is_steady:
                high = replayed.reserved_bytes
            else:
                low = replayed.refused_bytes - 1
    return high


def fits(log: AllocationLog, capacity: int, rules: AllocatorRules = DEFAULT_RULES, **options: Any) -> bool:
    """Returns whether the steps run in ``capacity`` bytes, and release no segments after the second."""
    try:
        return replay(log, rules, capacity, **options).is_steady
    except CapacityError:
        return False


class AllocationTrace(LiveBytes):
    """Logs the births and deaths of storages on a device, with the seconds of its ops.

    As a mode it counts live bytes as :class:`~graphckpt.ledger.live_memory.LiveBytes` does. Storages have numbers, in
    the order in which they were first seen.

    Args:
        device: count only this kind of device; ``None`` counts all.
        is_fake: the step runs on fake tensors.
        rounded: returns the bytes that the allocator of the device counts for a size.
        op_seconds: returns the seconds of an op on the device; ``None`` counts none.
        extra_bytes: returns the temporary bytes of an op on the device, besides its results.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        is_fake: bool = False,
        rounded: Callable[[int], int] = int,
        op_seconds: OpSeconds | None = None,
        extra_bytes: Callable[[Any, tuple[Any, ...]], int] | None = None,
    ) -> None:
        super().__init__(device, record_timeline=False, counts_fake=is_fake)
        self.allocations = AllocationLog()
        self.seconds = 0.0
        """Those of the ops since the caller has set it to 0."""
        self.is_in_block = False
        """Whether the forward of a block runs; the caller sets it."""
        self.bytes_of_blocks = 0
        """Live bytes that forwards of blocks have allocated."""
        self.rounded = rounded
        self.op_seconds = op_seconds
        self._extra_bytes = extra_bytes
        # The number of each storage that is alive, by its id.
        self._numbers: dict[int, int] = {}
        self._numbers_of_blocks: set[int] = set()
        # The streams of a simulated step by their numbers; FSDP2 gathers and reduces on separate streams.
        self._streams: list[object] = [torch.cpu.current_stream()]

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        # Two out of three dispatches of a fake step, none of which runs anything on the device.
        if func is OF_DEVICE:
            return args[0].device if is_fake(args[0]) else func(*args)
        with without_torch_functions() if self._counts_fake else _NOTHING:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.op_seconds is not None and result is not NotImplemented:
                self.seconds += self.op_seconds(func, args, kwargs or {}, result)
            if self._extra_bytes is not None and (num_bytes := self._extra_bytes(func, args)):
                self._change(num_bytes, _TEMPORARY)  # allocated and freed at once
                self._change(-num_bytes, _TEMPORARY)
        return result

    def add(self, num_bytes: int) -> None:
        """Logs memory that is allocated and never freed, such as a workspace of a library."""
        if num_bytes > 0:
            self._change(num_bytes, _ADDED)  # a second call resizes what the first one has added

    def begin_step(self) -> None:
        """Begins another step, whose peak counts from now on."""
        self.allocations.begin_step()
        self.peak_bytes = self.live_bytes

    def label(self, tensors: Iterable[torch.Tensor | None], kind: StorageKind) -> None:
        """Sets the kind of the storages of tensors, as far as they are counted."""
        with without_torch_functions():
            for tensor in tensors:
                for storage in () if tensor is None else storages_of(tensor):
                    if (number := self._numbers.get(id(storage))) is not None:
                        self.allocations.kinds[number] = kind

    def _change(self, num_bytes: int, key: int) -> None:
        """Logs that the storage with the id ``key`` has ``num_bytes`` more than before, or less if negative."""
        # FSDP2 resizes one storage of 1024 bytes to 0 and back: that is logged as [0, ~0, 1] with sizes [1024, 1024],
        # two storages, as the allocator gets two requests, and may serve them from different blocks.
        log, number = self.allocations, self._numbers.pop(key, None)
        if number is not None:  # freed, or resized: then it is another storage from now on
            freed = self.rounded(log.sizes[number])
            super()._change(-freed, key)
            if freed:
                log.steps[-1].append(~number)
            self.bytes_of_blocks -= freed if number in self._numbers_of_blocks else 0
            num_bytes += log.sizes[number]  # from here on all that it has
            if num_bytes == 0:
                return
        elif num_bytes == 0 and key not in self._alive:
            return  # a storage that was resized to nothing has died already, and now its object is freed
        number = self._numbers[key] = len(log.sizes)
        log.sizes.append(num_bytes)
        super()._change(self.rounded(num_bytes), key)
        if num_bytes:
            log.steps[-1].append(number)
            if stream := self._stream():
                log.streams[number] = stream
        if self.is_in_block:
            self._numbers_of_blocks.add(number)
            self.bytes_of_blocks += self.rounded(num_bytes)

    def _stream(self) -> int:
        """Returns the number of the stream that allocates, on the CPU in place of an absent device."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)
