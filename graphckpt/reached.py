"""Finds what a training step can change beside its model: what its code names, and what that holds."""

from __future__ import annotations

import dis
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from math import inf
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias, final
from weakref import ProxyTypes

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from graphckpt.engine.objects import ABSENT, Objects, contents, items_of, owners_of, set_or_remove
from graphckpt.errors import ConfigError, shown, warn_once
from graphckpt.tree import ATOMS
from graphckpt.undo import Undo
from graphckpt.units import format_bytes

Restore: TypeAlias = "Iterable[Any] | None"
"""The argument ``restore`` of the functions that run a step and put back what it has changed."""

# Note [What a step reaches]
# A function within a function, whose variables are `calls`, an int, and `local`, a tensor. It counts `calls` up, runs
# `model` on `x` and adds `local` to get the loss, then backward, `optimizer.step()` and `ema.update(model)`, and
# appends the loss to the list `losses`:
#
#     variables    calls, local: of the enclosing function; losses, model, ema, x, optimizer: global ones that it names
#     tensors      local, x, ema.weight, copied to the host
#     objects      the list `losses`, the attributes of `ema` (a class of the program), those of modules
#     optimizers   optimizer, whose states and param groups `follow_optimizer` copies
#
# The model is copied otherwise. `torch` and its functions, which it names too, are of an installed package: nothing of
# theirs is followed.

LEAST_LIMIT = 2**30  # bytes: what is found may take as many, and twice those of the model
_MOST_OBJECTS = 16_384  # that are followed: a program that reaches more than this is looked at in part
_MANY = 1024  # items: a container of more is data, of which only tensors and modules are followed
_OF_TORCH = frozenset(nn.Module().__dict__)
_NAMES = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})
_OF_OPTIMIZER = ("state", "param_groups")
_PLAIN_OBJECTS = (SimpleNamespace, Namespace)


