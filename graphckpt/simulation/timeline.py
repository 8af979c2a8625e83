"""The seconds of a simulated step: computation, communication, and the exposed part of the latter.

Computation is one lane. Each process group has a separate lane, on which its collectives run one after another, as
NCCL runs them. Groups run at the same time, and do not slow each other down; computation beside them is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from graphckpt._compat import current_backward
from graphckpt.errors import ConfigError
from graphckpt.simulation.allocations import OpSeconds
from graphckpt.simulation.cluster_profile import ClusterProfile, CollectiveKind
from graphckpt.tree import tensors_in

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The ops of c10d and the functional ones have many names, such as `all_gather_into_tensor_coalesced` and
# `allgather_coalesced_`: without underscores, they begin with these, of which the first that does counts.
_KINDS: dict[str, CollectiveKind] = {
    "allgather": "gather", "reducescatter": "scatter", "allreduce": "all_reduce", "alltoall": "all_to_all",
    "broadcast": "broadcast", "reduce": "broadcast", "gather": "broadcast", "scatter": "broadcast",
    "send": "send", "recv": "send", "isend": "send", "irecv": "send", "batchp2p": "send",
    "barrier": "barrier", "monitoredbarrier": "barrier",
}  # fmt: skip
_WAITS = ("wait_tensor", "wait_tensors")  # the second from torch 2.15 on
_FREE = (*_WAITS, "check_for_nan")  # a wait moves nothing
_NAMES_OF_GROUPS = ("process_group", "group_name")
_BUFFERS = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0}
"""The collectives of FSDP2, with the position of the argument by which a call is known as one of FSDP2's: the buffer
that its copy-in, or its reduce-scatter, has just written."""


class StepSeconds(NamedTuple):
    """The seconds of a step, or of a phase."""

    total: float = 0.0
    communication: float = 0.0
    """The seconds of all collectives, each as if it were alone."""
    exposed: float = 0.0
    """The share of ``total`` in which computation waits for a collective."""
    bubble: float = 0.0
    """The share of ``total`` in which a pipeline stage waits for others."""


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective."""

    kind: CollectiveKind
    num_bytes: int
    """Of the whole result of an all-gather, of what this rank passes to any other."""
    group: str
    """The name of its process group."""
    ranks: Sequence[int]
    is_functional: bool
    """Whether it is a functional collective, for whose result ``wait_tensor`` waits."""
    is_async: bool
    """Whether it returns before it is done: the caller waits for the returned object."""

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Collective | None:
        """Returns the collective of an op of ``torch.distributed``; ``None`` for one that communicates nothing.

        Raises:
            ConfigError: it is not known.
        """
        from graphckpt._compat_distributed import group_of  # noqa: PLC0415 - takes a second

        name = func.overloadpacket.__name__
        if name in _FREE:
            return None
        plain = name.replace("_", "")
        kind = next((kind for begin, kind in _KINDS.items() if plain.startswith(begin)), None)
        if kind is None:
            fix = "use another collective, or plan with real ranks by torchrun"
            raise ConfigError(f"the step calls {func.name()}, whose time on a cluster is not known · fix: {fix}")
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = group_of(next(values[each] for each in _NAMES_OF_GROUPS if each in values))
        is_functional = func.namespace != "c10d"
        ranks = dist.get_process_group_ranks(group)
        # Bytes are those of the result for an all-gather, in which it has the bytes of all ranks, and for a `scatter_`,
        # whose inputs one rank alone has; otherwise those of the input. See `num_bytes`.
        counts_output = name == "scatter_" or kind == "gather"
        begin = "output" if counts_output else ("input", "tensor")
        passed = result if counts_output and is_functional else [v for k, v in values.items() if k.startswith(begin)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(passed))
        if name in ("gather_", "scatter_"):  # the tensors of all ranks pass the link of one
            num_bytes *= len(ranks)
        peer = values.get("dst", values.get("src")) if kind == "send" else None
        return cls(
            kind,
            num_bytes,
            group.group_name,
            ranks if peer is None else (dist.get_rank(), ranks[peer]),
            is_functional,
            is_functional or values.get("async_op", True),
        )


