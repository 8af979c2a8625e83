"""Runs a step on fake tensors, with the kernels of another device in place of the CPU's.

What a script puts on a GPU, or on no device that it names, is on the simulated one; what it puts on the CPU is on the
host of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import walk_stack
from typing import Any, Self, final
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import swap_tensors

from graphckpt._compat import is_fake, unseen_by_modes
from graphckpt._compat_fake import (
    FACTORIES,
    HOST,
    SCALER_WITHOUT_VALUES,
    SIMULATED,
    TRUNCATED_NORMAL,
    UNNAMED,
    FakeTensors,
    MixedDevicesError,
    NoValueError,
    at,
    attributes_of_new_scaler,
    backward_within,
    forget_fake,
    is_scaler_for_cuda,
    own_device_modules,
    place_together,
    unnamed_devices_mixed,
)
from graphckpt.errors import ConfigError
from graphckpt.simulation.cluster_profile import default_cluster
from graphckpt.simulation.cuda_autocast import call_under_autocast
from graphckpt.simulation.cuda_kernels import AttentionCall, dropout
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.op_costs import OpCost
from graphckpt.simulation.profile import DeviceProfile
from graphckpt.simulation.stand_ins import CUDA_HOUSEKEEPING, PACKED, PADDED, StandIns, swapped_masks, user_line
from graphckpt.simulation.timeline import Timeline
from graphckpt.simulation.unsupported import explained, refuse_unsupported
from graphckpt.stores.base import Offload, Traffic
from graphckpt.stores.disk import Disk
from graphckpt.stores.host import CopyEngine, CopyEvent, Host, HostStore
from graphckpt.stores.pinned import HostBuffer
from graphckpt.tree import tensors_in
from graphckpt.undo import Ending

_STATISTICS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
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
        others: other devices, of which :attr:`alike` then has those that run the same kernels.

    >>> from graphckpt.simulation.profile import load_profile
    >>> device = FakeDevice(load_profile("h200"))
    >>> with device:
    ...     layer = torch.nn.Linear(2**20, 2**20, dtype=torch.bfloat16)  # 2 TiB
    ...     layer(torch.zeros(8, 2**20, dtype=torch.bfloat16)).shape
    torch.Size([8, 1048576])
    """

    def __init__(
        self,
        machine: DeviceProfile,
        *,
        is_padded: bool = True,
        cluster: FakeCluster | None = None,
        others: Iterable[DeviceProfile] = (),
    ) -> None:
        self.machine = machine
        self.cluster = cluster
        self._is_padded = is_padded
        # HOST, SIMULATED and UNNAMED are indices of the CPU: see Note [Three devices that are all a CPU] in
        # graphckpt/_compat_fake.py. PyTorch's code for ranks compares devices, and moves tensors to that of a mesh:
        # there what no script names is on the GPU from the start.
        on_device = UNNAMED if cluster is None else SIMULATED
        self.device = on_device if machine.kind == "cuda" else HOST
        """The device of tensors for which a script names none."""
        self._tensors = FakeTensors(self.device, allow_non_fake_inputs=True)
        self._functions = _FunctionOverrides(machine, self.device, others)
        self.autocast_dtypes: Iterable[torch.dtype] = self._functions.autocast_dtypes
        """The types to which autocast has cast in steps so far."""
        self._scalers: WeakSet[torch.amp.GradScaler] = WeakSet()
        # A list, as it is reentrant: each `with` undoes what it has done.
        self._entered: list[StandIns] = []

    def __enter__(self) -> Self:
        self._entered.append(stand_ins := StandIns())
        try:
            self._install(stand_ins)
        except BaseException:
            self._exit()
            raise
        return self

    def _install(self, stand_ins: StandIns) -> None:
        refuse_unsupported(stand_ins)
        stand_ins.enter_context(own_device_modules())
        stand_ins.enter_context(unnamed_devices_mixed())
        _masks_as_eager(stand_ins, is_padded=self._is_padded)
        is_cuda = self.machine.kind == "cuda"
        _scale_gradients_here(stand_ins, self._scalers, self.autocast_dtypes, is_cuda=is_cuda)
        if is_cuda:
            _autocast_here(stand_ins)
            _choose_foreach_optimizers(stand_ins)
            for name in CUDA_HOUSEKEEPING:
                stand_ins.replace(getattr(torch.cuda, name), lambda *_, **__: None)
            for name in _STATISTICS:
                stand_ins.replace(getattr(torch.cuda, name), lambda *_, **__: 0)
            for target in (Host, Disk):
                stand_ins.swap(target, byte_store_for=_absent_store)
        stand_ins.swap(torch.utils, swap_tensors=self._swap)  # `module.to(...)` calls it
        # PyTorch draws again until all values are within the bounds. This draws once: fake tensors have no values.
        stand_ins.swap(torch.nn.init, **{TRUNCATED_NORMAL: torch.no_grad()(lambda tensor, *_, **__: tensor.normal_())})
        # Function modes are called before dispatch modes: the overrides choose kernels, and the ops of these run on
        # fake tensors.
        stand_ins.enter_context(self._tensors)
        stand_ins.enter_context(self._functions)
        stand_ins.enter_context(backward_within(self._functions))  # the recomputation must use the same kernels

    def _exit(self, *exc: object) -> None:
        self._entered[-1].close()
        self._entered.pop()
        error = exc[1] if len(exc) > 1 else None
        if isinstance(error, Exception) and (reason := explained(error)) is not None:
            raise reason from error

    def _depth(self) -> int:
        return len(self._entered)

    def _abandon(self, depth: int) -> None:
        while len(self._entered) > depth:
            self._exit()

    __exit__ = Ending(_exit, _abandon, _depth)  # ends it even if Ctrl-C comes while it is left

    @property
    def alike(self) -> list[DeviceProfile]:
        """The other devices that choose the kernels of attention that this one has chosen in all steps so far."""
        return self._functions.alike

    def new_timeline(self, costs: list[OpCost] | None = None) -> Timeline:
        """Returns what counts the seconds of a step on this device, and on its cluster; ``costs`` gets those of ops."""
        profile = default_cluster(self.machine.name) if self.cluster is None else self.cluster.profile
        if costs is None:
            return Timeline(self.machine.op_seconds, profile)

        def op_seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
            cost = OpCost.of(func, args, kwargs, result)
            if cost is None:
                return 0.0
            costs.append(cost)
            return self.machine.seconds(cost)

        return Timeline(op_seconds, profile)

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

    def __init__(self, machine: DeviceProfile, unnamed: torch.device, others: Iterable[DeviceProfile]) -> None:
        super().__init__()
        self.alike = [other for other in others if other.kind == machine.kind and other.rounding == machine.rounding]
        # Where a script has put a tensor by name, and where tensors are for which it names no device.
        self._own, self._unnamed = SIMULATED if machine.kind == "cuda" else HOST, unnamed
        self._machine = machine
        self._is_cuda = machine.kind == "cuda"
        self.autocast_dtypes: dict[torch.dtype, None] = {}
        self._instead: dict[Any, Callable[..., Any]] = {
            torch.Tensor.cuda: lambda tensor, *_, **__: tensor.to(self._own),
            torch.Tensor.pin_memory: lambda tensor, *_: tensor.to(HOST),
            torch.Tensor.__deepcopy__: _deepcopy,
        }
        if self._is_cuda:
            self._instead |= {
                F.scaled_dot_product_attention: self._attention,
                F.multi_head_attention_forward: self._multi_head_attention,
                F.dropout: dropout,
                torch.dropout: dropout,
            }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name: Any = getattr(func, "__name__", "")
        if name == "__get__":  # `x.shape`, `x.dtype`: the most frequent calls
            return func(*args, **kwargs)
        if name == "__set__" and is_fake(args[1]) and func.__self__ in (_DATA, _GRAD):
            return _set(func, *args)
        # Seen here, since autocast is off again in the ops that it casts for.
        is_autocast = torch.is_autocast_enabled("cpu")  # where fake tensors are
        if is_autocast:
            self.autocast_dtypes.setdefault(torch.get_autocast_dtype("cpu"))
        if func in self._instead:
            return self._instead[func](*args, **kwargs)
        args, kwargs = self._placed(func, args, kwargs)
        try:
            if is_autocast and self._is_cuda:
                result = call_under_autocast(func, args, kwargs, self)
            else:
                result = func(*args, **kwargs)
        except MixedDevicesError as error:
            where = f"the step ({user_line()}) {error}, which a GPU refuses"
            raise ConfigError(f"{where} · fix: move one of them, by `.to(...)`") from None
        except NoValueError:
            # A float is a printed loss or a norm of gradients, on which no shape depends; an integer may be a size.
            if func in _READS and args[0].is_floating_point():
                return 1.0
            reads = f"reads the value of a tensor by {resolve_name(func) or func}, and fake tensors have none"
            if (builder := _constructor()) is not None:
                raise ConfigError(
                    f"{builder} {reads} · fix: compute it without tensors, or plan on the device"
                ) from None
            raise ConfigError(
                f"the step ({user_line()}) {reads} · fix: remove it from the step, or plan on the device"
            ) from None
        if func == torch.tensor and str(kwargs.get("device")) == "cpu" and is_fake(result):
            result.fake_device = HOST  # PyTorch makes it of a real tensor
        return result

    # In arguments rather than by a default device: `x.to("cuda")` and `torch.zeros(..., device="cuda")` name it.
    def _placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replaces devices in arguments by the one where the tensors are that the script puts there."""
        if func is torch.device and _is_elsewhere(args[0] if args else kwargs.get("type")):
            return (self._own,), {}  # without the index, which may be a separate argument
        for value in args:
            if isinstance(value, (str, torch.device)):
                # "cpu:0" of a script is the host. As a device it would be the simulated GPU.
                args = tuple(self._own if _is_elsewhere(each) else HOST if each == "cpu:0" else each for each in args)
                break
        device = kwargs.get("device")
        if device is None:
            if func in FACTORIES and not isinstance(args[0] if args else None, torch.Tensor):
                # Pinned memory is of the host, and optimizers have their number of steps there.
                is_on_host = "pin_memory" in kwargs or _is_called_by("torch.optim.")
                kwargs = kwargs | {"device": HOST if is_on_host else self._unnamed}
        # A mesh of CUDA devices is one of CPUs here, whose type its code takes for the device.
        elif _is_elsewhere(device) or (str(device) == "cpu" and _is_called_by("torch.distributed.")):
            kwargs = kwargs | {"device": self._own}
        elif device == "cpu:0":  # likewise
            kwargs = kwargs | {"device": HOST}
        return args, kwargs

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        with StandIns() as stand_ins:  # PyTorch disables the mode while it runs
            stand_ins.swap(F, scaled_dot_product_attention=self._attention, dropout=dropout)
            return F.multi_head_attention_forward(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = AttentionCall(*args, **kwargs)
        kernel = _kernel_of(call, self._machine)
        self.alike = [other for other in self.alike if _kernel_of(call, other) == kernel]
        run: Callable[[], torch.Tensor] = getattr(call, kernel)
        return run()


def _kernel_of(call: AttentionCall, machine: DeviceProfile) -> str:
    capability = machine.capability or (8, 0)
    return next((name for name in machine.attention if name == "math" or call.is_supported(name, capability)), "math")


def _constructor() -> str | None:
    """Returns the module whose constructor is running, with its present line; ``None`` in a step."""
    for frame, line in walk_stack(sys._getframe()):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(module, nn.Module):
            return f"the constructor of {type(module).__name__} ({Path(frame.f_code.co_filename).name}, line {line})"
    return None


def _set(func: Any, tensor: Any, value: Any) -> None:
    """Sets the data or the gradient of a tensor, whose device is an attribute in Python that PyTorch does not set."""
    if is_fake(tensor) and (func.__self__ is _DATA or HOST not in (tensor.fake_device, value.fake_device)):
        tensor.fake_device = value.fake_device
    # A real parameter, of a model that a script has built outside, is on the CPU. PyTorch requires its gradient there
    # too, which is so only while it is set: it counts as on the GPU all the same.
    with nullcontext() if is_fake(tensor) else at(tensor.device, value):
        func(tensor, value)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copies a tensor as ``copy.deepcopy`` does, which reads the address of a tensor of a subclass."""
    if not is_fake(tensor):
        real: torch.Tensor = torch.Tensor.__deepcopy__(tensor, memo)
        return real
    if id(tensor) not in memo:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
        if tensor.grad is not None:
            memo[id(tensor)].grad = _deepcopy(tensor.grad, memo)
    copy: torch.Tensor = memo[id(tensor)]
    return copy


