"""Installs the hooks that record a step, and removes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphckpt._compat import is_transformed
from graphckpt.blocks.explain import IN_GRAPH, explain_step, is_elsewhere
from graphckpt.blocks.find_layers import layers
from graphckpt.blocks.forward import NOT_SCRIPTABLE, BlockForward
from graphckpt.blocks.native_checkpointing import NativeCheckpointing
from graphckpt.blocks.resolve import UNCALLED, ResolvedPolicies
from graphckpt.errors import ConfigError, GraphError
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.recorder import Recorder
from graphckpt.ledger.storage_log import StorageLog
from graphckpt.ledger.table import print_table
from graphckpt.tree import tensors_in


@final
class StepRecorder:
    """Records steps of a model, and holds the last records."""

    def __init__(self, title: str, roots: list[tuple[str, nn.Module]], policies: ResolvedPolicies) -> None:
        self.title = title
        self._roots = roots
        self._wrappers = policies.wrappers
        self._policies = policies
        self._bytes: Recorder | None = None
        self._times: Recorder | None = None
        self._endings: list[Callable[[], object]] = []  # of a record in progress

    @contextmanager
    def measure(self, inputs: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Records one step op by op: saved bytes, live bytes."""
        self.close()
        inputs = list(inputs)
        known = [*self._state(), *inputs]
        live = StorageLog()
        live.mark_static(self._state())
        live.track([*known, *(t.grad for t in known if t.is_leaf)])
        live.label((t.grad for t in known if t.is_leaf), "gradients")  # no list, which would keep them alive
        live.label(inputs, "inputs")
        live.label(self._state(), "weights")
        recorder = Recorder(known, live)
        new: list[torch.optim.Optimizer] = []

        def see_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
            state = _state_of(optimizer)
            recorder.optimizer_steps(state, (w for group in optimizer.param_groups for w in group["params"]))
            if not state:
                new.append(optimizer)

        hook = register_optimizer_step_pre_hook(see_optimizer)
        try:
            with (
                _rows_for_modules(recorder, self._wrappers, self._plain_modules()),
                recorder.watching(),
                self._inputs_of_root(recorder),
            ):
                yield
        finally:
            hook.remove()
        live.label((t.grad for t in self._state() if t.is_leaf), "gradients")
        for optimizer in new:
            live.label(_state_of(optimizer), "optimizer states")
        recorder.has_optimizer_states = not any(map(_state_of, new))
        self._bytes = recorder

    @contextmanager
    def time(self) -> Iterator[Recorder]:
        """Records the seconds of each block in one step, without its ops."""
        recorder = Recorder()
        with _rows_for_modules(recorder, self._wrappers, self._plain_modules()):
            yield recorder
        self._times = recorder

    def watch_next_forward(self) -> None:
        """Records the next forward of the model and what its backward recomputes, at the cost of a few hooks."""
        root = self._roots[0][1]
        begin = _Hook(WeakMethod(self._begin), passes_on=True)
        self._endings.append(root.register_forward_pre_hook(begin, with_kwargs=True).remove)

    def _begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or is_transformed():
            return
        self.close()
        recorder = self._bytes = Recorder([*self._state(), *tensors_in((args, kwargs))])
        rows = _rows_for_modules(recorder, self._wrappers, self._plain_modules())
        rows.__enter__()
        end = root.register_forward_hook(_Hook(lambda: recorder.end), always_call=True)
        stop = root.register_forward_pre_hook(_Hook(WeakMethod(self.close)))
        self._endings += [end.remove, stop.remove, partial(rows.__exit__, None, None, None)]
        recorder.begin()

    def close(self) -> None:
        """Ends a record in progress, including one that an interrupt has left behind."""
        if self._bytes is not None:
            self._bytes.end()
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def explain(self, plot: str | None, *, show: bool, capture: str = "") -> Explanation:
        """Returns the explanation of the last recorded steps; ``capture`` says how the step runs now."""
        recorder = self._bytes
        if recorder is None or not recorder.runs:
            if any(wrapper.is_in_graph for wrapper in self._wrappers):
                raise GraphError(f"{self.title}: {IN_GRAPH} · fix: run one step of the model itself")
            raise GraphError(f"{self.title}: expected a step to explain, got none yet · fix: run one step")
        explanation = explain_step(self.title, self._roots, self._policies, recorder, self._times)
        explanation = replace(explanation, capture=capture)
        if plot is not None:
            explanation.plot(plot)
        if show:
            print_table(explanation)
        return explanation

    def _state(self) -> list[torch.Tensor]:
        return [t for _, root in self._roots for t in (*root.parameters(), *root.buffers()) if not is_lazy(t)]

    @contextmanager
    def _inputs_of_root(self, recorder: Recorder) -> Iterator[None]:
        """Ignores the model's inputs, which the caller keeps alive anyway."""

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.ignore(tensors_in((args, kwargs)))

        name, root = self._roots[0]
        hook = None if name else root.register_forward_pre_hook(see, with_kwargs=True)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _plain_modules(self) -> list[tuple[str, nn.Module]]:
        """Returns the modules without a wrapper that get a row: selected blocks, and the modules beside them.

        If no block is selected, it is as if the layers of the model were.
        """
        wrapped = {w.name for w in self._wrappers}
        selected = {*self._policies.selected, *wrapped} or {
            f"{name}.{layer}" if name else layer for name, root in self._roots for layer in layers(root)
        }
        found: list[tuple[str, nn.Module]] = []
        for name, root in self._roots:
            _rows_below(name, root, selected, found)
        return [(name, module) for name, module in found if name not in wrapped and not is_elsewhere(module)]


