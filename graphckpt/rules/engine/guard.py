"""Thread state around one execution of a block, put back however the execution ends.

Note [An interrupt at any moment]: Python may raise ``KeyboardInterrupt`` between any two instructions, also inside of
``__enter__`` and ``__exit__`` of a context manager written in Python, which then leaves half of its work behind. A
guard reads the state first, changes it inside of a ``try``, and puts it back by a method that may run any number of
times:

::

    guard = Guard()
    try:
        guard.enter(...)
        ...
    finally:
        try:
            guard.leave()
        finally:
            guard.leave()  # does nothing, unless the first one was interrupted
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from graphckpt._compat import (
    active_saved_tensor_hooks,
    num_dispatch_modes,
    num_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from graphckpt.rules.engine.execution import Execution, running
from graphckpt.state.autocast import Ambient, restore_ambient
from graphckpt.state.rng import RNGState, set_rng_state
from graphckpt.undo import Undo, put_back


@final
class Guard:
    """Enters one execution of a block in this thread, and leaves it."""

    __slots__ = (
        "_ambient", "_grad", "_hooks", "_is_entered", "_is_left", "_num_dispatch_modes", "_num_function_modes",
        "_outer", "_random", "_run", "_was_active", "undo",
    )  # fmt: skip

    def __init__(self) -> None:
        self._is_entered = self._is_left = False
        self._ambient: tuple[Ambient, int] | None = None
        self._random: RNGState | None = None
        self._run: Execution | None = None
        self._grad = torch.is_grad_enabled()
        self.undo: Undo = []
        """What was replaced in modules and arguments."""

    def enter(
        self, run: Execution | None, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        """Makes ``run`` the present one, and passes what autograd saves through ``pack`` and ``unpack``."""
        self._hooks = active_saved_tensor_hooks()
        self._num_dispatch_modes = num_dispatch_modes()
        self._num_function_modes = num_function_modes()
        self._outer = running.get()
        self._run = run
        self._was_active = run is not None and run.is_active
        self._is_entered = True
        running.set(run)
        if run is not None:
            run.is_active = True
        push_saved_tensor_hooks(pack, unpack)

    def restore_rng_state(self, random: RNGState) -> None:
        """Makes :meth:`leave` restore the RNG state."""
        self._random = random

    def restore_ambient(self, ambient: Ambient, autocast_depth: int) -> None:
        """Makes :meth:`leave` restore autocast and similar settings, which an exception may have left changed."""
        self._ambient = ambient, autocast_depth

    def leave(self) -> None:
        """Puts everything back. A second call does what an interrupt has kept the first one from doing."""
        if self._is_left:
            return
        if self.undo:
            put_back(self.undo)
        if self._is_entered:
            while num_dispatch_modes() > self._num_dispatch_modes:
                pop_dispatch_mode(None)
            while num_function_modes() > self._num_function_modes:
                pop_function_mode()
            while not _are_same(active_saved_tensor_hooks(), self._hooks):
                pop_saved_tensor_hooks()
            running.set(self._outer)
            if self._run is not None:
                self._run.is_active = self._was_active
            self._is_entered = False
        if self._random is not None:
            set_rng_state(self._random)
        if self._ambient is not None:
            restore_ambient(*self._ambient)
        if torch.is_grad_enabled() is not self._grad:
            torch.set_grad_enabled(self._grad)
        self._is_left = True


def _are_same(hooks: Any, others: Any) -> bool:
    if hooks is None or others is None:
        return hooks is others
    return hooks[0] is others[0] and hooks[1] is others[1]
