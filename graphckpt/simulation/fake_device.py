"""Runs a step on fake tensors, with the kernels of another device in place of the CPU's.

The tensors are on the CPU: fake tensors on a device that the process does not have abort the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from traceback import walk_stack
from typing import Any, Self, final

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import swap_tensors

from graphckpt._compat import is_fake, unseen_by_modes
from graphckpt._compat_fake import (
    TRUNCATED_NORMAL,
    FakeTensors,
    NoValueError,
    backward_within,
    forget_fake,
    own_device_modules,
)
from graphckpt.errors import ConfigError
from graphckpt.simulation.cluster_profile import default_cluster
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.profile import DeviceProfile
from graphckpt.simulation.stand_ins import StandIns, user_line
from graphckpt.simulation.timeline import Timeline
from graphckpt.stores.base import Offload, Traffic
from graphckpt.stores.disk import Disk
from graphckpt.stores.host import CopyEngine, CopyEvent, Host, HostStore
from graphckpt.stores.pinned import HostBuffer

_READS = frozenset({torch.Tensor.item, torch.Tensor.__float__})


@final
class FakeDevice:
    """A device that may be absent. Inside of ``with``, tensors allocate no memory, and a step runs as on that device.

    It is reentrant: a model that is built in one ``with`` block runs in another one of the same object.

    Args:
        machine: the profile of the device.
        is_padded: whether attention masks may contain padding. If not, Transformers omits a mask of ones, as it does on
            a device where it can read the mask.
        cluster: the simulated rank that the device belongs to, which has been entered; ``None`` without one.

    >>> from graphckpt.simulation.profile import load_profile
    >>> device = FakeDevice(load_profile("h200"))
    >>> with device:
    ...     layer = torch.nn.Linear(2**20, 2**20, dtype=torch.bfloat16)  # 2 TiB
    ...     layer(torch.zeros(8, 2**20, dtype=torch.bfloat16)).shape
    torch.Size([8, 1048576])
    """

    def __init__(self, machine: DeviceProfile, *, is_padded: bool = True, cluster: FakeCluster | None = None) -> None:
        self.machine = machine
        self.cluster = cluster
        self._is_padded = is_padded
        self._tensors = FakeTensors(allow_non_fake_inputs=True)
        self._functions = _FunctionOverrides(machine)
        self.autocast_dtypes: Iterable[torch.dtype] = self._functions.autocast_dtypes
        """The types to which autocast has cast in steps so far."""
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        with StandIns() as stand_ins:
            stand_ins.enter_context(own_device_modules())
            _masks_as_eager(stand_ins, is_padded=self._is_padded)
            if self.machine.kind == "cuda":
                _autocast_here(stand_ins)
                _choose_foreach_optimizers(stand_ins)
                for target in (Host, Disk):
                    stand_ins.swap(target, byte_store_for=_absent_store)
            stand_ins.swap(torch.utils, swap_tensors=self._swap)  # `module.to(...)` calls it
            # It draws once, as a fake tensor has no values to compare with the bounds.
            stand_ins.swap(
                torch.nn.init, **{TRUNCATED_NORMAL: torch.no_grad()(lambda tensor, *_, **__: tensor.normal_())}
            )
            # Function modes are called before dispatch modes: the overrides choose kernels, and the ops of these run on
            # fake tensors.
            stand_ins.enter_context(self._tensors)
            stand_ins.enter_context(self._functions)
            stand_ins.enter_context(backward_within(self._functions))  # the recomputation must use the same kernels
            self._entered.append(stand_ins.pop_all())
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*exc)  # type: ignore[arg-type]

    def new_timeline(self) -> Timeline:
        """Returns what counts the seconds of a step on this device, and on its cluster."""
        profile = default_cluster(self.machine.name) if self.cluster is None else self.cluster.profile
        return Timeline(self.machine.op_seconds, profile)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Enters the device, where small tensors have values meanwhile: constructors of modules may read them."""
        with self, self._tensors.with_values():
            yield

    def _swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        # `swap_tensors` refuses tensors with weak references, which the fake mode holds to all that it has converted.
        forget_fake(self._tensors, one, other)
        swap_tensors(one, other)


