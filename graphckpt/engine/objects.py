"""Reads, compares and restores the contents of containers, objects, generators and hooks."""

from __future__ import annotations

import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from itertools import chain
from operator import is_, methodcaller
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias, final
from weakref import ProxyTypes

import torch
from torch import nn

from graphckpt._compat import global_forward_hooks, pytree
from graphckpt.errors import MutatedError
from graphckpt.tree import ATOMS
from graphckpt.undo import Undo

ABSENT: Final = object()
"""Stands for a key that did not exist."""

CONTAINERS: Final = (list, dict, set, deque)
"""Types that can be emptied and filled again."""

_CODE = (nn.Module, type, FunctionType, ModuleType)
_DELEGATES = (*ProxyTypes, MethodType)  # whose attributes are those of another object
_MAX_OBJECTS = 4096  # an object that reaches more than this is a whole program, not an argument
_MAX_ARRAY_BYTES = 4096
_MAX_PLAIN_VALUES = 1024  # a container of more than this is data, whose copies cost more than a block that reads it

Objects: TypeAlias = list[tuple[Any, Any]]
"""``(container, dictionary of attributes, slots, generator or array, its contents)``, or ``(tensor, its version)``.

The version of a tensor that one of them holds is compared, and cannot be put back: see
:meth:`~graphckpt.engine.saved.Arguments.after_forward`.
"""

