"""Plans the policies of a step: finds its blocks, measures them under all candidates, and chooses for a budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import chain
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt._compat import local_shard
from graphckpt._compat_compiler import has_compiled_call
from graphckpt.blocks.apply import apply
from graphckpt.blocks.forward import policy_of
from graphckpt.blocks.select import Selector, has_forward, layers, select
from graphckpt.budget import Budget, budget_kind, check_budget, size_of
from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError, PlanError, did_you_mean, shown
from graphckpt.extras import require
from graphckpt.planning.candidates import can_join, compiled_forwards, parse_compile, parse_partition_request
from graphckpt.planning.candidates import options as candidates_of
from graphckpt.planning.options import PlanOptions, PlanOptionsDict, budget_bytes, lists_options, memory_id
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup, planning_group
from graphckpt.planning.planner import Planner, Planners, plan_in_limit
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.search import CopyRates, PolicySearch
from graphckpt.planning.step_clock import Blocks, PathError
from graphckpt.planning.steps import FakeStep, MakeModel, RealStep, made_step, states_of
from graphckpt.planning.sweep import measure
from graphckpt.progress import Progress
from graphckpt.rules.base import parse_rule
from graphckpt.simulation.cluster_profile import Cluster
from graphckpt.simulation.fake_cluster import simulated_rank
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import Device, load_profile
from graphckpt.stores.base import parse_offload
from graphckpt.training_state import keeping_surroundings, on_optimizer_step
from graphckpt.tree import storages_of
from graphckpt.undo import Undo, scope
from graphckpt.units import format_bytes, format_sizes


@lists_options(PlanOptionsDict)
def plan(
    model: nn.Module | MakeModel,
    step_fn: Callable[[], object] | None = None,
    *,
    memory_budget: Budget,
    device: Device = None,
    world_size: int | None = None,
    rank: int | None = None,
    cluster: Cluster = None,
    restore: Iterable[Any] | None = None,
    **options: Unpack[PlanOptionsDict],
) -> Plan:
    """Chooses the policy of each block so that a step is as fast as possible within a memory budget.

    The step runs a few times under different policies. What it changes is put back at the end: parameters, buffers,
    gradients, attributes of modules, optimizers, random state, and what ``step_fn`` reaches by its variables, such as a
    scheduler, a gradient scaler, averages of weights, or a counter. Iterators, such as that of a data loader, stay
    where they are.

    Args:
        model: The model on the device on which it will train, without policies; or a function without arguments that
            returns it and ``step_fn``.
        step_fn: Runs forward and backward of ``model`` once, and the optimizer step, if its memory should count.
        memory_budget: The peak of the whole step in bytes, or as ``"12GiB"``; ``"50%"`` is half of the device's memory,
            ``0.6`` is 60 % of the plain step's peak; ``"max"`` is the memory of the device less a headroom, ``"min"``
            the lowest possible peak.
        device: ``None`` runs the step on the device of the model. The name of a device profile such as ``"h200"``, a
            profile file or a profile runs no step: ``model`` has to be a function, which is called where tensors
            allocate no memory, and builds the model there.
        world_size: With ``device``, the number of ranks of an absent cluster of such devices, of which one is
            simulated: ``torch.distributed`` has a group of that size while the function and the step run. It may call
            ``init_process_group``, ``init_device_mesh``, ``fully_shard`` and ``parallelize_module``. ``None`` simulates
            one process without a group.
        rank: The rank that is simulated, by default 0, whose shards are the largest.
        cluster: With ``world_size``, the name of a cluster profile such as ``"dgx-h200"``, a profile file or a profile:
            the ranks of a node and the links between them, from which the time of collectives follows. By default it is
            the one of the device.
        restore: Objects that ``step_fn`` changes and that are not found, or are too large to be copied unasked, such as
            ``[ema, generator]``. With a list nothing that is larger is warned of.
        options: Fields of :class:`~graphckpt.planning.PlanOptions`, such as ``offload="cpu"``.

    Returns:
        The plan; :meth:`Plan.apply` sets its policies on the model.

    Raises:
        ConfigError: An argument cannot be used, or no layers were found in the model; with ``world_size``, the process
            has a process group, or the step calls what cannot be simulated.
        PlanError: No plan fits, and the message names the lowest possible peak and what sets it; or another process
            has failed.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    >>> model, x = nn.Sequential(*layers), torch.ones(512, 64)
    >>> found = plan(model, lambda: model(x).sum().backward(), memory_budget=0.6)
    >>> found.predicted_peak_bytes <= found.budget_bytes < found.plain_peak_bytes
    True
    """
    groups = (options.get("group"), options.get("step_group")) if device is None else (False,)
    with (
        keeping_surroundings(),
        simulated_rank(world_size, rank, device, cluster) as simulated,
        planning_group(*groups) as group,
    ):
        budget = check_budget(memory_budget)
        wanted = PlanOptions.of(options, "plan")
        machine = None if device is None else FakeDevice(load_profile(device), cluster=simulated)
        step, module = made_step(_make_model(model, step_fn, device), machine, "plan.model", restore)
        blocks = find_blocks(module, wanted.select)
        with step.restoring():
            notes = () if simulated is None else simulated.notes
            return plan_step(step, module, blocks, budget, wanted, group, notes=notes)


def _make_model(model: Any, step_fn: Any, device: Device) -> MakeModel:
    if step_fn is None and callable(model) and not isinstance(model, nn.Module):
        make: MakeModel = model
        return make
    if device is not None:
        what = f"expected a function that builds it, for device={str(device)!r}, got {shown(model)}"
        fix = "def make_model(): ...; return model, step_fn; then plan(make_model, device=...)"
        raise ConfigError(f"plan.model: {what} · fix: {fix}")
    if isinstance(step_fn, nn.Module) and not isinstance(model, nn.Module):
        raise ConfigError(
            f"plan.model: expected a module, got {shown(model)} · fix: pass the model first: plan(model, step_fn, ...)"
        )
    if not callable(step_fn):
        what = f"expected a function without arguments that runs a step, got {shown(step_fn)}"
        raise ConfigError(f"plan.step_fn: {what} · fix: lambda: model(x).sum().backward()")
    return lambda: (model, step_fn)


def plan_step(
    step: RealStep | FakeStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    memory_budget: Budget,
    options: PlanOptions,
    group: PlanGroup,
    *,
    notes: Sequence[str] = (),
    on_measured: Callable[[Planners], None] = lambda _: None,
) -> Plan:
    """Plans a step on all processes of ``group``. It runs the step; the caller restores what that changes."""
    budget = check_budget(memory_budget)
    num_sharing = 1 if isinstance(step, FakeStep) else group.num_sharing(memory_id(step.device))
    group.check_equal(memory_budget=budget_kind(budget), check=options.check)
    check_parameters(model, budget)
    if isinstance(step, FakeStep) and (options.compile or options.partition):
        name = "compile" if options.compile else "partition"
        raise ConfigError(
            f"{name}: its effect is not known on an absent device · fix: leave it out, or plan on the device"
        )

    def choose(planner: Planner, limit: int | None) -> Plan:
        if not options.check:
            return planner.plan(planner.floor.peak if limit is None else limit)
        return plan_in_limit(planner, step, budget, limit, group)

    if isinstance(step, RealStep):
        step.before_step = group.begin_step
    is_shown = False if callable(options.progress) or group.rank else options.progress
    stateless: dict[Optimizer, None] = {}  # before their first update

    def see(optimizer: Optimizer) -> None:
        if not optimizer.state:
            stateless.setdefault(optimizer)

    with without_value_checks(), Progress(is_shown=is_shown) as progress, on_optimizer_step(see):
        progress.begin("running the step to measure it")
        planners = measure_all(step, model, blocks, options, group, notes, progress)
        on_measured(planners)
        progress.begin(f"choosing the policies of {len(blocks)} blocks")
        # After measuring: only then are the peak of the plain step and the bytes that the step holds at its start
        # known.
        limit, headroom = _limit_of(budget, planners.plain, step, group, num_sharing)
        plan = planners.best_of(lambda planner: choose(planner, limit), is_least=limit is None)
        if isinstance(step, RealStep):
            group.run_until_all_are_done(step.run_once)
    num_bytes = (
        sum(state.nbytes for state in chain.from_iterable(map(states_of, stateless)))
        if isinstance(step, RealStep)
        else 0
    )
    if num_bytes:
        created = f"{format_bytes(num_bytes)} of the peak are optimizer states, which the next update creates"
        plan = replace(plan, notes=(*plan.notes, f"{created}: until then a step has a lower peak"))
    return replace(plan, memory_budget=budget, headroom_bytes=headroom)


def check_parameters(model: nn.Module, budget: Budget) -> None:
    """Refuses a size that no plan can meet, before minutes of measuring."""
    size = size_of(budget)
    shards = (local_shard(parameter.data) for parameter in model.parameters())
    local = [p if shard is None else shard for p, shard in zip(model.parameters(), shards, strict=True)]
    plain = [tensor for tensor in local if not hasattr(tensor.data, "__tensor_flatten__")]
    on_device = (parameter for parameter in plain if parameter.device == plain[0].device)
    num_bytes = sum({id(s): s.nbytes() for parameter in on_device for s in storages_of(parameter)}.values())
    if size is not None and num_bytes > size:
        limit, parameters = format_sizes(size, num_bytes)
        what = f"no plan fits · the parameters alone take {parameters}"
        raise PlanError(f"memory_budget {limit}: {what} · fix: a larger budget")


def _is_part(child: nn.Module) -> bool:
    return has_forward(child) and any(True for _ in child.parameters())


def find_blocks(model: nn.Module, selectors: Selector | Iterable[Selector] | None) -> list[tuple[str, nn.Module]]:
    """Returns the blocks to plan, none inside of another."""
    if selectors is None:
        # Without a list the parts of the model are its blocks: what everything kept takes depends on none.
        names = layers(model) or [name for name, child in model.named_children() if _is_part(child)]
        if not names:
            raise ConfigError(
                f"{type(model).__name__}: no list of layers was found · fix: select='name.of.layers.*', or their class"
            )
    else:
        listed = [selectors] if isinstance(selectors, str) or not isinstance(selectors, Iterable) else list(selectors)
        wanted = dict.fromkeys(module for selector in listed for _, module in select(model, selector))
        # By module and not by name: a module may have several.
        inner = {child for module in wanted for child in module.modules() if child is not module}
        names = [name for name, module in model.named_modules() if module in wanted and module not in inner]
    blocks = [(name, model.get_submodule(name)) for name in names]
    if not any(has_forward(module) for _, module in blocks):
        name, kind = names[0], type(blocks[0][1]).__name__
        what = f"{kind} has no forward, so no policy acts on it"
        raise ConfigError(f"select: {name!r}: {what} · fix: use {f'{name}.*'.removeprefix('.')!r}")
    for name, module in blocks:
        if any(policy_of(child) is not None for child in module.modules()):
            raise ConfigError(f"{name}: it already has a policy · fix: call graphckpt.remove(model) before planning")
        if isinstance(module, torch.jit.ScriptModule):  # on which there are no hooks
            raise ConfigError(
                f"{name}: expected a block that is not scripted or traced · fix: plan others with `select`, and set "
                "its policy by graphckpt.apply"
            )
    for name, module in model.named_modules():
        if has_compiled_call(module) and any(f"{block}.".startswith(f"{name}." if name else "") for block in names):
            raise ConfigError(
                f"{name or type(model).__name__}: expected a module that is not compiled as a whole · "
                "fix: plan with compile=True, which compiles each layer inside of its policy"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"{name or type(model).__name__}: expected its own gradient checkpointing to be off · "
                "fix: model.gradient_checkpointing_disable()"
            )
    return blocks


def _limit_of(
    budget: Budget, planner: Planner, step: RealStep | FakeStep, group: PlanGroup, num_sharing: int
) -> tuple[int | None, int]:
    """Returns the bytes that a step of any process may take, ``None`` for the lowest possible peak, and the headroom.

    With a share of the plain step it is the leader's limit, otherwise the smallest of all processes, of which
    ``num_sharing`` have the same memory.
    """
    if budget == "min":
        return None, 0
    memory = step.memory(planner.measured.model.static_bytes, num_sharing)
    headroom = memory.headroom if budget == "max" else 0
    limits = group.all_gather([budget_bytes(budget, memory, planner.plain.peak), headroom])
    limit, headroom = limits[group.leader] if isinstance(budget, float) else min(limits)
    return int(limit), int(headroom)


def measure_all(
    step: RealStep | FakeStep,
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    options: PlanOptions,
    group: PlanGroup,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Planners:
    """Measures every candidate on every block, once for each way in which the head may run.

    ``options`` are those of the user. The options of a block, its possible policies, are ``candidates`` here.
    """
    require("plan", "numpy", "networkx")  # before minutes of measuring

    def on_run(done: int, total: int) -> None:
        if callable(options.progress):
            options.progress(done, total)
        elif progress is not None:
            progress.begin(f"run {done} of {total} is done")

    modules = [module for _, module in blocks]
    ranks, partition_notes = parse_partition_request(options.partition, group.size)
    notes = [*notes, *partition_notes]
    code = parse_compile(options.compile, options.candidates)
    candidates = candidates_of(options.offload, options.candidates, code=code, partition=ranks)
    is_joinable = can_join(modules, options.candidates)
    heads = head_rows(model, options.head, blocks)
    group.check_equal(
        compile=repr(options.compile),
        blocks=[name for name, _ in blocks],
        options=[option.name for option in candidates],
        head=[[row.block, row.option] for rows in heads for row in rows],
    )
    rates: CopyRates | None = None
    if (target := parse_offload(options.offload)) is not None:
        of_ranks = group.all_gather(step.copy_rates(target))
        rates = None if None in of_ranks else CopyRates(*map(min, zip(*of_ranks, strict=True)))
        if rates is None:
            candidates = tuple(option for option in candidates if not option.is_far)
            notes.append(step.no_copies)

    planners: list[Planner] = []
    for rows in heads:
        # A policy of the head changes levels at the borders of all blocks: each alternative is measured as another
        # step.
        head = apply(model, {row.block: row.fields for row in rows}) if rows else nullcontext()
        with head, compiled_forwards(modules, code.options):
            try:
                measured = measure(step, Blocks(blocks), candidates, on_run, group)
            except PathError as error:
                if group.size > 1 or isinstance(step, FakeStep):  # it repeats one path
                    raise
                if not step.repeat_longest(Blocks(blocks), error.orders):
                    raise
                notes.append(_ALL_BLOCKS)
                measured = measure(step, Blocks(blocks), candidates, on_run)
            measured = group.times(measured)
        # Without the first layer of a run, the others join the run before it, and exceed the peak.
        joins = is_joinable and _ALL_BLOCKS not in notes
        planners.append(
            Planner(
                PolicySearch(measured, rates, options.host_bytes, joins=joins),
                options=options,
                model=model,
                device=step.device_name,
                is_simulated=step.is_simulated,
                world_size=step.world_size,
                rank=step.rank,
                notes=(*notes, *group.notes),
                assumptions=step.assumptions,
                head=rows,
            )
        )
    return Planners(planners)


_ALL_BLOCKS = (
    "the step calls different blocks each time, as LayerDrop does; it is planned for a step that calls all of them, so "
    "the peak is an upper bound"
)


def head_rows(
    model: nn.Module, head: Mapping[str, Any] | None, blocks: Sequence[tuple[str, nn.Module]]
) -> list[tuple[PlanRow, ...]]:
    """Returns the alternatives for the head: no policy, or one of the rules that are given for it."""
    if head is not None and not isinstance(head, Mapping):
        raise ConfigError(f"head: expected a mapping, got {head!r} · fix: head={{'loss_head': Tiles(8, reduce='sum')}}")
    alternatives: list[tuple[PlanRow, ...]] = [()]
    for name, value in (head or {}).items():
        if name not in dict(model.named_modules()):
            raise ConfigError(
                f"head: unknown block {name!r}{did_you_mean(name, [n for n, _ in model.named_children()])} · "
                "fix: name the module that computes the loss"
            )
        layer = next((block for block, _ in blocks if f"{block}.".startswith(f"{name}." if name else "")), None)
        if layer is not None:
            raise ConfigError(f"head: {name!r} contains the layer {layer!r} · fix: name the module after the layers")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            rule = parse_rule(one)
            if rule is None:
                raise ConfigError(f"head: expected a rule, got {one!r} · fix: Tiles(8, reduce='sum')")
            settings = {each.name: getattr(rule, each.name) for each in fields(rule)}
            plain = {"activation_checkpointing": {"rule": rule.name, **settings}}
            alternatives.append((PlanRow(block=name, option=rule.describe(), fields=plain),))
    return alternatives


@scope
def frozen_objects(undo: Undo) -> Iterator[None]:
    """Spares the garbage collector the objects that exist: those of imports cost it a twentieth of the time."""
    if not gc.get_freeze_count():  # else another's, which `unfreeze` would end
        undo.append((gc.unfreeze, ()))
        gc.freeze()
    yield