def _rows_below(name: str, module: nn.Module, selected: set[str], found: list[tuple[str, nn.Module]]) -> None:
    is_selected = name in selected
    is_split = any((f"{name}.{key}" if name else key) in selected for key, _ in module.named_modules() if key)
    is_split |= isinstance(module, UNCALLED) and not is_selected
    if is_selected or not is_split:
        found.append((name, module))
    if is_split:
        beside: list[tuple[str, nn.Module]] = []
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            _rows_below(path, child, selected, beside)
        found += [row for row in beside if not is_selected or row[0] in selected]


class _Hook:
    """A module hook that returns nothing, does nothing on copies of the module, and can be pickled with it.

    ``find`` returns what to call, or ``None`` if it is gone: a hook must not keep what watches its module alive.
    """

    def __init__(self, find: Callable[[], Callable[..., Any] | None], *args: Any, passes_on: bool = False) -> None:
        self._find = find
        self._args = args
        self._passes_on = passes_on

    def __call__(self, *given: Any) -> None:
        call = None if torch.compiler.is_compiling() else self._find()
        if call is not None:
            call(*(given if self._passes_on else self._args))

    __name__ = "graphckpt"

    @property
    def __globals__(self) -> dict[str, Any]:
        """Raises an error for ``torch.jit.script``, which alone reads this attribute of hooks."""
        raise ConfigError(NOT_SCRIPTABLE)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def _nothing() -> None:
    return None


@contextmanager
def _rows_for_modules(
    recorder: Recorder, wrappers: list[BlockForward], plain: list[tuple[str, nn.Module]]
) -> Iterator[None]:
    hooks = []
    recorder.own_checkpointing = {name for name, module in plain if NativeCheckpointing(module).is_enabled()}
    recorder.weightless = {name for name, module in plain if next(module.parameters(), None) is None}
    try:
        for wrapper in wrappers:
            wrapper.context.recorder = recorder
        while plain:  # emptied: what waits here for the end of the step must not keep the model alive
            name, module = plain.pop()
            hooks.append(module.register_forward_pre_hook(_Hook(lambda: recorder.enter_plain, name), prepend=True))
            hooks.append(module.register_forward_hook(_Hook(lambda: recorder.leave_plain, name), always_call=True))
        module = None  # type: ignore[assignment]
        yield
    finally:
        for wrapper in wrappers:
            if wrapper.module is not None:
                wrapper.context.recorder = None
        for hook in hooks:
            hook.remove()
