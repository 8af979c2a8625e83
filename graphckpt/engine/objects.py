"""Reads, compares and restores the contents of containers, objects, generators and hooks."""

from __future__ import annotations

import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context, copy_context
from functools import cache, lru_cache, partial
from operator import is_, methodcaller
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, NamedTuple, TypeAlias, final
from weakref import ProxyTypes, ref

import torch
from torch import nn

from graphckpt.tree import ATOMS
from graphckpt.undo import Undo, scope

# Note [Contents of objects]
#
# What can change of an object is what its *owners* hold, and each owner is read, compared and filled again in one way:
#
#   owner                             its contents                          filled again by
#   list, dict, set, deque            a built-in copy                       methods of the built-in type: those of a
#                                                                           subclass may refuse, count or log
#   `__dict__` of an object, or of a  a copy of the dict                    likewise, never empty in between
#   container of the program's
#   `Slots`                           a dict of those that are set          the descriptors: a frozen class has them too
#   generator, small array            its state                             its own setter
#   tensor                            its version                           nothing: it can be compared alone
#
# One level each: an owner among the contents of another one is an owner itself. So a change anywhere below is undone
# where it was made, and all that holds the same object shows it. Contents are compared by identity: `==` of a program's
# class may do anything, and of two tensors it is a tensor.
#
# Of an object only `type(value)` is asked, not `isinstance(value, ...)`, which asks an object of another class for its
# `__class__` too, and so calls the program's `__getattribute__`. A config of Transformers has one in Python: 12 such
# questions took half of the time in which the attributes of a GPT-2 layer were copied.
#
# An object that leads to more than a few hundred others is a part of the program rather than data: a tokenizer, a
# trainer, the model itself. To copy one took 0.5 s a step. Nothing of it is copied; the limits say so.

ABSENT: Final = object()
"""Stands for a key that did not exist."""

CONTAINERS: Final = (list, dict, set, deque)
"""Types that can be emptied and filled again."""

CODE: Final = (nn.Module, type, FunctionType, ModuleType)
"""Types of what is not looked into."""
_NEW: Final = (object.__new__, SimpleNamespace.__new__)
_DELEGATES = (*ProxyTypes, MethodType)  # whose attributes are those of another object
_MAX_OBJECTS = 4096  # an object that reaches more than this is a whole program, not an argument
_MAX_ARRAY_BYTES = 4096
_MAX_PLAIN_VALUES = 1024  # a container of more than this is data, whose copies cost more than a block that reads it

Objects: TypeAlias = list[tuple[Any, Any]]
"""Pairs ``(owner, its contents)``, or ``(tensor, its version)``. An owner is a container, a ``__dict__``, a
:class:`Slots`, a generator or an array: see Note [Contents of objects].

The version of a tensor that one of them holds is compared, and cannot be put back: see
:meth:`~graphckpt.engine.saved.Arguments.after_forward`.
"""

_Accessors: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]