@final
class StepReach:
    """What can be reached from some values, each once, with the contents of containers and objects as they are now.

    With ``is_limited``, in containers of much data only tensors and modules are followed, and of each value so many.

    ============== =====================================================================================
    ``optimizers`` those found, which :meth:`follow_optimizer` is for
    ``modules``    those found, without the modules in them, and without ``visited`` ones
    ``tensors``    by the name of the variable or attribute under which they were found
    ``objects``    containers, attributes of objects, and generators, with their contents
    ``variables``  what puts variables of enclosing functions and global ones back
    ``visited``    by id, all that was found: held, so that nothing else gets the id
    ============== =====================================================================================
    """

    def __init__(self, visited: dict[int, Any] | None = None, *, is_limited: bool = True) -> None:
        self.optimizers: list[Optimizer] = []
        self.modules: list[nn.Module] = []
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.objects: Objects = []
        self.variables: Undo = []
        self.visited: dict[int, Any] = {} if visited is None else visited
        self._is_limited = is_limited

    def leave_out(self, values: Iterable[Any]) -> None:
        """Leaves ``values`` out, since they are restored otherwise."""
        self.visited.update((id(value), value) for value in values)

    def joined(self, other: StepReach) -> StepReach:
        """Adds what ``other`` has found, after this one, with the same ``visited``."""
        self.optimizers += other.optimizers
        self.modules += other.modules
        self.objects += other.objects
        self.variables += other.variables
        for name, tensors in other.tensors.items():
            self.tensors.setdefault(name, []).extend(tensors)
        return self

    def follow(self, name: str, value: Any, *, is_given: bool = False) -> None:
        """Follows a value breadth first; with ``is_given`` also an object of a class that would be left out."""
        todo = deque([(name, value)])
        end = len(self.objects) + _MOST_OBJECTS if self._is_limited else inf
        while todo and len(self.objects) < end:
            name, value = todo.popleft()
            if type(value) in ATOMS or type(value) in ProxyTypes or id(value) in self.visited:
                continue
            self.visited[id(value)] = value
            todo += self._items_of(name, value, is_given=is_given)
            is_given = False

    def follow_step(self, step_fn: Callable[..., Any]) -> None:
        if not isinstance(step_fn, (FunctionType, MethodType, partial, nn.Module)):
            self.follow("step_fn", getattr(type(step_fn), "__call__", None))  # noqa: B004  # it is callable
        self.follow("step_fn", step_fn)

    def follow_optimizer(self, optimizer: Optimizer) -> None:
        """Follows its attributes, with param groups and states, and what its ``step`` reaches."""
        fields = optimizer.__dict__
        self.visited[id(optimizer)] = optimizer
        self.objects.append((fields, fields.copy()))
        for name, value in {**fields, "step": type(optimizer).step}.items():
            self.follow(f"{type(optimizer).__name__}.{name}", value)

    def follow_attributes(self, name: str, root: nn.Module) -> None:
        """Follows the attributes of a module and of those in it, whose own tensors are restored otherwise."""
        for attribute, value in list(_attributes_of(name, root)):
            self.follow(attribute, value)

    def _items_of(self, name: str, value: Any, *, is_given: bool) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if not value.is_meta:
                self.tensors.setdefault(name, []).append(value)
        elif issubclass(kind, nn.Module):
            yield from self._module(name, value)
        elif issubclass(kind, Optimizer):
            self.optimizers.append(value)
        elif kind is FunctionType:
            yield from self._function(value)
        elif kind is MethodType:
            yield name, value.__func__
            yield "self" if name == "step_fn" else name, value.__self__
        elif issubclass(kind, partial):
            yield from ((name, each) for each in (value.func, *value.args, *value.keywords.values()))
        elif issubclass(kind, tuple):
            yield from ((name, each) for each in value)
        else:
            yield from self._object(name, value, is_given=is_given)

    def _module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        self.modules.append(module)
        self.leave_out(module.modules())
        for tensor in [*module.parameters(), *module.buffers()]:
            if id(tensor) not in self.visited:
                self.visited[id(tensor)] = tensor
                self.tensors.setdefault(name, []).append(tensor)
        yield from _attributes_of(name, module)

    def _function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        is_own = not _is_installed(function.__module__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # empty
                continue
            if is_own:
                self.variables.append((setattr, (cell, "cell_contents", content)))
            yield name, content
        for name in _names_in(function.__code__) if is_own else ():
            content = function.__globals__.get(name, ABSENT)
            if content is not ABSENT:
                self.variables.append((set_or_remove, (function.__globals__, name, content)))
                yield name, content
        self.objects.append((function.__dict__, dict(function.__dict__)))
        # With `__wrapped__`, such as what `torch.no_grad()` decorates.
        others = (function.__defaults__, function.__kwdefaults__, *function.__dict__.values())
        yield from ((function.__name__, other) for other in others)

    def _object(self, name: str, value: Any, *, is_given: bool) -> Iterator[tuple[str, Any]]:
        for owner in owners_of(value):
            # Generators and containers always; attributes where nothing outside of them would get out of step.
            if owner is not value and not (is_given or _has_own_attributes(type(value))):
                continue
            content = contents(owner)
            self.objects.append((owner, content))
            items = list(items_of(owner, content))
            if owner is value or not isinstance(owner, dict):
                names = [name] * len(items)
            else:
                names = [f"{name}.{key}" for key in content]
            pairs = zip(names, items, strict=True)
            is_data = self._is_limited and len(items) > _MANY
            yield from (pair for pair in pairs if not is_data or isinstance(pair[1], (torch.Tensor, nn.Module)))


def _attributes_of(name: str, root: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in root.named_modules(prefix=name):
        if not isinstance(module, torch.jit.ScriptModule):
            fields = module.__dict__
            # Hooks that a first call installs go with the flag that says so, or the next one would install them twice.
            shown = (key for key in fields if key not in _OF_TORCH or key.endswith("hooks"))
            yield from ((f"{path}.{key}", fields[key]) for key in shown)


def _names_in(code: CodeType) -> set[str]:
    """Returns the global variables that a function names, and functions and classes in it."""
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _NAMES}
    return names.union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _has_own_attributes(kind: type) -> bool:
    """Whether the attributes of such objects are all of their state, so that it can be put back.

    A data loader of an installed package has workers, and a logger files, that would not go back with them.
    """
    if kind in _PLAIN_OBJECTS or not _is_installed(kind.__module__):
        return True
    has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")  # a scheduler, averages of weights
    return has_state and not hasattr(kind, "__iter__") and not hasattr(kind, "__next__")


@cache
def _is_installed(module: str) -> bool:
    """Whether a module is part of Python or of an installed package, rather than of the user's program."""
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # built in
        return module in sys.builtin_module_names or module in sys.modules
    is_of_python = Path(dis.__file__).parent in Path(file).parents
    return is_of_python or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def model_of(module: nn.Module) -> nn.Module:
    """Returns the module in DDP's, whose records of its steps belong to its reducer, which cannot be restored."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def check_restore(restore: Any, where: str, *, is_absent: bool = False) -> None:
    """Refuses values of ``restore`` that are not lists of objects with a state, and all if the device is absent.

    Raises:
        ConfigError: See above.
    """
    fix = "fix: restore=[ema, generator], or None for what is found"
    if restore is not None and not isinstance(restore, (list, tuple)):
        raise ConfigError(f"{where}.restore: expected a list of objects, got {shown(restore)} · {fix}")
    if restore is not None and is_absent:
        what = "expected None with a device that is absent, where the step runs on tensors without memory"
        raise ConfigError(f"{where}.restore: {what}, got {shown(restore)} · fix: leave it out")
    for value in restore or ():
        kind = type(value)
        is_torch_iterator = hasattr(kind, "__next__") and _is_installed(kind.__module__)
        if kind in ATOMS or isinstance(value, (type, ModuleType, GeneratorType)) or is_torch_iterator:
            what = "expected objects whose state can be copied, such as modules, optimizers, tensors and generators of"
            raise ConfigError(f"{where}.restore: {what} random numbers, got {shown(value)} · {fix}")


def reached_by(
    step_fn: Callable[..., Any], model: nn.Module, restore: Restore, where: str, *, apart_from: Iterable[Any] = ()
) -> StepReach:
    """Returns what a step can change beside ``model``, whose attributes are followed too.

    Args:
        step_fn: What runs a step. Its variables, the global ones that it names, and the object of a method are
            followed; with functions among them it is the same.
        model: The model of the step.
        restore: More values to follow.
        where: What a warning begins with: of what was found, that takes more bytes than twice the model, and than
            1 GiB, is left out. With a list in ``restore`` nothing is warned of.
        apart_from: What is restored otherwise.
    """
    of_model = StepReach()
    of_model.leave_out([*model.modules(), *model.parameters(), *model.buffers(), *apart_from])
    of_model.follow_attributes("model", model_of(model))
    for value in restore or ():
        of_model.follow("restore", value, is_given=True)
    reach = StepReach(of_model.visited)
    reach.follow_step(step_fn)
    num_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    left = limit = max(LEAST_LIMIT, 2 * num_bytes)
    sizes = {name: sum(map(_num_bytes, tensors)) for name, tensors in reach.tensors.items()}
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if sizes[name] <= left:
            left -= sizes[name]
        else:
            del reach.tensors[name]
            if restore is None:
                warn_once(
                    where,
                    f"`{name}`, which the step reaches, is not restored: its {format_bytes(sizes[name])} are more than "
                    f"is copied unasked ({format_bytes(limit)} in all) · fix: restore=[{name}] if the step changes it, "
                    "or restore=[]",
                )
    return of_model.joined(reach)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0
