"""The cost of one op on any device: arithmetic, memory traffic and temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten

_ATTENTION = {
    _aten._scaled_dot_product_flash_attention: False,
    _aten._scaled_dot_product_flash_attention_for_cpu: False,
    _aten._scaled_dot_product_efficient_attention: False,
    _aten._scaled_dot_product_cudnn_attention: False,
    _aten._scaled_dot_product_flash_attention_backward: True,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: True,
    _aten._scaled_dot_product_efficient_attention_backward: True,
    _aten._scaled_dot_product_cudnn_attention_backward: True,
}
"""Attention ops, and whether each is a backward, whose gradient argument precedes query, key and value."""

_CONVOLUTION = {_aten.convolution, _aten._convolution, _aten.convolution_backward}
_MAKES_NOTHING = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.lift_fresh,
    _aten._local_scalar_dense, _aten.resize_, _aten.set_,
}  # fmt: skip
_PICKS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}  # read of their table what they return


def efficiency_kind(func: Any) -> str:
    """Returns the key of an op's efficiency: ``"attention"``, ``"convolution"`` or ``"matmul"``."""
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return "attention"
    return "convolution" if packet in _CONVOLUTION else "matmul"


def rate_name(func: Any, args: tuple[Any, ...]) -> str:
    """Returns the key of an op's peak rate: its dtype, or ``"tf32"`` where the user allows it."""
    dtype = next((t.dtype for t in _tensors(args) if t.dtype.is_floating_point), torch.float32)
    if dtype is torch.float32:
        backends: Any = torch.backends
        backend = backends.cudnn.conv if func.overloadpacket in _CONVOLUTION else backends.cuda.matmul
        return "tf32" if backend.fp32_precision == "tf32" else "float32"
    return str(dtype).removeprefix("torch.")


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Returns the floating point operations of a matrix product, convolution or attention; 0 for all other ops."""
    packet: Any = getattr(func, "overloadpacket", None)
    is_backward = _ATTENTION.get(packet)
    if is_backward is not None:
        return _attention_flops(func, args, kwargs, is_backward)
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Returns the bytes that an op reads and writes; ``None`` if it runs no kernel, as a view does."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim" or func.overloadpacket in _MAKES_NOTHING:
        return None
    if not schema.is_mutable and _is_view(schema, args, result):
        return None
    written = sum(_bytes(tensor) for tensor in _tensors(result))
    if func.overloadpacket in _PICKS:
        return 2 * written
    read = sum(_bytes(tensor) for tensor in (*_tensors(args), *_tensors(tuple(kwargs.values()))))
    if not schema.returns:  # in-place ops such as `_foreach_add_`
        written = sum(_bytes(t) for t in _tensors(args[:1]))
    return read + written or None


def extra_bytes_on_cuda(func: Any, args: tuple[Any, ...]) -> int:
    """Returns the temporaries inside of one op on a CUDA device; 0 where none are known."""
    count = _EXTRA.get(getattr(func, "overloadpacket", func))
    return 0 if count is None else count(args)


def _flash_backward(args: tuple[Any, ...]) -> int:
    """`mha_bwd` of PyTorch's flash_api.cpp: gradient of the query and row sums in float32; of grouped heads, all."""
    _, query, key, *_ = args
    batch, heads, length, width = query.shape
    length_rounded = _up(length, 128)
    width_rounded = _up(width, 32) if width <= 192 else 256
    accumulated = 4 * batch * heads * length_rounded * (width_rounded + 1)
    expanded = 0
    if key.shape[1] != heads:
        expanded = 2 * batch * heads * key.shape[2] * width * query.element_size()
    return int(accumulated + expanded)


def _efficient_backward(args: tuple[Any, ...]) -> int:
    """`_efficient_attention_backward` of PyTorch's attention_backward.cu: row sums in float32."""
    batch, heads, length, _ = args[1].shape
    return 4 * int(batch * heads * length)


def _cudnn_backward(args: tuple[Any, ...]) -> int:
    """Gradient of the query and row sums in float32, as flash attention has: an assumption, cuDNN documents nothing."""
    _, query, *_ = args
    batch, heads, length, width = query.shape
    return 4 * int(batch * heads * length * (width + 1))


def _embedding_backward(args: tuple[Any, ...]) -> int:
    """`embedding_dense_backward_cuda`: above 3072 indices it sorts them, through buffers of twice the size."""
    count = args[1].numel()
    return 4 * 8 * int(count) if count > 3072 else 0


_EXTRA: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
    _aten.embedding_dense_backward: _embedding_backward,
}


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_backward: bool) -> float:
    """Two matrix products over all pairs of positions, five in backward; a causal kernel skips half of the pairs."""
    query, key, value = args[is_backward : is_backward + 3]
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    q_width, v_width = query.shape[-1], value.shape[-1]
    flops = 2.0 * pairs * ((3 * q_width + 2 * v_width) if is_backward else (q_width + v_width))
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal" and (args[position] if position < len(args) else kwargs.get("is_causal")):
            return float(flops / 2)
    return float(flops)


def _is_view(schema: Any, args: tuple[Any, ...], result: Any) -> bool:
    if any(returned.alias_info is not None for returned in schema.returns):
        return True
    first = next(_tensors(args), None)  # `_unsafe_view` returns a view that its schema does not declare
    return (
        isinstance(result, torch.Tensor)
        and first is not None
        and result.layout is torch.strided is first.layout
        and result.untyped_storage() is first.untyped_storage()
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return prod(sizes) * tensor.element_size()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
