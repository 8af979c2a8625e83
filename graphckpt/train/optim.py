"""Parameter groups with and without weight decay, and the learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def get_default_optimizer_params(
    model: nn.Module,
    *,
    weight_decay_norm: float | None = 0.0,
    weight_decay_bias: float | None = 0.0,
    clip_grad_max_norm: float | None = 1.0,
    clip_grad_norm_type: float | None = 2.0,
) -> list[dict[str, Any]]:
    """Returns the trained parameters of ``model`` in groups of equal settings.

    A parameter that is called ``bias`` is a bias; any other with fewer than two dimensions scales a norm.

    Args:
        model: whose parameters to take; a parameter that is shared counts once.
        weight_decay_norm: weight decay of norms; ``None`` is that of the optimizer.
        weight_decay_bias: weight decay of biases; ``None`` is that of the optimizer.
        clip_grad_max_norm: the most that the gradient norm of each group may be; ``None`` clips nothing.
        clip_grad_norm_type: the p of the norm; ``None`` clips nothing.

    Raises:
        ValueError: a number is below zero.
    """
    for name, value in (("clip_grad_max_norm", clip_grad_max_norm), ("clip_grad_norm_type", clip_grad_norm_type)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    groups: dict[float | None, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = None
        if name.rpartition(".")[2] == "bias":
            decay = weight_decay_bias
        elif parameter.ndim < 2:
            decay = weight_decay_norm
        groups.setdefault(decay, []).append(parameter)
    clip = {}
    if clip_grad_max_norm is not None and clip_grad_norm_type is not None:
        clip = {"clip_grad_max_norm": clip_grad_max_norm, "clip_grad_norm_type": clip_grad_norm_type}
    return [
        {"params": parameters, **({} if decay is None else {"weight_decay": decay}), **clip}
        for decay, parameters in groups.items()
    ]


def warmup_cosine_lr(
    optimizer: Optimizer, *, max_iter: int, warmup_iter: int = 0, warmup_factor: float = 0.001, alpha: float = 0.01
) -> LambdaLR:
    """Raises the learning rate in a line, then lowers it along a cosine.

    Args:
        optimizer: whose learning rates to set; those it has now are the top.
        max_iter: iterations of the run.
        warmup_iter: iterations until the top is reached.
        warmup_factor: share of the top at the first iteration, if there is a warm-up.
        alpha: share of the top at the end.
    """

    # With 100 iterations of warm-up of 1000: 0.001 at first, 0.5005 at 50, 1 at 100, 0.505 at 550, 0.01 at 1000.
    def factor(iteration: int) -> float:
        if iteration < warmup_iter:
            return warmup_factor + (1 - warmup_factor) * iteration / warmup_iter
        done = min(1.0, (iteration - warmup_iter) / max(1, max_iter - warmup_iter))
        return alpha + (1 - alpha) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
