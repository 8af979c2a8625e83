"""Collectives of gloo on tensors of the simulated device; what PyTorch has for them is in its CUDA build alone."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_LIBRARY = torch.library.Library("c10d", "IMPL")


def install() -> None:
    """Replaces the kernels for CUDA of all collectives."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # they are there, and lead nowhere
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, op = name.partition("::")
            if namespace == "c10d" and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                _LIBRARY.impl(op, partial(through_host, getattr(torch.ops.c10d, op).default), "CUDA")


def through_host(op: Any, *arguments: Any) -> Any:
    """Runs a collective on copies in the host's memory, waits for it, and copies back what it has written."""
    tensors: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        copies.append(tensor.cpu())
        return copies[-1]

    result = op(*tree_map_only(torch.Tensor, to_host, arguments))
    work = result[-1] if isinstance(result, tuple) else result
    work.wait()
    for tensor, copied in zip(tensors, copies, strict=True):
        tensor.data.copy_(copied)  # a collective does not count as an edit in place
    of_copy = {id(copied): tensor for tensor, copied in zip(tensors, copies, strict=True)}
    return tree_map_only(torch.Tensor, lambda tensor: of_copy.get(id(tensor), tensor), result)
