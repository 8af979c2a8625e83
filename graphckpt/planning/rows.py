"""The data of a plan, and the tables of a plan and of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from rich.console import RenderableType
from rich.text import Text

from graphckpt.budget import Budget, describe_budget
from graphckpt.ledger.groups import common_prefix, group_names
from graphckpt.ledger.table import Column, bullet, bytes_or_dash, prefix_note, show, table_of, time_of
from graphckpt.simulation.allocations import StorageKind
from graphckpt.units import format_bytes, format_seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The policy of one block, and its cost."""

    block: str
    """Path of the block in the model."""
    option: str
    """The name of the policy in tables."""
    fields: Mapping[str, Any]
    """The policy, as :func:`graphckpt.apply` takes it."""
    extra_seconds: float = 0.0
    """Extra seconds per step over keeping everything."""
    moved_bytes: int = 0
    """Offloaded bytes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One interval of the step, with the live bytes at its start and their peak."""

    name: str
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """A result with a memory budget on a device: a plan, or a fit."""

    budget_bytes: int
    device: str = "cpu"
    is_simulated: bool = False
    """Whether the device is a profile, on which no step has run."""
    headroom_bytes: int = 0
    """The share of the device's memory that the budget ``"max"`` leaves free."""
    world_size: int = 1
    """The ranks of the absent cluster of which one was simulated; 1 if there was none."""
    rank: int = 0
    """The rank that was simulated."""


@dataclass(frozen=True, kw_only=True)
class PlanData(Budgeted):
    """The data of a plan that tables and pictures show."""

    rows: tuple[PlanRow, ...]
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    predicted_peak_bytes: int
    """The peak of live bytes in a step, including weights, gradients, optimizer state and inputs."""
    predicted_step_seconds: float
    binding: str
    """The interval of the step that sets the peak, such as ``"backward of transformer.h.3"``."""
    floor_bytes: int
    """The lowest peak that the candidates can reach."""
    plain_peak_bytes: int
    """The peak when everything is kept."""
    predicted_reserved_bytes: int = 0
    """The most that PyTorch's caching allocator reserves in the first steps of a process; 0 if it is not known."""
    predicted_nvidia_smi_bytes: int = 0
    """Bytes that ``nvidia-smi`` shows then: reserved ones, the CUDA context and buffers of NCCL; 0 if not known."""
    measured_peak_bytes: int = 0
    """The peak of a step that ran under the plan, by the allocator of a CUDA device; 0 on other devices."""
    measured_reserved_bytes: int = 0
    """The bytes that the allocator reserved then."""
    expandable_reserved_bytes: int = 0
    """The bytes that it reserves with ``expandable_segments:True``; 0 if they are not known."""
    peak_parts: Mapping[StorageKind, int] = field(default_factory=dict, repr=False, compare=False)
    """The bytes at the peak by kind: ``"weights"`` (and buffers), ``"gradients"``, ``"optimizer states"``,
    ``"workspaces"`` of cuBLAS, ``"activations"`` (all else). Empty if no simulated step has run under the plan."""
    plain_step_seconds: float
    communication_seconds: float = 0.0
    """Seconds of all collectives of a step, each as if it were alone; 0 if no step of a simulated rank has run under
    the plan."""
    exposed_seconds: float = 0.0
    """The share of ``predicted_step_seconds`` in which computation waits for collectives."""
    bubble_seconds: float = 0.0
    """The share of ``predicted_step_seconds`` in which a pipeline stage waits for others."""
    correction_bytes: int = 0
    """Measured peak minus predicted peak, if the plan was checked; the prediction includes it."""
    memory_budget: Budget | None = field(default=None, compare=False)
    """The budget as it was given to this process, such as ``0.6`` or ``"50%"``."""
    assumptions: tuple[str, ...] = ()
    """Settings of the simulated step: ``("attention flash", "autocast bfloat16", "AdamW foreach")``; empty for a step
    that ran on its device."""


def second_values(plan: PlanData) -> dict[str, float]:
    """Returns the seconds of a plan as JSON has them."""
    return {
        "seconds": plan.predicted_step_seconds,
        "communication_seconds": plan.communication_seconds,
        "exposed_seconds": plan.exposed_seconds,
        "bubble_seconds": plan.bubble_seconds,
    }


def byte_values(plan: PlanData) -> dict[str, Any]:
    """Returns the bytes of a plan as JSON has them: ``None`` is a number that is not known."""
    parts = {f"{kind.replace(' ', '_')}_bytes": num_bytes for kind, num_bytes in plan.peak_parts.items()}
    return {
        "allocated_bytes": plan.predicted_peak_bytes,
        "reserved_bytes": plan.predicted_reserved_bytes or None,
        "expandable_reserved_bytes": plan.expandable_reserved_bytes or None,
        "nvidia_smi_bytes": plan.predicted_nvidia_smi_bytes or None,
        "parts": parts or None,
    }


_ROUNDING = 1e-9  # seconds: sums of measurements differ by as much


def device_text(of: Budgeted) -> str:
    rank = f", rank {of.rank} of {of.world_size}" if of.world_size > 1 else ""
    return f"{of.device} (simulated{rank})" if of.is_simulated else of.device


def budget_line(of: Budgeted) -> str:
    headroom = f"; headroom {format_bytes(of.headroom_bytes)}" if of.headroom_bytes else ""
    return f"memory budget {budget_text(of)} on {device_text(of)}{headroom}"


def budget_text(of: Budgeted) -> str:
    """Returns the budget in bytes, and as it was given if that was a share."""
    share = describe_budget(of.memory_budget) if isinstance(of, PlanData) else ""
    return f"{format_bytes(of.budget_bytes)} ({share})" if share else format_bytes(of.budget_bytes)


