"""Estimates the memory and the time of training a model of Transformers on a device that may be absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError, PlanError
from graphckpt.estimate_options import EstimateOptions
from graphckpt.extras import require
from graphckpt.planning.estimate_result import Estimate, PolicyEstimate
from graphckpt.planning.fake_cluster import simulated_rank
from graphckpt.planning.fake_device import FakeDevice
from graphckpt.planning.options import Budget, PlanOptions, check_budget
from graphckpt.planning.peak_parts import PeakParts
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import find_blocks, frozen_objects, measure_all, plan_step
from graphckpt.planning.planner import Planner, plan_in_limit, policies_key, run_plan
from graphckpt.planning.pretrained import EXTRA, PretrainedModel, read_model, step_errors
from graphckpt.planning.profile import DeviceProfile, load_profile, profile_names
from graphckpt.planning.program import Phase
from graphckpt.planning.steps import FakeStep, states_of
from graphckpt.progress import Progress
from graphckpt.rules.base import parse_rule
from graphckpt.rules.basic import Joined, Keep
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
    """Estimates the memory and the time of a training step of a Transformers model, from its config alone.

    The step is forward with labels, backward, the update and ``zero_grad``, without gradient clipping. It is simulated
    with every layer kept, with every layer recomputed, and under the best plan for the device. No tensor allocates
    memory, weights are not loaded, and code of the model's own is never run.

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
            raise ConfigError(
                f"policy: {what} · fix: policy='full', or leave policy out: the best plan may join layers"
            )
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
            notes = () if simulated is None else simulated.notes
            return _Estimation(source, machine, module, step, optimizer, begin, notes).run(budget)


