"""The options of the planner, in one dataclass behind every way to call it, and memory budgets in bytes."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, TypeVar, final

import torch

from graphckpt.blocks.config import BlockConfig
from graphckpt.blocks.select import Selector
from graphckpt.budget import Budget, share_of, size_of
from graphckpt.deprecation import accepts_old_names, rename
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.stores.base import Offload
from graphckpt.units import parse_bytes

Surface = Literal["config", "command"]
"""Where an option can be set besides Python: ``train.activation_checkpoint`` of a config, ``graphckpt plan``."""


def _except(*surfaces: Surface) -> dict[str, Any]:
    return {"not_on": surfaces}


@final
@accepts_old_names(blocks="select")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the planner: the policies that it may use, and how it plans.

    The fields are the keyword arguments of :func:`graphckpt.plan` and :meth:`graphckpt.Graph.plan`, the keys of
    ``Graph.config.plan_options`` and of ``train.activation_checkpoint``, and the flags of ``graphckpt plan``.

    >>> PlanOptions(offload="cpu", host_budget="64GiB").host_bytes
    68719476736
    """

    offload: bool | str | Offload = False
    """Where saved tensors may go: ``True`` or ``"cpu"``, ``"disk"``, or ``"disk:/a/folder"``. In Python also
    :class:`~graphckpt.Host` or :class:`~graphckpt.Disk`."""
    host_budget: int | str | None = None
    """The most bytes that may be offloaded at a time, such as ``"64GiB"``; ``None`` is without a limit."""
    select: Selector | Iterable[Selector] | None = field(default=None, metadata=_except("command"))
    """Selectors of the blocks to plan, such as ``"model.layers.*"``; ``None`` finds the layers of the model."""
    candidates: Iterable[Any] | None = None
    """The rules to consider besides ``keep``, as ``activation_checkpointing`` takes them. ``None`` is all of ``full``,
    up to four levels of ``selective`` that are found op by op for each kind of layer, and ``joined`` runs of layers,
    which need ``full`` too."""
    head: Mapping[str, Any] | None = None
    """The block that computes the loss, and a rule or a list of rules by which it may run in slices:
    ``{"loss_head": Tiles(8, reduce="sum")}``. Each is measured, and used where it is faster or nothing else fits."""
    partition: Any = field(default=None, metadata=_except("command"))
    """The ranks over which saved tensors may be partitioned: ``True``, a ``ProcessGroup`` or a ``DeviceMesh``."""
    contiguous: bool = False
    """Whether each layer keeps its saved tensors in one slab."""
    compile: bool | dict[str, Any] | None = field(default=None, metadata=_except("command"))
    """Whether each layer is compiled inside of its policy: ``True``, or the arguments of ``torch.compile``. The levels
    of ``selective`` are then replaced by the compiler's ``activation_memory_budget`` at 0.8, 0.5, 0.3 and 0.1, unless
    ``candidates`` or an ``activation_memory_budget`` is given."""
    determinism_check: str | None = None
    """The values to compare in the recomputations of the planned blocks: ``"none"``, ``"default"``, or ``"values"`` for
    those of every call. It is saved with the plan. ``None`` is the setting of the blocks around them."""
    group: Any = field(default=None, metadata=_except("config", "command"))
    """The processes that run this step together: a ``ProcessGroup``, whose ranks must all plan and get the same plan.
    ``None`` is the default group if ``torch.distributed`` is initialized; ``False`` is only this process."""
    step_group: Any = field(default=None, metadata=_except("config", "command"))
    """The ``ProcessGroup`` whose processes run the steps together although they plan different blocks, such as all
    stages of a pipeline; ``group`` then has those of one stage. Each stage gets a separate plan."""
    check: bool = field(default=True, metadata=_except("command"))
    """Run the step under the plan, and plan again if its peak exceeds the budget or differs by more than 1 %."""
    progress: Callable[[int, int], None] | bool | None = field(default=None, metadata=_except("config", "command"))
    """Called as ``progress(done, total)`` with the measuring runs of the step that are done, and how many there are.
    ``True`` prints a line for each stage after two seconds; ``None`` does so in a terminal and in a notebook."""

    def __post_init__(self) -> None:
        if self.candidates is not None:
            is_one = isinstance(self.candidates, (str, Mapping)) or not isinstance(self.candidates, Iterable)
            object.__setattr__(self, "candidates", (self.candidates,) if is_one else tuple(self.candidates))
        for name in ("contiguous", "check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r} · fix: {name}=True")
        if not (self.progress is None or isinstance(self.progress, bool) or callable(self.progress)):
            raise ConfigError(
                f"progress: expected True, False or a function, got {self.progress!r} · fix: progress=True"
            )
        _ = self.host_bytes
        BlockConfig("plan").update({"compile": self.compile, "determinism_check": self.determinism_check})

    @property
    def host_bytes(self) -> int | None:
        """``host_budget`` in bytes."""
        if self.host_budget is None:
            return None
        try:
            return parse_bytes(self.host_budget)
        except ValueError as error:
            raise ConfigError(f"host_budget: {str(error).removeprefix('memory size ')}") from None

    @classmethod
    def of(cls, values: PlanOptions | Mapping[str, Any] | None, where: str) -> Self:
        """Returns options from keyword arguments or keys.

        Args:
            values: the options by name.
            where: what messages begin with.

        Raises:
            ConfigError: An option is unknown, or a value cannot be used.
        """
        if isinstance(values, cls):
            return values
        named: dict[str, Any] = dict(values or {})  # type: ignore[arg-type]  # other options are final
        rename(named, OLD_NAMES, where)
        names = [option.name for option in fields(cls)]
        unknown = next((name for name in named if name not in names), None)
        if unknown is not None:
            raise ConfigError(
                f"{where}: unknown option {unknown!r}{did_you_mean(unknown, names)} · fix: use {', '.join(names)}"
            )
        return cls(**named)

    @classmethod
    def names(cls, surface: Surface | None = None) -> tuple[str, ...]:
        """Returns the options, or those that can be set on ``surface``."""
        return tuple(option.name for option in fields(cls) if surface not in option.metadata.get("not_on", ()))


