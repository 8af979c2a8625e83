"""Policy functions for ``selective`` in random programmes."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy


def keeps_everything(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def keeps_nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return False


def keeps_clones(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return "clone" in str(op) or "copy" in str(op)


def keeps_random(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    is_random = any(word in str(op) for word in ("dropout", "rand", "bernoulli", "uniform"))
    return CheckpointPolicy.MUST_SAVE if is_random else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_in_place(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return "_." in str(op)


def keeps_all_but_matmul(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return "mm" not in str(op)


def keeps_views(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return any(word in str(op) for word in ("view", "transpose", ".t.", "slice", "expand", "unsqueeze"))


def keeps_some(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return sum(map(ord, str(op))) % 2 == 0
