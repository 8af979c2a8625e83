"""Replaces what dictionaries, containers and objects hold, and puts it back; finds what ops write to."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat import pytree
from graphckpt._compat_compiler import never_compiled
from graphckpt.tree import ATOMS

ABSENT: Final = object()
"""Stands for a key that did not exist."""

CONTAINERS: Final = (list, dict, set, deque)
"""What can be emptied and filled again."""

Undo: TypeAlias = list[tuple[Any, Any, Any]]
"""``(owner, key, value)`` in the order in which they were replaced; ``key`` is ``None`` for a whole owner."""


def replace_item(owner: dict[str, Any], key: str, value: Any, undo: Undo) -> None:
    """Sets ``owner[key]``, or removes it if ``value`` is ``ABSENT``, and notes in ``undo`` what was there."""
    undo.append((owner, key, owner.get(key, ABSENT)))
    if value is ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def put_back(undo: Undo) -> None:
    """Undoes every replacement, the last one first, and empties ``undo``. May be called again after an interrupt."""
    while undo:
        owner, key, value = undo[-1]
        if key is None:
            if differs(owner, value):
                fill(owner, value)
        elif value is ABSENT:
            owner.pop(key, None)
        else:
            owner[key] = value
        undo.pop()


def contents(owner: Any) -> Any:
    """Returns a copy of a container, or the state of a generator."""
    return owner.get_state() if isinstance(owner, torch.Generator) else copy.copy(owner)


def fill(owner: Any, value: Any) -> None:
    """Gives a container or a generator the :func:`contents` ``value``."""
    if isinstance(owner, torch.Generator):
        owner.set_state(value)
        return
    owner.clear()
    if isinstance(owner, (dict, set)):
        owner.update(value)
    else:
        owner.extend(value)


def differs(now: Any, then: Any) -> bool:
    """Whether two containers hold other objects, compared by identity (the items of sets by equality).

    ``then`` is the state of ``now`` if that is a generator.
    """
    if isinstance(now, torch.Generator):
        return not torch.equal(now.get_state(), then)
    if len(now) != len(then):
        return True
    if isinstance(now, set):
        return bool(now != then)
    if not isinstance(now, dict):
        return any(a is not b for a, b in zip(now, then, strict=True))
    if all(map(is_, now, then)) and all(map(is_, now.values(), then.values())):
        return False
    return any(key not in now or now[key] is not value for key, value in then.items())


_OWNERS = (*CONTAINERS, torch.Generator)
_MOST_OBJECTS = 4096  # an object that reaches more than this is a whole program, not an argument


Objects: TypeAlias = list[tuple[Any, Any]]
"""``(container, attribute dict or generator, its contents)`` for all that an object reaches."""


def copy_objects(leaves: Sequence[Any]) -> Objects:
    """Copies, one level deep each, the containers, attributes and generators that objects among ``leaves`` reach.

    This is how a key-value cache that is passed by reference can be seen as it was.
    """
    ids: set[int] = set()
    objects: Objects = []
    todo = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in ATOMS]
    while todo and len(objects) < _MOST_OBJECTS:
        value = todo.pop()
        owner = value if isinstance(value, _OWNERS) else getattr(value, "__dict__", None)
        if owner is None or id(owner) in ids or isinstance(value, (nn.Module, type)) or callable(value):
            continue
        ids.add(id(owner))
        if isinstance(owner, _OWNERS):
            objects.append((owner, contents(owner)))
        if isinstance(owner, CONTAINERS):
            inner = owner.values() if isinstance(owner, dict) else owner
            todo.extend(v for v in inner if not isinstance(v, torch.Tensor) and type(v) not in ATOMS)
    return objects


def drop_unchanged(before: Objects) -> Objects:
    """Drops from ``before`` the tensors that the original forward did not change."""
    return [(owner, _settled(owner, then)) for owner, then in before]


def rewind_objects(objects: Objects, undo: Undo) -> None:
    """Puts the objects back to what they were, noting in ``undo`` what they are now."""
    for owner, then in objects:
        if not isinstance(owner, dict):
            if then is not None and differs(owner, then):
                undo.append((owner, None, contents(owner)))
                fill(owner, then)
        elif any(owner.get(key, ABSENT) is not value for key, value in then.items()):
            undo.append((owner, None, dict(owner)))
            owner.update(then)
            for key in [key for key, value in then.items() if value is ABSENT]:
                del owner[key]


def _settled(owner: Any, then: Any) -> Any:
    if not isinstance(owner, dict):
        has_tensors = not isinstance(owner, torch.Generator) and any(isinstance(value, torch.Tensor) for value in then)
        return then if differs(owner, then) or not has_tensors else None
    left_alone = {k for k, v in then.items() if isinstance(v, torch.Tensor) and owner.get(k, ABSENT) is v}
    added = {key: ABSENT for key in owner if key not in then}
    return {key: value for key, value in then.items() if key not in left_alone} | added


class Reached(NamedTuple):
    """An attribute of a module, and the contents of all that it reaches."""

    value: Any
    objects: Objects

    @classmethod
    def of(cls, value: Any) -> Reached:
        """Copies the contents of what ``value`` reaches, each one level deep."""
        return cls(value, copy_objects([value]))

    def changed(self) -> Objects:
        """Returns what has changed since, but for a container that is the attribute itself."""
        return [
            (owner, then)
            for owner, then in self.objects
            if not (owner is self.value and isinstance(owner, CONTAINERS)) and differs(owner, then)
        ]


def may_reach(value: Any) -> bool:
    """Whether an attribute may reach other mutable objects: a container, an object with attributes, or a generator."""
    return type(value) not in ATOMS and not isinstance(value, (torch.Tensor, nn.Module))


@final
@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A place that forward changes: ``owner[key]``.

    ``in_place`` if its tensor is modified, not replaced; ``reaches`` if what its value reaches changes.
    """

    owner: dict[str, Any]
    key: str
    in_place: bool
    reaches: bool = False

    def take(self) -> Any:
        """Returns the present value, safe from later modifications."""
        value = self.owner.get(self.key, ABSENT)
        if self.reaches and may_reach(value):
            return Reached.of(value)
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if self.in_place else value.detach().requires_grad_(value.requires_grad)
        return copy.copy(value) if isinstance(value, CONTAINERS) else value

    def rewind(self, value: Any, undo: Undo) -> None:
        """Puts a taken value in place for a recomputation."""
        if not isinstance(value, Reached):
            replace_item(self.owner, self.key, self._fresh(value), undo)
            return
        if self.owner.get(self.key, ABSENT) is not value.value:
            replace_item(self.owner, self.key, value.value, undo)
        for owner, then in value.objects:
            if differs(owner, then):
                undo.append((owner, None, contents(owner)))
                fill(owner, then)

    def _fresh(self, value: Any) -> Any:
        """Returns a taken value that the recomputation may modify in place."""
        if not isinstance(value, torch.Tensor):
            return copy.copy(value) if isinstance(value, CONTAINERS) else value
        present = self.owner.get(self.key)
        if not self.in_place:
            return value
        fresh = value.clone()
        if isinstance(present, torch.Tensor) and present.is_leaf:  # such as a parameter of `functional_call`
            fresh.requires_grad_(present.requires_grad)
        return fresh


