"""What follows backward in a training step: average, unscale, clip, step, zero, schedule; each once, in this order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from graphckpt.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_CLIP = "clip_grad_max_norm"
_Entry: TypeAlias = tuple[torch.optim.Optimizer, LRScheduler | None, list[torch.Tensor], list[dict[str, Any]]]
# an optimizer, its scheduler, its parameters, and those of its groups that are clipped


@final
class Update:
    """The optimizers of a Graph, with their schedulers, and the scaler of their gradients."""

    def __init__(self, graph_name: str) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[LRScheduler | None] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.num_steps = 0
        self._graph_name = graph_name
        self._entries: list[_Entry] = []

    def add(self, optimizer: Any, scheduler: Any) -> None:
        """Adds an optimizer and its scheduler. See :meth:`graphckpt.Graph.add_optimizer`."""
        where = f"{self._graph_name}.add_optimizer"
        if optimizer is None:
            raise GraphError(f"{where}: optimizer cannot be None · fix: pass a torch.optim.Optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise GraphError(f"{where}: {type(optimizer).__name__} is no Optimizer · fix: pass a torch.optim.Optimizer")
        if scheduler is not None:
            if not isinstance(scheduler, LRScheduler):
                raise GraphError(
                    f"{where}: lr_sch {type(scheduler).__name__} is no LRScheduler · fix: pass one, or None"
                )
            if isinstance(scheduler, ReduceLROnPlateau):
                raise GraphError(
                    f"{where}: ReduceLROnPlateau needs a metric, which a Graph does not have · "
                    "fix: leave it out and call its step(metric) after the graph"
                )
            if scheduler.optimizer is not optimizer:
                raise GraphError(f"{where}: lr_sch belongs to another optimizer · fix: pass the scheduler of this one")
        taken = {id(p): number for number, other in enumerate(self.optimizers) for p in parameters_of(other)}
        if any(id(p) in taken for p in parameters_of(optimizer)):
            raise GraphError(f"{where}: a parameter is in two optimizers · fix: give each parameter to one of them")
        for group in optimizer.param_groups:
            if "clip_grad_norm_type" in group and _CLIP not in group:
                raise GraphError(
                    f"{where}: a param group has clip_grad_norm_type without clip_grad_max_norm · fix: add it"
                )
        self.optimizers.append(optimizer)
        self.schedulers.append(scheduler)

    def prepare(self) -> None:
        """Reads the optimizers' groups, once before the first step and again after a change."""
        self._entries = [
            (
                optimizer,
                scheduler,
                list(parameters_of(optimizer)),
                [g for g in optimizer.param_groups if _CLIP in g],
            )
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True)
        ]

    def begin(self) -> None:
        """Before backward: gradients that an earlier step outside of the graph left behind must not be added to."""
        for entry in self._entries:
            if entry[2][0].grad is not None:
                entry[0].zero_grad()

    def abandon(self) -> None:
        """After an error: no half of a gradient is left to the next step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def apply(self) -> None:
        """After backward: the step itself.

        Raises:
            GraphError: No parameter has a gradient.
        """
        for entry in self._entries:  # loops, not any(): a generator costs half a microsecond a step
            if _has_gradient(entry[2]):
                break
        else:
            raise GraphError(
                f"{self._graph_name}.build ran no backward that reached a parameter of its optimizers · "
                "fix: call loss.backward() in build"
            )
        if self.scaler is not None and self.scaler.is_enabled():
            if self._step_scaled(self.scaler):  # overflow: the step was skipped, and the schedule waits too
                return
        else:
            for optimizer, _, _, clipped in self._entries:
                if clipped:
                    _clip(clipped)
                optimizer.step()
        for optimizer, scheduler, _, _ in self._entries:
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        self.num_steps += 1

    def average(self, num_micro_batches: int) -> None:
        """Divides the gradients, which are sums over the micro-batches, by their number."""
        for _, _, parameters, _ in self._entries if num_micro_batches > 1 else ():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / num_micro_batches)

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        reached = [entry for entry in self._entries if _has_gradient(entry[2])]
        for optimizer, _, _, clipped in reached:
            scaler.unscale_(optimizer)
            _clip(clipped)
            scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        overflowed = scaler.get_scale() < scale
        if overflowed:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of optimizers, schedulers and scaler, and the number of steps taken."""
        state: dict[str, Any] = {"System-Train-TrainStep": torch.tensor(self.num_steps)}
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            state[f"System-Train-Optimizer-{number}"] = optimizer.state_dict()
            if scheduler is not None:
                state[f"System-Train-LRScheduler-{number}"] = scheduler.state_dict()
        if self.scaler is not None:
            state["System-Train-GradScaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned; the keys must be the same."""
        self.num_steps = int(state["System-Train-TrainStep"])
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            optimizer.load_state_dict(state[f"System-Train-Optimizer-{number}"])
            if scheduler is not None:
                scheduler.load_state_dict(state[f"System-Train-LRScheduler-{number}"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["System-Train-GradScaler"])

    @contextmanager
    def forbidding_steps(self) -> Iterator[None]:
        """Makes ``optimizer.step()`` an error while ``build`` runs. One call shows whether ``build`` does that."""

        def refuse(*_: Any) -> None:
            raise GraphError(
                f"{self._graph_name}.build called optimizer.step(), which the graph does itself after build · "
                "fix: remove it"
            )

        hooks = [optimizer.register_step_pre_hook(refuse) for optimizer in self.optimizers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@final
class ScaledBackward(TorchFunctionMode):
    """Scales every loss whose ``backward()`` is called in ``build``."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.count = 0
        self._scaler = scaler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            self.count += 1
            args = (self._scaler.scale(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _has_gradient(parameters: list[torch.Tensor]) -> bool:
    for parameter in parameters:
        if parameter.grad is not None:
            return True
    return False


def _clip(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        torch.nn.utils.clip_grad_norm_(group["params"], group[_CLIP], group.get("clip_grad_norm_type", 2.0))


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Yields the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]
