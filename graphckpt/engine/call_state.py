"""Copies the call state: what a call of a block, or its caller until backward, can change beside its outputs.

Before a call, the state of the block's modules is copied; for the recomputation, the copy is put in place; after it,
what was there is put back. Tensors that can change are cloned, so that the recomputation modifies clones alone.

The first call in each mode copies all and compares afterwards: see Note [What a first call teaches] in
:mod:`graphckpt.engine.block`. Later calls read the attributes of the modules, and copy the containers in them, small
buffers, the statistics of norms, and what has changed in the first call. Modifications of other tensors are seen by
their version counters, and refused.

A later call touches as little memory as it can, in C: between the kernels of a model, none of it is in a cache, so that
the same work takes five times as long as in a loop. What has not changed is compared by identity, and not copied.

RNG states, autocast and the other settings of a thread are the subject of :mod:`graphckpt.thread_state`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, starmap
from operator import is_, itemgetter
from types import SimpleNamespace
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphckpt.engine.attributes import (
    OWN,
    Attribute,
    AttributeLayout,
    Fields,
    Modes,
    Reached,
    Values,
    attribute_names,
    holds_results,
    is_plain_value,
    number_names,
)
from graphckpt.engine.clones import (
    ScriptedModules,
    ScriptedValue,
    clones_of,
    has_plain_values,
    is_plain,
    is_sharding,
    is_small,
    memory_of_several,
    read_versions,
    tensors_and_children,
    without_history,
)
from graphckpt.engine.objects import (
    ABSENT,
    CONTAINERS,
    Collector,
    Edit,
    HookCopies,
    ModuleHooks,
    Objects,
    attribute_of,
    changed_keys,
    changed_tensors,
    copy_objects,
    differs,
    empty_like,
    holds_tensors,
    is_plain_container,
    may_reach,
    put_collectors,
    restore,
    set_or_remove,
    sets_up,
    swap,
    with_stand_ins,
    without_tensors,
)
from graphckpt.thread_state import rng_devices
from graphckpt.tree import tensors_in
from graphckpt.undo import Undo

_NORMS = nn.modules.batchnorm._NormBase
_mode = itemgetter("training")
_NONE: frozenset[int] = frozenset()
_MAX_REACHED = 256  # an attribute that reaches more than this is a part of the program: a walk of it takes 100 us

_SET_UP: Final = object()
"""Stands for the value of an attribute that a call has set up, which a recomputation leaves as it is."""

policy_changes = SimpleNamespace(number=0)
"""Counts how often a policy was put on a module or taken off."""


@final
@dataclass(slots=True, eq=False)
class _Scope:
    """The copies of later calls in these train and eval modes: Note [Attributes in later calls] in attributes.py."""

    names: list[Attribute]
    """The attributes that are tensors."""
    copied: list[int]
    """Which buffers, and which of ``names``, are cloned; see :class:`CallState`."""
    objects: list[tuple[int, str, bool]]
    """The attributes that are containers, or are copied with all objects that they reach, and whether they are so."""
    shares_memory: bool
    """Whether some of ``copied`` share memory, as an attribute does that is a view of a buffer."""
    open: list[Attribute]
    """The attributes that may hold an object with tensors in a later call."""


@final
@dataclass(slots=True, eq=False)
class CallState:
    """The state before a call, of which :meth:`ModuleState.finish` leaves what the recomputation needs."""

    # With tuples rather than lists: Python's garbage collector need not visit those that hold numbers only.
    fields: Fields
    """Of the modules; nothing after the call."""
    modes: Modes
    is_first: bool
    """Whether it is a first call, which copies all."""
    tensors: tuple[Any, ...]
    """Parameters, then buffers, then the attributes ``names``, as hooks and recurrent layers set them: all indices
    count so, and those from ``len(ModuleState._slots)`` on are attributes."""
    versions: tuple[int, ...]
    copies: dict[int, torch.Tensor]
    """Of buffers and attributes, by their index in ``tensors``."""
    names: list[Attribute]
    """Of the attributes in ``tensors``."""
    layout: AttributeLayout
    plain: Values
    """Values that the readers ``layout.plain`` have read."""
    others: Values
    """Values that the readers ``layout.others`` have read; nothing after the call."""
    reached: list[Reached]
    """Nothing after the call."""
    policy_changes: int
    scope: _Scope
    """The copies that later calls make."""
    trainable: tuple[bool, ...]
    """``requires_grad`` of each parameter."""
    hooks: list[HookCopies]
    scripted: list[ScriptedValue]
    exchanged: list[tuple[int, str, Any]] = field(default_factory=list)
    """Attributes that the call has changed, or that are containers, with the values that they had before it."""
    objects: list[Objects] = field(default_factory=list)
    """The contents before the call of the objects that attributes reach."""
    collectors: list[Collector] = field(default_factory=list)
    changed: frozenset[int] = _NONE
    """The ids of the modules' ``__dict__`` that the call has changed."""
    changed_tensors: Sequence[torch.Tensor] = ()
    """Tensors that the call has modified in place and only a container or an object holds: no copy of them exists."""
    left_alone: frozenset[int] = _NONE
    """Of ``copies``, those of tensors that the call has not modified, as far as version counters show."""


