"""The private names of PyTorch's fake tensors that graphckpt needs, each with the reason."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    in_kernel_invocation_manager,
)
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from graphckpt.undo import Undo, scope

TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
"""The name in `torch.nn.init` of what all imports of `trunc_normal_` call. It draws until all values are in bounds."""

NoValueError = DataDependentOutputException


class MixedDevicesError(RuntimeError):
    """An op has tensors on the host and on the simulated GPU."""


without_torch_functions = torch._C.DisableTorchFunction
"""Sets aside every torch function mode, which each ``tensor.shape`` would call, within a ``with`` block."""

nll_loss: Callable[..., torch.Tensor] = torch._C._nn.nll_loss_nd
"""What ``cross_entropy`` calls in C++."""

OF_DEVICE = torch.ops.prim.device.default
"""The op of a C++ read of the device of a fake tensor: two out of three dispatches of a fake step."""

HOST, SIMULATED, UNNAMED = torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu", 1)
"""Where fake tensors of a simulated GPU are. See Note [Three devices that are all a CPU]."""

FACTORIES = _device_constructors()
"""The functions that create a tensor on the device that they are given."""

# Note [Three devices that are all a CPU]
# Fake tensors on a device that the process does not have abort it, so that those of a simulated GPU are on the CPU, as
# is what a script puts on the host. A real CPU ignores the index of a device, but PyTorch passes it on, also in C++,
# and says for each op where its results are:
#
# - `cpu` is the host: a script has named the CPU, or pinned memory;
# - `cpu:0` is the simulated GPU: a script has named a CUDA device;
# - `cpu:1` is that of tensors for which a script names none. They count as on the GPU, so that a script need not name
#   it, until they are copied to `cpu:0`: then a script does, and its data lie on the host.


@scope
def own_device_modules(undo: Undo) -> Iterator[None]:
    """Empties the cache of ``torch.get_device_module`` at the start and the end.

    Where devices are simulated, ``"cuda"`` is the CPU, and PyTorch would take it for that from then on.
    """
    clear: Callable[[], None] = getattr(torch.get_device_module, "cache_clear", lambda: None)
    undo.append((clear, ()))
    clear()
    yield


def attributes_of_new_scaler(scaler: Any) -> dict[str, Any]:
    """Returns the attributes of a gradient scaler that has not scaled yet, where they change as it scales."""
    states: dict[int, Any] = defaultdict(scaler._per_optimizer_states.default_factory)
    return {"_scale": None, "_growth_tracker": None, "_per_optimizer_states": states}


def is_scaler_for_cuda(scaler: Any) -> bool:
    return bool(scaler._device == "cuda")


SCALER_WITHOUT_VALUES: dict[str, Callable[..., Any]] = {
    "get_scale": lambda scaler: scaler._init_scale if scaler.is_enabled() else 1.0,
    "_get_growth_tracker": lambda scaler: scaler._init_growth_tracker if scaler.is_enabled() else 0,
    "_maybe_opt_step": lambda _, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs),
}
"""Methods of a gradient scaler that read values, as they are while none overflows."""


def _names_with_kernel(key: str) -> frozenset[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::") and has_kernel(name, key)
    )
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in names)


CASTS_ON_CUDA, CASTS_ON_CPU = _names_with_kernel("AutocastCUDA"), _names_with_kernel("AutocastCPU")
"""The ops, without their overloads, for which autocast casts."""

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def without_torch_functions_in(*names: str) -> Iterator[None]:
    """Has functions of modules run their code, where they would call the modes that are active with themselves."""
    before = [(sys.modules[name], vars(sys.modules[name])) for name in names]
    checks = [(module, check, values[check]) for module, values in before for check in _CHECKS if check in values]
    try:
        for module, check, _ in checks:
            setattr(module, check, _has_none)
        yield
    finally:
        for module, check, original in checks:
            setattr(module, check, original)


def _has_none(*_: object) -> bool:
    return False


_aten = torch.ops.aten
_VIEWS = {
    _aten.detach.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten._unsafe_view.default,
    _aten.slice.Tensor, _aten.unsqueeze.default, _aten.expand.default,
}  # fmt: skip


_RANDOM = torch.Tag.nondeterministic_seeded
_UNDEFINED = {_aten.empty.memory_format, _aten.empty_strided.default}  # their values are whatever the memory contains
_MOST_VALUES = 1024  # elements of a tensor whose values are computed, such as the frequencies of a rotary embedding
_PLAIN_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip
_PLAIN_VALUES = {
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
}  # fmt: skip


@functools.cache
def _returns_nothing(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and not func._schema.returns


def _only_modifies_lists(func: Any, args: Any) -> bool:
    """Whether an op modifies lists of tensors in place, as optimizers do, so that no shape changes.

    A fake tensor that is a constant has a value, and loses it in such an op.
    """
    if not (_returns_nothing(func) and args and isinstance(args[0], (list, tuple))):
        return False
    tensors = (tensor for value in args if isinstance(value, (list, tuple)) for tensor in value)
    return all(isinstance(tensor, FakeTensor) and tensor.constant is None for tensor in tensors)


_WAIT = torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None


_COPIES = {_aten._to_copy.default, _aten.copy_.default}


def _see_copy(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Notes that a tensor of no device that the script names is on the host, where it is copied to the GPU."""
    source = args[-1] if isinstance(args[-1], FakeTensor) else args[0]
    target = kwargs.get("device") or getattr(args[0], "fake_device", None)
    if target == SIMULATED and getattr(source, "fake_device", None) == UNNAMED:
        storage: Any = source.untyped_storage()
        storage._is_on_host = True


