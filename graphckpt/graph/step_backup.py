"""Copies what forward and backward of one step may change, and restores it in place."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.engine.call_state import get_rng_state, rng_devices, set_rng_state
from graphckpt.engine.objects import CONTAINERS, fill
from graphckpt.graph.module_tree import ModuleTree
from graphckpt.training_state import overwrite
from graphckpt.tree import tensors_in

if TYPE_CHECKING:
    from graphckpt.graph.step import Step


@final
class StepBackup:
    """The state before a step, without parameters and optimizer states, which only the update changes.

    It copies buffers, tensors that are attributes of modules, and the RNG states of the host and of the devices: as
    many bytes as the buffers have. Attributes and containers of modules are copied one level deep.

    Args:
        step: The step of a Graph.
        fields: The attributes of the Graph.
        inputs: The arguments of the call, which are kept as they are.
    """

    def __init__(self, step: Step, fields: dict[str, Any], inputs: Any) -> None:
        self._step = step
        roots = step.roots.values()
        if step.module_tree is None or not step.module_tree.is_of(roots):
            step.module_tree = ModuleTree(roots)
        tree = step.module_tree
        self._children = tree.children
        parameters, values = tree.parameters(), tree.attributes()
        devices = () if torch.accelerator.current_accelerator() is None else rng_devices(parameters)
        self._random = get_rng_state(devices, host=True)
        self._items: list[tuple[Any, Any]] = [(owner, owner.copy()) for owner in (fields, *tree.dictionaries)]
        # by type: an object's own __getattribute__ would answer isinstance, such as that of a Transformers config
        containers = [value for value in (*fields.values(), *values) if issubclass(type(value), CONTAINERS)]
        self._containers = [(value, copy.copy(value)) for value in containers]
        tensors = [value for value in values if issubclass(type(value), torch.Tensor)]
        renormalized = [m.weight for m in tree.renormalized]
        self._copies = [(t, t.detach().clone()) for t in (*tree.buffers(), *tensors, *renormalized)]
        fixed = [*parameters, *tensors_in(inputs)]
        if self._copies:
            known = {id(tensor) for tensor, _ in self._copies}
            fixed = [tensor for tensor in fixed if id(tensor) not in known]
        try:
            self._versions = [(tensor, tensor._version) for tensor in fixed]
        except RuntimeError:  # inference tensors have none
            self._versions = [(tensor, tensor._version) for tensor in fixed if not tensor.is_inference()]
        self._num_replays = self._count_replays()

    def _count_replays(self) -> int:
        captured = self._step.captured
        return 0 if captured is None else captured.captures.num_replays

    def lasting_change(self) -> str | None:
        """Returns what the step has changed that cannot be restored, or ``None``."""
        if self._step.update.has_begun or self._count_replays() != self._num_replays:
            return "the update of the parameters had begun"
        if any(tensor._version != version for tensor, version in self._versions):
            return "the step had modified a parameter or an input in place"
        return None

    def restore(self) -> None:
        """Restores all of it. May be called several times."""
        for owner, content in (*self._children, *self._items, *self._containers):
            fill(owner, content)
        for tensor, copied in self._copies:
            overwrite(tensor, copied)
        set_rng_state(self._random)
