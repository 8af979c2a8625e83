"""Plans the policies of one Graph, for inputs of a shape, and sets them on its blocks."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from graphckpt.errors import ConfigError, GraphError, PlanError
from graphckpt.graph.captured_step import WARM_UP
from graphckpt.graph.out_of_memory import StepBackup, describe_policies
from graphckpt.graph.step import Step, StepCall
from graphckpt.graph.verify import unchanged
from graphckpt.planning.candidates import without_share
from graphckpt.planning.fake_device import FakeDevice
from graphckpt.planning.options import Budget, DeviceMemory, PlanOptions, budget_bytes, check_budget, device_memory
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup, planning_group
from graphckpt.planning.plan_step import find_blocks, measure_all, plan_step
from graphckpt.planning.planner import Planners
from graphckpt.planning.profile import Device, DeviceProfile, load_profile, profile_names
from graphckpt.planning.steps import FakeStep, RealStep
from graphckpt.tree import flatten_call
from graphckpt.units import format_bytes, format_sizes

_ANY_CUDA = "a100-80g"  # for a device without a profile: sizes are the same, times differ by similar factors
_UNSET = dict.fromkeys(
    ("activation_checkpointing", "segments", "tiles", "offload", "partition", "contiguous", "compile")
)


@final
class AutoPlan:
    """Plans for the inputs of a Graph, and keeps the plan of each shape."""

    def __init__(self, step: Step, tree: BlockTree) -> None:
        self._step = step
        self._tree = tree
        self._plans: dict[Hashable, Plan] = {}
        self._active_key: Hashable = None
        self._planned_blocks: list[str] = []
        self._is_unapplied = False

    def plan(
        self,
        call: StepCall,
        memory_budget: Budget,
        options: PlanOptions | Mapping[str, Any],
        device: Device = None,
    ) -> Plan:
        """Returns a plan for inputs like these, which is not applied yet; with ``device`` it is simulated."""
        if device is None:
            plan = self._plan(call, memory_budget, options)
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

    def _plan(self, call: StepCall, memory_budget: Budget, options: PlanOptions | Mapping[str, Any]) -> Plan:
        step = self._step
        values = vars(options) if isinstance(options, PlanOptions) else options
        with planning_group(values.get("group"), values.get("step_group")) as group:
            wanted = PlanOptions.of(options, f"{step.name}.plan")
            real = RealStep(_Roots(step.roots), partial(step.call, *call))
            model, blocks, wanted = self._prepare(wanted)
            if step.captured is not None:  # a plan drops the captures; until then their memory would count as taken
                step.captured.release()
                torch.cuda.empty_cache()
            with step.with_policies([]), real.excluding_copies(unchanged(step)):
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
        self._apply(plan)
        self._active_key = self._key(call)
        self._plans[self._active_key] = plan
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

    def before_call(self, call: StepCall) -> None:
        """Applies the plan for ``config.memory_budget`` and these inputs, and warns of a plan that is not applied."""
        if self._is_unapplied:
            self._is_unapplied = False
            name = self._step.name
            fix = f"{name}.plan(...).apply(), since Graph.plan no longer sets the policies itself"
            warnings.warn(f"{name}: the step runs without the plan that was made for it · fix: {fix}", stacklevel=3)
        config = self._step.config
        if config.memory_budget is None or not config.training or (key := self._key(call)) == self._active_key:
            return
        if key not in self._plans:
            self._plans[key] = self._plan(call, config.memory_budget, config.plan_options)
        self._apply(self._plans[key])
        self._active_key = key

    def _key(self, call: StepCall) -> Hashable:
        config = self._step.config
        leaves, _ = flatten_call(call.args, call.kwargs)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        if planning_group(config.plan_options.group).size > 1:
            shapes = ()  # processes plan together at the first call: later ones may bring new shapes to some alone
        return shapes, str(config.memory_budget), str(config.plan_options)

    def _apply(self, plan: Plan) -> _GraphPolicies:
        model = _Roots(self._step.roots)
        self._active_key = None
        self._is_unapplied = False
        before = {name: self._tree.config(module, name).fields() for name, module in model.named_modules() if name}
        for name in self._planned_blocks:  # of the last plan, which may have had other blocks
            self._tree.config(model.get_submodule(name), name).update(dict(_UNSET))
        self._planned_blocks = [row.block for row in plan.rows]
        for row in plan.rows:
            for name, module in model.get_submodule(row.block).named_modules(prefix=row.block):
                config = self._tree.config(module, name)
                if any(config.fields().get(field) is not None for field in _UNSET):
                    config.update(dict(_UNSET))
            if row.fields.get("activation_checkpointing") is not False or len(row.fields) > 1:
                self._tree.config(model.get_submodule(row.block), row.block).update({**_UNSET, **row.fields})
        return _GraphPolicies(lambda: self._restore(before))

    def _restore(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        model = _Roots(self._step.roots)
        self._active_key, self._planned_blocks = None, []
        for name, fields in before.items():
            config = self._tree.config(model.get_submodule(name), name)
            if config.fields() != fields:
                config.update({**_UNSET, **fields})


@final
class _GraphPolicies:
    """The policies that a plan has set on a Graph."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def remove(self) -> None:
        """Sets the flags of the blocks to what they were before; a second call does nothing."""
        restore, self._restore = self._restore, lambda: None
        restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


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
        # Without schedulers and scaler: a schedule would move, and a fake scale has no value to compare.
        update.take_over((optimizers, [None] * len(optimizers), None, 0))
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
