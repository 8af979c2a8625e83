"""What a forward changes beside its outputs: buffers, attributes, objects among its arguments.

The first run of a block changes them for good. Before the second run they are put back to what the first run saw, and
after it to what they were. Which of them move is learnt once, on the first call: version counters alone would miss
BatchNorm, whose running statistics change without a bump.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat import is_fake
from graphckpt._compat_compiler import never_compiled
from graphckpt.undo import ABSENT, CONTAINERS, Undo, differs, replace_item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_OWN = frozenset(nn.Module().__dict__) | {"forward"}  # what torch itself keeps on every module


@final
@dataclass(frozen=True, slots=True)
class Moving:
    """A place that forward changes: ``owner[key]``. ``in_place`` if the tensor there is edited, not replaced."""

    owner: dict[str, Any]
    key: str
    in_place: bool

    def take(self) -> Any:
        """Returns the present value, safe from later edits."""
        value = self.owner.get(self.key, ABSENT)
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if self.in_place else value.detach().requires_grad_(value.requires_grad)
        return copy.copy(value) if isinstance(value, CONTAINERS) else value


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a block's modules held when its first run began."""

    tensors: list[Any]
    versions: list[int]
    modes: tuple[bool, ...]
    moving: tuple[tuple[Moving, Any], ...]