@final
class Slots:
    """The attributes of an object that are in ``__slots__`` and not in a dictionary, which could be read and filled."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        self._object = value

    def read(self) -> dict[Any, Any]:
        present = {}
        for slot in _layout_of(self._object).slots:
            with suppress(AttributeError):
                present[slot] = slot.__get__(self._object)
        return present

    def fill(self, values: dict[Any, Any]) -> None:
        for slot in _layout_of(self._object).slots:
            if slot in values:
                slot.__set__(self._object, values[slot])  # a frozen dataclass forbids `setattr`, not this
            else:
                with suppress(AttributeError):
                    slot.__delete__(self._object)


class _Layout(NamedTuple):
    """How objects of one type are read and filled."""

    container: Any
    """The built-in type, for its methods: ``Counter.update`` adds, and a subclass may do anything."""
    accessors: _Accessors | None
    """How to read and to set the state of a generator or an array; ``None`` for any other object."""
    slots: tuple[Any, ...]
    create: Callable[[Any], Any]
    """Returns an empty object: the first ``__new__`` in C, as that of a subclass may do anything."""
    is_closed: bool
    """Whether objects are not looked into: code; ops, which have caches; a policy, whose stores have these tensors."""


def _layout_of(value: Any) -> _Layout:
    kind: Any = type(value)
    return layout_of_type(value.__class__ if kind in ProxyTypes else kind)


@lru_cache(maxsize=4096)  # bounded, as it holds the types: a program may create classes in each step
def layout_of_type(kind: Any) -> _Layout:
    # OrderedDict first, as it is a dict too: the methods of `dict` would corrupt its order.
    container = next((each for each in (OrderedDict, *CONTAINERS) if issubclass(kind, each)), None)
    accessors = _accessors_of_types(has_numpy="numpy" in sys.modules)
    accessor = None if container else next((accessors[each] for each in kind.__mro__ if each in accessors), None)
    members = (member for each in kind.__mro__ if "__slots__" in vars(each) for member in vars(each).values())
    slots = tuple(member for member in members if isinstance(member, MemberDescriptorType))
    package = str(kind.__module__).partition(".")[0]
    is_callable = any("__call__" in vars(each) for each in kind.__mro__)
    is_closed = issubclass(kind, CODE) or package == "graphckpt" or (package == "torch" and is_callable)
    # `object.__new__` alone would refuse a subclass of a built-in type: each is made by that of its own base.
    create = next(new for each in kind.__mro__ if isinstance(new := vars(each).get("__new__"), BuiltinFunctionType))
    return _Layout(container, accessor, () if container else slots, create, is_closed)


# Generators and small arrays that modules and arguments have as attributes. The global generators of Python and NumPy
# are settings of the thread: see `graphckpt.thread_state.HostRNGState`.
@cache  # by `has_numpy`: a program may import NumPy after the first call
def _accessors_of_types(*, has_numpy: bool) -> dict[type, _Accessors | None]:
    accessors: dict[type, _Accessors | None] = {
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
        random.Random: (random.Random.getstate, random.Random.setstate),
        random.SystemRandom: None,  # has no state
        torch.Tensor: (version_of, lambda tensor, version: None),
        Slots: (Slots.read, Slots.fill),
    }
    if has_numpy:
        numpy = sys.modules["numpy"]
        accessors |= {
            numpy.ndarray: (numpy.ndarray.copy, numpy.copyto),
            numpy.random.BitGenerator: (_bit_state, _set_bit_state),
            numpy.random.Generator: (_bit_state, _set_bit_state),
            numpy.random.RandomState: (methodcaller("get_state", legacy=False), numpy.random.RandomState.set_state),
        }
    return accessors


def _bit_state(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator).state


def _set_bit_state(generator: Any, state: Any) -> None:
    getattr(generator, "bit_generator", generator).state = state


def owners_of(value: Any) -> Iterator[Any]:
    """Yields what holds the contents of an object: the object itself, or its ``__dict__`` and slots, or all of them."""
    layout = _layout_of(value)
    if layout.is_closed:
        return
    if layout.container is not None:
        yield value
        if layout.container is type(value):
            return
    if layout.accessors is not None and (not hasattr(value, "flags") or _is_own_small_array(value)):
        yield value
    if isinstance(attributes := attribute_of(value, "__dict__"), dict):
        yield attributes
    if layout.slots:
        yield Slots(value)


def _is_own_small_array(array: Any) -> bool:
    """Whether nothing else owns the memory of an array, such as a tensor, and it is a counter rather than data."""
    is_own = array.flags.owndata and array.flags.writeable and type(array).__module__ == "numpy"
    return bool(is_own and not array.dtype.hasobject and array.nbytes <= _MAX_ARRAY_BYTES)


def contents(owner: Any) -> Any:
    container, accessors, *_ = _layout_of(owner)
    if container is None:
        return accessors[0](owner)  # type: ignore[index]
    if type(owner) is container:
        return container(owner)
    # A subclass may iterate over anything, such as items that it creates anew each time.
    return container(container.items(owner) if issubclass(container, dict) else container.__iter__(owner))


def empty_like(owner: Any) -> Any:
    """Returns an empty container of the same type, such as a deque with the same ``maxlen``."""
    empty = _layout_of(owner).create(type(owner))
    if isinstance(owner, deque):
        deque.__init__(empty, (), owner.maxlen)
    elif isinstance(owner, defaultdict):
        empty.default_factory = owner.default_factory
    if isinstance(attributes := attribute_of(owner, "__dict__"), dict):
        attribute_of(empty, "__dict__").update(attributes)
    return empty


def fill(owner: Any, value: Any) -> None:
    kind, accessors, *_ = _layout_of(owner)
    if accessors is not None:
        accessors[1](owner, value)
        return
    if issubclass(kind, dict):
        # Never empty in between: it may be the `__dict__` of a module, which another thread reads, or Ctrl-C may come.
        if kind is dict:
            dict.update(owner, value)
        else:  # `OrderedDict.update` would call the `__setitem__` of a subclass
            for key, item in value.items():
                kind.__setitem__(owner, key, item)
        for key in [key for key in kind.keys(owner) if key not in value]:
            kind.__delitem__(owner, key)
        if not all(map(is_, kind.keys(owner), value)):
            for key, item in value.items():  # each goes to the end, in turn
                kind.__delitem__(owner, key)
                kind.__setitem__(owner, key, item)
    else:
        kind.clear(owner)
        kind.update(owner, value) if kind is set else kind.extend(owner, value)


def differs(now: Any, then: Any) -> bool:
    """Whether two containers hold other objects, or in another order, compared by identity (items of sets by equality).

    ``then`` is the state of ``now`` if that is a generator or an array.
    """
    if type(now) not in _PLAIN_DATA:
        if isinstance(now, (torch.Tensor, torch.Generator)):
            return version_of(now) != then if isinstance(now, torch.Tensor) else not torch.equal(contents(now), then)
        if not isinstance(now, (Slots, *CONTAINERS)):  # NumPy's generators have arrays in their states
            return pickle.dumps(contents(now)) != pickle.dumps(then)
        now = contents(now)
    if len(now) != len(then):
        return True
    if not isinstance(now, dict):
        return bool(now != then) if isinstance(now, set) else not all(map(is_, now, then))
    return not (all(map(is_, now, then)) and all(map(is_, now.values(), then.values())))


def swap(objects: Objects, undo: Undo) -> None:
    """Gives each object its contents in ``objects``; ``undo`` gives them back what they held.

    Tensors are passed over: their versions can only be compared.
    """
    present: Objects = []
    changed: Objects = []
    for owner, then in objects:
        if isinstance(owner, torch.Tensor):
            continue
        if differs(owner, then):
            present.append((owner, contents(owner)))
            changed.append((owner, then))
        else:  # the recomputation may change it yet
            present.append((owner, then))
    undo += [(restore, each) for each in present]  # before the first change, as Ctrl-C may come between two
    for owner, then in changed:
        fill(owner, then)


def restore(owner: Any, then: Any) -> None:
    if differs(owner, then):
        fill(owner, then)


def copy_objects(values: Iterable[Any]) -> Objects:
    """Copies, one level deep each, the containers, attributes and generators that objects among ``values`` reach.

    This is how a key-value cache that is passed by reference can be seen as it was. The versions of tensors come last.
    """
    return copy_some(values, _MAX_OBJECTS, sys.maxsize)[0]


def copy_some(values: Iterable[Any], limit: int, max_items: int) -> tuple[Objects, bool]:
    """Copies likewise up to ``limit`` objects and ``max_items`` in them; returns whether that is all."""
    ids: set[int] = set()  # of what `objects` holds, so that none of them is freed and its id given to another
    objects: Objects = []
    tensors: list[torch.Tensor] = []
    todo = [value for value in values if _is_mutable(value)]
    num_items = 0
    while todo and len(objects) < limit and num_items <= max_items:
        value = todo.pop()
        if type(value) in (MethodType, BuiltinFunctionType):
            value = value.__self__
        items: list[Any] = []
        if issubclass(type(value), partial):
            items = [value.func, *value.args, *value.keywords.values()]
        elif issubclass(type(value), tuple) and id(value) not in ids:
            ids.add(id(value))
            items = [*value]
        for owner in owners_of(value):
            # A `Slots` is made anew each time it is asked for, so that the id of its object stands for it: negative, as
            # the object may be an owner itself, as a generator of a class with slots is.
            number = -id(value) if isinstance(owner, Slots) else id(owner)
            if number not in ids and not (isinstance(owner, CONTAINERS) and len(owner) > max_items):
                ids.add(number)
                objects.append((owner, content := contents(owner)))
                items += items_of(owner, content)
            elif number not in ids:  # a container that is too large: it is not copied, and so this is not all
                num_items += len(owner)
        num_items += len(items)
        for item in items:
            if issubclass(type(item), torch.Tensor):
                tensors.append(item)
            elif type(item) not in ATOMS:
                todo.append(item)
    return [*objects, *((t, version_of(t)) for t in tensors)], not todo and num_items <= max_items


def _is_mutable(value: Any) -> bool:
    return type(value) not in ATOMS and not issubclass(type(value), torch.Tensor)


def items_of(owner: Any, content: Any) -> Iterable[Any]:
    """Returns what ``owner`` holds, given its contents ``content``; nothing for a generator or an array."""
    if isinstance(owner, (dict, Slots)):
        return content.values()  # type: ignore[no-any-return]
    return content if isinstance(owner, CONTAINERS) else ()


def version_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none; to ask first takes as long as to read it
        return None


def attribute_of(value: Any, name: str) -> Any:
    """Returns an attribute, or ``None``; a user's ``__getattr__`` is not asked: it may raise anything."""
    if type(value) in _DELEGATES:
        return getattr(value, name, None)
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


