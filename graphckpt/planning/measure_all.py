"""Measures a step under all candidates, on a real device or a fake one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from torch import nn

from graphckpt.blocks.apply import apply
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.extras import require
from graphckpt.planning.candidates import can_join, parse_partition_request, with_partition
from graphckpt.planning.candidates import options as candidates_of
from graphckpt.planning.compiled import compiled_forwards, parse_compile
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.measure.sweep import MeasurableStep, measure
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.planner import Planner, Planners
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.solve.search import CopyRates
from graphckpt.rules.registry import parse_rule
from graphckpt.stores.offload import parse_offload


def measure_all(
    step: MeasurableStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    options: PlanOptions,
    group: PlanGroup,
    notes: Sequence[str] = (),
    levels: Callable[[Any], Any] = lambda found: found,
) -> Planners:
    """Measures every candidate on every block, once for each way in which the head may run.

    Args:
        step: the step, real or fake.
        model: the model that the step trains.
        blocks: the blocks to plan, by name.
        options: what the planner may use.
        group: the processes that plan together.
        notes: what plans should mention.
        levels: returns the levels of ``selective`` to use, given those that were found for each class of blocks.

    Raises:
        ConfigError: an option cannot be used.
        MissingPackageError: the extra ``plan`` is not installed.
        PlanError: the step cannot be measured, or another process has failed.
    """
    require("plan", "numpy", "networkx")  # before minutes of measuring
    modules = [module for _, module in blocks]
    ranks, found = parse_partition_request(options.partition, group)
    found = [*notes, *found]
    code = parse_compile(options.compile, options.candidates)
    candidates = candidates_of(options.offload, options.candidates, code=code)
    if ranks is not None:
        candidates = with_partition(candidates, ranks)
    heads = head_rows(model, options.head, blocks)
    known = [option.fields for option in candidates] + [row.fields for rows in heads for row in rows]
    group.check_equal(
        compile=repr(options.compile),
        blocks=[name for name, _ in blocks],
        options=[option.name for option in candidates],
        head=[[row.block, row.option] for rows in heads for row in rows],
    )
    rates = None
    if any(option.is_far for option in candidates):
        target = parse_offload(options.offload)
        assert target is not None
        rates = _slowest(group.all_gather(step.copy_rates(target)))
        if rates is None:
            candidates = tuple(option for option in candidates if not option.is_far)
            found.append(step.no_copies)
    planners: list[Planner] = []
    for rows in heads:
        on_head = apply(model, {row.block: row.fields for row in rows}) if rows else nullcontext()
        with on_head, compiled_forwards(modules, code.options):
            progress = options.progress
            measured = measure(
                step, Blocks(blocks), candidates, progress, group.classes, lambda found: group.broadcast(levels(found))
            )
            measured = group.times(measured)
        if not planners:
            found += group.elect_leader(measured.model.highest([0] * len(blocks)).peak)
        planners.append(
            Planner(
                measured,
                model=model,
                device=step.device_name,
                rates=rates,
                host_budget=options.host_bytes,
                joins=can_join(modules, options.candidates),
                notes=found,
                extra_rows=rows,
                compiles=code.field,
                has_slabs=options.contiguous,
            )
        )
    return Planners(planners, [*known, {"compile": code.field}])


def _slowest(rates: Sequence[Sequence[float] | None]) -> CopyRates | None:
    """Returns the slowest rates of all processes; ``None`` if one of them cannot copy."""
    known = [each for each in rates if each is not None]
    if len(known) < len(rates):
        return None
    out, back = zip(*known, strict=True)
    return CopyRates(min(out), min(back))


def head_rows(
    model: nn.Module, head: Mapping[str, Any] | None, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[PlanRow, ...]]:
    """Returns the alternatives for the head: no policy, or one of the rules that are given for it.

    Raises:
        ConfigError: there is no such block, it is a layer or contains one, or a value is not a rule.
    """
    found: list[tuple[PlanRow, ...]] = [()]
    for name, value in (head or {}).items():
        if name not in dict(model.named_modules()):
            raise ConfigError(
                f"head: there is no block {name!r}{did_you_mean(name, [n for n, _ in model.named_children()])} · "
                "fix: name the module that computes the loss"
            )
        around = next((block for block, _ in blocks if f"{block}.".startswith(f"{name}." if name else "")), None)
        if around is not None:
            raise ConfigError(f"head: {name!r} contains the layer {around!r} · fix: name the module after the layers")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            rule = parse_rule(one)
            if rule is None:
                raise ConfigError(f"head: expected a rule, got {one!r} · fix: Tiles(8, reduce='sum')")
            settings = {field.name: getattr(rule, field.name) for field in fields(rule)}
            plain = {"activation_checkpointing": {"rule": rule.name, **settings}}
            found.append((PlanRow(block=name, option=rule.describe(), fields=plain),))
    return found
