"""Runs a step on a device that is not there: on fake tensors, with that device's kernels, allocator and rates."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from graphckpt.planning.measure.op_trace import record_ops
from graphckpt.planning.measure.trace import Trace
from graphckpt.planning.measure.traced_store import TracedStore, traced
from graphckpt.planning.model.measured_step import StepSample
from graphckpt.planning.model.op_times import OpTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from graphckpt.planning.device.fake_device import FakeDevice
    from graphckpt.planning.measure.instrument import Blocks
    from graphckpt.planning.option import Option


@final
class FakeStep:
    """A training step whose model, optimizer and inputs were made inside of ``device``.

    Args:
        device: stands for the device.
        model: what is trained.
        step_fn: runs forward, backward and optimizer once.
        optimizer: the one in ``step_fn``, if there is one; its state is made at once.
    """

    def __init__(
        self, device: FakeDevice, model: nn.Module, step_fn: Callable[[], object], optimizer: Optimizer | None = None
    ) -> None:
        self._device = device
        self._model = model
        self._step_fn = step_fn
        self._optimizer = optimizer
        with device:
            self._workspace = torch.empty(device.machine.workspace_bytes, dtype=torch.uint8)
            self._make_optimizer_state()

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Runs the step with one option on each block."""
        stores = {far: TracedStore(is_far=far) for far in (False, True)}
        learns = any(b.is_floating_point() for module in blocks.modules for b in module.buffers())
        with self._device, blocks.under(options, lambda option: stores[option.is_far], learns=learns):
            if learns:  # a first run alone shows what moves, such as the statistics of BatchNorm
                self._step_fn()
            trace = self._trace()
            with traced(stores.values(), trace), blocks.marked(trace), trace:
                self._step_fn()
        return StepSample(trace, dict(stores[True].far_bytes), trace.seconds, sum(trace.seconds.values()))

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        """Runs the step once, and reckons what each op of the blocks takes."""
        with self._device:
            return record_ops(blocks, self._step_fn, lambda: 0.0, self._device.machine.op_seconds)

    @contextmanager
    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> Iterator[bool]:
        """Takes the other blocks out of the lists in which they stand, and tries whether the step runs so."""
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
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        gradients = [parameter.grad for parameter in self._model.parameters()]
        trace.track([self._workspace, *self._model.parameters(), *self._model.buffers(), *gradients, *state])
        return trace

    def _make_optimizer_state(self) -> None:
        if self._optimizer is None or self._optimizer.state:
            return
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
