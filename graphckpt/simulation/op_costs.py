"""What an op costs on a device: its arithmetic, the bytes that it reads and writes, and its temporary bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

from graphckpt._compat_fake import is_on_host
from graphckpt.simulation import kernel_ops
from graphckpt.simulation.allocator import round_up

_aten = torch.ops.aten

FUSED_KERNELS = ("flash", "cudnn", "efficient")
"""The fused kernels of attention, by the names that profiles have for them."""

# Note [Bytes of an op]
# Each argument is read once, and each result is written once. With a and b of 4000 bytes, and a table of 400,000 of
# which i picks rows of 4000:
#
#     a + b, a.add_(b)       12,000     two are read, one is written: `_written` finds which by the schema
#     a.copy_(b)              8,000     `_FILLS`: a is not read
#     table[i]                8,000     `_PICKS`: the rest of the table is not read
#     table.index_put_(i, r) 12,000     `_PUTS`: reads r and these rows, and writes them
#     a.expand(5, n) + 1.0   24,000     a is read once, the result has 20,000
#     a.t(), a.view(-1)      None       no kernel, and so no launch either

_CONVOLUTION = {_aten.convolution, _aten._convolution, _aten.convolution_backward}
# They allocate, read one number or set a storage, without a kernel.
_WITHOUT_KERNEL = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.lift_fresh,
    _aten._local_scalar_dense, _aten.resize_, _aten.set_,
}  # fmt: skip
_COPIES = {_aten._to_copy, _aten.copy_, _aten._foreach_copy_}
_PRODUCTS = {_aten.mm, _aten.bmm, _aten._int_mm}
# They read only the rows that they return, of a table that may be as large as the model.
_PICKS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten._unsafe_index}
# They read and write only the rows that they are given values for.
_PUTS = {
    _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put, _aten.index_add_, _aten.index_copy_,
    _aten.scatter_, _aten.scatter_add_, _aten.scatter_reduce_,
}  # fmt: skip
# They write their first argument without reading it.
_FILLS = {
    _aten.copy_, _aten.zero_, _aten.fill_, _aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_,
    _aten.exponential_, _aten._foreach_copy_, _aten._foreach_zero_,
}  # fmt: skip
# Channels of a group below which a convolution has no kernel for matrix units: "Channels In and Out" of NVIDIA's guide
# for convolutional layers (docs.nvidia.com/deeplearning/performance/dl-performance-convolutional) has multiples of 8.
_LEAST_CHANNELS = 8


@cache
def attention_kernel(packet: Any) -> str | None:
    """Returns the fused kernel that an op of attention is, or the backward of one; ``None`` for all other ops."""
    name = getattr(packet, "__name__", "").removeprefix("_scaled_dot_product")
    return next((kernel for kernel in FUSED_KERNELS if name.startswith(f"_{kernel}_attention")), None)


def kinds_of(func: Any) -> tuple[str, ...]:
    """Returns the names of the efficiency of an op that computes, of which the first that a profile has counts."""
    if (kernel := attention_kernel(func.overloadpacket)) is not None:
        return kernel, "attention"
    return ("convolution" if func.overloadpacket in _CONVOLUTION else "matmul",)


def rate_name(func: Any, args: tuple[Any, ...]) -> str:
    """Returns the key of an op's peak rate: its dtype, or ``"tf32"`` where the user allows it."""
    # Products of integers count at the rate of float16: kernels for them are seldom faster in training.
    integers = torch.float16 if func.overloadpacket is _aten._int_mm else torch.float32
    dtype = next((t.dtype for t in _tensors(args) if t.dtype.is_floating_point), integers)
    if func.overloadpacket in _CONVOLUTION and _is_depthwise(func.overloadpacket, args):
        return "float32" if dtype.itemsize <= 4 else "float64"
    if dtype is torch.float32:
        backends: Any = torch.backends
        backend = backends.cudnn.conv if func.overloadpacket in _CONVOLUTION else backends.cuda.matmul
        return "tf32" if backend.fp32_precision == "tf32" else "float32"
    return str(dtype).removeprefix("torch.")


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Returns the floating point operations of a matrix product, convolution or attention; 0 for all other ops."""
    packet: Any = getattr(func, "overloadpacket", None)
    if attention_kernel(packet) is not None:
        return _attention_flops(func, args, kwargs)
    if packet is _aten._grouped_mm:
        one, other, *_ = args
        products = one.shape[0] if one.dim() == other.dim() == 3 else 1  # rows of all groups are counted together
        return float(2 * products * prod(one.shape[-2:]) * other.shape[-1])
    # Of the two ops that are called most: the formula of PyTorch, in a twentieth of its time.
    if packet in _PRODUCTS:
        return float(2 * result.numel() * args[0].shape[-1])
    if packet is kernel_ops.add_product:
        return float(2 * prod(args[0].shape) * args[1].shape[-1])
    if packet in _CONVOLUTION:
        return _convolution_flops(packet, args, result)
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Returns the bytes that an op reads and writes; ``None`` if it runs no kernel, as a view does."""
    if _runs_no_kernel(func):
        return None
    packet, arguments = func.overloadpacket, _tensors(args)
    if not func._schema.is_mutable:
        if _is_view(arguments, result):
            return None
        written = bytes_of(result)
        if packet in _PICKS:
            return 2 * written
        # An op without bytes, such as one on empty tensors, runs no kernel either.
        return sum(map(_bytes, arguments)) + bytes_of(list(kwargs.values())) + written or None
    positions, names = _written(func)
    if kwargs.get("grad_scale") is not None:  # a fused optimizer writes the gradients that it has unscaled
        positions = [*positions, 1]
    if packet in _PUTS:  # reads the values, and reads and writes as many elements
        return 3 * max(map(_bytes, arguments[1:]), default=0) or None
    written = sum(bytes_of(args[position]) for position in positions if position < len(args))
    results = [kwargs[name] for name in names if name in kwargs]  # of `out=`, which is not read
    read = sum(map(_bytes, arguments)) - (written if packet in _FILLS else 0)
    return read + written + bytes_of(results) or None


@cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """Returns the arguments that an op writes: the numbers of the positional ones, the names of the others."""
    arguments = [(i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None]
    # Fused optimizers write gradients only with a scaler: see `moved_bytes`.
    written = [(i, a) for i, a in arguments if a.alias_info.is_write and a.name != "grads"]
    return [i for i, a in written if not a.kwarg_only], [a.name for _, a in written if a.kwarg_only]


Side: TypeAlias = Literal["device", "host", "out", "in"]


def side_of(func: Any, args: tuple[Any, ...], result: Any) -> Side:
    """Returns where an op of a simulated GPU runs: on the device, on its host, or on the link out of it or into it."""
    first = args[0] if args else result
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    is_first = isinstance(first, torch.Tensor) and is_on_host(first)
    if func.overloadpacket not in _COPIES:
        return "host" if is_first else "device"
    source, target = (
        _tensors((copied_from(func, args),))[:1],
        [result] if func.overloadpacket is _aten._to_copy else [first],
    )
    is_in, is_out = any(map(is_on_host, source)), any(map(is_on_host, target))
    return "device" if not (is_out or is_in) else "host" if is_out and is_in else "out" if is_out else "in"


def copied_from(func: Any, args: tuple[Any, ...]) -> Any:
    """Returns the tensor, or the tensors, that an op copies, of those that :func:`side_of` finds on a link."""
    return args[0 if func.overloadpacket is _aten._to_copy else 1]


class OpCost(NamedTuple):
    """What an op costs on any device: :meth:`DeviceProfile.seconds` turns it into seconds of one."""

    side: Side
    num_bytes: int
    """Read and written; or of a copy over the link those that pass it."""
    flops: float = 0.0
    rate: str = ""
    """The key of the peak rate in :attr:`DeviceProfile.flops`; "" for an op without arithmetic that counts."""
    kinds: tuple[str, ...] = ()
    """The names of the efficiency, of which the first that a profile has counts."""

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpCost | None:
        """Returns the cost of an op; ``None`` if it runs no kernel."""
        num_bytes = moved_bytes(func, args, kwargs, result)
        if num_bytes is None:
            return None
        side = side_of(func, args, result)
        if side in ("in", "out"):
            return cls(side, bytes_of(copied_from(func, args)))
        flops = flops_of(func, args, kwargs, result)
        return cls(side, num_bytes, flops, rate_name(func, args), kinds_of(func)) if flops else cls(side, num_bytes)


def bytes_of(values: Any) -> int:
    return sum(map(_bytes, _tensors((values,))))


def _convolution_flops(packet: Any, args: tuple[Any, ...], result: Any) -> float:
    """Two for each weight and position of the output, or of the input if transposed; as many for each gradient."""
    # PyTorch's formula for the gradient of the weight counts all groups with all others.
    # The first argument of the backward is the gradient of the output: all others are one position further on.
    is_backward = packet is _aten.convolution_backward
    inputs, weight, transposed = args[is_backward], args[1 + is_backward], args[6 + is_backward]
    num_gradients = sum(args[-1][:2]) if is_backward else 1
    outputs = args[0] if is_backward else result
    positions = (inputs if transposed else outputs).shape[2:]
    return float(2 * num_gradients * inputs.shape[0] * prod(positions) * weight.numel())


def _is_depthwise(packet: Any, args: tuple[Any, ...]) -> bool:
    is_backward = packet is _aten.convolution_backward
    return bool(args[8 + is_backward] > 1 and args[1 + is_backward].shape[1] < _LEAST_CHANNELS)


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Two matrix products over all pairs of positions, five in backward; a causal kernel skips half of the pairs."""
    # Of a backward the gradient precedes query, key and value.
    name = func.overloadpacket.__name__
    is_backward = name.endswith("_backward")
    query, key, value = args[is_backward : is_backward + 3]
    by_name = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    # FlashAttention's own op has the heads behind the tokens.
    length = key.shape[-3 if name.startswith("_flash_") else -2]
    pairs: float = query.numel() // query.shape[-1] * length
    left = by_name.get("window_size_left")
    if left is not None:
        # Of a causal row of n tokens with a window of w = left + 1: the last n - w see w tokens each, the first w on
        # average half as many. That is w (n - w / 2) of n^2 pairs.
        window = left + 1
        pairs = pairs * window * (2 * length - window) / (2 * length**2)
    elif by_name.get("is_causal"):
        pairs = pairs / 2
    q_width: int = query.shape[-1]
    v_width: int = value.shape[-1]
    return 2.0 * pairs * ((3 * q_width + 2 * v_width) if is_backward else (q_width + v_width))


# A stream waits, or a block of memory is marked as in use; the collective itself is counted. All but the first since
# torch 2.15.
_ORDERS_STREAMS = (
    "_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors", "fsdp::record_grad_output_stream",
)  # fmt: skip


@cache
def _runs_no_kernel(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim" or func.overloadpacket in _WITHOUT_KERNEL:
        return True
    if func.name() in _ORDERS_STREAMS:
        return True
    return not schema.is_mutable and any(returned.alias_info is not None for returned in schema.returns)


def _is_view(arguments: Sequence[torch.Tensor], result: Any) -> bool:
    """Whether an op has returned a view, which its schema may not say, as that of ``_unsafe_view``."""
    return (
        isinstance(result, torch.Tensor)
        and bool(arguments)
        and result.layout is torch.strided is arguments[0].layout
        and result.untyped_storage() is arguments[0].untyped_storage()
    )


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += _tensors(value)
    return tensors


def _bytes(tensor: torch.Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes and tensor.layout is torch.strided and 0 in (strides := tensor.stride()):
        # Each element of an expanded tensor is read once.
        return prod(size for size, stride in zip(tensor.shape, strides, strict=True) if stride) * tensor.element_size()
    return num_bytes


def _flash_backward(args: tuple[Any, ...]) -> int:
    """`mha_bwd` of PyTorch's flash_api.cpp: the gradient of the query and row sums in float32; see `_flash_bytes`."""
    _, query, key, *_ = args
    return _flash_bytes(query.shape, key.shape, query.element_size())


def _flash_backward_in_rows(args: tuple[Any, ...]) -> int:
    """The same on tensors with the heads behind the tokens."""
    _, query, key, *_ = args
    return _flash_bytes(query.transpose(1, 2).shape, key.transpose(1, 2).shape, query.element_size())


def _flash_bytes(query_shape: Sequence[int], key_shape: Sequence[int], element_size: int) -> int:
    batch, heads, length, width = query_shape
    width_rounded = round_up(width, 32) if width <= 192 else 256
    accumulated = 4 * batch * heads * round_up(length, 128) * (width_rounded + 1)
    # With grouped heads, the gradients of keys and values are made for all heads, and added up by groups afterwards.
    expanded = 2 * batch * heads * key_shape[2] * width * element_size if key_shape[1] != heads else 0
    return int(accumulated + expanded)


_CUDA_TEMPORARIES: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._flash_attention_backward: _flash_backward_in_rows,
    # `_efficient_attention_backward` of PyTorch's attention_backward.cu: row sums in float32.
    _aten._scaled_dot_product_efficient_attention_backward: lambda args: 4 * prod(args[1].shape[:-1]),
    # cuDNN documents nothing; assumed to be as in flash attention: gradient of the query and row sums in float32.
    _aten._scaled_dot_product_cudnn_attention_backward: (
        lambda args: 4 * prod(args[1].shape[:-1]) * (args[1].shape[-1] + 1)
    ),
    # `embedding_dense_backward_cuda`: above 3072 indices it sorts them, through buffers of twice the size.
    _aten.embedding_dense_backward: lambda args: 4 * 8 * args[1].numel() if args[1].numel() > 3072 else 0,
}


def cuda_temporary_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Returns the bytes that a kernel of CUDA allocates and frees within an op, unseen by modes; 0 if unknown."""
    count = _CUDA_TEMPORARIES.get(getattr(func, "overloadpacket", func))
    return 0 if count is None else count(args)
