"""The kernels that a CUDA device chooses for attention and dropout, where the CPU has others.

They decide what a step saves: a fused kernel saves no attention weights, dropout a mask of one byte per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import final

import torch
from torch.nn import functional as F  # noqa: N812

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# Elements; PyTorch pads masks of the efficient kernel to multiples of it.
_BIAS_ALIGN = 8


@final
@dataclass(slots=True)
class AttentionCall:
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
        # Called instead of the function, it is not cast for by autocast.
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            self.query, self.key, self.value = self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)
            if self.attn_mask is not None and self.attn_mask.is_floating_point():
                self.attn_mask = self.attn_mask.to(dtype)

    def is_supported(self, kernel: str, capability: tuple[int, int]) -> bool:
        """Whether a fused kernel supports the shapes and types of the tensors, and is enabled."""
        # As in sdp_utils.cpp of PyTorch: a call that breaks one of these rules gets the next kernel.
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
            # The backward of wide heads needs more shared memory than devices of 8.6 and 8.9 have.
            is_wide = width > 256 or (width > 192 and capability in ((8, 6), (8, 9)) and self._needs_grad)
            is_enabled = torch.backends.cuda.flash_sdp_enabled() and capability >= (8, 0)
            return is_enabled and is_half and not is_wide and self.attn_mask is None
        if kernel == "cudnn":
            is_enabled = torch.backends.cuda.cudnn_sdp_enabled() and capability >= (8, 0)
            # Its backward computes no gradient of the mask.
            has_mask_gradient = self.attn_mask is not None and self.attn_mask.requires_grad
            return is_enabled and is_half and width <= 128 and width % 8 == 0 and not has_mask_gradient
        return (  # the efficient kernel
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and (is_half or query.dtype is torch.float32)
            and (query.dtype is not torch.bfloat16 or capability >= (8, 0))
            and query.shape[1] == key.shape[1]
            # `minimum_gemm_alignment`: its kernels load 128 bits at a time.
            and width * query.element_size() % 16 == 0
        )

    @property
    def _needs_grad(self) -> bool:
        tensors = (self.query, self.key, self.value, self.attn_mask)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def flash(self) -> torch.Tensor:
        """Pads heads to a width of 8 n; grouped keys and values are not expanded."""
        width, scale, tensors = self._padded()
        results = _aten._scaled_dot_product_flash_attention(
            *tensors, self.dropout_p, self.is_causal, False, scale=scale
        )
        out: torch.Tensor = results[0]
        return out[..., :width]

    def flash_in_rows(self, length: int | None, window: int | None) -> torch.Tensor:
        """Calls FlashAttention as its library does, on (batch, tokens, heads, width), and returns a tensor like that.

        Args:
            length: Tokens of each of the samples that a row holds; ``None`` if a row is one sample.
            window: Tokens that causal attention goes back, of a layer with a sliding window.
        """
        width, scale, tensors = self._padded()
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        rows = query.shape
        if length is not None:
            query, key, value = (tensor.reshape(-1, length, *tensor.shape[2:]) for tensor in (query, key, value))
        tokens = query.shape[1]
        left, right = (window - 1, 0) if window is not None and window < tokens else (None, None)
        results = _aten._flash_attention_forward(
            query, key, value, None, None, tokens, tokens, self.dropout_p, self.is_causal, False, scale=scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        out: torch.Tensor = results[0]
        return out.reshape(rows)[..., :width]

    def _padded(self) -> tuple[int, float, list[torch.Tensor]]:
        """Returns the width of heads, the scale, and query, key and value with heads padded to a multiple of 8."""
        width = self.query.shape[-1]
        scale = 1 / sqrt(width) if self.scale is None else self.scale
        missing = -width % 8
        return width, scale, [F.pad(t, (0, missing)) if missing else t for t in (self.query, self.key, self.value)]

    def cudnn(self) -> torch.Tensor:
        results: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_cudnn_attention(
            self.query, self.key, self.value, self._additive_mask(), self._needs_grad, self.dropout_p, self.is_causal,
            False, scale=self.scale,
        )  # fmt: skip
        return results[0]

    def efficient(self) -> torch.Tensor:
        """Saves the mask, which all heads may share."""
        mask = self._additive_mask()
        # A view of a padded copy: the copy is what is saved, once, whatever it is expanded to.
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
    # On the CPU dropout multiplies by a mask in the type of the input, which would count two or four bytes an element.
    if inplace:
        return torch.dropout_(input, p, training)
    if not training or not 0 < p < 1 or input.numel() == 0:
        return torch.dropout(input, p, training)
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped
