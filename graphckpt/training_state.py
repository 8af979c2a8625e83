"""Copies what a training step changes, and restores it in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from graphckpt.engine.call_state import get_rng_state, rng_devices, set_rng_state


class _Tensor(NamedTuple):
    original: torch.Tensor
    copied: torch.Tensor


@final
class TrainingState:
    """Copies of tensors, optimizers and the RNG states of the host and of their devices.

    They are restored in place, since a capture holds the addresses.

    Args:
        tensors: parameters and buffers.
        optimizers: more of them may be added before they step.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], optimizers: Iterable[Optimizer] = ()) -> None:
        self.tensors = [_Tensor(tensor, tensor.detach().clone()) for tensor in tensors]
        """Each tensor with its copy."""
        self._optimizers: dict[Optimizer, tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]] = {}
        for optimizer in optimizers:
            self.add(optimizer)
        self.random = get_rng_state(rng_devices(tensor for tensor, _ in self.tensors), host=True)

    def add(self, optimizer: Optimizer) -> None:
        """Copies the state and the settings of an optimizer, unless it was added before."""
        if optimizer not in self._optimizers:
            states = {parameter: _copy(state) for parameter, state in optimizer.state.items()}
            groups = [_copy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
            self._optimizers[optimizer] = states, groups

    def optimizer_copies(self) -> Iterable[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yields parameter, key and copy of each tensor in the state of an optimizer."""
        for states, _ in self._optimizers.values():
            for parameter, state in states.items():
                for key, value in state.items():
                    if isinstance(value, _Tensor):
                        yield parameter, key, value.copied

    def restore(self) -> bool:
        """Restores all of it. Returns whether states that optimizers have created since then were removed."""
        has_removed = False
        for tensor, value in self.tensors:
            overwrite(tensor, value)
        for optimizer, (states, groups) in self._optimizers.items():
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
                has_removed = True
            for parameter, state in states.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(_restored(state))
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(_restored(settings))
        set_rng_state(self.random)
        return has_removed


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _Tensor(v, v.detach().clone()) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    for value in values.values():
        if isinstance(value, _Tensor):
            value.original.detach().copy_(value.copied)
    return {key: value.original if isinstance(value, _Tensor) else value for key, value in values.items()}


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
