"""``graphckpt.verify``: compares the steps of a user's loop under policies with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Never, final
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from graphckpt._compat import forget_hook
from graphckpt.blocks.apply import Policies, apply
from graphckpt.blocks.forward import BlockForward, disable_checkpointing, policy_of
from graphckpt.blocks.proxy import unwrap
from graphckpt.checks.comparison import UNSTABLE_FIX, Stateful, StepState, Values, Verification, compare, outputs_of
from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError, check_keywords, shown
from graphckpt.reached import Restore, StepReach, check_restore, model_of, reached_by
from graphckpt.training_state import on_optimizer_step
from graphckpt.undo import Undo, enter, scope

_SAME_BATCH = "let step_fn compute on the same batch in every call, and pass in `stateful` what else it changes"
_UNSTABLE_FIX = f"{UNSTABLE_FIX}; or {_SAME_BATCH}"


@without_value_checks()
def verify(  # noqa: D417 - `unknown` is for arguments that it does not have
    model: nn.Module,
    step_fn: Callable[[], Any],
    policies: Policies | None = None,
    *,
    steps: int = 3,
    stateful: Iterable[Stateful] = (),
    restore: Iterable[Any] | None = None,
    show: bool = False,
    **unknown: Never,
) -> Verification:
    """Compares training steps under policies with plain ones, in every bit.

    Each step runs twice from one state, with policies and without: what ``step_fn`` returns, gradients, parameters,
    buffers, numbers among the attributes of modules, optimizer states and RNG states must then be equal. Before the
    second run, and at the end, everything is put back as by :func:`graphckpt.plan`: the model, its gradients and
    attributes, optimizers, RNG states, and what ``step_fn`` reaches by its variables.

    Copies of them take memory: about four times the bytes of parameters, gradients and optimizer states, and three
    times those of other tensors, on the host. A small batch shows the same as a large one.

    Args:
        model: The model that ``step_fn`` trains.
        step_fn: Runs a forward and a backward on one and the same batch, and may step optimizers. What it returns is
            compared too: a loss, or any nested structure of tensors and numbers.
        policies: As :func:`graphckpt.apply` takes them, and only for these steps; ``None`` are those that the model
            has.
        steps: The number of steps, each from where the last one ended. The first one differs from the others: it
            creates optimizer states, and blocks learn in it what moves.
        stateful: What else ``step_fn`` changes, by its ``state_dict`` and ``load_state_dict``: objects whose state is
            not in their attributes.
        restore: Objects that ``step_fn`` changes and that are not found, as of :func:`graphckpt.plan`.
        show: Whether to print the result, too.

    Raises:
        ConfigError: The model has no policies, an argument cannot be used, or ``step_fn`` runs no backward of a block
            with a policy, so that the comparison would show nothing.
        GraphError: Something differs. The message names the step, the tensor that differs first and by how much, and,
            as far as a further step with all recomputations compared finds them, the block, the op and the line that
            cause it; or it says that two plain steps differ as well.

    >>> import graphckpt
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> x = torch.ones(2, 4)
    >>> def step():
    ...     loss = model(x).sum()
    ...     loss.backward()
    ...     return loss
    >>> graphckpt.verify(model, step, {"*": True}, steps=2)
    bitwise equal to the plain step: loss, 4 gradients, 4 parameters, RNG (2 steps, 20 tensors, 10.3 KiB)
    """
    check_keywords(verify, unknown)
    model = unwrap(model)
    objects = _checked(model, step_fn, steps, stateful)
    check_restore(restore, "verify")
    with nullcontext() if policies is None else apply(model, policies):
        # Whatever has given them: `policies`, or an `apply` or a plan before.
        wrappers = [wrapper for module in model.modules() if (wrapper := policy_of(module)) is not None]
        if not wrappers:
            what = "expected a model with policies, got one without"
            raise ConfigError(f"verify: {what} · fix: verify(model, step_fn, True), or apply() policies first")
        loop = _Loop(model, step_fn, objects, restore)
        num_calls = _num_calls(wrappers)
        start = loop.snapshot()
        try:
            with loop.watching():
                result = compare("verify", loop.run, partial(_plain, wrappers), loop.snapshot, steps, _UNSTABLE_FIX)
        finally:
            start.put_back()
        # Steps that are equal since no policy had an effect would be taken for a proof.
        if _num_calls(wrappers) == num_calls and not any(wrapper.is_in_graph for wrapper in wrappers):
            what = "expected a step_fn that calls blocks with a policy, with gradients on; it called none"
            raise ConfigError(f"verify: {what} · fix: call this model in step_fn, without torch.no_grad()")
        if not loop.has_backward:
            what = "expected a step_fn that runs a backward, but no gradient of a parameter was computed"
            raise ConfigError(f"verify: {what} · fix: loss.backward() in step_fn")
    if show:
        print(result)
    return result


def _checked(model: Any, step_fn: Any, steps: Any, stateful: Any) -> list[Stateful]:
    """Refuses arguments that cannot be compared; returns the stateful objects."""
    how = "fix: verify(model, step_fn, policies)"
    if not isinstance(model, nn.Module):
        raise ConfigError(f"verify: expected an nn.Module, got {shown(model)} · {how}")
    if not callable(step_fn):
        raise ConfigError(f"verify: expected a function that runs a training step, got {shown(step_fn)} · {how}")
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"verify.steps: expected an integer of at least 1, got {shown(steps)} · fix: steps=3")
    is_one = hasattr(stateful, "state_dict")
    objects = [stateful] if is_one or not isinstance(stateful, Iterable) else list(stateful)
    if is_one or not all(hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in objects):
        what = f"expected a list of objects with state_dict() and load_state_dict(), got {shown(stateful)}"
        raise ConfigError(f"verify.stateful: {what} · fix: stateful=[scheduler, scaler]")
    # What has no values yet gets them in the first step, and could not be put back to none.
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            fix = "run one forward before" if is_lazy(tensor) else "model.to_empty(device=...), and set the weights"
            raise ConfigError(f"verify: expected values in all parameters and buffers, `{name}` has none · fix: {fix}")
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        what = f"expected modules of Python, whose attributes can be put back, `{scripted[0]}` is a ScriptModule"
        raise ConfigError(f"verify: {what} · fix: leave torch.jit.script out")
    return objects


@scope
def _plain(undo: Undo, wrappers: Sequence[BlockForward]) -> Iterator[None]:
    undo += [(wrapper.install, ()) for wrapper in reversed(wrappers)]
    for wrapper in wrappers:
        wrapper.uninstall()
    enter(undo, disable_checkpointing())  # also of what checkpoint() wraps
    yield


def _num_calls(wrappers: Iterable[BlockForward]) -> int:
    return sum(wrapper.num_calls for wrapper in wrappers)


@final
class _Loop:
    """A step of a user's loop: its results, gradients among them, and copies of its state."""

    def __init__(
        self, model: nn.Module, step_fn: Callable[[], Any], stateful: Iterable[Stateful], restore: Restore
    ) -> None:
        self._model = model
        self._step_fn = step_fn
        self._restore = restore
        self._stateful = stateful
        self._optimizers: list[Optimizer] = []
        self._snapshots: list[StepState] = []
        self._gradients: dict[str, torch.Tensor] = {}
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.has_backward = not self._trained
        """Whether a backward has reached a parameter, if any is trained."""

    @scope
    def watching(self, undo: Undo) -> Iterator[None]:
        """Sees each optimizer before its update: its state is to be copied, and its gradients may be freed after it."""
        for parameter in self._trained:
            hook = partial(self._see_gradient)  # an object of its own, by which it is found
            undo.append((forget_hook, (ref(parameter), hook)))
            parameter.register_hook(hook)
        enter(undo, on_optimizer_step(self._before_update))
        yield

    def _see_gradient(self, _: torch.Tensor) -> None:
        self.has_backward = True

    def _before_update(self, optimizer: Optimizer) -> None:
        # Nobody passes the optimizers: each is known from its first update on, before which its state is still that of
        # the snapshots, of the start and of the present step.
        for snapshot in self._snapshots:
            snapshot.add(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._gradients |= self._present_gradients({p for group in optimizer.param_groups for p in group["params"]})

    def _present_gradients(self, among: Container[nn.Parameter] | None = None) -> dict[str, torch.Tensor]:
        return {
            # By the names of the present: a step may replace parameters.
            f"gradient of {name}": parameter.grad.detach().clone()
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and (among is None or parameter in among)
        }

    def run(self) -> Values:
        self._gradients = {}
        outputs = outputs_of(self._step_fn())
        gradients = {**self._present_gradients(), **self._gradients}
        self.has_backward |= bool(gradients)
        return {**outputs, "gradient": gradients, **self._state().values()}

    def snapshot(self) -> StepState:
        state = self._state(self._stateful, reached_by(self._step_fn, self._model, self._restore, "verify"))
        self._snapshots = [*self._snapshots[:1], state]
        return state

    def _state(self, stateful: Iterable[Stateful] = (), reached: StepReach | None = None) -> StepState:
        # DDP's reducer cannot be copied, see `model_of`: the names are those that the user's model has in it.
        inner = model_of(self._model)
        state = StepState({"" if inner is self._model else "module": inner}, (), stateful, reached)
        for optimizer in self._optimizers:
            state.add(optimizer)
        return state
