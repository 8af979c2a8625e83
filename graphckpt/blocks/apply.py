"""Puts policies on the modules of a model, in any training loop, and takes them off again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, final

from torch import nn

from graphckpt.blocks.config import BlockConfig, fields_of
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.proxy import unwrap
from graphckpt.blocks.resolve import ResolvedPolicies, resolve_policies
from graphckpt.blocks.select import Selector, describe, select
from graphckpt.blocks.step_recorder import StepRecorder
from graphckpt.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from graphckpt.ledger.explanation import Explanation
    from graphckpt.rules import Rule


@final
class Handle:
    """Policies that are in force on a model, until :meth:`remove` or the end of the ``with`` block."""

    def __init__(self, model: nn.Module, policies: ResolvedPolicies) -> None:
        self._wrappers = policies.wrappers
        self._watcher = StepRecorder(type(model).__name__, [("", model)], policies)
        for wrapper in self._wrappers:
            wrapper.install()
        self._watcher.watch_next_forward()

    def explain(self, plot: str | None = None, *, show: bool = True) -> Explanation:
        """Prints what each block keeps, and returns it. See :meth:`measure` for peaks, times and the plot.

        Without :meth:`measure`, the rows are those of the first forward and backward after ``apply``.
        It prints the table unless ``show`` is false. The object that it returns prints as the same table, and a
        notebook shows it as one: there, ``explain(show=False)`` as the last line of a cell suffices.

        Args:
            plot: File for a plot of the live bytes over the step, ``.png`` or ``.svg``.
            show: Whether to print.

        Raises:
            GraphError: No step has run yet.
        """
        return self._watcher.explain(plot, show=show)

    def measure(self) -> AbstractContextManager[None]:
        """Watches the step that runs in the ``with`` block, op by op; :meth:`explain` then tells of that step."""
        return self._watcher.measure()

    def remove(self) -> None:
        """Takes the policies off. The model is what it was before; a second call does nothing."""
        self._watcher.close()
        for wrapper in self._wrappers:
            wrapper.uninstall()
            if wrapper.placement is not None:
                wrapper.placement.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def apply(model: nn.Module, policies: Mapping[Selector, Mapping[str, Any] | Rule | bool | str]) -> Handle:
    """Sets policies on the blocks of ``model`` that the selectors mean.

    Args:
        model: Any module; it keeps its type, its hooks and its ``state_dict`` keys.
        policies: From a selector (a name pattern, a regular expression, a class) to the fields of a
            :class:`~graphckpt.BlockConfig`, or to a value of ``activation_checkpointing`` alone. A later selector
            overrides an earlier one, field by field.

    Raises:
        ConfigError: A selector matches nothing, a field or value is wrong, a block has a policy already. All faults are
            told at once, and nothing is set.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> with apply(model, {"0": True, nn.Tanh: {"activation_checkpointing": "full"}}) as handle:
    ...     model(torch.ones(1, 4)).sum().backward()
    """
    model = unwrap(model)
    configs: dict[nn.Module, BlockConfig] = {}
    faults: list[str] = []
    for selector, fields in policies.items():
        try:
            for name, module in select(model, selector):
                config = configs.setdefault(module, BlockConfig(name or type(model).__name__))
                config.update(fields_of(fields))
        except ConfigError as error:
            faults.append(f"{describe(selector)!r}: {error}" if str(error)[:1] not in "'\"" else str(error))
    plan = None
    if not faults:
        try:
            plan = resolve_policies([("", model)], configs)
        except ConfigError as error:
            faults.append(str(error))
    for name, module in model.named_modules():
        if module in configs and isinstance(module.forward, BlockForward):
            faults.append(f"{name or type(model).__name__}: it has a policy already · fix: remove() the handle first")
    if faults or plan is None:
        raise ConfigError("\n".join(f"- {fault}" for fault in faults) if len(faults) > 1 else faults[0])
    return Handle(model, plan)
