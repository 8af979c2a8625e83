"""Autocast on a CUDA device, where the CPU, on which fake tensors are, casts for other ops.

Which ops are cast for is PyTorch's own registration for CUDA; what becomes of each is from its documentation. An op
that PyTorch casts for and that has no kind here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal, NoReturn, TypeAlias, cast

import torch
from torch.utils import _pytree as pytree

from graphckpt._compat_fake import CASTS_ON_CPU, CASTS_ON_CUDA, is_on_host, nll_loss, without_torch_functions_in
from graphckpt.errors import ConfigError
from graphckpt.simulation.stand_ins import user_line

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

Kind: TypeAlias = Literal["lower", "float32", "float32 results", "widest", "refused"]

# "CUDA Ops that can autocast to float16", "to float32", "that promote to the widest input type" and "Prefer
# binary_cross_entropy_with_logits over binary_cross_entropy" of docs.pytorch.org/docs/stable/amp.html, and what its
# lists leave out, by the lists of autocast_mode.h that they are made from (AT_FORALL_LOWER_PRECISION_FP,
# AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE with AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, and AT_FORALL_PROMOTE).
# Those of "float32 results" are not cast: they compute in float32, and save what they are given.
_LISTS: dict[Kind, str] = {
    "lower": """
        _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv
        addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
        convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear
        lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention""",
    "float32": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss
        layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
        native_layer_norm nll_loss nll_loss2d nuclear_norm pdist poisson_nll_loss pow reciprocal renorm rms_norm rsqrt
        sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d""",
    "float32 results": """
        cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax norm prod softmax sum""",
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot""",
    "refused": "binary_cross_entropy",
}  # fmt: skip
KINDS: dict[str, Kind] = {name: kind for kind, names in _LISTS.items() for name in names.split()}
"""What autocast does on CUDA, by the names of ops without an overload."""

# Functions in C++ that call those above, where no mode sees them.
_CALLERS: dict[str, str] = {
    "__matmul__": "matmul", "linalg_norm": "linalg_vector_norm", "pairwise_distance": "dist", "nll_loss_nd": "nll_loss",
    **{f"special_{name}": name for name in ("expm1", "log_softmax", "softmax", "logsumexp", "log1p")},
}  # fmt: skip
_IN_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor")
_METHODS = ("norm", "pow", "__rpow__", "__rmatmul__")  # all others only call the method in C++ of the same name


@cache
def _is_composed(func: Any) -> bool:
    """Whether a function is one in Python that calls others."""
    if not isinstance(func, FunctionType) or func.__module__ not in _IN_PYTHON:
        return False
    return func.__module__ != "torch._tensor" or func.__name__ in _METHODS


@cache
def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return _CALLERS.get(name, name)


def call_under_autocast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """Calls a function as under ``torch.autocast("cuda")``, while that of the CPU is enabled in its place.

    Raises:
        ConfigError: PyTorch refuses it there, or it is not known what PyTorch does.
    """
    if _is_composed(func):
        with without_torch_functions_in(*_IN_PYTHON), mode:  # the mode sees what it calls
            return func(*args, **kwargs)
    name = _name_of(func)
    # What the CPU alone casts for runs with its autocast off. What neither casts for runs with it on, for what it calls
    # in C++.
    if name not in CASTS_ON_CUDA and name != "cross_entropy_loss":
        return _call(func, args, kwargs, casts=name not in CASTS_ON_CPU)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_cast = any(tensor.is_floating_point() and tensor.dtype is not torch.float64 for tensor in tensors)
    if "out" in kwargs or not is_cast or any(map(is_on_host, tensors)):
        return _call(func, args, kwargs, casts=False)
    call = _cross_entropy if name == "cross_entropy_loss" else _CALLS.get(KINDS.get(name), _refuse_unknown)
    return call(func, name, args, kwargs)


def _lower(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in CASTS_ON_CPU:  # with the cache of weights
        return _call(func, args, kwargs, casts=True)
    return _call(func, *_cast(torch.get_autocast_dtype("cpu"), args, kwargs), casts=False)


def _float32(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del name
    return _call(func, *_cast(torch.float32, args, kwargs), casts=False)


def _widest(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del name
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    has_float32 = any(tensor.dtype is torch.float32 for tensor in tensors)
    return _call(
        func, *_cast(torch.float32 if has_float32 else torch.get_autocast_dtype("cpu"), args, kwargs), casts=False
    )


def _refuse(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    del func, args, kwargs
    fix = "BCEWithLogitsLoss or binary_cross_entropy_with_logits"
    raise ConfigError(f"the step ({user_line()}) calls {name} under autocast, which PyTorch refuses · fix: {fix}")


def _refuse_unknown(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    del func, args, kwargs
    what = f"calls {name} under autocast, for which PyTorch casts on CUDA in a way that is not known"
    raise ConfigError(f"the step ({user_line()}) {what} · fix: call it in `with torch.autocast('cuda', enabled=False)`")


def _call(func: Callable[..., Any], args: Any, kwargs: Any, *, casts: bool) -> Any:
    """Calls ``func``, with the autocast of the CPU off unless ``casts``."""
    if casts:
        return func(*args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _cast(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast_one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_cast = value.is_floating_point() and value.dtype is not torch.float64
            return value.to(dtype) if is_cast else value
        return type(value)(map(cast_one, value)) if type(value) in (list, tuple) else value

    return tuple(map(cast_one, args)), {key: cast_one(value) for key, value in kwargs.items()}


def _has_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)


def _float32_results(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if first.dtype not in _HALF or _has_dtype(args, kwargs):
        return _call(func, args, kwargs, casts=False)
    if name in ("softmax", "log_softmax"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(dim, int):
            return half_to_float(name, first, dim)
    return _call(func, args, kwargs | {"dtype": torch.float32}, casts=False)


def half_to_float(name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Runs a softmax as CUDA does: the kernel reads float16 or bfloat16 and writes float32, without a copy."""
    with torch.autocast("cpu", enabled=False):
        softmax = _aten._softmax if name == "softmax" else _aten._log_softmax
        return cast("torch.Tensor", softmax(tensor, dim, True))


def _cross_entropy(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs what ``cross_entropy_loss`` calls in C++: ``log_softmax``, which makes no copy, and ``nll_loss_nd``."""
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    logits, target = options.pop("input"), options.pop("target")
    if logits.dtype not in _HALF or target.is_floating_point() or options.pop("label_smoothing", 0.0):
        return _float32(func, name, args, kwargs)
    log_weights = half_to_float("log_softmax", logits, 0 if logits.dim() == 1 else 1)
    return _call(nll_loss, *_cast(torch.float32, (log_weights, target), options), casts=False)


_CALLS: dict[Kind | None, Callable[..., Any]] = {
    "lower": _lower,
    "float32": _float32,
    "float32 results": _float32_results,
    "widest": _widest,
    "refused": _refuse,
}
