"""Finds the tensors that ops modify in place, by their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat_compiler import never_compiled


@final
class Writes(TorchDispatchMode):
    """Notes which storages ops write to: a fake tensor has no bits to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no id is reused

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in chain(mutated_by(func, args, kwargs), _running_statistics(func, args, kwargs)):
            storage = tensor.untyped_storage()
            self.storages[id(storage)] = storage
        return func(*args, **kwargs)


def mutated_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the arguments that an op says it modifies in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _running_statistics(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields what the kernels of BatchNorm modify without saying so, unless they are told not to train."""
    schema = getattr(func, "_schema", None)
    given = {} if schema is None else {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **kwargs}
    if given.get("training", given.get("train", True)):
        for name in ("running_mean", "running_var"):
            if isinstance(given.get(name), torch.Tensor):
                yield given[name]
