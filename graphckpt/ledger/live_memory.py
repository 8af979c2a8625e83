"""Counts the bytes of all living tensor storages, op by op. Knows no block, rule or store."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

import torch

from graphckpt._compat import (
    ActiveModes,
    active_modes,
    active_saved_tensor_hooks,
    call_with_autocast,
    current_backward,
    is_torch_checkpoint,
    set_active_modes,
    storage_of,
)
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt._compat_fake import is_on_host, is_stored_on_host, without_torch_functions
from graphckpt._compat_memory import resizes_reported_to
from graphckpt.ledger.record import Event, TensorLife
from graphckpt.tree import inner_tensors, storages_of
from graphckpt.undo import Ending, Undo, enter, put_back


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A weak reference to one counted storage. Its callback receives it, with the bytes to subtract."""

    __slots__ = ("key", "num_bytes")

    key: int
    num_bytes: int


# Note [One storage, one object]
# PyTorch returns the same Python object for a storage as long as the storage lives, whether a tensor, a view or only
# the autograd graph holds it. So its id() identifies it, and a weak reference to it dies at the moment the memory is
# freed, never later (both tested). A look-up takes 50 ns.


class LiveBytes(DispatchMode):
    """Sums the bytes of living tensor storages while it is active, and records when they are allocated and freed.

    A storage counts once, however many tensors view it, from the first op that takes or returns it until it
    is freed, also during backward. One that ``UntypedStorage.resize_`` resizes, as FSDP does with the weights that it
    gathers, counts with its new size from then on, in whichever thread. Tensors that exist before, such as parameters
    and optimizer state, count from the first op that uses them, or at once by :meth:`track`. Memory that a kernel
    allocates and frees within one op is not counted, nor is memory of other objects. Meta tensors hold no memory and
    are not counted.

    The caller sets :attr:`block` and :attr:`phase`; each change is recorded with both.

    Args:
        device: count only storages on this kind of device, such as ``"cuda"``; ``None`` counts all of them.
        record_timeline: ``False`` keeps the sum and the peak only, without an entry per change.
        counts_fake: count meta storages, which are those of fake tensors, as if they held memory.

    >>> with LiveBytes() as live:
    ...     x = torch.zeros(256)
    ...     y = x + 1
    ...     del x
    >>> live.live_bytes, live.peak_bytes, [event.live_bytes for event in live.timeline]
    (1024, 2048, [1024, 2048, 1024])
    """

    supports_higher_order_operators = True

    block: str
    """The running block; ``""`` outside of every block."""
    phase: str
    """``"forward"``, ``"backward"``, ``"recompute"`` or ``"optimizer"``."""
    live_bytes: int
    """Bytes of the counted storages that are alive."""
    peak_bytes: int
    """The largest value of :attr:`live_bytes` so far."""
    allocated_bytes: int
    """Bytes of all storages so far."""
    op: Any
    """The op whose results are being counted; ``None`` while inputs are."""

    def __init__(
        self, device: str | torch.device | None = None, *, record_timeline: bool = True, counts_fake: bool = False
    ) -> None:
        super().__init__()
        self.block = ""
        self.phase = "forward"
        self.live_bytes = 0
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self.op = None
        self._device = None if device is None else torch.device(device).type
        self._counts_fake = counts_fake
        self._changes: list[tuple[int, str, str]] | None = [] if record_timeline else None
        self._alive: dict[int, _Alive] = {}
        self._depth = 0
        self._listening: Undo = []
        self._free: Callable[[weakref.ref[torch.UntypedStorage]], None] = self._subtract  # one object, for all of them

    @property
    def timeline(self) -> list[Event]:
        """The level after each change, oldest first; built at each access."""
        return [Event(*change) for change in self._changes or ()]

    def __enter__(self) -> Self:
        super().__enter__()
        self._depth += 1
        if self._depth == 1:
            enter(self._listening, resizes_reported_to(self._see_resized))
        return self

    def _exit(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            put_back(self._listening)
        super().__exit__(*exc)

    def _before(self) -> tuple[int, ActiveModes]:
        return self._depth, active_modes()

    def _abandon(self, before: tuple[int, ActiveModes]) -> None:
        self._depth, modes = before
        if not self._depth:
            put_back(self._listening)
        set_active_modes(modes)

    __exit__ = Ending(_exit, _abandon, _before)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a DTensor unwraps first; its op is dispatched again with the inner tensors
        self._see_all(args)
        if kwargs:
            self._see_all(kwargs.values())
        result = call_with_autocast(func, args, kwargs or {})
        self.op = func
        if isinstance(result, torch.Tensor):
            self._see(result)
        elif isinstance(result, (tuple, list)):
            self._see_all(result)
        elif result is None and args and isinstance(args[0], torch.Tensor):
            self._see(args[0])  # `inductor.resize_storage_bytes_` of a compiled FSDP resizes it and returns nothing
        self.op = None
        return result

    def track(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts existing tensors: parameters, optimizer state, inputs. ``None`` is skipped."""
        with without_torch_functions():
            for tensor in tensors:
                if tensor is None:
                    continue
                if hasattr(tensor, "__tensor_flatten__"):
                    self.track(inner_tensors(tensor))
                else:
                    self._see(tensor)

    def track_storages_of(self, other: LiveBytes) -> None:
        """Counts the storages that another counter has seen and that are alive."""
        for alive in list(other._alive.values()):
            if (storage := alive()) is not None:
                self._count(storage)

    # Such as the states of an optimizer, which nothing names until it steps. Levels of 10, 12 and 11 before it become
    # 30, 32 and 31 with 20 of states.
    def track_as_old(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts tensors that were alive all the time: every level so far is raised by their bytes."""
        # Without a log meanwhile: events would say that the tensors are allocated now.
        before, changes, self._changes = self.live_bytes, self._changes, None
        peak = self.peak_bytes
        self.track(tensors)
        added = self.live_bytes - before
        self.peak_bytes = peak + added
        self._changes = None if changes is None else [(level + added, block, phase) for level, block, phase in changes]

    def _see_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._see(value)
            elif isinstance(value, (list, tuple)):
                self._see_all(value)

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Counts the storage of ``tensor`` unless it is counted, and returns it. See Note [One storage, one object]."""
        storage = storage_of(tensor)
        if storage is None:
            for inner in inner_tensors(tensor):
                self._see(inner)
            return None
        alive = self._alive.get(id(storage))
        if alive is None or alive.num_bytes != storage.nbytes():  # an op takes and returns mostly what is counted
            if self._counts_fake and is_on_host(tensor):
                return None
            self._count(storage)
        return storage

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage that was just resized, outside of any op."""
        self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        alive = self._alive.get(id(storage))
        num_bytes = storage.nbytes()
        if alive is not None:
            if alive.num_bytes != num_bytes:
                self._resize(alive, num_bytes)
            return
        kind = storage.device.type
        if not (self._counts_fake if kind == "meta" else self._device is None or kind == self._device):
            return
        if self._counts_fake and is_stored_on_host(storage):
            return
        alive = _Alive(storage, self._free)
        alive.key = id(storage)
        alive.num_bytes = num_bytes
        self._alive[alive.key] = alive
        self._change(num_bytes, alive.key)

    def _subtract(self, alive: weakref.ref[torch.UntypedStorage]) -> None:
        """Subtracts a freed storage. Runs where the last reference is dropped, in any thread."""
        assert isinstance(alive, _Alive)
        del self._alive[alive.key]
        self._change(-alive.num_bytes, alive.key)

    def _resize(self, alive: _Alive, num_bytes: int) -> None:
        grown = num_bytes - alive.num_bytes
        alive.num_bytes = num_bytes
        self._change(grown, alive.key)

    def _change(self, num_bytes: int, key: int) -> None:
        """Adds to the sum. No lock: CPython switches threads and collects at calls, not within ``+=``."""
        del key  # identifies the storage, for subclasses
        if num_bytes == 0:
            return
        self.live_bytes += num_bytes
        self.allocated_bytes += max(0, num_bytes)
        live_bytes = self.live_bytes
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if self._changes is not None and self._depth:
            self._changes.append((live_bytes, self.block, self.phase))


_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


@dataclass(slots=True)
class Hold:
    """Something that holds a storage for backward."""

    block: str | None
    """The block; ``None`` if no policy changes its saved tensors."""
    end: int | None = None
    """The number of changes by then; ``None`` if it outlives the step."""
    begin: int = 0
    """The number of changes when it began."""
    saved_by: str | None = None
    """The block that saves the tensor under the present policies; ``None`` if the plain step alone would."""
    ends_early: bool = False
    """Whether its owner holds several tensors, which are freed one by one after its end.

    The owner of three tensors ends before change 7, and they are freed by changes 7, 8 and 9. As nothing is allocated
    meanwhile, the hold of each is extended to the change that frees it.
    """


@dataclass(slots=True)
class StorageLife:
    """A storage, from its allocation to its end, in numbers of changes since the step began."""

    begin: int
    num_bytes: int
    recomputed_by: str | None = None
    """The outermost block in whose recomputation it was allocated, or for whose recomputation it is a copy."""
    end: int | None = None
    last_use: int = 0
    """By an op of the plain step, or the call of a block."""
    is_resized: bool = False
    """Whether it ended because its size changed, so that nothing could have held it."""
    saved: list[Hold] = field(default_factory=list)
    """Its holders in the plain step."""
    for_recomputation: list[Hold] = field(default_factory=list)
    """The blocks that keep it for a recomputation."""
    origin: dict[str, Any] = field(default_factory=dict)
    """The op and the block that allocated it, as fields of :class:`TensorLife`; empty until a tensor uses it."""
    kind: str = ""
    """See :attr:`graphckpt.ledger.record.TensorLife.kind`."""
    is_old: bool = False
    """Whether it existed before the step."""


@final
class StorageLog(LiveBytes):
    """Counts live bytes as :class:`LiveBytes` does, and logs the lifetime of each storage.

    >>> with StorageLog() as log:
    ...     x = torch.zeros(256)
    ...     del x
    >>> [(life.num_bytes, life.begin, life.end) for life in log.lives]
    [(1024, 0, 1)]
    """

    def __init__(self, *, counts_fake: bool = False) -> None:
        super().__init__(counts_fake=counts_fake)
        self.lives: list[StorageLife] = []
        """All storages so far, in order of allocation."""
        self.recomputed: str | None = None
        """The outermost block that is being recomputed."""
        self.copied: str | None = None
        """The block that is copying for its recomputation."""
        self.checkpointed: set[str] = set()
        """The blocks whose code calls ``torch.utils.checkpoint``."""
        self._life_of: dict[int, StorageLife] = {}
        self._kept_by: dict[int, tuple[set[str], dict[int, StorageLife]]] = {}  # by id of an argument object
        self._is_old = False
        self._last_allocation = 0

    @property
    def _now(self) -> int:
        return 0 if self._is_old else len(self._changes or ())

    def hold(
        self,
        tensor: torch.Tensor,
        block: str | None,
        owner: object,
        *,
        is_kept: bool = False,
        saved_by: str | None = None,
        ends_early: bool = False,
    ) -> None:
        """Logs who holds ``tensor`` while ``owner`` is alive; see :class:`Hold`."""
        for life in filter(None, (self._life_of.get(id(storage)) for storage in storages_of(tensor))):
            hold = Hold(block, begin=self._now, saved_by=saved_by, ends_early=ends_early)
            (life.for_recomputation if is_kept else life.saved).append(hold)
            when_gone(owner, tensor, _end_hold, hold, weakref.ref(self))

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks the arguments of a finished call as used until now."""
        for storage in (storage for tensor in tensors for storage in storages_of(tensor)):
            if (life := self._life_of.get(id(storage))) is not None:
                life.last_use = self._now

    def keep_objects(self, values: Iterable[object], tensors: Iterable[torch.Tensor], block: str) -> None:
        """Logs that ``block`` keeps objects for its recomputation, such as a KV cache, and so the tensors in them."""
        storages = (storage for tensor in tensors for storage in storages_of(tensor))
        lives = {id(life): life for life in map(self._life_of.get, map(id, storages)) if life is not None}
        for value in values if lives else ():
            if not hasattr(type(value), "__weakref__"):
                continue
            if id(value) not in self._kept_by:
                self._kept_by[id(value)] = set(), {}
                weakref.finalize(value, _object_is_gone, id(value), weakref.ref(self)).atexit = False
            self._kept_by[id(value)][0].add(block)
            self._kept_by[id(value)][1].update(lives)

    @property
    def static_bytes(self) -> int:
        """The bytes of weights and optimizer states that existed before the step."""
        kinds = ("weights", "optimizer states")
        return sum(life.num_bytes for life in self.lives if life.is_old and life.kind in kinds)

    def levels_if_kept(self, is_kept: Callable[[str], bool]) -> list[int]:
        """Returns the predicted live bytes at each event of :attr:`timeline` if some blocks kept everything."""
        return levels_if_kept(self.lives, len(self._changes or ()), is_kept)

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        for tensor in tensors:
            for storage in () if tensor is None else storages_of(tensor):
                life = self._life_of.get(id(storage))
                if life is not None:
                    life.kind = kind

    @property
    def tensors(self) -> list[TensorLife]:
        """The storages of the step so far, in order of allocation; built at each access."""
        return [_tensor_life(life, len(self._changes or ())) for life in self.lives]

    def track_as_old(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts tensors that were alive all the time."""
        self._is_old = True
        try:
            super().track_as_old(tensors)
        finally:
            self._is_old = False

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        storage = super()._see(tensor)
        life = None if storage is None else self._life_of.get(id(storage))
        if life is None:
            return storage
        if self.recomputed is None and self.copied is None:
            life.last_use = self._now
        if not life.origin:
            life.origin = {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            if not life.is_old:
                op = "" if self.op is None else str(self.op)
                life.origin |= {"block": self.block, "phase": self.phase, "op": op, "source": _source()}
        return storage

    def _change(self, num_bytes: int, key: int) -> None:
        now = self._now
        super()._change(num_bytes, key)
        life = self._life_of.pop(key, None)
        if life is not None:
            life.end = now
            for hold in life.for_recomputation:
                if hold.ends_early and hold.end is not None and hold.end > self._last_allocation:
                    hold.end = now
            num_bytes += life.num_bytes  # of a storage that was resized
        if num_bytes > 0:
            is_result = self.op is not None  # what an op takes may have existed before
            block = self.copied if self.recomputed is None and is_result else self.recomputed
            self._last_allocation = now
            if is_result and self.phase == "forward" and is_torch_checkpoint(active_saved_tensor_hooks()):
                self.checkpointed.add(self.block)
            self._life_of[key] = StorageLife(now, num_bytes, block, is_old=self._is_old or not self._depth)
            self.lives.append(self._life_of[key])

    def _resize(self, alive: Any, num_bytes: int) -> None:
        life = self._life_of.get(alive.key)
        if life is not None:
            life.is_resized = True
        super()._resize(alive, num_bytes)

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        # FSDP gathers the weights of a layer within a recomputed block once for its backward: in the recomputation,
        # or without one in the backward. So they belong to the plain step as well.
        recomputed, self.recomputed = self.recomputed, None
        try:
            super()._see_resized(storage)
        finally:
            self.recomputed = recomputed


def _source() -> str:
    """Returns the innermost line outside of PyTorch and graphckpt; empty in a thread of backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno} in {frame.f_code.co_name}"


def _tensor_life(life: StorageLife, num_changes: int) -> TensorLife:
    holds = [hold for hold in (*life.saved, *life.for_recomputation) if hold.saved_by is not None]
    first = min(holds, key=lambda hold: hold.begin, default=None)
    return TensorLife(
        num_bytes=life.num_bytes,
        begin=life.begin,
        end=life.end,
        kind=life.kind,
        is_old=life.is_old,
        recomputed_by=life.recomputed_by or "",
        saved_by=(first and first.saved_by) or "",
        saved_from=first.begin if first else 0,
        saved_until=max((num_changes if hold.end is None else hold.end for hold in holds), default=0),
        **life.origin,
    )


def _end_hold(hold: Hold, log: weakref.ref[StorageLog]) -> None:
    if (living := log()) is not None:
        hold.end = living._now


def _object_is_gone(key: int, log: weakref.ref[StorageLog]) -> None:
    if (living := log()) is None:
        return
    blocks, lives = living._kept_by.pop(key)
    if current_backward() == -1:  # the caller held it as well
        return
    phases = [phase for *_, phase in living._changes or ()]
    for life in lives.values():  # without the blocks that kept it, it would be gone when backward begins
        life.last_use = max(life.last_use, phases.index("backward") - 1 if "backward" in phases else 0)
        life.for_recomputation += map(Hold, sorted(blocks))


def when_gone(
    owner: object, tensor: torch.Tensor, function: Callable[..., object], *arguments: Any
) -> weakref.finalize[Any, Any]:
    """Calls ``function`` when ``owner`` is freed, or the storage of ``tensor`` if ``owner`` cannot be watched."""
    try:
        end: weakref.finalize[Any, Any] = weakref.finalize(owner, function, *arguments)
    except TypeError:  # hooks of the caller may pack a tuple, as those of `save_on_cpu` do
        end = weakref.finalize(next(storages_of(tensor)), function, *arguments)
    end.atexit = False
    return end


# ---- other policies

# Note [A step that was recorded, under other policies]
# This is the reverse of what plans do: `planning/levels.py` predicts policies from a step in which every block is
# recomputed, and this predicts blocks that keep everything from a step under any policies. It has one step, and so the
# life of each storage in place of sums. If a block kept everything,
#
# 1. what its recomputation allocates would not exist: such lives are left out,
# 2. what it holds for the recomputation alone would end with its last use, or with another holder,
# 3. what the plain step saves of it would live until its backward has read it.
#
# The second comes before the third, which may extend what the second has cut: a block that keeps everything may save
# its argument, which `full` holds too.
#
# An example: two layers `tanh(x @ w)`, each tensor of one unit, and layers.0 is recomputed. Levels from the end of the
# backward of layers.1 on:
#
#     change                                   level   if layers.0 kept everything
#     14  frees the tanh of layers.0           5       6     3.: its own backward is still to read it
#     15  recomputes its product               6       6     1.: left out
#     16  recomputes its tanh                  7       6     1.: left out
#     17  frees the product                    6       6     1.
#     18  allocates the gradient of the tanh   7       7


def levels_if_kept(lives: Iterable[StorageLife], num_changes: int, is_kept: Callable[[str], bool]) -> list[int]:
    """Returns the live bytes after each change of the step if the blocks in ``is_kept`` kept everything.

    >>> first = StorageLife(0, 8, end=1, saved=[Hold("h.0", end=3)])
    >>> again = StorageLife(2, 8, recomputed_by="h.0", end=3)
    >>> levels_if_kept([first, again], 4, lambda block: False), levels_if_kept([first, again], 4, lambda block: True)
    ([8, 0, 8, 0], [8, 8, 8, 0])
    """
    changes = [0] * (num_changes + 1)
    for life in lives:
        if life.recomputed_by is None or not is_kept(life.recomputed_by):
            changes[min(life.begin, num_changes)] += life.num_bytes
            changes[min(_end(life, is_kept, num_changes), num_changes)] -= life.num_bytes
    return list(accumulate(changes))[:num_changes]


def _end(life: StorageLife, is_kept: Callable[[str], bool], num_changes: int) -> int:
    def ends(holds: Iterable[Hold]) -> list[int]:
        return [num_changes if hold.end is None else hold.end for hold in holds]

    def is_changed(hold: Hold) -> bool:
        return hold.block is not None and is_kept(hold.block)

    end = num_changes if life.end is None else life.end
    if life.is_resized:
        return end
    dropped = [hold for hold in life.for_recomputation if is_changed(hold)]
    if dropped and end <= max(ends(dropped)):  # it was alive for the recomputation alone
        others = [hold for hold in life.for_recomputation if not is_changed(hold)]
        real = [hold for hold in life.saved if hold.block is None]
        # Its last reader has to have run: it ends at the change after that.
        end = min(end, max([life.last_use + 1, *ends(others), *ends(real)]))
    return max([end, *ends(hold for hold in life.saved if is_changed(hold))])