@final
class _FunctionOverrides(TorchFunctionMode):
    """Intercepts calls of PyTorch before they become ops, as the CPU's kernels are chosen there."""

    def __init__(self, machine: DeviceProfile) -> None:
        super().__init__()
        self._kernels = machine.attention
        self._capability = machine.capability or (8, 0)
        self._is_cuda = machine.kind == "cuda"
        self.autocast_dtypes: dict[torch.dtype, None] = {}
        self._instead: dict[Any, Callable[..., Any]] = {torch.Tensor.cuda: lambda tensor, *_, **__: tensor}
        if self._is_cuda:
            self._instead |= {
                F.scaled_dot_product_attention: self._attention,
                F.dropout: dropout,
                torch.dropout: dropout,
            }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # `x.shape`, `x.dtype`: the most frequent calls
            return func(*args, **kwargs)
        # Autocast hides from the ops that it casts for.
        is_autocast = torch.is_autocast_enabled("cpu")  # where fake tensors are
        if is_autocast:
            self.autocast_dtypes.setdefault(torch.get_autocast_dtype("cpu"))
        if func in self._instead:
            return self._instead[func](*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with StandIns() as stand_ins:  # PyTorch disables the mode while it runs
                if self._is_cuda:
                    stand_ins.swap(F, scaled_dot_product_attention=self._attention, dropout=dropout)
                return func(*args, **kwargs)
        if is_autocast and self._is_cuda and func in FULL_PRECISION:
            return in_full_precision(func, args, kwargs)
        args, kwargs = _here(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except NoValueError:
            if func in _READS and args[0].is_floating_point():
                return 1.0  # a printed loss or a gradient norm: no shape depends on it
            reads = f"reads the value of a tensor by {resolve_name(func) or func}, and fake tensors have none"
            if (where := _constructor()) is not None:
                raise ConfigError(f"{where} {reads} · fix: compute it without tensors, or plan on the device") from None
            raise ConfigError(
                f"the step ({user_line()}) {reads} · fix: remove it from the step, or plan on the device"
            ) from None

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = _AttentionCall(*args, **kwargs)
        kernels = (name for name in self._kernels if name == "math" or call.is_supported(name, self._capability))
        run: Callable[[], torch.Tensor] = getattr(call, next(kernels, "math"))
        return run()


def _constructor() -> str | None:
    """Returns the module whose constructor is running, with its present line; ``None`` in a step."""
    for frame, line in walk_stack(sys._getframe()):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(module, nn.Module):
            return f"the constructor of {type(module).__name__} ({Path(frame.f_code.co_filename).name}, line {line})"
    return None


def _here(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces devices in arguments by the CPU, where the fake tensors are."""
    if func is torch.device and _is_elsewhere(args[0] if args else kwargs.get("type")):
        return (torch.device("cpu"),), {}  # without the index, which may be a separate argument
    for value in args:
        if isinstance(value, (str, torch.device)):
            args = tuple(torch.device("cpu") if _is_elsewhere(value) else value for value in args)
            break
    if kwargs and _is_elsewhere(kwargs.get("device")):
        kwargs = kwargs | {"device": torch.device("cpu")}
    return args, kwargs


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type not in ("cpu", "meta")
    return isinstance(value, str) and value.split(":")[0] == "cuda"


PACKED = "find_packed_sequence_indices"  # None: every row is one sequence
PADDED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # True: the mask is all ones


@contextmanager
def swapped_masks(function: Callable[..., Any], *names: str) -> Iterator[None]:
    """Replaces functions of Transformers' mask code by ``function``, which gets the original as its first argument."""
    module = sys.modules.get("transformers.masking_utils")
    with StandIns() as stand_ins:
        for name in names:
            if hasattr(module, name):
                stand_ins.swap(module, **{name: partial(function, getattr(module, name))})
        yield


def _masks_as_eager(stand_ins: StandIns, *, is_padded: bool) -> None:
    """Makes Transformers' mask code take the branch for masks that can be read: no packed sequences.

    See :mod:`graphckpt.graph.capture`, which does so for captures.
    """

    def without_packing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        indices = original(*args, **kwargs)
        return None if is_fake(indices) else indices

    def without_padding(original: Callable[..., Any], padding_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(None if is_fake(padding_mask) else padding_mask, *args, **kwargs)

    stand_ins.enter_context(swapped_masks(without_packing, PACKED))
    stand_ins.enter_context(swapped_masks(without_padding, *([] if is_padded else PADDED)))


def _autocast_here(stand_ins: StandIns) -> None:
    """Enables ``torch.autocast("cuda")``, which disables itself without the device."""
    original = torch.autocast.__init__

    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    stand_ins.swap(torch.autocast, __init__=begin)


def _choose_foreach_optimizers(stand_ins: StandIns) -> None:
    """Makes optimizers use their ``foreach`` implementation by default, as on CUDA.

    ``capturable`` is off meanwhile: optimizers refuse it for tensors on a CPU, where fake ones are.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def choose(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            changes = {}
            has_choice = "foreach" in group and group["foreach"] is None
            has_choice = has_choice and not any(hasattr(p, "__tensor_flatten__") for p in group["params"])  # DTensors
            if has_choice and not group.get("fused") and not group.get("differentiable"):
                changes["foreach"] = True
            if group.get("capturable"):
                changes["capturable"] = False
            before.append((group, {name: group[name] for name in changes}))
            group.update(changes)

    def forget(*_: Any) -> None:
        while before:
            group, values = before.pop()
            group.update(values)

    for handle in (register_optimizer_step_pre_hook(choose), register_optimizer_step_post_hook(forget)):
        stand_ins.callback(handle.remove)
    stand_ins.callback(forget)


def _absent_store(target: Offload, device: torch.device, note: Callable[[str], None]) -> HostStore:
    """Returns the store of pinned host memory, whose copies are not made: it holds device memory as long as with them.

    The threads of a file hold it for another time, which depends on the disk.
    """
    del note
    return HostStore(device, _AbsentCopies(), target.in_flight_bytes if isinstance(target, Host) else None)


@final
class _AbsentCopies(CopyEngine):
    """Copies nothing: neither device nor host memory has bytes."""

    def __init__(self) -> None: ...

    def buffer(self, num_bytes: int) -> HostBuffer:
        with unseen_by_modes():  # it is not memory of the device
            return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), lambda: None)

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> CopyEvent:
        del device_flat, host_flat
        return CopyEvent(None, None, is_captured=False, traffic=traffic)

    def reload(
        self, host_flats: Sequence[torch.Tensor], device_flats: Sequence[torch.Tensor], traffic: Traffic | None = None
    ) -> list[CopyEvent]:
        del host_flats
        return [CopyEvent(None, None, is_captured=False, traffic=traffic) for _ in device_flats]

    def wait(self, event: CopyEvent) -> bool:
        del event
        return True

    def wait_in_order(self, events: Sequence[CopyEvent]) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def collect_times(self) -> None: ...

    def synchronize(self) -> None: ...


_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
_BIAS_ALIGN = 8  # elements; PyTorch pads masks of the efficient kernel to multiples of it

_FULL_PRECISION = """
acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod
cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2
margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow
prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum renorm tan triplet_margin_loss
"""
FULL_PRECISION = frozenset(
    getattr(owner, name)
    for owner in (torch, F, torch.Tensor)
    for name in _FULL_PRECISION.split()
    if hasattr(owner, name)
)
"""Functions that autocast runs in float32 on CUDA (docs.pytorch.org/docs/stable/amp.html), but not on the CPU."""


@final
@dataclass(slots=True)
class _AttentionCall:
    """The arguments of ``scaled_dot_product_attention``, by its names."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def __post_init__(self) -> None:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            self.query, self.key, self.value = self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)
            if self.attn_mask is not None and self.attn_mask.is_floating_point():
                self.attn_mask = self.attn_mask.to(dtype)

    def is_supported(self, kernel: str, capability: tuple[int, int]) -> bool:
        """Whether a fused kernel supports the shapes and types of the tensors, and is enabled."""
        query, key, value = self.query, self.key, self.value
        width, is_half = query.shape[-1], query.dtype in _HALF
        is_plain = (
            query.dim() == key.dim() == value.dim() == 4
            and query.dtype is key.dtype is value.dtype
            and query.shape[-1] == key.shape[-1] == value.shape[-1]
            and query.shape[0] == key.shape[0] == value.shape[0]
            and (query.shape[1] == key.shape[1] or self.enable_gqa)
        )
        if not is_plain:
            return False
        if kernel == "flash":
            is_wide = width > 256 or (width > 192 and capability in ((8, 6), (8, 9)) and self._needs_grad)
            is_enabled = torch.backends.cuda.flash_sdp_enabled() and capability >= (8, 0)
            return is_enabled and is_half and not is_wide and self.attn_mask is None
        if kernel == "cudnn":
            is_enabled = torch.backends.cuda.cudnn_sdp_enabled() and capability >= (8, 0)
            # Its backward computes no gradient of the mask.
            has_mask_gradient = self.attn_mask is not None and self.attn_mask.requires_grad
            return is_enabled and is_half and width <= 128 and width % 8 == 0 and not has_mask_gradient
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and (is_half or query.dtype is torch.float32)
            and (query.dtype is not torch.bfloat16 or capability >= (8, 0))
            and query.shape[1] == key.shape[1]
            and width * query.element_size() % 16 == 0
        )

    @property
    def _needs_grad(self) -> bool:
        tensors = (self.query, self.key, self.value, self.attn_mask)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def flash(self) -> torch.Tensor:
        """Pads heads to a width of 8 n; grouped keys and values are not expanded."""
        width = self.query.shape[-1]
        scale = 1 / sqrt(width) if self.scale is None else self.scale
        missing = -width % 8
        tensors = [F.pad(t, (0, missing)) if missing else t for t in (self.query, self.key, self.value)]
        results = _aten._scaled_dot_product_flash_attention(
            *tensors, self.dropout_p, self.is_causal, False, scale=scale
        )
        out: torch.Tensor = results[0]
        return out[..., :width] if missing else out

    def cudnn(self) -> torch.Tensor:
        results: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_cudnn_attention(
            self.query, self.key, self.value, self._additive_mask(), self._needs_grad, self.dropout_p, self.is_causal,
            False, scale=self.scale,
        )  # fmt: skip
        return results[0]

    def efficient(self) -> torch.Tensor:
        """Saves the mask, which all heads may share."""
        mask = self._additive_mask()
        if mask is not None and mask.shape[-1] % _BIAS_ALIGN:
            length = mask.shape[-1]
            mask = F.pad(mask, (0, -length % _BIAS_ALIGN))[..., :length]
        if mask is not None:
            mask = mask.expand(*self.query.shape[:-1], self.key.shape[-2])
        results: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_efficient_attention(
            self.query, self.key, self.value, mask, self._needs_grad, self.dropout_p, self.is_causal, scale=self.scale
        )
        return results[0]

    def math(self) -> torch.Tensor:
        results: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_attention_math(
            self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal,
            scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip
        return results[0]

    def _additive_mask(self) -> torch.Tensor | None:
        mask = self.attn_mask
        if mask is None or mask.dtype is not torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=self.query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def dropout(
    input: torch.Tensor,  # noqa: A002 - PyTorch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,
) -> torch.Tensor:
    """Replaces ``dropout`` with one kernel that saves a mask of one byte per element."""
    training = training if train is None else train  # the name in `torch.dropout`
    if inplace:
        return torch.dropout_(input, p, training)
    if not training or not 0 < p < 1 or input.numel() == 0:
        return torch.dropout(input, p, training)
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def in_full_precision(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def raised(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _HALF:
            return value.float()
        return type(value)(map(raised, value)) if type(value) in (list, tuple) else value

    with torch.autocast("cpu", enabled=False):
        return func(*map(raised, args), **{key: raised(value) for key, value in kwargs.items()})
