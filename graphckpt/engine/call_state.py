"""What a forward changes beside its outputs: buffers, attributes, objects that attributes reach.

The original forward of a block changes them for good. Before the recomputation they are put back to what the original
forward saw, and after it to what they were. Which of them change is learnt on the first call. A later call may change
others, for example in a branch: small buffers and containers are copied in every call, attributes are compared after
it, and the statistics of norms in training mode always count as changed, since they change without a version bump.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain, starmap
from operator import is_
from types import MethodType
from typing import Any, TypeGuard, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphckpt._compat import is_fake
from graphckpt.engine.objects import (
    ABSENT,
    CONTAINERS,
    ChangedValue,
    Reached,
    Snapshot,
    Undo,
    Writes,
    differs,
    is_sharding,
    may_reach,
    replace_item,
    same_bits,
    sets_up,
)

_OWN = frozenset(nn.Module().__dict__) | {"forward"}  # what torch itself keeps on every module
_NORMS = nn.modules.batchnorm._NormBase
_SMALL_BYTES = 64 * 1024  # a copy of such a buffer costs less than it takes to find out whether it moves


@final
class PolicyChanges:
    """Counts how often a policy was put on a module or taken off."""

    def __init__(self) -> None:
        self.number = 0


policy_changes = PolicyChanges()


@final
class ModuleState:
    """The parameters, buffers, modes and moving places of a set of modules."""

    __slots__ = (
        "_attributes",
        "_changed_values",
        "_children",
        "_containers",
        "_forwards",
        "_modules",
        "_norms",
        "_num_parameters",
        "_owners",
        "_policy_changes",
        "_slots",
        "_unchanged_buffers",
        "_users",
        "host_rng_modes",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        members = list(modules)
        # Weak, for a module holds its wrapped forward, which holds this: a deleted model must be freed at once.
        self._modules = [weakref.ref(m) for m in members]
        self._users = [weakref.ref(m) for m in members if not type(m).__module__.startswith("torch.")]
        self._children = [(weakref.ref(m), _children_of(m)) for m in members if m._modules]
        owners = [d for m in members for d in (m._parameters, m._buffers)] + [
            m._modules for m in members if not m._modules
        ]
        self._owners = owners, list(map(list, owners))
        self._slots: list[tuple[dict[str, Any], str]] = [(m._parameters, key) for m in members for key in m._parameters]
        self._num_parameters = len(self._slots)
        self._norms = [weakref.ref(m) for m in members if isinstance(m, _NORMS)]
        self._slots += [(m._buffers, key) for m in members for key in m._buffers]
        self._changed_values: dict[tuple[bool, ...], tuple[ChangedValue, ...]] = {}
        self._unchanged_buffers: dict[tuple[bool, ...], list[int]] = {}  # the buffers that are not known to move
        self._attributes: dict[tuple[bool, ...], list[tuple[weakref.ref[nn.Module], str]]] = {}
        self._containers: dict[tuple[bool, ...], list[tuple[weakref.ref[nn.Module], str]]] = {}
        self._forwards: list[tuple[weakref.ref[nn.Module], weakref.ref[Any]]] = []
        self._policy_changes = -1
        self.host_rng_modes: set[tuple[bool, ...]] = set()
        """The modes in which a first call has drawn from the generators of Python or NumPy."""

    def is_stale(self) -> bool:
        """Whether a submodule was added, removed or replaced since, as adapters do, or a parameter or buffer added."""
        for ref, children in self._children:
            if (module := ref()) is None or _children_of(module) != children:
                return True
        # A new child may have got the memory, and so the id, of one that is gone.
        return self._has_other_slots() or any(ref() is None for ref in self._modules)

    def _has_other_slots(self) -> bool:
        owners, keys = self._owners
        return list(map(list, owners)) != keys

    def has_learnt(self, snapshot: Snapshot) -> bool:
        """Whether a call with the modules in these modes (train or eval, each) has shown which places move."""
        return snapshot.modes in self._changed_values

    def attribute_ids(self) -> set[int]:
        """Returns the ids of the modules' dictionaries of attributes."""
        return {id(_fields(ref)) for ref in self._modules}

    def buffer_ids(self) -> set[int]:
        """Returns the ids of the buffers in place now."""
        return {id(t) for owner, key in self._slots[self._num_parameters :] if (t := owner.get(key)) is not None}

    def tensors(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers in place now."""
        return [t for owner, key in self._slots if (t := owner.get(key)) is not None]

    def take(self, *, is_again: bool = False) -> Snapshot:
        """Reads what a recomputation must see again. Costs a dictionary look-up per parameter, no copy of any.

        Args:
            is_again: Whether this is part of the recomputation of a block around, for which the policies of its
                original forward are in place.
        """
        if is_again:
            self._policy_changes = -1
        tensors: tuple[Any, ...] = tuple(starmap(dict.get, self._slots))
        modes = tuple([ref().training for ref in self._modules])  # type: ignore[union-attr]
        changed = self._changed_values.get(modes)
        if self._policy_changes != policy_changes.number:
            self._policy_changes = policy_changes.number
            self._forwards = [
                (ref, weakref.ref(forward))
                for ref in self._modules
                if (forward := _fields(ref).get("forward")) is not None and not isinstance(forward, MethodType)
            ]
        changes, self._policy_changes = self._policy_changes, -1 if is_again else self._policy_changes
        return Snapshot(
            tensors,
            _versions(tensors),
            modes,
            tuple([(place, place.take()) for place in changed]) if changed else (),
            {i: t.detach().clone() for i in self._unchanged_buffers.get(modes, ()) if _is_small(t := tensors[i])},
            _read_attributes(self._attributes.get(modes, ())),
            tuple([_fields(ref).copy() for ref in self._users]) if changed is not None else (),
            tuple(
                [
                    (ref, key, copy.copy(value))
                    for ref, key in self._containers.get(modes, ())
                    if isinstance(value := _fields(ref).get(key), CONTAINERS)
                ]
            ),
            tuple([(module, forward()) for module, forward in self._forwards]),
            changes,
        )

    def rewind(self, snapshot: Snapshot, undo: Undo) -> None:
        """Puts ``snapshot`` in place and notes in ``undo`` what it replaced."""
        if not all(map(is_, starmap(dict.get, self._slots), snapshot.tensors)):
            for (owner, key), tensor in zip(self._slots, snapshot.tensors, strict=True):
                if owner.get(key) is not tensor and not is_sharding(owner.get(key), tensor):
                    replace_item(owner, key, tensor, undo)  # functional_call had replaced it for the original forward
        for index, copied in snapshot.copies.items():
            if _may_have_changed(snapshot.tensors[index], snapshot.versions[index], copied):
                replace_item(*self._slots[index], copied.clone(), undo)
        for ref, key, tensor, _ in snapshot.attributes:
            present = _fields(ref).get(key)
            if present is not tensor and not _is_same_memory(present, tensor):
                replace_item(_fields(ref), key, tensor, undo)
        if snapshot.policy_changes != policy_changes.number:
            self._rewind_policies(snapshot, undo)
        for ref, mode in zip(self._modules, snapshot.modes, strict=True):
            module = ref()
            if module is not None and module.training is not mode:
                replace_item(module.__dict__, "training", mode, undo)
        for place, value in snapshot.changed:
            place.rewind(value, undo)
        if self._has_other_slots():
            self._remove_new_buffers(undo)
        _protect_attributes(self._users, undo)  # a forward may set, on any call, what no first call has set

    def _remove_new_buffers(self, undo: Undo) -> None:
        """Removes the buffers that the original forward, or what followed, has registered."""
        place_keys = {(id(owner), key) for owner, key in self._slots}
        for owner in self._owners[0]:
            for key in [key for key, value in owner.items() if (id(owner), key) not in place_keys and _is_plain(value)]:
                replace_item(owner, key, ABSENT, undo)

    def _rewind_policies(self, snapshot: Snapshot, undo: Undo) -> None:
        forwards = dict(snapshot.forwards)
        for ref in self._modules:
            fields = _fields(ref)
            present = fields.get("forward")
            if present is not forwards.get(ref) and not isinstance(present, MethodType):
                replace_item(fields, "forward", forwards.get(ref, ABSENT), undo)

    def hide(
        self, snapshot: Snapshot, unread: Collection[int], stand_in: Callable[[torch.Tensor], Any], undo: Undo
    ) -> None:
        """Replaces what was modified of the parameters with ids ``unread`` by a stand-in for each."""
        for (owner, key), tensor, version in zip(self._slots, snapshot.tensors, snapshot.versions, strict=True):
            if id(tensor) in unread and tensor._version != version:
                replace_item(owner, key, stand_in(tensor), undo)

    def watch(self) -> Watch:
        """Returns copies of all values that may change, for :meth:`learn` after the original forward."""
        attributes = [ref().__dict__ for ref in self._modules]
        places: list[tuple[dict[str, Any], str]] = [*self._slots]
        places += [(d, key) for d in attributes for key in d if key not in _OWN]
        tensors = [(d, key, d[key], d[key].detach().clone()) for d, key in places if _is_plain(d[key])]
        own = [(d, key) for d in map(_fields, self._users) for key in d if key not in _OWN and may_reach(d[key])]
        return Watch(tensors, [(d, _shallow(d)) for d in attributes], [(d, key, Reached.of(d[key])) for d, key in own])

    def learn(self, watch: Watch, snapshot: Snapshot) -> tuple[Snapshot, tuple[ChangedValue, ...]]:
        """Returns ``snapshot`` with the values of all places that moved since ``watch``, and the places."""
        moved: list[tuple[ChangedValue, Any]] = []
        for owner, key, tensor, before in watch.tensors:
            is_mutated = watch.was_written(tensor) if is_fake(tensor) else not same_bits(tensor, before)
            if owner.get(key) is not tensor:
                value = before if is_mutated else tensor.detach()
                moved.append((ChangedValue(owner, key, in_place=False), value.requires_grad_(tensor.requires_grad)))
            elif is_mutated:
                moved.append((ChangedValue(owner, key, in_place=True), before))
        moved += self._norm_statistics(watch, [place for place, _ in moved])
        for owner, key, reached in watch.reached:
            if owner.get(key) is reached.value and reached.changed():
                moved.append((ChangedValue(owner, key, in_place=False, reaches=True), reached))
        place_keys = {(id(place.owner), place.key) for place, _ in moved}
        for owner, attributes in watch.attributes:
            changes = [(key, old) for key, old in _changed(owner, attributes) if (id(owner), key) not in place_keys]
            moved.extend((ChangedValue(owner, key, in_place=False), old) for key, old in changes)
        lasting = tuple((place, value) for place, value in moved if not sets_up(value, place.owner.get(place.key)))
        places = tuple(place for place, _ in moved)
        before_of = {(id(owner), key): before for owner, key, _, before in watch.tensors}
        unchanged = self._not_among(places)
        copies = {
            i: before_of[id(self._slots[i][0]), self._slots[i][1]] for i in unchanged if _is_small(snapshot.tensors[i])
        }
        tensors = _read_attributes(self._attributes_not_among(places))
        return snapshot._replace(changed=lasting, copies=copies, attributes=tensors), places

    def _norm_statistics(self, watch: Watch, moved: list[ChangedValue]) -> list[tuple[ChangedValue, Any]]:
        """Returns the statistics of norms in training mode that this call has not changed: a later call may.

        The first call may not reach the norm, or find a mean that is zero already.
        """
        owners = {id(m._buffers) for ref in self._norms if (m := ref()) is not None and m.training}
        place_keys = {(id(place.owner), place.key) for place in moved}
        return [
            (ChangedValue(owner, key, in_place=True), before)
            for owner, key, _, before in watch.tensors
            if id(owner) in owners and (id(owner), key) not in place_keys
        ]

    def with_late_changes(self, snapshot: Snapshot) -> Snapshot:
        """Returns ``snapshot`` with the attributes that this call was the first to change, and remembers them."""
        if not snapshot.fields and not snapshot.containers:  # of PyTorch's own modules alone
            return snapshot
        late: list[tuple[ChangedValue, Any]] = []
        for ref, then in zip(self._users, snapshot.fields, strict=False):  # none in a first call
            now = _fields(ref)
            if len(now) != len(then) or not all(map(is_, now.values(), then.values())):
                before = {key: value for key, value in then.items() if key not in _OWN}
                late += [(ChangedValue(now, key, in_place=False), old) for key, old in _changed(now, before)]
        for ref, key, copied in snapshot.containers:
            fields = _fields(ref)
            if isinstance(value := fields.get(key), type(copied)) and differs(value, copied):
                late.append((ChangedValue(fields, key, in_place=False), copied))
        if not late:
            return snapshot._replace(fields=(), containers=())
        restored = {(id(place.owner), place.key) for place, _ in snapshot.changed}
        late = [(place, old) for place, old in late if (id(place.owner), place.key) not in restored]
        places = self._changed_values.get(snapshot.modes)  # none if a call of the block within itself has dropped them
        if late and places is not None:
            learnt = {(id(place.owner), place.key) for place in places}
            new = [place for place, _ in late if (id(place.owner), place.key) not in learnt]
            self._changed_values[snapshot.modes] = (*places, *new)
        lasting = tuple([(place, old) for place, old in late if not sets_up(old, place.owner.get(place.key))])
        return snapshot._replace(changed=snapshot.changed + lasting, fields=(), containers=())

    def remember(self, snapshot: Snapshot, places: tuple[ChangedValue, ...]) -> None:
        """Takes ``places`` for what every call with the modules in these modes moves."""
        self._attributes[snapshot.modes] = self._attributes_not_among(places)
        self._containers[snapshot.modes] = [
            (ref, key)
            for ref in self._users
            for key, value in _fields(ref).items()
            if key not in _OWN and isinstance(value, CONTAINERS)
        ]
        self._unchanged_buffers[snapshot.modes] = self._not_among(places)
        self._changed_values[snapshot.modes] = places

    def _attributes_not_among(self, places: tuple[ChangedValue, ...]) -> list[tuple[weakref.ref[nn.Module], str]]:
        """Returns the tensor attributes that are none of ``places``."""
        place_keys = {(id(place.owner), place.key) for place in places}
        return [
            (ref, key)
            for ref in self._modules
            for owner in (_fields(ref),)
            for key, value in owner.items()
            if key not in _OWN and _is_plain(value) and (id(owner), key) not in place_keys
        ]

    def _not_among(self, places: tuple[ChangedValue, ...]) -> list[int]:
        """Returns the indices of the buffers that are none of ``places``."""
        place_keys = {(id(place.owner), place.key) for place in places}
        slots = enumerate(self._slots[self._num_parameters :], self._num_parameters)
        return [index for index, (owner, key) in slots if (id(owner), key) not in place_keys]

    def mutates_unknown(self, snapshot: Snapshot, unread: Collection[int]) -> str | None:
        """Returns the name of a parameter or buffer that forward has modified in place, and without a copy.

        A buffer is then taken for one that may move, from the next call on.
        """
        name = self.mutated(snapshot, unread)
        if name is not None:
            self._changed_values.pop(snapshot.modes, None)
        return name

    def mutated(self, snapshot: Snapshot, unread: Collection[int] = ()) -> str | None:
        """Returns the name of a parameter or buffer that was modified after the original forward, or ``None``.

        Args:
            snapshot: The state at the original forward.
            unread: The ids of parameters that the recomputation does not read.
        """
        if not snapshot.attributes and _versions(snapshot.tensors) == snapshot.versions:
            return None
        place_keys = {(id(place.owner), place.key) for place, _ in snapshot.changed}
        for index, (tensor, version) in enumerate(zip(snapshot.tensors, snapshot.versions, strict=True)):
            if (
                tensor is not None
                and tensor._version != version
                and not (index in snapshot.copies or id(tensor) in unread)
            ):
                owner, key = self._slots[index]
                if (id(owner), key) not in place_keys:
                    return self._name(owner, key)
        for ref, key, tensor, version in snapshot.attributes:
            if tensor._version != version and _fields(ref).get(key) is tensor:
                return f"`{key}` of its {type(ref()).__name__}"
        return None

    def _name(self, owner: dict[str, Any], key: str) -> str:
        for ref in self._modules:
            module = ref()
            if module is not None and (owner is module._parameters or owner is module._buffers):
                return f"`{key}` of its {type(module).__name__}"
        return f"`{key}`"


@final
@dataclass(frozen=True, slots=True)
class Watch:
    """Copies of all that could move, held during a first call only."""

    tensors: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    reached: list[tuple[dict[str, Any], str, Reached]]
    writes: Writes = field(default_factory=Writes)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what to call for ``function``, so that modifications of tensors without values are seen too."""
        if not any(is_fake(tensor) for _, _, tensor, _ in self.tensors):
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.writes:
                return function(*args, **kwargs)

        return run

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether an op has written to the memory of ``tensor``."""
        return id(tensor.untyped_storage()) in self.writes.storages


def _protect_attributes(modules: Iterable[weakref.ref[nn.Module]], undo: Undo) -> None:
    for fields in map(_fields, modules):
        undo.append((fields, None, fields.copy()))
        for key in fields.keys() - _OWN:
            value = fields[key]
            if isinstance(value, CONTAINERS):
                fields[key] = copy.copy(value)


def _fields(ref: weakref.ref[nn.Module]) -> dict[str, Any]:
    module = ref()
    return {} if module is None else module.__dict__


def _read_attributes(
    names: Iterable[tuple[weakref.ref[nn.Module], str]],
) -> tuple[tuple[weakref.ref[nn.Module], str, torch.Tensor, int], ...]:
    return tuple([(ref, key, t, t._version) for ref, key in names if _is_plain(t := _fields(ref).get(key))])


def _is_same_memory(one: Any, other: torch.Tensor) -> bool:
    """Whether two tensors are one view of one memory, which FSDP makes anew of its flat parameters."""
    return (
        _is_plain(one)
        and one.untyped_storage() is other.untyped_storage()
        and (one.storage_offset(), one.size()) == (other.storage_offset(), other.size())
    )


def _versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    return tuple([0 if tensor is None else tensor._version for tensor in tensors])


def _is_small(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return tensor is not None and type(tensor) is torch.Tensor and tensor.nbytes <= _SMALL_BYTES


def _may_have_changed(tensor: torch.Tensor, version: int, before: torch.Tensor) -> bool:
    """Whether a small buffer may differ from its copy. A comparison on an accelerator would synchronize with it."""
    if tensor._version != version or tensor.requires_grad:
        return tensor._version != version
    return tensor.device.type != "cpu" or not torch.equal(tensor, before)


def _children_of(module: nn.Module) -> list[int]:
    return [id(child) for child in module._modules.values()]  # ids: to hold the children would make cycles


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:  # a buffer or a tensor attribute
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not is_lazy(value)


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
