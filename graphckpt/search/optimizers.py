"""The optimizers of ``graphckpt estimate`` by name: PyTorch's own, and stand-ins for those of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.simulation import optimizers as stand_ins

MUON = "muon"
MAKERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    MUON: torch.optim.Muon,
    "adamw-8bit": stand_ins.AdamW8bit,
    "paged-adamw-8bit": stand_ins.PagedAdamW8bit,
    "paged-adamw-32bit": stand_ins.PagedAdamW32bit,
    "torchao-adamw-8bit": stand_ins.TorchaoAdamW8bit,
    "torchao-adamw-4bit": stand_ins.TorchaoAdamW4bit,
    "adamw-bf16": stand_ins.AdamWBfloat16,
    "adamw-master": stand_ins.AdamWMaster,
    "adamw-offload": stand_ins.AdamWOffloaded,
}


def optimizers_for(model: nn.Module, name: str, *, in_backward: bool) -> list[Optimizer]:
    """Returns the optimizers of all parameters that are trained.

    Args:
        model: the model.
        name: of :data:`MAKERS`. Muon is for matrices of hidden layers alone: AdamW has the rest.
        in_backward: whether each parameter has its own, which updates it in backward.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = _hidden_matrices(model) if name == MUON else set()
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in trained:
        groups.setdefault("adamw" if name == MUON and parameter not in matrices else name, []).append(parameter)
    if not in_backward:
        return [MAKERS[each](parameters) for each, parameters in groups.items()]
    own = {parameter: MAKERS[each]([parameter]) for each, parameters in groups.items() for parameter in parameters}

    def update(parameter: torch.Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(update)
    return list(own.values())


def _hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Returns the matrices that are neither embeddings nor the head: what Muon is for, by its documentation."""
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    others = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded = {
        parameter for module in (*others, get_head()) if module is not None for parameter in module.parameters()
    }
    return {parameter for parameter in model.parameters() if parameter.dim() == 2} - excluded
