"""Builds the model of a run, sharded over its processes, and the graphs of its training and evaluation steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphckpt.blocks.select import marked_layers
from graphckpt.errors import ConfigError, bullets
from graphckpt.graph.graph import Graph
from graphckpt.graph.update import TotalNorm
from graphckpt.train.data.samples import Opened
from graphckpt.train.loop import attribute_errors
from graphckpt.train.parallel.ranks import TrainRanks, seed_all, seed_per_rank
from graphckpt.train.policies import block_policies, selected_names
from graphckpt.train.settings import TrainConfig
from graphckpt.train.tasks.base import Task, TextTask, sum_of_losses
from graphckpt.train.tasks.causal_lm import LOSS_HEAD, CausalLM

if TYPE_CHECKING:
    from graphckpt.train.parallel.data_parallel import GradSync
    from graphckpt.train.parallel.pipeline import Pipeline, Stages


class BuiltModel(NamedTuple):
    model: nn.Module
    architecture: str
    """The name of its class before sharding, which changes it."""
    pipeline: Pipeline | None
    """Runs it, if this process has one of several pipeline stages."""
    task: Task
    settings: TrainConfig
    ranks: TrainRanks

    def runs(self, name: str) -> bool:
        """Whether this process runs the module of that name; in a pipeline others run some."""
        return self.pipeline is None or self.pipeline.runs(name)

    def block_fields(self) -> dict[str, dict[str, Any]]:
        blocks = block_policies(self.model, self.settings.activation_checkpoint)
        if self.pipeline is not None:
            return {name: fields for name, fields in blocks.items() if self.runs(name)}
        mesh = self.ranks.tensor_mesh
        for fields in blocks.values() if mesh is not None else ():
            if fields.get("partition") is True:
                fields["partition"] = mesh  # not all processes: other data-parallel ranks have other samples
        return blocks


def build_model(
    make_model: Callable[[], nn.Module], task: Task, settings: TrainConfig, ranks: TrainRanks, device: torch.device
) -> BuiltModel:
    """Returns the model that the settings describe, and seeds each rank; collective."""
    # One seed on all ranks until the end of this function: all draw the same weights. At its end ranks with other
    # samples get separate seeds, for dropout.
    seed_all(settings.seed)
    with attribute_errors("model, task", "making the model"):
        model = task.prepare(make_model())
    architecture = type(model).__name__  # sharding changes the class
    if settings.dist.num_processes > 1 and hasattr(model, LOSS_HEAD):
        what = f"task.loss_head: expected one process, got {settings.dist.num_processes}"
        raise ConfigError(f"{what} · fix: leave the key out, or train on one process")
    pipeline = None if ranks.stage_mesh is None else _pipeline(model, task, settings, ranks, device)
    model = (model if pipeline is not None else model.to(device)).train()
    # Tensor parallelism first: FSDP2 takes the DTensors that it leaves, and shards them once more along dim 0.
    if ranks.tensor_mesh is not None:
        from graphckpt.train.parallel.tensor_parallel import shard_model  # noqa: PLC0415 - as below

        model = shard_model(model, ranks.tensor_mesh)
    if (data_mesh := ranks.data_mesh) is not None:
        from graphckpt.train.parallel.data_parallel import apply_fsdp, broadcast_weights  # noqa: PLC0415 - as below

        # The seed is one, but a model may draw from elsewhere, or read its weights from files of its machine.
        broadcast_weights(model, data_mesh)
        if stage := settings.zero_optimization.active_stage:
            section = settings.activation_checkpoint  # its blocks are layers, checkpointed or not
            layers = marked_layers(model) if section.select is None else selected_names(model, section)
            apply_fsdp(model, data_mesh, layers, stage=stage)
    seed_per_rank(settings.seed, ranks.stream)
    return BuiltModel(model, architecture, pipeline, task, settings, ranks)


def _pipeline(model: nn.Module, task: Task, settings: TrainConfig, ranks: TrainRanks, device: torch.device) -> Pipeline:
    from graphckpt.train.parallel import pipeline  # noqa: PLC0415 - loads what one process does not need

    stages = stages_of(model, task, settings)
    assert isinstance(task, CausalLM)
    if not ranks.is_simulated:  # it compares values, which fake tensors lack
        pipeline.check_split(model, stages, task.losses)
    pipeline.keep_stage(model, stages, ranks.stage, device)
    dtype = getattr(torch, settings.amp.dtype) if settings.amp.enabled else None
    return pipeline.Pipeline(model, stages, task, ranks, num_micro_batches=settings.sizes.accumulation, dtype=dtype)


def stages_of(model: nn.Module, task: Task, settings: TrainConfig) -> Stages:
    """Returns the names of the modules of each pipeline stage."""
    from graphckpt.train.parallel.pipeline import split_layers  # noqa: PLC0415 - as above

    if not isinstance(task, CausalLM):
        what = f"train.dist.pipeline_parallel_size: {type(task).__name__} is not supported with a pipeline"
        raise ConfigError(f"{what} · fix: task=CausalLM, or train.dist.pipeline_parallel_size=1")
    fields, dist = block_policies(model, settings.activation_checkpoint), settings.dist
    layer_stages = dist.custom_pipeline_stage_id
    return split_layers(model, fields, num_stages=dist.pipeline_parallel_size, layer_stages=layer_stages)


def check_task(task: Task, model: nn.Module, opened: Opened, *, runs: bool = True) -> None:
    """Checks that a task on text fits its model and its text; ``runs`` allows it to try the model."""
    # The check of the base class compares numbers of the configs alone. That of a subclass may run the model, as
    # `CausalLM`'s does to compare logits, which fake tensors do not have.
    if opened.text and isinstance(task, TextTask):
        faults = list((type(task) if runs else TextTask).check(task, model, opened.text))
        if faults:
            raise ConfigError(bullets("model and data do not fit", faults) if len(faults) > 1 else faults[0])


@final
class ForwardBackward:
    """Runs forward and backward as a training step and a simulated one of it do, and synchronizes gradients.

    A call takes a micro-batch, or in a pipeline the micro-batches of an update, which the pipeline splits itself.
    """

    def __init__(self, built: BuiltModel) -> None:
        self._task = built.task
        self._pipeline = built.pipeline
        self._grad_sync: GradSync | None = None
        if built.ranks.data_mesh is not None:
            from graphckpt.train.parallel.data_parallel import make_grad_sync  # noqa: PLC0415 - as above

            losses, stage = partial(built.task.losses, built.model), built.settings.zero_optimization.active_stage
            self._grad_sync = make_grad_sync(built.model, losses, built.ranks, stage=stage)
        if built.pipeline is not None:
            built.pipeline.grad_sync = self._grad_sync
        self.total_norm: TotalNorm | None = None if built.pipeline is None else built.pipeline.total_norm
        """What clips gradients of which other processes hold some; ``None`` where this one has all."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, is_last: bool) -> dict[str, Tensor]:
        """Returns the losses, ``total_loss`` first. ``is_last`` tells the last micro-batch of an update.

        ``model`` is the one that was built, or what a ``Graph`` has in its place.
        """
        if self._pipeline is not None:
            return self._pipeline.losses(batch)
        sync = self._grad_sync
        with nullcontext() if sync is None else sync.micro_batch(is_last=is_last):
            losses = self._task.losses(model, batch) if sync is None else sync.losses(batch)
            total = sum_of_losses(losses)
            total.backward()
        return {"total_loss": total, **losses}