class _NewTensor(NamedTuple):
    """A result of an op that has a new storage."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Results(NamedTuple):
    """The results of an op for arguments of some shapes: for each result, the number of an argument or a new tensor."""

    entries: Sequence[int | _NewTensor | None] = ()
    container: type | None = None
    """The tuple or the list that the op returns them in; ``None`` for one result."""
    is_complete: bool = True
    """Whether ``entries`` are all: not for views, values, and results whose shape depends on values."""


_UNKNOWN = _Results(is_complete=False)


# Note [Ops on equal shapes]
# What `FakeTensors` stores for x of [8, 64] and w of [64, 64], in float32 on `cpu:1`:
#
#     op                         entries of the results
#     mm(x, w)                   a new tensor [8, 64]. The key: the op, the default dtype, on which factories depend,
#                                and of each argument type, shape, strides, offset, dtype, `requires_grad` and device
#     x.add_(1)                  0: the argument of this number
#     topk(x, 2)                 new tensors [8, 2] and [8, 2] of int64, in a tuple
#     x.split(4)                 incomplete: the results have the storage of x, so that PyTorch makes them each time
#
# From the second time on, a new tensor is an empty one on the meta device, and no kernel for shapes runs.


class FakeTensors(FakeTensorMode):
    """``FakeTensorMode`` in a third of the time, as a step of equal layers runs the same ops on the same shapes.

    PyTorch has a cache as well, of which the keys alone take longer than most ops. What this class does not know, it
    leaves to PyTorch. Of five ops of a step three are views, which need no cache. Nor is there a look-up of the lists
    that optimizers modify, for GPT-2's fused AdamW of 740 tensors.
    """

    has_mixed = False
    """Whether the last op has moved tensors to the simulated GPU: see :func:`unnamed_devices_mixed`."""
    has_values = False
    """Whether small tensors that a function such as ``torch.arange`` creates have values. See :meth:`with_values`."""

    def __init__(self, unnamed: torch.device = HOST, **options: Any) -> None:
        super().__init__(**options)
        self.unnamed = unnamed
        """The device of tensors for which a script names none. Real tensors that an op is given are there as well."""
        converter: Any = self.fake_tensor_converter
        converter.from_real_tensor = functools.partial(self._from_real, converter.from_real_tensor)
        self._results: dict[tuple[Any, ...], _Results] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """By device: the attributes of a new fake tensor."""

    @contextmanager
    def with_values(self) -> Iterator[None]:
        """Computes the values of small tensors too, unless they are random: constructors of modules read some.

        PyTorch propagates them through ops whose arguments all have values, and forgets them where it cannot. At the
        end all are forgotten: ops on tensors with values take longer.
        """
        before, self.has_values = self.has_values, True
        try:
            yield
        finally:
            self.has_values = before
            converter = self.fake_tensor_converter
            every = [reference for each in converter.constant_storage_mapping.values() for reference in each]
            for tensor in (reference() for reference in every):
                # PyTorch gives values to tensors of one element in a step too.
                if tensor is not None and tensor.constant is not None and tensor.numel() > 1:
                    converter.invalidate_constant_aliases(tensor.constant)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        if self.has_values and 1 < t.numel() <= _MOST_VALUES:
            t = t.detach().reshape(-1)[:1]  # everything but the size is PyTorch's to check
        return super().may_turn_const(t)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard would cost 5 us an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is OF_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        with without_torch_functions():
            if func in _VIEWS and isinstance(args[0], FakeTensor) and args[0].constant is None:
                with in_kernel_invocation_manager(self):
                    view = func(*args, **(kwargs or {}))
                return self._wrapped(view, args[0].fake_device)
            if func is _aten._grouped_mm.default and args[0].dtype is args[1].dtype in (torch.float32, torch.float16):
                return self._grouped_product(*args, **(kwargs or {}))
            if func is _aten._log_softmax.default and args[2]:  # of bfloat16, which its meta kernel refuses
                return self._run(_aten.empty_like.default, types, (args[0],), {"dtype": torch.float32})
            if func is _aten.set_.source_Storage_storage_offset and isinstance(args[0], FakeTensor):
                with in_kernel_invocation_manager(self):
                    func(*args)
                return args[0]  # not from the cache, whose key would hold the storage for ever
            if func in _COPIES:
                _see_copy(args, kwargs or {})
            if func is _WAIT:
                func = _aten.alias.default  # a real one returns its argument, PyTorch's fake one allocates
            return self._run(func, types, args, kwargs or {})

    def _run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Dispatches an op, or returns tensors as those that it has returned for such arguments before."""
        if _only_modifies_lists(func, args):
            return None
        if self.has_values:
            return self._with_values(func, args, kwargs, self._dispatched(func, types, args, kwargs))
        entries = [func, torch.get_default_dtype()]
        is_simple = self._describe(args, entries) and (
            not kwargs or self._describe([*kwargs, *kwargs.values()], entries)
        )
        if not is_simple or torch.is_inference_mode_enabled():
            return self._dispatched(func, types, args, kwargs)
        key = tuple(entries)
        results = self._results.get(key)
        if results is None or not results.is_complete:
            output = self._dispatched(func, types, args, kwargs)
            if results is None:
                self._results[key] = _UNKNOWN if self.has_mixed else self._results_in(func, args, kwargs, output)
                self.has_mixed = False
            return output
        outputs = [
            self._empty(entry) if type(entry) is _NewTensor else None if entry is None else args[entry]
            for entry in results.entries
        ]
        return outputs[0] if results.container is None else results.container(outputs)

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:  # as PyTorch does, in a twentieth of its time
            if args[0].constant is None:
                raise NoValueError(func)
            with torch._C._DisableTorchDispatch():
                return func(args[0].constant)
        output = self.dispatch(func, types, args, kwargs)
        # PyTorch computes what has values on the real CPU, which ignores the index.
        device = kwargs.get("device")
        if device is not None and isinstance(output, FakeTensor) and output.constant is not None:
            output.fake_device = device
        return output

    def _describe(self, values: Any, entries: list[Any]) -> bool:
        """Appends all that the results of an op can depend on; returns whether the values are plain ones."""
        for value in values:
            kind = type(value)
            entries.append(kind)  # 1 is not 1.0, of which it is the key
            if kind is FakeTensor:
                dtype = value.dtype
                if (
                    value.constant is not None
                    or value.fake_mode is not self
                    or value.layout is not torch.strided
                    or dtype not in _PLAIN_DTYPES
                ):
                    return False
                entries += value.shape, value.stride(), value.storage_offset(), dtype, value.requires_grad
                entries.append(value.fake_device)
            elif kind in _PLAIN_VALUES:
                entries.append(value)
            elif kind is list or kind is tuple:
                entries.append(len(value))
                if not self._describe(value, entries):
                    return False
            else:
                return False
        return True

    def _results_in(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> _Results:
        """Returns what an op has returned, if that follows from the shapes of its arguments."""
        try:
            if func.namespace != "graphckpt":  # the results of our own ops depend on shapes alone
                self._validate_cache_key(func, args, kwargs)  # of PyTorch's cache: not shapes that depend on values
        except _BypassDispatchCache:
            return _UNKNOWN
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        storages = {id(tensor.untyped_storage()) for tensor in tensors}
        entries: list[int | _NewTensor | None] = []
        container = next((kind for kind in (tuple, list) if isinstance(result, kind)), None)
        for each in (result,) if container is None else result:
            position = next((number for number, value in enumerate(args) if value is each), None)
            if each is None or position is not None:
                entries.append(position)
                continue
            if type(each) is not FakeTensor or each.constant is not None or id(each.untyped_storage()) in storages:
                return _UNKNOWN
            storages.add(id(each.untyped_storage()))
            entries.append(_NewTensor(each.shape, each.stride(), each.dtype, each.fake_device))
            new = self._empty(entries[-1])
            if (
                torch._C._dispatch_keys(new) != torch._C._dispatch_keys(each)
                or new.untyped_storage().nbytes() != each.untyped_storage().nbytes()
                or each.storage_offset()
                or each.requires_grad
            ):
                return _UNKNOWN
        return _Results(entries, container)

    def _from_real(
        self, convert: Callable[..., FakeTensor], mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        # A model that was made elsewhere has gradients of a simulated step, which PyTorch converts with the parameter.
        grad = tensor.grad if tensor.is_leaf else None
        with at(tensor.device, grad):
            fake = convert(mode, tensor, *args, **kwargs)
        if fake.fake_device == HOST:
            fake.fake_device = self.unnamed
        return fake

    def _empty(self, kind: Any) -> FakeTensor:
        shape, strides, dtype, device = kind
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return self._wrapped(memory, device)

    def _wrapped(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """Returns ``FakeTensor(self, meta, device)``, whose constructor takes as long as three ops."""
        attributes = self._attributes.get(device)
        if attributes is None:
            new = FakeTensor(self, meta, device)
            self._attributes[device] = {**vars(new)}
            return new
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake

    def _with_values(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Replaces a small tensor that was created of numbers alone by one that has its values."""
        if not isinstance(result, FakeTensor) or result.constant is not None or result.numel() > _MOST_VALUES:
            return result
        if _RANDOM in func.tags or func in _UNDEFINED or func._schema.is_mutable or result.device.type != "cpu":
            return result
        if any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves((args, kwargs))):
            return result
        with _disable_current_modes():
            values = func(*args, **kwargs)
        constant = self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)
        constant.fake_device = result.fake_device
        return constant

    def _grouped_product(self, one: torch.Tensor, other: torch.Tensor, offs: Any = None, *_: Any, **__: Any) -> Any:
        """Returns what ``_grouped_mm`` does: it takes other types than bfloat16 too, which its meta kernel refuses."""
        groups = [] if one.dim() != other.dim() else [one.shape[0] if one.dim() == 3 else offs.shape[0]]
        shape = [*groups, one.shape[-2], other.shape[-1]]
        return self.dispatch(_aten.empty.memory_format, (), (shape,), {"dtype": one.dtype, "device": one.device})


def is_of_absent_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a :class:`~graphckpt.simulation.fake_device.FakeDevice`, whose stores copy nothing."""
    return isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, FakeTensors)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a simulated GPU is on its host."""
    if type(tensor) is not FakeTensor:
        return False
    if tensor.fake_device == UNNAMED:
        return is_stored_on_host(tensor.untyped_storage())
    return tensor.fake_device == HOST != getattr(tensor.fake_mode, "unnamed", HOST)


def is_stored_on_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage of no device that a script names has been copied to the simulated GPU."""
    return getattr(storage, "_is_on_host", False)


@scope
def unnamed_devices_mixed(undo: Undo) -> Iterator[None]:
    """Lets ops mix tensors on the simulated GPU with those on no device that the script names."""
    find: Callable[[Any, Any], tuple[torch.device, bool]] = FakeTensor._find_common_device

    def find_of_two(func: Any, args: Sequence[Any]) -> tuple[torch.device, bool]:
        try:
            return find(func, args)
        except RuntimeError:
            devices = [each.fake_device for each in args if isinstance(each, FakeTensor) and each.dim()]
            if HOST in devices and len(set(devices)) > 1:
                raise MixedDevicesError(f"gives {func} a tensor on the host and one on the GPU") from None
            if not {SIMULATED, UNNAMED}.issuperset(devices):
                raise
            for each in args:  # a script that does not move it means it to be there
                if isinstance(each, FakeTensor) and each.fake_device == UNNAMED:
                    each.fake_device = SIMULATED
                    each.fake_mode.has_mixed = True  # type: ignore[attr-defined]
            return SIMULATED, False

    undo.append((setattr, (FakeTensor, "_find_common_device", staticmethod(find))))
    FakeTensor._find_common_device = staticmethod(find_of_two)  # type: ignore[method-assign, assignment]
    yield


def place_together(tensors: Iterable[torch.Tensor | None]) -> None:
    """Places tensors on the simulated GPU if one of them is there, and others on no device that the script names.

    Kernels that take lists of tensors compare devices before an op sees them.
    """
    with without_torch_functions():
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor) and tensor.dim()]
    if {tensor.fake_device for tensor in fakes} == {SIMULATED, UNNAMED}:
        for tensor in fakes:
            tensor.fake_device = SIMULATED


@contextmanager
def at(device: torch.device, tensor: torch.Tensor | None) -> Iterator[None]:
    """Has a fake tensor be on another device meanwhile: PyTorch compares those of a parameter and its gradient."""
    if not isinstance(tensor, FakeTensor):
        yield
        return
    before, tensor.fake_device = tensor.fake_device, device
    try:
        yield
    finally:
        tensor.fake_device = before


def forget_fake(mode: FakeTensorMode, *tensors: torch.Tensor) -> None:
    """Drops weak references to tensors of ``mode``: ``torch.utils.swap_tensors`` refuses tensors that have one."""
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo
    for key in [key for key, tensor in memo.items() if any(tensor is other for other in tensors)]:
        del memo[key]
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)


@scope
def backward_within(undo: Undo, mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Runs the nodes of every backward within a torch function mode, which backward itself sets aside."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    undo.append((setattr, (torch.autograd, "_engine_run_backward", run)))
    torch.autograd._engine_run_backward = run_within  # type: ignore[attr-defined]
    yield