_PLAIN_DATA = ATOMS.union(CONTAINERS, (OrderedDict,))


def changed_tensors(objects: Objects) -> list[torch.Tensor]:
    """Returns the tensors among ``objects`` that were modified in place since."""
    return [owner for owner, then in objects if isinstance(owner, torch.Tensor) and version_of(owner) != then]


def without_tensors(objects: Objects, tensors: Iterable[torch.Tensor]) -> Objects:
    """Returns ``objects`` without the versions of ``tensors``."""
    ids = set(map(id, tensors))
    return [(owner, content) for owner, content in objects if id(owner) not in ids] if ids else objects


def with_stand_ins(objects: Objects, stand_in: Callable[[torch.Tensor], Any]) -> Objects:
    """Returns ``objects`` as the recomputation gets them: with a stand-in for each tensor that was modified since.

    Not an error at once: an object may hold much that the block does not read, such as the cache of another layer.
    """
    modified = {id(tensor): stand_in(tensor) for tensor in changed_tensors(objects)}
    if not modified:
        return objects

    def exchanged(item: Any) -> Any:
        if isinstance(item, tuple) and any(id(each) in modified for each in item):
            items = map(exchanged, item)
            return item._make(items) if hasattr(item, "_make") else tuple(items)
        return modified.get(id(item), item)

    return [
        (owner, _mapped(exchanged, owner, content)) for owner, content in objects if not isinstance(owner, torch.Tensor)
    ]


