"""From a model, a step and a budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from graphckpt._compat_compiler import has_compiled_call
from graphckpt.blocks.apply import apply
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.layers import layers
from graphckpt.blocks.select import select
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.planning import budget as budgets
from graphckpt.planning.candidates import can_join, options, parse_partition_request, with_partition
from graphckpt.planning.check_plan import plan_and_check
from graphckpt.planning.compiled import compiled_forwards, parse_compile
from graphckpt.planning.device.write_profile import copy_rates
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.measure.real_step import RealStep
from graphckpt.planning.measure.sweep import measure
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup, planning_group
from graphckpt.planning.planner import Planner, best_of
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.solve.search import CopyRates
from graphckpt.rules import parse_rule
from graphckpt.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from graphckpt.blocks.select import Selector

Progress = Callable[[int, int], None]
"""Called with the runs of the step that are done, and how many there are."""


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
    partition: Any = None,
    contiguous: bool = False,
    compile: bool | dict[str, Any] | None = None,  # noqa: A002 - as the field of a block
    group: Any = None,
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
            ``full``, up to four levels of ``selective`` that are found op by op for each kind of layer, and ``joined``
            runs of layers, which need ``full`` too.
        head: the block that computes the loss, and how it may run in slices: ``{"loss_head": Tiles(8, reduce="sum")}``,
            or a list of rules to choose from. Each is measured as well, and taken where it is faster or alone fits.
        partition: the ranks over which kept tensors may be cut, as the flag takes them: ``True``, a ``ProcessGroup``
            or a ``DeviceMesh``.
        contiguous: what is kept lies in one slab.
        compile: ``True``, or what ``torch.compile`` is called with: each layer runs compiled inside of its policy,
            while it is measured and under the plan. Nobody sees ops then: in place of levels of ``selective`` there
            are layers of which the compiler saves 80, 50, 30 or 10 % of what it would save for backward by itself, if
            neither ``rules`` are given nor that share, ``activation_memory_budget``, is among the options.
        group: the processes that run this step together, all of which must call this: a ``ProcessGroup``; ``None`` is
            all, where ``torch.distributed`` is initialised; ``False`` is this one alone. All get the same plan.
        check: run the step under the plan, and plan again if it is over the budget, or more than 1 % off.
        progress: told how many runs are done.

    Raises:
        ConfigError: an argument cannot be read, or the model has no layers that can be found.
        PlanError: no plan fits; the message names the least peak and what sets it. Or another process has failed.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model, x = nn.Sequential(*layers), torch.ones(512, 64)
    >>> found = plan(model, lambda: model(x).sum().backward(), memory_budget=0.6)
    >>> found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    True
    """
    with planning_group(group) as team:
        step = RealStep(model, step_fn)
        return plan_step(
            step,
            model,
            find_blocks(model, blocks),
            step.restoring(),
            team,
            memory_budget=memory_budget,
            offload=offload,
            host_budget=host_budget,
            rules=rules,
            head=head,
            partition=partition,
            contiguous=contiguous,
            compile=compile,
            check=check,
            progress=progress,
        )


def plan_step(
    step: RealStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    restoring: AbstractContextManager[None],
    team: PlanGroup,
    *,
    memory_budget: budgets.Budget,
    offload: bool | str = False,
    host_budget: int | str | None = None,
    rules: Iterable[Any] | None = None,
    head: Mapping[str, Any] | None = None,
    partition: Any = None,
    contiguous: bool = False,
    compile: bool | dict[str, Any] | None = None,  # noqa: A002 - as the field of a block
    check: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Plans a step that can be run, by all of ``team``; ``undone`` puts back what runs change. See :func:`plan`."""
    budgets.check_budget(memory_budget)
    host_bytes = None if host_budget is None else parse_bytes(host_budget)
    rates = None
    rules = None if rules is None else list(rules)
    ranks, notes = parse_partition_request(partition, team)
    code = parse_compile(compile, rules)
    considered = options(offload, rules, code=code)
    if ranks is not None:
        considered = with_partition(considered, ranks)
    heads = head_rows(model, head, blocks)
    known = [option.fields for option in considered] + [row.fields for rows in heads for row in rows]
    known.append({"compile": code.field})
    team.check_equal(
        memory_budget=budgets.budget_kind(memory_budget),
        check=check,
        compile=repr(compile),
        blocks=[name for name, _ in blocks],
        options=[option.name for option in considered],
        head=[[row.block, row.option] for rows in heads for row in rows],
    )
    if any(option.is_far for option in considered):
        rates = rates_of(step, offload, team)
        if rates is None:
            considered = tuple(option for option in considered if not option.is_far)
            notes.append("offload='cpu' does nothing here: the tensors are in host memory already")
    planners: list[Planner] = []
    with restoring:
        for rows in heads:
            on_head = apply(model, {row.block: row.fields for row in rows}) if rows else nullcontext()
            with on_head, compiled_forwards((module for _, module in blocks), code.options):
                measured = team.times(measure(step, Blocks(blocks), considered, progress, team.classes, team.broadcast))
            if not planners:
                notes += team.elect_leader(measured.model.highest([0] * len(blocks)).peak)
            planners.append(
                Planner(
                    measured,
                    model=model,
                    device=str(step.device),
                    rates=rates,
                    host_budget=host_bytes,
                    joins=can_join((module for _, module in blocks), rules),
                    notes=notes,
                    extra_rows=rows,
                    compiles=code.field,
                )
            )
        limit = limit_of(memory_budget, planners[0], step, team)
        return best_of(
            planners,
            partial(plan_and_check, step=step, limit=limit, team=team, known=known, check=check, has_slabs=contiguous),
            floor_of=lambda planner: team.from_leader(planner.least),
            is_least=limit is None,
        )


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


def find_blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> list[tuple[str, nn.Module]]:
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
        if has_compiled_call(part) and any(f"{block}.".startswith(f"{name}." if name else "") for block in names):
            raise ConfigError(
                f"{name or type(model).__name__}: its whole call is compiled, and no policy can act around its parts · "
                "fix: leave that out, and plan with compile=True, which compiles each layer inside of its policy"
            )
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"{name or type(model).__name__}: its own gradient checkpointing is on, and would act beside a plan · "
                "fix: model.gradient_checkpointing_disable()"
            )
    return found


def limit_of(budget: budgets.Budget, planner: Planner, step: RealStep, team: PlanGroup) -> int | None:
    """Returns the bytes that a step of any process may take; ``None`` is the least possible.

    Of sizes it is the smallest that any process says or has, of a share that of the process that decides.
    """
    if budget == "min":
        return None
    static = planner.measured.model.static_bytes
    place = budgets.memory_id(step.device)
    sharers = team.all_gather(place).count(place)
    limits = team.all_gather(planner.bytes_of(budget, budgets.available_bytes(step.device, static, sharers)))
    return int(limits[team.leader] if isinstance(budget, float) else min(limits))


def rates_of(step: RealStep, offload: bool | str, team: PlanGroup) -> CopyRates | None:
    """Returns how fast the machine copies, all processes at once; ``None`` if offloading has no meaning on it."""
    place = "disk" if str(offload).startswith("disk") else "host"
    if step.device.type == "cpu" and place == "host":
        return None
    out, back = zip(*team.all_gather(copy_rates(step.device, place)), strict=True)
    return CopyRates(min(out), min(back))
