"""FlashAttention-2 and FlexAttention of Transformers for simulated steps, whose kernels need a GPU.

Both save query, key, value, the result and the log-sum-exp of each row, as PyTorch's own flash kernel does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from graphckpt.errors import ConfigError
from graphckpt.simulation.cuda_kernels import AttentionCall

# Without "flash": for a name with it Transformers loads `flash_attn`, or a kernel of the hub, when it builds a model.
ATTENTION_NAMES: Final = {"flash": "graphckpt_fused", "flex": "graphckpt_flex"}
"""By the option: the name among the attention functions of Transformers."""
_HALF = (torch.float16, torch.bfloat16)


def register_attention(packed: int | None) -> None:
    """Adds both to the attention functions of Transformers. They get no mask.

    Args:
        packed: Tokens of each of the samples that a row holds under FlashAttention; ``None`` if every row is one.
    """
    from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds

    AttentionInterface.register(ATTENTION_NAMES["flash"], partial(_flash, packed=packed))
    AttentionInterface.register(ATTENTION_NAMES["flex"], _flex)


def _attention_call(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, settings: dict[str, Any]
) -> AttentionCall:
    if settings.get("position_bias") is not None:
        raise ConfigError(
            "attention: expected attention without a bias of positions, which flash and flex are not simulated with "
            "· fix: attention='sdpa'"
        )
    is_causal = settings.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    return AttentionCall(query, key, value, None, dropout, is_causal, settings.get("scaling"), enable_gqa=True)


def _window_of(call: AttentionCall, settings: dict[str, Any]) -> int | None:
    """Returns the tokens that a layer with a sliding window goes back."""
    window: int | None = settings.get("sliding_window")
    return window if call.is_causal else None


def _flash(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    dropout: float = 0.0, *, packed: int | None, **settings: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    del attention_mask
    if query.dtype is torch.float32 and not torch.is_autocast_enabled("cpu"):  # as Transformers, after norms in float32
        dtype = next((p.dtype for p in module.parameters() if p.dtype in _HALF), query.dtype)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    call = _attention_call(module, query, key, value, dropout, settings)
    if call.query.dtype not in _HALF or call.query.shape[-1] > 256:
        got = f"{str(call.query.dtype).removeprefix('torch.')} and heads of {call.query.shape[-1]}"
        what = f"FlashAttention takes float16 or bfloat16 and heads of at most 256, got {got}"
        raise ConfigError(f"attention: {what} · fix: autocast='bfloat16', or attention='sdpa'")
    return call.flash_in_rows(packed, _window_of(call, settings)), None


def _flex(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    dropout: float = 0.0, **settings: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    del attention_mask, dropout  # which FlexAttention does not have
    call = _attention_call(module, query, key, value, 0.0, settings)
    if call.query.dtype in _HALF:
        return call.flash_in_rows(None, _window_of(call, settings)), None
    groups = call.query.shape[1] // call.key.shape[1]
    if groups > 1:  # the kernel that stands in for it has none
        call.key, call.value = (t.repeat_interleave(groups, dim=1) for t in (call.key, call.value))
    return call.efficient().transpose(1, 2).contiguous(), None
