"""Calls ops and functions below dispatch modes as PyTorch calls them without one."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    _dispatch_has_kernel_for_dispatch_key,
    _is_any_autocast_enabled,
    _SetExcludeDispatchKeyGuard,
)

__all__ = ["call_with_autocast"]


# Note [Autocast below a dispatch mode]
# Before it calls a mode, PyTorch sets aside all that comes before kernels, autocast among it, and so also for what a
# kernel calls itself: `bilinear` on a CPU is the op `_trilinear`, whose kernel multiplies matrices, in bfloat16 under
# autocast, and in float32 below a mode. An op that autocast casts the arguments of has set it aside itself: what its
# kernel calls is not cast. So below a mode autocast is made active again for all other ops, but for those that such an
# op calls: `cdist` casts, and `_euclidean_dist` is a part of it.

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
            if _is_any_autocast_enabled():
                keys = [key for kind, key in without_casts if torch.is_autocast_enabled(kind)]
    if not keys:
        return func(*args, **kwargs)
    for part, whole in _PART_OR_WHOLE.items():
        if func.name().startswith(part) and any(_has_kernel(whole, key) for key in keys):
            raise RuntimeError(
                f"{func}: expected no autocast below a dispatch mode, got it: whether its kernel is to cast is not "
                f"known, {whole} calls it too · fix: call it within torch.autocast(..., enabled=False), or use "
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
    name, found = func.name(), []
    for kind in ["cpu"] if accelerator is None else ["cpu", accelerator.type]:
        key: DispatchKey | None = getattr(DispatchKey, f"Autocast{kind.upper()}", None)
        # PyTorch's own kernels for one kind of device compute; those for all kinds call ops
        computes = func.namespace == "aten" and _has_kernel(name, getattr(DispatchKey, kind.upper()))
        if key is not None and not computes and not _has_kernel(_PARTS.get(name, name), key):
            found.append((kind, key))
    return found


def _has_kernel(op: str, key: DispatchKey) -> bool:
    try:
        return bool(_dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:  # `sym_size`, which asks for the size of a nested tensor, is no op of the dispatcher
        return True
