"""Thread state around one execution of a block's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from graphckpt._compat import pop_saved_tensor_hooks, push_saved_tensor_hooks
from graphckpt.rules.engine.execution import Execution, running


@final
class Guard:
    """Makes ``run`` the present execution of this thread, and passes what autograd saves through two hooks."""

    __slots__ = ("_hooks", "_outer", "_run")

    def __init__(
        self, run: Execution | None, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self._run = run
        self._hooks = pack, unpack

    def __enter__(self) -> None:
        self._outer = running.get()
        running.set(self._run)
        if self._run is not None:
            self._run.is_active = True
        push_saved_tensor_hooks(*self._hooks)

    def __exit__(self, *_: object) -> None:
        pop_saved_tensor_hooks()
        if self._run is not None:
            self._run.is_active = False
        running.set(self._outer)