class _TaskGraph(Graph):
    """Runs a model on batches of a task, under autocast if that is set; a pipeline does so itself."""

    def __init__(self, built: BuiltModel) -> None:
        super().__init__()
        is_shared = built.ranks.data_mesh is not None or built.pipeline is not None  # ranks would have to capture alike
        self.config.capture = "eager" if is_shared else built.settings.capture
        self.model = built.model
        self.task = built.task
        self.pipeline = built.pipeline
        amp = built.settings.amp
        if amp.enabled and self.pipeline is None:
            self.config.enable_amp(True, dtype=getattr(torch, amp.dtype))


def _advice(names: Sequence[str]) -> str:
    """Returns the override of the config with which blocks keep everything, as a shell takes it.

    >>> print(_advice(["model.layers.2", "model.layers.3"]))
    'train.activation_checkpoint.policies={"layers.2": false, "layers.3": false}'
    """
    policies = ", ".join(f'"{name.removeprefix("model.")}": false' for name in names)
    return shlex.quote(f"train.activation_checkpoint.policies={{{policies}}}")


@final
class TrainGraph(_TaskGraph):
    def __init__(
        self, built: BuiltModel, optimizer: Optimizer, scheduler: LRScheduler, blocks: Mapping[str, dict[str, Any]]
    ) -> None:
        forward_backward = ForwardBackward(built)
        super().__init__(built)
        self.forward_backward = forward_backward
        amp, accumulation = built.settings.amp, built.settings.sizes.accumulation
        # `build` runs once for each micro-batch and is not told which. A replay of a captured step does not run it, and
        # need not: only synchronizing gradients asks for the last one, and with several processes steps are eager.
        self.last_micro_batches = cycle([*[False] * (accumulation - 1), True])
        for name, fields in blocks.items():
            module = built.model.get_submodule(name)
            # By identity: in the graph the block is called `model.` + name, and a module may have several names.
            block: Any = next(block for block in self.model.modules() if block.origin is module)
            block.config.update(fields)
        if blocks:  # else there is a plan, or no policy
            self._step.advice = _advice
        self.add_optimizer(optimizer, lr_sch=scheduler)
        self._update.total_norm = forward_backward.total_norm
        if self.pipeline is not None:  # which splits a batch itself
            return
        if accumulation > 1:
            self.config.set_gradient_accumulation_steps(accumulation)
        if amp.enabled and amp.dtype == "float16":
            self.set_grad_scaler(torch.amp.GradScaler(next(built.model.parameters()).device.type))

    def build(self, **batch: Tensor) -> dict[str, Tensor]:
        return self.forward_backward(self.model, batch, is_last=next(self.last_micro_batches))


@final
class EvalGraph(_TaskGraph):
    def build(self, **batch: Tensor) -> dict[str, Tensor]:
        return self.task.tally(self.model, batch) if self.pipeline is None else self.pipeline.tally(batch)
