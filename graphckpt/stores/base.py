"""The base classes: a store holds tensors, a byte store holds their bytes. Counters of the bytes that they hold."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast, final

from graphckpt._compat_compiler import never_compiled
from graphckpt.errors import ConfigError, MutatedError, did_you_mean
from graphckpt.extras import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch


TIERS = ("device", "host", "disk")
Tier: TypeAlias = Literal["device", "host", "disk"]
"""The kind of memory that holds bytes."""


@final
@dataclass(eq=False, slots=True, weakref_slot=True)
class TensorGroup:
    """The tensors saved by one call of a block. They are offloaded together and prefetched together. Data only."""

    block: str
    """Path of the block, for messages."""
    tensors: Callable[[], Sequence[torch.Tensor]]
    """Returns the block's parameters and buffers, which are never moved."""
    note: Callable[[str], None]
    """Adds a note about the block to ``explain()``."""
    traffic: Traffic | None = None
    """Where to count, while the step is recorded."""
    number: int = 0
    """Position among the groups of the step."""
    # Weak: a group lives as long as its block's graph, and would hold bytes that backward has released. An id may be
    # that of a later piece, so what is looked up by id is compared by identity.
    pieces: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    """Weak references to its stored tensors, by ``id``; those of freed tensors may remain."""
    unmoved: frozenset[int] | None = None
    """``id`` of each storage that is never moved; ``None`` until the first tensor."""
    is_prefetched: bool = False
    """Its bytes are being reloaded."""
    is_requested: bool = False
    """Backward has requested one of its tensors."""
    is_closed: bool = False
    """The call is over: no more tensors join."""
    has_small: bool = False
    """Whether a tensor stays on its device since it has fewer than ``min_elements`` elements."""


