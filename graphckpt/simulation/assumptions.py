"""Observes what a simulated step runs: the kernels of attention, autocast, and how the optimizers update.

They set its peak as much as the model: without a fused kernel attention keeps its weights, and an optimizer with
``foreach`` allocates temporaries of all parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphckpt.blocks.hooks import add_optimizer_hook
from graphckpt.simulation.allocations import OpSeconds
from graphckpt.simulation.op_costs import attention_kernel, side_of
from graphckpt.simulation.optimizers import KernelOptimizer
from graphckpt.tree import tensors_in
from graphckpt.undo import Undo, scope

_aten = torch.ops.aten

_ON_HOST = "tensors on the host (not counted; its ops at the rates of the profile cpu)"
_EAGER = "eager (softmax in the model)"


@final
class StepObserver:
    """Observes the ops of a step and its optimizers.

    Args:
        op_seconds: returns the seconds of an op, as :meth:`op_seconds` then does.
    """

    def __init__(self, op_seconds: OpSeconds) -> None:
        self._op_seconds = op_seconds
        self._attention: dict[str, None] = {}
        self._uses_host = False
        self._updates: dict[str, None] = {}
        # The ops, without their overloads, since the last call of an optimizer began.
        self._packets: set[Any] = set()
        # Elements and last dimension of the last softmax. It holds no tensor, which would change the peak.
        self._weights: tuple[int, int] | None = None

    @scope
    def observing_optimizers(self, undo: Undo) -> Iterator[None]:
        add_optimizer_hook(undo, lambda *_: self._packets.clear())
        add_optimizer_hook(undo, lambda optimizer, *_: self._add_update(optimizer), register_optimizer_step_post_hook)
        yield

    def assumptions(self, autocast: Iterable[torch.dtype]) -> tuple[str, ...]:
        """Returns phrases on attention, if any, autocast to these types, optimizers, and the host if it is used."""
        attention = (f"attention {' and '.join(self._attention)}",) if self._attention else ()
        types = " and ".join(str(dtype).removeprefix("torch.") for dtype in autocast)
        update = ", ".join(self._updates) or "no optimizer"
        return (*attention, f"autocast {types or 'off'}", update, *([_ON_HOST] if self._uses_host else ()))

    def op_seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        if getattr(func, "namespace", "") == "aten":
            self._add_op(func.overloadpacket, args)
            if not self._uses_host and side_of(func, args, result) != "device":
                tensors = tensors_in((args, result))
                self._uses_host = any(tensor.numel() > 1 for tensor in tensors)  # optimizers have their steps there
        return self._op_seconds(func, args, kwargs, result)

    def _add_op(self, packet: Any, args: tuple[Any, ...]) -> None:
        # Attention in the code of a model has no op of its own: it is a softmax whose result is multiplied next. Of 2
        # samples and 16 heads, (2, 16, 1024, 1024) reach `bmm` as (32, 1024, 1024), perhaps as a copy in another type:
        # that is known by the number of elements and the last dimension. A router's softmax has two dimensions.
        self._packets.add(packet)
        if (kernel := attention_kernel(packet)) is not None:
            self._attention.setdefault(kernel)
        elif packet is _aten._safe_softmax:  # nothing else calls it
            self._attention.setdefault("math")
        elif packet is _aten._softmax and args[0].dim() > 2:
            self._weights = args[0].numel(), args[0].shape[-1]
        elif packet is _aten.bmm and self._weights == (args[0].numel(), args[0].shape[-1]):
            self._attention.setdefault(_EAGER)
            self._weights = None

    def _add_update(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, KernelOptimizer):
            self._updates.setdefault(optimizer.title)
            return
        names = [packet.__name__ for packet in self._packets]
        kinds = [kind for kind in ("fused", "foreach") if any(name.startswith(f"_{kind}_") for name in names)]
        self._updates.setdefault(f"{type(optimizer).__name__} {kinds[0] if kinds else 'in a loop'}")
