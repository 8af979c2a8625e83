"""What users ask a Graph about its step: what it keeps, whether it is the plain one, what it could keep instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphckpt.errors import GraphError
from graphckpt.graph.verify import Verification, verify
from graphckpt.planning.options import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from graphckpt.blocks.proxy import BlockTree
    from graphckpt.graph.auto_plan import AutoPlan
    from graphckpt.graph.config import GraphConfig
    from graphckpt.graph.step import Step
    from graphckpt.ledger.explanation import Explanation
    from graphckpt.planning.budget import Budget
    from graphckpt.planning.plan import Plan


class Inspected:
    """The part of a Graph that looks at steps and chooses policies for them."""

    build: Callable[..., Any]
    config: GraphConfig
    _name: str
    _auto_plan: AutoPlan | None
    _step: Step
    _tree: BlockTree

    def explain(self, plot: str | None = None, *, show: bool = True) -> Explanation:
        """Prints what each block keeps, where, and what it costs, as seen in the first calls, and returns it.

        It prints the table unless ``show`` is false. The object that it returns prints as the same table, and a
        notebook shows it as one: there, ``explain(show=False)`` as the last line of a cell suffices.

        Args:
            plot: File for a plot of the live bytes over the step, ``.png`` or ``.svg``.
            show: Whether to print.

        Raises:
            GraphError: The graph has no optimizer, or no call was recorded.
        """
        if not self.config.training:
            raise GraphError(
                f"{self._name}.explain: an evaluation graph keeps nothing · fix: explain the training graph"
            )
        watcher = self._step.watcher
        if watcher is None:
            raise GraphError(
                f"{self._name}.explain: no step was watched · fix: call the graph inside `with graph.measure():`"
            )
        return watcher.explain(plot, show=show, capture=self._step.capture_text)

    def measure(self) -> AbstractContextManager[None]:
        """Records the calls in the ``with`` block op by op; :meth:`explain` then shows the last of them."""
        return self._step.measure()

    def verify(self, *args: Any, steps: int = 3, **kwargs: Any) -> Verification:
        """Compares ``steps`` steps on these inputs with plain ones, without policies and capture, in every bit.

        Parameters, optimizers, schedules and RNG state are put back to what they were. Where the step is captured,
        the calls before the capture come first, so that replays are what is compared.

        Raises:
            GraphError: Something differs; the message names the step, the block and the tensor.
        """
        return verify(self._step, lambda: self._step.call(self.__dict__, self.build, args, kwargs), steps)

    def plan(self, *args: Any, memory_budget: Budget, **kwargs: Any) -> Plan:
        """Chooses the policies of the layers for inputs like these; ``plan.apply()`` sets them on the blocks.

        The step runs a few times; parameters, optimizers, schedules and RNG state are restored at the end. Applying
        the plan replaces the flags of the layers and of the modules inside them. With ``config.memory_budget`` a Graph
        plans and applies by itself, for each new shape of inputs.

        Args:
            args: inputs of a call.
            memory_budget: bytes, ``"12GiB"``, ``"50%"``, ``"max"`` or ``"min"``. See :func:`graphckpt.plan`.
            kwargs: inputs of a call, and fields of :class:`~graphckpt.planning.PlanOptions`, such as
                ``blocks="model.layers.*"``. With ``compile=None`` blocks are compiled as their flags say.

        Raises:
            ConfigError: an argument cannot be used, or no layers were found.
            GraphError: the graph has no optimizer.
            PlanError: no plan fits; the message names the lowest possible peak and what sets it.
        """
        names = (*PlanOptions.names(), "rules")
        options = {name: kwargs.pop(name) for name in names if name in kwargs}
        return self._planner().plan(self.__dict__, self.build, args, kwargs, memory_budget, options)

    def _planner(self) -> AutoPlan:
        planner = self._auto_plan
        if planner is None:
            from graphckpt.graph.auto_plan import AutoPlan  # noqa: PLC0415  # a Graph without a budget needs no planner

            planner = self.__dict__["_auto_plan"] = AutoPlan(self._step, self._tree)
        return planner