class Store(ABC):
    """Holds the saved tensors of blocks between forward and backward.

    ``get(put(x))`` equals ``x`` in every bit, with its shape, stride, dtype and device. What ``put`` returns is freed
    when its last reference is gone.
    """

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the store in tables."""

    def open_group(self, group: TensorGroup) -> TensorGroup | None:  # no groups by default
        """Begins the tensors of one call of a block; ``None`` if this store has no groups."""
        return None

    @abstractmethod
    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        """Stores ``tensor`` and returns its key, or an alias of it if it stays where it is."""

    @abstractmethod
    def get(self, key: object) -> torch.Tensor | None:
        """Returns the stored tensor, without autograd history; ``None`` if it was modified in place since."""

    def close_group(self, group: TensorGroup | None) -> None:  # noqa: B027  # there may be no groups
        """Ends the original forward of the block: no more tensors join the group."""

    def close(self) -> None:  # noqa: B027  # there may be nothing to release
        """Releases files, threads and pinned memory, unless something is still stored. A later ``put`` starts anew."""


@final
class DeviceStore(Store):
    """The default: a saved tensor stays on its device."""

    label = "device"

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
        """Returns an alias without history: the graph of the tensor must not be held by what it feeds."""
        return tensor.detach()

    def get(self, key: object) -> torch.Tensor:
        """Returns the alias."""
        return cast("torch.Tensor", key)


@final
class KeptTensor:
    """An alias without history, which a saved-tensor hook returns in place of the tensor.

    PyTorch does not check the versions of tensors that go through hooks, so this does.
    """

    # Autograd saves an output of an op without its history, but a hook gets it with history. If the hook returned the
    # tensor, then after `y = x.exp()` the node would hold `y`, and `y` the node, in C++, where the garbage collector
    # sees no cycle: neither would be freed. So the documentation of `saved_tensors_hooks` asks pack hooks to detach.

    __slots__ = ("__weakref__", "_tensor", "_version")

    @never_compiled
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    @never_compiled
    def get(self) -> torch.Tensor:
        """Returns the alias; raises an error if it was modified in place since."""
        if self._tensor._version != self._version:
            what = (
                f"a saved tensor of shape {list(self._tensor.shape)} was modified in place between forward and backward"
            )
            raise MutatedError(f"{what} · fix: modify a clone, or modify after backward()")
        return self._tensor


KEEP_ON_DEVICE = (KeptTensor, KeptTensor.get)
"""Saved-tensor hooks that leave tensors on the device, whatever hooks are around them."""


class RecordUnpack:
    """The ``unpack`` of saved-tensor hooks that only record, and pass tensors on."""

    __slots__ = ("next_hooks",)

    def __init__(self, next_hooks: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.next_hooks = next_hooks
        """The hooks that would be active without the record; their ``pack`` may count."""


def without_records(hooks: Any) -> Any:
    """Returns the hooks that would be active without any record: several may be taken at a time."""
    while hooks is not None and isinstance(hooks[1], RecordUnpack):
        hooks = hooks[1].next_hooks
    return hooks


class ByteHandle:
    """Stands for bytes in a byte store. Subclasses add the fields that locate them."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Drops the state of this handle that can be freed at once. The bytes will not be read again.

        Called in any thread, before :meth:`ByteStore.free`, which runs with the next call of the store.
        """

    def is_lost(self) -> bool:
        """Whether the bytes can no longer be read here. Equal bytes that are stored later do not share this handle."""
        return False


class ByteStore(ABC):
    """Holds bytes between forward and backward, for the tensors of one device.

    Copies may be asynchronous: ``put`` may return before the bytes are copied, and then holds ``data`` until they are;
    ``prefetch`` starts to reload bytes that ``get`` will return. Calls are serialized. ``prefetch`` and ``hint`` may
    name bytes that were prefetched already, and ``get`` bytes that were not.

    Raises:
        StoreError: From ``put``, ``prefetch`` and ``get``, when the store has failed; the message names block, bytes
            and fix. Nothing is left behind.
    """

    label: str
    """The name of the store in tables."""

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """The kind of memory that holds the bytes."""

    @abstractmethod
    def put(self, data: torch.Tensor, group: TensorGroup) -> ByteHandle:
        """Stores the bytes of ``data``, a flat ``uint8`` alias of the tensor's memory, which is not changed."""

    @abstractmethod
    def get(self, handle: ByteHandle, group: TensorGroup) -> torch.Tensor:
        """Returns the bytes, flat, as ``uint8``, on their original device, ready for the current stream."""

    @abstractmethod
    def free(self, handle: ByteHandle) -> None:
        """Releases the bytes, which will not be read again."""

    def hint(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:  # noqa: B027  # optional
        """Announces that the group's bytes are needed two groups from now."""

    def prefetch(self, handles: Sequence[ByteHandle], group: TensorGroup) -> None:  # noqa: B027  # optional
        """Starts to reload the group's bytes; returns at once."""

    def close_group(self, group: TensorGroup) -> None:  # noqa: B027  # optional
        """No more bytes join the group."""

    def begin_step(self) -> None:  # noqa: B027  # optional
        """Begins a new step. All bytes have been freed."""

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns the size that ``num_bytes`` take in this store, on this rank."""
        return num_bytes

    def close(self) -> None:  # noqa: B027  # optional
        """Releases files, threads and pinned memory. No bytes are stored, or they are lost."""


@final
class Total:
    """A sum of shares, and their values when it was largest.

    A step with micro-batches saves, frees and saves again. What it needs at one time is the largest sum.

    >>> total = Total()
    >>> total.add("a", 4); total.add("b", 2); total.drop("a", 4); total.add("b", 1)
    >>> total.largest, total.share_of("a"), total.share_of("b")
    (6, 4, 2)
    """

    __slots__ = ("_at_largest", "_largest", "_now", "_shares")

    def __init__(self) -> None:
        self._now = self._largest = 0
        self._shares: dict[object, int] = {}
        self._at_largest: dict[object, int] = {}

    @property
    def largest(self) -> int:
        """The largest sum at one time, as seen before each :meth:`drop` and now."""
        # The shares are copied here, when a rise is over, and not in `add`, which runs for each saved tensor.
        if self._now > self._largest:
            self._largest, self._at_largest = self._now, self._shares.copy()
        return self._largest

    def share_of(self, key: object) -> int:
        """Returns one share of the largest sum."""
        # The property is read first: it brings `_at_largest` up to date.
        return self._at_largest.get(key, 0) if self.largest else 0

    def add(self, key: object, amount: int) -> None:
        """Adds to a share; a negative ``amount`` corrects an earlier one."""
        self._shares[key] = self._shares.get(key, 0) + amount
        self._now += amount

    def drop(self, key: object, amount: int) -> None:
        """Subtracts from a share."""
        # Reading the property records the sum before this change.
        if self.largest:
            self.add(key, -amount)


@final
class Traffic:
    """Bytes that one block stores on this rank during a recorded step, as shares of ``totals`` by tier."""

    __slots__ = ("_key", "_totals", "copy_seconds", "has_moved", "wait_seconds")

    def __init__(self, totals: Mapping[str, Total] | None = None) -> None:
        self._key = object()
        self._totals = {tier: Total() for tier in TIERS} if totals is None else totals
        self.has_moved = False
        """Whether the block has stored anything."""
        self.copy_seconds = 0.0
        """Time of the copies in both directions, whether or not they overlapped with computation."""
        self.wait_seconds = 0.0
        """Time that the step waited for them."""

    @property
    def bytes_at(self) -> dict[str, int]:
        """The bytes at each tier when all blocks together stored most there."""
        return {tier: total.share_of(self._key) for tier, total in self._totals.items()}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time within it as waited for copies."""
        started = perf_counter()
        yield
        self.wait_seconds += perf_counter() - started

    def count(self, tier: str, num_bytes: int, owner: object) -> None:
        """Counts bytes that are stored at ``tier`` while ``owner`` is alive."""
        self.has_moved = True
        self._totals[tier].add(self._key, num_bytes)
        # Without this, those that are pending at exit would run then, for a count that nobody reads.
        weakref.finalize(owner, self._totals[tier].drop, self._key, num_bytes).atexit = False


class Offload(ABC):
    """A target that saved tensors can be offloaded to. Subclasses are frozen dataclasses, registered by ``name``.

    An installed package makes its target known by an entry point of the group ``graphckpt.offload``, whose name is the
    target's; it is loaded when that name is first used.
    """

    name: ClassVar[str]
    """The word for ``offload`` and in tables."""
    tier: ClassVar[Literal["host", "disk"]] = "host"
    """The kind of memory, which decides how the planner counts its bytes and estimates its copies."""

    _registry: ClassVar[Registry[Offload]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            Offload._registry.add(cls.name, cls)

    def check(self) -> str | None:
        """Returns why tensors cannot be offloaded to this target and how to fix it, or ``None`` if they can."""
        return None

    @abstractmethod
    def byte_store_for(self, device: torch.device, note: Callable[[str], None]) -> ByteStore | None:
        """Returns a byte store for tensors of ``device``; ``None``, and a note with the reason, if there is none."""

    def rates(self, profile: Any) -> tuple[float, float]:
        """Returns the bytes per second of copies to this target and back, by a device profile; 0 if unknown."""
        if self.tier == "disk":
            return profile.disk_write, profile.disk_read
        return profile.copy_out, profile.copy_in

    @classmethod
    def parse(cls, argument: str) -> Offload:
        """Parses the text after the name and a colon."""
        raise ConfigError(f"{cls.name!r}: expected nothing after a colon, got {argument!r} · fix: use {cls.name!r}")


Offload._registry = Registry("Offload", "graphckpt.offload")


def offload_targets() -> dict[str, type[Offload]]:
    """Returns the registered targets by name."""
    return Offload._registry.classes()


def parse_offload(value: Any) -> Offload | None:
    """Parses a value of ``offload``: ``True`` is ``"cpu"``; ``None`` and ``False`` are ``None``."""
    if value is None or value is False:
        return None
    if isinstance(value, Offload):
        return value
    word, colon, argument = ("cpu" if value is True else str(value)).partition(":")
    target = Offload._registry.find(word) if isinstance(value, (str, bool)) else None
    if target is None:
        targets = Offload._registry.names()
        names = f"{', '.join(map(repr, targets))}, or False"
        raise ConfigError(
            f"expected an offload target, got {value!r}{did_you_mean(word, targets)} · fix: use one of {names}"
        )
    return target.parse(argument) if colon else target()