@final
class ModuleState:
    """The parameters, buffers, modes and moving places of a set of modules."""

    __slots__ = ("_children", "_modules", "_moving", "_num_parameters", "_slots")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = list(modules)
        # Weak, for a module holds its wrapped forward, which holds this: a deleted model must be freed at once.
        self._modules = [weakref.ref(m) for m in found]
        self._children = [(weakref.ref(m), _children_of(m)) for m in found if m._modules]
        self._slots: list[tuple[dict[str, Any], str]] = [(m._parameters, key) for m in found for key in m._parameters]
        self._num_parameters = len(self._slots)
        self._slots += [(m._buffers, key) for m in found for key in m._buffers]
        self._moving: dict[tuple[bool, ...], tuple[Moving, ...]] = {}

    def is_stale(self) -> bool:
        """Whether a submodule was added, removed or replaced since, as adapters and quantization do."""
        for ref, children in self._children:
            module = ref()
            if module is None or _children_of(module) != children:
                return True
        return False

    def has_learnt(self, snapshot: Snapshot) -> bool:
        """Whether a call with the modules in these modes (train or eval, each) has shown which places move."""
        return snapshot.modes in self._moving

    def tensors(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers in place now."""
        return [t for owner, key in self._slots if (t := owner.get(key)) is not None]

    def take(self) -> Snapshot:
        """Reads what a second run must see again. Costs a dictionary look-up per parameter, no copy of any."""
        tensors = [owner.get(key) for owner, key in self._slots]
        modes = tuple([ref().training for ref in self._modules])  # type: ignore[union-attr]
        moving = self._moving.get(modes)
        return Snapshot(
            tensors,
            [0 if tensor is None else tensor._version for tensor in tensors],
            modes,
            tuple([(place, place.take()) for place in moving]) if moving else (),
        )

    def rewind(self, snapshot: Snapshot, undo: Undo) -> None:
        """Puts ``snapshot`` in place and notes in ``undo`` what it replaced."""
        for (owner, key), tensor in zip(self._slots, snapshot.tensors, strict=True):
            if owner.get(key) is not tensor and not _is_sharding(owner.get(key), tensor):
                replace_item(owner, key, tensor, undo)  # functional_call had put it in place for the first run
        for ref, mode in zip(self._modules, snapshot.modes, strict=True):
            module = ref()
            if module is not None and module.training is not mode:
                replace_item(module.__dict__, "training", mode, undo)
        for place, value in snapshot.moving:
            fresh = value
            if isinstance(value, torch.Tensor):
                fresh = value.clone() if place.in_place else value
            elif isinstance(value, CONTAINERS):
                fresh = copy.copy(value)
            replace_item(place.owner, place.key, fresh, undo)

    def watch(self) -> Watch:
        """Begins to learn: what it returns is given to :meth:`learn` after the first run."""
        attributes = [ref().__dict__ for ref in self._modules]
        places: list[tuple[dict[str, Any], str]] = [*self._slots]
        places += [(d, key) for d in attributes for key in d if key not in _OWN]
        tensors = [(d, key, d[key], d[key].detach().clone()) for d, key in places if _is_plain(d[key])]
        return Watch(tensors, [(d, _shallow(d)) for d in attributes])

    def learn(self, watch: Watch, snapshot: Snapshot) -> tuple[Snapshot, tuple[Moving, ...]]:
        """Returns ``snapshot`` with the values of all places that moved since ``watch``, and the places."""
        moved: list[tuple[Moving, Any]] = []
        for owner, key, tensor, before in watch.tensors:
            if owner.get(key) is not tensor:
                moved.append(
                    (
                        Moving(owner, key, in_place=False),
                        tensor.detach().requires_grad_(tensor.requires_grad),
                    )
                )
            elif watch.was_written(tensor) if is_fake(tensor) else not _same_bits(tensor, before):
                moved.append((Moving(owner, key, in_place=True), before))
        for owner, attributes in watch.attributes:
            moved.extend((Moving(owner, key, in_place=False), value) for key, value in _changed(owner, attributes))
        lasting = tuple((place, value) for place, value in moved if not _sets_up(value, place.owner.get(place.key)))
        return replace(snapshot, moving=lasting), tuple(place for place, _ in moved)

    def remember(self, snapshot: Snapshot, places: tuple[Moving, ...]) -> None:
        """Takes ``places`` for what every call with the modules in these modes moves."""
        self._moving[snapshot.modes] = places

    def began_to_move(self, snapshot: Snapshot) -> tuple[str | None, Snapshot]:
        """Returns the name of a buffer that has moved since ``snapshot``, though it did not on the first call.

        The places are learnt anew on the next call. With the snapshot that is returned, this call's second run sees the
        new value and leaves it as it is.
        """
        moved = []
        known = {(id(place.owner), place.key) for place, _ in snapshot.moving}
        start = self._num_parameters
        for (owner, key), tensor, version in zip(
            self._slots[start:], snapshot.tensors[start:], snapshot.versions[start:], strict=True
        ):
            if tensor is not None and tensor._version != version and (id(owner), key) not in known:
                moved.append(Moving(owner, key, in_place=True))
        if not moved:
            return None, snapshot
        self._moving.pop(snapshot.modes, None)
        protected = (*snapshot.moving, *((place, place.take()) for place in moved))
        return self._name(moved[0].owner, moved[0].key), replace(snapshot, moving=protected)

    def edited(self, snapshot: Snapshot) -> str | None:
        """Returns the name of a parameter or buffer that was edited in place after the first run, or ``None``."""
        known = {(id(place.owner), place.key) for place, _ in snapshot.moving}
        for (owner, key), tensor, version in zip(self._slots, snapshot.tensors, snapshot.versions, strict=True):
            if tensor is not None and tensor._version != version and (id(owner), key) not in known:
                return self._name(owner, key)
        return None

    def _name(self, owner: dict[str, Any], key: str) -> str:
        for ref in self._modules:
            module = ref()
            if module is not None and (owner is module._parameters or owner is module._buffers):
                return f"`{key}` of its {type(module).__name__}"
        return f"`{key}`"


@final
class Writes(TorchDispatchMode):
    """Notes which storages ops write to: a fake tensor has no bits to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no id stands for two

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in chain(edited_by(func, args, kwargs), _running_statistics(func, args, kwargs)):
            storage = tensor.untyped_storage()
            self.storages[id(storage)] = storage
        return func(*args, **kwargs)


@final
@dataclass(frozen=True, slots=True)
class Watch:
    """Copies of all that could move, held during a first call only."""

    tensors: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    writes: Writes = field(default_factory=Writes)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what to call for ``function``, so that edits of tensors without values are seen too."""
        if not any(is_fake(tensor) for _, _, tensor, _ in self.tensors):
            return function

        def seen(*args: Any, **kwargs: Any) -> Any:
            with self.writes:
                return function(*args, **kwargs)

        return seen

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether an op has written to the memory of ``tensor``."""
        return id(tensor.untyped_storage()) in self.writes.storages


def edited_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the arguments that an op says it edits in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _running_statistics(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields what the kernels of BatchNorm edit without saying so, unless they are told not to train."""
    schema = getattr(func, "_schema", None)
    given = {} if schema is None else {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs}
    if given.get("training", given.get("train", True)):
        for name in ("running_mean", "running_var"):
            if isinstance(given.get(name), torch.Tensor):
                yield given[name]


def _is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    return hasattr(now, "device_mesh") != hasattr(then, "device_mesh") or not (
        hasattr(then, "device_mesh") or then.untyped_storage().nbytes()
    )


def _sets_up(before: Any, after: Any) -> bool:
    """Whether a first call set something up, which is done once: a second run must not do it again.

    Transformers installs hooks on the first call and notes that in a flag.
    """
    return isinstance(after, bool) or (
        any(before is nothing for nothing in (None, False, ABSENT)) and not isinstance(after, torch.Tensor)
    )


def _children_of(module: nn.Module) -> list[int]:
    return [id(child) for child in module._modules.values()]  # ids: to hold the children would make cycles


def _is_plain(value: Any) -> bool:  # a buffer or a tensor attribute
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not is_lazy(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_meta or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: copy.copy(v) if isinstance(v, CONTAINERS) else v for k, v in attributes.items() if k not in _OWN}


def _changed(now: dict[str, Any], then: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key in dict.fromkeys(chain(then, (k for k in now if k not in _OWN))):
        old, new = then.get(key, ABSENT), now.get(key, ABSENT)
        if isinstance(old, CONTAINERS) and type(old) is type(new):
            if differs(new, old):
                yield key, old
        elif old is not new and not isinstance(old, torch.Tensor):  # tensors are compared by their bits
            yield key, old
