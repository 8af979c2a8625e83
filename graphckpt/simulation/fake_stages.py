"""Pipeline stages on a simulated rank: sends and receives have no peer, and shapes have to be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, final

import torch
import torch.distributed as dist

from graphckpt._compat_distributed import WARM_UP, schedule_of_stages, take_known_shapes
from graphckpt.errors import ConfigError
from graphckpt.simulation.stand_ins import StandIns, copy_of, refusal, user_line

_SCHEDULE_FIX = "use Schedule1F1B or ScheduleGPipe, or plan with real ranks by torchrun"
_SHAPES_FIX = "give both, for one micro-batch, such as torch.empty(4, 2048, 4096, device='meta', requires_grad=True)"


def simulate_stages(stand_ins: StandIns, on_schedule: Callable[[int, int], None]) -> None:
    """Lets stages of ``torch.distributed.pipelining`` run without the stages of other ranks.

    ``on_schedule`` is called with the number of stages and that of micro-batches.
    """
    from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415 - takes a second
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle  # noqa: PLC0415

    begin = PipelineStage.__init__

    # Without both a stage learns the shapes of its inputs from its neighbours, in the first step.
    @wraps(begin)
    def init(
        stage: Any,
        submodule: Any,
        stage_index: int,
        num_stages: int,
        device: Any,
        input_args: Any = None,
        output_args: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_shapes(input_args is not None and output_args is not None, "input_args and output_args", _SHAPES_FIX)
        here = torch.device("cpu")  # where fake tensors are; a schedule would ask CUDA for its random state
        begin(stage, submodule, stage_index, num_stages, here, input_args, output_args, *args, **kwargs)

    def refuse(schedule: object, *_: Any, **__: Any) -> None:
        refusal(type(schedule).__name__, _SCHEDULE_FIX)()

    begin_schedule = PipelineScheduleSingle.__init__

    @wraps(begin_schedule)
    def init_schedule(schedule: Any, stage: Any, n_microbatches: int, *args: Any, **kwargs: Any) -> None:
        on_schedule(stage.num_stages, n_microbatches)
        begin_schedule(schedule, stage, n_microbatches, *args, **kwargs)

    stand_ins.swap(PipelineStage, __init__=init)
    stand_ins.swap(PipelineScheduleSingle, __init__=init_schedule)
    for kind in _subclasses_of(PipelineScheduleMulti):
        stand_ins.swap(kind, __init__=wraps(kind.__init__)(refuse))
    if hasattr(schedule_of_stages(), WARM_UP):
        stand_ins.swap(schedule_of_stages(), **{WARM_UP: _take_known_shapes})
    for post in (dist.isend, dist.irecv):
        stand_ins.replace(post, _holding(copy_of(post)))
    stand_ins.replace(dist.batch_isend_irecv, _one_by_one)


def _subclasses_of(kind: type[Any]) -> Iterator[type[Any]]:
    """Yields ``kind`` and the classes derived from it that define a constructor."""
    if "__init__" in vars(kind):
        yield kind
    for each in kind.__subclasses__():
        yield from _subclasses_of(each)


def _check_shapes(is_known: bool, names: str, fix: str) -> None:
    if not is_known:
        what = f"expected {names} on a simulated rank, whose neighbours send no shapes"
        raise ConfigError(f"PipelineStage ({user_line()}): {what} · fix: {fix}")


def _take_known_shapes(_: object, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    """Stands in for the warm-up in which stages send their neighbours the shapes of outputs and gradients."""
    del p2p_done
    names, fix = "input_grads and output_grads for DTensors", "give both, for one micro-batch"
    for stage in stages:
        _check_shapes(take_known_shapes(stage, has_backward=has_backward), names, fix)


# Note [Works hold their tensors]
# The works of gloo and NCCL refer to the tensor that they send or receive, until they are deleted, not until they are
# waited for. Schedule1F1B waits for its last send before the first backward, and keeps the work until the last
# backward: with fake works, which hold nothing, a stage would need less by one output.


def _holding(post: Callable[..., Any]) -> Callable[..., Any]:
    def posted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = post(tensor, *args, **kwargs)
        return None if work is None else _Work(work, tensor)

    return posted


@final
class _Work(dist.Work):
    """See Note [Works hold their tensors]."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._tensor = tensor

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return bool(self._work.wait(*args, **kwargs))

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _one_by_one(ops: list[Any]) -> list[Any]:
    """Stands in for ``batch_isend_irecv``, with one work that holds its tensor for each send and receive."""
    works = []
    for op in ops:
        peer = "group_dst" if op.op is dist.isend else "group_src"
        works.append(op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}))
    return [work for work in works if work is not None]