def _is_called_by(package: str) -> bool:
    """Whether the function that a mode sees is called by a module of ``package``."""
    # Frame 3: behind this function, `_placed` and `__torch_function__`.
    return str(sys._getframe(3).f_globals.get("__name__", "")).startswith(package)


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type not in ("cpu", "meta")
    return isinstance(value, str) and value.split(":")[0] == "cuda"


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


def _scale_gradients_here(
    stand_ins: StandIns,
    built_here: WeakSet[torch.amp.GradScaler],
    autocast_dtypes: Iterable[torch.dtype],
    *,
    is_cuda: bool,
) -> None:
    """Simulates ``torch.amp.GradScaler``, for gradients of which none overflows.

    ``built_here`` are those that were built on the simulated device, and keep their tensors from step to step. Others
    have what they had at the end.
    """
    kind, common = torch.amp.GradScaler, torch.cuda.amp.common
    is_disabled = is_cuda and common.amp_definitely_not_available()  # one for CUDA, when it is built elsewhere
    begin, scale, simulated = kind.__init__, kind.scale, WeakSet(built_here)

    def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        begin(scaler, *args, **kwargs)
        for each in (built_here, simulated):
            each.add(scaler)

    def scale_here(scaler: Any, outputs: Any) -> Any:
        if scaler not in simulated:
            if scaler.is_enabled():
                simulated.add(scaler)
                stand_ins.callback(vars(scaler).update, dict(vars(scaler)))
                vars(scaler).update(attributes_of_new_scaler(scaler))
            elif is_disabled and is_scaler_for_cuda(scaler) and torch.float16 in autocast_dtypes:
                what = "calls a gradient scaler that was built where CUDA is absent, and has disabled itself"
                fix = "build it in the function that builds the model, or as GradScaler('cpu'), which counts the same"
                raise ConfigError(f"the step ({user_line()}) {what} · fix: {fix}")
        return scale(scaler, outputs)

    if is_cuda:
        stand_ins.swap(common, amp_definitely_not_available=lambda: False)  # the constructor asks it
    stand_ins.swap(kind, __init__=init, scale=scale_here, **SCALER_WITHOUT_VALUES)


def _choose_foreach_optimizers(stand_ins: StandIns) -> None:
    """Makes optimizers use their ``foreach`` implementation by default, as on CUDA.

    ``capturable`` is off meanwhile: optimizers refuse it for tensors on a CPU, where fake ones are.
    """
    # PyTorch chooses `foreach` by the device of the parameters, which is the CPU here. Its temporaries are of all
    # parameters at once, so that the choice moves the peak of a step.
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
            for parameter in group["params"]:
                # The parameter may be on the GPU by its name, and its gradient on no device that is named.
                place_together([parameter, parameter.grad, *tensors_in(optimizer.state.get(parameter))])

    def forget(*_: Any) -> None:
        while before:
            group, values = before.pop()
            group.update(values)

    for handle in (register_optimizer_step_pre_hook(choose), register_optimizer_step_post_hook(forget)):
        stand_ins.callback(handle.remove)
    stand_ins.callback(forget)


def _absent_store(target: Offload, device: torch.device, note: Callable[[str], None]) -> HostStore:
    """Returns a store of pinned host memory that makes no copies, but holds device memory as long as with them.

    It stands in for offload to disk too, whose threads hold device memory for a time that depends on the disk.
    """
    # It waits in the same order as with copies: what is in flight counts as on the device.
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