def _mapped(function: Callable[[Any], Any], owner: Any, content: Any) -> Any:
    if isinstance(owner, (dict, Slots)):
        kind = type(content)
        return kind((key, function(value)) for key, value in content.items())
    return type(content)(map(function, content)) if isinstance(owner, CONTAINERS) else content


@scope
def replaced(undo: Undo, modules: Iterable[nn.Module], name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of ``modules`` for a while, in their ``__dict__`` alone."""
    for module in modules:
        fields = module.__dict__
        undo.append((set_or_remove, (fields, name, fields.get(name, ABSENT))))
        fields[name] = value
    yield


def set_or_remove(owner: dict[str, Any], key: str, value: Any) -> None:
    if value is ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


# Containers and objects in context variables


def context_of_call() -> tuple[Context, list[Any]]:
    """Returns the context variables of the caller, with containers copied, and those values that may change.

    Transformers collects the outputs of layers in a dictionary of lists in a context variable. A recomputation must not
    add to these a second time, and a call that held them would never be freed without a backward.
    """
    context = copy_context()
    if ATOMS.issuperset(map(type, context.values())):  # nearly always
        return context, []
    copies: dict[int, Any] = {}
    for variable, value in [*context.items()]:
        context.run(variable.set, _copy_containers(value, copies))
    return context, [*filter(_is_mutable, context.values())]


def _copy_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Copies a container with those in it, each once, and returns what else there is as it is, without a graph."""
    if not issubclass(type(value), CONTAINERS) or len(value) > _MAX_PLAIN_VALUES:
        return without_history(value)
    if id(value) not in copies:
        copies[id(value)] = copy = empty_like(value)
        fill(copy, _mapped(partial(_copy_containers, copies=copies), value, contents(value)))
    return copies[id(value)]


# Containers and objects in the attributes of modules


@final
class ObjectCopy:
    """The contents of a container or an object that an attribute of a module holds.

    The object itself is not held: an output may come into it, which leads to the frame, and both would never be freed
    without a backward. The recomputation finds a container by the attribute, and an object by a weak reference. Where
    there is none any more, it gets an equal one.
    """

    __slots__ = (
        "_empty", "_is_container", "_kind", "_ref", "attributes", "content", "is_plain_data", "object_id", "reached",
    )  # fmt: skip

    def __init__(self, value: Any, owner: Any) -> None:
        # The id of the object: one in several attributes is copied once. A container is not held, and may be freed:
        # another one with its id is then filled in its place, and gets its own contents back.
        self.object_id = id(value)
        self._kind: Any = type(value)
        self._is_container = owner is value
        self._ref = ref(value) if self._kind.__weakrefoffset__ and not self._is_container else None
        self._empty = empty_like(value) if self._is_container else None
        has_attributes = self._is_container and _layout_of(value).container is not self._kind
        self.attributes = attribute_of(value, "__dict__") if has_attributes else None
        """Of a container of a class of the program's."""
        self.content = contents(owner)
        """Of a container the same type with the items, of an object a dictionary of its attributes."""
        self.reached = self._reached_items()
        """What of the contents is not a number, a string, or the like."""
        is_plain = not self.reached or _PLAIN_DATA.issuperset(map(type, self.reached))
        self.is_plain_data = is_plain and self.attributes is None
        if not is_plain:
            self.content = _mapped(without_history, owner, self.content)
            self.reached = self._reached_items()

    @classmethod
    def of(cls, value: Any) -> ObjectCopy | None:
        """Copies one level of ``value``; ``None`` if it is neither a container nor an object with attributes alone."""
        if issubclass(type(value), CONTAINERS):
            return cls(value, value)
        return cls(value, attribute_of(value, "__dict__")) if _has_attributes_alone(value) else None

    def _reached_items(self) -> list[Any]:
        content: Any = self.content
        items = content.values() if isinstance(content, dict) else content
        return [item for item in items if type(item) not in ATOMS]

    def owner_of(self, value: Any) -> Any:
        """Returns what of an object has the contents."""
        return value if self._is_container else attribute_of(value, "__dict__")

    def is_of(self, value: Any) -> bool:
        """Whether ``value`` is the object that was copied."""
        return id(value) == self.object_id and type(value) is self._kind and (self._ref is None or self._ref() is value)

    def differs_from(self, value: Any) -> bool:
        return not self.is_of(value) or differs(self.owner_of(value), self.content)

    def find(self) -> Any:
        """Returns the object where it is alive and no attribute has it, or else an empty one of its type."""
        value = None if self._ref is None else self._ref()
        if value is not None:
            return value
        return self._empty if self._is_container else layout_of_type(self._kind).create(self._kind)


def without_history(value: Any) -> Any:
    """Returns a tensor as a leaf that holds no graph, and what holds some, a tuple or a function, with such leaves."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    if issubclass(kind, (FunctionType, partial)):
        return _function_without_history(value)
    if issubclass(kind, tuple) and kind not in ATOMS:
        items = [*map(without_history, value)]
        if any(one is not other for one, other in zip(items, value, strict=True)):
            return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value


def _function_without_history(function: Any) -> Any:
    """Returns a function whose closure, default values or arguments hold no graph, or itself if none of them does."""
    if isinstance(function, partial):
        keywords = tuple(function.keywords.values())
        args, values = without_history(function.args), without_history(keywords)
        if args is function.args and values is keywords:
            return function
        return partial(function.func, *args, **dict(zip(function.keywords, values, strict=True)))
    defaults = without_history(function.__defaults__)
    if defaults is function.__defaults__ and not any(map(_holds_graph, function.__closure__ or ())):
        return function
    closure = tuple(
        CellType(without_history(each.cell_contents)) if _holds_graph(each) else each
        for each in function.__closure__ or ()
    )
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure or None)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def _holds_graph(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, torch.Tensor) and cell.cell_contents.grad_fn is not None
    except ValueError:  # it is empty
        return False


def find_copied(copies: Iterable[tuple[Any, ObjectCopy]]) -> dict[int, Any]:
    """Returns by their ids the objects that were copied, or empty ones to be filled, given what attributes hold now.

    Other containers that are in the attributes by now are left alone: one may be in two that had different ones.
    """
    # First all that attributes still hold: a container is known by its attribute alone, and one that is held by two
    # must not be made anew for the first of them.
    objects = {copied.object_id: value for value, copied in copies if copied.is_of(value)}
    for _, copied in copies:
        if copied.object_id not in objects:
            objects[copied.object_id] = copied.find()
    return objects


def _has_attributes_alone(value: Any) -> bool:
    """Whether the state of an object is its ``__dict__``, so that an equal one can be made."""
    layout = _layout_of(value)
    if layout.is_closed or layout.accessors is not None or layout.slots or type(value) in _DELEGATES:
        return False
    if hasattr(type(value), "__del__"):  # which would run for the equal one too
        return False
    return layout.create in _NEW and type(attribute_of(value, "__dict__")) is dict


def is_plain_data(values: Iterable[Any], objects: Objects) -> bool:
    """Whether ``objects``, which ``values`` reach, hold numbers, strings and flags, and containers of such, alone."""
    if not all(_PLAIN_DATA.issuperset(map(type, items_of(owner, content))) for owner, content in objects):
        return False
    ids = {id(owner) for owner, _ in objects}
    return all(id(value) in ids for value in values)
