"""A step of a Graph as ``verify`` compares it and ``plan`` repeats it, with the state that it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

from torch import nn

from graphckpt.checks.comparison import Stateful, StepState, Values, Verification, compare, outputs_of
from graphckpt.engine.sampling import without_value_checks
from graphckpt.reached import Restore, StepReach, reached_by
from graphckpt.undo import Undo, scope

if TYPE_CHECKING:
    from graphckpt.graph.step import Step


@without_value_checks()
def verify_graph(graph_step: Step, build: Callable[..., Any], call: Callable[[], Any], steps: int) -> Verification:
    """Runs each step twice from one state, as the Graph does it and plainly, and compares outputs and state.

    ``call`` runs a step of it on one and the same input, by its ``build``.

    With captures, the Graph runs until one is replayed before anything is compared.

    Raises:
        GraphError: Something differs. The message names the step, the tensor that differs first, and the block, op and
            line that cause it as far as they are found, or says that two plain steps differ as well.
    """
    graph_step.prepare()
    captures = graph_step.captured

    def run() -> Values:
        outputs = outputs_of(call())  # the outputs themselves are freed before the state is copied
        return {**outputs, **StepState(graph_step.roots, graph_step.update.optimizers).values()}

    def snapshot() -> StepState:
        return _state_of(graph_step, reached_by_graph(graph_step, build, None, "verify"))

    start = snapshot()
    try:
        if captures is not None:
            captures.until_replayed(call)
        result = compare(
            f"{graph_step.name}.verify",
            run,
            graph_step.without_policies,
            snapshot,
            steps,
            uncaptured=graph_step.without_captures,
            count_replays=lambda: 0 if captures is None else captures.num_replays,
        )
    finally:
        # Captures would go on with the optimizer states that are there no more.
        if start.put_back() and captures is not None:
            captures.release()
    return result


def reached_by_graph(graph_step: Step, build: Callable[..., Any], restore: Restore, name: str) -> StepReach:
    update = graph_step.update
    model = nn.ModuleList(graph_step.roots.values())
    # Captures hold the scale: by its state it gets its old value where it is, though it did not exist before.
    others = [each for each in (*update.schedulers, update.scaler) if each is not None]
    return reached_by(build, model, restore, f"{graph_step.name}.{name}", apart_from=others)


@scope
def unchanged(undo: Undo, graph_step: Step, reached: StepReach) -> Iterator[None]:
    """Puts back, in the end, all that steps in the ``with`` block have changed."""
    undo.append((_state_of(graph_step, reached).put_back, ()))
    yield


def _state_of(graph_step: Step, reached: StepReach) -> StepState:
    update = graph_step.update
    stateful: list[Any] = [_StepCount(graph_step), *update.schedulers, update.scaler]
    return StepState(graph_step.roots, update.optimizers, [each for each in stateful if each is not None], reached)


@final
class _StepCount(Stateful):
    """The number of steps of a Graph, without those that a scaler has skipped."""

    def __init__(self, graph_step: Step) -> None:
        self._step = graph_step

    def state_dict(self) -> dict[str, Any]:
        self._step.count_steps()
        return {"num_steps": self._step.update.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._step.count_steps()
        self._step.update.num_steps = state_dict["num_steps"]
