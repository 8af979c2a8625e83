"""Runs micro-batches through the stages of a pipeline, by PyTorch's own schedules: one update, or a held-out batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from graphckpt.train.parallel.pp_stages import StageRun, Stages, hidden_dtype, tied_weights
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import on_other_stage
from graphckpt.train.tasks.base import Task, sum_of_losses

if TYPE_CHECKING:
    from graphckpt.train.parallel.data_parallel import GradSync

_FAILED = "failed to run forward"  # how a stage begins to say so, with what it was as the cause


@final
class Pipeline:
    """This process's stage of a pipeline. Its methods are collective: all stages call them.

    Args:
        model: with this process's stage; see ``keep_stage``.
        stages: the module names of each stage.
        task: computes the losses of a batch, and its sums.
        ranks: the processes of the run.
        num_micro_batches: of one update.
        dtype: of autocast; ``None`` for none.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        task: Task,
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
        self._training = StageRun(model, _losses_of(task), **ends)
        self._evaluation = StageRun(model, task.tally, **ends)
        self._schedules: dict[Any, Any] = {}
        self._names: list[str] = []
        shared = [model.get_parameter(name) for name in tied_weights(model, stages)]
        self._shared = shared if self._is_first or self._is_last else []
        dist.barrier(group=self._group)  # NCCL connects a group in its first call, which all of it have to make
        for weight in self._shared:
            other = self._of_other_end(weight.data)
            if self._is_last:
                weight.data.copy_(other)

    def runs(self, name: str) -> bool:
        """Whether a module runs here, and not on another stage only."""
        others = (other for n, names in enumerate(self.stages) if n != self._ranks.stage for other in names)
        return not any(name == other or name.startswith(f"{other}.") for other in others)

    def losses(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs forward and backward of an update, and returns the losses of each micro-batch, on all stages."""
        grad_sync = self.grad_sync
        with grad_sync.micro_batch(is_last=True) if grad_sync is not None else nullcontext():
            output = self._run(self._training, batch, is_training=True)
        for weight in self._shared:  # last, for the sum of two has the same bits at both ends
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = grad.add_(self._of_other_end(grad))
        if not self._names:
            self._names = self._ranks.all_gather(self._training.names)[-1]
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
        zero = torch.zeros((), device=self._device)
        own = [
            zero if p.grad is None or id(p) in twice else torch.linalg.vector_norm(p.grad, norm_type).float()
            for p in parameters
        ]
        norms = torch.stack(own)  # by parameter, so that the norm over all is summed as in one process
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
        """Returns a schedule for batches of this shape; shapes between stages are given, which avoids a trial run."""
        count = self._num_micro_batches if is_training else 1
        model: Any = self._model
        ids_in = torch.empty(len(ids) // count, *ids.shape[1:], dtype=ids.dtype, device="meta")
        hidden = torch.empty(
            *ids_in.shape, model.config.hidden_size, dtype=hidden_dtype(model), device="meta", requires_grad=is_training
        )
        stage = PipelineStage(
            run,
            self._ranks.stage,
            self._group.size(),
            ids.device,
            input_args=ids_in if self._is_first else hidden,
            output_args=hidden,
            group=self._group,
        )
        return Schedule1F1B(stage, count, _first) if is_training else ScheduleGPipe(stage, count)

    def _of_other_end(self, tensor: Tensor) -> Tensor:
        """Exchanges a tensor between the first and the last stage."""
        other = torch.empty_like(tensor)
        peer = dist.get_global_rank(self._group, self._group.size() - 1 if self._is_first else 0)
        pair = [dist.P2POp(way, x, peer, self._group) for way, x in ((dist.isend, tensor), (dist.irecv, other))]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return other

    @property
    def _device(self) -> torch.device:
        return next(p.device for p in self._model.parameters() if not on_other_stage(p))


def _losses_of(task: Task) -> Any:
    def read(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        losses = task.losses(model, batch)
        return {"total_loss": sum_of_losses(losses), **losses}

    return read


def _first(output: Tensor, target: Tensor) -> Tensor:
    """Returns the loss that backward starts from; the stage has computed it already."""
    del target
    return output[0]


@contextmanager
def _raise_cause() -> Iterator[None]:
    """Raises a stage's own error instead of the schedule's."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and _FAILED in str(error):
            raise error.__cause__ from None
        raise
