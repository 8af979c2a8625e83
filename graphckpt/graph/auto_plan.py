"""Plans the policies of one Graph, by runs of its step or from its first updates, and sets them on its blocks."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self, final

import torch
from torch import nn

from graphckpt._compat import pytree
from graphckpt.blocks.proxy import BlockTree
from graphckpt.blocks.resolve import resolve_policies
from graphckpt.blocks.select import layers
from graphckpt.budget import Budget, check_budget
from graphckpt.errors import ConfigError, GraphError, PlanError
from graphckpt.graph.captured_step import WARM_UP
from graphckpt.graph.out_of_memory import StepBackup, describe_policies
from graphckpt.graph.step import Step, StepCall
from graphckpt.graph.step_state import reached_by_graph, unchanged
from graphckpt.planning.candidates import can_join, parse_compile, without_share
from graphckpt.planning.live_plan import LivePlan
from graphckpt.planning.options import DeviceMemory, PlanOptions, budget_bytes, device_memory
from graphckpt.planning.plan import KEEP_ALL, Plan, plan_line
from graphckpt.planning.plan_group import GroupError, PlanGroup, planning_group
from graphckpt.planning.plan_step import find_blocks, measure_all, plan_step
from graphckpt.planning.planner import Planners, policy_with_settings
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.steps import FakeStep, RealStep
from graphckpt.planning.update_policies import BlockChoice, UpdatePolicies
from graphckpt.planning.update_watch import covers, sizes_of
from graphckpt.progress import Progress
from graphckpt.reached import Restore, check_restore
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import Device, DeviceProfile, load_profile, profile_names
from graphckpt.tree import flatten_call
from graphckpt.undo import Ending
from graphckpt.units import format_bytes, format_sizes

# Note [Where the policies of a call come from]
#
#     config.memory_budget is None                   the flags that the user has set, or `plan(...).apply()`
#     it is set, and
#       a plan was applied since it was              that plan: `_planned_sizes` is [{}], which covers all inputs
#       updates show all that a plan may use         `_live`, from the first updates; no step runs twice for it
#       they do not (`_needs_runs`), or no plan      `_plan_by_runs`: runs of the step, put back. With several processes
#       from updates fits                            once, else again for inputs that are larger in any way
#     memory ran out, on_out_of_memory = "replan"    `replan`, on fake tensors: there may be no memory for another run
#
# Policies of a plan are flags of the blocks, like those of the user, so that `call` installs them as any others. A
# change of what a plan depends on, `_present_settings`, ends what is there.

_ANY_CUDA = "a100-80g"  # for a device without a profile: sizes are the same, times differ by similar factors
_OF_CALLS = ("activation_checkpointing", "segments", "tiles", "compile")
"""The fields of a block that decide how its calls run."""
_UNSET = dict.fromkeys(
    ("activation_checkpointing", "segments", "tiles", "offload", "partition", "contiguous", "compile")
)


@final
class AutoPlan:
    """The plans of a Graph: those that the user makes, by runs of the step, and the one for ``config.memory_budget``.

    The latter is one plan for the life of the Graph, for its largest inputs. It is made from updates (``_live``),
    unless they cannot show what the settings ask for.
    """

    def __init__(self, step: Step, tree: BlockTree) -> None:
        self._step = step
        self._tree = tree
        self._flags = _BlockFlags(step, tree)
        self._settings: tuple[Any, ...] | None = None
        """The settings for which the present policies were planned, or are being planned."""
        self._live: LivePlan | None = None
        """The plan from the Graph's updates; ``None`` before the first one, and where the policies are others."""
        self._planned_sizes: list[dict[str, int]] = []
        """The inputs that policies hold for which are not those of ``_live``; an empty entry is all inputs."""
        self._is_unapplied = False
        self._report: Callable[[str], None] = lambda line: None

    def plan(
        self,
        call: StepCall,
        memory_budget: Budget,
        options: PlanOptions | Mapping[str, Any],
        device: Device = None,
        restore: Restore = None,
    ) -> Plan:
        """Returns a plan for inputs like these, which is not applied yet; with ``device`` it is simulated."""
        check_restore(restore, f"{self._step.name}.plan", is_absent=device is not None)
        if device is None:
            plan = self._plan(call, memory_budget, options, restore)
        else:
            plan = self._simulate(call, memory_budget, options, load_profile(device))
        self._is_unapplied = True
        self._step.setup.is_done = False
        return replace(plan, apply_to_graph=self._apply)

    def _simulate(
        self, call: StepCall, memory_budget: Budget, options: PlanOptions | Mapping[str, Any], profile: DeviceProfile
    ) -> Plan:
        step = self._step
        wanted = PlanOptions.of(options, f"{step.name}.plan")
        backup = StepBackup(step, call)
        model, blocks, wanted = self._prepare(wanted)
        try:
            with fake_training(step, model, call, profile) as fake, step.with_policies([]):
                return plan_step(fake, model, blocks, memory_budget, wanted, PlanGroup())
        finally:
            backup.restore()
            step.sort_parameters()

    def _plan(
        self,
        call: StepCall,
        memory_budget: Budget,
        options: PlanOptions | Mapping[str, Any],
        restore: Restore = None,
    ) -> Plan:
        step = self._step
        values = vars(options) if isinstance(options, PlanOptions) else options
        with planning_group(values.get("group"), values.get("step_group")) as group:
            wanted = PlanOptions.of(options, f"{step.name}.plan")
            real = RealStep(_Roots(step.roots), partial(step.call, *call))
            model, blocks, wanted = self._prepare(wanted)
            if step.captured is not None:  # a plan drops the captures; until then their memory would count as taken
                step.captured.release()
                torch.cuda.empty_cache()
            reach = partial(reached_by_graph, step, call.build, restore, "plan")
            reached = reach()
            with step.with_policies([]), real.excluding_own(unchanged(step, reached), reached, reach):
                return plan_step(real, model, blocks, memory_budget, wanted, group)

    def _prepare(self, options: PlanOptions) -> tuple[nn.Module, list[tuple[str, nn.Module]], PlanOptions]:
        step = self._step
        if not step.update.optimizers:
            raise GraphError(f"{step.name}.plan: an evaluation graph saves nothing · fix: plan the training graph")
        step.prepare()
        return self._find_blocks(options)

    def _find_blocks(self, options: PlanOptions) -> tuple[nn.Module, list[tuple[str, nn.Module]], PlanOptions]:
        step, model = self._step, _Roots(self._step.roots)
        selectors = options.select
        if selectors is None:
            selectors = [".".join(filter(None, (root, n))) for root, m in step.roots.items() for n in layers(m)]
        if not selectors:
            raise ConfigError(f"{step.name}.plan: no list of layers was found · fix: select='model.layers.*'")
        blocks = find_blocks(model, selectors)
        if options.compile is None:
            options = replace(options, compile=self._compile_of(blocks))
        return model, blocks, options

    def replan(self, backup: StepBackup, call: StepCall, *, is_lowest: bool = False) -> str:
        """Applies a plan for the memory that is free now, with a lower peak than the present policies have.

        The step runs on fake tensors only, since there may be no memory to measure another one. With ``is_lowest``, it
        is the plan with the lowest peak of all.

        Returns:
            What has changed, in one line.

        Raises:
            PlanError: No plan has a lower peak, or the step cannot run on fake tensors.
        """
        step = self._step
        step.prepare()
        model, blocks, options = self._find_blocks(step.config.plan_options)
        if options.compile not in (None, False) or options.partition:
            raise PlanError("blocks that are compiled or partitioned cannot be planned without memory")
        resolved = resolve_policies(step.roots.items(), self._tree.configs, step.config.determinism_check)
        before = {w.module: w for w in resolved.wrappers}
        device = next(model.parameters()).device
        try:
            with fake_training(step, model, call) as fake:
                # First as it failed: its simulated peak is comparable with those of plans, where that of the device is
                # not.
                with step.with_policies(resolved.wrappers):
                    failed = fake.run().peak_bytes
                with step.with_policies([]):
                    planners = measure_all(fake, model, blocks, options, PlanGroup())
            memory = device_memory(device, planners.plain.measured.model.static_bytes)
            plan = _lower_plan(planners, failed, memory, step.config.memory_budget, is_lowest=is_lowest)
        finally:
            backup.restore()
            step.sort_parameters()
        self._end_live()
        self._flags.set(plan.policies, [row.block for row in plan.rows])
        self._planned_sizes = [_sizes_of(call)]
        names = [rule.describe() if (w := before.get(m)) and (rule := w.rule) else "keep" for _, m in blocks]
        reason = "the lowest" if is_lowest else f"{format_bytes(memory.available)} available"
        return (
            f"{describe_policies(names)} -> {describe_policies(row.option for row in plan.rows)}; predicted peak "
            f"{format_bytes(failed)} -> {format_bytes(plan.predicted_peak_bytes)}, {reason}"
        )

    def _compile_of(self, blocks: Sequence[tuple[str, nn.Module]]) -> Any:
        """Returns how the blocks are compiled already, without the share that the compiler saves."""
        how = {module: without_share(fields.get("compile")) for module, _, fields in self._tree.policies()}
        values = [how.get(module) for _, module in blocks]
        inside = [how.get(child) for _, module in blocks for child in list(module.modules())[1:]]
        if any(value != values[0] for value in values) or any(value is not None for value in inside):
            fix = "set `compile` on all of them, or plan with compile=True or compile=False"
            raise ConfigError(f"{self._step.name}.plan: expected planned blocks with equal `compile` · fix: {fix}")
        return values[0]

    @contextmanager
    def planning(self, call: StepCall) -> Iterator[None]:
        """Has the call of the ``with`` block run under the policies for ``config.memory_budget``, and plans from it.

        It warns of a plan that is not applied.
        """
        step = self._step
        if self._is_unapplied:
            self._is_unapplied = False
            fix = f"{step.name}.plan(...).apply(), since Graph.plan no longer sets the policies itself"
            what = "the step runs without the plan that was made for it"
            warnings.warn(f"{step.name}: {what} · fix: {fix}", stacklevel=4)
        config = step.config
        if config.memory_budget is None or not config.training:
            self._end_live()
            self._settings = None
            yield
            return
        sizes = _sizes_of(call)
        live = self._live_plan(call, sizes)
        if live is None:
            yield
            return
        if step.setup.is_stale:
            live.renew_blocks()  # a module may have been replaced
        step.metering = live.metering if live.begin_update(sizes) else None
        num_steps = step.update.num_steps
        try:
            yield
        except BaseException:
            live.abandon_step()
            raise
        finally:
            step.metering = None
        if live is not self._live:  # memory ran out, and the step ran again under another plan
            return
        if step.update.num_steps == num_steps and not live.is_settled:
            live.discard_levels()  # the scaler skipped the optimizers, whose states may not exist yet
        self._end_update(live, call, sizes)

    def _live_plan(self, call: StepCall, sizes: dict[str, int]) -> LivePlan | None:
        """Returns the plan from updates; ``None`` if the policies for such inputs are set, and not from updates."""
        step = self._step
        config = step.config
        if (settings := self._present_settings()) != self._settings:
            self._end_live()
            self._settings, self._planned_sizes = settings, []
        if self._live is not None or any(covers(each, sizes) for each in self._planned_sizes):
            return self._live
        model, blocks, options = self._prepare(config.plan_options)
        if self._needs_runs(blocks, options):
            self._plan_by_runs(call, sizes)
            return None
        is_shown = False if callable(options.progress) or planning_group(options.group).rank else options.progress
        news = Progress(is_shown=is_shown)
        self._report = lambda line: news.report(f"{step.name}: {line}")
        policies = _UpdateFlags(self._flags, options)
        try:
            self._live = LivePlan(
                model,
                config.memory_budget,
                options,
                self._report,
                policies=policies,
                optimizers=step.update.optimizers,
            )
        except BaseException:
            policies.remove(blocks)
            raise
        return self._live

    def _present_settings(self) -> tuple[Any, ...]:
        config, update = self._step.config, self._step.update
        how = config.memory_budget, config.plan_options, config.num_micro_batches, config.amp_dtype
        return *how, list(update.optimizers), list(self._step.roots.items())

    def _needs_runs(self, blocks: Sequence[tuple[str, nn.Module]], options: PlanOptions) -> bool:
        """Whether a plan needs runs of the step, on copies of its state, since updates cannot show all that it may use.

        They do not show joined blocks, which have the lowest peaks, nor blocks within a block that has a policy. A step
        that others run too, with other blocks, has runs that all agree on.
        """
        modules = [module for _, module in blocks]
        needs_joined = options.candidates is not None or self._step.config.memory_budget == "min"
        if options.step_group is not None or (needs_joined and can_join(modules, options.candidates)):
            return True
        blocks_to_plan = set(modules)
        outer = [
            module
            for module, _, fields in self._tree.policies()
            if any(map(fields.get, _OF_CALLS)) and module not in blocks_to_plan
        ]
        return any(not blocks_to_plan.isdisjoint(module.modules()) for module in outer)

    def _plan_by_runs(self, call: StepCall, sizes: dict[str, int]) -> None:
        config = self._step.config
        plan = self._plan(call, config.memory_budget, config.plan_options)
        self._flags.set(plan.policies, [row.block for row in plan.rows])
        # Processes plan together at the first call alone: later ones may bring new shapes to some of them.
        is_alone = planning_group(config.plan_options.group).size == 1
        self._planned_sizes.append(sizes if is_alone else {})

    def _end_update(self, live: LivePlan, call: StepCall, sizes: dict[str, int]) -> None:
        try:
            is_planned = live.end_step()
        except GroupError:  # of another process, which would not run with this one
            raise
        except PlanError:
            # Runs show more than updates do, such as joined blocks. If nothing fits, this raises as well.
            self._end_live()
            self._report("no plan from updates fits; plans by runs of the step")
            self._plan_by_runs(call, sizes)
        else:
            if is_planned and live.plan is not None:
                self._report(plan_line(live.plan))

    def _end_live(self) -> None:
        """Ends planning from updates. Without a plan, it restores the flags of the user."""
        live, self._live = self._live, None
        self._step.metering = None
        if live is not None and live.plan is None:
            live.close()

    def _apply(self, plan: Plan) -> _GraphPolicies:
        """Sets the policies of a plan that the user applies, for inputs of all shapes."""
        self._end_live()
        self._is_unapplied = False
        self._settings, self._planned_sizes = self._present_settings(), [{}]
        before = self._flags.set(plan.policies, [row.block for row in plan.rows])

        def restore() -> None:
            self._planned_sizes = []
            self._flags.restore(before)

        return _GraphPolicies(restore)


