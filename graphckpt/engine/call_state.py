"""Copies the call state: what a call of a block, or its caller until backward, can change beside its outputs.

The same is copied in every call, so that a call may begin to do anything that earlier ones did not: see Note [What
every call copies]. RNG states, autocast and other settings of a thread are the subject of
:mod:`graphckpt.thread_state`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, starmap
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias, final
from weakref import ProxyTypes

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from graphckpt._compat import global_forward_hooks, set_version, storage_of
from graphckpt.engine.clones import (
    NOTHING_BORROWED,
    Borrowed,
    ScriptedModules,
    ScriptedValue,
    has_strided_values,
    is_clonable,
    is_like,
    is_sharding,
    is_small,
    is_sparse_in_memory,
)
from graphckpt.engine.objects import (
    CODE,
    ObjectCopy,
    Objects,
    changed_tensors,
    copy_some,
    differs,
    find_copied,
    is_plain_data,
    layout_of_type,
    restore,
    swap,
    version_of,
    with_stand_ins,
    without_history,
    without_tensors,
)
from graphckpt.thread_state import rng_devices
from graphckpt.tree import ATOMS, tensors_in
from graphckpt.undo import Undo

# Note [What every call copies]
#
#   subject                            by `take`, before the call         by `put_in_place`, for the recomputation
#   attributes of a module             copies its `__dict__`              a copy of that is its `__dict__`: whatever the
#                                                                         recomputation sets is gone with it
#   its parameters, buffers and        copies these dicts                 the dicts have these contents: handles of
#   children, by name; its hooks,                                         hooks refer to the dicts; not the parameters
#   and those of all modules                                              that FSDP exchanges
#   a list, dict, set, deque or        copies its contents: `ObjectCopy`  the same object, with these contents; an equal
#   object in an attribute                                                one if it is gone, or replaced by another
#   what these reach, and what         copies the contents, one level     the same objects, with these contents
#   context variables hold             deep each
#   small buffers and tensors in       clones them                        the same tensors, with the memory of clones;
#   attributes, statistics of norms                                       where several share memory, their values are
#                                                                         exchanged in place, so that all show it
#   other tensors                      reads their versions               nothing: a modification is refused
#   `requires_grad` of a parameter     reads it                           sets it
#
# `undo` puts back what was there: the `__dict__` objects themselves, contents, values and version counters. The module
# objects stay, since compiled code, FSDP and wrappers know them.
#
# Two things are learnt. A first call in each combination of train and eval modes clones large tensors too, and later
# ones those that it has modified (`_moved`). And modules of PyTorch's that hold numbers alone, as nearly all do, are
# not looked into (`_users`).

Fields: TypeAlias = dict[str, Any]
"""``module.__dict__``."""
Place: TypeAlias = tuple[int, str, str]
"""Number of the module, ``"_buffers"`` or ``""`` for an attribute, name."""
Modes: TypeAlias = tuple[bool | None, ...]
"""Whether each module of a block is in training mode; ``None`` for one that asks the module that it wraps."""

_OWN: Final = [*nn.Module().__dict__]  # the attributes that every module has, such as `training` and `_parameters`
_OWN_NAMES: Final = frozenset(_OWN)
_parameters_of: Final = itemgetter("_parameters")
_buffers_of: Final = itemgetter("_buffers")
_children_of: Final = itemgetter("_modules")
_hooks_of: Final = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_notes_of: Final = itemgetter(
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"
)
_version_of: Final = attrgetter("_version")
_requires_grad_of: Final = attrgetter("requires_grad")
_fields_of: Final = attrgetter("__dict__")
# The descriptor's own, which takes less than half of the time: `nn.Module.__setattr__` looks for parameters.
_set_fields: Final[Callable[[nn.Module, Any], None]] = nn.Module.__dict__["__dict__"].__set__
_NUMBERS: Final = (ATOMS - {type(None)}) | {tuple}  # what is `None` may become anything
_NORMS: Final = nn.modules.batchnorm._NormBase
# An attribute that reaches more than this is a part of the program: a walk of it takes 100 us.
_MAX_REACHED: Final = 256
_MAX_ITEMS: Final = 4096  # likewise, in all of these
_GLOBAL_HOOKS: Final = [*chain.from_iterable(global_forward_hooks())]  # of `register_module_forward_hook`


@final
class Dicts:
    """The dicts of parameters, buffers, children and hooks of some modules, and of the hooks of all, with contents."""

    # An example: a linear layer and a ReLU within a Sequential have 9 dicts, of which 2 hold anything, and 21 of hooks:
    #
    #   _filled   {"weight": w, "bias": b}   {"0": linear, "1": relu}     the dicts themselves
    #   _sizes    of all 9: 0, 2, 0,  0, 0, 0,  2, 0, 0, as parameters, buffers and children of the three modules
    #   _keys     "weight", "bias",          "0", "1"
    #   _values   w, b,                      linear, relu
    #   hooks     copies of those dicts of hooks that hold any, by their ids
    #
    # Flat, as nearly always nothing has changed, which each recomputation asks before and after it: a comparison in C
    # takes 1 us for these, one in Python for each dict 4 us. Identities are compared: `==` of tensors is an op.
    #
    # Mostly there are no hooks. PyTorch numbers the handles of all hooks that a process registers: if no handle was
    # numbered since the last time that the modules had no hooks, they still have none. To look into the 400 empty dicts
    # of a block of 100 modules took a fifth of the time in which its state was copied.

    __slots__ = (
        "_fields", "_filled", "_keys", "_sizes", "_slots", "_values", "_views", "children", "hooks",
        "num_handles", "of_buffers", "of_parameters", "parameters",
    )  # fmt: skip

    def __init__(self, fields: list[Fields], num_without_hooks: int = -1) -> None:
        """``num_without_hooks``: ``num_handles`` of a time when there were no hooks."""
        self._fields = fields
        self.of_parameters = of_parameters = [*map(_parameters_of, fields)]
        """The dict of each module that has its parameters."""
        self.of_buffers = of_buffers = [*map(_buffers_of, fields)]
        of_children = [*map(_children_of, fields)]
        self._slots = [*of_parameters, *of_buffers, *of_children]
        self._filled = filled = [*filter(None, self._slots)]
        self._sizes = [*map(len, self._slots)]
        self._keys = [*chain.from_iterable(filled)]
        self._views = views = [*map(dict.values, filled)]
        self._values = values = [*chain.from_iterable(views)]
        self.parameters = values[: sum(map(len, of_parameters))]
        """``None`` for the bias of a layer without one."""
        self.children = values[len(values) - sum(map(len, of_children)) :]
        self.num_handles = RemovableHandle.next_id
        """The handles of hooks on modules, tensors and nodes that PyTorch had numbered."""
        has_hooks = self.num_handles != num_without_hooks and self._has_hooks()
        self.hooks = {id(each): each.copy() for each in self._registries() if each} if has_hooks else {}

    def _has_hooks(self) -> bool:
        return any(_GLOBAL_HOOKS) or any(chain.from_iterable(map(_hooks_of, self._fields)))

    def _registries(self) -> Iterator[dict[Any, Any]]:
        return chain(*map(_hooks_of, self._fields), _GLOBAL_HOOKS, *map(_notes_of, self._fields))

    def now(self) -> Dicts:
        """Returns the same dicts with what they hold now; itself if that is the same, in the same order."""
        is_same = (
            [*map(len, self._slots)] == self._sizes
            and [*chain.from_iterable(self._filled)] == self._keys
            and all(map(is_, chain.from_iterable(self._views), self._values))
            and (self._has_same_hooks() if self.hooks or RemovableHandle.next_id != self.num_handles else True)
        )
        if is_same:
            return self
        present = Dicts(self._fields)
        present.num_handles = -1  # the hooks that `put` of another one brings back have no new numbers
        return present

    def _has_same_hooks(self) -> bool:
        if not self.hooks:
            return not self._has_hooks()
        present = [*filter(None, self._registries())]
        return [*map(id, present)] == [*self.hooks] and not any(map(differs, present, self.hooks.values()))

    def contents_by_id(self) -> dict[int, dict[Any, Any]]:
        """Returns what those hold that are not empty, by their ids."""
        items = zip(self._keys, self._values, strict=True)
        sizes = zip(self._filled, filter(None, self._sizes), strict=True)
        return {id(owner): dict(islice(items, size)) for owner, size in sizes} | self.hooks

    def put(self, unchanged: Iterable[dict[Any, Any]] = ()) -> None:
        """Gives the dicts their contents back, but ``unchanged`` ones and parameters that FSDP has exchanged."""
        if self.now() is self:
            return
        contents = self.contents_by_id()
        ids = {*map(id, unchanged)}
        for owner in chain(self._slots, self._registries()):
            then = contents.get(id(owner), {})
            if (owner or then) and id(owner) not in ids:  # what is empty now and was so is passed over
                restore(owner, {key: _exchanged(owner.get(key), each) for key, each in then.items()})


@final
@dataclass(slots=True, eq=False)
class CallState:
    """The state before a call."""

    modules: list[nn.Module]
    """Held, as the dicts of their parents do too, and the call holds the outermost."""
    fields: list[Fields]
    """Of each module, as copies."""
    modes: Modes
    is_first: bool
    """Whether it is a first call, which clones all tensors."""
    tensors: list[Any]
    """Parameters, then buffers, then tensors in attributes: all indices count so."""
    places: list[Place]
    """Where those behind the parameters are, in this order."""
    versions: list[int]
    copies: dict[int, torch.Tensor]
    """Of buffers and attributes, by their index in ``tensors``."""
    dicts: Dicts
    """Of parameters, buffers, children and hooks."""
    trainable: list[bool]
    """``requires_grad`` of each parameter."""
    object_copies: list[tuple[int, str, ObjectCopy]]
    """Of containers and objects in attributes: number of the module, name of the attribute."""
    objects: Objects
    """The contents of what these reach, and the versions of the tensors in them."""
    # What few calls have is set afterwards: the call of a constructor with all of them takes 0.5 us more.
    shared: Collection[int] = ()
    """The indices of the tensors with copies that share memory with others."""
    with_history: Collection[int] = ()
    """The indices of the attributes that have a history."""
    scripted: Sequence[ScriptedValue] = ()
    changed_tensors: Sequence[torch.Tensor] = ()
    """Tensors that the call has modified in place and only a container or an object holds: no copy of them exists."""


@final
class _Attributes:
    """What attributes of modules hold before a call."""

    __slots__ = ("_copy_of", "_last", "objects", "places", "reached", "tensors", "versions", "with_history")

    def __init__(self, tensors: list[Any], places: list[Place], last: dict[int, ObjectCopy]) -> None:
        # The caller's lists, to which those of attributes are added behind those of buffers.
        self.tensors = tensors
        self.places = places
        self._last = last
        self.with_history: set[int] = set()
        self.objects: list[tuple[int, str, ObjectCopy]] = []
        self.versions: Objects = []
        """Of the tensors that these objects hold."""
        self.reached: list[Any] = []
        """What else they hold; and generators, arrays, tuples and methods, none of which comes to hold an output."""
        self._copy_of: dict[int, ObjectCopy] = {}  # by id: a config is in many modules

    def tensor(self, module: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """Takes a tensor; returns it without its history, since it must not hold an earlier graph."""
        if isinstance(value, nn.Parameter) or is_lazy(value):
            return value
        if value.grad_fn is not None:
            self.with_history.add(len(self.tensors))
            value = without_history(value)
        self.tensors.append(value)
        self.places.append((module, "", name))
        return value

    def object(self, module: int, name: str, value: Any) -> Any:
        """Takes any other value that can change; what it returns does not hold it, if an output may come into it.

        That is ``None`` for what is among the ``object_copies``.
        """
        is_shape = type(value) is tuple and ATOMS.issuperset(map(type, value))
        is_function = type(value) is BuiltinFunctionType and isinstance(value.__self__, ModuleType)
        if is_shape or is_function or layout_of_type(type(value)).is_closed:  # type: ignore[arg-type]
            return value
        copied = self._copy_of.get(id(value))
        if copied is None:
            copied = self._last.get(id(value))
            if copied is None or copied.differs_from(value):  # to compare takes a fifth of the time of a copy
                copied = ObjectCopy.of(value)
            if copied is None:
                value = without_history(value)
                self.reached.append(value)
                return value
            self._copy_of[id(value)] = copied
            for item in copied.reached if len(copied.reached) <= _MAX_ITEMS else ():  # of more, its own items alone
                if isinstance(item, torch.Tensor):
                    self.versions.append((item, version_of(item)))
                else:
                    self.reached.append(item)
            if copied.attributes is not None:
                self.reached.append(copied.attributes)
        self.objects.append((module, name, copied))
        return None

    def plain_data(self) -> dict[int, ObjectCopy]:
        """Returns the copies of numbers, strings and flags, and containers of such, which may serve later calls."""
        return {number: copied for number, copied in self._copy_of.items() if copied.is_plain_data}


_NO_ATTRIBUTES: Final = _Attributes([], [], {})
_NO_OBJECTS: Final[Objects] = []


@final
class ModuleState:
    """Takes the state of the modules of a block before its calls, and puts it in place."""

    __slots__ = (
        "_children", "_ends", "_freed", "_large", "_last", "_learnt_modes", "_modules", "_moved", "_num_without_hooks",
        "_plain_data", "_scripted", "_scripted_parameters", "_shared", "_sizes", "_users", "host_rng_modes", "is_lazy",
    )  # fmt: skip

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        members = [*modules]
        scripted = [module for module in members if isinstance(module, ScriptModule)]
        self._scripted = ScriptedModules(scripted)
        self._scripted_parameters = [tensor for module in scripted for _, tensor in module._parameters.items()]
        members = [module for module in members if not isinstance(module, ScriptModule)]
        # Weak, for a module holds its wrapped forward, which holds this: a deleted model must be freed at once.
        self._modules = [weakref.ref(module) for module in members]
        self._freed: list[Any] = []  # of the modules, which append themselves when they are freed
        self._ends = [weakref.ref(module, self._freed.append) for module in members]
        self._children = [id(child) for module in members for child in module._modules.values()]
        # The ids of the tensors of the last call that has copied some, and those of them that share memory.
        self._shared: tuple[list[int], frozenset[int]] = [], frozenset()
        self._sizes: list[int] = []  # how many attributes each module had when `_look` was called, PyTorch's own too
        self._users: list[tuple[int, int]] = []
        """The modules whose attributes are looked into, and how many of PyTorch's own they begin with."""
        self._learnt_modes: set[Modes] = set()  # those in which a first call has shown what it modifies
        self._moved: dict[Modes, set[Place]] = {}
        """Tensors that calls modify in place, such as statistics, which "move"."""
        # By id: objects that reach more than `_MAX_REACHED` others, which calls do not look into. Held while attributes
        # lead to them, so that no other object gets such an id.
        self._large: dict[int, Any] = {}
        # The last copies of plain data, such as a config, which serve while they are the same: without them, the state
        # of a Llama layer takes 85 us in place of 54.
        self._plain_data: dict[int, ObjectCopy] = {}
        self._last: tuple[list[Any], Objects] = [], []
        self.is_lazy = any(map(is_lazy, self.tensors()))  # whether a call will give parameters shapes and values
        self._num_without_hooks = -1  # see `Dicts`
        self.host_rng_modes: set[Modes] = set()
        """The modes in which a first call has drawn from the generators of Python or NumPy."""

    def _live_modules(self) -> list[nn.Module]:
        modules: list[Any] = [*map(call, self._modules)]
        return [_FREED if each is None else each for each in modules] if self._freed else modules

    def tensors(self) -> list[torch.Tensor]:
        live = [*map(_fields_of, self._live_modules())]
        own = (tensor for fields in live for name in ("_parameters", "_buffers") for tensor in fields[name].values())
        return [tensor for tensor in chain(own, self._scripted_parameters) if tensor is not None]

    def devices(self, leaves: Iterable[Any]) -> tuple[torch.device, ...]:
        return rng_devices(chain(self.tensors(), (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))))

    # ---- before a call

    def take(
        self, others: Sequence[Any] = (), *, has_moved: Callable[[torch.Tensor], bool] | None = None
    ) -> CallState | None:
        """Copies the present state, and that of ``others``, which are objects that no module holds.

        Of large tensors it clones those that earlier calls have modified, or those of which ``has_moved`` says so.
        Returns ``None`` if a submodule was added, removed or replaced since, as adapters do.
        """
        # All below reads these copies, as another thread may set attributes meanwhile.
        modules = self._live_modules()
        fields = [*map(dict.copy, map(_fields_of, modules))]
        modes = tuple([each.get("training") for each in fields])
        dicts = Dicts(fields, self._num_without_hooks)
        # A new child may have got the memory, and so the id, of one that is gone.
        if [*map(id, dicts.children)] != self._children or self._freed:
            return None
        self._num_without_hooks = -1 if dicts.hooks else dicts.num_handles
        parameters = [each for each in (*dicts.parameters, *self._scripted_parameters) if each is not None]
        tensors: list[Any] = []  # what a call may modify: buffers, then tensors in attributes
        places: list[Place] = []
        if any(dicts.of_buffers):
            for at, own in enumerate(dicts.of_buffers):
                present = [key for key, each in own.items() if each is not None]
                tensors += [own[key] for key in present]
                places += [(at, "_buffers", key) for key in present]
        if [*map(len, fields)] != self._sizes:
            self._look(fields)
        num_buffers, first = len(tensors), len(parameters)
        attributes = self._take_attributes(fields, tensors, places) if self._users else _NO_ATTRIBUTES
        reached = [*attributes.reached, *others]
        objects = self._reach(reached) if reached else _NO_OBJECTS
        if attributes.versions:
            objects = [*objects, *attributes.versions]
        is_first = has_moved is None and modes not in self._learnt_modes
        moved = self._moved.get(modes, ()) if tensors else ()
        copies = {}
        # Without a list of those that small ones were in earlier calls: the check takes 0.2 us, and a tensor of another
        # size may have come under the same name.
        for at, (tensor, place) in enumerate(zip(tensors, places, strict=True), first) if tensors else ():
            is_cheap = is_first or is_small(tensor) or self._is_statistic(place, fields)
            if (is_cheap or (place in moved if has_moved is None else has_moved(tensor))) and is_clonable(tensor):
                copies[at] = (tensor.detach() if tensor.requires_grad else tensor).clone()
        tensors = [*parameters, *tensors]
        if copies:
            ids, of_attributes = [*map(id, tensors)], [each for each, _ in attributes.versions]
            # Another view may have come in the place of one, as an attribute, in a container, or as a buffer.
            has_attributes = len(places) > num_buffers or bool(of_attributes)
            if has_attributes or ids != self._shared[0] or any(each._is_view() for each in tensors[first:]):
                self._shared = ids, _sharing([*tensors, *of_attributes], range(first, len(tensors)))
        state = CallState(
            modules, fields, modes, is_first, tensors, places, _read_versions(tensors), copies, dicts,
            _trainable(parameters), attributes.objects, objects,
        )  # fmt: skip
        if copies:
            state.shared = self._shared[1]
            state.with_history = [first + each for each in attributes.with_history]
        if self._scripted.attributes:
            state.scripted = self._scripted.take()
        return state

    def _is_statistic(self, place: Place, fields: list[Fields]) -> bool:
        """Whether a buffer is a statistic of a norm that moves, which the kernel writes without a new version."""
        at, kind, _ = place
        return kind == "_buffers" and fields[at]["training"] and isinstance(self._modules[at](), _NORMS)

    def _take_attributes(self, fields: list[Fields], tensors: list[Any], places: list[Place]) -> _Attributes:
        """Takes the attributes that may change, and puts into ``fields`` what stands for them.

        It adds those that are tensors to ``tensors``, and their places to ``places``.
        """
        attributes = _Attributes(tensors, places, self._plain_data)
        for at, num_own in self._users:
            own = fields[at]
            for key, value in islice(own.items(), num_own, None):
                kind: Any = type(value)
                if kind in ATOMS or (not num_own and key in _OWN_NAMES):
                    continue
                try:
                    kind = value.__class__ if kind in ProxyTypes else kind
                    if not issubclass(kind, CODE):  # see `type(value)` in Note [Contents of objects] in objects.py
                        take = attributes.tensor if issubclass(kind, torch.Tensor) else attributes.object
                        own[key] = take(at, key, value)
                    elif kind is FunctionType and (value.__closure__ or value.__defaults__):
                        own[key] = without_history(value)  # it may hold an output of the call before
                except ReferenceError:  # a weak proxy of what is gone
                    continue
        if attributes.objects:
            self._plain_data = attributes.plain_data()
        return attributes

    def _look(self, fields: list[Fields]) -> None:
        """Notes the modules that may have other attributes than numbers."""
        # Nothing is looked into of PyTorch's own layers, each with a few numbers: their dicts are copied whole.
        # The sizes tell when an attribute has come, and not when a number has become a list: the limits say so.
        self._sizes, self._users = [*map(len, fields)], []
        for at, (ref, own) in enumerate(zip(self._modules, fields, strict=True)):
            # They come first, but where an attribute was set before `super().__init__()`: there all are looked at.
            num_own = len(_OWN) if [*islice(own, len(_OWN))] == _OWN else 0
            # Not the policy of a block, which is its `forward`.
            values = [
                each
                for each in islice(own.values(), num_own, None)
                if not type(each).__module__.startswith("graphckpt.")
            ]
            values += chain.from_iterable(value for value in values if type(value) is tuple)
            is_users = not type(ref()).__module__.startswith("torch.")
            if is_users or not num_own or not _NUMBERS.issuperset(map(type, values)):
                self._users.append((at, num_own))

    def _reach(self, values: list[Any]) -> Objects:
        """Copies the contents of all that ``values`` reach, but of what is a part of the program."""
        # Mostly that is what a config holds, the same in each call: to compare it takes a fifth of the time of a copy.
        last, objects = self._last
        if len(values) == len(last) and all(map(is_, values, last)) and not any(starmap(differs, objects)):
            return objects
        if self._large:
            ids = set(map(id, values))
            self._large = {number: value for number, value in self._large.items() if number in ids}
        few = [value for value in values if id(value) not in self._large]
        objects, is_complete = copy_some(few, _MAX_REACHED, _MAX_ITEMS)
        if not is_complete:  # later calls do not look into what reaches much
            copies = [copy_some([value], _MAX_REACHED, _MAX_ITEMS) for value in few]
            self._large |= {id(value): value for value, (_, is_all) in zip(few, copies, strict=True) if not is_all}
            objects = [entry for entries, is_all in copies if is_all for entry in entries]
        # It is held until the next call, and so must lead neither to a graph nor back to the modules.
        self._last = (values, objects) if is_plain_data(values, objects) else ([], [])
        return objects

    # ---- after a call

    def finish(self, state: CallState, *, learning: bool = False) -> None:
        """Leaves in ``state`` what the recomputation needs; with ``learning``, decides what later calls clone."""
        if state.objects and (modified := changed_tensors(state.objects)):
            state.objects, state.changed_tensors = without_tensors(state.objects, modified), modified
        if learning:
            self._sizes = []  # what was a number may be a list by now: look again
            num = len(state.trainable)
            moved = self._moved.setdefault(state.modes, set())
            moved.update([state.places[at - num] for at in state.copies if has_changed(state, at)])
            for at in [*state.copies]:
                place = state.places[at - num]
                is_cheap = is_small(state.tensors[at]) or self._is_statistic(place, state.fields)
                if not is_cheap and place not in moved:
                    del state.copies[at]

    def remember(self, state: CallState) -> None:
        """Has later calls in these modes clone what a first one has shown."""
        self._learnt_modes.add(state.modes)

    def forget(self, state: CallState) -> None:
        self._learnt_modes.discard(state.modes)

    def mutated(self, state: CallState, unread: Collection[int] = ()) -> str | None:
        """Names a tensor that was modified in place since and has no copy, beside those with ids ``unread``."""
        versions = _read_versions(state.tensors)
        if versions == state.versions:
            return self._scripted.mutated(state.scripted) if state.scripted else None
        for at, (tensor, now, then) in enumerate(zip(state.tensors, versions, state.versions, strict=True)):
            if now != then and at not in state.copies and id(tensor) not in unread:
                return self.name(at, state)
        return None

    def name(self, index: int, state: CallState) -> str:
        contents = state.dicts.contents_by_id()
        parameters = [contents.get(id(each), {}) for each in state.dicts.of_parameters]
        named = [(at, "", key) for at, own in enumerate(parameters) for key, each in own.items() if each is not None]
        places = dict(enumerate(named))
        places |= enumerate(state.places, len(state.trainable))
        if index not in places:
            return self._scripted.name(state.tensors[index])
        at, _, key = places[index]
        return f"`{key}` of its {type(self._modules[at]()).__name__}"

    def held_tensors(self, state: CallState) -> Iterator[Any]:
        """Yields what was and is in the slots of the modules, and what objects in their attributes hold."""
        yield from chain(state.tensors, self.tensors())
        yield from (owner for owner, _ in state.objects)

    def replaced_tensors(self, state: CallState) -> Iterator[torch.Tensor]:
        """Yields tensors that ``state`` keeps, and that attributes, buffers and containers no longer do."""
        present = set(map(id, self.tensors()))
        present.update(id(value) for module in self._live_modules() for value in module.__dict__.values())
        yield from (tensor for tensor in state.tensors if id(tensor) not in present)
        for _, _, copied in state.object_copies:
            yield from tensors_in([copied.content])

    # ---- for a recomputation

    def put_in_place(
        self, state: CallState, stand_in: Callable[[torch.Tensor], Any], undo: Undo, *, is_of_child: bool = False
    ) -> Borrowed:
        """Puts the state of then in place; ``undo`` puts back what is there now.

        Containers and objects get a ``stand_in`` for each tensor that was modified in place since. Of an excluded child
        (``is_of_child``) the parameters stay as they are: those that an optimizer has modified are hidden by then.
        """
        modules, dicts, parameters = state.modules, state.dicts, state.tensors[: len(state.trainable)]
        live = [*map(_fields_of, modules)]
        fields = [*map(dict.copy, state.fields)]  # another recomputation needs the same
        # `present` is of the dict objects of the call. One that has replaced such a dict since is in `live`, untouched.
        present, trainable = dicts.now(), _trainable(parameters)
        # Before the first change, as Ctrl-C may come right after it. In the dicts of then: the recomputation has these.
        undo += [(_set_trainable, (parameters, trainable)), (_give, (modules, live)), (present.put, ())]
        if present is not dicts:
            dicts.put(dicts.of_parameters if is_of_child else ())
        if state.object_copies or state.objects:
            objects = find_copied([(live[at].get(key), copied) for at, key, copied in state.object_copies])
            for at, key, copied in state.object_copies:
                fields[at][key] = objects[copied.object_id]
            copies = {copied.object_id: copied for *_, copied in state.object_copies}  # a config is in many modules
            contents = [(copied.owner_of(objects[number]), copied.content) for number, copied in copies.items()]
            swap(with_stand_ins([*contents, *state.objects], stand_in), undo)
        _give(modules, fields)
        if not is_of_child and trainable != state.trainable:
            _set_trainable(parameters, state.trainable)
        if state.scripted:
            self._scripted.put_in_place(state.scripted, undo)
        return self._put_tensors(state, fields, undo) if state.copies else NOTHING_BORROWED

    def _put_tensors(self, state: CallState, fields: list[Fields], undo: Undo) -> Borrowed:
        lent: list[torch.Tensor] = []
        tensors: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for at, clone in state.copies.items():  # see Note [How a tensor has its values of then] in clones.py
            tensor = state.tensors[at]
            if at in state.with_history:
                # Such as the weight of `spectral_norm`, which each forward sets anew. Another tensor with its values
                # serves: gradients flow through the graph of the original forward, and not through this one. By now
                # `fields` are what the modules have as their `__dict__`.
                module, _, key = state.places[at - len(state.trainable)]
                with torch.enable_grad():  # autograd forbids in-place ops on a leaf that requires grad
                    fields[module][key] = clone.detach().requires_grad_().clone()
            elif at in state.shared or not _has_own_memory(tensor):
                tensors.append(tensor)
                values.append(clone)
            else:
                lent.append(tensor)
                undo.append((_give_memory, (tensor, tensor.data, tensor._version)))
                tensor.data = clone.clone()  # a second recomputation needs the same values
        if tensors:
            undo.append((_give_values, (tensors, [each.detach().clone() for each in tensors], _read_versions(tensors))))
            _give_values(tensors, values)
        storages = (id(storage) for each in tensors if (storage := storage_of(each)) is not None)
        return Borrowed(frozenset(map(id, lent)), frozenset([*map(id, tensors), *storages]))

    def hide(
        self, state: CallState, unread: Collection[int], stand_in: Callable[[torch.Tensor], Any], undo: Undo
    ) -> None:
        """Replaces what was modified of the parameters with ids ``unread`` by a stand-in for each."""
        pairs = zip(state.tensors, state.versions, strict=True)
        modified = {id(each) for each, version in pairs if id(each) in unread and each._version != version}
        for own in state.dicts.of_parameters:
            if not modified.isdisjoint(map(id, own.values())):
                undo.append((restore, (own, own.copy())))
                own.update({key: stand_in(each) for key, each in own.items() if id(each) in modified})


