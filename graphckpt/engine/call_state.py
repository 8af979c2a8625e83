"""The call state: what a call of a block can change beside its outputs, and what it finds, as it was before the call.

Before a call, the state of the block's modules is copied; for the recomputation, the copy is put in place; after it,
what was there is put back. Tensors that can change are cloned, so that the recomputation modifies clones alone.

The first call in each mode copies all and compares afterwards. Later calls copy the dictionaries of the modules'
attributes and the containers in them, small buffers, the statistics of norms, and what has changed in the first call.
Modifications of other tensors are seen by their version counters, and refused.

RNG states, autocast and the other settings of a thread are the subject of :mod:`graphckpt.thread_state`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeGuard, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphckpt._compat import is_fake
from graphckpt.engine.objects import (
    ABSENT,
    CONTAINERS,
    Objects,
    attribute_of,
    changed_keys,
    copy_objects,
    differs,
    may_reach,
    set_or_remove,
    sets_up,
    swap,
)
from graphckpt.thread_state import rng_devices
from graphckpt.tree import ATOMS, tensors_in

_OWN = frozenset(nn.Module().__dict__)  # what torch itself keeps on every module
_NORMS = nn.modules.batchnorm._NormBase
_SMALL_BYTES = 64 * 1024  # a copy of such a buffer costs less than it takes to find out whether it moves

Modes: TypeAlias = tuple[bool, ...]
"""Whether each module of a block is in training mode."""
_Module: TypeAlias = "weakref.ref[nn.Module]"
_Attribute: TypeAlias = tuple[_Module, str]

policy_changes = SimpleNamespace(number=0)
"""Counts how often a policy was put on a module or taken off."""


class _Scope(NamedTuple):
    """What calls with the modules in the same modes copy, beside the attributes of modules."""

    names: list[_Attribute]
    """The attributes that are tensors."""
    copied: list[int]
    """Which buffers, and which of ``names``, are cloned; see :class:`CallState`."""
    objects: list[tuple[_Module, str, bool]]
    """The attributes that are containers, or are copied with all objects that they reach, and whether they are so."""


class CallState(NamedTuple):
    # Of tuples rather than lists: Python's garbage collector need not visit those that hold numbers only.
    modes: Modes
    tensors: tuple[Any, ...]
    """Parameters, buffers, and the tensors among the attributes, which hooks and recurrent layers set."""
    versions: tuple[int, ...]
    copies: dict[int, torch.Tensor]
    """Of buffers and attributes, by their index in ``tensors``."""
    names: list[_Attribute]
    """Of the attributes in ``tensors``."""
    attributes: dict[_Module, dict[str, Any]]
    reached: list[tuple[_Module, str, Objects]]
    """Attributes, and the contents of the objects that they reach."""
    policy_changes: int
    scope: _Scope
    """What later calls copy."""
    changed: frozenset[int] = frozenset()
    """The ids of the dictionaries whose attributes the call has replaced, or changed within."""


@final
class ModuleState:
    __slots__ = (
        "_children", "_modules", "_num_parameters", "_owners", "_policy_changes", "_scopes", "_slots", "_users",
        "_watched", "host_rng_modes",
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
        self._slots += [(m._buffers, key) for m in members for key in m._buffers]
        self._scopes: dict[Modes, _Scope] = {}
        # The modules whose attributes are copied, and which of those the recomputation gets whether or not the call
        # has changed them: code after the block may change a number or a policy. Other objects are not held, as they
        # may come to hold an output, whose graph holds the copy.
        self._watched: dict[_Module, tuple[str, ...]] = {}
        self._watch(self._users)
        self._policy_changes = -1
        self.host_rng_modes: set[Modes] = set()
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

    def modes(self) -> Modes:
        return tuple([ref().training for ref in self._modules])  # type: ignore[union-attr]

    def has_learnt(self, modes: Modes) -> bool:
        return modes in self._scopes

    def attribute_ids(self) -> set[int]:
        return {id(_fields(ref)) for ref in self._modules}

    def buffer_ids(self) -> set[int]:
        return {id(t) for owner, key in self._slots[self._num_parameters :] if (t := owner.get(key)) is not None}

    def tensors(self) -> list[torch.Tensor]:
        return [t for owner, key in self._slots if (t := owner.get(key)) is not None]

    def devices(self, leaves: Iterable[Any]) -> tuple[torch.device, ...]:
        if torch.accelerator.current_accelerator() is None:
            return ()
        return rng_devices(chain(self.tensors(), (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))))

    def take(self, modes: Modes, *, is_nested: bool = False) -> CallState:
        """Copies the present state: all of it before the first call in these modes, for :meth:`finish` to compare.

        ``is_nested`` says that a block around is being recomputed, for which the policies of its forward are in place.
        """
        if is_nested or self._policy_changes != policy_changes.number:
            self._watch([ref for ref in self._modules if ref in self._watched or "forward" in _fields(ref)])
            self._policy_changes = -1 if is_nested else policy_changes.number
        scope = self._scopes.get(modes)
        attributes = {ref: _fields(ref).copy() for ref in (self._modules if scope is None else self._watched)}
        scope = scope or self._scope_of_all(attributes)
        values = [_without_history(attributes[ref].get(key)) for ref, key in scope.names]
        tensors: tuple[Any, ...] = (*starmap(dict.get, self._slots), *values)
        reached = [
            (ref, key, copy_objects([attributes[ref].get(key)], deeply=is_deep)) for ref, key, is_deep in scope.objects
        ]
        return CallState(
            modes,
            tensors,
            _versions(tensors),
            _copies(tensors, scope.copied),
            scope.names,
            attributes,
            reached,
            self._policy_changes,
            scope,
        )

    def _watch(self, modules: Iterable[_Module]) -> None:
        for ref in modules:
            fields = _fields(ref).items()
            self._watched[ref] = tuple(
                [key for key, value in fields if key == "forward" or (key not in _OWN and type(value) in ATOMS)]
            )

    def _scope_of_all(self, attributes: Mapping[_Module, dict[str, Any]]) -> _Scope:
        present = [(ref, key, fields[key]) for ref, fields in attributes.items() for key in fields if key not in _OWN]
        names = [(ref, key) for ref, key, value in present if _is_plain(value)]
        first, users = len(self._slots), set(self._users)
        buffers = self._slots[self._num_parameters :]
        copied = [i for i, (owner, key) in enumerate(buffers, self._num_parameters) if _is_plain(owner.get(key))]
        copied += range(first, first + len(names))
        return _Scope(names, copied, [(ref, key, ref in users) for ref, key, value in present if may_reach(value)])

    def _narrow(self, state: CallState) -> CallState:
        """Returns the state of a first call with copies of that alone which it has changed, or a later one may."""
        first = len(self._slots)
        norms = {id(m._buffers) for ref in self._modules if isinstance(m := ref(), _NORMS) and m.training}
        copied = {
            index
            for index, (owner, key) in enumerate(self._slots)
            # The kernel of a norm writes its statistics without a version bump, so that they always count as changed.
            if index >= self._num_parameters and (id(owner) in norms or _is_small(owner.get(key)))
        }
        copied.update(index for index in state.copies if index not in copied and has_changed(state, index))
        reached: list[tuple[_Module, str, Objects]] = []
        deep: list[_Attribute] = []
        for ref, key, entries in state.reached:
            value = state.attributes[ref].get(key)
            is_container = isinstance(value, CONTAINERS)
            own: Any = value if is_container else attribute_of(value, "__dict__")
            # The items of a container are copied in every call. An object may only have set something up.
            is_deep = any(
                owner is not own
                or not (is_container or all(sets_up(old, new) for _, old, new in changed_keys(own, then)))
                for owner, then in entries
                if differs(owner, then)
            )
            if is_deep or is_container:
                reached.append((ref, key, entries if is_deep else entries[:1]))
            if is_deep:
                deep.append((ref, key))
        changed = [ref for ref, then in state.attributes.items() if _changes(_fields(ref), then)]
        self._watch(dict.fromkeys([*self._watched, *changed, *(ref for ref, _ in state.names)]))
        present = [(ref, key, value) for ref in self._watched for key, value in _fields(ref).items() if key not in _OWN]
        names = [(ref, key) for ref, key, value in present if _is_plain(value)]
        mutated = {state.names[index - first] for index in copied if index >= first}
        later = [index for index in copied if index < first]
        later += [index for index, name in enumerate(names, first) if name in mutated]
        objects = [(r, k, False) for r, k, value in present if isinstance(value, CONTAINERS) and (r, k) not in deep]
        scope = _Scope(names, later, objects + [(ref, key, True) for ref, key in deep])
        copies = {index: clone for index, clone in state.copies.items() if index in copied}
        return state._replace(copies=copies, reached=reached, scope=scope)

    def finish(self, state: CallState, *, learning: bool = False) -> CallState:
        """Returns ``state`` after the call, without what the recomputation does not need.

        What the call has only set up stays set. With ``learning``, ``state`` is all, and shows what later calls copy.
        """
        if learning:
            state = self._narrow(state)
        attributes, changed = {}, set()
        for ref, then in state.attributes.items():
            now = _fields(ref)
            before = {key: then[key] for key in self._watched.get(ref, ()) if key in then}
            if len(now) != len(then) or not all(map(is_, now.values(), then.values())):
                for key, old, new in _changes(now, then):
                    if sets_up(old, new):
                        before.pop(key, None)
                    else:
                        before[key] = _without_history(old)
                        changed.add(id(now))
            attributes[ref] = before
        reached = [
            (ref, key, changes)
            for ref, key, objects in state.reached
            if (changes := [(owner, then) for owner, then in objects if differs(owner, then)])
        ]
        changed.update(id(_fields(ref)) for ref, *_ in reached)
        return state._replace(attributes=attributes, reached=reached, changed=frozenset(changed))

    def remember(self, state: CallState) -> None:
        """Has later calls in these modes copy what a first one has shown, whose state after the call is ``state``."""
        self._scopes[state.modes] = state.scope

    def forget(self, state: CallState) -> None:
        self._scopes.pop(state.modes, None)

    def put_in_place(self, state: CallState, undo: Objects) -> None:
        opened: set[int] = set()

        def edit(owner: dict[str, Any]) -> dict[str, Any]:
            if id(owner) not in opened:
                opened.add(id(owner))
                undo.append((owner, owner.copy()))
            return owner

        self._put_tensors(state, edit)
        for ref, mode in zip(self._modules, state.modes, strict=True):
            fields = _fields(ref)
            if fields.get("training", mode) is not mode:  # of an `OptimizedModule` it is that of the compiled module
                edit(fields)["training"] = mode
        for ref, attributes in state.attributes.items():
            fields = _fields(ref)
            for key, value in attributes.items():
                if fields.get(key, ABSENT) is not value:
                    set_or_remove(edit(fields), key, value)
        if state.policy_changes != policy_changes.number:
            for ref in self._modules:
                fields = _fields(ref)
                if "forward" in fields and "forward" not in state.attributes.get(ref, ()):
                    del edit(fields)["forward"]  # of a policy that was put on since
        for _, _, objects in state.reached:
            undo += swap(objects)

    def replaced(self, state: CallState) -> Iterator[torch.Tensor]:
        """Yields tensors that ``state`` keeps, and that attributes, buffers and containers no longer do."""
        for (owner, key), tensor in zip(self._slots_of(state), state.tensors, strict=True):
            if tensor is not None and owner.get(key) is not tensor:
                yield tensor
        for *_, objects in state.reached:
            yield from tensors_in([contents for _, contents in objects])

    def _slots_of(self, state: CallState) -> list[tuple[dict[str, Any], str]]:
        return self._slots + [(_fields(ref), key) for ref, key in state.names]

    def _put_tensors(self, state: CallState, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        slots = self._slots_of(state)
        if not all(map(is_, starmap(dict.get, slots), state.tensors)):
            for (owner, key), tensor in zip(slots, state.tensors, strict=True):
                present = owner.get(key)
                if present is not tensor and not _is_sharding(present, tensor):
                    edit(owner)[key] = tensor  # functional_call had replaced it for the original forward
        for index, clone in _copies(state.copies, state.copies).items():
            owner, key = slots[index]
            edit(owner)[key] = clone
        if self._has_other_slots():  # buffers that the call, or what followed, has registered
            keys = {(id(owner), key) for owner, key in self._slots}
            for owner in self._owners[0]:
                for key in [key for key, value in owner.items() if (id(owner), key) not in keys and _is_plain(value)]:
                    del edit(owner)[key]

    def hide(
        self, state: CallState, unread: Collection[int], stand_in: Callable[[torch.Tensor], Any], undo: Objects
    ) -> None:
        """Replaces what was modified of the parameters with ids ``unread`` by a stand-in for each."""
        for (owner, key), tensor, version in zip(self._slots, state.tensors, state.versions, strict=False):
            if id(tensor) in unread and tensor._version != version:
                undo.append((owner, owner.copy()))
                owner[key] = stand_in(tensor)

    def mutated(self, state: CallState, unread: Collection[int] = ()) -> str | None:
        versions = _versions(state.tensors)
        if versions == state.versions:
            return None
        for index, (tensor, now, then) in enumerate(zip(state.tensors, versions, state.versions, strict=True)):
            if now != then and index not in state.copies and id(tensor) not in unread:
                return self.name(index, state)
        return None

    def name(self, index: int, state: CallState) -> str:
        if index >= len(self._slots):
            ref, key = state.names[index - len(self._slots)]
            return f"`{key}` of its {type(ref()).__name__}"
        owner, key = self._slots[index]
        for ref in self._modules:
            module = ref()
            if module is not None and (owner is module._parameters or owner is module._buffers):
                return f"`{key}` of its {type(module).__name__}"
        return f"`{key}`"


def _fields(ref: weakref.ref[nn.Module]) -> dict[str, Any]:
    module = ref()
    return {} if module is None else module.__dict__


def _changes(now: dict[str, Any], then: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [change for change in changed_keys(now, then) if change[0] not in _OWN]


def _copies(tensors: Mapping[int, Any] | Sequence[Any], indices: Iterable[int]) -> dict[int, torch.Tensor]:
    clones: dict[int, torch.Tensor] = {}  # by what they are copies of: modules may share a buffer
    copies = {}
    for index in indices:
        if (tensor := tensors[index]) is not None:
            clone = clones.get(id(tensor))
            if clone is None:
                clone = clones[id(tensor)] = tensor.detach().clone()
                if type(tensor) is torch.Tensor and tensor.__dict__:
                    clone.__dict__.update(tensor.__dict__)  # as `nn.Buffer` has: tensors with attributes are not moved
                if tensor.requires_grad:
                    clone.requires_grad_()
            copies[index] = clone
    return copies


def _without_history(value: Any) -> Any:
    has_history = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if has_history else value


def has_changed(state: CallState, index: int) -> bool:
    """Whether a tensor that was copied differs from its copy; of those without values the versions are compared."""
    now, then = state.tensors[index], state.copies[index]
    if _versions([now]) != (state.versions[index],):
        return True
    if now.is_meta or is_fake(now):
        return False
    return now.shape != then.shape or now.dtype != then.dtype or not torch.equal(now, then)


def _versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple([0 if tensor is None else tensor._version for tensor in tensors])
    except RuntimeError:  # a call in inference mode has set an attribute: inference tensors have no version
        return tuple([0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors])


def _is_small(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and (type(tensor) is torch.Tensor or is_fake(tensor)) and tensor.nbytes <= _SMALL_BYTES


def _is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    mesh = getattr(then, "device_mesh", None)  # with tensor parallelism a whole one is sharded too, over another mesh
    return getattr(now, "device_mesh", None) != mesh or not (mesh is not None or then.untyped_storage().nbytes())


def _children_of(module: nn.Module) -> list[int]:
    return [id(child) for child in module._modules.values()]  # ids: to hold the children would make cycles


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:  # a buffer or a tensor attribute
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not is_lazy(value)
