"""Copies the state that a training step changes, and restores it in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt._compat import set_grad_enabled
from graphckpt.blocks.hooks import add_optimizer_hook
from graphckpt.engine.execution import put_surroundings_back, surroundings
from graphckpt.engine.objects import ABSENT, CONTAINERS, Objects, differs, fill
from graphckpt.reached import StepReach, model_of
from graphckpt.thread_state import get_rng_state, rng_devices, set_rng_state
from graphckpt.tree import ATOMS
from graphckpt.undo import Undo, scope

_OF_TORCH = frozenset(nn.Module().__dict__)


class _Tensor(NamedTuple):
    original: torch.Tensor
    copied: torch.Tensor


class _Gradient(NamedTuple):
    parameter: torch.Tensor
    requires_grad: bool
    # Weak: most steps free the gradients of the step before. Held here, they would be alive beside those of each step
    # that is measured, and a device's allocator would count both.
    original: ref[torch.Tensor] | None
    copied: torch.Tensor | None


@final
class TrainingState:
    """Copies of the state of a step: tensors, attributes of modules, optimizers, RNG states of host and devices.

    They are restored in place, since a capture holds the addresses. What a step adds is removed: keys of dictionaries,
    such as of a param group, and attributes.

    Args:
        tensors: Those to copy.
        optimizers: More of them may be added before they step.
        tree: Modules whose attributes, and the containers in them, are copied one level deep.
        fields: Other attributes to copy so, such as those of a Graph.
        has_random: Whether to copy RNG states: of the host, and of the devices of tensors and parameters.
        reached: What else the step can change. Its tensors are copied to the host.
        has_gradients: Whether to copy the gradients of tensors, and whether they require one.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor] = (),
        optimizers: Iterable[Optimizer] = (),
        *,
        tree: ModuleTree | None = None,
        fields: dict[str, Any] | None = None,
        has_random: bool = True,
        reached: StepReach | None = None,
        has_gradients: bool = False,
    ) -> None:
        self.tensors: list[_Tensor] = []
        """Each tensor with its copy."""
        self._on_host: list[_Tensor] = []
        self._gradients: list[_Gradient] | None = [] if has_gradients else None
        self._variables: Undo = [] if reached is None else reached.variables
        self._visited = {} if reached is None else reached.visited
        """By id, what is copied already, or is not to be."""
        self._num_states: dict[Optimizer, int] = {}
        self._tree = tree or ModuleTree(())
        self._copy_tensors(tensors)
        owners: list[Any] = [*self._tree.dictionaries, *([] if fields is None else [fields])]
        values = self._tree.attributes() + ([] if fields is None else list(fields.values()))
        # by type: the __getattribute__ of an object would answer isinstance, as in a Transformers config
        owners += [value for value in values if issubclass(type(value), CONTAINERS)]
        self._contents: Objects = [(owner, copy.copy(owner)) for owner in owners]
        if reached is not None:
            self._copy_reached(reached)
            optimizers = [*optimizers, *reached.optimizers]
        for optimizer in optimizers:
            self.add(optimizer)
        on_devices = torch.accelerator.current_accelerator() is not None
        drawing = [*self._tree.parameters(), *(tensor for tensor, _ in self.tensors)] if on_devices else []
        self.random = get_rng_state(rng_devices(drawing), host=True) if has_random else None

    def _copy_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._visited[id(tensor)] = tensor
            self.tensors.append(_Tensor(tensor, tensor.detach().clone()))
            self._copy_gradient(tensor)

    def _copy_gradient(self, tensor: torch.Tensor) -> None:
        is_trained = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        if self._gradients is not None and is_trained and tensor.is_leaf:
            grad = tensor.grad
            copied = None if grad is None else grad.detach().clone()
            self._gradients.append(_Gradient(tensor, tensor.requires_grad, None if grad is None else ref(grad), copied))

    def _copy_reached(self, reached: StepReach) -> None:
        for module in map(model_of, reached.modules):
            if not isinstance(module, torch.jit.ScriptModule):
                dictionaries = ModuleTree([module]).dictionaries
                self._contents += [(fields, fields.copy()) for fields in dictionaries]
        self._contents += reached.objects
        for tensor in chain.from_iterable(reached.tensors.values()):
            is_plain = not hasattr(tensor, "__tensor_flatten__")
            self._on_host.append(_Tensor(tensor, tensor.detach().to("cpu" if is_plain else tensor.device, copy=True)))
            self._copy_gradient(tensor)

    def add(self, optimizer: Optimizer) -> None:
        """Copies the optimizer, and those of its parameters that are not among the tensors yet."""
        if optimizer in self._num_states:
            return
        self._num_states[optimizer] = len(optimizer.state)
        reached = StepReach(self._visited, is_limited=False)
        reached.follow_optimizer(optimizer)
        self._contents += reached.objects
        self._variables += reached.variables
        self._copy_tensors(chain.from_iterable(reached.tensors.values()))

    def optimizer_copies(self) -> Iterable[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yields the copies of tensors in optimizer states, as long as no step has changed these."""
        copies = {id(tensor): copied for tensor, copied in self.tensors}
        for optimizer in self._num_states:
            for parameter, state in optimizer.state.items():
                for key, value in _tensors_in(state):
                    yield parameter, key, copies[id(value)]

    def restore(self) -> bool:
        """Restores everything; returns whether that has removed states of optimizers."""
        has_removed = any(len(optimizer.state) > count for optimizer, count in self._num_states.items())
        # From names to values: variables get the objects of then, these their items, and these tensors their elements.
        # What was replaced is filled in its old object, which a capture or the user's program refers to.
        for function, args in self._variables:
            function(*args)
        for owner, content in self._contents:
            if differs(owner, content):
                fill(owner, content)
        for tensor, value in self.tensors:
            overwrite(tensor, value)
        for tensor, value in self._on_host:
            # Compared, as a result of autograd, or an input of a graph that is still to run backward, must not change.
            if tensor.layout is not torch.strided or tensor.is_quantized or not _is_equal(tensor, value):
                with torch.inference_mode(tensor.is_inference()):
                    overwrite(tensor, value)
        for parameter, requires_grad, original, copied in self._gradients or ():
            parameter.requires_grad_(requires_grad)
            # The same tensors where they exist, with their old values: the memory may be that of DDP's buckets.
            grad = None if original is None else original()
            if grad is None and copied is not None:
                grad = copied.clone()  # a step that runs before the next `restore` may add to it
            elif grad is not None and copied is not None:
                overwrite(grad, copied)
            parameter.grad = grad
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


def _is_equal(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return not hasattr(tensor, "__tensor_flatten__") and torch.equal(tensor.detach().to(value.device), value)


def _tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, (list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, f"{prefix}.{key}" if prefix else str(key))


@scope
def on_optimizer_step(undo: Undo, see: Callable[[Optimizer], None]) -> Iterator[None]:
    """Calls ``see`` with each optimizer before it steps."""
    add_optimizer_hook(undo, lambda optimizer, *_: see(optimizer))
    yield


@scope
def keeping_surroundings(undo: Undo) -> Iterator[None]:
    """Puts back, in the end, what contexts of PyTorch may leave in the thread if an interrupt comes at their exit."""
    undo.append((put_surroundings_back, (surroundings(),)))
    undo.append((set_grad_enabled, (torch.is_grad_enabled(),)))
    yield


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
