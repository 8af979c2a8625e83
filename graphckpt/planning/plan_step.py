"""From a model, a step and a budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from graphckpt.blocks.apply import apply
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.layers import layers
from graphckpt.blocks.select import select
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.planning import budget as budgets
from graphckpt.planning.below_floor import plan_below_floor
from graphckpt.planning.choose import Rates
from graphckpt.planning.measure import PlanError, measure
from graphckpt.planning.options import joins, options
from graphckpt.planning.plan import Plan, PlanRow
from graphckpt.planning.planner import Planner
from graphckpt.planning.real import RealStep
from graphckpt.planning.run import Blocks
from graphckpt.rules import parse_rule
from graphckpt.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from graphckpt.blocks.select import Selector

Progress = Callable[[int, int], None]
"""Called with the runs of the step that are done, and how many there are."""

_TOLERANCE = 0.01  # a check that is further off than this is taken into account
_MOST_CHECKS = 3  # another plan may run other ops at its peak


def plan(
    model: nn.Module,
    step_fn: Callable[[], object],
    *,
    memory_budget: budgets.Budget,
    offload: bool | str = False,
    host_budget: int | str | None = None,
    blocks: Selector | Iterable[Selector] | None = None,
    rules: Iterable[Any] | None = None,
    head: Mapping[str, Any] | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Chooses the policy of each block, so that a step is as fast as it can be within a budget of bytes.

    The step runs a few times under different policies; parameters, buffers, gradients, optimizers and random state
    are put back in the end. What else ``step_fn`` changes, such as a scheduler, stays changed.

    Args:
        model: on the device on which it will train, with no policies on it.
        step_fn: runs forward and backward of ``model`` once, and the optimizer if it is to count.
        memory_budget: the whole peak of the step in bytes, or as ``"12GiB"``; ``"max"`` is what the device has,
            ``"min"`` the least peak possible; a float from above 0 to 1 is a share of the plain step's activations.
        offload: where kept tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``.
        host_budget: the most bytes that may be there at once.
        blocks: selectors of the blocks to decide about; ``None`` finds the model's layers.
        rules: what to consider beside ``keep``, as ``activation_checkpointing`` takes it; ``None`` is all of
            ``full``, three levels of ``selective``, and ``joined`` runs of layers, which need ``full`` too.
        head: the block that computes the loss, and how it may run in slices: ``{"loss_head": Tiles(8, reduce="sum")}``,
            or a list of rules to choose from. Each is measured as well, and taken where it is faster or alone fits.
        check: run the step under the plan, and plan again if it is over the budget, or more than 1 % off.
        progress: told how many runs are done.

    Raises:
        ConfigError: an argument cannot be read, or the model has no layers that can be found.
        PlanError: no plan fits; the message names the least peak and what sets it.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model, x = nn.Sequential(*layers), torch.ones(512, 64)
    >>> found = plan(model, lambda: model(x).sum().backward(), memory_budget=0.6)
    >>> found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    True
    """
    step = RealStep(model, step_fn)
    return plan_step(
        step,
        model,
        found_blocks(model, blocks),
        step.undone(),
        memory_budget=memory_budget,
        offload=offload,
        host_budget=host_budget,
        rules=rules,
        head=head,
        check=check,
        progress=progress,
    )


