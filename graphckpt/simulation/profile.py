"""Device profiles: memory, rates and kernels of a device, by name or from a file.

A profile is a YAML file with the fields of :class:`DeviceProfile`. Data sheets state peak rates, so each has an
efficiency; a measured rate has efficiency 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

from graphckpt.errors import ConfigError, bullets
from graphckpt.extras import LazyPackage
from graphckpt.simulation.allocator import round_up
from graphckpt.simulation.op_costs import FUSED_KERNELS, OpCost, cuda_temporary_bytes
from graphckpt.simulation.profile_files import is_number, names_fix, packaged_names, read_profile, value_faults
from graphckpt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import yaml
else:
    yaml = LazyPackage("yaml", "plan")

_KINDS = ("cuda", "cpu")
_ABOVE_ZERO = ("memory_bytes", "memory_bandwidth", "rounding")
_FROM_ZERO_ON = (
    "copy_out", "copy_in", "disk_write", "disk_read", "workspace_bytes", "context_bytes", "launch_seconds",
)  # fmt: skip
# A smaller number is of another unit, such as GiB.
_LEAST_MEMORY = 2**20
_CUDA_CONTEXT_BYTES = 512 * 2**20
"""Bytes of the context of a device without a measurement. Published are up to 876 MiB, and 1,343 with CUDA 11.2."""
_KERNELS = (*FUSED_KERNELS, "math")


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
    """Shares of the peak rates that are reached, of ``matmul, convolution, attention, bandwidth, copy``; 1 if missing.
    A kernel of attention may have one of its own, as ``flash, cudnn, efficient``."""
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
        # Set here, as the default depends on another field.
        if vars(self)["context_bytes"] is None:
            object.__setattr__(self, "context_bytes", _CUDA_CONTEXT_BYTES if self.kind == "cuda" else 0)
        faults = _faults(self)
        if faults:
            raise ConfigError(bullets(f"device profile {self.name!r}", faults))

    def with_memory(self, memory: int | str) -> DeviceProfile:
        """Returns the profile of the same device with another memory, in bytes or as ``"24GiB"``.

        Raises:
            ConfigError: ``memory`` is not a size, or no more than the context of a process takes.

        >>> load_profile("h100").with_memory("24GiB").name
        'h100 of 24.0 GiB'
        """
        try:
            num_bytes = parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(f"memory: {str(error).removeprefix('memory size ')}") from None
        if num_bytes < _LEAST_MEMORY:
            raise ConfigError(f"memory: expected at least 1 MiB, got {format_bytes(num_bytes)} · fix: '24GiB'")
        if num_bytes <= self.context_bytes:
            what = f"expected more than the {format_bytes(self.context_bytes)} of the context of a process"
            raise ConfigError(f"memory: {what}, got {format_bytes(num_bytes)} · fix: '24GiB'")
        return replace(self, name=f"{self.name} of {format_bytes(num_bytes)}", memory_bytes=num_bytes)

    def rounded(self, num_bytes: int) -> int:
        return round_up(num_bytes, self.rounding)

    def op_seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        """Returns the seconds of one op: the longer of its arithmetic and its memory traffic, plus the overhead."""
        cost = OpCost.of(func, args, kwargs, result)
        return 0.0 if cost is None else self.seconds(cost)

    def seconds(self, cost: OpCost) -> float:
        """Returns the seconds of an op of this cost."""
        side, num_bytes, flops, rate, kinds = cost
        if self.kind == "cuda" and side == "host":
            return _host().seconds(cost)
        if self.kind == "cuda" and side != "device":
            link = self.copy_out if side == "out" else self.copy_in
            # A link whose rate is not known takes no time.
            return num_bytes / (link * self.efficiency.get("copy", 1.0)) if link else 0.0
        # A kernel computes while it reads and writes, so that the slower of the two is its time: the roofline model.
        seconds = num_bytes / (self.memory_bandwidth * self.efficiency.get("bandwidth", 1.0))
        if flops:
            # A type that a profile does not list, such as complex64, counts as float32, which each has to list.
            peak = self.flops.get(rate) or self.flops["float32"]
            share = next((self.efficiency[kind] for kind in kinds if kind in self.efficiency), 1.0)
            seconds = max(seconds, flops / (peak * share))
        return seconds + self.launch_seconds

    def op_extra_bytes(self, func: Any, args: tuple[Any, ...]) -> int:
        """Returns the temporary bytes inside of an op, which dispatch modes do not see, 0 if unknown."""
        return cuda_temporary_bytes(func, args) if self.kind == "cuda" else 0

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
    fix = names_fix("device")
    if not isinstance(name_or_path, (str, Path)) or str(name_or_path).startswith("cuda"):
        fix += "; or leave `device` out for a device that is present"
    values = read_profile("device", DeviceProfile, name_or_path, fix)
    # YAML has no tuples, and one kernel is written without a list.
    if isinstance(values.get("attention"), str):
        values["attention"] = [values["attention"]]
    for name in ("attention", "capability"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return DeviceProfile(**values)


@cache
def _host() -> DeviceProfile:
    """Returns the profile of the CPU beside a simulated GPU."""
    return load_profile("cpu")


def profile_names() -> list[str]:
    """Returns the names of the packaged profiles."""
    return packaged_names("device")


def packaged_gpus() -> list[DeviceProfile]:
    """Returns the packaged profiles of GPUs, that with the smallest memory first."""
    gpus = (device for device in map(load_profile, profile_names()) if device.kind == "cuda")
    return sorted(gpus, key=lambda gpu: (gpu.memory_bytes, gpu.name))


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
