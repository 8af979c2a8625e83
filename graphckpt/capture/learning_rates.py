"""Learning rates as device tensors, so that a replay reads the value that a scheduler or the user has set."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, final

import torch


def is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of ``optimizer`` reads no values on the host: its groups are marked capturable or fused."""
    groups = optimizer.param_groups
    return bool(groups) and all(_is_group_capturable(group) for group in groups)


def capturable_fix(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the setting that lets a capture hold ``optimizer``; ``None`` if it has it, or there is none."""
    settings = [_capturable_setting(group) for group in optimizer.param_groups if not _is_group_capturable(group)]
    return next((f"{setting}=True" for setting in settings if setting is not None), None)


def _is_group_capturable(group: dict[str, Any]) -> bool:
    setting = _capturable_setting(group)
    return setting is not None and bool(group[setting])


def _capturable_setting(group: dict[str, Any]) -> str | None:
    on_cuda = any(parameter.is_cuda for parameter in group["params"])
    if on_cuda and "capturable" in group:
        return "capturable"  # of Adam and its like, whose fused step alone still reads the step count on the host
    return "fused" if "fused" in group else None


@final
class LearningRates:
    """The learning rates of some optimizers, each in its own tensor, which is never replaced."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}

    def update_tensors(self) -> None:
        """Writes the current values of the groups into the tensors, and puts the tensors into the groups."""
        for number, optimizer in enumerate(self._optimizers):
            for position, group in enumerate(optimizer.param_groups):
                if "lr" not in group:
                    continue
                rate, tensor = group["lr"], self._tensors.get((number, position))
                if tensor is None:
                    device = next((p.device for p in group["params"]), torch.device("cpu"))
                    tensor = torch.as_tensor(rate, dtype=torch.float32).to(device, copy=True)
                    self._tensors[number, position] = tensor
                elif rate is not tensor:
                    tensor.copy_(rate) if isinstance(rate, torch.Tensor) else tensor.fill_(float(rate))
                group["lr"] = tensor


def constant_settings(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[Hashable, ...]:
    """Returns all settings of param groups but parameters and learning rates: they are baked into a capture."""
    return tuple(
        (key, _value(value))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("params", "lr", "initial_lr")
    )


def _value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(value) if isinstance(value, (list, tuple)) else repr(value)