def plan_step(
    step: RealStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    undone: AbstractContextManager[None],
    *,
    memory_budget: budgets.Budget,
    offload: bool | str = False,
    host_budget: int | str | None = None,
    rules: Iterable[Any] | None = None,
    head: Mapping[str, Any] | None = None,
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plans a step that can be run; ``undone`` puts back what runs change. See :func:`plan`."""
    budgets.check(memory_budget)
    host_bytes = None if host_budget is None else parse_bytes(host_budget)
    rates = None
    rules = None if rules is None else list(rules)
    considered = options(offload, rules)
    notes = []
    if any(option.is_far for option in considered):
        rates = _rates_of(step, offload)
        if rates is None:
            considered = options(False, rules)
            notes.append("offload='cpu' does nothing here: the tensors are in host memory already")
    heads = head_rows(model, head, blocks)
    planners = []
    with undone:
        for rows in heads:
            with apply(model, {row.block: row.fields for row in rows}) if rows else nullcontext():
                measured = measure(step, Blocks(blocks), considered, progress)
            planners.append(
                Planner(
                    measured,
                    model=model,
                    device=str(step.device),
                    rates=rates,
                    host_budget=host_bytes,
                    joins=joins((module for _, module in blocks), rules),
                    notes=notes,
                    also=rows,
                )
            )
        available = budgets.available_bytes(step.device, planners[0].measured.model.static_bytes)
        is_least = memory_budget == "min"
        limit = 0 if is_least else planners[0].bytes_of(memory_budget, available)
        found: list[Plan] = []
        faults: list[tuple[int, PlanError]] = []
        for planner in planners:
            own = planner.floor.peak if is_least else limit
            try:
                found.append(_planned(planner, step, own, is_least=is_least, check=check))
            except PlanError as fault:
                faults.append((planner.floor.peak, fault))
    if not found:
        raise min(faults, key=lambda row: row[0])[1]
    return min(found, key=lambda p: p.predicted_peak_bytes if is_least else p.predicted_step_seconds)


def _planned(planner: Planner, step: RealStep, limit: int, *, is_least: bool, check: bool) -> Plan:
    """Plans, and has the plan run to see whether it keeps its word."""
    try:
        found = planner.plan(limit)
    except PlanError:
        below = plan_below_floor(step, planner, limit)
        if below is None:
            raise
        return below
    for _ in range(_MOST_CHECKS if check else 0):
        with found.apply():
            off = step.peak() - (found.predicted_peak_bytes - found.correction_bytes)
        surprise = off - found.correction_bytes
        is_over = found.predicted_peak_bytes + surprise > found.budget_bytes
        if not is_over and abs(surprise) <= _TOLERANCE * found.predicted_peak_bytes:
            break
        found = planner.plan(limit + max(0, off) if is_least else limit, correction=off)
    return found


def head_rows(
    model: nn.Module, head: Mapping[str, Any] | None, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[PlanRow, ...]]:
    """Returns what a plan may say about the head: nothing, or one of the rules that are given for it.

    Raises:
        ConfigError: there is no such block, it is one of the layers or around them, or a value is no rule.
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
            raise ConfigError(f"head: {name!r} holds the layer {around!r} · fix: name the module behind the layers")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            rule = parse_rule(one)
            if rule is None:
                raise ConfigError(f"head: {one!r} is no rule · fix: Tiles(8, reduce='sum')")
            settings = {field.name: getattr(rule, field.name) for field in fields(rule)}
            plain = {"activation_checkpointing": {"rule": rule.name, **settings}}
            found.append((PlanRow(block=name, option=rule.describe(), fields=plain),))
    return found


def found_blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> list[tuple[str, nn.Module]]:
    """Returns the blocks to decide about, none inside of another.

    Raises:
        ConfigError: a selector matches nothing, or no layers can be found.
    """
    if selectors is None:
        names = layers(model)
        if not names:
            raise ConfigError(
                f"{type(model).__name__}: no list of layers is in it · fix: blocks='name.of.layers.*', or their class"
            )
    else:
        listed = [selectors] if isinstance(selectors, str) or not isinstance(selectors, Iterable) else list(selectors)
        wanted = {name for selector in listed for name, _ in select(model, selector)}
        order = [name for name, _ in model.named_modules()]
        names = [n for n in order if n in wanted and not any(n != w and n.startswith(f"{w}.") for w in wanted if w)]
    found = [(name, model.get_submodule(name)) for name in names]
    for name, module in found:
        if any(isinstance(part.forward, BlockForward) for part in module.modules()):
            raise ConfigError(f"{name}: it has a policy already · fix: remove() the handle before planning")
    for name, part in model.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"{name or type(model).__name__}: its own gradient checkpointing is on, and would act beside a plan · "
                "fix: model.gradient_checkpointing_disable()"
            )
    return found


def _rates_of(step: RealStep, offload: bool | str) -> Rates | None:
    """Returns how fast the machine copies; ``None`` if offloading has no meaning on it."""
    from graphckpt.planning.profile_device import copy_rates  # noqa: PLC0415 - measures when it is asked

    place = "disk" if str(offload).startswith("disk") else "host"
    if step.device.type == "cpu" and place == "host":
        return None
    return Rates(*copy_rates(step.device, place))
