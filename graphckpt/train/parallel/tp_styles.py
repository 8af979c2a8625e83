"""Styles for ``parallelize_module``: how the weights of one layer are sharded over a mesh.

Weights become DTensors; what flows between layers stays plain tensors, so that blocks, policies and Transformers'
own code see what they see in one process, with fewer heads and narrower middles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import embedding, linear
from transformers.pytorch_utils import Conv1D

from graphckpt._compat import packed_shard

# Legend: B samples, T tokens, I inputs of a layer, O its outputs, N processes


@final
class ColwiseParallel(ParallelStyle):
    """Each process computes ``O / N`` of a layer's outputs, from all of its inputs.

    Args:
        parts: matrices in the layer, each sharded by itself: 3 where queries, keys and values are one layer.
        gather: whether the outputs are all-gathered.
    """

    def __init__(self, *, parts: int = 1, gather: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.gather = gather

    def size(self, module: nn.Module) -> int:
        """Returns the size that has to be divisible by the number of processes."""
        outputs, _ = features(module)
        return outputs // self.parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in (("weight", 1 if isinstance(module, Conv1D) else 0), ("bias", 0)):
            _cut(module, name, device_mesh, packed_shard(dim, self.parts) if self.parts > 1 else Shard(dim))
        group, gather = device_mesh.get_group(), self.gather

        def forward(module: Any, x: Tensor) -> Tensor:
            output = _affine(module, _sum_gradient(x, group), _local(module.weight), _local(module.bias))
            return _gather_output(output, group) if gather else output

        return _with_forward(module, forward)


@final
class RowwiseParallel(ParallelStyle):
    """Each process computes partial outputs from ``I / N`` of a layer's inputs; they are all-reduced.

    Args:
        split: whether the inputs are replicated, as after ``ColwiseParallel(gather=True)``.
    """

    def __init__(self, *, split: bool = False) -> None:
        super().__init__()
        self.split = split

    def size(self, module: nn.Module) -> int:
        """Returns the size that has to be divisible by the number of processes."""
        _, inputs = features(module)
        return inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, "weight", device_mesh, Shard(0 if isinstance(module, Conv1D) else 1))
        group, split = device_mesh.get_group(), self.split

        def forward(module: Any, x: Tensor) -> Tensor:
            own = _split_input(x, group) if split else x
            output: Tensor = _sum_output(_affine(module, own, _local(module.weight), None), group)
            return output if module.bias is None else output + module.bias

        return _with_forward(module, forward)


@final
class VocabParallel(ParallelStyle):
    """Each process holds ``1 / N`` of the rows of an embedding."""

    def size(self, module: nn.Module) -> int:
        """Returns the size that has to be divisible by the number of processes."""
        assert isinstance(module, nn.Embedding)
        return module.num_embeddings

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, "weight", device_mesh, Shard(0))
        group, rank = device_mesh.get_group(), device_mesh.get_local_rank()

        def forward(module: Any, ids: Tensor) -> Tensor:
            weight = _local(module.weight)
            assert weight is not None
            place = ids - rank * len(weight)
            foreign = (place < 0) | (place >= len(weight))
            pad = None if module.padding_idx is None else module.padding_idx - rank * len(weight)
            found = embedding(
                place.masked_fill(foreign, 0), weight, padding_idx=pad if pad in range(len(weight)) else None
            )
            output: Tensor = _sum_output(found.masked_fill(foreign.unsqueeze(-1), 0), group)
            return output

        return _with_forward(module, forward)


@final
class ReplicatedWithGradAllReduce(ParallelStyle):
    """The layer is replicated and runs on local activations; gradients of its weights are all-reduced."""

    def size(self, module: nn.Module) -> int:
        """Returns 0, which is divisible by every number."""
        del module
        return 0

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        for part in module.modules():
            if any(parameter is not None and parameter.requires_grad for parameter in part._parameters.values()):
                _with_forward(part, _summing(type(part).forward, group))
        return module


def _summing(forward: Callable[..., Any], group: ProcessGroup) -> Callable[..., Any]:
    """Returns a forward that all-reduces its weights' gradients; hooks would stay on tensors that FSDP2 replaces."""

    def summing(module: Any, *args: Any, **kwargs: Any) -> Any:
        own = module._parameters
        module._parameters = {
            name: _sum_gradient(weight, group) if weight is not None and weight.requires_grad else weight
            for name, weight in own.items()
        }
        try:
            return forward(module, *args, **kwargs)
        finally:
            module._parameters = own

    return summing


Style = ColwiseParallel | RowwiseParallel | VocabParallel | ReplicatedWithGradAllReduce
"""The style of one layer in a plan."""


def features(module: nn.Module) -> tuple[int, int]:
    """Returns the number of outputs and inputs of the full layer."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def fits(style: Style, module: nn.Module) -> bool:
    """Whether a layer supports a style."""
    own: Any = type(module).forward
    if isinstance(style, VocabParallel):
        return isinstance(module, nn.Embedding) and own is nn.Embedding.forward and _is_simple(module)
    if isinstance(style, ReplicatedWithGradAllReduce):
        return True
    return own in {nn.Linear.forward, Conv1D.forward}


def _is_simple(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _cut(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces a parameter, equal on all processes, by its local shard."""
    whole = getattr(module, name, None)
    if whole is not None:
        share = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(share, requires_grad=whole.requires_grad))


def _local(weight: Any) -> Tensor | None:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _with_forward(module: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    module.forward = MethodType(forward, module)
    return module


def _affine(module: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns ``x @ weight + bias``, computed as by the layer itself: [B, T, I] -> [B, T, O]."""
    assert weight is not None
    if not isinstance(module, Conv1D):
        return linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    output = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return output.view(*x.shape[:-1], -1)


def _sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum over all processes, as a copy: a policy may save the input, or a tensor share its memory."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """All-gathers along the last dim: [..., O / N] -> [..., O]."""
    own = tensor.contiguous()
    pieces = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, own, group=group)
    return torch.cat(pieces, dim=-1)


def _own(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the local chunk: [..., O] -> [..., O / N]."""
    return tensor.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


def _identity(tensor: Tensor, group: ProcessGroup) -> Tensor:
    del group
    return tensor.view_as(tensor)


class _WithGradient(torch.autograd.Function):
    """Runs one of the functions above in forward, and another one on the gradient."""

    @staticmethod
    def forward(ctx: Any, run: Any, run_on_gradient: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.run_on_gradient = group, run_on_gradient
        output: Tensor = run(x, group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        return None, None, ctx.run_on_gradient(grad, ctx.group), None


_sum_gradient = partial(_WithGradient.apply, _identity, _sum)
_sum_output = partial(_WithGradient.apply, _sum, _identity)
_gather_output = partial(_WithGradient.apply, _gather, _own)
_split_input = partial(_WithGradient.apply, _own, _gather)