def assumptions_line(plan: PlanData) -> str:
    return f"assumed: {', '.join(plan.assumptions)}"


def summary_lines(plan: PlanData) -> Iterator[str]:
    budget = plan.budget_bytes
    share = f", {plan.predicted_peak_bytes / budget:.1%} of the budget".replace("%", " %") if budget else ""
    kind = "simulated" if plan.is_simulated else "measured"
    corrected = (
        f" (corrected by {format_bytes(plan.correction_bytes)} after a {kind} step)" if plan.correction_bytes else ""
    )
    yield budget_line(plan)
    yield f"predicted peak {format_bytes(plan.predicted_peak_bytes)}{share}; reached {time_of(plan.binding)}{corrected}"
    yield from reserved_lines(plan)
    slower = plan.predicted_step_seconds / plan.plain_step_seconds - 1 if plan.plain_step_seconds else 0.0
    percent = f"{round(slower, 4) + 0.0:+.1%}".replace("%", " %")
    yield f"step {format_seconds(plan.predicted_step_seconds)}, {percent} over keeping everything"
    yield from communication_lines(plan)
    yield f"everything kept: {format_bytes(plan.plain_peak_bytes)}; lowest possible: {format_bytes(plan.floor_bytes)}"
    if plan.assumptions:
        yield assumptions_line(plan)


def communication_lines(plan: PlanData) -> Iterator[str]:
    if not (plan.communication_seconds or plan.bubble_seconds):
        return
    exposed, bubble = plan.exposed_seconds, plan.bubble_seconds
    parts = [f"{format_seconds(plan.predicted_step_seconds - exposed - bubble)} of computation"]
    hidden = format_seconds(max(0.0, plan.communication_seconds - exposed))
    parts.append(f"{format_seconds(exposed)} of communication ({hidden} overlapped)")
    if bubble:
        parts.append(f"{format_seconds(bubble)} in the pipeline's bubble")
    yield f"of which {', '.join(parts)}"


def reserved_lines(plan: PlanData) -> Iterator[str]:
    if not plan.predicted_reserved_bytes:
        return
    line = f"reserved by PyTorch's allocator: {format_bytes(plan.predicted_reserved_bytes)}"
    if plan.predicted_nvidia_smi_bytes:
        line += f"; shown by nvidia-smi: {format_bytes(plan.predicted_nvidia_smi_bytes)}"
    if 0 < plan.expandable_reserved_bytes < plan.predicted_reserved_bytes:
        saved = format_bytes(plan.predicted_reserved_bytes - plan.expandable_reserved_bytes)
        line += f"; PYTORCH_ALLOC_CONF=expandable_segments:True saves {saved}"
    yield line
    if plan.measured_reserved_bytes:
        peak, reserved = map(format_bytes, (plan.measured_peak_bytes, plan.measured_reserved_bytes))
        yield f"measured in a step under the plan: peak {peak}, reserved {reserved}"


def parts_of(plan: PlanData) -> Iterator[RenderableType]:
    columns = [Column("block"), Column("policy"), Column("blocks", is_number=True), Column("costs", is_number=True)]
    has_moves = any(row.moved_bytes for row in plan.rows)
    if has_moves:
        columns.append(Column("offloaded", is_number=True))
    prefix = common_prefix(row.block for row in plan.rows)
    yield table_of(columns, plan_cells(plan.rows, prefix, has_moves=has_moves))
    yield from map(Text, summary_lines(plan))
    values = (row.fields.get("activation_checkpointing") for row in plan.rows)
    saves = {v["label"]: ", ".join(map(str, v["save"])) for v in values if isinstance(v, dict) and v.get("label")}
    levels = (f"selective({label}) keeps the results of {ops}" for label, ops in sorted(saves.items()))
    for note in (*([prefix_note(prefix)] if prefix else []), *levels, *plan.notes):
        yield bullet(note, "*")


def plan_cells(rows: Sequence[PlanRow], prefix: str, *, has_moves: bool) -> Iterator[list[str]]:
    """Yields the cells of each group of equal rows: its blocks, their policy and number, cost and offloaded bytes."""
    for name, option, group in _groups(rows, prefix):
        cost = sum(row.extra_seconds for row in group)
        cells = [name, option, str(len(group)), format_seconds(cost) if cost > _ROUNDING else "-"]
        yield [*cells, bytes_or_dash(sum(row.moved_bytes for row in group))] if has_moves else cells


def _groups(rows: Sequence[PlanRow], prefix: str = "") -> Iterator[tuple[str, str, list[PlanRow]]]:
    names = [row.block.removeprefix(prefix) for row in rows]
    # No periods: that a joined block belongs to the one before it shows in their order.
    for name, members in group_names(names, [row.option for row in rows], max_period=1):
        yield name, rows[members[0]].option, [rows[at] for at in members]


def print_sweep(front: Sequence[PlanData], uniform: Mapping[str, PlanData]) -> None:
    prefix = common_prefix(row.block for plan in front[:1] for row in plan.rows)
    texts = [(p, ", ".join(f"{name} {option}" for name, option, _ in _groups(p.rows, prefix))) for p in front]
    texts += [(plan, f"all {name}") for name, plan in uniform.items()]
    lines = sorted((plan.predicted_peak_bytes, plan.predicted_step_seconds, text) for plan, text in texts)
    columns = [Column("peak", is_number=True), Column("step", is_number=True), Column("policies")]
    cells = [(format_bytes(peak), format_seconds(seconds), text) for peak, seconds, text in lines]
    show([table_of(columns, cells), *([bullet(prefix_note(prefix), "*")] if prefix else [])])
