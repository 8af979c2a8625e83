"""Counts the bytes of all living tensor storages, op by op. Knows no block, rule or store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch

from graphckpt._compat import call_with_autocast, storage_of
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.ledger.record import Event


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
    is freed, also during backward. Tensors that exist before, such as parameters and optimizer state, count
    from the first op that uses them, or at once by :meth:`track`. Memory that a kernel allocates and frees
    within one op is not counted, nor is memory of other objects. Meta tensors hold no memory and are not counted.

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
        self.op = None
        self._device = None if device is None else torch.device(device).type
        self._counts_fake = counts_fake
        self._changes: list[tuple[int, str, str]] | None = [] if record_timeline else None
        self._alive: dict[int, _Alive] = {}
        self._depth = 0
        self._free: Callable[[weakref.ref[torch.UntypedStorage]], None] = self._subtract

    @property
    def timeline(self) -> list[Event]:
        """The level after each change, oldest first; built at each access."""
        return [Event(*change) for change in self._changes or ()]

    def __enter__(self) -> Self:
        super().__enter__()
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        super().__exit__(*exc)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Runs one op and counts the storages of its inputs and outputs."""
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
        self.op = None
        return result

    def track(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts existing tensors: parameters, optimizer state, inputs. ``None`` is skipped."""
        for tensor in tensors:
            if tensor is None:
                continue
            if hasattr(tensor, "__tensor_flatten__"):
                self.track(inner_tensors(tensor))
            else:
                self._see(tensor)

    def track_as_old(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts tensors that were alive all the time: every level so far is raised by their bytes."""
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
        known = self._alive.get(id(storage))
        num_bytes = storage.nbytes()
        if known is not None:
            if known.num_bytes != num_bytes:
                self._resize(known, num_bytes)
            return storage
        if not self._is_counted(storage.device.type):
            return storage
        alive = _Alive(storage, self._free)
        alive.key = id(storage)
        alive.num_bytes = num_bytes
        self._alive[alive.key] = alive
        self._change(num_bytes, alive.key)
        return storage

    def _is_counted(self, kind: str) -> bool:
        if kind == "meta":
            return self._counts_fake
        return self._device is None or kind == self._device

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
        live_bytes = self.live_bytes
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if self._changes is not None and self._depth:
            self._changes.append((live_bytes, self.block, self.phase))


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors inside of a wrapper such as a DTensor, or of a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            value = getattr(tensor, name)
            if isinstance(value, torch.Tensor):
                yield value


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields the storage of a tensor, or those of the tensors inside of it."""
    storage = storage_of(tensor)
    if storage is not None and not hasattr(tensor, "__tensor_flatten__"):
        yield storage
        return
    for inner in inner_tensors(tensor):
        yield from storages_of(inner)
