"""Divides the peak of a step under a plan into weights, gradients, optimizer states, layers and the rest.

What exists beside the layers at the start of an interval, such as gradients and the loss, is the same under each plan:
it is read from the trace of the step with everything kept. The rest of the level is what layers keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, final

from graphckpt.planning.memory_model import MeasuredStep
from graphckpt.planning.plan import Plan
from graphckpt.planning.program import EventKind, Interval, Phase


@final
@dataclass(frozen=True, kw_only=True)
class PeakParts:
    """The bytes alive at the peak of a step, which sum to it, and what layers keep from forward to backward."""

    weights: int
    gradients: int
    optimizer_states: int
    layers: int
    """What layers keep for their backward."""
    other: int
    """Everything else: embedding, head and loss, the running layer, workspaces, temporaries of the optimizer."""
    saved_by_layers: Mapping[str, int] = field(default_factory=dict)
    """What all layers of a kind keep at the end of forward, by their number, class and place."""

    @classmethod
    def of(cls, measured: MeasuredStep, plan: Plan, weights: int, states: int) -> Self:
        """Returns the parts of a plan of ``measured``; weights and optimizer states are alive all the time."""
        stages = dict(zip(measured.model.intervals, plan.stages, strict=True))
        interval, stage = max(stages.items(), key=lambda item: item[1].peak_bytes)
        gradients, others = _outside_of_layers(measured)[interval]
        layers = max(0, stage.start_bytes - others)
        return cls(
            weights=weights,
            gradients=gradients,
            optimizer_states=states,
            layers=layers,
            other=plan.predicted_peak_bytes - weights - states - gradients - layers,
            saved_by_layers=_saved_by_layers(measured, {key: one.start_bytes for key, one in stages.items()}),
        )


def _outside_of_layers(measured: MeasuredStep) -> dict[Interval, tuple[int, int]]:
    """Returns the bytes of gradients, and of all that no layer's forward allocates, at the start of each interval."""
    base = measured.model.base
    begins: dict[int, Interval] = {}
    alive: dict[Interval, set[int]] = {}
    living: set[int] = set()
    for interval in base.intervals:
        alive[interval] = set(living)
        for entry in base.entries(interval):
            if entry.kind is EventKind.BORN:
                living.add(entry.storage)
                begins[entry.storage] = interval
            elif entry.kind is EventKind.GONE:
                living.discard(entry.storage)
    update = next((interval for interval in base.intervals if interval.phase is Phase.OPTIMIZER), None)
    at_update = alive[update] if update is not None else living
    gradients = {s for s in at_update if begins[s].phase not in (Phase.BEFORE, Phase.FORWARD)}
    of_layers = {storage for storage, interval in begins.items() if interval.phase is Phase.FORWARD}

    def total(storages: set[int]) -> int:
        return sum(base.sizes[storage] for storage in storages)

    return {key: (total(storages & gradients), total(storages - of_layers)) for key, storages in alive.items()}


def _saved_by_layers(measured: MeasuredStep, starts: Mapping[Interval, int]) -> dict[str, int]:
    """Returns the rise of the level over the forwards of each kind of layers."""
    calls_of: dict[str, list[int]] = {}
    for call, block in enumerate(measured.model.block_of_call):
        calls_of.setdefault(measured.names[block].rpartition(".")[0], []).append(call)
    saved = {}
    for place, calls in calls_of.items():
        rises = (starts[Interval(Phase.AFTER_FORWARD, c)] - starts[Interval(Phase.FORWARD, c)] for c in calls)
        saved[f"{place}.* ({len(calls)})"] = sum(rises)
    return saved