_FREED: Final = nn.Module()  # stands for a module that is gone


def _exchanged(now: Any, then: Any) -> Any:
    """Returns ``then``, which comes in the place of ``now``, but the parameter that FSDP has there by now."""
    return now if isinstance(then, nn.Parameter) and is_sharding(now, then) else then


def _give(modules: list[nn.Module], fields: list[Fields]) -> None:
    """Gives modules their ``__dict__``."""
    # In one call of C, which Ctrl-C does not interrupt.
    [*map(_set_fields, modules, fields)]


def _set_trainable(parameters: Sequence[torch.Tensor], trainable: list[bool]) -> None:
    if _trainable(parameters) != trainable:
        for parameter, is_trainable in zip(parameters, trainable, strict=True):
            if parameter.requires_grad is not is_trainable:
                parameter.requires_grad_(is_trainable)


def _trainable(parameters: Iterable[torch.Tensor]) -> list[bool]:
    return [*map(_requires_grad_of, parameters)]


def _give_memory(tensor: torch.Tensor, data: torch.Tensor, version: int) -> None:
    tensor.data = data
    if tensor._version != version:
        set_version(tensor, version)


def _give_values(tensors: list[torch.Tensor], values: list[torch.Tensor], versions: Iterable[int] = ()) -> None:
    """Writes ``values`` into the memory of tensors, and sets their version counters."""
    for tensor, value in zip(tensors, values, strict=True):
        if not is_like(tensor, value):
            tensor.data = value.clone()
        elif tensor.is_inference():  # can be modified there alone
            with torch.inference_mode():
                tensor.copy_(value)
        else:
            tensor.data.copy_(value)
    for tensor, version in zip(tensors, versions, strict=False):
        if not tensor.is_inference() and tensor._version != version:
            set_version(tensor, version)


