"""The few private names of PyTorch that graphckpt needs, each with the reason.

The names of its compiler are in `_compat_compiler`, of its fake tensors in `_compat_fake`. Nothing else is private.
"""

from __future__ import annotations

import _thread
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import nn, overrides
from torch._C import (
    DispatchKey,
    _dispatch_has_kernel_for_dispatch_key,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _SetExcludeDispatchKeyGuard,
)
from torch._C._autograd import (
    _get_sequence_nr,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
    _unsafe_set_version_counter,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

pytree = _pytree
"""Holds every container type that users and Transformers have registered. It is public from torch 2.14 on."""


# An object of C, as all that a call of a block asks PyTorch for: a function would take as long again.
active_saved_tensor_hooks: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None]
active_saved_tensor_hooks = functools.partial(_top_saved_tensors_default_hooks, False)
"""Returns the innermost ``saved_tensors_hooks`` pair of this thread, or ``None``; it cannot be read publicly."""


num_other_threads = _thread._count
"""Counts the threads that Python has started. ``threading.active_count()`` takes a lock, and 0.3 us more a call."""


def is_torch_checkpoint(hooks: tuple[Any, Any] | None) -> bool:
    """Whether saved-tensor hooks are those of ``torch.utils.checkpoint``, which has no other mark."""
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_checkpoint_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module is PyTorch's ``CheckpointWrapper``, whose package is imported only by programs that use it."""
    package = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return package is not None and isinstance(module, package.CheckpointWrapper)


