"""Divides the peak of a step under a plan into weights, gradients, optimizer states, layers and the rest.

What exists besides the layers at the start of an interval, such as the loss, is the same under each plan: it is read
from the trace of the step with every block recomputed. The rest of the level is what layers keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, final

from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.plan import Plan
from graphckpt.planning.program import EventKind, Interval, Phase


@final
@dataclass(frozen=True, kw_only=True)
class PeakParts:
    """The bytes alive at the peak of a step, which sum to it, and those that layers keep from forward to backward."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer_states: int
    workspaces: int
    """Workspaces of cuBLAS."""
    layers: int
    """Bytes that layers keep for their backward."""
    other: int
    """Everything else: embedding, head and loss, the running layer, temporaries of the optimizer."""
    saved_by_layers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that all layers of a list keep at the end of forward, by the name of the list and their number."""

    @classmethod
    def of(cls, measured: MeasuredStep, plan: Plan) -> Self:
        """Returns the parts of a plan of ``measured`` under which the step has run."""
        stages = dict(zip(measured.model.calls.base, plan.stages, strict=True))
        interval, stage = max(stages.items(), key=lambda item: item[1].peak_bytes)
        activations = plan.peak_parts["activations"]
        layers = min(activations, max(0, stage.start_bytes - _outside_of_layers(measured)[interval]))
        return cls(
            weights=plan.peak_parts["weights"],
            gradients=plan.peak_parts["gradients"],
            optimizer_states=plan.peak_parts["optimizer states"],
            workspaces=plan.peak_parts["workspaces"],
            layers=layers,
            other=activations - layers,
            saved_by_layers=_saved_by_layers(measured, {key: one.start_bytes for key, one in stages.items()}),
        )

    def to_dict(self) -> dict[str, int]:
        """Returns the bytes by kind; their sum is the peak."""
        kinds = ("weights", "gradients", "optimizer_states", "workspaces", "layers", "other")
        return {f"{kind}_bytes": getattr(self, kind) for kind in kinds}


def _outside_of_layers(measured: MeasuredStep) -> dict[Interval, int]:
    """Returns the bytes that no layer's forward allocates, at the start of each interval."""
    base = measured.model.log
    assert base is not None
    level, levels = 0, {}
    sizes: dict[int, int] = {}
    for interval, entries in base.entries.items():
        levels[interval] = level
        for entry in entries:
            if entry.kind is EventKind.BORN and interval.phase is not Phase.FORWARD:
                sizes[entry.storage] = base.sizes[entry.storage]
                level += sizes[entry.storage]
            elif entry.kind is EventKind.GONE:
                level -= sizes.pop(entry.storage, 0)
    return levels


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