@final
class _BlockFlags:
    """Sets policies as flags of the blocks of a Graph, which installs them for the time of each call."""

    def __init__(self, step: Step, tree: BlockTree) -> None:
        self._step = step
        self._tree = tree
        self._planned: list[str] = []

    def set(self, policies: Mapping[str, Mapping[str, Any]], blocks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Sets the policies of a plan in place of the flags of its ``blocks`` and of the modules inside them.

        Returns:
            The flags of all modules before, for :meth:`restore`.
        """
        model = _Roots(self._step.roots)
        modules = dict(model.named_modules(remove_duplicate=False))
        before = {name: self._tree.config(module, name).fields() for name, module in model.named_modules() if name}
        for name in self._planned:  # of the last plan, which may have had other blocks
            if name in modules and name not in policies:
                self._update(modules[name], name, {})
        self._planned = [*policies]
        for block in filter(modules.__contains__, blocks):  # the program may have removed some
            for name, module in modules[block].named_modules(prefix=block):
                if name not in policies:
                    self._update(module, name, {})
        for name, fields in policies.items():
            if name in modules:
                self._update(modules[name], name, fields)
        return before

    def restore(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        modules = dict(_Roots(self._step.roots).named_modules())
        self._planned = []
        for name, fields in before.items():
            if name in modules:
                self._update(modules[name], name, {"determinism_check": None, **fields})

    def _update(self, module: nn.Module, name: str, fields: Mapping[str, Any]) -> None:
        config, wanted = self._tree.config(module, name), {**_UNSET, **fields}
        present = config.fields()
        if any(present.get(key) != value for key, value in wanted.items()):  # an update drops captures
            config.update(wanted)


@final
class _UpdateFlags(UpdatePolicies):
    """The policies of the updates of a Graph, as flags of its blocks."""

    def __init__(self, flags: _BlockFlags, options: PlanOptions) -> None:
        self._flags = flags
        self._options = options
        self._compile_field = parse_compile(options.compile, options.candidates).field
        self._before: dict[str, dict[str, Any]] | None = None
        """The flags of the user."""
        self._blocks: list[str] = []

    def install(
        self, blocks: Sequence[tuple[str, nn.Module]], choices: Sequence[BlockChoice], head: Sequence[PlanRow]
    ) -> None:
        self._blocks = [name for name, _ in blocks]
        settings = self._options, self._compile_field
        fields = [policy_with_settings(option, *settings)[1] for option, _ in choices]
        policies = {name: each for name, each in zip(self._blocks, fields, strict=True) if each != KEEP_ALL}
        self.apply({**policies, **{row.block: row.fields for row in head}})

    def apply(self, policies: Mapping[str, Mapping[str, Any]]) -> None:
        before = self._flags.set(policies, self._blocks)
        self._before = self._before or before

    def remove(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        del blocks
        if self._before is not None:
            self._flags.restore(self._before)


def _sizes_of(call: StepCall) -> dict[str, int]:
    """Returns the sizes of a batch: the lengths and the bytes of each tensor, and the bytes of all."""
    # The bytes of all, as another call may have more tensors. Of int64 tokens (8, 512): 0.0: 8, 0.1: 512, 0: 32768,
    # all: 32768. Inputs are planned for if no entry is larger.
    sizes = sizes_of(enumerate(flatten_call(call.args, call.kwargs)[0]))
    sizes["all"] = sum(size for name, size in sizes.items() if "." not in name)
    return sizes


@final
class _GraphPolicies:
    """The policies that a plan has set on a Graph."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def remove(self) -> None:
        """Restores the flags of the blocks; a second call does nothing."""
        self._restore()
        self._restore = lambda: None

    def __enter__(self) -> Self:
        return self

    def _exit(self, *_: object) -> None:
        self.remove()

    __exit__ = Ending(_exit, _exit)


def _lower_plan(
    planners: Planners, failed: int, memory: DeviceMemory, memory_budget: Budget | None, *, is_lowest: bool
) -> Plan:
    """Returns the fastest plan that fits, with a peak below that of the policies that have failed.

    Where these should have fitted, the estimate of the free memory is wrong, and where no plan fits, it may be: a heap
    can reuse more than it shows. Then it is the plan with the lowest peak.

    Raises:
        PlanError: There is none.
    """
    lowest_bytes = planners.floor_bytes()
    if lowest_bytes >= failed:
        lowest, present = format_sizes(lowest_bytes, failed)
        raise PlanError(
            f"the lowest predicted peak of any plan is {lowest}, and the policies in use have {present} · "
            "fix: a smaller batch"
        )
    limit = lowest_bytes if is_lowest or memory.available >= failed else max(lowest_bytes, memory.available)
    if memory_budget is not None:
        budget = check_budget(memory_budget)
        limit = min(limit, lowest_bytes if budget == "min" else budget_bytes(budget, memory, planners.plain.plain.peak))
    return planners.plan(limit)


class _Roots(nn.Module):
    """The modules of a Graph, as children of one module."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in roots.items():
            self.add_module(name, module)


@contextmanager
def fake_training(
    step: Step, model: nn.Module, call: StepCall, machine: DeviceProfile | None = None
) -> Iterator[FakeStep]:
    """Yields the step of a Graph on fake tensors. The caller restores modules and RNG state afterwards.

    Args:
        step: Its parameters, buffers and optimizers are replaced in the ``with`` block.
        model: The modules of the Graph as one module.
        call: The call to run.
        machine: Profile of a device that may be absent; ``None`` is one like that of the model.

    Raises:
        PlanError: A tensor of the step is of a subclass.
    """
    update = step.update
    parts = update.parts()
    device = FakeDevice(machine or _profile_of(next(model.parameters()).device))
    try:
        with device:
            fakes = _Fakes()
            for module in model.modules():
                # Into the dictionaries, since `setattr` runs code of modules, which may compute with the tensor. A tied
                # parameter is one fake, as `_Fakes` returns the same one for it.
                owners: list[dict[str, Any]] = [vars(module), vars(module)["_parameters"], vars(module)["_buffers"]]
                for owner in owners:
                    owner.update({key: fakes.of(v) for key, v in owner.items() if isinstance(v, torch.Tensor)})
            args, kwargs = pytree.tree_map_only(torch.Tensor, fakes.of, (call.args, call.kwargs))
            to_fake = partial(pytree.tree_map_only, torch.Tensor, fakes.of)
            optimizers = [copy.copy(optimizer) for optimizer in update.optimizers]
            for fake in optimizers:
                fake._optimizer_step_pre_hooks, fake._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
                fake.param_groups = [to_fake(dict(group)) for group in fake.param_groups]
                states = {fakes.of(p): to_fake(dict(state)) for p, state in fake.state.items()}
                fake.state = defaultdict(dict, states)
        # Without schedulers, which would move.
        update.take_over((optimizers, [None] * len(optimizers), update.scaler, 0))
        step.sort_parameters()

        def run() -> None:
            outputs: list[Any] = []  # alive until the end of the step, as those of the Graph
            step.call(call.fields, lambda *a, **k: outputs.append(call.build(*a, **k)), args, kwargs)

        is_captured = device.machine.kind == "cuda" and step.config.capture != "eager"
        yield FakeStep(device, model, run, optimizers, capture_after=WARM_UP if is_captured else None)
    finally:
        update.take_over(parts)
        update.abandon()


@final
class _Fakes:
    def __init__(self) -> None:
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the copy of a tensor; on the CPU, where the tensors of a :class:`FakeDevice` are."""
        entry = self._fakes.get(id(tensor))
        if entry is not None:
            return entry[1]
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise PlanError(f"a tensor of type {type(tensor).__name__} cannot be planned without memory")
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        fake.requires_grad_(tensor.requires_grad)
        fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        self._fakes[id(tensor)] = tensor, fake
        return fake


def _profile_of(device: torch.device) -> DeviceProfile:
    if device.type != "cuda":
        return load_profile("cpu")
    device_name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    names = [name for name in profile_names() if name.partition("-")[0] in device_name]
    # The longest one: "l4" is in "nvidial40s" too.
    return load_profile(max(names, key=lambda name: len(name.partition("-")[0]), default=_ANY_CUDA))