_HOOKS = (
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip


def forget_hook(owner: weakref.ref[Any], hook: object) -> None:
    """Removes a hook of a module's forward, a gradient or an optimizer, if it is there, without a handle for it.

    An interrupt may come before the caller has the handle. The hooks of all optimizers are those of their module. Flags
    of a hook go too, even where what restores a module has taken the hook alone.
    """
    tables = [table for name in _HOOKS if (table := getattr(owner(), name, None))]
    hooks = {number: each for table in tables for number, each in table.items() if each is not True}
    for number in [number for table in tables for number in table if hooks.get(number, hook) is hook]:
        for table in tables:  # that of the hook comes last: what an interrupt leaves is found again
            table.pop(number, None)


# `saved_tensors_hooks` is a context manager written in Python, which takes 4.8 us where these two calls take 1.0.

push_saved_tensor_hooks = _push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _pop_saved_tensors_default_hooks


autograd_sequence_number = _get_sequence_nr
"""Returns the number of autograd nodes that this thread has made: it is the same for all tensors that one op saves."""

current_backward = torch._C._current_graph_task_id
"""Returns the number of the backward that this thread works for, ``-1`` outside of one."""


set_grad_enabled = torch._C._set_grad_enabled
"""``torch.set_grad_enabled`` as a function, without an object for its ``with``: it takes a third of the time."""


current_accelerator = torch._C._accelerator_getAccelerator
"""``torch.accelerator.current_accelerator()`` without its Python, and without a copy of its result."""


is_any_autocast_enabled = _is_any_autocast_enabled
"""Returns whether autocast is on for any kind of device: a sixth of the time that it takes to ask for one by name."""


attention_kernels_enabled = (
    torch._C._get_math_sdp_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
"""``torch.backends.cuda.math_sdp_enabled()`` and so on, without a call of Python for each block."""


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a tensor of ``FakeTensorMode``: shape, dtype and history without memory or values."""
    return isinstance(value, FakeTensor)


class WithoutValues(torch.Tensor):
    """A tensor of some size, dtype and device that has no memory, and that nothing can read.

    Code that calls no op of the dispatcher must not read its memory either, which is at address 0: that would end the
    process by a segmentation fault.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    error_class: type[Exception] = RuntimeError
    message = "an op reads a tensor that this run has left out"

    @classmethod
    def like(cls, kind: Any, error_class: type[Exception] | None = None, message: str = "") -> Self:
        """Returns one, from ``(size, stride, offset, dtype, device)`` or from a tensor; to read it raises the error."""
        size, strides, offset, dtype, device = (
            (kind.size(), kind.stride(), kind.storage_offset(), kind.dtype, kind.device)
            if isinstance(kind, torch.Tensor)
            else kind
        )
        new: Self = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, storage_offset=offset, dtype=dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(new)  # what takes the address: DLPack, kernels, `set_` of its storage
        if error_class is not None:
            new.error_class, new.message = error_class, message
        elif isinstance(kind, cls):
            new.error_class, new.message = kind.error_class, kind.message
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensor = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise tensor.error_class(tensor.message)


@functools.cache
def own_attributes_of_fakes() -> frozenset[str]:
    """Returns the names of the attributes that PyTorch gives each fake tensor, or a parameter among them."""
    with _disable_current_modes(), FakeTensorMode():
        return frozenset({*torch.empty(0).__dict__, "_is_param"})


def version_sharing_detach(tensor: torch.Tensor) -> torch.Tensor:
    """Detaches inside ``__torch_dispatch__`` so that later in-place modifications of ``tensor`` show in ``_version``.

    Below autograd a plain ``detach()`` makes an alias with a separate version counter.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.ADInplaceOrView):
        return tensor.detach()  # takes a third of the time
    with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def share_version_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an in-place modification of one tensor shows in the ``_version`` of the other.

    Two tensors may share their memory and yet not that: the results of ``unsafe_chunk``, or ``x`` and ``x.data``.
    """
    # A number that the other one does not have by chance, and that is set back before anything can see it.
    version = one._version
    probe = version + 1_000_003
    _unsafe_set_version_counter((one,), (probe,))
    shared = other._version == probe
    _unsafe_set_version_counter((one,), (version,))
    return shared


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets the version counter of a tensor, and so of its views and of what it is a view of."""
    _unsafe_set_version_counter((tensor,), (version,))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of ``tensor``; ``None`` for one that has none, such as a sparse tensor."""
    return tensor.untyped_storage() if torch._C._has_storage(tensor) else None


def what_is_not_plain(tensor: torch.Tensor) -> str | None:
    """Names the kind of a tensor that is more, or less, than a view of bytes in memory; ``None`` if it is just that."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return "sparse" if "sparse" in str(tensor.layout) else str(tensor.layout)
    if tensor.is_quantized:
        return "quantized"
    if tensor._is_zerotensor():
        return "zero"
    return "torch.func" if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else None


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Returns the shape of any tensor; of a nested tensor of strided layout, which has none, the sizes of all parts."""
    try:
        return tensor.shape
    except RuntimeError:  # to ask first whether it is nested costs every saved tensor 30 ns
        if not tensor.is_nested:
            raise
        return torch.Size(tensor._nested_tensor_size().flatten().tolist())


def is_transformed() -> bool:
    """Returns whether a transform of ``torch.func`` is active in this thread, or forward-mode AD."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


# A compiler that traced it would take the stack for an object that is there. It guards on both levels in any case.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def early_stop_active(wanted: bool) -> bool:
    """Returns what ``torch.utils.checkpoint.set_checkpoint_early_stop`` says, which is public; else ``wanted``."""
    active: bool | None = torch_checkpoint._enable_checkpoint_early_stop
    return wanted if active is None else active


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Has ``callback`` called, on the caller's streams, when the backward that calls this is over. ``False``: none is.

    After an error in that backward it is not called. PyTorch's data-parallel wrappers end their steps this way.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:  # no backward runs in this thread
        return False
    return True


num_function_modes = _len_torch_function_stack
"""Returns how many torch function modes are active in this thread, such as that of a default device."""


def foreign_modes() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the torch function modes and the dispatch modes of this thread that a user has entered, innermost last.

    Not the mode of a default device, which is a separate setting, nor the dispatch modes of PyTorch itself: they count,
    trace or stand in for values, and act in a backward if they are meant to.
    """
    function_modes: tuple[Any, ...] = ()
    dispatch_modes: tuple[Any, ...] = ()
    if num_function_modes():
        modes = overrides._get_current_function_mode_stack()
        function_modes = tuple(m for m in modes if not isinstance(m, DeviceContext) and not _is_of(m, "graphckpt"))
    if _len_torch_dispatch_stack():
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        dispatch_modes = tuple(mode for mode in modes if not _is_of(mode, "graphckpt", "torch"))
    return function_modes, dispatch_modes


def _is_of(mode: object, *packages: str) -> bool:
    return type(mode).__module__.partition(".")[0] in packages


class ActiveModes(NamedTuple):
    """The torch function modes and the dispatch modes of a thread, whoever has entered them, innermost last."""

    function_modes: list[Any]
    dispatch_modes: list[Any]
    flags: dict[str, bool]
    """What PyTorch notes of the dispatch modes when they are entered."""


NO_MODES = ActiveModes([], [], {})
_MODE_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


def active_modes() -> ActiveModes:
    """Returns all modes of this thread, for :func:`set_active_modes`."""
    if not (num_function_modes() or _len_torch_dispatch_stack()):
        return NO_MODES
    return ActiveModes(
        overrides._get_current_function_mode_stack(),
        _python_dispatch._get_current_dispatch_mode_stack(),
        {name: getattr(_python_dispatch, name) for name in _MODE_FLAGS},
    )


def set_active_modes(modes: ActiveModes) -> None:
    """Makes ``modes`` active, and no others, without entering or leaving any: called twice, it does no more."""
    _set_stack(overrides._get_current_function_mode_stack(), modes.function_modes, overrides)
    _set_stack(_python_dispatch._get_current_dispatch_mode_stack(), modes.dispatch_modes, _python_dispatch)
    for name in _MODE_FLAGS:
        setattr(_python_dispatch, name, modes.flags.get(name, False))
    if hasattr(_python_dispatch, _SET_FLAG_OF_COMPILER):
        getattr(_python_dispatch, _SET_FLAG_OF_COMPILER)(modes.flags.get(_FLAG_OF_COMPILER, False))


_FLAG_OF_COMPILER = "_is_in_any_mode_without_ignore_compile_internals"  # the compiler's guards have a copy of it
_SET_FLAG_OF_COMPILER = "set_is_in_mode_without_ignore_compile_internals"


def _set_stack(present: list[Any], wanted: list[Any], stack: Any) -> None:
    # From [A, B, C] to [A, D]: C and B are popped and D is pushed. What both begin with stays in its place.
    common = 0
    while common < min(len(present), len(wanted)) and present[common] is wanted[common]:
        common += 1
    for _ in present[common:]:
        stack._pop_mode()
    for mode in wanted[common:]:
        stack._push_mode(mode)


def push_modes(function_modes: Sequence[Any], dispatch_modes: Sequence[Any]) -> None:
    """Makes modes active without entering them: what they do when they are entered, they have done in the forward."""
    for mode in function_modes:
        overrides._push_mode(mode)
    for mode in dispatch_modes:
        _python_dispatch._push_mode(mode)


def global_forward_hooks() -> list[list[dict[int, Any]]]:
    """Returns the forward pre-hooks and forward hooks that ``torch.nn.modules.module.register_module_*`` have set.

    Each with what torch notes of some of them; nothing public reads them.
    """
    registry = nn.modules.module
    notes = ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called")
    return [
        [registry._global_forward_pre_hooks],
        [registry._global_forward_hooks, *(getattr(registry, name) for name in notes if hasattr(registry, name))],
    ]


def scripted_attributes(module: torch.jit.ScriptModule) -> list[str]:
    """Names what a scripted module has beside parameters and children: buffers, numbers, containers, ``training``."""
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
    attributes: dict[str, tuple[object, bool]] = kind.get_attributes()
    return [name for name, (_, is_parameter) in attributes.items() if not is_parameter]


def has_scripted_code() -> bool:
    """Whether ``torch.jit.script`` or ``trace`` has compiled anything in this process."""
    compiled: Any = torch.jit._state._python_cu
    return bool(compiled.get_functions())


def gradient_hooks(tensors: Iterable[torch.Tensor]) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Returns the calls that put back the present hooks of ``tensors``, and of the nodes that compute their gradients.

    It takes about 6 us for each of them: a node does not show its hooks, but a handle of one more hook does.
    """
    restorations = []
    for tensor in dict.fromkeys(tensors):
        if tensor.requires_grad:
            node = get_gradient_edge(tensor).node  # that of a leaf would be freed, and its hooks with it
            restorations.append((_put_hooks, (tensor, node, [dict(each or ()) for each in _hooks_of(tensor, node)])))
    return restorations


def _hooks_of(tensor: torch.Tensor, node: Any) -> list[dict[int, Any] | None]:
    owners: list[dict[int, Any] | None] = [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]
    for register in (node.register_hook, node.register_prehook):
        handle = register(_do_nothing)
        owners.append(handle.hooks_dict_ref())
        handle.remove()
    return owners


def _put_hooks(tensor: torch.Tensor, node: Any, before: Sequence[dict[int, Any]]) -> None:
    for owner, then in zip(_hooks_of(tensor, node), before, strict=True):
        if owner is not None and owner.keys() != then.keys():
            owner.clear()
            owner.update(then)


def _do_nothing(*_: object) -> None: ...


_CALL = nn.Module._call_impl.__code__
# Of a module with hooks alone: to ask every module for its variables would take a microsecond each.
_CALL_WITH_HOOKS = next((code for code in _CALL.co_consts if getattr(code, "co_name", "") == "inner"), _CALL)


def has_always_called_hooks(frame: FrameType | None, first: CodeType | None = None) -> bool:
    """Whether a forward hook with ``always_call=True`` waits for the end of a module that ``frame`` runs in.

    An exception would have it called, or skipped: of the callers' frames, those of modules refer to these as ``self``.
    The caller with the code ``first`` catches it: those before that do not count.
    """
    if nn.modules.module._global_forward_hooks_always_called:
        return True
    while frame is not None and frame.f_code is not first:
        if frame.f_code is _CALL_WITH_HOOKS and frame.f_locals["self"]._forward_hooks_always_called:
            return True
        frame = frame.f_back
    return False


def parametrizations_are_cached() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is active in the process."""
    return parametrize._cache_enabled > 0


def saved_tensors_are_cloned() -> bool:
    """Whether ``torch.autograd.graph.allow_mutation_on_saved_tensors()`` is active in the process."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


_REDUCTIONS = {1: "mean", 2: "sum"}  # of ATen's `Reduction`


def reduction_of(loss: torch.Tensor) -> str | None:
    """Returns how a loss function of PyTorch has reduced to ``loss``; ``None`` if another op has made it."""
    function = loss.grad_fn
    while function is not None and function.name() == "ToCopyBackward0":
        function = function.next_functions[0][0]
    return _REDUCTIONS.get(getattr(function, "_saved_reduction", 0))


def clear_cublas_workspaces() -> None:
    """Frees cuBLAS's workspaces of each thread and stream, as torch's CUDA graph trees do around each capture."""
    torch._C._cuda_clearCublasWorkspaces()


def abandon_capture(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int], *, has_begun: bool
) -> None:
    """Ends a capture in which something has failed, so that the process can go on, and can record again.

    An error of the device makes the capture invalid; ``capture_end()`` then raises before it has put all in order
    (pytorch#171263, #180395, #190348): up to torch 2.11 the allocator still takes a capture to be under way, up to
    2.12 the random generator does, and up to 2.13 the memory pool is never given back. ``has_begun`` is false where
    ``capture_begin()`` itself has raised: it may have done so before or after it took the pool.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    try:
        graph.pool()
        is_ended = True  # it got as far as to give everything back with `reset()`
    except RuntimeError:
        is_ended = False
    graph.reset()
    if is_ended:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    holds_pool = has_begun
    with suppress(RuntimeError):  # says that it has been ended, where it has
        torch._C._cuda_endAllocateToPool(index, pool)
        holds_pool = True
    if holds_pool and torch.__version__ < "2.14":  # else this would give back what other graphs in the pool hold
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)
    if torch.__version__ < "2.13":
        with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):
            healing = torch.cuda.CUDAGraph()  # the end of a capture that succeeds takes the generator out of it
            healing.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            healing.capture_end()
            healing.reset()


def forget_half_a_step(scaler: torch.amp.GradScaler) -> None:
    """Lets ``scaler`` begin anew after an error between ``unscale_()`` and ``update()``, which would be an error."""
    scaler._per_optimizer_states.clear()


def silence_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Keeps ``optimizer`` from its warning that it is capturable and not captured: the first calls never are."""
    optimizer._warned_capturable_if_run_uncaptured = True


def unseen_by_modes() -> AbstractContextManager[Any]:
    """Returns a context whose ops no dispatch mode sees, such as those that count bytes."""
    return _disable_current_modes() if is_watched() else nullcontext()


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of ``tensor`` decides what an op does, as a DTensor or a fake tensor: it may have no memory."""
    dispatch = type(tensor).__torch_dispatch__
    return dispatch is not torch.Tensor.__torch_dispatch__


def local_shard(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the shard of a DTensor on this rank, which ``to_local()`` records in the autograd graph."""
    return getattr(tensor, "_local_tensor", None)


def norms_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm of each tensor, in a few kernels; ``clip_grad_norm_`` uses the same function."""
    return torch.stack(torch._foreach_norm(list(tensors)))


is_watched: Callable[[], int] = _len_torch_dispatch_stack
"""Returns how many dispatch modes see the ops of this thread, such as one that counts bytes; 0 if none does."""


def is_traced_by_fx() -> bool:
    """Whether ``make_fx`` traces the ops of this thread, whose module only programs that use it have imported."""
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxy_tensor is not None and proxy_tensor.get_proxy_mode() is not None


def all_gather_bytes(process_group: Any, output: torch.Tensor, sent: torch.Tensor, limit: timedelta) -> Any:
    """Starts to gather ``sent`` of all ranks, in order of rank, in ``output``; returns the ``Work`` to wait for.

    ``all_gather_into_tensor`` is deprecated in torch 2.13, ``all_gather_single`` is not in 2.11, and neither takes a
    time limit for this one call, after which gloo gives up (NCCL keeps to the limit of its group).
    """
    from torch._C._distributed_c10d import AllgatherOptions  # noqa: PLC0415 - not there on a build without distributed

    options = AllgatherOptions()
    options.timeout = limit
    options.asyncOp = True
    return process_group._allgather_base(output, sent, options)


def packed_shard(dim: int, parts: int) -> Placement:
    """Returns the placement that splits each of ``parts`` blocks of a dimension, such as queries, keys, values."""
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415 - takes a second

    return _StridedShard(dim, split_factor=parts)


def assert_on_device(ok: torch.Tensor, message: str) -> None:
    """Ends the device's work with ``message`` if ``ok`` is false, without holding up the host.

    A process gets its device back only by a new start. PyTorch may end it at once: it aborts in a destructor of a
    tensor that it frees after the error (seen on CUDA with torch 2.11). The message is on the standard error then.
    """
    torch._assert_async(ok, message.encode()[:_ASSERT_BYTES].decode(errors="ignore"))


_ASSERT_BYTES = 250  # CUDA's kernel copies the message to an array of 256 bytes, and refuses a longer one


def op_names() -> list[str]:
    """Returns the names of all registered ops, such as ``"aten.mm"``."""
    return sorted({name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()})


# Note [Autocast below a dispatch mode]
# Before it calls a mode, PyTorch sets aside all that comes before kernels, autocast among it, and so also for what a
# kernel calls itself: `bilinear` on a CPU is the op `_trilinear`, whose kernel multiplies matrices, in bfloat16 under
# autocast, and in float32 below a mode. An op that autocast casts the arguments of has set it aside itself: what its
# kernel calls is not cast. So below a mode autocast is made active again for all other ops, except those that such an
# op calls: `cdist` casts, and calls `_euclidean_dist`.

_PARTS = {"aten::_euclidean_dist": "aten::cdist", "aten::_trilinear": "aten::bilinear"}
_PART_OR_WHOLE = {"aten::linalg_pinv": "aten::pinverse"}
_NOTHING = nullcontext()


def call_with_autocast(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls an op below a dispatch mode so that it computes what it computes without one.

    See Note [Autocast below a dispatch mode].

    Raises:
        RuntimeError: What the op would compute without a mode cannot be known.
    """
    keys: list[DispatchKey] = []
    without_casts = _keys_without_casts(func)
    if without_casts:
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # as it was when Python called PyTorch
            if is_any_autocast_enabled():
                keys = [key for kind, key in without_casts if torch.is_autocast_enabled(kind)]
    if not keys:
        return func(*args, **kwargs)
    for prefix, composite in _PART_OR_WHOLE.items():
        if func.name().startswith(prefix) and any(_has_kernel(composite, key) for key in keys):
            raise RuntimeError(
                f"{func}: expected no autocast below a dispatch mode, got it: whether its kernel is to cast is not "
                f"known, {composite} calls it too · fix: call it within torch.autocast(..., enabled=False), or use "
                "activation_checkpointing = True, which needs no mode"
            )
    key, *others = keys  # there are two, if autocast is on for the CPU and for the accelerator
    other = _SetExcludeDispatchKeyGuard(others[0], False) if others else _NOTHING
    with _SetExcludeDispatchKeyGuard(key, False), other:
        return func(*args, **kwargs)


@functools.cache
def _keys_without_casts(func: Any) -> list[tuple[str, DispatchKey]]:
    """Returns the kinds of device, with their keys, for which an op calls others and autocast leaves its arguments."""
    if not isinstance(func, torch._ops.OpOverload) or any(r.alias_info is not None for r in func._schema.returns):
        return []  # what returns a view or modifies in place calls nothing that casts
    accelerator = torch.accelerator.current_accelerator()
    name, keys = func.name(), []
    for kind in ["cpu"] if accelerator is None else ["cpu", accelerator.type]:
        key: DispatchKey | None = getattr(DispatchKey, f"Autocast{kind.upper()}", None)
        # PyTorch's kernels for one kind of device compute; those for all kinds call ops
        computes = func.namespace == "aten" and _has_kernel(name, getattr(DispatchKey, kind.upper()))
        if key is not None and not computes and not _has_kernel(_PARTS.get(name, name), key):
            keys.append((kind, key))
    return keys


def _has_kernel(op: str, key: DispatchKey) -> bool:
    try:
        return bool(_dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:  # `sym_size`, which asks for the size of a nested tensor, is not an op of the dispatcher
        return True