Edit: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the fields of a module to write to, after noting what they were."""

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


def _raise_freed(freed: FreedObject, *_: Any) -> Any:
    raise MutatedError(object.__getattribute__(freed, "message"))


@final
class FreedObject:
    """Stands for an object that the call has found and that is freed by now: to read it is an error."""

    def __init__(self, message: str) -> None:
        object.__setattr__(self, "message", message)

    # Python looks special methods up on the type, and not by `__getattribute__`.
    __getattribute__ = __setattr__ = __delattr__ = _raise_freed
    __call__ = __bool__ = __len__ = __iter__ = __next__ = __contains__ = __eq__ = __hash__ = _raise_freed
    __getitem__ = __setitem__ = __delitem__ = __enter__ = __exit__ = __float__ = __int__ = __index__ = _raise_freed


class _Layout(NamedTuple):
    """How objects of one type are read and filled."""

    container: Any
    """The built-in type, for its methods: ``Counter.update`` adds, and a subclass may do anything."""
    accessors: _Accessors | None
    """How to read and to set the state of a generator or an array; ``None`` for any other object."""
    slots: tuple[Any, ...]
    is_closed: bool
    """Whether objects are not looked into: code; ops, which have caches; a policy, whose stores have these tensors."""


def _layout_of(value: Any) -> _Layout:
    kind: Any = type(value)
    return _layout(value.__class__ if kind in ProxyTypes else kind)


@lru_cache(maxsize=4096)  # bounded, as it holds the types: a program may create classes in each step
def _layout(kind: Any) -> _Layout:
    # OrderedDict first, as it is a dict too: the methods of `dict` would corrupt its order.
    container = next((each for each in (OrderedDict, *CONTAINERS) if issubclass(kind, each)), None)
    accessors = _accessors_of_types(has_numpy="numpy" in sys.modules)
    accessor = None if container else next((accessors[each] for each in kind.__mro__ if each in accessors), None)
    members = (member for each in kind.__mro__ if "__slots__" in vars(each) for member in vars(each).values())
    slots = tuple(member for member in members if isinstance(member, MemberDescriptorType))
    package = str(kind.__module__).partition(".")[0]
    is_callable = any("__call__" in vars(each) for each in kind.__mro__)
    is_closed = issubclass(kind, _CODE) or package == "graphckpt" or (package == "torch" and is_callable)
    return _Layout(container, accessor, () if container else slots, is_closed)


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
    kind = type(owner)
    # Of the first base in C: `__new__` and `__init__` of a subclass may do anything.
    create = next(new for each in kind.__mro__ if isinstance(new := vars(each).get("__new__"), BuiltinFunctionType))
    empty = create(kind)
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
        _set_items(owner, value, kind)
        for key in [key for key in kind.keys(owner) if key not in value]:
            kind.__delitem__(owner, key)
        if not all(map(is_, kind.keys(owner), value)):
            for key, item in value.items():  # each goes to the end, in turn
                kind.__delitem__(owner, key)
                kind.__setitem__(owner, key, item)
    else:
        kind.clear(owner)
        kind.update(owner, value) if kind is set else kind.extend(owner, value)


def _set_items(owner: Any, value: Any, kind: Any) -> None:
    if kind is dict:
        dict.update(owner, value)
    else:  # `OrderedDict.update` would call the `__setitem__` of a subclass
        for key, item in value.items():
            kind.__setitem__(owner, key, item)


def differs(now: Any, then: Any) -> bool:
    """Whether two containers hold other objects, or in another order, compared by identity (items of sets by equality).

    ``then`` is the state of ``now`` if that is a generator or an array.
    """
    if type(now) not in _PLAIN:
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
    undo += restorations(present)  # before the first change, as Ctrl-C may come between two
    for owner, then in changed:
        fill(owner, then)


def restorations(objects: Objects) -> Undo:
    """Returns what gives each object its contents in ``objects``."""
    return [(restore, each) for each in objects]


def restore(owner: Any, then: Any) -> None:
    if differs(owner, then):
        fill(owner, then)


def copy_objects(values: Iterable[Any], *, deeply: bool = True, limit: int = _MAX_OBJECTS) -> Objects:
    """Copies, one level deep each, the containers, attributes and generators that objects among ``values`` reach.

    This is how a key-value cache that is passed by reference can be seen as it was.

    Args:
        values: The objects.
        deeply: ``False`` copies those among them that are containers, and nothing that they reach.
        limit: How many objects are copied at most.

    The copy of a single container comes first, and the versions of tensors come last.
    """
    if not deeply:
        objects = [(value, contents(value)) for value in values if isinstance(value, CONTAINERS)]
        return objects + _versions(item for owner, content in objects for item in items_of(owner, content))
    ids: set[int] = set()  # of what `objects` holds, so that none of them is freed and its id given to another
    objects, tensors = [], []
    todo = [value for value in values if _is_mutable(value)]
    while todo and len(objects) < limit:
        value = todo.pop()
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            value = value.__self__
        items: list[Any] = []
        if isinstance(value, partial):
            items = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, tuple) and id(value) not in ids:
            ids.add(id(value))
            items = [*value]
        for owner in owners_of(value):
            number = -id(value) if isinstance(owner, Slots) else id(owner)  # the object has no other owner with it
            if number not in ids:
                ids.add(number)
                objects.append((owner, content := contents(owner)))
                items += items_of(owner, content)
        for item in items:
            if isinstance(item, torch.Tensor):
                tensors.append(item)
            elif type(item) not in ATOMS:
                todo.append(item)
    return objects + _versions(tensors)


def _is_mutable(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and type(value) not in ATOMS


def items_of(owner: Any, content: Any) -> Iterable[Any]:
    """Returns what ``owner`` holds, given its contents ``content``; nothing for a generator or an array."""
    if isinstance(owner, (dict, Slots)):
        return content.values()  # type: ignore[no-any-return]
    return content if isinstance(owner, CONTAINERS) else ()


def _versions(items: Iterable[Any]) -> Objects:
    return [(item, version_of(item)) for item in items if isinstance(item, torch.Tensor)]


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


def holds_tensors(objects: Objects) -> bool:
    return bool(objects) and isinstance(objects[-1][0], torch.Tensor)  # behind all that holds them


def is_plain_container(objects: Objects) -> bool:
    """Whether ``objects`` are containers of numbers, strings and flags, and of such containers, and not empty.

    A small array of NumPy is one.
    """
    num_values = 0
    for owner, content in objects:
        if type(content).__module__ == "numpy":
            num_values += content.size
            continue
        if not isinstance(owner, CONTAINERS):
            return False
        num_values += len(content)
        if num_values > _MAX_PLAIN_VALUES or not all(type(item) in _PLAIN for item in items_of(owner, content)):
            return False
    return num_values > 0


_PLAIN = ATOMS.union(CONTAINERS, (OrderedDict,))


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


def may_reach(value: Any) -> bool:
    """Whether an attribute may reach other mutable objects: a container, an object with attributes, or a generator."""
    return type(value) not in ATOMS and not isinstance(value, (torch.Tensor, nn.Module))


def sets_up(before: Any, after: Any) -> bool:
    """Whether a first call set something up, which is done once: a recomputation must not do it again.

    Transformers installs hooks on the first call and notes that in a flag.
    """
    #   False -> True, None -> a handle    set up: left as it is, or a recomputation would install a second hook
    #   None -> 1, 3 -> 4                  a counter, of forwards say: the recomputation must not count one more
    #   True -> False, "a" -> "b"          a state that the next forward reads: the recomputation must see the old one
    #   None -> a tensor                   computed by the call, and maybe read by it: likewise
    is_number = isinstance(after, (int, float)) and not isinstance(after, bool)
    if is_number or not any(before is nothing for nothing in (None, False, ABSENT)):
        return False  # a number is a counter
    leaves = pytree.tree_leaves(after)
    leaves += pytree.tree_leaves([dict(attribute_of(leaf, "__dict__") or {}) for leaf in leaves])
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)  # such as the state of a recurrent layer


def changed_keys(now: dict[Any, Any], then: dict[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Returns ``(key, old value, new value)`` of all that differs; ``ABSENT`` stands for a missing one."""
    pairs = [(key, then.get(key, ABSENT), now.get(key, ABSENT)) for key in {**then, **now}]
    return [(key, old, new) for key, old, new in pairs if old is not new]


@contextmanager
def replaced(modules: Iterable[nn.Module], name: str, value: Any) -> Iterator[None]:
    before = [(module.__dict__, module.__dict__.get(name, ABSENT)) for module in modules]
    try:
        for fields, _ in before:
            fields[name] = value
        yield
    finally:
        for fields, old in before:
            set_or_remove(fields, name, old)


