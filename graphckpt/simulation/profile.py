"""Device profiles: memory, rates and kernels of a device, by name or from a file.

A profile is a YAML file with the fields of :class:`DeviceProfile`. Data sheets state peak rates, so each has an
efficiency; a measured rate has efficiency 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch.utils.flop_counter import flop_registry

from graphckpt.errors import ConfigError, bullets
from graphckpt.extras import LazyPackage
from graphckpt.simulation.profile_files import field_faults, is_number, packaged_names, read_profile, value_faults
from graphckpt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import yaml
else:
    yaml = LazyPackage("yaml", "plan")

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
_PRODUCTS = {_aten.mm, _aten.bmm}
_PICKS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}  # read only the rows that they return


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
    if packet is _aten._grouped_mm:
        one, other, *_ = args
        products = one.shape[0] if one.dim() == other.dim() == 3 else 1  # rows of all groups are counted together
        return float(2 * products * prod(one.shape[-2:]) * other.shape[-1])
    if packet in _PRODUCTS:  # the formula of PyTorch, in a twentieth of its time
        return float(2 * result.numel() * args[0].shape[-1])
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Returns the bytes that an op reads and writes; ``None`` if it runs no kernel, as a view does."""
    if _runs_no_kernel(func):
        return None
    arguments, results = _tensors(args), _tensors((result,))
    if not func._schema.is_mutable and _is_view(arguments, result):
        return None
    written = sum(map(_bytes, results))
    if func.overloadpacket in _PICKS:
        return 2 * written
    if kwargs:
        arguments += _tensors(kwargs.values())
    if not func._schema.returns:  # in-place ops such as `_foreach_add_`
        written = sum(map(_bytes, _tensors(args[:1])))
    return sum(map(_bytes, arguments)) + written or None


def _flash_backward(args: tuple[Any, ...]) -> int:
    """`mha_bwd` of PyTorch's flash_api.cpp: gradient of the query and row sums in float32; of grouped heads, all."""
    _, query, key, *_ = args
    batch, heads, length, width = query.shape
    width_rounded = _up(width, 32) if width <= 192 else 256
    accumulated = 4 * batch * heads * _up(length, 128) * (width_rounded + 1)
    expanded = 2 * batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return int(accumulated + expanded)


_CUDA_EXTRA: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    # `_efficient_attention_backward` of PyTorch's attention_backward.cu: row sums in float32.
    _aten._scaled_dot_product_efficient_attention_backward: lambda args: 4 * prod(args[1].shape[:-1]),
    # cuDNN documents nothing; assumed to be as in flash attention: gradient of the query and row sums in float32.
    _aten._scaled_dot_product_cudnn_attention_backward: (
        lambda args: 4 * prod(args[1].shape[:-1]) * (args[1].shape[-1] + 1)
    ),
    # `embedding_dense_backward_cuda`: above 3072 indices it sorts them, through buffers of twice the size.
    _aten.embedding_dense_backward: lambda args: 4 * 8 * args[1].numel() if args[1].numel() > 3072 else 0,
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


# A stream waits, or a block of memory is marked as in use; the collective itself is counted. All but the first since
# torch 2.15.
_ORDERS_STREAMS = (
    "_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors", "fsdp::record_grad_output_stream",
)  # fmt: skip


