"""Estimates the memory and the time of training a model of Transformers on a device that may be absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import nn

from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError, PlanError
from graphckpt.extras import require
from graphckpt.planning.options import Budget, PlanOptions, check_budget
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import find_blocks, frozen_objects, measure_all, plan_step
from graphckpt.planning.planner import CheckedPlan, Planner, plan_in_limit, policies_key, run_plan
from graphckpt.planning.program import Phase
from graphckpt.planning.steps import FakeStep, states_of
from graphckpt.progress import Progress
from graphckpt.rules.base import parse_rule
from graphckpt.rules.basic import Joined, Keep
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.estimate_result import Estimate, PolicyEstimate
from graphckpt.search.peak_parts import PeakParts
from graphckpt.search.pretrained import EXTRA, PretrainedModel, read_model, step_errors
from graphckpt.simulation.fake_cluster import simulated_rank
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile, load_profile, profile_names
from graphckpt.tree import storages_of
from graphckpt.units import format_bytes


def estimate(
    model: Any,
    *,
    device: str | Path | DeviceProfile,
    batch: int = 1,
    seq: int | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    attention: str | None = None,
    optimizer: str = "adamw",
    lora: int | None = None,
    policy: str | None = None,
    memory_budget: Budget = "max",
    memory: int | str | None = None,
    world_size: int | None = None,
    cluster: str | None = None,
    task: str | None = None,
    progress: bool | None = None,
) -> Estimate:
    """Estimates the memory and the time of a training step of a Transformers model, from its config.

    The step is forward with labels, backward, the update and ``zero_grad``, without gradient clipping. It is simulated
    with every layer kept, with every layer recomputed, and under the best plan for the device. No tensor allocates
    memory, weights are not loaded, and custom code of the model is never run.

    Args:
        model: A folder with a ``config.json``, that file, a name in the cache of Transformers or on the hub, or a
            config of Transformers.
        device: The name of a device profile such as ``"h100"``, a profile file or a profile.
        batch: Samples of one step, of each rank.
        seq: Tokens of each sample. ``None`` is 2048, or all positions of a model that has fewer.
        dtype: The type of the weights, such as ``"bfloat16"``. ``None`` is that of the config, else ``float32``.
        autocast: The type of ``torch.autocast``, such as ``"bfloat16"``. ``None`` is without autocast.
        attention: ``"sdpa"`` or ``"eager"``. ``None`` is the default of Transformers for the model.
        optimizer: ``"adamw"``, ``"adamw-fused"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"`` or ``"adafactor"``.
        lora: The rank of LoRA adapters (PEFT), which alone are trained then. ``None`` trains all weights.
        policy: One policy for all layers, such as ``"full"``, in place of the best plan.
        memory_budget: What the best plan may take, as in :func:`graphckpt.plan`.
        memory: The memory of the device in place of its profile's, in bytes or as ``"24GiB"``.
        world_size: The number of ranks, on such a device each, over which FSDP2 shards the model: each layer, and the
            rest. The figures are those of one rank. ``None`` is one process without it. With ``autocast``, FSDP2
            gathers the weights in that type, and reduces gradients in float32.
        cluster: With ``world_size``: the name of a cluster profile such as ``"dgx-h100"``, or a file, for the time of
            collectives. ``None`` is the one of the device.
        task: ``"causal-lm"``, ``"seq2seq-lm"``, ``"masked-lm"``, ``"sequence-classification"``,
            ``"token-classification"``, ``"question-answering"`` or ``"image-classification"``. ``None`` is that of the
            config's architecture.
        progress: Whether lines of progress are printed after two seconds; ``None``: in a terminal and in a notebook.

    Returns:
        The figures, which print as a table; bytes and seconds are attributes.

    Raises:
        ConfigError: The model does not exist, or an option cannot be used.
        MissingPackageError: Transformers or PEFT is not installed.

    >>> from transformers import LlamaConfig
    >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    >>> result = estimate(small, device="h100", batch=2, seq=128, policy="full")
    >>> result.policies["full"].allocated_bytes < result.policies["keep"].allocated_bytes
    True
    """
    options = EstimateOptions(
        batch=batch,
        seq=seq,
        dtype=dtype,  # type: ignore[arg-type]  # it becomes a string there
        autocast=autocast,  # type: ignore[arg-type]
        attention=attention,
        optimizer=optimizer,
        lora=lora,
        policy=policy,
        memory_budget=memory_budget,
        memory=memory,
        world_size=world_size,
        cluster=cluster,
        task=task,
    )
    with Progress(is_shown=progress) as lines:
        return estimate_model(model, device, options, lines.begin)


def estimate_model(
    model: Any, device: str | Path | DeviceProfile, options: EstimateOptions, begin: Callable[[str], None]
) -> Estimate:
    """Does the work of :func:`estimate`; ``begin`` gets a line about each stage."""
    require(EXTRA, "transformers", "yaml", "numpy", "networkx")  # before seconds of imports
    budget = check_budget(options.memory_budget)
    if options.policy is not None:
        try:
            rule = parse_rule(options.policy)  # raises now, not after the model is built
        except ConfigError as error:
            raise ConfigError(f"policy: {error}") from None
        if isinstance(rule, Joined):
            what = "expected a policy that each layer can have alone, got 'joined', which is for runs of layers"
            fix = "policy='full', or leave policy out: the best plan may join layers"
            raise ConfigError(f"policy: {what} · fix: {fix}")
    machine = load_profile(device)
    if options.memory is not None:
        machine = machine.with_memory(options.memory)
    begin("reading the config of the model")
    source = read_model(model, options)
    begin(f"building {source.architecture}")
    with simulated_rank(options.world_size, None, machine, options.cluster) as simulated, step_errors(source):
        fake = FakeDevice(machine, is_padded=False, cluster=simulated)
        with fake.building():
            module, step_fn, optimizer = source.make(machine.kind)
        with frozen_objects():
            step = FakeStep(fake, module, step_fn, optimizer)
            blocks = find_blocks(module, None)
            estimation = _Estimation(
                source=source, machine=machine, model=module, step=step, begin=begin, blocks=blocks
            )
            return estimation.run(budget, optimizer, () if simulated is None else simulated.notes)


_Column: TypeAlias = tuple[str, Plan, PeakParts]
"""A heading, the plan of a step that has run under it, and the parts of its peak."""


@final
@dataclass(eq=False, kw_only=True)
class _Estimation:
    """The runs of one step under different policies."""

    source: PretrainedModel
    machine: DeviceProfile
    model: nn.Module
    step: FakeStep
    begin: Callable[[str], None]
    """Called with a line about each stage."""
    blocks: Sequence[tuple[str, nn.Module]]
    group: PlanGroup = field(default_factory=PlanGroup)
    runs: dict[tuple[str, ...], CheckedPlan] = field(default_factory=dict)
    """Plans under which the step has run, by the policies of their blocks."""
    fault: str = ""
    """Why no plan fits."""
    notes: list[str] = field(default_factory=list)
    """Notes on the best plan."""

    def run(self, budget: Budget, optimizer: torch.optim.Optimizer, cluster_notes: Sequence[str]) -> Estimate:
        source, options, machine = self.source, self.source.options, self.machine
        columns = self._best_plan(budget) if options.policy is None else self._one_policy(options.policy)
        tokens = None if source.seq is None else source.seq * options.batch  # of an encoder-decoder, its inputs'
        policies = {
            name: PolicyEstimate.of(plan, parts, machine, samples=options.batch, tokens=tokens, title=title)
            for name, (title, plan, parts) in columns.items()
        }
        parameters = list(self.model.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        return Estimate(
            model=source.name,
            architecture=source.architecture,
            task=source.task,
            device=machine.name,
            memory_bytes=machine.memory_bytes,
            batch=options.batch,
            seq=source.seq,
            world_size=options.world_size or 1,
            num_parameters=sum(parameter.numel() for parameter in parameters),
            num_trainable=sum(parameter.numel() for parameter in trainable),
            weight_bytes=self._bytes_of([*parameters, *self.model.buffers()]),
            gradient_bytes=self._bytes_of(trainable),
            optimizer_bytes=self._bytes_of(states_of(optimizer)),
            policies=policies,
            plan=columns["plan"][1] if options.policy is None else None,
            devices=_devices_with(min(one.nvidia_smi_bytes or one.allocated_bytes for one in policies.values())),
            assumptions=tuple(self._assumptions()),
            notes=tuple(self._all_notes([*policies.values()][-1], cluster_notes)),
        )

    def _best_plan(self, budget: Budget) -> dict[str, _Column]:
        """Runs the step with everything kept, with every layer recomputed, and under the best plan."""
        title = "best plan"
        planners: list[Planner] = []

        def choose(planner: Planner, limit: int | None) -> Plan:
            nonlocal title
            planners.append(planner)
            keep, full = (self._run_under(planner.uniform()[name]) for name in ("keep", "full"))
            of_reserved = budget == "max" and bool(keep.predicted_reserved_bytes)
            if limit is None:
                return self._run_under(planner.lowest(planner.floor.peak))
            if self._is_steady(keep, limit) if of_reserved else keep.predicted_peak_bytes <= limit:
                return replace(keep, budget_bytes=limit)  # nothing is faster
            if planner.floor.peak <= limit:
                try:
                    return plan_in_limit(planner, self.step, budget, limit, self.group)
                except PlanError:
                    if of_reserved and self._is_steady(full, limit):
                        return replace(full, budget_bytes=limit)
            title = "lowest peak"
            self.fault = f"no plan fits into {format_bytes(limit)}"
            lowest = self._run_under(planner.lowest(limit))
            return min(lowest, full, key=lambda plan: plan.predicted_reserved_bytes or plan.predicted_peak_bytes)

        options = PlanOptions(progress=self._on_run)
        step = self.step, self.model, self.blocks
        self.begin("simulating the step under all policies of each kind of layer")
        try:
            plan = plan_step(*step, budget, options, self.group, choose=choose)
        except PlanError as error:  # a budget below the weights alone
            self.fault = str(error).partition(" · fix: ")[0]
            plan = plan_step(*step, "min", options, self.group, choose=choose)
            title = "lowest peak"
        measured, uniform = planners[0].measured, planners[0].uniform()
        self.notes += [note for note in plan.notes if note not in uniform["keep"].notes]
        every = {
            "keep": ("everything kept", self._run_under(uniform["keep"])),
            "full": ("full everywhere", self._run_under(uniform["full"])),
            "plan": (title, plan),
        }
        return {name: (text, each, PeakParts.of(measured, each)) for name, (text, each) in every.items()}

    def _one_policy(self, policy: str) -> dict[str, _Column]:
        is_keep = isinstance(parse_rule(policy), Keep)
        self.begin(f"simulating the step under {policy}")
        options = PlanOptions(candidates=() if is_keep else (policy,), progress=self._on_run)
        with without_value_checks():
            planner = measure_all(self.step, self.model, self.blocks, options, self.group).plain
            plans = [self._run_under(plan) for plan in planner.uniform().values()]
        titles = {"keep": "everything kept", policy: "everything kept" if is_keep else f"{policy} everywhere"}
        return {
            name: (title, plan, PeakParts.of(planner.measured, plan))
            for (name, title), plan in zip(titles.items(), plans, strict=True)
        }

    def _run_under(self, plan: Plan) -> Plan:
        """Returns the plan with the figures of a run under it: allocated and reserved bytes, and seconds."""
        key = policies_key(plan)
        if key not in self.runs:
            self.begin(f"simulating the step under {', '.join(dict.fromkeys(key))}")
            self.runs[key] = run_plan(plan, self.model, self.step, self.group)
        return self.runs[key].plan

    def _is_steady(self, plan: Plan, limit: int) -> bool:
        """Whether a step has run under a plan within ``limit``, without releasing memory of the allocator each time."""
        return plan.predicted_reserved_bytes <= limit and self.runs[policies_key(plan)].is_steady

    def _on_run(self, done: int, total: int) -> None:
        self.begin(f"run {done} of {total} is done")

    def _bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of the tensors on the device, those of a shared storage once."""
        sizes = {id(storage): storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}
        return sum(map(self.machine.rounded, sizes.values()))

    def _all_notes(self, last: PolicyEstimate, cluster_notes: Sequence[str]) -> Iterator[str]:
        if self.fault:
            lora = "" if self.source.options.lora is not None else ", lora"
            yield f"{self.fault} · fix: a smaller batch or seq{lora}, or a device with more memory"
        yield from cluster_notes
        if last.fits:
            yield from self.notes
        if last.binding == Phase.OPTIMIZER.value and self.source.options.optimizer == "adamw":
            yield "the update of AdamW sets the peak, by its temporaries · fix: optimizer='adamw-fused', which has none"

    def _assumptions(self) -> list[str]:
        source, options = self.source, self.source.options
        default = "" if options.dtype or source.config.dtype else " (the default)"
        lines = [
            f"weights in {str(source.dtype).removeprefix('torch.')}{default}",
            *self.step.assumptions,
            "no gradient clipping, no accumulation",
        ]
        if options.world_size is not None:
            gathered = (
                "" if options.autocast is None else f", gathered in {options.autocast}, gradients reduced in float32"
            )
            lines.append(
                f"FSDP2 over {options.world_size} ranks, each layer sharded and resharded after forward{gathered}"
            )
        if source.seq is None:
            height, width = source.image_size
            lines.append(f"images of {height} x {width} pixels")
        else:
            default = "" if options.seq else " (the default)"
            lines.append(f"sequences of {source.seq} tokens{default} without padding, no cache of keys and values")
        if source.task == "seq2seq-lm":
            lines.append("labels as long as the inputs, whose tokens count")
        if source.has_experts:
            lines.append("routing of experts is assumed balanced")
        if options.lora is not None:
            lines.append(f"LoRA of rank {options.lora} on the layers that PEFT chooses by default, in its default type")
        return lines


def _devices_with(num_bytes: int) -> tuple[str, ...]:
    profiles = sorted(map(load_profile, profile_names()), key=lambda profile: profile.memory_bytes)
    return tuple(profile.name for profile in profiles if profile.kind == "cuda" and profile.memory_bytes >= num_bytes)
