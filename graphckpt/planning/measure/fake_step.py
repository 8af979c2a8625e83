"""Measures a step for an absent device: on fake tensors, with the kernels, allocator and rates of that device."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.planning.candidates import OpTimes
from graphckpt.planning.measure.clock import record_ops
from graphckpt.planning.measure.trace import Trace, TracedStore, traced
from graphckpt.planning.model.memory_model import StepSample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from graphckpt.planning.candidates import Option
    from graphckpt.planning.device.fake_device import FakeDevice
    from graphckpt.planning.measure.instrument import Blocks
    from graphckpt.stores.base import Offload


@final
class FakeStep:
    """A training step whose model, optimizer and inputs were created inside of ``device``.

    Args:
        device: the absent device.
        model: the model that is trained.
        step_fn: runs forward, backward and optimizer once.
        optimizer: the one in ``step_fn``, or a list of them; their state is created at once.
    """

    def __init__(
        self,
        device: FakeDevice,
        model: nn.Module,
        step_fn: Callable[[], object],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> None:
        self._device = device
        self._model = model
        self._step_fn = step_fn
        self._optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        with device:
            self._workspace = torch.empty(device.machine.workspace_bytes, dtype=torch.uint8)
            self._make_optimizer_state()

    @property
    def device_name(self) -> str:
        return self._device.machine.name

    @property
    def no_copies(self) -> str:
        """Says that the profile lacks rates."""
        return f"offload: {self.device_name} has no rates of copies in its profile"

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        rates = target.rates(self._device.machine)
        return rates if min(rates) > 0 else None

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Traces the step with one option on each block."""
        stores = {far: TracedStore(is_far=far) for far in (False, True)}
        learns = any(b.is_floating_point() for module in blocks.modules for b in module.buffers())
        with self._device, blocks.under(options, lambda option: stores[option.is_far], learns=learns):
            if learns:  # a first run finds buffers that change, such as the statistics of BatchNorm
                self._step_fn()
            trace = self._trace()
            with traced(stores.values(), trace), blocks.marked(trace), trace:
                self._step_fn()
        return StepSample(trace, dict(stores[True].far_bytes), trace.seconds, sum(trace.seconds.values()))

    def available_bytes(self, static: int) -> int:
        del static
        return self._device.machine.memory_bytes

    def restoring(self) -> AbstractContextManager[None]:
        """Does nothing: a fake step has no values."""
        return nullcontext()

    def run(self) -> tuple[int, float]:
        """Runs the step with the policies that its model has; returns the peak in bytes and the seconds."""
        with self._device:
            if any(buffer.is_floating_point() for buffer in self._model.buffers()):
                self._step_fn()  # finds those that change
            trace = self._trace()
            with trace:
                self._step_fn()
        return trace.peak_bytes, sum(trace.seconds.values())

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        """Runs the step once, and estimates the time of each op of the blocks."""
        with self._device:
            return record_ops(blocks, self._step_fn, torch.device("cpu"), self._device.machine.op_seconds)

    def repeat_longest(self, blocks: Blocks, orders: Sequence[Sequence[int]]) -> bool:
        """Returns False: a fake step draws no numbers."""
        del blocks, orders
        return False

    @contextmanager
    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> Iterator[bool]:
        """Removes the other blocks from their ``nn.ModuleList``, and yields whether the step runs without them."""
        chosen = {id(blocks.modules[number]) for number in numbers}
        others = {id(module) for module in blocks.modules} - chosen
        lists = [m for m in self._model.modules() if others & {id(child) for child in m.children()}]
        if not lists or not all(isinstance(each, nn.ModuleList) for each in lists):
            yield False
            return
        whole = [(each, dict(each._modules)) for each in lists]
        try:
            for each, modules in whole:
                rest = [module for module in modules.values() if id(module) not in others]
                each._modules.clear()
                each._modules.update({str(number): module for number, module in enumerate(rest)})
            yield self._runs()
        finally:
            for each, modules in whole:
                each._modules.clear()
                each._modules.update(modules)

    def _runs(self) -> bool:
        try:
            with self._device:
                self._step_fn()
        except Exception:
            return False
        return True

    def _trace(self) -> Trace:
        machine = self._device.machine
        trace = Trace(
            "meta",
            is_fake=True,
            rounded=machine.rounded,
            seconds=machine.op_seconds,
            extra_bytes=machine.op_extra_bytes,
        )
        states = [each for optimizer in self._optimizers for each in optimizer.state.values()]
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        gradients = [parameter.grad for parameter in self._model.parameters()]
        trace.track([self._workspace, *self._model.parameters(), *self._model.buffers(), *gradients, *state])
        return trace

    def _make_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            if optimizer.state:
                continue
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
