"""Optimizers of other libraries for simulated steps: the states, temporaries and traffic of each, without its values.

Their kernels need a GPU, or a compiler, neither of which a simulated step has. Block sizes, thresholds and types are
those of bitsandbytes 0.50 and torchao 0.18; the tests compare them with the libraries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, final

import torch
from torch.optim import Optimizer

from graphckpt.simulation import kernel_ops

_HOST = torch.device("cpu")
_LEAST_QUANTIZED = 4096  # elements; both libraries keep the states of a smaller tensor as they are
_LEAST_PAGED = 100_000  # elements; `Optimizer8bit.get_state_buffer`
_LEAST_OFFLOADED = 4096  # elements; `minimal_size` of `CPUOffloadOptimizer`
_CODES = 256  # values of a map of 8 bits


class KernelOptimizer(Optimizer, ABC):
    """Updates one parameter after another, each by a kernel that reads and writes it with its states."""

    title: ClassVar[str]
    """The optimizer in a line of assumptions."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if parameter.grad is not None:
                if not self.state[parameter]:
                    self.state[parameter].update(self._new_state(parameter))
                self._update(parameter, parameter.grad, self.state[parameter])

    @abstractmethod
    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]: ...

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        kernel_ops.update([parameter, *state.values()], [grad])


class AdamW8bit(KernelOptimizer):
    """``bitsandbytes.optim.AdamW8bit``: two states in 8 bits, with a maximum in float32 for each block of 256.

    Its subclasses are other optimizers of bitsandbytes with the same states, paged or in 32 bits.
    """

    title = "AdamW8bit of bitsandbytes, on blocks of 256"
    _bits = 8
    _block = 256
    _is_paged = False

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params)
        self._maps: list[torch.Tensor] = []

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        numel = parameter.numel()
        is_paged = self._is_paged and numel >= _LEAST_PAGED
        is_quantized = self._bits == 8 and numel >= _LEAST_QUANTIZED
        options: dict[str, Any] = {"dtype": torch.uint8 if is_quantized else torch.float32}
        if is_paged:
            options["device"] = _HOST
        states = {name: torch.zeros_like(parameter, **options) for name in ("state1", "state2")}
        if is_quantized:
            if not self._maps:  # one signed, one unsigned, which all parameters share
                self._maps = [parameter.new_empty(_CODES, dtype=torch.float32) for _ in range(2)]
            for number, codes in enumerate(self._maps, 1):
                states[f"qmap{number}"] = codes
                blocks = -(-numel // self._block)
                states[f"absmax{number}"] = parameter.new_zeros(blocks, dtype=torch.float32)
        return states

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        if not self._is_paged:
            super()._update(parameter, grad, state)
            return
        # Paged states are in managed memory of CUDA, which moves to the GPU for the update, and out of it when the next
        # step needs room. `to` returns the others as they are.
        resident = {name: value.to(parameter.device) for name, value in state.items()}
        super()._update(parameter, grad, resident)
        for name, value in state.items():
            if value is not resident[name]:
                value.copy_(resident[name])


@final
class PagedAdamW8bit(AdamW8bit):
    """``bitsandbytes.optim.PagedAdamW8bit`` on a GPU that is full: states of larger tensors are on the host."""

    title = "PagedAdamW8bit of bitsandbytes, whose states are on the host between updates, as on a card that is full"
    _is_paged = True


@final
class PagedAdamW32bit(AdamW8bit):
    """``bitsandbytes.optim.PagedAdamW32bit`` on a GPU that is full."""

    title = "PagedAdamW32bit of bitsandbytes, whose states are on the host between updates, as on a card that is full"
    _bits = 32
    _is_paged = True


class TorchaoAdamW8bit(KernelOptimizer):
    """``torchao.optim.AdamW8bit``: codes, a scale in float32 for each block of 256, and a map of its own a state.

    A tensor whose elements are not a multiple of the block has states of its own type. The update is one compiled
    function for each parameter, which is assumed to run without temporaries.
    """

    title = "AdamW8bit of torchao, on blocks of 256, compiled"
    _bits = 8
    _block = 256

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        numel = parameter.numel()
        if numel < _LEAST_QUANTIZED or numel % self._block:
            return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        states = {}
        for name in ("exp_avg", "exp_avg_sq"):
            states[f"{name}.codes"] = parameter.new_zeros(numel * self._bits // 8, dtype=torch.uint8)
            states[f"{name}.scale"] = parameter.new_zeros(numel // self._block, dtype=torch.float32)
            states[f"{name}.qmap"] = parameter.new_zeros(2**self._bits, dtype=torch.float32)
        return states


@final
class TorchaoAdamW4bit(TorchaoAdamW8bit):
    """``torchao.optim.AdamW4bit``, with a scale for each block of 128."""

    title = "AdamW4bit of torchao, on blocks of 128, compiled"
    _bits = 4
    _block = 128


@final
class AdamWBfloat16(KernelOptimizer):
    """AdamW with both states in bfloat16 beside weights of any type, as torchdistx's ``AnyPrecisionAdamW``."""

    title = "AdamW with states in bfloat16, one parameter after another"

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        # Any factors do: what counts are the kernels, and their temporaries.
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        parameter.mul_(0.99)
        mean.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.99).addcmul_(grad, grad, value=0.01)
        parameter.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)


@final
class AdamWMaster(KernelOptimizer):
    """AdamW with a copy of the weights and both states in float32, beside weights and gradients of another type.

    As DeepSpeed and Megatron train in bfloat16 or float16. The gradient of one parameter is in float32 at a time.
    """

    title = "AdamW with weights and states in float32 of its own"

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("master", "exp_avg", "exp_avg_sq")
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in names}

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        kernel_ops.update([*state.values()], [grad.float()])
        parameter.copy_(state["master"])


@final
class AdamWOffloaded(KernelOptimizer):
    """``torchao.optim.CPUOffloadOptimizer`` of AdamW: weights, gradients and states once more on the host.

    Gradients are copied to the host as the update begins; torchao copies them in backward, and hides a part of that.
    """

    title = "AdamW on the host (CPUOffloadOptimizer of torchao), with a copy of weights and gradients there"

    def _new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter.numel() < _LEAST_OFFLOADED:
            return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        names = ("weight", "exp_avg", "exp_avg_sq", "grad")
        return {name: torch.zeros_like(parameter, device=_HOST) for name in names}

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        if "grad" not in state:
            super()._update(parameter, grad, state)
            return
        *written, host_grad = state.values()  # in the order of `_new_state`
        host_grad.copy_(grad)
        kernel_ops.update(written, [host_grad])
        parameter.copy_(state["weight"])
