"""The call state: what a call of a block can change beside its outputs, and its caller until backward, as it was then.

Before a call, the state of the block's modules is copied; for the recomputation, the copy is put in place; after it,
what was there is put back. Tensors that can change are cloned, so that the recomputation modifies clones alone.

The first call in each mode copies all and compares afterwards. Later calls copy the dictionaries of the modules'
attributes and the containers in them, small buffers, the statistics of norms, and what has changed in the first call.
Modifications of other tensors are seen by their version counters, and refused.

RNG states, autocast and the other settings of a thread are the subject of :mod:`graphckpt.thread_state`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, starmap
from numbers import Number
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeGuard, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphckpt._compat import current_accelerator, global_forward_hooks, is_fake, storage_of
from graphckpt.engine.clones import clones_of, has_plain_values, is_sparse_in_memory, memory_of_several, num_spanned
from graphckpt.engine.objects import (
    ABSENT,
    CONTAINERS,
    Objects,
    attribute_of,
    changed_keys,
    changed_tensors,
    copy_objects,
    differs,
    fill,
    holds_tensors,
    is_plain_container,
    may_reach,
    set_or_remove,
    sets_up,
    swap,
    with_stand_ins,
    without_tensors,
)
from graphckpt.thread_state import rng_devices
from graphckpt.tree import ATOMS, tensors_in

_OWN = frozenset(nn.Module().__dict__)  # what torch itself keeps on every module
_NORMS = nn.modules.batchnorm._NormBase
_SMALL_BYTES = 64 * 1024  # a copy of such a buffer costs less than it takes to find out whether it moves
_NOTHING_BORROWED: frozenset[int] = frozenset()
_MAX_REACHED = 256  # an attribute that reaches more than this is a part of the program: a walk of it takes 100 us

_CONSTANTS = (Number, str, bytes, Enum, range, type, torch.layout, torch.memory_format)  # NumPy registers its numbers

_Edit: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
Modes: TypeAlias = tuple[bool, ...]
"""Whether each module of a block is in training mode."""
_Module: TypeAlias = "weakref.ref[nn.Module]"
_Attribute: TypeAlias = tuple[_Module, str]

policy_changes = SimpleNamespace(number=0)
"""Counts how often a policy was put on a module or taken off."""


class _Hooks(NamedTuple):
    """The forward pre-hooks of a module, or its forward hooks, by their numbers."""

    owners: list[dict[int, Any]]
    """The hooks, and what torch notes of some of them, such as that they take keywords."""
    before: list[dict[int, Any]]
    """What ``owners`` held before the call."""
    added: frozenset[int] = frozenset()
    """The hooks that the call has added."""


@final
@dataclass(slots=True, eq=False)
class _Scope:
    """What calls with the modules in the same modes copy, beside the attributes of modules."""

    names: list[_Attribute]
    """The attributes that are tensors."""
    copied: list[int]
    """Which buffers, and which of ``names``, are cloned; see :class:`CallState`."""
    objects: list[tuple[_Module, str, bool]]
    """The attributes that are containers, or are copied with all objects that they reach, and whether they are so."""
    shares_memory: bool
    """Whether some of ``copied`` share memory, as an attribute does that is a view of a buffer."""
    open: list[_Attribute]
    """The attributes that may hold an object with tensors in a later call."""
    moved: frozenset[_Attribute]
    """The attributes that are tensors which calls modify in place."""


@final
@dataclass(slots=True, eq=False)
class CallState:
    """The state before a call, of which :meth:`ModuleState.finish` leaves what the recomputation needs."""

    # With tuples rather than lists: Python's garbage collector need not visit those that hold numbers only.
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
    numbers: tuple[Any, ...]
    """Of torch's own modules, such as the probability of a dropout."""
    trainable: tuple[bool, ...]
    """``requires_grad`` of each parameter."""
    hooks: list[_Hooks]
    changed: frozenset[int] = frozenset()
    """The ids of the dictionaries whose attributes the call has replaced, or changed within."""
    changed_tensors: Sequence[torch.Tensor] = ()
    """What the call has modified in place and only a container or an object holds, so that no copy of it exists."""
    left_alone: frozenset[int] = frozenset()
    """Of ``copies``, those of tensors that the call has not modified, as far as version counters show."""