@final
class ModuleState:
    __slots__ = (
        "_changed", "_children", "_empty", "_ends", "_fields_below", "_freed", "_hooks", "_inert", "_keys", "_layout",
        "_modules", "_moved", "_num_parameters", "_owners", "_plain_copies", "_roots", "_scopes", "_scripted", "_sizes",
        "_slots", "_tensor_names", "_users", "host_rng_modes", "is_lazy",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        members = list(modules)
        self._modules = [weakref.ref(m) for m in members]
        # Weak, for a module holds its wrapped forward, which holds this: a deleted model must be freed at once. What
        # is below it is held by its `_modules` anyway.
        child_ids = {id(child) for m in members for child in m._modules.values()}
        self._fields_below = [m.__dict__ if id(m) in child_ids else None for m in members]
        self._roots = [(at, weakref.ref(m)) for at, m in enumerate(members) if id(m) not in child_ids]
        self._users = frozenset([at for at, m in enumerate(members) if not type(m).__module__.startswith("torch.")])
        """The modules whose class is not PyTorch's, by number."""
        self._freed: list[Any] = []  # of the modules, which append themselves when they are freed
        self._ends = [weakref.ref(m, self._freed.append) for m in members]
        dicts = [tensors_and_children(m) for m in members]
        children = [each for *_, each in dicts if each]
        # Ids: to hold the children would make cycles.
        self._children = children, [id(child) for each in children for child in each.values()]
        self._empty = [each for three in dicts for each in three if not each]
        parameters = [each for each, *_ in dicts if each]
        owners = [*parameters, *(each for _, each, _ in dicts if each)]
        self._owners = owners
        self._sizes = [*map(len, owners)]
        self._keys = [*chain.from_iterable(owners)]
        self._slots: list[tuple[dict[str, Any], str]] = [(owner, key) for owner in owners for key in owner]
        self._num_parameters = sum(map(len, parameters))
        self._hooks = ModuleHooks(members)
        self._scripted = ScriptedModules(members)
        self._inert: dict[Attribute, weakref.ref[Any]] = {}
        """Objects in attributes that reach no tensors, so that calls need not look into them."""
        self._plain_copies: dict[tuple[int, str, bool], Reached] = {}
        self._scopes: dict[Modes, _Scope] = {}
        self._changed: set[int] = set()
        """The modules of PyTorch's of which a first call has changed attributes, or which have tensors among them."""
        self._layout = AttributeLayout([], [], [], frozenset(), [])
        self.is_lazy = any(map(is_lazy, self.tensors()))  # whether a call will give parameters shapes and values
        # Attributes that are tensors, and of them those that calls modify in place, or may: sums begin as `None`.
        self._tensor_names, self._moved = set[Attribute](), set[Attribute]()
        self.host_rng_modes: set[Modes] = set()
        """The modes in which a first call has drawn from the generators of Python or NumPy."""

    def is_stale(self) -> bool:
        """Whether a submodule was added, removed or replaced since, as adapters do, or a parameter or buffer added."""
        children, ids = self._children
        return self.is_lazy or not (
            [*chain.from_iterable(self._owners)] == self._keys
            and [*map(len, self._owners)] == self._sizes
            and [*map(id, chain.from_iterable(map(dict.values, children)))] == ids
            and not self._freed  # a new child may have got the memory, and so the id, of one that is gone
            and not any(self._empty)
        )

    def attribute_ids(self) -> set[int]:
        return set(map(id, self._fields()))

    def buffers(self) -> dict[int, tuple[dict[str, Any], str]]:
        """Returns where the buffers are, by their ids."""
        places = self._slots[self._num_parameters :]
        return {id(t): (owner, key) for owner, key in places if (t := owner.get(key)) is not None}

    def tensors(self) -> list[torch.Tensor]:
        return [t for owner, key in self._slots if (t := owner.get(key)) is not None]

    def devices(self, leaves: Iterable[Any]) -> tuple[torch.device, ...]:
        return rng_devices(chain(self.tensors(), (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))))

    def _fields(self) -> Fields:
        fields: Any = self._fields_below.copy()
        for at, ref in self._roots:
            root = ref()
            fields[at] = {} if root is None else root.__dict__
        return fields  # type: ignore[no-any-return]

    def take(self, *, is_nested: bool = False) -> CallState:
        """Copies the present state: all of it before the first call in these modes, for :meth:`finish` to compare.

        ``is_nested`` says that a block around is being recomputed, for which the policies of its forward are in place.
        """
        fields = self._fields()
        modes = _modes(fields)
        scope = self._scopes.get(modes)
        is_first = scope is None
        layout = self._layout
        if is_first:
            layout = AttributeLayout.of(fields, map(attribute_names, fields), range(len(fields)))
        plain, others = _read(layout, fields)
        # An attribute was added or removed since, or one that was `None` is an object now.
        if [*map(len, fields)] != layout.sizes or [
            *map(type, chain.from_iterable(plain + others if others else plain))
        ] != layout.kinds:
            layout = self._renew_layout(fields)
            plain, others = _read(layout, fields)
        scope = scope or self._scope_of_all(fields)
        tensors = self._tensors()
        trainable = _trainable(tensors[: self._num_parameters])
        if scope.names:
            tensors += tuple([without_history(fields[at].get(key)) for at, key in scope.names])
        reached: list[Reached] = []
        if scope.objects:
            reached = [self._reach(at, key, fields[at].get(key), is_deep=is_deep) for at, key, is_deep in scope.objects]
        if scope.open:
            reached += self._objects_with_tensors(scope.open, fields)
        return CallState(
            fields,
            modes,
            is_first,
            tensors,
            read_versions(tensors),
            clones_of(tensors, scope.copied, shares_memory=scope.shares_memory) if scope.copied else {},
            scope.names,
            layout,
            plain,
            others,
            reached,
            # -1 differs from any number: the block around takes the present forwards away, and does not count that.
            -1 if is_nested else policy_changes.number,
            scope,
            trainable,
            self._hooks.copies() if any(self._hooks.all) else [],
            self._scripted.take() if self._scripted.attributes else [],
        )

    def _tensors(self) -> tuple[Any, ...]:
        """Returns what is in the slots. The keys are those of the slots, as :meth:`is_stale` has shown."""
        return tuple(chain.from_iterable(map(dict.values, self._owners)))

    def _renew_layout(self, fields: Fields) -> AttributeLayout:
        """Notes which attributes are tensors, plain values and objects, once some have come or have another type."""
        complete = self._users.union(self._changed, [at for at, owner in enumerate(fields) if "forward" in owner])
        names = [attribute_names(owner) if at in complete else number_names(owner) for at, owner in enumerate(fields)]
        self._layout = AttributeLayout.of(fields, names, complete)
        num_slots = len(self._slots)
        tensors = [(at, key) for at, keys in enumerate(names) for key in keys if is_plain(fields[at][key])]
        self._moved.update(t for t in tensors if t not in self._tensor_names and is_small(fields[t[0]][t[1]]))
        self._tensor_names.update(tensors)
        for scope in self._scopes.values():  # attributes have other indices now: their positions in the new `names`
            scope.names = tensors
            scope.copied = [index for index in scope.copied if index < num_slots]
            scope.copied += [index for index, name in enumerate(tensors, num_slots) if name in self._moved]
            self._open(scope, fields)
        return self._layout

    def _reach(self, at: int, key: str, value: Any, *, is_deep: bool) -> Reached:
        """Copies the contents of the objects that an attribute reaches.

        A copy of plain values alone, such as those of a config, serves later calls until some change: to compare them
        takes a tenth of the time.
        """
        last = self._plain_copies.get((at, key, is_deep))
        if last is not None and last.value is value and not any(starmap(differs, last.objects)):
            return last
        objects = copy_objects([value], deeply=is_deep)
        is_plain_data = is_plain_container(objects)
        reached = Reached(at, key, value, objects, is_plain_data or holds_tensors(objects))
        if is_plain_data:
            self._plain_copies[at, key, is_deep] = reached
        return reached

    def _objects_with_tensors(self, open_attributes: Iterable[Attribute], fields: Fields) -> Iterator[Reached]:
        """Yields the attributes that are objects which reach tensors: those are inputs, like those of an argument."""
        for at, key in open_attributes:
            value = fields[at].get(key)
            inert = self._inert.get((at, key))
            if value is None or (inert is not None and inert() is value) or not may_reach(value):
                continue
            reached = self._reach(at, key, value, is_deep=True)
            if len(reached.objects) <= _MAX_REACHED and reached.is_held:
                yield reached
            else:
                self._note_inert(at, key, value)

    def _open(self, scope: _Scope, fields: Fields) -> None:
        """Notes which attributes may hold an object with tensors in a call: those that hold none, or an object."""
        copied = {
            (at, key) for at, key, is_deep in scope.objects if is_deep or isinstance(fields[at].get(key), CONTAINERS)
        }
        scope.open = [
            (at, key)
            for at in sorted(self._users)
            for key, value in fields[at].items()
            if key not in OWN and key != "forward" and (at, key) not in copied
            if value is None or (may_reach(value) and not is_plain_value(value))
        ]

    def _note_inert(self, at: int, key: str, value: object) -> None:
        with suppress(TypeError):  # there are no weak references to some, such as tuples
            self._inert[at, key] = weakref.ref(value)

    def _scope_of_all(self, fields: Fields) -> _Scope:
        present = [
            (at, key, value) for at, owner in enumerate(fields) for key, value in owner.items() if key not in OWN
        ]
        names = [(at, key) for at, key, value in present if is_plain(value)]
        num_slots = len(self._slots)
        buffers = self._slots[self._num_parameters :]
        copied = [i for i, (owner, key) in enumerate(buffers, self._num_parameters) if is_plain(owner.get(key))]
        copied += range(num_slots, num_slots + len(names))
        objects = [(at, key, at in self._users) for at, key, value in present if may_reach(value)]
        return _Scope(names, copied, objects, shares_memory=True, open=[])

    def _narrow(self, state: CallState, fields: Fields) -> None:
        """Decides what calls after a first one copy, and leaves of its state what one of them would have copied.

        The tensors and values of ``state`` were read by the layout of the first call, and keep its indices.
        """
        # 1. Tensors: buffers that are cheap to copy or cannot be seen to change, and whatever the call has changed.
        num_slots = len(self._slots)
        norms = {id(m._buffers) for ref in self._modules if isinstance(m := ref(), _NORMS) and m.training}
        copied = {
            index
            for index, (owner, key) in enumerate(self._slots)
            # The kernel of a norm writes its statistics without a version bump, so that they always count as changed.
            if index >= self._num_parameters and (id(owner) in norms or is_small(owner.get(key)))
        }
        copied.update(index for index in state.copies if index not in copied and has_changed(state, index))

        # 2. Objects. What an attribute was and is, and what later calls copy of it:
        #
        #   [1]                -> [1, 2]               its own items have changed     its items, as of every container
        #   {"a": [1]}         -> {"a": [1, 2]}        what an item holds             all that it reaches (`is_deep`)
        #   object with n = 3  -> n = 4                an attribute of it             all that it reaches (`is_deep`)
        #   object, ok = False -> ok = True            set up: done once              nothing, unless it reaches tensors
        reached: list[Reached] = []
        deep: list[Attribute] = []
        for each in state.reached:
            at, key, value, entries, is_held = each
            is_container = isinstance(value, CONTAINERS)
            own: Any = value if is_container else attribute_of(value, "__dict__")
            is_deep = any(
                owner is not own
                or not (is_container or all(sets_up(old, new) for _, old, new in changed_keys(own, then)))
                for owner, then in entries
                if differs(owner, then)
            )
            is_bounded = len(entries) <= _MAX_REACHED
            if is_deep or is_container or (is_bounded and is_held):
                # Of a large container its own items alone: `copy_objects` begins with the value itself.
                entries = entries if is_deep or is_bounded else entries[:1]
                reached.append(
                    each._replace(objects=entries, is_held=holds_tensors(entries) or is_plain_container(entries))
                )
            else:
                self._note_inert(at, key, value)
            # What is within the items of a container is copied in every call, too, if it is not much. Also where this
            # call has put it there, as a `defaultdict(list)` does: the next one may change it.
            after = copy_objects([value], limit=_MAX_REACHED + 1) if is_container and is_bounded else []
            is_nested = len(copy_objects([value], deeply=False)) < len(after) <= _MAX_REACHED
            if is_deep or is_nested:
                deep.append((at, key))

        # 3. The scope. First the modules of PyTorch's that later calls look into: `_renew_layout` reads `_changed`.
        self._changed.update(at for at, *_ in self._changes(state, fields))
        self._changed.update(at for at, _ in state.names)
        self._tensor_names.update(state.names)
        self._moved.update(state.names[index - num_slots] for index in copied if index >= num_slots)
        layout = self._renew_layout(fields)
        present = [
            (at, key, value) for at in sorted(layout.complete) for key, value in fields[at].items() if key not in OWN
        ]
        # In the order in which `_renew_layout` lists them for other scopes; the indices of `state.names` are others.
        names = [(at, key) for at, key, value in present if is_plain(value)]
        later = [index for index in copied if index < num_slots]
        later += [index for index, name in enumerate(names, num_slots) if name in self._moved]
        objects = [(at, k, False) for at, k, value in present if isinstance(value, CONTAINERS) and (at, k) not in deep]
        objects += [(at, key, True) for at, key in deep]
        shares_memory = bool(memory_of_several(state.tensors[index] for index in copied))
        scope = _Scope(names, later, objects, shares_memory, open=[])
        self._open(scope, fields)
        state.copies = {index: clone for index, clone in state.copies.items() if index in copied}
        state.reached, state.scope = reached, scope

    def _changes(self, state: CallState, fields: Fields) -> Iterator[tuple[int, str, Any, Any]]:
        """Yields ``(module, key, old value, new value)`` of the attributes that the call has replaced."""
        layout = state.layout
        # Also those without a reader: a module of which all attributes are read may have got its first one in the call.
        before: dict[int, dict[str, Any]] = {at: {} for at in sorted(layout.complete)}
        for reader, values in zip([*layout.plain, *layout.others], [*state.plain, *state.others], strict=True):
            before.setdefault(reader.module, {}).update(zip(reader.names, values, strict=False))
        for at, then in before.items():
            now = fields[at]
            now = now if at in layout.complete else {key: now[key] for key in then if key in now}
            yield from ((at, key, old, new) for key, old, new in changed_keys(now, then) if key not in OWN)

    def finish(self, state: CallState, *, learning: bool = False) -> None:
        """Leaves in ``state``, after the call, what the recomputation needs.

        One-time initialization stays. With ``learning``, which is a first call, it also decides what later calls copy.
        """
        fields, layout, state.fields = state.fields, state.layout, []
        # First, while `state` has all: its `reached` and `copies` are those of a later call from here on. Only what is
        # left in them may get into `objects` and `exchanged` below, which live as long as the graph.
        if learning:
            self._narrow(state, fields)
        changed: set[int] = set()
        plain, others = _read(layout, fields)
        if (
            [*map(len, fields)] != layout.sizes
            or not _are_same(plain, state.plain)
            or (others and not _are_same(others, state.others))
        ):
            set_up = set()
            for at, key, old, new in self._changes(state, fields):
                # A flag of a module of PyTorch's, such as `inplace`, is a setting, not a note that something is set up.
                if sets_up(old, new) and (at in self._users or key not in number_names(fields[at])):
                    set_up.add((at, key))
                else:
                    state.exchanged.append((at, key, without_history(old)))
                    changed.add(id(fields[at]))
            if set_up:
                state.plain = [
                    tuple([_SET_UP if (at, key) in set_up else v for key, v in zip(names, values, strict=False)])
                    for (at, names, _), values in zip(layout.plain, state.plain, strict=True)
                ]
        tensors = self._keep_objects(state, fields, changed) if state.reached else []
        if state.copies:
            versions = read_versions([state.tensors[index] for index in state.copies])
            pairs = zip(state.copies, versions, strict=True)
            state.left_alone = frozenset([index for index, version in pairs if version == state.versions[index]])
        if state.hooks or any(self._hooks.all):
            state.hooks = self._hooks.after_call(state.hooks)
        state.others, state.reached, state.changed_tensors = [], [], tensors
        state.changed = frozenset(changed) if changed else _NONE

    def _keep_objects(self, state: CallState, fields: Fields, changed: set[int]) -> list[torch.Tensor]:
        """Keeps what attributes reached before the call; returns the tensors among it that the call has modified."""
        tensors: list[torch.Tensor] = []
        for at, key, value, entries, is_held in state.reached:
            changes = [(owner, then) for owner, then in entries if differs(owner, then)]
            modified = changed_tensors(changes)
            tensors += modified
            if changes:
                changed.add(id(fields[at]))
            # Of what is not held, only what the call itself has changed: the rest may come to hold an output.
            remaining = entries if is_held else changes
            has_changed_itself = any(owner is value for owner, _ in changes)
            if isinstance(value, CONTAINERS) and (holds_results(value) if is_held else has_changed_itself):
                versions = [(owner, then) for owner, then in entries if isinstance(owner, torch.Tensor)]
                objects = without_tensors([(empty_like(value), entries[0][1]), *versions], modified)
                state.collectors.append(Collector(at, key, id(value), objects))
                remaining = [(owner, then) for owner, then in remaining if owner is not value]
            elif is_held and not any(each[:2] == (at, key) for each in state.exchanged):
                state.exchanged.append((at, key, value))
            if remaining := without_tensors(remaining, modified):
                state.objects.append(remaining)
        return tensors

    def remember(self, state: CallState) -> None:
        """Has later calls in these modes copy what a first one has shown, whose state after the call is ``state``."""
        self._scopes[state.modes] = state.scope

    def forget(self, state: CallState) -> None:
        self._scopes.pop(state.modes, None)
        versions = read_versions(state.tensors)[len(self._slots) :]
        changed = zip(state.names, versions, state.versions[len(self._slots) :], strict=True)
        self._moved.update(name for name, now, then in changed if now != then)

    def put_in_place(self, state: CallState, stand_in: Callable[[torch.Tensor], Any], undo: Undo) -> frozenset[int]:
        """Puts the state before the call in place; ``undo`` puts back what is there now.

        Objects that attributes hold get a ``stand_in`` for each tensor that was modified in place since. Returns the
        ids of the buffers that have the memory of their copy until then.
        """
        opened: set[int] = set()

        def edit(owner: dict[str, Any]) -> dict[str, Any]:
            if id(owner) not in opened:
                opened.add(id(owner))
                undo.append((restore, (owner, owner.copy())))
            return owner

        # Tensors before `requires_grad`, which is set, at the end, on the parameters that are in the slots by then.
        fields = self._fields()
        tensors = self._tensors()
        if state.names or state.copies or len(tensors) != len(self._slots) or not all(map(is_, tensors, state.tensors)):
            borrowed = self._put_tensors(state, fields, edit, undo)
            # By key, not `_tensors()`: a parameter that was registered since would shift those behind it.
            tensors = tuple(starmap(dict.get, self._slots))
        else:
            borrowed = _NONE
        # Once `_put_tensors` has put back what was removed since: of a module that has lost one buffer and got another,
        # only then is the size another one.
        if any(self._empty) or [*map(len, self._owners)] != self._sizes:
            self._remove_tensors(edit)
        self._put_attributes(state, fields, edit)
        for objects in state.objects:
            swap(with_stand_ins(objects, stand_in), undo)
        if state.collectors:
            put_collectors(state.collectors, fields, stand_in, edit, undo)
        if state.hooks or any(self._hooks.all):
            self._hooks.put_in_place(state.hooks, undo)
        if state.scripted:
            self._scripted.put_in_place(state.scripted, undo)
        if _trainable(tensors[: self._num_parameters]) != state.trainable:
            for parameter, is_trainable in zip(tensors, state.trainable, strict=False):
                if parameter is not None and parameter.requires_grad is not is_trainable:
                    undo.append((parameter.requires_grad_, (parameter.requires_grad,)))
                    parameter.requires_grad_(is_trainable)
        return borrowed

    def _put_attributes(self, state: CallState, fields: Fields, edit: Edit) -> None:
        if _modes(fields) != state.modes:
            for owner, mode in zip(fields, state.modes, strict=True):
                if owner.get("training", mode) is not mode:
                    edit(owner)["training"] = mode
        layout = state.layout
        if not _are_same(_read(layout, fields)[0], state.plain):
            for (at, names, _), values in zip(layout.plain, state.plain, strict=True):
                for key, value in zip(names, values, strict=False):
                    if fields[at].get(key, ABSENT) is not value:
                        # What is set up stays, but is noted too: the recomputation may set it again, as a new handle.
                        edit(fields[at]).update({} if value is _SET_UP else {key: value})
        for at, key, value in state.exchanged:
            if fields[at].get(key, ABSENT) is not value:
                set_or_remove(edit(fields[at]), key, value)
        # The call had no wrapper where a policy was set since, and that one must not act in its recomputation.
        if state.policy_changes != policy_changes.number:
            has_forward = {reader.module for reader in layout.plain if "forward" in reader.names}
            for at, owner in enumerate(fields):
                if "forward" in owner and at not in has_forward:
                    del edit(owner)["forward"]

    def held_tensors(self, state: CallState) -> Iterator[Any]:
        """Yields what was and is in the slots of the modules, and what objects in their attributes hold."""
        yield from chain(state.tensors, self._tensors())
        yield from (owner for objects in state.objects for owner, _ in objects)

    def replaced(self, state: CallState) -> Iterator[torch.Tensor]:
        """Yields tensors that ``state`` keeps, and that attributes, buffers and containers no longer do."""
        slots = self._slots + [(self._fields()[at], key) for at, key in state.names]
        for (owner, key), tensor in zip(slots, state.tensors, strict=True):
            if tensor is not None and owner.get(key) is not tensor:
                yield tensor
        for objects in (*state.objects, *(each.objects for each in state.collectors)):
            yield from tensors_in([contents for _, contents in objects])

    def _put_tensors(self, state: CallState, fields: Fields, edit: Edit, undo: Undo) -> frozenset[int]:
        slots = self._slots + [(fields[at], key) for at, key in state.names]
        for (owner, key), tensor in zip(slots, state.tensors, strict=True):
            now = owner.get(key)
            if now is not tensor and not is_sharding(now, tensor):
                edit(owner)[key] = tensor  # functional_call had replaced it for the original forward, for example
        borrowed = set()
        copies = state.copies
        if copies:
            # Clones of the clones: a second recomputation (`retain_graph`) starts from the same values.
            copies = clones_of(copies, copies, shares_memory=state.scope.shares_memory)
        for index, clone in copies.items():
            owner, key = slots[index]
            tensor = state.tensors[index]
            # A cache may know a buffer by its identity, as nested tensors know their offsets. One that forward leaves
            # alone stays the same object, and has the memory of the copy for the time being: the caller may have
            # modified it since, through `data` too, which no version shows.
            if index in state.left_alone and type(tensor) is torch.Tensor and not tensor.is_inference():
                undo.append((setattr, (tensor, "data", tensor.data)))
                tensor.data = clone
                borrowed.add(id(tensor))
            else:
                with torch.enable_grad():  # autograd forbids in-place ops on a leaf that requires grad
                    edit(owner)[key] = clone.clone() if clone.requires_grad else clone
        return frozenset(borrowed)

    def _remove_tensors(self, edit: Edit) -> None:
        """Removes buffers that the call, or what followed, has registered; what was removed is there again by now."""
        slots = {(id(owner), key) for owner, key in self._slots}
        for owner in (*self._owners, *self._empty):
            for key in [key for key, value in owner.items() if (id(owner), key) not in slots and is_plain(value)]:
                del edit(owner)[key]

    def hide(
        self, state: CallState, unread: Collection[int], stand_in: Callable[[torch.Tensor], Any], undo: Undo
    ) -> None:
        """Replaces what was modified of the parameters with ids ``unread`` by a stand-in for each."""
        for (owner, key), tensor, version in zip(self._slots, state.tensors, state.versions, strict=False):
            if id(tensor) in unread and tensor._version != version:
                undo.append((restore, (owner, owner.copy())))
                owner[key] = stand_in(tensor)

    def mutated(self, state: CallState, unread: Collection[int] = ()) -> str | None:
        versions = read_versions(state.tensors)
        if versions == state.versions:
            return self._scripted.mutated(state.scripted) if state.scripted else None
        for index, (tensor, now, then) in enumerate(zip(state.tensors, versions, state.versions, strict=True)):
            if now != then and index not in state.copies and id(tensor) not in unread:
                return self.name(index, state)
        return None

    def name(self, index: int, state: CallState) -> str:
        if index >= len(self._slots):
            at, key = state.names[index - len(self._slots)]
            return f"`{key}` of its {type(self._modules[at]()).__name__}"
        owner, key = self._slots[index]
        for ref in self._modules:
            module = ref()
            if module is not None and (owner is module._parameters or owner is module._buffers):
                return f"`{key}` of its {type(module).__name__}"
        return f"`{key}`"