@cache
def _runs_no_kernel(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim" or func.overloadpacket in _MAKES_NOTHING:
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


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_GUIDE = '"Custom profiles" in docs/reference/planning.md'
_KINDS = ("cuda", "cpu")
_ABOVE_ZERO = ("memory_bytes", "memory_bandwidth", "rounding")
_FROM_ZERO_ON = (
    "copy_out", "copy_in", "disk_write", "disk_read", "workspace_bytes", "context_bytes", "launch_seconds",
)  # fmt: skip
_LEAST_MEMORY = 2**20  # a smaller number is of another unit
_CUDA_CONTEXT_BYTES = 512 * 2**20
"""Bytes of the context of a device without a measurement. Published are up to 876 MiB, and 1,343 with CUDA 11.2."""
_KERNELS = ("flash", "cudnn", "efficient", "math")


@final
@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """The memory, rates and kernels of one device.

    >>> h200 = load_profile("h200")
    >>> h200.rounded(1), h200.workspace_bytes
    (512, 33554432)
    """

    name: str
    kind: str
    """``"cuda"`` or ``"cpu"``: selects the kernels."""
    memory_bytes: int
    flops: Mapping[str, float]
    """Floating point operations per second in dense matrix products, by dtype: ``"bfloat16"``, ``"tf32"``, ..."""
    memory_bandwidth: float
    """Bytes per second, read or written, of the memory of the device."""
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """Shares of the peak rates that are reached, of ``matmul, convolution, attention, bandwidth``; 1 if missing."""
    copy_out: float = 0.0
    """Bytes per second from the device to pinned host memory, 0 if unknown."""
    copy_in: float = 0.0
    """Bytes per second from pinned host memory to the device, 0 if unknown."""
    disk_write: float = 0.0
    """Bytes per second to the disk, 0 if unknown."""
    disk_read: float = 0.0
    """Bytes per second from the disk, 0 if unknown."""
    rounding: int = 1
    """The allocator rounds sizes up to multiples of this."""
    workspace_bytes: int = 0
    """Bytes of the workspace of cuBLAS on each stream."""
    context_bytes: int = None  # type: ignore[assignment]  # an int from `__post_init__` on
    """Bytes of the CUDA context of a process, its kernels and libraries, which ``nvidia-smi`` shows besides the bytes
    that the allocator has reserved. ``None`` is 512 MiB for ``"cuda"`` and 0 for ``"cpu"``."""
    launch_seconds: float = 0.0
    """Overhead of each op."""
    attention: tuple[str, ...] = ("math",)
    """Kernels of ``scaled_dot_product_attention``; the first one that supports a call runs it."""
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device, such as ``(9, 0)``."""

    def __post_init__(self) -> None:
        if vars(self)["context_bytes"] is None:
            object.__setattr__(self, "context_bytes", _CUDA_CONTEXT_BYTES if self.kind == "cuda" else 0)
        faults = _faults(self)
        if faults:
            raise ConfigError(bullets(f"device profile {self.name!r}", faults))

    def with_memory(self, memory: int | str) -> DeviceProfile:
        """Returns the profile of the same device with another memory, in bytes or as ``"24GiB"``.

        Raises:
            ConfigError: ``memory`` is 0, or not a size.

        >>> load_profile("h100").with_memory("24GiB").name
        'h100 of 24.0 GiB'
        """
        try:
            num_bytes = parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(f"memory: {str(error).removeprefix('memory size ')}") from None
        if num_bytes < _LEAST_MEMORY:
            raise ConfigError(f"memory: expected at least 1 MiB, got {format_bytes(num_bytes)} · fix: '24GiB'")
        return replace(self, name=f"{self.name} of {format_bytes(num_bytes)}", memory_bytes=num_bytes)

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.rounding) * self.rounding

    def op_seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        """Returns the seconds of one op: the longer of its arithmetic and its memory traffic, plus the overhead."""
        num_bytes = moved_bytes(func, args, kwargs, result)
        if num_bytes is None:
            return 0.0
        seconds = num_bytes / (self.memory_bandwidth * self.efficiency.get("bandwidth", 1.0))
        flops = flops_of(func, args, kwargs, result)
        if flops:
            packet = func.overloadpacket
            kind = "attention" if packet in _ATTENTION else "convolution" if packet in _CONVOLUTION else "matmul"
            peak = self.flops.get(rate_name(func, args)) or self.flops["float32"]
            seconds = max(seconds, flops / (peak * self.efficiency.get(kind, 1.0)))
        return seconds + self.launch_seconds

    def op_extra_bytes(self, func: Any, args: tuple[Any, ...]) -> int:
        """Returns the temporary bytes inside of an op, which dispatch modes do not see, 0 if unknown."""
        count = _CUDA_EXTRA.get(getattr(func, "overloadpacket", func)) if self.kind == "cuda" else None
        return 0 if count is None else count(args)

    def save(self, path: str | Path, *, comment: str = "") -> None:
        """Writes a file that :func:`load_profile` reads."""
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        Path(path).write_text(head + yaml.safe_dump(asdict(self), sort_keys=False), encoding="utf-8")


Device: TypeAlias = str | Path | DeviceProfile | None
"""The values of ``device``: the name of a profile, a file, a profile, or ``None`` for that of the model."""


def load_profile(name_or_path: str | Path | DeviceProfile) -> DeviceProfile:
    """Returns a device by the name of its packaged profile, or from a profile file.

    Raises:
        ConfigError: The profile does not exist, or has invalid values; the message lists all of them.
    """
    if isinstance(name_or_path, DeviceProfile):
        return name_or_path
    fix = f"use one of {', '.join(profile_names())}; or write a profile of about 20 lines, see {_GUIDE}"
    if not isinstance(name_or_path, (str, Path)) or str(name_or_path).startswith("cuda"):
        fix += "; or leave `device` out for a device that is present"
    tool = "with `graphckpt profile-device`"
    values, path = read_profile(
        name_or_path, "device", fix, if_missing=f"write one {tool}", if_not_yaml=f"write it {tool}"
    )
    if faults := field_faults(values, DeviceProfile):
        raise ConfigError(bullets(f"device profile {path}", faults))
    if isinstance(values.get("attention"), str):
        values["attention"] = [values["attention"]]
    for name in ("attention", "capability"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return DeviceProfile(**values)


def profile_names() -> list[str]:
    """Returns the names of the packaged profiles."""
    return packaged_names("device")


def _faults(device: DeviceProfile) -> list[str]:
    faults = [*value_faults(device, above_zero=_ABOVE_ZERO, from_zero=_FROM_ZERO_ON)]
    if device.kind not in _KINDS:
        faults.append(f"kind: expected one of {', '.join(_KINDS)}, got {device.kind!r}")
    for name, values in (("flops", device.flops), ("efficiency", device.efficiency)):
        if not isinstance(values, dict) or not all(is_number(value) and value > 0 for value in values.values()):
            faults.append(f"{name}: expected numbers above 0 by name, got {values!r}")
        elif name == "flops" and "float32" not in values:
            faults.append("flops: float32 is missing")
    untyped = vars(device)  # of a file, in which a value may be of any type
    kernels, capability = untyped["attention"], untyped["capability"]
    if not isinstance(kernels, tuple | list) or not kernels:
        faults.append(f"attention: expected a list of {', '.join(_KERNELS)}, got {kernels!r}")
    elif unknown := [kernel for kernel in kernels if kernel not in _KERNELS]:
        faults.append(f"attention: expected {', '.join(_KERNELS)}, got {unknown[0]!r}")
    is_pair = isinstance(capability, tuple | list) and [*map(type, capability)] == [int, int]
    if capability is not None and not is_pair:
        faults.append(f"capability: expected two ints such as [9, 0], got {capability!r}")
    return faults
