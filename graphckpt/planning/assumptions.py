"""Observes what a simulated step runs: the kernels of attention, autocast, and how the optimizers update.

They set its peak as much as the model: without a fused kernel attention keeps its weights, and an optimizer with
``foreach`` allocates temporaries of all parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

_KERNELS = {
    _aten._scaled_dot_product_flash_attention: "flash",
    _aten._scaled_dot_product_flash_attention_for_cpu: "flash",
    _aten._scaled_dot_product_efficient_attention: "efficient",
    _aten._scaled_dot_product_cudnn_attention: "cudnn",
    _aten._safe_softmax: "math",  # nothing else calls it
}
_EAGER = "eager (softmax in the model)"


@final
class StepObserver:
    """Observes the steps that run within :meth:`observing`."""

    def __init__(self) -> None:
        self._attention: dict[str, None] = {}
        self._autocast: dict[str, None] = {}
        self._updates: dict[str, None] = {}
        self._packets: set[Any] = set()
        """The ops since the last call of an optimizer began."""
        self._weights: tuple[int, int] | None = None
        """Elements and last dimension of the last softmax. It holds no tensor, which would change the peak."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        handles = (
            register_optimizer_step_pre_hook(lambda *_: self._packets.clear()),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._add_update(optimizer)),
        )
        try:
            with _ObservedOps(self), _ObservedCalls(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Returns one phrase each on attention, if there is any, autocast and optimizers."""
        attention = (f"attention {' and '.join(self._attention)}",) if self._attention else ()
        return (
            *attention,
            f"autocast {' and '.join(self._autocast) or 'off'}",
            ", ".join(self._updates) or "no optimizer",
        )

    def add_op(self, packet: Any, args: tuple[Any, ...]) -> None:
        self._packets.add(packet)
        if packet in _KERNELS:
            self._attention.setdefault(_KERNELS[packet])
        elif packet is _aten._softmax and args[0].dim() > 2:
            self._weights = args[0].numel(), args[0].shape[-1]
        elif packet is _aten.bmm and self._weights == (args[0].numel(), args[0].shape[-1]):
            self._attention.setdefault(_EAGER)
            self._weights = None

    def add_call(self) -> None:
        if torch.is_autocast_enabled("cpu"):  # fake tensors are on the CPU
            self._autocast.setdefault(str(torch.get_autocast_dtype("cpu")).removeprefix("torch."))

    def _add_update(self, optimizer: Optimizer) -> None:
        names = [packet.__name__ for packet in self._packets]
        kinds = [kind for kind in ("fused", "foreach") if any(name.startswith(f"_{kind}_") for name in names)]
        self._updates.setdefault(f"{type(optimizer).__name__} {kinds[0] if kinds else 'in a loop'}")


@final
class _ObservedOps(TorchDispatchMode):
    def __init__(self, observer: StepObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "namespace", "") == "aten":
            self._observer.add_op(func.overloadpacket, args)
        return func(*args, **(kwargs or {}))


@final
class _ObservedCalls(TorchFunctionMode):
    """Sees calls before autocast, which hides from the ops that it casts for."""

    def __init__(self, observer: StepObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            self._observer.add_call()
        return func(*args, **(kwargs or {}))