def set_or_remove(owner: dict[str, Any], key: str, value: Any) -> None:
    if value is ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def mutated_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an op writes to by its schema, such as ``Tensor(a!) self``."""
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


# Ops that update running statistics in place, although their schemas do not mark them and no version is counted.
_BATCH_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
    "batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
)  # fmt: skip
_POSITIONS_OF_STATISTICS = {
    op: {argument.name: position for position, argument in enumerate(op._schema.arguments)}
    for op in (getattr(torch.ops.aten, name).default for name in _BATCH_NORMS)
}


def statistics_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the running statistics that a batch norm updates, empty for any other op and in evaluation."""
    positions = _POSITIONS_OF_STATISTICS.get(func)
    if positions is None:
        return []

    def value(name: str, default: Any) -> Any:
        position = positions.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name, default)

    if not value("training", default=True):
        return []
    return [t for name in ("running_mean", "running_var") if (t := value(name, default=None)) is not None]


# Containers in which modules collect


class Collector(NamedTuple):
    """An attribute that is a container with a result of autograd in it, such as outputs or losses that layers collect.

    Or one that the call has changed, and that may come to have one. The container is not held: outputs that come into
    it later lead to the frame, which would never be freed without a backward. The recomputation finds it by the
    attribute.
    """

    module: int
    name: str
    number: int
    """The id of the container."""
    objects: Objects
    """An empty container of its type, with the contents before the call; and the versions of the tensors in it."""


def put_collectors(
    collectors: Iterable[Collector],
    fields: Sequence[dict[str, Any]],
    stand_in: Callable[[torch.Tensor], Any],
    edit: Edit,
    undo: Undo,
) -> None:
    """Gives the containers the contents before the call, and the attributes that are others by now an equal one.

    Those others are left alone: one may be in two attributes that had different ones, or be of another type.
    """
    containers: dict[int, Any] = {}  # one for all attributes that had the same
    for at, name, number, objects in collectors:
        present = fields[at].get(name)
        if id(present) == number and type(present) is type(objects[0][0]):
            containers[number] = present
    for at, name, number, objects in collectors:
        empty, content = with_stand_ins(objects, stand_in)[0]
        container = containers.setdefault(number, empty)
        swap([(container, content)], undo)
        if fields[at].get(name) is not container:
            edit(fields[at])[name] = container


# The hooks of modules


class HookCopies(NamedTuple):
    """The forward pre-hooks of a module, or its forward hooks, by their numbers."""

    owners: list[dict[int, Any]]
    """The hooks, and torch's notes about some of them, such as that they take keywords."""
    before: list[dict[int, Any]]
    """Contents of ``owners`` before the call."""
    added: frozenset[int] = frozenset()
    """The hooks that the call has added."""


@final
class ModuleHooks:
    """Copies the hooks before a call, and has them act in its recomputation."""

    __slots__ = ("_notes", "all")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        hooks = [*global_forward_hooks(), *chain.from_iterable(map(_hooks_of, modules))]
        self.all: list[dict[int, Any]] = [owner for owner, *_ in hooks]
        """Nearly always all empty, as ``any`` sees fast: then nothing needs to be done."""
        self._notes = [notes for _, *notes in hooks]

    def copies(self) -> list[HookCopies]:
        """Copies what there is before a call."""
        copies = []
        for hooks, notes in zip(self.all, self._notes, strict=True):
            if hooks:
                copies.append(HookCopies([hooks, *notes], list(map(dict, (hooks, *notes)))))
        return copies

    def after_call(self, copies: list[HookCopies]) -> list[HookCopies]:
        """Returns the copies with the hooks that the call has added."""
        before = {id(each.owners[0]): each for each in copies}
        noted = []
        for owner, notes in zip(self.all, self._notes, strict=True):
            each = before.get(id(owner))
            if each is None and owner:
                each = HookCopies([owner, *notes], [{} for _ in (owner, *notes)])
            if each is not None:
                noted.append(each._replace(added=frozenset(owner.keys() - each.before[0].keys())))
        return noted

    def put_in_place(self, copies: list[HookCopies], undo: Undo) -> None:
        """Has the hooks act that were there before the call, and those that the call has added and that are there yet.

        Transformers adds hooks in a first call and notes that in a flag: a recomputation must not do it again.
        """
        before = {id(each.owners[0]): each for each in copies}
        for owner, notes in zip(self.all, self._notes, strict=True):
            each = before.get(id(owner)) or HookCopies([owner, *notes], [{} for _ in (owner, *notes)])
            # Hooks are compared by number: PyTorch counts handles over all modules, and gives no number twice.
            for present, then in zip(each.owners, each.before, strict=True):
                wanted = OrderedDict(then) | {number: v for number, v in present.items() if number in each.added}
                if present.keys() != wanted.keys():
                    undo.append((restore, (present, OrderedDict(present))))
                    fill(present, wanted)


def _hooks_of(module: nn.Module) -> Iterator[list[dict[int, Any]]]:
    """Yields the forward pre-hooks and the forward hooks, each with what torch notes of some of them."""
    yield [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    yield [module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called]
