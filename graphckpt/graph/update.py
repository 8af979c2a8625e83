"""Updates parameters after backward: average, unscale, clip, step, zero, schedule; each once, in this order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, final
from weakref import ref

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from graphckpt._compat import forget_half_a_step, forget_hook
from graphckpt.errors import GraphError
from graphckpt.undo import Undo, scope

# Note [The order of an update]
# With 4 micro-batches and a scale of 65536, a gradient g is 4 * 65536 g after the last backward. Then
#
#     average     65536 g   is within what a capture contains, as the backwards are
#     unscale     g         or an infinity: then neither this optimizer nor the schedule steps, and the scale falls.
#                           From here on the step cannot be repeated after an out-of-memory error (`has_begun`)
#     clip        g'        by the norm of true gradients, as the user means it
#     step                  the parameters change
#     zero                  before the next forward, so that gradients and activations are never alive together
#     schedule              after the step, as PyTorch asks

TotalNorm = Callable[[list[torch.Tensor], float], torch.Tensor]
"""Returns the norm of the gradients of parameters, of which other processes may hold some."""

_CLIP = "clip_grad_max_norm"
_CLIP_TYPE = "clip_grad_norm_type"


@final
class Update:
    def __init__(self, graph_name: str) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[LRScheduler | None] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.total_norm: TotalNorm | None = None
        """Of gradients that are sharded over processes; ``None`` where this one has all."""
        self.num_steps = 0
        self.is_of_graph = True
        """Whether a parameter of the optimizers is in a module of the Graph."""
        self.has_begun = False
        """Whether this step has begun to change parameters."""
        self._graph_name = graph_name
        self._checked: list[Any] = []  # the keys of each param group and what clips, when they were checked

    def add(self, optimizer: Any, scheduler: Any) -> None:
        where = f"{self._graph_name}.add_optimizer"
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = "None" if optimizer is None else type(optimizer).__name__
            raise GraphError(f"{where}: expected a torch.optim.Optimizer, got {kind} · fix: pass one")
        fault = _fault(optimizer, scheduler)
        managed = {id(p) for p in self.parameters()}
        if fault is None and any(id(p) in managed for p in _parameters_of(optimizer)):
            fault = "a parameter is in two optimizers · fix: give each parameter to one of them"
        if fault := fault or _clipping_fault(optimizer):
            raise GraphError(f"{where}: {fault}")
        self.optimizers.append(optimizer)
        self.schedulers.append(scheduler)

    # The loops below read the groups anew on every step: users add groups, edit them and load states. They are plain
    # loops, since a generator costs half a microsecond a step.

    def begin(self) -> None:
        """Before backward: gradients that an earlier step outside of the graph left behind must not be added to."""
        self.has_begun = False
        clipping: list[Any] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                clipping.append((*group, group.get(_CLIP), group.get(_CLIP_TYPE)))
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        zero(optimizer)
                        break
        # Something has changed since the last check. To compare it in each step takes less time than a check.
        if clipping != self._checked:
            for optimizer in self.optimizers:
                if (fault := _clipping_fault(optimizer)) is not None:
                    raise GraphError(f"{self._graph_name}: {fault}")
            self._checked = clipping

    def abandon(self) -> None:
        """After an error: no half of a gradient is left to the next step."""
        for optimizer in self.optimizers:
            zero(optimizer)
        if self.scaler is not None:
            forget_half_a_step(self.scaler)

    def apply(self) -> None:
        """After backward: the step itself."""
        optimizers = self.optimizers
        for optimizer in optimizers:
            if has_gradient(optimizer):
                break
        else:
            what = "no backward in build reached a parameter of its optimizers"
            fix = "call loss.backward() in build, and no zero_grad() after it"
            if not self.is_of_graph:
                what = "the parameters of its optimizers are not those of its modules"
                fix = "create the optimizer from the Graph's model"
            raise GraphError(f"{self._graph_name}: {what} · fix: {fix}")
        if self.step(optimizers):
            self.schedule()

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Clips, steps and zeroes; ``False`` after an overflow: the step was skipped, and the schedule waits too."""
        self.has_begun = True
        scaler = self.scaler
        if scaler is not None and scaler.is_enabled():
            step_scaled(scaler, optimizers)
            # `GradScaler.step` does not return whether it has skipped the step (pytorch#152279). `update` lowers the
            # scale after a skipped one, and never after another.
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() < scale:
                self.abandon()
                return False
        else:
            for optimizer in optimizers:
                clip(optimizer, self.total_norm)
                optimizer.step()
        for optimizer in optimizers:
            zero(optimizer)
        return True

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            if scheduler is not None:
                scheduler.step()
        self.num_steps += 1

    def average(self, num_micro_batches: int) -> None:
        """Divides the gradients, which are sums over the micro-batches, by their number."""
        for parameter in self.parameters() if num_micro_batches > 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / num_micro_batches)

    def parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            yield from _parameters_of(optimizer)

    def num_groups(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self.optimizers)

    def parts(self) -> tuple[Any, ...]:
        """Returns the objects that a copy of the graph shares or copies."""
        return self.optimizers, self.schedulers, self.scaler, self.num_steps

    def take_over(self, parts: tuple[Any, ...]) -> None:
        optimizers, schedulers, self.scaler, self.num_steps = parts
        self.optimizers, self.schedulers = list(optimizers), list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"System-Train-TrainStep": torch.tensor(self.num_steps)}
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            state[f"System-Train-Optimizer-{number}"] = optimizer.state_dict()
            if scheduler is not None:
                state[f"System-Train-LRScheduler-{number}"] = scheduler.state_dict()
        if self.scaler is not None:
            state["System-Train-GradScaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`; the state of missing keys does not change."""
        if "System-Train-TrainStep" in state:
            self.num_steps = int(state["System-Train-TrainStep"])
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            for kind, stateful in (("Optimizer", optimizer), ("LRScheduler", scheduler)):
                if stateful is not None and f"System-Train-{kind}-{number}" in state:
                    stateful.load_state_dict(state[f"System-Train-{kind}-{number}"])
        if self.scaler is not None and "System-Train-GradScaler" in state:
            self.scaler.load_state_dict(state["System-Train-GradScaler"])

    @scope
    def forbidding_steps(self, undo: Undo) -> Iterator[None]:
        """Makes ``optimizer.step()`` an error while ``build`` runs. One call shows whether ``build`` does that."""

        def refuse(*_: Any) -> None:
            raise GraphError(
                f"{self._graph_name}.build called optimizer.step(), which the graph does itself after build · "
                "fix: remove it"
            )

        for optimizer in self.optimizers:
            undo.append((forget_hook, (ref(optimizer), refuse)))
            optimizer.register_step_pre_hook(refuse)
        yield


@final
class ScaledBackward(TorchFunctionMode):
    """Scales each loss whose ``backward()`` is called within it, and counts them."""

    # A mode and not a patch of `Tensor.backward`: it acts in this thread alone, and ends with the `with` block whatever
    # `build` raises. `torch.autograd.backward(loss)` does not pass through it; `Step` raises if it has counted nothing.

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.count = 0
        self._scaler = scaler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            self.count += 1
            args = (self._scaler.scale(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def step_scaled(scaler: torch.amp.GradScaler, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if has_gradient(optimizer):
            scaler.unscale_(optimizer)
            clip(optimizer)
            scaler.step(optimizer)


def zero(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in optimizer.__dict__:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:  # what zero_grad() does, without its 7 microseconds for the profiler
        for parameter in group["params"]:
            parameter.grad = None


def clip(optimizer: torch.optim.Optimizer, total_norm: TotalNorm | None = None) -> None:
    for group in optimizer.param_groups:
        if _CLIP in group:
            clip_grad_norm(group["params"], group[_CLIP], group.get(_CLIP_TYPE, 2.0), total_norm)


def _fault(optimizer: torch.optim.Optimizer, scheduler: Any) -> str | None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        what = f"{type(optimizer).__name__} runs the forward itself, several times a step"
        return f"{what} · fix: use it without a Graph, with graphckpt.apply"
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        return f"expected an LRScheduler as lr_sch, got {type(scheduler).__name__} · fix: pass one, or None"
    if isinstance(scheduler, ReduceLROnPlateau):
        return (
            "ReduceLROnPlateau needs a metric, which a Graph does not have · "
            "fix: leave it out and call its step(metric) after the graph"
        )
    if scheduler.optimizer is not optimizer:
        return "lr_sch belongs to another optimizer · fix: pass the scheduler of this one"
    return None


def _clipping_fault(optimizer: torch.optim.Optimizer) -> str | None:
    for group in optimizer.param_groups:
        for key in group:
            if key not in optimizer.defaults and (meant := _meant_for_clipping(key)):
                return f"a param group has {key!r}, which clips nothing: expected {meant!r} · fix: rename the key"
        if _CLIP_TYPE in group and _CLIP not in group:
            return f"a param group has {_CLIP_TYPE} without {_CLIP} · fix: add it"
        for key in (_CLIP, _CLIP_TYPE):
            value = group.get(key, 0)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                return f"{key} of a param group is {value!r} · fix: use a number, or leave the key out"
    return None


def _meant_for_clipping(key: str) -> str | None:
    """Returns the clipping key that ``key`` is a misspelling of, if it looks like one.

    >>> _meant_for_clipping("clip_grad_norm"), _meant_for_clipping("lr_scale")
    ('clip_grad_max_norm', None)
    """
    if key in {_CLIP, _CLIP_TYPE}:
        return None
    matches = get_close_matches(key.lower().strip("_"), [_CLIP, _CLIP_TYPE], n=1)
    return matches[0] if matches else _CLIP if "clip" in key.lower() else None


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@scope
def preserve_grads(undo: Undo, parameters: list[torch.Tensor]) -> Iterator[None]:
    """Does not change the gradients of parameters that no optimizer here has: they belong to another step."""
    for parameter in parameters:
        undo.append((setattr, (parameter, "grad", parameter.grad)))
        parameter.grad = None  # backward would add to what is there, in place
    yield


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, total_norm: TotalNorm | None = None
) -> None:
    """Scales gradients so that the norm over all of them is at most ``max_norm``; one that is cut counts as the whole.

    ``clip_grad_norm_`` alone refuses DTensors together with plain tensors, which is what tensor parallelism makes.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if total_norm is None and not any(map(_is_cut, set(map(type, grads)))):
        clip_grad_norm_(parameters, max_norm, norm_type)
        return
    total = _norm(grads, norm_type) if total_norm is None else total_norm(parameters, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as in PyTorch
    for grad in grads:
        local: Any = grad.to_local() if _is_cut(grad) else grad  # type: ignore[attr-defined]
        local.mul_(scale.to(local.device))


def _norm(grads: list[Any], norm_type: float) -> torch.Tensor:
    layouts: dict[Any, list[Any]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if _is_cut(grad) else None
        if layout is not None and not (local := grad.to_local()).numel():
            # A zero as its empty shard, which would have no infinity norm on this rank alone: the other ranks would
            # wait for it. The shape is that of the gradient, so all ranks reduce the norm in the same way.
            zero, shape, stride = local.new_zeros([1] * grad.ndim), grad.size(), grad.stride()
            grad = type(grad).from_local(zero, *layout, run_check=False, shape=shape, stride=stride)  # noqa: PLW2901
        layouts.setdefault(layout, []).append(grad)
    norms: list[Any] = [get_total_norm(alike, norm_type) for alike in layouts.values()]
    norms = [norm.full_tensor() if _is_cut(norm) else norm for norm in norms]  # over the processes that hold shards
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    return total


def _is_cut(tensor: torch.Tensor | type[torch.Tensor]) -> bool:
    return hasattr(tensor, "device_mesh")
