"""Runs the kernels of a CUDA device on fake CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, final

import torch
from torch.nn import functional as F  # noqa: N812

from graphckpt.planning.device.profile import DeviceProfile

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
class CudaKernels:
    """The kernels of one device.

    Args:
        machine: the device profile, with the order of attention kernels.
    """

    def __init__(self, machine: DeviceProfile) -> None:
        self._order = machine.attention
        self._capability = machine.capability or (8, 0)
        self.instead: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self.attention,
            F.dropout: dropout,
            torch.dropout: dropout,
        }
        """Replacements of PyTorch functions."""

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Replaces ``scaled_dot_product_attention``, with the first kernel that supports the call."""
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(low), key.to(low), value.to(low)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        call = _AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        for kernel in self._order:
            if kernel == "math":
                break
            if getattr(self, f"_{kernel}_can")(call):
                run: Callable[[], torch.Tensor] = getattr(call, kernel)
                return run()
        return call.math()

    def _flash_can(self, call: _AttentionCall) -> bool:
        width = call.query.shape[-1]
        is_small = width <= 256 and not (width > 192 and self._capability in ((8, 6), (8, 9)) and call.needs_grad)
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self._capability >= (8, 0)
            and call.is_plain
            and call.query.dtype in _HALF
            and is_small
            and call.mask is None
        )

    def _cudnn_can(self, call: _AttentionCall) -> bool:
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and self._capability >= (8, 0)
            and call.is_plain
            and call.query.dtype in _HALF
            and call.query.shape[-1] <= 128
            and call.query.shape[-1] % 8 == 0
        )

    def _efficient_can(self, call: _AttentionCall) -> bool:
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and call.is_plain
            and call.query.dtype in (*_HALF, torch.float32)
            and call.query.shape[1] == call.key.shape[1]
            and call.query.shape[-1] * call.query.element_size() % 16 == 0
        )


@final
class _AttentionCall:
    """One call of attention."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        is_grouped: bool,
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self._dropout, self._is_causal, self._scale, self._is_grouped = dropout, is_causal, scale, is_grouped

    @property
    def is_plain(self) -> bool:
        """Whether the fused kernels support the shapes and types of the tensors."""
        query, key, value = self.query, self.key, self.value
        same = query.dim() == key.dim() == value.dim() == 4 and query.dtype is key.dtype is value.dtype
        return (
            same
            and query.shape[-1] == key.shape[-1] == value.shape[-1]
            and query.shape[0] == key.shape[0] == value.shape[0]
            and (query.shape[1] == key.shape[1] or self._is_grouped)
        )

    @property
    def needs_grad(self) -> bool:
        """Whether the call takes part in backward."""
        tensors = (self.query, self.key, self.value, self.mask)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def flash(self) -> torch.Tensor:
        """Pads heads to a width of 8 n; grouped keys and values are not expanded."""
        width = self.query.shape[-1]
        scale = 1 / sqrt(width) if self._scale is None else self._scale
        missing = -width % 8
        tensors = [F.pad(t, (0, missing)) if missing else t for t in (self.query, self.key, self.value)]
        found = _aten._scaled_dot_product_flash_attention(*tensors, self._dropout, self._is_causal, False, scale=scale)
        out: torch.Tensor = found[0]
        return out[..., :width] if missing else out

    def cudnn(self) -> torch.Tensor:
        """Saves the tensors of flash attention, and the mask."""
        found: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_cudnn_attention(
            self.query, self.key, self.value, self._additive_mask(), self.needs_grad, self._dropout, self._is_causal,
            False, scale=self._scale,
        )  # fmt: skip
        return found[0]

    def efficient(self) -> torch.Tensor:
        """Saves the mask, which all heads may share."""
        mask = self._additive_mask()
        if mask is not None and mask.shape[-1] % _BIAS_ALIGN:
            length = mask.shape[-1]
            mask = F.pad(mask, (0, -length % _BIAS_ALIGN))[..., :length]
        if mask is not None:
            mask = mask.expand(*self.query.shape[:-1], self.key.shape[-2])
        found: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_efficient_attention(
            self.query, self.key, self.value, mask, self.needs_grad, self._dropout, self._is_causal, scale=self._scale
        )
        return found[0]

    def math(self) -> torch.Tensor:
        """Saves all pairs of positions."""
        found: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_attention_math(
            self.query, self.key, self.value, self.mask, self._dropout, self._is_causal,
            scale=self._scale, enable_gqa=self._is_grouped,
        )  # fmt: skip
        return found[0]

    def _additive_mask(self) -> torch.Tensor | None:
        mask = self.mask
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
    """Calls ``func`` in float32, as autocast does on CUDA."""

    def raised(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _HALF:
            return value.float()
        return type(value)(map(raised, value)) if type(value) in (list, tuple) else value

    with torch.autocast("cpu", enabled=False):
        return func(*map(raised, args), **{key: raised(value) for key, value in kwargs.items()})
