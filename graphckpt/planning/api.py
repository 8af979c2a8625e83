"""Plans the policies of a model's blocks for a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from graphckpt._compat_compiler import has_compiled_call
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.select import Selector, layers, select
from graphckpt.errors import ConfigError, shown
from graphckpt.planning import budget as budgets
from graphckpt.planning.measure.real_step import RealStep
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup, planning_group
from graphckpt.planning.planner import Planner, measure_all, plan_and_check


def plan(model: nn.Module, step_fn: Callable[[], object], *, memory_budget: budgets.Budget, **options: Any) -> Plan:
    """Chooses the policy of each block so that a step is as fast as possible within a memory budget.

    The step runs a few times under different policies. Parameters, buffers, gradients, optimizers and random state
    are restored at the end; whatever else ``step_fn`` changes, such as a scheduler, stays changed.

    Args:
        model: The model on the device on which it will train, without policies.
        step_fn: Runs forward and backward of ``model`` once, and the optimizer step, if its memory should count.
        memory_budget: The peak of the whole step in bytes, or as ``"12GiB"``; ``"50%"`` is what is alive before the
            first block and half of what the plain step allocates beyond it; ``"max"`` is the memory of the device,
            ``"min"`` the lowest possible peak.
        options: Fields of :class:`~graphckpt.planning.PlanOptions`, such as ``offload="cpu"``.

    Returns:
        The plan; :meth:`Plan.apply` sets its policies on the model.

    Raises:
        ConfigError: An argument cannot be used, or no layers were found in the model.
        PlanError: No plan fits, and the message names the lowest possible peak and what sets it; or another process
            has failed.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model, x = nn.Sequential(*layers), torch.ones(512, 64)
    >>> found = plan(model, lambda: model(x).sum().backward(), memory_budget="60%")
    >>> found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    True
    """
    given: Any = step_fn
    if not callable(given):
        what = f"expected a function without arguments that runs a step, got {shown(given)}"
        raise ConfigError(f"plan.step_fn: {what} · fix: lambda: model(x).sum().backward()")
    with planning_group(options.get("group")) as group:
        wanted = PlanOptions.of(options, "plan")
        step = RealStep(model, step_fn)
        return plan_step(step, model, find_blocks(model, wanted.blocks), memory_budget, wanted, group, step.restoring())


def plan_step(
    step: RealStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    memory_budget: budgets.Budget,
    options: PlanOptions,
    group: PlanGroup,
    restoring: AbstractContextManager[None],
) -> Plan:
    """Plans a step that can be run, on all processes of ``group``; ``restoring`` undoes what its runs change."""
    budget = budgets.check_budget(memory_budget)
    group.check_equal(memory_budget=budgets.budget_kind(budget), check=options.check)
    with restoring:
        planners = measure_all(step, model, blocks, options, group)
        limit = _limit_of(budget, planners.plain, step, group)
        checked = partial(
            plan_and_check,
            model=model,
            step=step,
            limit=limit,
            group=group,
            policy_fields=planners.policy_fields,
            check=options.check,
        )
        return planners.best_of(
            checked, floor_of=lambda planner: group.from_leader(planner.least), is_least=limit is None
        )


def find_blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> list[tuple[str, nn.Module]]:
    """Returns the blocks to plan, none inside of another.

    Raises:
        ConfigError: A selector matches nothing, no layers were found, or a module has a policy, is compiled as a whole,
            or has its own gradient checkpointing enabled.
    """
    if selectors is None:
        names = layers(model)
        if not names:
            raise ConfigError(
                f"{type(model).__name__}: no list of layers was found · fix: blocks='name.of.layers.*', or their class"
            )
    else:
        listed = [selectors] if isinstance(selectors, str) or not isinstance(selectors, Iterable) else list(selectors)
        wanted = {name for selector in listed for name, _ in select(model, selector)}
        order = [name for name, _ in model.named_modules()]
        names = [n for n in order if n in wanted and not any(n != w and n.startswith(f"{w}.") for w in wanted if w)]
    found = [(name, model.get_submodule(name)) for name in names]
    for name, module in found:
        if any(isinstance(part.forward, BlockForward) for part in module.modules()):
            raise ConfigError(f"{name}: expected a block without a policy · fix: remove() the handle before planning")
    for name, part in model.named_modules():
        if has_compiled_call(part) and any(f"{block}.".startswith(f"{name}." if name else "") for block in names):
            raise ConfigError(
                f"{name or type(model).__name__}: expected a module that is not compiled as a whole · "
                "fix: plan with compile=True, which compiles each layer inside of its policy"
            )
        if getattr(part, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"{name or type(model).__name__}: expected its own gradient checkpointing to be off · "
                "fix: model.gradient_checkpointing_disable()"
            )
    return found


def _limit_of(budget: int | str, planner: Planner, step: RealStep, group: PlanGroup) -> int | None:
    """Returns the bytes that a step of any process may take; ``None`` is the lowest possible peak.

    With a percentage it is the leader's limit, otherwise the smallest of all processes.
    """
    if budget == "min":
        return None
    static = planner.measured.model.static_bytes
    memory = budgets.memory_id(step.device)
    num_sharing = group.all_gather(memory).count(memory)
    limits = group.all_gather(planner.bytes_of(budget, budgets.available_bytes(step.device, static, num_sharing)))
    return int(limits[group.leader] if budgets.is_percentage(budget) else min(limits))
