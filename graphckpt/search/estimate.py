"""Estimates the memory and the time of training a model of Transformers on a device that may be absent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Never, final

import torch
from torch import nn

from graphckpt._compat import local_shard
from graphckpt._compat_fake import is_on_host
from graphckpt.budget import Budget, check_budget
from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError, PlanError, check_keywords
from graphckpt.extras import require
from graphckpt.planning.intervals import Phase
from graphckpt.planning.options import PlanOptions, budget_bytes
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import check_parameters, find_blocks, frozen_objects, measure_all
from graphckpt.planning.planner import CheckedPlan, Planner, plan_in_limit, policies_key, run_under
from graphckpt.planning.steps import FakeStep, states_of
from graphckpt.rules.base import parse_rule
from graphckpt.rules.basic import Joined, Keep
from graphckpt.search.adapters import lora_phrase
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.estimate_result import Estimate, PolicyEstimate
from graphckpt.search.pretrained import EXTRA, TRACED, PretrainedModel, read_model, step_errors
from graphckpt.search.search import Report, Search, reporting
from graphckpt.search.trainer_lines import TrainingSetup, check_trainer
from graphckpt.simulation.cluster_profile import ClusterProfile
from graphckpt.simulation.fake_cluster import cluster_of, simulated_rank
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile, load_profile, packaged_gpus
from graphckpt.simulation.quantized import num_parameters, quantized_phrase
from graphckpt.tree import storages_of
from graphckpt.units import format_bytes

_PLAIN = "no checkpointing"
# Note [The columns of an estimate]
# Each column is a run of the step under its policies, so that its figures need no trust in a model of the step:
#
#     keep, full   always run, as what else the user could choose
#     plan         1. keep, if it fits: nothing is faster
#                  2. the fastest plan that fits, by the dialogue of planner.py, each proposal a run
#                  3. full, if none does, as where only the allocator's remainders are too much, and full has fewer
#                  4. the plan with the lowest peak, with a fault that says what is missing
#
# A budget below the weights alone needs no run to be refused (`check_parameters`): it is 4 at once.

_UNEVEN = 1.1  # times an equal share of the weights, from which on a note says why


def estimate(  # noqa: D417 - `unknown` is for arguments that it does not have
    model: Any,
    *,
    device: str | Path | DeviceProfile,
    batch: int = 1,
    seq: int | None = None,
    packed: int | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    attention: str | None = None,
    optimizer: str = "adamw",
    fused_backward: bool = False,
    quantization: str | None = None,
    lora: int | None = None,
    lora_targets: str | None = None,
    lora_dtype: str | torch.dtype | None = None,
    lora_dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
    loss: str = "model",
    accumulation: int = 1,
    clip: bool = False,
    policy: str | None = None,
    memory_budget: Budget = "max",
    memory: int | str | None = None,
    world_size: int | None = None,
    nodes: int | None = None,
    cluster: str | None = None,
    task: str | None = None,
    progress: bool | None = None,
    **unknown: Never,
) -> Estimate:
    """Estimates the memory and the time of a training step of a Transformers model, from its config.

    The step is forward with labels, backward, the update and ``zero_grad``. It is simulated
    with every layer kept, with every layer recomputed, and under the best plan for the device. No tensor allocates
    memory, weights are not loaded, and custom code of the model is never run.

    Args:
        model: A folder with a ``config.json``, that file, a name in the cache of Transformers or on the hub, or a
            config of Transformers.
        device: The name of a device profile such as ``"h100"``, a profile file or a profile.
        batch: Samples of one step, of each rank.
        seq: Tokens of each sample. ``None`` is 2048, or all positions of a model that has fewer.
        packed: Tokens of each of the samples that are packed into a row of ``seq`` tokens, whose attention
            FlashAttention computes for each sample alone. ``None`` is one sample in a row.
        dtype: The type of the weights, such as ``"bfloat16"``. ``None`` is that of the config, else ``float32``.
        autocast: The type of ``torch.autocast``, such as ``"bfloat16"``. ``None`` is without autocast.
        attention: ``"sdpa"``, ``"eager"``, ``"flash"`` (FlashAttention-2) or ``"flex"``. ``None`` is the default
            of Transformers for the model.
        optimizer: PyTorch's ``"adamw"``, ``"adamw-fused"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"adafactor"``
            and ``"muon"``; bitsandbytes' ``"adamw-8bit"``, ``"paged-adamw-8bit"`` and ``"paged-adamw-32bit"``;
            torchao's ``"torchao-adamw-8bit"``, ``"torchao-adamw-4bit"`` and ``"adamw-offload"`` (on the host);
            ``"adamw-bf16"`` with states in bfloat16; ``"adamw-master"`` with weights and states in float32. The values
            of ``optim`` in Transformers' ``TrainingArguments`` name the same ones.
        fused_backward: Update each weight in backward, as soon as its gradient is complete.
        quantization: The frozen weights under LoRA, by bitsandbytes: ``"nf4"``, ``"nf4-double"`` (as QLoRA, with double
            quantization) or ``"int8"``.
        lora: The rank of LoRA adapters (PEFT), which alone are trained then. ``None`` trains all weights.
        lora_targets: The layers with adapters: ``"all-linear"``, names such as ``"q_proj,v_proj"``, or a regular
            expression. ``None`` is the choice of PEFT for the model.
        lora_dtype: The type of the adapters. ``None`` is that of PEFT: ``float32``.
        lora_dropout: The dropout before the adapters.
        dora: Train magnitudes beside the adapters, as in DoRA.
        rslora: Scale adapters by the square root of their rank.
        loss: The loss of a causal language model: ``"model"`` for its own, ``"tiles"`` for head and loss in eight
            slices, ``"trl"`` for TRL's in chunks, ``"liger"`` for Liger's fused linear cross entropy.
        accumulation: Micro-batches of ``batch`` samples whose gradients are accumulated before an update.
        clip: Clip gradients by their norm before the update.
        policy: One policy for all layers, such as ``"full"``, in place of the best plan.
        memory_budget: What the best plan may take, as in :func:`graphckpt.plan`.
        memory: The memory of the device in place of its profile's, in bytes or as ``"24GiB"``.
        world_size: The number of ranks, on such a device each, over which FSDP2 shards the model: each layer, and the
            rest. The figures are those of one rank. ``None`` is one process without it. With ``autocast``, FSDP2
            gathers the weights in that type, and reduces gradients in float32.
        nodes: With ``world_size``: the nodes that the ranks are on, equally many on each. ``None`` is as many as the
            cluster profile needs.
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
    check_keywords(estimate, unknown)
    options = EstimateOptions(
        batch=batch,
        seq=seq,
        packed=packed,
        dtype=dtype,  # type: ignore[arg-type]  # it becomes a string there
        autocast=autocast,  # type: ignore[arg-type]
        attention=attention,
        optimizer=optimizer,
        fused_backward=fused_backward,
        quantization=quantization,
        lora=lora,
        lora_targets=lora_targets,
        lora_dtype=lora_dtype,  # type: ignore[arg-type]
        lora_dropout=lora_dropout,
        dora=dora,
        rslora=rslora,
        loss=loss,
        accumulation=accumulation,
        clip=clip,
        policy=policy,
        memory_budget=memory_budget,
        memory=memory,
        world_size=world_size,
        nodes=nodes,
        cluster=cluster,
        task=task,
    )
    with reporting(progress) as begin:
        return estimate_model(model, device, options, begin)