# Note [Collectives of FSDP2]
# A CPU, on which the step runs here, has none of the streams of FSDP2, so that it calls them in another order in time:
#
# - An all-gather starts when the copy-out of the one before it does: the host runs ahead of the device, and issues it
#   while the layer before computes. Only the first of a forward starts when it is called, as FSDP2 waits for the
#   optimizer there. Computation waits for it at its copy-out.
# - Computation waits for a reduce-scatter where the next one copies its input, and at the end of backward. So it does
#   for the all-reduce after it, of HSDP, at the end of backward.
#
# FSDP2 has no ops for its collectives: they are those of c10d whose buffer one of its copies has just written.
#
# An example: three linear layers, each a unit of FSDP2, whose product takes 10 ms, and each collective 3 ms. Times are
# milliseconds of the device; "called" is where the code of the CPU calls it.
#
#     all-gather        called   starts, ends         computation
#     layer 0             0        0    3             waits 3, forward  3 - 13
#     layer 1            13        3    6             forward 13 - 23
#     layer 2            23       13   16             forward 23 - 33
#     layer 2, backward  33       23   26             backward 33 - 53
#     layer 1, backward  33       33   36             backward 53 - 73
#     reduce-scatter 2   53       53   56
#     layer 0, backward  53       56   59             backward 73 - 83: its input needs no gradient
#     reduce-scatter 1   73       73   76
#     reduce-scatter 0   83       83   86             waits 3
#
# The all-gather of layer 0 in backward has to wait for the reduce-scatter of layer 2: they are of one group.