class _Estimation:
    """The runs of one step under different policies.

    Args:
        source: Where the model is from.
        machine: The device.
        module: The model.
        step: Its step on the device.
        optimizer: Its optimizer, with its states.
        begin: Called with a line about each stage.
        notes: What is to be said of every figure.
    """

    def __init__(
        self,
        source: PretrainedModel,
        machine: DeviceProfile,
        module: nn.Module,
        step: FakeStep,
        optimizer: torch.optim.Optimizer,
        begin: Callable[[str], None],
        notes: Sequence[str] = (),
    ) -> None:
        self._source = source
        self._machine = machine
        self._module = module
        self._step = step
        self._begin = begin
        self._blocks = find_blocks(module, None)
        self._group = PlanGroup()
        self._plans: dict[tuple[str, ...], Plan] = {}
        """Plans under which the step has run, by the policies of their blocks."""
        self._fault = ""
        """Why no plan fits."""
        self._cluster_notes = notes
        self._notes: list[str] = []
        self._steady: set[tuple[str, ...]] = set()
        """The plans for whose allocations the device has enough memory, by their policies."""
        parameters = list(module.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        self._weight_bytes = self._bytes_of([*parameters, *module.buffers()])
        self._gradient_bytes = self._bytes_of(trainable)
        self._state_bytes = self._bytes_of([*states_of(optimizer)])
        self._num_parameters = sum(parameter.numel() for parameter in parameters)
        self._num_trainable = sum(parameter.numel() for parameter in trainable)

    def run(self, budget: Budget) -> Estimate:
        source = self._source
        plans = self._one_policy() if source.options.policy is not None else self._best_plan(budget)
        policies = {
            name: PolicyEstimate.of(
                plan, parts, self._machine, samples=source.options.batch, tokens=self._num_tokens, title=title
            )
            for name, (title, plan, parts) in plans.items()
        }
        plan = None if source.options.policy is not None else plans["plan"][1]
        return Estimate(
            model=source.name,
            architecture=source.architecture,
            task=source.task,
            device=self._machine.name,
            memory_bytes=self._machine.memory_bytes,
            batch=source.options.batch,
            seq=source.seq,
            world_size=source.options.world_size or 1,
            num_parameters=self._num_parameters,
            num_trainable=self._num_trainable,
            weight_bytes=self._weight_bytes,
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=self._state_bytes,
            policies=policies,
            plan=plan,
            devices=_devices_with(min(one.nvidia_smi_bytes or one.allocated_bytes for one in policies.values())),
            assumptions=tuple(self._assumptions()),
            notes=tuple(self._all_notes([*policies.values()][-1])),
        )

    def _best_plan(self, budget: Budget) -> dict[str, tuple[str, Plan, PeakParts]]:
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
                    return plan_in_limit(planner, self._step, budget, limit, self._group)
                except PlanError:
                    if of_reserved and self._is_steady(full, limit):
                        return replace(full, budget_bytes=limit)
            title = "lowest peak"
            self._fault = f"no plan fits into {format_bytes(limit)}"
            lowest = self._run_under(planner.lowest(limit))
            return min(lowest, full, key=lambda plan: plan.predicted_reserved_bytes or plan.predicted_peak_bytes)

        options = PlanOptions(progress=self._on_run)
        step = self._step, self._module, self._blocks
        self._begin("simulating the step under all policies of each kind of layer")
        try:
            plan = plan_step(*step, budget, options, self._group, choose=choose)
        except PlanError as error:  # a budget below the weights alone
            self._fault = str(error).partition(" · fix: ")[0]
            plan = plan_step(*step, "min", options, self._group, choose=choose)
            title = "lowest peak"
        uniform = planners[0].uniform()
        self._notes += [note for note in plan.notes if note not in uniform["keep"].notes]
        every = {
            "keep": ("everything kept", self._run_under(uniform["keep"])),
            "full": ("full everywhere", self._run_under(uniform["full"])),
            "plan": (title, plan),
        }
        return {name: (text, each, self._parts(planners[0], each)) for name, (text, each) in every.items()}

    def _one_policy(self) -> dict[str, tuple[str, Plan, PeakParts]]:
        policy = str(self._source.options.policy)
        is_keep = isinstance(parse_rule(policy), Keep)
        self._begin(f"simulating the step under {policy}")
        options = PlanOptions(candidates=() if is_keep else (policy,), progress=self._on_run)
        with without_value_checks():
            planner = measure_all(self._step, self._module, self._blocks, options, self._group).plain
            runs = [self._run_under(plan) for plan in planner.uniform().values()]
        titles = {"keep": "everything kept", policy: "everything kept" if is_keep else f"{policy} everywhere"}
        plans = zip(titles.items(), runs, strict=True)
        return {name: (title, plan, self._parts(planner, plan)) for (name, title), plan in plans}

    def _run_under(self, plan: Plan) -> Plan:
        """Returns the plan with what a run of the step under it takes: allocated and reserved bytes, and seconds."""
        key = policies_key(plan)
        if key not in self._plans:
            self._begin(f"simulating the step under {', '.join(dict.fromkeys(key))}")
            run = run_plan(plan, self._module, self._step, self._group)
            self._plans[key] = run.plan
            if run.is_steady:
                self._steady.add(key)
        return self._plans[key]

    def _is_steady(self, plan: Plan, limit: int) -> bool:
        """Whether a step has run under a plan within ``limit``, without releasing memory of the allocator each time."""
        return plan.predicted_reserved_bytes <= limit and policies_key(plan) in self._steady

    def _on_run(self, done: int, total: int) -> None:
        self._begin(f"run {done} of {total} is done")

    def _parts(self, planner: Planner, plan: Plan) -> PeakParts:
        return PeakParts.of(planner.measured, plan)

    @property
    def _num_tokens(self) -> int | None:
        """The tokens of a step: of an encoder-decoder, those of its inputs."""
        seq = self._source.seq
        return None if seq is None else seq * self._source.options.batch

    def _bytes_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of the tensors on the device, those of a shared storage once."""
        sizes = {id(storage): storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}
        return sum(map(self._machine.rounded, sizes.values()))

    def _all_notes(self, last: PolicyEstimate) -> Iterator[str]:
        if self._fault:
            lora = "" if self._source.options.lora is not None else ", lora"
            yield f"{self._fault} · fix: a smaller batch or seq{lora}, or a device with more memory"
        yield from self._cluster_notes
        if last.fits:
            yield from self._notes
        if last.binding == Phase.OPTIMIZER.value and self._source.options.optimizer == "adamw":
            yield "the update of AdamW sets the peak, by its temporaries · fix: optimizer='adamw-fused', which has none"

    def _assumptions(self) -> list[str]:
        source, options = self._source, self._source.options
        default = "" if options.dtype or source.config.dtype else " (the default)"
        lines = [
            f"weights in {str(source.dtype).removeprefix('torch.')}{default}",
            *self._step.assumptions,
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