OLD_NAMES: Mapping[str, str] = {"blocks": "select", "rules": "candidates"}
"""The deprecated names of options, which every way to call the planner accepts."""


class SharedOptionsDict(TypedDict, total=False):
    """The options that all entry points of the planner take as ``**options``; :class:`PlanOptions` describes them."""

    offload: bool | str | Offload
    host_budget: int | str | None
    candidates: Iterable[Any] | None
    head: Mapping[str, Any] | None
    partition: Any
    contiguous: bool
    compile: bool | dict[str, Any] | None
    determinism_check: str | None
    group: Any
    step_group: Any
    check: bool


class FitOptionsDict(SharedOptionsDict, total=False):
    """The options of entry points that have a separate ``progress``, as :func:`graphckpt.find_batch_size`."""

    select: Selector | Iterable[Selector] | None


class PlanOptionsDict(FitOptionsDict, total=False):
    """The fields of :class:`PlanOptions` as keyword arguments: ``def f(**options: Unpack[PlanOptionsDict])``."""

    progress: Callable[[int, int], None] | bool | None


_Function = TypeVar("_Function", bound=Callable[..., Any])


def lists_options(keys: type[Any]) -> Callable[[_Function], _Function]:
    """Makes ``inspect.signature``, and so ``help`` and the completion of notebooks, list the options of a function.

    Args:
        keys: The ``TypedDict`` of its ``**options``.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *named, last = signature.parameters.values()
        fields_of_options = inspect.signature(PlanOptions).parameters.items()
        listed = [parameter for name, parameter in fields_of_options if name in keys.__annotations__]
        others = [] if str(last.annotation).startswith("Unpack[") else [last]  # such as inputs of a Graph
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *listed, *others])
        return function

    return decorate


try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_SHARED = (0, 0)  # the pool of tensors that are not in a private one
_HEADROOM = 0.03  # of the memory of a step: the planner counts tensors, not the gaps between an allocator's blocks


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device in bytes."""

    total: int
    available: int
    """Bytes that a step may use."""
    headroom: int
    """The share of these that ``"max"`` leaves free."""


def budget_bytes(budget: Budget, memory: DeviceMemory, plain_peak: int = 0) -> int:
    """Returns the largest peak of the step in bytes.

    Args:
        budget: A value that :func:`check_budget` returned, other than ``"min"``.
        memory: That of the device.
        plain_peak: The peak when everything is kept.
    """
    if budget == "max":
        return memory.available - memory.headroom
    if isinstance(budget, float):
        return int(budget * plain_peak)
    size = size_of(budget)
    return int(share_of(str(budget)) * memory.total) if size is None else size


def device_memory(device: torch.device, alive: int, sharers: int = 1) -> DeviceMemory:
    """Returns the memory of ``device``; see :func:`available_bytes` for the arguments.

    Each of the ``sharers`` has an equal share of it.
    """
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        total = pages * os.sysconf("SC_PAGE_SIZE")
    available = available_bytes(device, alive, sharers)
    return DeviceMemory(total=total // sharers, available=available, headroom=int(_HEADROOM * available))


def absent_memory(kind: str, total: int, bytes_beside_allocator: int) -> DeviceMemory:
    """Returns the memory of a device of this kind that runs nothing yet, not even its context.

    ``"max"`` leaves nothing more on CUDA, where the allocator is simulated.
    """
    headroom = bytes_beside_allocator if kind == "cuda" else int(_HEADROOM * total)
    return DeviceMemory(total=total, available=total, headroom=headroom)


def available_bytes(device: torch.device, alive: int, sharers: int = 1) -> int:
    """Returns the memory that a step may use on ``device``: free bytes, and the ``alive`` bytes of the step itself.

    Args:
        device: The device of the step.
        alive: The bytes that the step holds already.
        sharers: The number of processes that share the free bytes.
    """
    if device.type == "cuda":
        # Memory that the allocator caches is not free for CUDA, but for the steps of this process.
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - _unused_in_pools(device)
        return free // sharers + unused + alive
    pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 0
    free = pages * os.sysconf("SC_PAGE_SIZE") // sharers
    return min(free, _free_address_space(default=free)) + alive


def _free_address_space(default: int) -> int:
    if resource is None or (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) == resource.RLIM_INFINITY:
        return default
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return default
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def _unused_in_pools(device: torch.device) -> int:
    """Returns the free bytes in private pools, such as those of CUDA graphs, which other steps cannot use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", _SHARED)) != _SHARED
    )


def memory_id(device: torch.device) -> str:
    """Returns a key that is equal for processes with the same memory of ``device``, across hosts."""
    memory = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    return f"{socket.gethostname()} {memory}"
