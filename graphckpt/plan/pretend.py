"""Runs a step on a device that is not there: on fake tensors, with that device's kernels, allocator and rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from graphckpt.plan.measure import Sample
from graphckpt.plan.trace import Trace
from graphckpt.plan.traced_store import TracedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from graphckpt.plan.fake import FakeDevice
    from graphckpt.plan.run import Blocks, Option


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
        self._learns = any(b.is_floating_point() for b in model.buffers())
        with device:
            self._workspace = torch.empty(device.machine.workspace_bytes, dtype=torch.uint8)
            self._make_optimizer_state()

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> Sample:
        """Runs the step with one option on each block."""
        stores = {far: TracedStore(is_far=far) for far in (False, True)}
        with self._device, blocks.under(options, lambda option: stores[option.is_far], learns=self._learns):
            if self._learns:  # what moves in a forward is seen by the first one alone
                self._step_fn()
            trace = self._trace()
            for store in stores.values():
                store.trace = trace
                store.far_bytes.clear()
            with blocks.marked(trace), trace:
                self._step_fn()
            for store in stores.values():
                store.trace = None
        return Sample(trace, dict(stores[True].far_bytes), trace.seconds, sum(trace.seconds.values()))

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
