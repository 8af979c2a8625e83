"""Copies the state that a training step changes, and restores it in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphckpt.engine.objects import ABSENT, CONTAINERS, Objects, differs, fill
from graphckpt.thread_state import get_rng_state, rng_devices, set_rng_state
from graphckpt.tree import ATOMS

_OF_TORCH = frozenset(nn.Module().__dict__)


class _Tensor(NamedTuple):
    original: torch.Tensor
    copied: torch.Tensor


class _List(NamedTuple):
    """A list in an optimizer's state, such as LBFGS's of earlier directions, with copies of its items."""

    original: list[Any]
    copied: list[Any]


class _Dict(NamedTuple):
    original: dict[Any, Any]
    copied: dict[Any, Any]


class _Optimizer(NamedTuple):
    states: dict[Any, dict[str, Any]]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    """Each group with copies of its settings."""


@final
class TrainingState:
    """Copies of the state of a step: tensors, attributes of modules, optimizers, RNG states of host and devices.

    They are restored in place, since a capture holds the addresses.

    Args:
        tensors: Those to copy.
        optimizers: More of them may be added before they step.
        tree: Modules whose attributes, and the containers in them, are copied one level deep.
        fields: Other attributes to copy so, such as those of a Graph.
        has_random: Whether to copy RNG states: of the host, and of the devices of tensors and parameters.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor] = (),
        optimizers: Iterable[Optimizer] = (),
        *,
        tree: ModuleTree | None = None,
        fields: dict[str, Any] | None = None,
        has_random: bool = True,
    ) -> None:
        self.tensors = [_Tensor(tensor, tensor.detach().clone()) for tensor in tensors]
        """Each tensor with its copy."""
        self._optimizers: dict[Optimizer, _Optimizer] = {}
        for optimizer in optimizers:
            self.add(optimizer)
        self._tree = tree or ModuleTree(())
        owners: list[Any] = [*self._tree.dictionaries, *([] if fields is None else [fields])]
        values = self._tree.attributes() + ([] if fields is None else list(fields.values()))
        # by type: the __getattribute__ of an object would answer isinstance, as in a Transformers config
        owners += [value for value in values if issubclass(type(value), CONTAINERS)]
        self._contents: Objects = [(owner, copy.copy(owner)) for owner in owners]
        on_devices = torch.accelerator.current_accelerator() is not None
        drawing = [*self._tree.parameters(), *(tensor for tensor, _ in self.tensors)] if on_devices else []
        self.random = get_rng_state(rng_devices(drawing), host=True) if has_random else None

    def add_parameters(self, optimizer: Optimizer) -> None:
        """Copies the optimizer's parameters that are not among the tensors yet."""
        present = {id(tensor) for tensor, _ in self.tensors}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in present]
        self.tensors += [_Tensor(parameter, parameter.detach().clone()) for parameter in parameters]

    def add(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            states = {parameter: _copy(state) for parameter, state in optimizer.state.items()}
            groups = [(g, _copy({k: v for k, v in g.items() if k != "params"})) for g in optimizer.param_groups]
            self._optimizers[optimizer] = _Optimizer(states, groups)

    def optimizer_copies(self) -> Iterable[tuple[torch.Tensor, str, torch.Tensor]]:
        for states, _ in self._optimizers.values():
            for parameter, state in states.items():
                for key, value in _tensors_in(state):
                    yield parameter, key, value.copied

    def restore(self) -> bool:
        has_removed = False
        for owner, content in self._contents:
            if differs(owner, content):
                fill(owner, content)
        for tensor, value in self.tensors:
            overwrite(tensor, value)
        for optimizer, (states, groups) in self._optimizers.items():
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
                has_removed = True
            for parameter, state in states.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(_restored(state))
            if len(optimizer.param_groups) != len(groups):
                optimizer.param_groups[:] = [group for group, _ in groups]
            for group, (_, settings) in zip(optimizer.param_groups, groups, strict=True):
                group.update(_restored(settings))
        if self.random is not None:
            set_rng_state(self.random)
        return has_removed

    def changed_attributes(self) -> Iterator[tuple[nn.Module, str]]:
        """Yields the modules whose attributes, or containers in them, have changed, and the names of these."""
        contents = {id(owner): content for owner, content in self._contents}
        for module in self._tree.modules:
            now, then = module.__dict__, contents[id(module.__dict__)]
            for key in dict.fromkeys([*then, *now]):
                value = now.get(key, ABSENT)
                content = contents.get(id(value))
                if value is not then.get(key, ABSENT) or (content is not None and differs(value, content)):
                    yield module, key


@final
class ModuleTree:
    """All modules below some roots, as lists: the state before each step of a Graph may be copied."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = list(roots)
        self.modules = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
        self._children = [(m._modules, m._modules.copy()) for m in self.modules]
        self.dictionaries = [
            members for m in self.modules for members in (m.__dict__, m._parameters, m._buffers, m._modules)
        ]
        self._own_keys = [_own_keys(m.__dict__) for m in self.modules]
        # Of embeddings with `max_norm` a forward modifies the weight in place.
        embeddings = (m for m in self.modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        self.renormalized: list[Any] = [m for m in embeddings if m.max_norm is not None]

    def is_of(self, roots: Iterable[nn.Module]) -> bool:
        """Whether these are the roots, and no module below was added, removed or replaced since."""
        return list(roots) == self._roots and all(now == then for now, then in self._children)

    def attributes(self) -> list[Any]:
        """Returns the attributes that are neither plain values, such as numbers, nor those of every module."""
        values = []
        for number, module in enumerate(self.modules):
            fields, (count, keys) = module.__dict__, self._own_keys[number]
            try:
                shown = [fields[key] for key in keys]
            except KeyError:
                count = -1
            if len(fields) != count:  # of torch's keys none is ever removed: as many keys are the same keys
                _, keys = self._own_keys[number] = _own_keys(fields)
                shown = [fields[key] for key in keys]
            values += [value for value in shown if type(value) not in ATOMS]
        return values

    def parameters(self) -> list[torch.Tensor]:
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    def buffers(self) -> list[torch.Tensor]:
        return [b for module in self.modules for b in module._buffers.values() if b is not None]


def _own_keys(fields: dict[str, Any]) -> tuple[int, list[str]]:
    return len(fields), [key for key in fields if key not in _OF_TORCH]


def _copy(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _copy_of(value) for key, value in values.items()}


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(value, value.detach().clone())
    if type(value) is list:
        return _List(value, [_copy_of(item) for item in value])
    return _Dict(value, _copy(value)) if type(value) is dict else value


def _tensors_in(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, _Tensor]]:
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, _Tensor):
            yield name, value
        elif isinstance(value, (_List, _Dict)):
            inner = value.copied if isinstance(value, _Dict) else dict(enumerate(value.copied))
            yield from _tensors_in(inner, name)


def _restored(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _restored_of(value) for key, value in values.items()}


def _restored_of(value: Any) -> Any:
    if isinstance(value, _Tensor):
        overwrite(value.original, value.copied)
        return value.original
    if isinstance(value, _List):
        value.original[:] = [_restored_of(item) for item in value.copied]
        return value.original
    if isinstance(value, _Dict):
        restored = _restored(value.copied)
        value.original.clear()
        value.original.update(restored)
        return value.original
    return value


@contextmanager
def on_optimizer_step(see: Callable[[Optimizer], None]) -> Iterator[None]:
    """Calls ``see`` with each optimizer before it steps."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: see(optimizer))
    try:
        yield
    finally:
        hook.remove()


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the elements of ``value`` into ``tensor``, those that an expanded tensor repeats once.

    >>> tensor = torch.zeros(1).expand(3)
    >>> overwrite(tensor, torch.ones(3))
    >>> tensor
    tensor([1., 1., 1.])
    """
    if tensor.layout is not torch.strided:  # copy_ gives it new indices, which a tensor that detach() returns keeps
        with torch.no_grad():
            tensor.copy_(value)
        return
    target, source = tensor.detach(), value
    if 0 in target.stride():
        once = tuple(slice(1) if step == 0 else slice(None) for step in target.stride())
        target, source = target[once], source[once]
    with torch.no_grad():
        target.copy_(source)
