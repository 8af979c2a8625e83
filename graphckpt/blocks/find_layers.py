"""Finds the layers of a model that are worth a policy each."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def layers(model: nn.Module) -> list[str]:
    """Returns the names of the layers of any model: those that Transformers recomputes, or the items of its stacks.

    A stack is a list or sequence of two modules or more, most of which are of one class and have parameters. Of nested
    stacks the outer one counts if half of its items are of one size, and else the inner ones: it is one of stages.

    >>> stack = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    >>> layers(nn.Sequential(nn.Linear(2, 2), stack, nn.Linear(2, 2)))
    ['1.0', '1.1', '1.2']
    """
    return _flagged(model) or _stacked("", model) or marked_layers(model)


def _stacked(prefix: str, module: nn.Module) -> list[str]:
    children = [(f"{prefix}.{key}" if prefix else key, child) for key, child in module.named_children()]
    kinds = [type(child) for _, child in children if _size(child)]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(kinds) > 1
    if is_list and 2 * kinds.count(max(kinds, key=kinds.count)) > len(kinds):
        inner = [_stacked(name, child) for name, child in children]
        deep = [names for names in inner if names]
        if len(deep) == 1 and 2 * _size_of(module, _relative(prefix, deep[0])) > _size(module):
            return deep[0]  # a stack between a first and a last layer
        sizes = [_size(child) for _, child in children if _size(child)]
        if not all(inner) or 2 * max(map(sizes.count, sizes)) >= len(sizes):
            return [name for name, child in children if _size(child)]
        return [name for names in inner for name in names]
    return [name for path, child in children for name in _stacked(path, child)]


def _relative(prefix: str, names: list[str]) -> list[str]:
    return [name.removeprefix(f"{prefix}.") if prefix else name for name in names]


def marked_layers(model: nn.Module) -> list[str]:
    """Returns the layers that Transformers recomputes, in the ways in which its models have marked them over time."""
    if names := _flagged(model):
        return names
    pretrained, _ = _classes_of_transformers()
    named = list(model.named_modules())
    classes = set(getattr(model, "_no_split_modules", None) or ())
    if names := [name for name, module in named if name and type(module).__name__ in classes]:
        return _without_nested(model, names)
    lists = [name for name, module in named if isinstance(module, nn.ModuleList) and _size(module)]
    if not isinstance(model, pretrained) or not lists:
        return []
    largest = max(lists, key=lambda name: _size(model.get_submodule(name)))  # of equal ones the outermost
    return [f"{largest}.{number}" for number, _ in model.get_submodule(largest).named_children()]


def _flagged(model: nn.Module) -> list[str]:
    _, layer = _classes_of_transformers()
    named = list(model.named_modules())
    if names := [name for name, module in named if isinstance(module, layer)]:
        return _without_nested(model, names)
    names = []
    for owner, module in named:  # before 2025: a flag on the module that loops over a list of layers
        if hasattr(module, "gradient_checkpointing"):
            for child, layers_list in module.named_children():
                if isinstance(layers_list, nn.ModuleList):
                    names += [".".join(filter(None, (owner, child, str(n)))) for n in range(len(layers_list))]
    return names


def _without_nested(model: nn.Module, layers: list[str]) -> list[str]:
    """Drops a layer that is little but a container of others, and of any other those that are in it."""
    dropped: set[str] = set()
    for name in layers:
        inner = [other for other in layers if other.startswith(f"{name}.")]
        inner_size = _size_of(model, inner)
        if inner and name not in dropped:
            dropped |= {name} if 2 * inner_size > _size(model.get_submodule(name)) else set(inner)
    return [name for name in layers if name not in dropped]


def _size_of(module: nn.Module, names: list[str]) -> int:
    return sum(_size(module.get_submodule(name)) for name in names)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _classes_of_transformers() -> tuple[Any, Any]:
    """Returns its base class of models and of layers; no model is of either before they are imported."""
    if "transformers" not in sys.modules:
        return (), ()
    from transformers import PreTrainedModel  # noqa: PLC0415 - takes a second
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415

    return PreTrainedModel, GradientCheckpointingLayer