def _modes(fields: Fields) -> Modes:
    try:
        return tuple(map(_mode, fields))
    except KeyError:  # `OptimizedModule` of torch.compile has a property of this name
        return tuple([owner.get("training") for owner in fields])


def _read(layout: AttributeLayout, fields: Fields) -> tuple[Values, Values]:
    """Returns what the readers ``plain`` and ``others`` read; nothing if an attribute is missing."""
    try:
        plain = [read(fields[at]) for at, _, read in layout.plain]
        return plain, [read(fields[at]) for at, _, read in layout.others] if layout.others else []
    except KeyError:
        return [], []


def _are_same(now: Values, then: Values) -> bool:
    # By identity: to compare tensors is an op, and users may define what is equal in any way.
    return len(now) == len(then) and all(map(is_, chain.from_iterable(now), chain.from_iterable(then)))


def _trainable(parameters: Iterable[torch.Tensor | None]) -> tuple[bool, ...]:
    return tuple([p is not None and p.requires_grad for p in parameters])


def has_changed(state: CallState, index: int) -> bool:
    """Whether a tensor that was copied differs from its copy; of those without values the versions are compared."""
    now, then = state.tensors[index], state.copies[index]
    if read_versions([now]) != (state.versions[index],):
        return True
    if not (has_plain_values(now) and has_plain_values(then)):
        return False
    return now.shape != then.shape or now.dtype != then.dtype or not torch.equal(now, then)