@final
class ModuleState:
    __slots__ = (
        "_children", "_empty", "_ends", "_freed", "_hooks", "_inert", "_kinds", "_modules", "_notes_of_hooks",
        "_num_parameters", "_numbers", "_owners", "_policy_changes", "_scopes", "_slots", "_users",
        "_watched", "host_rng_modes",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        members = list(modules)
        # Weak, for a module holds its wrapped forward, which holds this: a deleted model must be freed at once.
        self._modules = [weakref.ref(m) for m in members]
        self._users = [weakref.ref(m) for m in members if not _is_of_torch(m)]
        self._freed: list[Any] = []  # of the modules, which append themselves when they are freed
        self._ends = [weakref.ref(m, self._freed.append) for m in members]
        children = [m._modules for m in members if m._modules]
        self._children = children, _ids_in(children)
        owners = [d for m in members for d in (m._parameters, m._buffers, m._modules)]
        self._empty = [d for d in owners if not d]
        owners = [d for m in members for d in (m._parameters, m._buffers) if d]
        self._owners = owners, list(map(list, owners))
        self._slots: list[tuple[dict[str, Any], str]] = [(m._parameters, key) for m in members for key in m._parameters]
        self._num_parameters = len(self._slots)
        self._slots += [(m._buffers, key) for m in members for key in m._buffers]
        self._numbers = [(weakref.ref(m), names, itemgetter(*names)) for m in members if (names := _number_names(m))]
        hooks = [*global_forward_hooks(), *chain.from_iterable(map(_hooks_of, members))]
        self._hooks: list[dict[int, Any]] = [owner for owner, *_ in hooks]  # apart: most are empty, as `any` sees fast
        self._notes_of_hooks = [notes for _, *notes in hooks]
        self._inert: dict[_Attribute, weakref.ref[Any]] = {}
        """Objects in attributes that reach no tensors, so that calls need not look into them."""
        self._scopes: dict[Modes, _Scope] = {}
        # The modules whose attributes are copied, and which of those the recomputation gets whether or not the call
        # has changed them: code after the block may change a number or a policy. Other objects are not held, as they
        # may come to hold an output, whose graph holds the copy.
        self._watched: dict[_Module, tuple[str, ...]] = {}
        self._watch(self._users)
        self._kinds: list[list[type]] = []
        """The types of the attributes of the user's modules when these were last sorted."""
        self._policy_changes = -1
        self.host_rng_modes: set[Modes] = set()
        """The modes in which a first call has drawn from the generators of Python or NumPy."""

    def is_stale(self) -> bool:
        """Whether a submodule was added, removed or replaced since, as adapters do, or a parameter or buffer added."""
        children, ids = self._children
        # A new child may have got the memory, and so the id, of one that is gone.
        return bool(self._freed) or self._has_other_slots() or _ids_in(children) != ids

    def _has_other_slots(self) -> bool:
        owners, keys = self._owners
        return any(self._empty) or list(map(list, owners)) != keys

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
        if current_accelerator() is None:
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
        is_known = scope is not None
        if self._kinds_of(attributes) != self._kinds:
            self._note_kinds(attributes)
        scope = scope or self._scope_of_all(attributes)
        values = [_without_history(attributes[ref].get(key)) for ref, key in scope.names]
        tensors: tuple[Any, ...] = (*starmap(dict.get, self._slots), *values)
        reached = [
            (ref, key, copy_objects([attributes[ref].get(key)], deeply=is_deep)) for ref, key, is_deep in scope.objects
        ]
        if is_known and scope.open:
            reached += self._objects_with_tensors(scope.open, attributes)
        return CallState(
            modes,
            tensors,
            _versions(tensors),
            clones_of(tensors, scope.copied, shares_memory=scope.shares_memory) if scope.copied else {},
            scope.names,
            attributes,
            reached,
            self._policy_changes,
            scope,
            self._read_numbers(),
            self._trainable(tensors),
            self._copy_hooks() if any(self._hooks) else [],
        )

    def _objects_with_tensors(
        self, open_attributes: Iterable[_Attribute], attributes: Mapping[_Module, dict[str, Any]]
    ) -> Iterator[tuple[_Module, str, Objects]]:
        """Yields the attributes that are objects which reach tensors: those are inputs, like those of an argument."""
        for ref, key in open_attributes:
            value = attributes[ref].get(key)
            if value is None or self._is_inert(ref, key, value) or not may_reach(value):
                continue
            objects = copy_objects([value])
            if len(objects) <= _MAX_REACHED and (holds_tensors(objects) or is_plain_container(objects)):
                yield ref, key, objects
            else:
                self._note_inert(ref, key, value)

    def _open(self, scope: _Scope, attributes: Mapping[_Module, dict[str, Any]]) -> None:
        """Notes which attributes may hold an object with tensors in a call: those that hold none, or an object."""
        copied = {
            (ref, key)
            for ref, key, is_deep in scope.objects
            if is_deep or isinstance(attributes.get(ref, {}).get(key), CONTAINERS)
        }
        scope.open = [
            (ref, key)
            for ref in self._users
            for key, value in attributes[ref].items()
            if key not in _OWN and key != "forward" and (ref, key) not in copied
            if value is None or (may_reach(value) and not _is_plain_value(value))
        ]

    def _kinds_of(self, attributes: Mapping[_Module, dict[str, Any]]) -> list[list[type]]:
        return [[*map(type, attributes[ref].values())] for ref in self._users]

    def _note_kinds(self, attributes: Mapping[_Module, dict[str, Any]]) -> None:
        """Notes which attributes are tensors, plain values and objects, once some have come or have another type."""
        self._kinds = self._kinds_of(attributes)
        self._watch(self._users)
        first = len(self._slots)
        names = [(ref, key) for ref, fields in attributes.items() for key in fields if _is_plain(fields[key])]
        for scope in self._scopes.values():
            scope.names = names
            scope.copied = [index for index in scope.copied if index < first]
            scope.copied += [index for index, name in enumerate(names, first) if name in scope.moved]
            self._open(scope, attributes)

    def _is_inert(self, ref: _Module, key: str, value: object) -> bool:
        inert = self._inert.get((ref, key))
        return inert is not None and inert() is value

    def _note_inert(self, ref: _Module, key: str, value: object) -> None:
        with suppress(TypeError):  # there are no weak references to some, such as tuples
            self._inert[ref, key] = weakref.ref(value)

    def _read_numbers(self) -> tuple[Any, ...]:
        return tuple([read(ref().__dict__) for ref, _, read in self._numbers])

    def _trainable(self, tensors: Sequence[Any]) -> tuple[bool, ...]:
        return tuple([t is not None and t.requires_grad for t in tensors[: self._num_parameters]])

    def _copy_hooks(self) -> list[_Hooks]:
        copies = []
        for hooks, notes in zip(self._hooks, self._notes_of_hooks, strict=True):
            if hooks:
                copies.append(_Hooks([hooks, *notes], list(map(dict, (hooks, *notes)))))
        return copies

    def _watch(self, modules: Iterable[_Module]) -> None:
        for ref in modules:
            fields = _fields(ref).items()
            self._watched[ref] = tuple(
                [key for key, value in fields if key == "forward" or (key not in _OWN and _is_plain_value(value))]
            )

    def _scope_of_all(self, attributes: Mapping[_Module, dict[str, Any]]) -> _Scope:
        present = [(ref, key, fields[key]) for ref, fields in attributes.items() for key in fields if key not in _OWN]
        names = [(ref, key) for ref, key, value in present if _is_plain(value)]
        first, users = len(self._slots), set(self._users)
        buffers = self._slots[self._num_parameters :]
        copied = [i for i, (owner, key) in enumerate(buffers, self._num_parameters) if _is_plain(owner.get(key))]
        copied += range(first, first + len(names))
        objects = [(ref, key, ref in users) for ref, key, value in present if may_reach(value)]
        return _Scope(names, copied, objects, shares_memory=True, open=[], moved=frozenset())

    def _narrow(self, state: CallState) -> None:
        """Leaves of a first call's state the copies of what it has changed, or a later call may change."""
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
            is_small = len(entries) <= _MAX_REACHED
            if is_deep or is_container or (is_small and (holds_tensors(entries) or is_plain_container(entries))):
                reached.append((ref, key, entries if is_deep or is_small else entries[:1]))
            else:
                self._note_inert(ref, key, value)
            # What is within the items of a container is copied in every call, too, if it is not much.
            is_nested = is_container and is_small and len(copy_objects([value], deeply=False)) < len(entries)
            if is_deep or is_nested:
                deep.append((ref, key))
        changed = [ref for ref, then in state.attributes.items() if _changes(_fields(ref), then)]
        self._watch(dict.fromkeys([*self._watched, *changed, *(ref for ref, _ in state.names)]))
        present = [(ref, key, value) for ref in self._watched for key, value in _fields(ref).items() if key not in _OWN]
        names = [(ref, key) for ref, key, value in present if _is_plain(value)]
        mutated = {state.names[index - first] for index in copied if index >= first}
        later = [index for index in copied if index < first]
        later += [index for index, name in enumerate(names, first) if name in mutated]
        objects = [(r, k, False) for r, k, value in present if isinstance(value, CONTAINERS) and (r, k) not in deep]
        objects += [(ref, key, True) for ref, key in deep]
        shares_memory = bool(memory_of_several(state.tensors[index] for index in copied))
        scope = _Scope(names, later, objects, shares_memory, open=[], moved=frozenset(mutated))
        self._open(scope, {ref: _fields(ref) for ref in self._users})
        state.copies = {index: clone for index, clone in state.copies.items() if index in copied}
        state.reached, state.scope = reached, scope

    def finish(self, state: CallState, *, learning: bool = False) -> None:
        """Leaves in ``state``, after the call, what the recomputation needs.

        What the call has only set up stays set. With ``learning``, ``state`` is all, and shows what later calls copy.
        """
        if learning:
            self._narrow(state)
        attributes: dict[_Module, dict[str, Any]] = {}
        changed: set[int] = set()
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
        reached: list[tuple[_Module, str, Objects]] = []
        tensors: list[torch.Tensor] = []
        for ref, key, objects in state.reached:
            changes = [(owner, then) for owner, then in objects if differs(owner, then)]
            modified = changed_tensors(changes)
            tensors += modified
            if changes:
                changed.add(id(_fields(ref)))
            # The caller may exchange tensors, which are inputs, and numbers until backward. Other objects are not held:
            # they may come to hold an output, whose graph holds the copy.
            is_held = holds_tensors(objects) or is_plain_container(objects)
            if is_held:
                attributes[ref].setdefault(key, state.attributes[ref][key])
            if entries := without_tensors(objects if is_held else changes, modified):
                reached.append((ref, key, entries))
        if state.copies:
            versions = _versions([state.tensors[index] for index in state.copies])
            pairs = zip(state.copies, versions, strict=True)
            state.left_alone = frozenset([index for index, version in pairs if version == state.versions[index]])
        if state.hooks or any(self._hooks):
            state.hooks = self._note_added_hooks(state.hooks)
        state.attributes, state.reached, state.changed_tensors = attributes, reached, tensors
        state.changed = frozenset(changed)

    def _note_added_hooks(self, hooks: list[_Hooks]) -> list[_Hooks]:
        before = {id(each.owners[0]): each for each in hooks}
        noted = []
        for owner, notes in zip(self._hooks, self._notes_of_hooks, strict=True):
            each = before.get(id(owner))
            if each is None and owner:
                each = _Hooks([owner, *notes], [{} for _ in (owner, *notes)])
            if each is not None:
                noted.append(each._replace(added=frozenset(owner.keys() - each.before[0].keys())))
        return noted

    def remember(self, state: CallState) -> None:
        """Has later calls in these modes copy what a first one has shown, whose state after the call is ``state``."""
        self._scopes[state.modes] = state.scope

    def forget(self, state: CallState) -> None:
        self._scopes.pop(state.modes, None)

    def put_in_place(
        self, state: CallState, stand_in: Callable[[torch.Tensor], Any], undo: Objects, restore: ExitStack
    ) -> frozenset[int]:
        """Puts the state before the call in place; what is there now goes into ``undo``, or ``restore`` puts it back.

        Objects that attributes hold get a ``stand_in`` for each tensor that was modified in place since. Returns the
        ids of the buffers that have the memory of their copy until ``restore`` ends.
        """
        opened: set[int] = set()

        def edit(owner: dict[str, Any]) -> dict[str, Any]:
            if id(owner) not in opened:
                opened.add(id(owner))
                undo.append((owner, owner.copy()))
            return owner

        borrowed = self._put_tensors(state, edit, restore)
        if self._freed or self.modes() != state.modes:
            self._put_modes(state.modes, edit)
        for ref, attributes in state.attributes.items():
            fields = _fields(ref)
            for key, value in attributes.items():
                if fields.get(key, ABSENT) is not value:
                    set_or_remove(edit(fields), key, value)
        if state.policy_changes != policy_changes.number:
            self._remove_later_policies(state, edit)
        for _, _, objects in state.reached:
            undo += swap(with_stand_ins(objects, stand_in))
        if self._freed or self._read_numbers() != state.numbers:
            self._put_numbers(state.numbers, edit)
        if state.hooks or any(self._hooks):
            self._put_hooks(state.hooks, undo)
        parameters = [*starmap(dict.get, self._slots[: self._num_parameters])]
        if self._trainable(parameters) != state.trainable:
            _put_trainable(parameters, state.trainable, restore)
        return borrowed

    def _remove_later_policies(self, state: CallState, edit: _Edit) -> None:
        for ref in self._modules:
            fields = _fields(ref)
            if "forward" in fields and "forward" not in state.attributes.get(ref, ()):
                del edit(fields)["forward"]

    def _put_modes(self, modes: Modes, edit: _Edit) -> None:
        for ref, mode in zip(self._modules, modes, strict=True):
            fields = _fields(ref)
            if fields.get("training", mode) is not mode:  # of an `OptimizedModule` it is that of the compiled module
                edit(fields)["training"] = mode

    def _put_numbers(self, numbers: tuple[Any, ...], edit: _Edit) -> None:
        for (ref, names, read), then in zip(self._numbers, numbers, strict=True):
            fields = _fields(ref)
            if fields and read(fields) != then:
                edit(fields).update(zip(names, then if len(names) > 1 else (then,), strict=True))

    def _put_hooks(self, hooks: list[_Hooks], undo: Objects) -> None:
        """Has the hooks act that were there before the call, and those that the call has added and that are there yet.

        Transformers adds hooks in a first call and notes that in a flag: a recomputation must not do it again.
        """
        before = {id(each.owners[0]): each for each in hooks}
        for owner, notes in zip(self._hooks, self._notes_of_hooks, strict=True):
            each = before.get(id(owner)) or _Hooks([owner, *notes], [{} for _ in (owner, *notes)])
            for present, then in zip(each.owners, each.before, strict=True):
                wanted = OrderedDict(then) | {number: v for number, v in present.items() if number in each.added}
                if present.keys() != wanted.keys():
                    undo.append((present, OrderedDict(present)))
                    fill(present, wanted)

    def replaced(self, state: CallState) -> Iterator[torch.Tensor]:
        """Yields tensors that ``state`` keeps, and that attributes, buffers and containers no longer do."""
        for (owner, key), tensor in zip(self._slots_of(state), state.tensors, strict=True):
            if tensor is not None and owner.get(key) is not tensor:
                yield tensor
        for *_, objects in state.reached:
            yield from tensors_in([contents for _, contents in objects])

    def _slots_of(self, state: CallState) -> list[tuple[dict[str, Any], str]]:
        return self._slots + [(_fields(ref), key) for ref, key in state.names] if state.names else self._slots

    def _put_tensors(self, state: CallState, edit: _Edit, restore: ExitStack) -> frozenset[int]:
        slots = self._slots_of(state)
        if not all(map(is_, starmap(dict.get, slots), state.tensors)):
            for (owner, key), tensor in zip(slots, state.tensors, strict=True):
                present = owner.get(key)
                if present is not tensor and not _is_sharding(present, tensor):
                    edit(owner)[key] = tensor  # functional_call had replaced it for the original forward
        borrowed = set()
        copies = state.copies
        if copies:
            copies = clones_of(copies, copies, shares_memory=state.scope.shares_memory)
        for index, clone in copies.items():
            owner, key = slots[index]
            tensor = state.tensors[index]
            # A cache may know a buffer by its identity, as nested tensors know their offsets. One that forward leaves
            # alone stays the same object, and has the memory of the copy for the time being: the caller may have
            # modified it since, through `data` too, which no version shows.
            if index in state.left_alone and type(tensor) is torch.Tensor and not tensor.is_inference():
                restore.callback(setattr, tensor, "data", tensor.data)
                tensor.data = clone
                borrowed.add(id(tensor))
            else:
                edit(owner)[key] = clone
        if self._has_other_slots():  # buffers that the call, or what followed, has registered
            keys = {(id(owner), key) for owner, key in self._slots}
            for owner in (*self._owners[0], *self._empty):
                for key in [key for key, value in owner.items() if (id(owner), key) not in keys and _is_plain(value)]:
                    del edit(owner)[key]
        return frozenset(borrowed) if borrowed else _NOTHING_BORROWED

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


def _put_trainable(parameters: Sequence[torch.Tensor | None], trainable: Sequence[bool], restore: ExitStack) -> None:
    for parameter, is_trainable in zip(parameters, trainable, strict=True):
        if parameter is not None and parameter.requires_grad is not is_trainable:
            restore.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(is_trainable)


def _hooks_of(module: nn.Module) -> Iterator[list[dict[int, Any]]]:
    """Yields the forward pre-hooks and the forward hooks, each with what torch notes of some of them."""
    yield [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    yield [module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called]


def _number_names(module: nn.Module | None) -> list[str]:
    """Names the attributes of a module of PyTorch's that a program may change from call to call.

    Those of modules without weights, such as the probability of a dropout, and numbers such as the momentum of a norm:
    the others say what shapes the weights have.
    """
    if module is None or not _is_of_torch(module):
        return []
    has_weights = bool(module._parameters or module._modules)
    kinds = (float,) if has_weights else (float, int, bool, str)
    return [key for key, value in module.__dict__.items() if key not in _OWN and type(value) in kinds]


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_plain_value(value: Any) -> bool:
    """Whether a value cannot change, and cannot come to hold an output of a block."""
    if type(value) in ATOMS or isinstance(value, _CONSTANTS):
        return True
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not value.__dict__
    if isinstance(value, partial):
        return _is_plain_value((value.func, *value.args, *value.keywords.values()))
    if isinstance(value, slice):
        return _is_plain_value((value.start, value.stop, value.step))
    return type(value) in (tuple, frozenset) and all(map(_is_plain_value, value))


def _changes(now: dict[str, Any], then: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [change for change in changed_keys(now, then) if change[0] not in _OWN]


def _without_history(value: Any) -> Any:
    has_history = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if has_history else value


def has_changed(state: CallState, index: int) -> bool:
    """Whether a tensor that was copied differs from its copy; of those without values the versions are compared."""
    now, then = state.tensors[index], state.copies[index]
    if _versions([now]) != (state.versions[index],):
        return True
    if not (has_plain_values(now) and has_plain_values(then)):
        return False
    return now.shape != then.shape or now.dtype != then.dtype or not torch.equal(now, then)


def _versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple([0 if tensor is None else tensor._version for tensor in tensors])
    except RuntimeError:  # a call in inference mode has set an attribute: inference tensors have no version
        return tuple([0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors])


def _is_small(tensor: torch.Tensor | None) -> bool:
    if tensor is None or tensor.layout is torch.sparse_coo or not (type(tensor) is torch.Tensor or is_fake(tensor)):
        return False
    num_elements = num_spanned(tensor) if is_sparse_in_memory(tensor) else tensor.numel()
    return num_elements * tensor.element_size() <= _SMALL_BYTES


def _is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    mesh = getattr(then, "device_mesh", None)  # with tensor parallelism a whole one is sharded too, over another mesh
    storage = storage_of(then)  # of a sparse tensor there is none
    return getattr(now, "device_mesh", None) != mesh or (mesh is None and storage is not None and not storage.nbytes())


def _ids_in(owners: Iterable[dict[str, Any]]) -> list[int]:
    return [*map(id, chain.from_iterable(map(dict.values, owners)))]  # ids: to hold the children would make cycles


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:  # a buffer or a tensor attribute
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not is_lazy(value)