@final
class Timeline:
    """The seconds of a step on one rank, op by op. :meth:`op_seconds` gets the ops in the order of the program.

    A collective starts when it is called, and not before the last one of its group has ended; computation waits for it
    where the program does. Those of FSDP2 are different: see Note [Collectives of FSDP2].

    Args:
        op_seconds: returns the seconds of an op that computes.
        cluster: has the seconds of collectives.
    """

    def __init__(self, op_seconds: OpSeconds, cluster: ClusterProfile) -> None:
        self._compute_seconds = op_seconds
        self._cluster = cluster
        self._groups: set[str] = set()
        self._now = self._communication = self._exposed = 0.0
        # The seconds of the first forward and backward, with the waits of computation until their end.
        self._first: StepSeconds | None = None
        # When the last collective of each group ends.
        self._ends: dict[str, float] = {}
        # When the last of all collectives ends, and until when they have slowed computation down.
        self._communicates_until = self._slowed_until = 0.0
        # The asynchronous collectives under way, each with its end; the work is held so that its id stays unique.
        self._works: dict[int, tuple[Any, float]] = {}
        # The ends of functional collectives and all-gathers of FSDP2, by the id of the storage that they write.
        self._results: dict[int, float] = {}
        self._in_backward = False
        # When the last all-gather of FSDP2 was copied out in this forward and backward.
        self._copied_out: float | None = None
        # The storage that FSDP2 has copied shards or gradients to, or that has the reduced ones.
        self._fsdp_buffer = 0
        self._scatter_end = self._reduction_end = 0.0

    def waits(self) -> AbstractContextManager[None]:
        """Observes ``Work.wait`` in the code inside."""
        from graphckpt._compat_distributed import on_wait  # noqa: PLC0415 - takes a second

        return on_wait(self._wait_for) if dist.is_available() and dist.is_initialized() else nullcontext()

    def seconds(self) -> StepSeconds:
        """Returns the seconds until now, and those until all collectives have ended."""
        self._wait(self._communicates_until)
        return StepSeconds(self._now, self._communication, self._exposed)

    @property
    def comm_bytes(self) -> int:
        """The device memory of NCCL for the groups that have communicated."""
        return self._cluster.comm_bytes * len(self._groups)

    @property
    def first(self) -> StepSeconds:
        """The seconds until the end of the first backward."""
        return self._first or self.seconds()

    def op_seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        """Returns the seconds of an op: 0 for a collective that is asynchronous, whose time is not that of a block."""
        in_backward = current_backward() >= 0
        if self._in_backward and not in_backward:
            # The end of a backward, where FSDP2 waits for its reductions in a callback.
            self._wait(self._reduction_end)
            self._copied_out = None
            self._first = self._first or StepSeconds(self._now, self._communication, self._exposed)
        self._in_backward = in_backward
        namespace = getattr(func, "namespace", "")
        if namespace in _NAMESPACES:
            return self._communicate(func, args, kwargs, result)
        if namespace == "fsdp":
            self._see_copy(func.overloadpacket.__name__, args, kwargs, result)
        seconds = self._compute_seconds(func, args, kwargs, result)
        self._now += seconds
        return seconds + self._slow_down(self._now - seconds, self._communicates_until)

    def _slow_down(self, start: float, end: float) -> float:
        """Returns the seconds that collectives, which run until ``end``, add to what was computed from ``start`` on."""
        start, share, seconds = max(start, self._slowed_until), self._cluster.slowdown, 0.0
        # Beside collectives, what would take s seconds takes s (1 + share): so much of it fits until `end`, at most.
        if start < min(end, self._now):
            seconds = share * min(self._now - start, (end - start) / (1 + share))
            self._now += seconds
            self._slowed_until = min(end, self._now)
        return seconds

    def _see_copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Sees FSDP2 copy the input of an all-gather or its result, or gradients: see Note [Collectives of FSDP2]."""
        if name == "all_gather_copy_in":
            self._fsdp_buffer = _storage(result[1])
        elif name == "split_with_sizes_copy":
            self._wait(self._results.pop(_storage(args[0]), 0.0))
            self._copied_out = self._now
        elif name in ("chunk_cat", "chunk_cat_mixed_dtype"):  # the second from torch 2.15 on
            self._wait(self._scatter_end)
            self._fsdp_buffer = _storage(kwargs["out"])

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        call = Collective.of(func, args, kwargs, result)
        if call is None:
            if func.overloadpacket.__name__ in _WAITS:
                self._wait(max(self._results.pop(_storage(tensor), 0.0) for tensor in tensors_in(args)))
            return 0.0
        # The other ranks are assumed to call it at the same moment: one rank is simulated.
        seconds = self._cluster.seconds(call.kind, call.num_bytes, call.ranks)
        is_of_fsdp = self._is_of_fsdp(func.overloadpacket.__name__, args)
        start = self._now
        if is_of_fsdp and call.kind == "gather" and self._copied_out is not None:
            start = self._copied_out
        elif is_of_fsdp and call.kind == "all_reduce":
            start = max(start, self._scatter_end)
        end = max(start, self._ends.get(call.group, 0.0)) + seconds
        self._ends[call.group] = end
        self._communicates_until = max(self._communicates_until, end)
        self._slow_down(end - seconds, end)  # an all-gather of FSDP2 may have begun before
        self._groups.add(call.group)
        self._communication += seconds
        if is_of_fsdp and call.kind == "gather":
            self._results[_storage(args[0])] = end
        elif is_of_fsdp:
            self._reduction_end = max(self._reduction_end, end)
            if call.kind == "scatter":
                self._scatter_end, self._fsdp_buffer = end, _storage(args[0])
        elif call.is_functional:
            self._results |= dict.fromkeys(map(_storage, tensors_in(result)), end)
            return seconds
        elif call.is_async:
            from graphckpt._compat_distributed import work_of  # noqa: PLC0415 - takes a second

            work = work_of(result)
            self._works[id(work)] = work, end
        else:
            self._wait(end)
            return seconds
        return 0.0

    def _is_of_fsdp(self, name: str, args: tuple[Any, ...]) -> bool:
        buffers = args[_BUFFERS[name]] if name in _BUFFERS else ()
        return [*map(_storage, tensors_in(buffers))] == [self._fsdp_buffer]

    def _wait_for(self, work: Any) -> None:
        _, end = self._works.pop(id(work), (None, 0.0))
        self._wait(end)

    def _wait(self, end: float) -> None:
        if end > self._now:
            self._exposed += end - self._now
            self._now = end


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())


def bubble_seconds(stage_seconds: float, num_stages: int, num_micro_batches: int) -> float:
    """Returns the seconds in which a stage of a 1F1B pipeline is idle, if all stages take as long as this one.

    Args:
        stage_seconds: what the stage takes for all micro-batches of a step.
        num_stages: those of the pipeline.
        num_micro_batches: those of one step.

    >>> bubble_seconds(24.0, 4, 8)  # 3.0 for each micro-batch
    9.0
    """
    return stage_seconds * (num_stages - 1) / num_micro_batches