def estimate_model(
    model: Any,
    device: str | Path | DeviceProfile,
    options: EstimateOptions,
    begin: Report,
    *,
    trainer: str | None = None,
) -> Estimate:
    """Does the work of :func:`estimate`; ``begin`` gets a line about each stage, ``trainer`` will get its lines."""
    require(EXTRA, "transformers", "yaml", "numpy", "networkx")  # before seconds of imports
    budget = check_budget(options.memory_budget)
    _check_policy(options)  # now, not after the model is built
    machine = load_profile(device)
    if options.memory is not None:
        machine = machine.with_memory(options.memory)
    if options.attention == "flash" and machine.kind == "cuda" and not _has_flash_attention(machine):
        what = f"expected a device of compute capability 8.0 or above for FlashAttention-2, got {machine.name}"
        raise ConfigError(f"{options.named('attention')}: {what} · fix: {options.setting('attention', 'sdpa')}")
    begin("reading the config of the model")
    source = read_model(model, options)
    if trainer is not None:
        check_trainer(trainer, options, source.task)
    begin(f"building {source.architecture}")
    network = network_of(options, machine)
    with simulated_rank(options.world_size, None, machine, network) as simulated, step_errors(source):
        fake = FakeDevice(machine, is_padded=False, cluster=simulated, others=packaged_gpus())
        with fake.building():
            module, step_fn, optimizers = source.make(machine.kind)
        with frozen_objects(), without_value_checks():
            step = FakeStep(
                fake, module, step_fn, optimizers, num_micro_batches=options.accumulation, num_traced=TRACED
            )
            runs = _Runs(module, step, begin, options.policy)
            columns = runs.under_best_plan(budget) if options.policy is None else runs.under(options.policy)
    samples = options.batch * options.accumulation
    tokens = None if source.seq is None else source.seq * samples  # of an encoder-decoder, its inputs'
    policies = {
        name: PolicyEstimate.of(plan, runs.measured, machine, samples=samples, tokens=tokens, title=title)
        for name, (title, plan) in columns.items()
    }
    parameters = list(module.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    states = [state for optimizer in optimizers for state in states_of(optimizer)]
    *_, last = policies.values()
    notes = list(() if simulated is None else simulated.notes)
    on_device = [state for state in states if not is_on_host(state)]
    tensors = [*parameters, *module.buffers()], trainable, on_device
    weight_bytes, gradient_bytes, optimizer_bytes = (_bytes_on(machine, each) for each in tensors)
    # Those of all parameters at once, by PyTorch's `foreach`.
    has_temporaries = not {"AdamW foreach", "Adam foreach"}.isdisjoint(runs.step.assumptions)
    is_bound_by_update = last.binding == Phase.OPTIMIZER.value and has_temporaries
    fused = f"{options.setting('optimizer', 'adamw-fused')}, whose update has no temporaries"
    if runs.fault:
        of_tensors = machine.memory_bytes - machine.context_bytes
        are_states_too_large = weight_bytes + gradient_bytes + optimizer_bytes > of_tensors
        fixes = [*([fused] if is_bound_by_update else []), *_fixes(source, are_states_too_large=are_states_too_large)]
        more = "a device with more memory" if budget == "max" else f"a larger {options.named('memory_budget')}"
        notes.insert(0, f"{runs.fault} · fix: {', or '.join(filter(None, (', '.join(fixes), more)))}")
    elif is_bound_by_update:
        notes.append(f"the temporaries of the update set the peak · fix: {fused}")
    notes += runs.notes if last.fits else []
    if options.world_size is not None:
        notes += _uneven_note(module, options.world_size)
    devices, other_devices = _devices_with(
        min(one.nvidia_smi_bytes or one.allocated_bytes for one in policies.values()),
        {gpu.name for gpu in fake.alike},
        needs_flash=options.attention == "flash",
    )
    return Estimate(
        model=source.name,
        architecture=source.architecture,
        task=source.task,
        device=machine.name,
        memory_bytes=machine.memory_bytes,
        batch=options.batch,
        seq=source.seq,
        world_size=options.world_size or 1,
        num_parameters=num_parameters(module),
        num_trainable=sum(parameter.numel() for parameter in trainable),
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        host_bytes=sum(state.nbytes for state in states if is_on_host(state) and state.dim()),
        policies=policies,
        plan=columns["plan"][1] if options.policy is None else None,
        devices=devices,
        other_devices=other_devices,
        assumptions=tuple(_assumptions(source, runs.step, module)),
        notes=tuple(notes),
        setup=_setup_of(source, model, runs.layers),
    )


def _has_flash_attention(machine: DeviceProfile) -> bool:
    return (machine.capability or (8, 0)) >= (8, 0)


def _devices_with(num_bytes: int, alike: set[str], *, needs_flash: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the packaged GPUs with as much memory, smallest first: those that are ``alike``, and the others."""
    gpus = [gpu for gpu in packaged_gpus() if gpu.memory_bytes >= num_bytes]
    names = [gpu.name for gpu in gpus if not needs_flash or _has_flash_attention(gpu)]
    return tuple(name for name in names if name in alike), tuple(name for name in names if name not in alike)


def _check_policy(options: EstimateOptions) -> None:
    if options.policy is None:
        return
    try:
        rule = parse_rule(options.policy)
    except ConfigError as error:
        raise ConfigError(f"{options.named('policy')}: {error}") from None
    if isinstance(rule, Joined):
        what = "expected a policy that each layer can have alone, got 'joined', which is for runs of layers"
        fix = f"{options.setting('policy', 'full')}, or leave it out: the best plan may join layers"
        raise ConfigError(f"{options.named('policy')}: {what} · fix: {fix}")


def network_of(options: EstimateOptions, machine: DeviceProfile) -> ClusterProfile | None:
    """Returns the nodes of the ranks and the links between them; ``None`` for one process."""
    if options.world_size is None:
        return None
    network = cluster_of(options.cluster, machine)
    if options.nodes is None:
        return network
    return replace(network, ranks_per_node=options.world_size // options.nodes)


def _uneven_note(model: nn.Module, world_size: int) -> Iterator[str]:
    """Yields a note where FSDP2 leaves much more than a share of the weights on rank 0, which is simulated."""
    weights = {name: (weight, local_shard(weight.data)) for name, weight in model.named_parameters()}
    numel = sum(weight.numel() for weight, _ in weights.values())
    local = sum((weight if shard is None else shard).numel() for weight, shard in weights.values())
    if local < _UNEVEN * numel / world_size:
        return
    uneven = {
        name: weight for name, (weight, shard) in weights.items() if weight.shape and weight.shape[0] % world_size
    }
    largest = max(uneven, key=lambda name: uneven[name].numel(), default=None)
    if largest is not None:
        rows = uneven[largest].shape[0]
        num_holders = -(-rows // -(-rows // world_size))
        share = f"1/{numel / local:.3g}"
        yield (
            f"rank 0 has {share} of the weights, not 1/{world_size}: FSDP2 shards by rows, and {largest} has {rows}, "
            f"which {num_holders} of {world_size} ranks have · fix: fully_shard(..., shard_placement_fn=lambda weight: "
            "Shard(1)) for these"
        )


def _fixes(source: PretrainedModel, *, are_states_too_large: bool) -> list[str]:
    """Returns what takes less memory, what costs nothing first.

    Args:
        source: The model and its step.
        are_states_too_large: Whether weights, gradients and states alone are too much, which no batch changes.
    """
    options, fixes = source.options, []
    if not are_states_too_large:
        fixes += [f"a smaller {options.named('batch')}"] if options.batch > 1 else []
        fixes += [] if source.seq is None else [f"a shorter {options.named('seq')}"]
    if source.dtype is torch.float32:
        fixes.append(options.setting("dtype", "bfloat16"))
    return fixes if options.lora is not None else [*fixes, options.setting("lora", 16)]


def _setup_of(source: PretrainedModel, model: Any, blocks: Sequence[tuple[str, nn.Module]]) -> TrainingSetup:
    path = Path(model).expanduser() if isinstance(model, (str, os.PathLike)) else None
    return TrainingSetup(
        options=source.options,
        model=None if path is None else str(path.parent if path.is_file() else model),
        auto_class=source.auto_class,
        task=source.task,
        seq=source.seq,
        dtype=str(source.dtype).removeprefix("torch."),
        has_cache=source.has_cache,
        layers=tuple(name for name, _ in blocks),
        # FSDP2 makes a class of its own of each.
        layer_classes=tuple(dict.fromkeys(type(block).__name__.removeprefix("FSDP") for _, block in blocks)),
    )


@final
@dataclass(frozen=True)
class _Policies:
    """The policies of all blocks, as a configuration of a search."""

    names: tuple[str, ...]
    plan: Plan = field(compare=False)


@final
class _Runs:
    """A step that was measured under all policies of each kind of layer, or under one, and its runs under plans.

    ``begin`` gets a line about each run.
    """

    def __init__(self, model: nn.Module, step: FakeStep, begin: Report, policy: str | None) -> None:
        self.step = step
        self.fault = ""
        """Why no plan fits."""
        self.notes: list[str] = []
        """Notes on the best plan."""
        self._model = model
        self._begin = begin
        self._search: Search[_Policies, CheckedPlan] = Search(self._run, skips=lambda _: False, where=str)
        begin(f"simulating the step under {policy or 'all policies of each kind of layer'}")
        candidates = None if policy is None else () if _is_keep(policy) else (policy,)
        options = PlanOptions(
            candidates=candidates, progress=lambda done, total: begin(f"run {done} of {total} is done")
        )
        self.layers = find_blocks(model, None)
        self._planners = measure_all(step, model, self.layers, options, PlanGroup())
        self.measured = self._planners.plain.measured

    def under(self, policy: str) -> dict[str, tuple[str, Plan]]:
        """Runs the step with everything kept, and under one policy; returns a heading and the plan of each."""
        titles = {"keep": _PLAIN, policy: _PLAIN if _is_keep(policy) else f"{policy} on all layers"}
        plans = self._planners.plain.uniform().values()
        return {
            name: (title, self._run_under(plan).plan) for (name, title), plan in zip(titles.items(), plans, strict=True)
        }

    def under_best_plan(self, budget: Budget) -> dict[str, tuple[str, Plan]]:
        """Runs the step with everything kept, with every layer recomputed, and under the best plan."""
        try:
            check_parameters(self._model, budget)
        except PlanError as error:  # a budget below the weights alone
            self.fault, budget = str(error).partition(" · fix: ")[0], "min"
        uniform, memory = self._planners.plain.uniform(), self.step.memory(self.measured.model.static_bytes)
        limit = None if budget == "min" else budget_bytes(budget, memory, self._planners.plain.plain.peak)
        keep, full = (self._run_under(uniform[name]) for name in ("keep", "full"))
        plan = self._planners.best_of(lambda planner: self._best_plan(planner, budget, limit, keep, full))
        plan = replace(plan, memory_budget=budget, headroom_bytes=memory.headroom if budget == "max" else 0)
        self.notes = [note for note in plan.notes if note not in uniform["keep"].notes]
        title = "lowest peak" if self.fault else "best plan"
        return {"keep": (_PLAIN, keep.plan), "full": ("recompute all layers", full.plan), "plan": (title, plan)}

    def _best_plan(
        self, planner: Planner, budget: Budget, limit: int | None, keep: CheckedPlan, full: CheckedPlan
    ) -> Plan:
        if limit is None:
            return self._run_under(planner.lowest(planner.floor.peak)).plan
        of_reserved = self.step.limits_reserved(budget)

        def is_steady(run: CheckedPlan) -> bool:
            """Whether the step runs within the limit, without releasing memory of the allocator each time."""
            return run.plan.predicted_reserved_bytes <= limit and run.is_steady

        if is_steady(keep) if of_reserved else keep.plan.predicted_peak_bytes <= limit:
            return replace(keep.plan, budget_bytes=limit)  # nothing is faster
        if planner.floor.peak <= limit:
            try:
                # What the allocator reserves beyond the tensors is known of the two runs so far, such as 0.8 GiB with
                # everything kept and 0.3 recomputed. It is a guess for the first proposal alone: later ones have that
                # of the run before.
                gaps = (run.plan.predicted_reserved_bytes - run.plan.predicted_peak_bytes for run in (keep, full))
                return plan_in_limit(planner, self.step, budget, limit, PlanGroup(), gap=min(gaps))
            except PlanError:
                if of_reserved and is_steady(full):
                    return replace(full.plan, budget_bytes=limit)
        self.fault = f"no plan fits into {format_bytes(limit)}"
        lowest = self._run_under(planner.lowest(limit)).plan
        return min(lowest, full.plan, key=lambda plan: plan.predicted_reserved_bytes or plan.predicted_peak_bytes)

    def _run_under(self, plan: Plan) -> CheckedPlan:
        """Returns the plan with the figures of a run under it: allocated and reserved bytes, and seconds."""
        run = self._search.result(_Policies(policies_key(plan), plan))
        assert run is not None
        return run

    def _run(self, policies: _Policies) -> CheckedPlan:
        self._begin(f"simulating the step under {', '.join(dict.fromkeys(policies.names))}")
        return run_under(policies.plan, self._model, self.step, PlanGroup())


def _is_keep(policy: str) -> bool:
    return isinstance(parse_rule(policy), Keep)


def _bytes_on(machine: DeviceProfile, tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of tensors on a device, those of a shared storage once."""
    sizes = {id(storage): storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}
    return sum(map(machine.rounded, sizes.values()))


_LOSSES = {
    "tiles": "head and loss in eight slices of the tokens, of which one has logits at a time",
    "trl": "the chunked loss of TRL, over tiles of 4096 tokens and 32768 entries of the vocabulary",
    "liger": "the fused linear cross entropy of Liger, which computes gradients in forward",
}


def _assumptions(source: PretrainedModel, step: FakeStep, model: nn.Module) -> Iterator[str]:
    options = source.options
    default = "" if options.dtype or source.config.dtype else " (the default)"
    yield f"weights in {str(source.dtype).removeprefix('torch.')}{default}"
    if options.quantization is not None:
        yield quantized_phrase(model, options.quantization)
    yield from step.assumptions
    if options.fused_backward:
        yield "each weight updated in backward, as soon as its gradient is complete"
    if options.scales_gradients(str(source.dtype).removeprefix("torch.")):
        yield "gradients scaled by torch.amp.GradScaler, none of which overflows"
    clipping = "gradients clipped by their norm" if options.clip else "no gradient clipping"
    batches = f"{options.accumulation} micro-batches of {options.batch} a step"
    yield f"{clipping}, {batches if options.accumulation > 1 else 'no accumulation'}"
    if options.loss != "model":
        yield _LOSSES[options.loss]
    if options.world_size is not None:
        gathered = "" if options.autocast is None else f", gathered in {options.autocast}, gradients reduced in float32"
        yield f"FSDP2 over {options.world_size} ranks, each layer sharded and resharded after forward{gathered}"
    if source.seq is None:
        height, width = source.image_size
        yield f"images of {height} x {width} pixels"
    else:
        default = "" if options.seq else " (the default)"
        packed = "" if options.packed is None else f", {source.seq // options.packed} samples packed into each"
        yield f"sequences of {source.seq} tokens{default} without padding{packed}, no cache of keys and values"
    if source.task == "seq2seq-lm":
        yield "labels as long as the inputs, whose tokens count"
    if source.has_experts:
        yield "routing of experts is assumed balanced"
    if options.lora is not None:
        yield lora_phrase(model, options)