class Snapshot(NamedTuple):
    """The state of a block's modules when the original forward began.

    Of tuples rather than lists: Python's garbage collector need not visit those that hold numbers only.
    """

    tensors: tuple[Any, ...]
    versions: tuple[int, ...]
    modes: tuple[bool, ...]
    changed: tuple[tuple[ChangedValue, Any], ...]
    copies: dict[int, torch.Tensor]
    """Of small buffers that are not known to move, by their index in ``tensors``."""
    attributes: tuple[tuple[weakref.ref[nn.Module], str, torch.Tensor, int], ...]
    """Tensors that are attributes of a module and no buffers, as hooks set them, and their versions."""
    fields: tuple[dict[str, Any], ...]
    """The attributes of modules that are not PyTorch's own, until the original forward ends; none in a first call."""
    containers: tuple[tuple[weakref.ref[nn.Module], str, Any], ...]
    """Their containers that are not known to change, and copies of these, until the original forward ends."""
    forwards: tuple[tuple[weakref.ref[nn.Module], Any], ...]
    """The ``forward`` attributes of modules that replace that of the class, such as policies."""
    policy_changes: int
    """How many there had been."""


def is_sharding(now: Any, then: Any) -> bool:
    """Whether FSDP exchanges a sharded parameter for a whole one, or the reverse, which its own hooks see to."""
    if now is None or then is None:
        return False
    return hasattr(now, "device_mesh") != hasattr(then, "device_mesh") or not (
        hasattr(then, "device_mesh") or then.untyped_storage().nbytes()
    )


def renormalizes(module: nn.Module) -> bool:
    """Whether a forward modifies the weight of ``module`` in place, as embeddings with ``max_norm`` do."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and values; without values they count as equal."""
    return a.is_meta or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the elements of ``value`` into ``tensor``, those that an expanded tensor repeats once.

    >>> tensor = torch.zeros(1).expand(3)
    >>> overwrite(tensor, torch.ones(3))
    >>> tensor
    tensor([1., 1., 1.])
    """
    target, source = tensor.detach(), value
    if target.layout is torch.strided and 0 in target.stride():
        once = tuple(slice(1) if step == 0 else slice(None) for step in target.stride())
        target, source = target[once], source[once]
    with torch.no_grad():
        target.copy_(source)


def sets_up(before: Any, after: Any) -> bool:
    """Whether a first call set something up, which is done once: a recomputation must not do it again.

    Transformers installs hooks on the first call and notes that in a flag.
    """
    if isinstance(before, Reached):
        own = getattr(before.value, "__dict__", None)
        return all(owner is own and _all_set_up(then, own) for owner, then in before.changed())
    is_first = any(before is nothing for nothing in (None, False, ABSENT))
    is_number = isinstance(after, (int, float)) and not isinstance(after, bool)
    return is_first and not is_number and not _holds_tensors(after)  # a number is a counter


def _all_set_up(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    pairs = [(before.get(key, ABSENT), after.get(key, ABSENT)) for key in {*before, *after}]
    return all(sets_up(then, now) for then, now in pairs if then is not now)


def _holds_tensors(value: Any) -> bool:
    """Whether a value is, or holds, tensors, as the state of a recurrent layer does."""
    leaves = pytree.tree_leaves(value)
    leaves += [inner for leaf in leaves for inner in pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))]
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@final
class Writes(TorchDispatchMode):
    """Notes which storages ops write to: a fake tensor has no bits to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no id is reused

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in chain(mutated_by(func, args, kwargs), _running_statistics(func, args, kwargs)):
            storage = tensor.untyped_storage()
            self.storages[id(storage)] = storage
        return func(*args, **kwargs)


def mutated_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the arguments that an op says it modifies in place."""
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
    """Yields what the kernels of BatchNorm modify without saying so, unless they are told not to train."""
    schema = getattr(func, "_schema", None)
    values = {} if schema is None else {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs}
    if values.get("training", values.get("train", True)):
        for name in ("running_mean", "running_var"):
            if isinstance(values.get(name), torch.Tensor):
                yield values[name]
