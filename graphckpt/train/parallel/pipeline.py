"""Pipeline parallelism: splits a causal language model of Transformers into stages that run PyTorch's 1F1B schedule.

A stage keeps the full module tree, so that names, masks and positions are those of one process. Modules of other
stages pass their input through, and their weights are on the meta device.

    stage 0    wte  wpe  drop  h.0  h.1   .    .    .     .        ids -> hidden
    stage 1     .    .    .     .    .   h.2  h.3  ln_f  lm_head   hidden -> loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel

from graphckpt.errors import ConfigError
from graphckpt.integrations.pipelining import stages_of
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import on_other_stage
from graphckpt.train.tasks.base import sum_of_losses
from graphckpt.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    from graphckpt.train.parallel.data_parallel import GradSync

Stages: TypeAlias = tuple[tuple[str, ...], ...]
"""For each stage, the names of its modules, in order."""
Read: TypeAlias = Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]]
"""Returns a task's losses or sums of a batch, on the last stage."""

_GPT2 = ("wte", "wpe", "drop", "h", "ln_f")  # of other models, `base_model_pp_plan` of the config says it
_WHERE = "train.dist.pipeline_parallel_size"
_FIX = f"fix: {_WHERE}=1"
_FAILED = "failed to run forward"  # how a stage begins to say so, with what it was as the cause


