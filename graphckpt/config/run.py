"""Plans the step that a config describes, and finds the batch sizes that fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.budget import Budget, check_budget
from graphckpt.config.files import LazyConfig
from graphckpt.config.lazy import dotted_name
from graphckpt.config.schema import RunConfig, model_of, optimizer_of
from graphckpt.config.source import ConfigSource, rename_old_keys
from graphckpt.errors import ConfigError
from graphckpt.graph.update import ScaledBackward, Update
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.candidates import compile_options
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import frozen_objects, plan_step
from graphckpt.planning.planner import Planners
from graphckpt.planning.rows import byte_values, second_values
from graphckpt.planning.steps import FakeStep, first_step
from graphckpt.search.fit import SizedStep, SizedSteps, find_batch_size
from graphckpt.simulation.cluster_profile import Cluster, ClusterProfile
from graphckpt.simulation.fake_cluster import FakeCluster, cluster_of
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile, load_profile
from graphckpt.train.build_model import ForwardBackward, build_model, check_task
from graphckpt.train.data.samples import to_device
from graphckpt.train.loop import attribute_errors
from graphckpt.train.output import Report
from graphckpt.train.parallel.ranks import TrainRanks, resolve_device
from graphckpt.train.policies import head_policies, selected_names
from graphckpt.train.settings import DistConfig
from graphckpt.train.snapshot.saved_run import CONFIG
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.planning.plan import Plan
    from graphckpt.search.fit_result import Fit

_SECTION = "train.activation_checkpoint"
_SIZES = ("train.train_micro_batch_size", "train.num_accumulation_steps")
_POLICIES = ("fit", "enabled", "rule", "policies", "memory_budget", "head", "offload")  # keys of it that a fit sets


@contextmanager
def fake_steps_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    device: str | Path | DeviceProfile,
    cluster: Cluster = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[FakeConfigSteps]:
    """Yields the steps that a config describes, of any batch size, simulated on the device of a profile.

    ``options`` are fields of :class:`~graphckpt.planning.PlanOptions` that replace those of the config. With
    ``train.dist`` the steps are those of rank 0, which has the largest shards; ``cluster`` has the nodes and links.

    Raises:
        ConfigError: the config or an argument cannot be used, there is a ``cluster`` for a config of one process, or
            the config describes a pipeline, whose stages differ.
    """
    with fake_stages_from(config_file, overrides, device=device, cluster=cluster, options=options) as stages:
        if len(stages) > 1:
            what = f"expected 1 to fit a batch size, got {len(stages)}; the stages of a pipeline have different blocks"
            fix = "graphckpt plan with the train.train_micro_batch_size to try"
            raise ConfigError(f"train.dist.pipeline_parallel_size: {what} · fix: {fix}")
        with stages[0] as steps:
            yield steps


@contextmanager
def fake_stages_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    device: str | Path | DeviceProfile,
    cluster: Cluster = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[list[AbstractContextManager[FakeConfigSteps]]]:
    """Yields the steps of each pipeline stage; as :func:`fake_steps_from`. One stage at a time may be entered."""
    target = load_profile(device)
    network = cluster_of(cluster, target)
    source = ConfigSource(config_file, overrides)
    with source.checked() as run:
        dist = run.train.dist
        if cluster is not None and dist.num_processes == 1:
            what = f"expected a config of several processes with it, got {network.name!r} and one process"
            raise ConfigError(f"cluster: {what} · fix: leave it out, or set train.dist.data_parallel_size=8")
        yield [_fake_steps(run, target, network, options or {}, n) for n in range(dist.pipeline_parallel_size)]


@contextmanager
def _fake_steps(
    run: RunConfig, machine: DeviceProfile, network: ClusterProfile, options: Mapping[str, Any], stage: int
) -> Iterator[FakeConfigSteps]:
    dist = run.train.dist
    size, rank = dist.num_processes, stage * (dist.num_processes // dist.pipeline_parallel_size)  # first of its stage
    with FakeCluster(size, rank, profile=network) if size > 1 else nullcontext() as cluster:
        yield FakeConfigSteps(run, machine, options, cluster)


@final
class FakeConfigSteps:
    """The step of one rank on fake tensors: the trainer's model, as it is wrapped, and its forward and backward.

    ``cluster`` is the simulated rank of a run of several processes, which has been entered.
    """

    def __init__(
        self,
        run: RunConfig,
        machine: DeviceProfile,
        options: Mapping[str, Any],
        cluster: FakeCluster | None = None,
    ) -> None:
        self.run = run
        self.machine = machine
        self._task: Any = run.task()
        self._data = run.data().open(self._task, seed=run.train.seed, report=Report.silent())
        self._fake = FakeDevice(machine, cluster=cluster)
        here = self._fake.device
        ranks = TrainRanks(run.train.dist, here)  # reads numbers of ranks, so it comes before the fake tensors
        with self._fake.building():
            built = build_model(partial(model_of, run), self._task, run.train, ranks, here)
        self.model: Any = built.model
        self._is_pipeline = built.pipeline is not None
        check_task(self._task, self.model, self._data, runs=False)
        with self._fake:
            self.optimizer = optimizer_of(run, self.model, machine.kind)
            self._forward_backward = ForwardBackward(built)
        section = run.train.activation_checkpoint
        wanted = section.plan_options(**{**options, "partition": None, "compile": None})
        self.options = replace(wanted, head=head_policies(self.model, wanted.head))
        names = [name for name in selected_names(self.model, section) if built.runs(name)]
        self.blocks = [(name, self.model.get_submodule(name)) for name in names]
        self.notes = [] if cluster is None else [*_rank_notes(run.train.dist, cluster), *cluster.notes]
        if compile_options(section.compile) is not None:
            self.notes.append("compile: its effect is not known without the device; planned without")
        if section.partition:
            self.notes.append("partition: its effect is not known without the ranks; planned without")
        self._first: LiveBytes | None = None
        # FSDP2 and DDP allocate in the first step what they use in all later ones: for the plan, before the step.
        if cluster is not None:
            step_fn, _ = self._step_fn(run.train.sizes.micro_batch, run.train.sizes.accumulation)
            self._first = first_step(self._fake, step_fn)

    def step(self, size: int, accumulation: int = 1) -> SizedStep:
        step_fn, num_traced = self._step_fn(size, accumulation)
        num_micro_batches = accumulation if num_traced < accumulation and not self._is_pipeline else 0
        step = FakeStep(
            self._fake,
            self.model,
            step_fn,
            self.optimizer,
            num_micro_batches=num_micro_batches,
            num_traced=num_traced,
            first=self._first,
        )
        return SizedStep(step, self.model, self.blocks)

    def _step_fn(self, size: int, accumulation: int) -> tuple[Callable[[], None], int]:
        """Returns a step with so many samples in a micro-batch, and how many of the micro-batches it runs."""
        if self._is_pipeline:  # which splits the batch itself
            size, accumulation = size * accumulation, 1
        sample = _sample(self._data.train, size)
        with self._fake:
            batch = {
                name: torch.empty(accumulation * len(tensor), *tensor.shape[1:], dtype=tensor.dtype)
                for name, tensor in sample.items()
            }
        num_traced = accumulation
        if not self.options.offload:  # copies pile up over several micro-batches
            # The third micro-batch does what the second did. With ZeRO 1 and 2 the last one does something else. Of 16,
            # numbers 14 and 15 run: the first of them has no gradients to add to, the last one ends the update, and the
            # seconds of each count 8 times.
            num_traced = min(accumulation, 3 if self.run.train.zero_optimization.active_stage in (1, 2) else 2)
        arguments = self._forward_backward, self.model, self.optimizer, batch
        return _step_fn(self.run, self.machine.kind, *arguments, accumulation, num_traced), num_traced

    def plan(
        self,
        memory_budget: Budget,
        progress: Callable[[int, int], None] | None = None,
        on_measured: Callable[[Planners], None] = lambda _: None,
    ) -> Plan:
        """Plans the step of the config's batch size; ``on_measured`` gets the planners before they choose."""
        sizes, options = self.run.train.sizes, replace(self.options, progress=progress)
        step = self.step(sizes.micro_batch, sizes.accumulation).step
        with step.restoring(), frozen_objects():
            arguments = self.model, self.blocks, memory_budget, options, PlanGroup()
            return plan_step(step, *arguments, notes=self.notes, on_measured=on_measured)

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        """Returns a plan of this step as plain values, as ``graphckpt plan --json`` prints them."""
        sizes, amp, machine = self.run.train.sizes, self.run.train.amp, self.machine
        return {
            "device": plan.device,
            "is_simulated": plan.is_simulated,
            "world_size": plan.world_size,
            "rank": plan.rank,
            "device_memory_bytes": machine.memory_bytes,
            "memory_budget": plan.memory_budget,
            "budget_bytes": plan.budget_bytes,
            "headroom_bytes": plan.headroom_bytes,
            **byte_values(plan),
            **second_values(plan),
            "binding": plan.binding,
            "plain_peak_bytes": plan.plain_peak_bytes,
            "plain_seconds": plan.plain_step_seconds,
            "floor_bytes": plan.floor_bytes,
            "policies": plan.policies,
            "rows": [asdict(row) for row in plan.rows],
            "assumptions": {
                "step": list(plan.assumptions),
                "micro_batch_size": sizes.micro_batch,
                "accumulation_steps": sizes.accumulation,
                "weight_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()}),
                "autocast_dtype": amp.dtype if amp.enabled else None,
                "optimizer": dotted_name(type(self.optimizer)),
                "attention_kernels": list(machine.attention),
                "rounding_bytes": machine.rounding,
                "context_bytes": machine.context_bytes,
            },
            "notes": list(plan.notes),
        }

    def fit(
        self,
        memory_budget: Budget,
        batch_sizes: Iterable[int] | None = None,
        global_batch: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Fit:
        """Finds batch sizes as :func:`graphckpt.find_batch_size` does; ``global_batch`` is by default the config's."""
        train = self.run.train
        if global_batch is None and train.global_batch_size is not None:
            global_batch = train.global_batch_size // train.dist.data_parallel_size
        steps = SizedSteps(
            make_sized=self.step,
            budget=check_budget(memory_budget, for_fit=True),
            options=self.options,
            is_real=False,
            can_accumulate=True,
            notes=self.notes,
        )
        return steps.fit(batch_sizes, global_batch, progress)


def _rank_notes(dist: DistConfig, cluster: FakeCluster) -> Iterator[str]:
    what = "bytes and batch sizes are those of one rank"
    stages = dist.pipeline_parallel_size
    place = f"rank {cluster.rank} of {cluster.world_size}"
    if stages > 1:
        place = f"stage {cluster.rank * stages // cluster.world_size} of {stages}, {place}"
    yield f"{place}, {dist.describe()}: {what}"


def _sample(data: Any, size: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = data.batch(np.arange(size, dtype=np.int64) % max(1, len(data)))
    return batch


def _step_fn(
    run: RunConfig,
    device_type: str,
    forward_backward: ForwardBackward,
    model: nn.Module,
    optimizer: Optimizer,
    batch: dict[str, Tensor],
    accumulation: int = 1,
    num_traced: int = 1,
) -> Callable[[], None]:
    """Returns the update of a batch, of whose micro-batches only the last ``num_traced`` run."""
    amp = run.train.amp
    dtype = getattr(torch, amp.dtype) if amp.enabled else None
    update = Update("the step of the config")
    update.optimizers.append(optimizer)
    update.total_norm = forward_backward.total_norm
    if dtype is torch.float16:
        update.scaler = torch.amp.GradScaler(next(model.parameters()).device.type)

    def step() -> None:
        # The batch is on the device as a whole, and the trainer returns the losses of all micro-batches.
        losses: list[Any] = [torch.zeros(()) for _ in range(accumulation - num_traced)]
        for number in range(accumulation - num_traced, accumulation):
            micro_batch = {name: tensor.chunk(accumulation)[number] for name, tensor in batch.items()}
            scaled = nullcontext() if update.scaler is None else ScaledBackward(update.scaler)
            with nullcontext() if dtype is None else torch.autocast(device_type, dtype), scaled:
                losses.append(forward_backward(model, micro_batch, is_last=number == accumulation - 1))
        update.step([optimizer])

    return step


def fit_run(run: RunConfig, config: DictConfig, *, resume: bool = False) -> list[str]:
    """Writes the micro-batch, accumulation and policies that it chooses into ``config``; returns lines about them.

    A run that is resumed keeps the choice made at its start.
    """
    # Not fitted again: with other sizes, samples would be divided into updates differently, and a resumed run would not
    # have the bits of one that was not interrupted.
    saved = Path(run.train.output_dir).expanduser() / CONFIG
    if resume and saved.is_file():
        before = LazyConfig.load(saved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the names that an earlier version has written
            rename_old_keys(before)
        values = {key: OmegaConf.select(before, key) for key in (*_SIZES, *(f"{_SECTION}.{key}" for key in _POLICIES))}
        line = f"fit: micro-batch {values[_SIZES[0]]} x {values[_SIZES[1]]}, as at the start of the run"
    else:
        result, total, goal = _fit_real_steps(run), run.train.global_batch_size, run.train.activation_checkpoint.fit
        assert total is not None
        assert goal is not None
        best = result.at_global_batch(total, goal)
        assert best.plan is not None
        policies = {name: dict(fields) for name, fields in best.plan.policies.items()}
        # The policies replace rule, budget and fit: the copy of the config trains with them and measures nothing.
        section = {**dict.fromkeys(_POLICIES), "enabled": True, "policies": policies}
        values = dict(zip(_SIZES, (best.batch_size, best.accumulation), strict=True))
        values |= {f"{_SECTION}.{key}": value for key, value in section.items()}
        peak = f"peak up to {format_bytes(best.peak_bytes)} of {format_bytes(result.budget_bytes)}"
        rate = f"{best.samples_per_second:.3g} samples/s predicted"
        line = f"fit: micro-batch {best.batch_size} x {best.accumulation}, {peak}, {rate}"
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return [line]


def _fit_real_steps(run: RunConfig) -> Fit:
    train, section = run.train, run.train.activation_checkpoint
    assert train.global_batch_size is not None
    device = resolve_device(train.device, train.dist)
    task: Any = run.task()
    data = run.data().open(task, seed=train.seed, report=Report.silent()).train
    built = build_model(partial(model_of, run), task, train, TrainRanks(train.dist, device), device)
    model, forward_backward = built.model, ForwardBackward(built)
    optimizer = optimizer_of(run, model)

    def make_step(size: int) -> tuple[nn.Module, Callable[[], None]]:
        batch = to_device(_sample(data, size), device)
        return model, _step_fn(run, device.type, forward_backward, model, optimizer, batch)

    options = section.plan_options(select=selected_names(model, section))
    options = replace(options, head=head_policies(model, options.head))
    with attribute_errors("model, task, data, optim", "fitting the batch size"):
        return find_batch_size(
            make_step,
            # In equal micro-batches, as gradients are a mean over them: 1, 2, 3, 4, 6, 12 for updates of 12 samples.
            batch_sizes=[size for size in range(1, train.global_batch_size + 1) if train.global_batch_size % size == 0],
            memory_budget="max" if section.memory_budget is None else section.memory_budget,
            **{name: getattr(options, name) for name in options.names()},
        )
