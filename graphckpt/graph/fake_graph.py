"""Runs the step of a Graph on fake tensors, which take no memory."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt._compat import pytree
from graphckpt.errors import PlanError
from graphckpt.planning.fake_device import FakeDevice
from graphckpt.planning.profile import DeviceProfile, load_profile, profile_names
from graphckpt.planning.steps import FakeStep

if TYPE_CHECKING:
    from graphckpt.graph.step import Step

_ANY_CUDA = "a100-80g"  # for a device without a profile: sizes are the same, times differ by similar factors


@contextmanager
def fake_training(
    step: Step,
    model: nn.Module,
    fields: dict[str, Any],
    build: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    machine: DeviceProfile | None = None,
) -> Iterator[FakeStep]:
    """Yields the step of a Graph on fake tensors. The caller restores modules and RNG state afterwards.

    Args:
        step: Its parameters, buffers and optimizers are replaced in the ``with`` block.
        model: The modules of the Graph as one module.
        fields: The attributes of the Graph.
        build: Its method ``build``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        machine: Profile of a device that may be absent; ``None`` is one like that of the model.

    Raises:
        PlanError: A tensor of the step is of a subclass.
    """
    update = step.update
    parts = update.parts()
    device = FakeDevice(machine or _profile_of(next(model.parameters()).device))
    try:
        with device:
            fakes = _Fakes()
            for module in model.modules():
                owners: list[dict[str, Any]] = [vars(module), vars(module)["_parameters"], vars(module)["_buffers"]]
                for owner in owners:
                    owner.update({key: fakes.of(v) for key, v in owner.items() if isinstance(v, torch.Tensor)})
            args, kwargs = pytree.tree_map_only(torch.Tensor, fakes.of, (args, kwargs))
            optimizers = [_fake_optimizer(optimizer, fakes) for optimizer in update.optimizers]
        update.take_over((optimizers, [None] * len(optimizers), None, 0))
        step.sort_parameters()

        def run() -> None:
            outputs: list[Any] = []  # alive until the end of the step, as those of the Graph
            step.call(fields, lambda *a, **k: outputs.append(build(*a, **k)), args, kwargs)

        yield FakeStep(device, model, run, optimizers)
    finally:
        update.take_over(parts)
        update.abandon()


@final
class _Fakes:
    def __init__(self) -> None:
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of a tensor; on the CPU, where the tensors of a :class:`FakeDevice` are."""
        entry = self._fakes.get(id(tensor))
        if entry is not None:
            return entry[1]
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise PlanError(f"a tensor of type {type(tensor).__name__} cannot be planned without memory")
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        fake.requires_grad_(tensor.requires_grad)
        fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        self._fakes[id(tensor)] = tensor, fake
        return fake


def _fake_optimizer(optimizer: Optimizer, fakes: _Fakes) -> Optimizer:
    fake = copy.copy(optimizer)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(fake, name, OrderedDict())
    to_fake = partial(pytree.tree_map_only, torch.Tensor, fakes.of)
    fake.param_groups = [to_fake(dict(group)) for group in optimizer.param_groups]
    fake.state = defaultdict(dict, {fakes.of(p): to_fake(dict(state)) for p, state in optimizer.state.items()})
    return fake


def _profile_of(device: torch.device) -> DeviceProfile:
    if device.type != "cuda":
        return load_profile("cpu")
    device_name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    return load_profile(next((name for name in profile_names() if name.split("-")[0] in device_name), _ANY_CUDA))
