"""The norm of gradients and its limit, also where some of them are cut over processes and others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

TotalNorm = Callable[[list[torch.Tensor], float], torch.Tensor]
"""Returns the norm of the gradients of parameters, of which other processes may hold some."""


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, total_norm: TotalNorm | None = None
) -> None:
    """Scales gradients so that the norm over all of them is at most ``max_norm``; one that is cut counts as the whole.

    ``clip_grad_norm_`` alone refuses DTensors beside plain tensors, which is what tensor parallelism makes.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if total_norm is None and not any(_is_cut(grad) for grad in grads):
        clip_grad_norm_(parameters, max_norm, norm_type)
        return
    total = _norm(grads, norm_type) if total_norm is None else total_norm(parameters, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # PyTorch's own
    for grad in grads:
        local = _local(grad)
        local.mul_(scale.to(local.device))


def _norm(grads: list[Any], norm_type: float) -> torch.Tensor:
    layouts: dict[Any, list[Any]] = {}
    for grad in grads:
        layout = (grad.device_mesh, tuple(not p.is_replicate() for p in grad.placements)) if _is_cut(grad) else None
        layouts.setdefault(layout, []).append(grad)
    norms: list[torch.Tensor] = []
    for layout, alike in layouts.items():
        norm = get_total_norm([_local(grad) for grad in alike], norm_type)
        norms.append(norm if layout is None else _over_processes(norm, norm_type, *layout))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    return total


def _over_processes(norm: torch.Tensor, norm_type: float, mesh: Any, is_shard: tuple[bool, ...]) -> torch.Tensor:
    """Returns the norm over the shares of all processes: of their p-th powers the sum, or for infinity the largest."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # noqa: PLC0415 - a second, for those who need it

    is_max = norm_type == float("inf")
    part = norm if is_max else norm**norm_type
    reduce = "max" if is_max else "sum"
    placements = [Partial(reduce) if shard else Replicate() for shard in is_shard]
    whole: torch.Tensor = DTensor.from_local(part, mesh, placements, run_check=False).full_tensor()
    return whole if is_max else whole.pow(1.0 / norm_type)


def _is_cut(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if _is_cut(tensor) else tensor  # type: ignore[no-any-return]