def split_layers(
    model: nn.Module, fields: Mapping[str, Mapping[str, Any]], *, num_stages: int, layer_stages: list[int] | None = None
) -> Stages:
    """Returns the modules of each stage: embeddings in the first, the head in the last.

    Layers are in the stages of ``layer_stages``, or of ``stage_id`` in the ``fields`` of the model's blocks, or in
    stages of equal size. The model may have been split already.
    """
    before, layers, after = _parts(model)
    staged = {name: values for name, values in fields.items() if values.get("stage_id") is not None}
    if layer_stages is not None:
        if len(layer_stages) != len(layers):
            what = f"{len(layer_stages)} stages, and the model has {len(layers)} layers"
            raise ConfigError(f"train.dist.custom_pipeline_stage_id: {what} · fix: name one for each")
        staged = {name: {"stage_id": stage} for name, stage in zip(layers, layer_stages, strict=True)}
    if not staged:
        if len(layers) < num_stages:
            what = f"{_WHERE}: {num_stages}, and the model has {len(layers)} layers"
            raise ConfigError(f"{what} · fix: use {len(layers)} or less")
        # 7 layers in 3 stages: 3, 2 and 2.
        staged = {name: {"stage_id": n * num_stages // len(layers)} for n, name in enumerate(layers)}
    numbers = stages_of(layers, staged, num_stages=num_stages)
    stages = [[name for name, number in zip(layers, numbers, strict=True) if number == n] for n in range(num_stages)]
    stages[0] = [*before, *stages[0]]
    stages[-1] = [*stages[-1], *after]
    return tuple(map(tuple, stages))


def _parts(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of the modules before the layers, of the layers, and of those after them."""
    config: Any = getattr(model, "config", None)
    is_gpt2 = getattr(config, "model_type", None) == "gpt2" and not getattr(config, "add_cross_attention", False)
    order = _GPT2 if is_gpt2 else tuple(getattr(config, "base_model_pp_plan", None) or ())
    base: Any = getattr(model, "base_model", model)
    lists = [name for name in order if isinstance(getattr(base, name, None), nn.ModuleList)]
    if not isinstance(model, PreTrainedModel) or base is model or len(lists) != 1:
        what = f"{_WHERE}: no pipeline plan is known for {type(model).__name__}"
        fix = "use GPT-2 or a model of Transformers whose config has a base_model_pp_plan, such as Llama"
        raise ConfigError(f"{what} · fix: {fix}, or {_WHERE}=1")
    prefix, at = model.base_model_prefix, order.index(lists[0])
    layers = [f"{prefix}.{lists[0]}.{number}" for number, _ in getattr(base, lists[0]).named_children()]
    heads = [name for name, child in model.named_children() if child is not base]
    before, after = ([f"{prefix}.{name}" for name in names] for names in (order[:at], order[at + 1 :]))
    return before, layers, [*after, *heads]


def tied_weights(model: nn.Module, stages: Stages) -> list[str]:
    """Returns the names of weights tied between the first and the last stage, such as GPT-2's embedding and head."""
    owners: dict[int, set[int]] = {id(weight): set() for weight in model.parameters()}
    for number, names in enumerate(stages):
        for name in names:
            for weight in model.get_submodule(name).parameters():
                owners[id(weight)].add(number)
    shared = []
    for name, weight in model.named_parameters():
        used_by = owners[id(weight)]
        if not weight.requires_grad:
            continue
        if used_by == {0, len(stages) - 1}:
            shared.append(name)
        elif len(used_by) != 1:
            who = "all stages" if not used_by else f"stages {', '.join(map(str, sorted(used_by)))}"
            raise ConfigError(f"model: {name} is used by {who}: expected one stage for each weight · {_FIX}")
    return shared


def keep_stage(model: nn.Module, stages: Stages, stage: int, device: torch.device) -> None:
    """Moves this stage's modules to a device and all others to the meta device; in place."""
    others = _modules_elsewhere(model, stages, stage)
    inside = {module for other in others for module in other.modules()}
    modules = [module for module in model.modules() if module not in inside]
    here = {id(t) for module in modules for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the original: while it lives, nothing else has its id

    # A weight that several modules share is moved once, so that they still share it.
    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            target = tensor.detach().to(device if id(tensor) in here else "meta")
            is_weight = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = tensor, nn.Parameter(target, tensor.requires_grad) if is_weight else target
        return moved[id(tensor)][1]

    for module in model.modules():
        tensor_dicts: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for tensors in tensor_dicts:
            tensors.update({name: move(tensor) for name, tensor in tensors.items() if tensor is not None})
    for other in others:
        _pass_through(other)


def _modules_elsewhere(model: nn.Module, stages: Stages, stage: int) -> list[nn.Module]:
    return [model.get_submodule(name) for n, names in enumerate(stages) if n != stage for name in names]


def _pass_through(module: nn.Module) -> None:
    # A model adds the positions to whatever it gets as inputs_embeds: on later stages these are hidden states, to which
    # the first stage has added them.
    is_embedding = isinstance(module, nn.Embedding)
    module.forward = lambda x, *_, **__: torch.zeros((), device=x.device) if is_embedding else x


def check_split(model: PreTrainedModel, stages: Stages, read: Read) -> None:
    """Compares the full model, on the CPU, with its stages, run in sequence, on two tokens."""
    ids = torch.arange(2, device=next(model.parameters()).device).view(1, 2)
    config: Any = model.config
    was_training, kernel = model.training, config._attn_implementation
    model.eval()
    config._attn_implementation = "eager"  # the kernels for CUDA do not run on the CPU
    try:
        with torch.no_grad():
            expected = _stacked(read(model, {"input_ids": ids, "labels": ids}))
            x = ids
            for stage in range(len(stages)):
                run = StageRun(model, read, is_first=stage == 0, is_last=stage == len(stages) - 1)
                others = _modules_elsewhere(model, stages, stage)
                for module in others:
                    _pass_through(module)
                try:
                    x = run(x, labels=ids)
                finally:
                    for module in others:
                        del module.forward
    finally:
        model.train(was_training)
        config._attn_implementation = kernel
    if not torch.allclose(x, expected, rtol=1e-5):  # the same ops, so rounding is the same too
        what = f"model: the stages of {type(model).__name__}, run in sequence, differ from the whole model"
        raise ConfigError(f"{what}; more than hidden states passes between its layers · {_FIX}")


@final
class StageRun(nn.Module):
    """Runs one stage on a micro-batch: from ids or hidden states to hidden states or the task's losses.

    The last stage calls ``read`` and stacks its values in the order of ``names``; ``dtype`` is that of autocast.
    """

    def __init__(
        self, model: nn.Module, read: Read, *, is_first: bool, is_last: bool, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.names: list[str] = []
        self._read = read
        self._input = "input_ids" if is_first else "inputs_embeds"
        self._is_last = is_last
        self._dtype = dtype

    def forward(self, x: Tensor, labels: Tensor, **batch: Tensor) -> Tensor:
        """Runs the stage; ``batch`` holds the other tensors of the micro-batch, which all stages get."""
        arguments = {**batch, self._input: x}
        with torch.autocast(x.device.type, self._dtype, enabled=self._dtype is not None):
            if not self._is_last:
                base: Any = self.model.base_model
                hidden: Tensor = base(**arguments, use_cache=False)[0]
                # Stages agree on the dtype in advance (`_schedule`); under autocast the last op decides it.
                return hidden.to(_hidden_dtype(self.model))
            values = self._read(self.model, {**arguments, "labels": labels})
        self.names = list(values)
        return _stacked(values)


def _hidden_dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def _stacked(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.float() for value in values.values()])


@final
class Pipeline:
    """This process's stage of a pipeline. Its methods are collective: all stages call them."""

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        task: CausalLM,
        ranks: TrainRanks,
        *,
        num_micro_batches: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        mesh = ranks.stage_mesh
        assert mesh is not None
        self.stages = stages
        self.grad_sync: GradSync | None = None
        """Synchronizes gradients with the other data-parallel pipelines, if any."""
        self._model = model
        self._ranks = ranks
        self._group = mesh.get_group()
        self._num_micro_batches = num_micro_batches
        self._is_first, self._is_last = ranks.stage == 0, ranks.stage == mesh.size() - 1
        ends: dict[str, Any] = {"is_first": self._is_first, "is_last": self._is_last, "dtype": dtype}

        def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            values = task.losses(model, batch)
            return {"total_loss": sum_of_losses(values), **values}

        self._training = StageRun(model, losses, **ends)
        self._evaluation = StageRun(model, task.tally, **ends)
        self._schedules: dict[Any, Any] = {}
        self._names = ["total_loss", *task.LOSSES]  # the last stage alone computes them
        # By `is_training`: the losses, or the one sum of `tally` with its count.
        self._result_shapes = {True: (len(self._names),), False: (1, 2)}
        shared = [model.get_parameter(name) for name in tied_weights(model, stages)]
        self._shared = shared if self._is_first or self._is_last else []
        # `batch_isend_irecv` with some ranks of a group is undefined if it is the first collective of that group (see
        # its documentation), as NCCL connects the ranks then. The exchange below and the schedule are such batches.
        dist.barrier(group=self._group)
        for weight in self._shared:
            other = self._exchange_ends(weight.data)
            if self._is_last:
                weight.data.copy_(other)

    def runs(self, name: str) -> bool:
        others = (other for n, names in enumerate(self.stages) if n != self._ranks.stage for other in names)
        return not any(name == other or name.startswith(f"{other}.") for other in others)

    def losses(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs forward and backward of an update, and returns the losses of each micro-batch, on all stages."""
        with nullcontext() if self.grad_sync is None else self.grad_sync.micro_batch(is_last=True):
            output = self._run(self._training, batch, is_training=True)
        # After the mean over data-parallel pipelines: both ends then add the same two numbers, and a + b is b + a in
        # every bit. If the sums were averaged instead, the two copies of a tied weight could drift apart.
        for weight in self._shared:
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = grad.add_(self._exchange_ends(grad))
        shape = self._num_micro_batches, len(self._names)
        values = torch.empty(shape, device=batch["labels"].device) if output is None else output.detach().view(shape)
        dist.broadcast(values, group_src=self._group.size() - 1, group=self._group)
        return dict(zip(self._names, values.unbind(1), strict=True))

    def tally(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the sums for the task's metrics on the last stage, and an empty dict on the others."""
        output = self._run(self._evaluation, batch, is_training=False)
        return {} if output is None else dict(zip(self._evaluation.names, output, strict=True))

    def total_norm(self, parameters: list[Tensor], norm_type: float) -> Tensor:
        """Returns the gradient norm over all stages; a tied weight counts once."""
        twice = {id(weight) for weight in self._shared} if self._is_last else set()
        device = next(p.device for p in self._model.parameters() if not on_other_stage(p))
        zero = torch.zeros((), device=device)
        # A weight has a gradient on one stage, and 0 on all others: so the sum over stages is the list of all norms.
        local_norms = [
            zero if p.grad is None or id(p) in twice else torch.linalg.vector_norm(p.grad, norm_type).float()
            for p in parameters
        ]
        norms = torch.stack(local_norms)  # by parameter, so that the norm over all is summed as in one process
        dist.all_reduce(norms, group=self._group)
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total

    def _run(self, run: StageRun, batch: Mapping[str, Tensor], *, is_training: bool) -> Tensor | None:
        ids = batch["input_ids"]
        key = is_training, tuple(ids.shape)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(run, ids, is_training=is_training)
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        with _raise_cause():
            output: Tensor | None = self._schedules[key].step(
                *([ids] if self._is_first else []), target=batch["labels"] if is_training else None, **rest
            )
        return output

    def _schedule(self, run: StageRun, ids: Tensor, *, is_training: bool) -> Any:
        """Returns a schedule for batches of this shape; shapes between stages are set, which avoids a trial run."""
        count = self._num_micro_batches if is_training else 1
        model: Any = self._model
        ids_in = torch.empty(len(ids) // count, *ids.shape[1:], dtype=ids.dtype, device="meta")
        shape = *ids_in.shape, model.config.hidden_size
        hidden = torch.empty(shape, dtype=_hidden_dtype(model), device="meta", requires_grad=is_training)
        # What the last stage returns goes to no other, but PyTorch checks it too before 2.13.
        result = torch.empty(self._result_shapes[is_training], device="meta", requires_grad=is_training)
        stage = PipelineStage(
            run,
            self._ranks.stage,
            self._group.size(),
            ids.device,
            input_args=ids_in if self._is_first else hidden,
            output_args=result if self._is_last else hidden,
            group=self._group,
        )
        if not is_training:
            return ScheduleGPipe(stage, count)
        # The schedule divides gradients by the number of micro-batches (`scale_grads`), as the loss of each is a mean.
        return Schedule1F1B(stage, count, lambda output, _: output[0])  # the loss, which the stage has computed

    def _exchange_ends(self, tensor: Tensor) -> Tensor:
        other = torch.empty_like(tensor)
        peer = dist.get_global_rank(self._group, self._group.size() - 1 if self._is_first else 0)
        pair = [dist.P2POp(way, x, peer, self._group) for way, x in ((dist.isend, tensor), (dist.irecv, other))]
        # In one batch: if both ends sent first, each would wait for the other to receive.
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return other


@contextmanager
def _raise_cause() -> Iterator[None]:
    """Raises the error of a stage instead of the schedule's."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and _FAILED in str(error):
            raise error.__cause__ from None
        raise