def _sharing(tensors: Sequence[Any], indices: Iterable[int]) -> frozenset[int]:
    """Returns which tensors share memory with others."""
    present = {id(each): each for each in tensors}.values()
    counts = Counter(id(storage_of(each)) for each in present)
    return frozenset(at for at in indices if counts[id(storage_of(tensors[at]))] > 1)


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a clone's memory can take the place of that of a tensor."""
    if type(tensor) is not torch.Tensor or tensor.is_inference() or tensor._is_view():
        return False
    storage = storage_of(tensor)  # a sparse tensor has none
    if storage is not None and not storage.resizable():  # an array of NumPy has the memory too
        return False
    return not is_sparse_in_memory(tensor)  # the clone would be dense


def _read_versions(tensors: Sequence[Any]) -> list[int]:
    try:
        return [*map(_version_of, tensors)]
    except RuntimeError:  # a call in inference mode has set an attribute: inference tensors have no version
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def has_changed(state: CallState, index: int) -> bool:
    """Whether a tensor that was copied differs from its copy; of those without values the versions are compared."""
    now, then = state.tensors[index], state.copies[index]
    if _read_versions([now]) != [state.versions[index]]:
        return True
    if not (has_strided_values(now) and has_strided_values(then)):
        return False
    return not is_like(now, then) or not torch.equal(now, then)
