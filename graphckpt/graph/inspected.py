"""What users ask a Graph about its step: what it keeps, whether it is the plain one, what it could keep instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphckpt.errors import GraphError
from graphckpt.graph.verify import Verification, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from graphckpt.blocks.select import Selector
    from graphckpt.graph.config import GraphConfig
    from graphckpt.graph.planned import Planned
    from graphckpt.graph.step import Step
    from graphckpt.ledger.record import Explanation
    from graphckpt.planning import Plan


class Inspected:
    """The part of a Graph that looks at steps and chooses policies for them."""

    build: Callable[..., Any]
    config: GraphConfig
    _name: str
    _planned: Planned
    _step: Step

    def explain(self, plot: str | None = None, *, show: bool = True) -> Explanation:
        """Prints what each block keeps, where, and what it costs, as seen in the first calls; returns the rows.

        Args:
            plot: File for a picture of the live bytes over the step, ``.png`` or ``.svg``.
            show: ``False`` returns the rows and prints nothing.

        Raises:
            GraphError: The graph has no optimizer, was never called, or ``config.measure`` is off.
        """
        if not self.config.training:
            raise GraphError(
                f"{self._name}.explain: an evaluation graph keeps nothing · fix: explain the training graph"
            )
        watcher = self._step.watcher
        if watcher is None:
            raise GraphError(
                f"{self._name}.explain: no step was watched · fix: call the graph, with config.measure = True"
            )
        return watcher.explain(plot, show=show, capture=self._step.capture_text)

    def measure(self) -> None:
        """Has the next three calls watched again for :meth:`explain`, as the first three were."""
        self._step.watch_again()

    def verify(self, *args: Any, steps: int = 3, **kwargs: Any) -> Verification:
        """Compares ``steps`` steps on these inputs with plain ones, without policies and capture, in every bit.

        Parameters, optimizers, schedules and random state are put back to what they were. Where the step is captured,
        the calls before the recording come first, so that replays are what is compared.

        Raises:
            GraphError: Something differs; the message names the step, the block and the tensor.
        """
        return verify(self._step, lambda: self._step.call(self.__dict__, self.build, args, kwargs), steps)

    def plan(
        self,
        *args: Any,
        memory_budget: float | str,
        offload: bool | str = False,
        host_budget: int | str | None = None,
        blocks: Selector | Iterable[Selector] | None = None,
        rules: Iterable[Any] | None = None,
        head: Mapping[str, Any] | None = None,
        partition: Any = None,
        contiguous: bool = False,
        compile: bool | dict[str, Any] | None = None,  # noqa: A002 - as the field of a block
        group: Any = None,
        **kwargs: Any,
    ) -> Plan:
        """Chooses the policies of the layers for inputs like these, and sets them on the blocks.

        The step runs a few times; parameters, optimizers, schedules and random state are put back in the end. Flags
        that were set on the layers, and on what is in them, are replaced. ``config.memory_budget`` has it done by
        itself, for each new shape of inputs.

        Args:
            args: inputs of a call.
            memory_budget: bytes or ``"12GiB"`` for the whole peak of the step; ``"max"``, ``"min"``, or a share of
                what the plain step keeps. See :func:`graphckpt.plan`, also for what follows.
            offload: where kept tensors may go.
            host_budget: the most bytes that may be there.
            blocks: selectors of what to decide about, such as ``"model.layers.*"``; ``None`` finds the layers.
            rules: what to consider beside ``keep``.
            head: the block that computes the loss, and the rules under which it may run in slices.
            partition: the ranks over which kept tensors may be cut.
            contiguous: what is kept lies in one slab.
            compile: whether each layer is compiled inside of its policy; ``None`` is what the blocks say.
            group: the processes that run this step together; ``None`` is all. All of them call this, and get one plan.
            kwargs: inputs of a call.

        Raises:
            ConfigError: an argument cannot be read, or no layers can be found.
            GraphError: the graph has no optimizer.
            PlanError: no plan fits; the message names the least peak and what sets it.
        """
        wanted: dict[str, Any] = {"memory_budget": memory_budget, "offload": offload, "host_budget": host_budget}
        wanted |= {"blocks": blocks, "rules": rules, "head": head, "group": group}
        wanted |= {"partition": partition, "contiguous": contiguous, "compile": compile}
        return self._planned.plan(self.__dict__, self.build, args, kwargs, wanted)
