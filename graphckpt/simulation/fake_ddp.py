"""DistributedDataParallel on a simulated rank: a stand-in for its reducer, which is C++ and reads values.

The class is PyTorch's, with all that it does in Python. The stand-in allocates, copies and reduces what the
reducer does, at the same moments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphckpt._compat_distributed import DDP_NAMES, bucket_assignment, queue_backward_callback
from graphckpt.errors import ConfigError
from graphckpt.simulation.stand_ins import StandIns, refusal, user_line

# Note [Buckets of the reducer]
# Three layers of 1 MiB of weights each, numbered 0 to 2, and bucket_cap_mb=2. What a step does:
#
#     step 1   one bucket [0, 1, 2]: the constructor makes buckets before any order of gradients is known. Backward
#              finishes 2, 1, 0, which is noted in `_order`; then 3 MiB are reduced at once, after all computation.
#     step 2   its forward rebuilds the buckets in that order, within the limits: [2, 1], [0]. Backward finishes 2 and
#              1, and reduces 2 MiB while it computes 0, then 1 MiB. So do all later steps.
#
# So the first step has another peak than later ones, and waits longer.

_METHODS = ("register_comm_hook", "_register_builtin_comm_hook", "_register_buffer_comm_hook", "join")
_ARGUMENTS = ("mixed_precision", "delay_all_reduce_named_params", "batched_grad_copy")


def simulate_ddp(stand_ins: StandIns) -> None:
    """Lets ``DistributedDataParallel`` wrap modules of fake tensors."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 - takes a second

    begin = DistributedDataParallel.__init__

    @wraps(begin)
    def init(
        ddp: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        for name in _ARGUMENTS:
            if kwargs.get(name):
                refusal(f"DistributedDataParallel({name}=...)")()
        if device_ids is not None and len(device_ids) == 1:  # fake tensors are on the CPU, which has no number
            device_ids = output_device = None
        begin(ddp, module, device_ids, output_device, *args, **kwargs)
        ddp.reducer.watch(ddp.module)

    reducer, logger, verify = DDP_NAMES
    stand_ins.swap(dist, **{reducer: FakeReducer, logger: _FakeLogger, verify: lambda *_: None})
    refused = {name: refusal(f"DistributedDataParallel.{name}") for name in _METHODS}
    stand_ins.swap(DistributedDataParallel, __init__=init, **refused)


@final
@dataclass
class _Bucket:
    flat: Tensor
    numbers: list[int]
    """The numbers of the parameters, in the order of their gradients in ``flat``."""
    views: list[Tensor]
    work: Any = None


@final
class FakeReducer:
    """Allocates the buckets of gradients, and reduces each when its last gradient is ready, as ``dist.Reducer`` does.

    The parameters and the methods without a docstring are those of ``dist.Reducer``, which the class
    ``DistributedDataParallel`` passes and calls.
    """

    # To compare with torch/csrc/distributed/c10d/reducer.cpp of another release: `gradient_is_ready` is `autograd_hook`
    # there, `_mark_ready` is `mark_variable_ready` with `mark_bucket_ready`, `_copy_in` is `mark_variable_ready_dense`,
    # `_delay_all_reduce` is `delay_all_reduce`, and `_finalize` is `finalize_backward`.

    def __init__(
        self,
        parameters: list[Tensor],
        bucket_indices: list[list[int]],
        per_bucket_size_limits: list[int],
        process_group: Any,
        expect_sparse_gradients: list[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        param_to_name_mapping: dict[int, str],
        first_bucket_bytes_cap: int,
        skip_all_reduce_unused_params: bool,
        use_python_reducer: bool,
        bucket_size_limits_for_rebuilding: Sequence[int] = (),
        *_: Any,
    ) -> None:
        del per_bucket_size_limits, use_python_reducer
        if any(expect_sparse_gradients):
            refusal("DistributedDataParallel with sparse gradients")()
        self._parameters = parameters
        self._group = process_group
        self._limits = list(bucket_size_limits_for_rebuilding) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._finds_unused = find_unused_parameters
        self._skips_unused = skip_all_reduce_unused_params
        self._as_views = gradient_as_bucket_view
        self._names = param_to_name_mapping
        self._module: Callable[[], nn.Module | None] = lambda: None
        self._is_static = False
        # the layout of a gradient: that of its parameter if it is dense, otherwise row by row
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        self._accumulators = [_accumulator_of(parameter) for parameter in parameters]
        this = weakref.ref(self)  # a hook that held the reducer would keep buckets alive without the module
        for number, accumulator in enumerate(self._accumulators):
            accumulator.register_hook(partial(_gradient_is_ready, this, number))
        # Marks of parameters with a gradient: one tensor on the host, and one that is reduced. A static graph reduces
        # it only once.
        self._is_used = [self._new_map() for _ in range(2 if find_unused_parameters else 0)]
        self._unused: set[int] = set()
        # Parameters that the module does not have at present: a planner may take layers out, to run the rest.
        self._absent: set[int] = set()
        # Parameters in the order of their gradients, until the buckets are rebuilt.
        self._order: list[int] = []
        self._is_rebuilt = False
        # How often a gradient is added to, in the first backward of a static graph.
        self._calls = [0] * len(parameters)
        self._calls_left = list(self._calls)  # in the present backward
        self._num_backwards = 0
        self._is_in_backward = False
        self._is_expecting = False  # whether gradients are reduced, as they are not in `no_sync()`
        self._is_unfinished = False  # whether some gradients of a backward are in the buckets, and others not yet
        # Parameters whose gradients are in the buckets, or that have none in this backward.
        self._ready: set[int] = set()
        self._next = 0  # of the buckets: the first that is not reduced
        self._buckets: list[_Bucket] = []
        self._allocate(bucket_indices)

    def _new_map(self) -> Tensor:
        return torch.zeros(len(self._parameters), dtype=torch.int32)

    def watch(self, module: nn.Module) -> None:
        """Expects gradients of those parameters only that ``module`` has at the time."""
        self._module = weakref.ref(module)

    def _allocate(self, bucket_indices: list[list[int]]) -> None:
        # First, as in PyTorch: the old buckets are not alive beside the new ones, unless gradients are views of them.
        self._buckets.clear()
        self._bucket_of: dict[int, tuple[_Bucket, int]] = {}
        for numbers in bucket_indices:
            parameters = [self._parameters[number] for number in numbers]
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
            bucket = _Bucket(flat, numbers, [])
            for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
                view = flat.as_strided(parameter.shape, self._strides[number], sum(sizes[:place]))
                bucket.views.append(view)
                self._bucket_of[number] = bucket, place
                if self._as_views and parameter.grad is not None:
                    parameter.grad = view.copy_(parameter.grad)
            self._buckets.append(bucket)

    # ---- before forward and backward

    def prepare_for_forward(self) -> None: ...

    def _rebuild_buckets(self) -> bool:
        self._check_reducer_finalized()
        if self._is_rebuilt or not self._order or (self._finds_unused and not self._is_static):
            return False
        self._is_rebuilt, order = True, self._order
        self._order = []
        parameters = [self._parameters[number] for number in order]
        self._allocate(bucket_assignment(parameters, self._limits, order))
        return True

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        self._check_reducer_finalized()
        module = self._module()
        present = set(map(id, self._parameters if module is None else module.parameters()))
        self._absent = {number for number, each in enumerate(self._parameters) if id(each) not in present}
        self._is_expecting = True
        self._ready = set(self._absent)
        self._next = 0
        self._calls_left = list(self._calls)
        if self._finds_unused and not self._is_static:
            used = _nodes_behind(outputs)
            unused = {number for number, accumulator in enumerate(self._accumulators) if accumulator not in used}
            self._unused = unused - self._absent

    def _check_reducer_finalized(self) -> None:
        if not self._is_unfinished:
            return
        self._is_unfinished = False
        rest = sorted(set(range(len(self._parameters))) - self._ready)
        names = ", ".join(self._names.get(number, f"number {number}") for number in rest[:3])
        others = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
        raise ConfigError(
            f"DistributedDataParallel ({user_line()}): expected a gradient for each parameter, got none for "
            f"{names}{others} · fix: find_unused_parameters=True, or requires_grad=False"
        )

    # ---- in backward

    def gradient_is_ready(self, number: int) -> None:
        """Runs after a gradient was accumulated."""
        if not self._is_in_backward:
            self._is_in_backward = True
            self._num_backwards += 1
        is_first = self._is_static and self._num_backwards == 1
        if is_first or (self._finds_unused and not self._is_static):
            self._is_used[0][number] = 1
        if is_first:
            self._calls[number] += 1
            return
        if not self._is_expecting:  # in `no_sync()`
            return
        for unused in sorted(self._unused - self._ready):
            self._mark_ready(unused)
        if self._is_static:
            self._calls_left[number] -= 1
            if self._calls_left[number] != 0:
                return
        if not self._is_rebuilt:
            self._order.append(number)
        self._mark_ready(number)

    def _mark_ready(self, number: int) -> None:
        self._is_unfinished = True
        self._ready.add(number)
        self._copy_in(number)
        # in sequence, which is the same on all ranks
        while self._next < len(self._buckets) and self._ready.issuperset(self._buckets[self._next].numbers):
            bucket = self._buckets[self._next]
            self._next += 1
            if not (self._skips_unused and self._unused.issuperset(bucket.numbers)):
                bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            if self._next == len(self._buckets):
                if self._finds_unused and not self._is_static:
                    self._reduce_used()
                queue_backward_callback(self._finalize)

    def _copy_in(self, number: int) -> None:
        parameter = self._parameters[number]
        bucket, place = self._bucket_of[number]
        view = bucket.views[place]
        world_size = self._group.size()
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.untyped_storage() is view.untyped_storage():
            view.div_(world_size)
        else:
            torch.mul(parameter.grad.detach(), 1.0 / world_size, out=view)
            if self._as_views:
                parameter.grad = view

    def _reduce_used(self) -> None:
        on_host, reduced = self._is_used[0], self._is_used[-1]
        if reduced is not on_host:
            reduced.copy_(on_host)
        dist.all_reduce(reduced, group=self._group, async_op=True)

    def _delay_all_reduce(self) -> None:
        """Reduces all at the end of the first backward of a static graph."""
        self._reduce_used()
        self._unused = {number for number, calls in enumerate(self._calls) if calls == 0}
        for number in range(len(self._parameters)):
            self._copy_in(number)
        for bucket in self._buckets:
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        self._finalize()

    @torch.no_grad()
    def _finalize(self) -> None:
        if self._is_static and not self._is_rebuilt and self._num_backwards > 1:
            self._order += sorted(self._unused)
        self._is_expecting = self._is_unfinished = self._is_in_backward = False
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            for number, view in zip(bucket.numbers, bucket.views, strict=True):
                parameter = self._parameters[number]
                if number in self._unused or number in self._absent:
                    continue
                if self._as_views:
                    parameter.grad = view
                elif parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.detach().copy_(view)
        if self._is_static and self._num_backwards > 1:
            self._is_used[0].select(0, 0)  # dist.Reducer reads it here: only what an op sees counts as alive
        elif self._is_used:
            self._is_used[0].zero_()

    # ---- what else the module calls

    def _set_static_graph(self) -> None:
        self._is_static = True
        self._is_used = [self._new_map()]

    def set_logger(self, logger: object) -> None: ...

    def _remove_autograd_hooks(self) -> None:
        self._accumulators.clear()

    def _get_zeros_like_grad_buckets(self) -> list[Tensor]:
        return [torch.zeros_like(bucket.flat) for bucket in self._buckets]


def _accumulator_of(parameter: Tensor) -> Any:
    """Returns the node that adds to the gradient; it lives as long as something refers to it."""
    with torch.enable_grad():
        node: Any = parameter.expand_as(parameter).grad_fn
    return node.next_functions[0][0]


def _gradient_is_ready(reducer: Callable[[], FakeReducer | None], number: int, *_: object) -> None:
    if (living := reducer()) is not None:
        with torch.no_grad():
            living.gradient_is_ready(number)


def _nodes_behind(outputs: list[Tensor]) -> set[Any]:
    """Returns all nodes of the graph of ``outputs``; those of parameters are among them."""
    nodes: set[Any] = set()
    rest = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while rest:
        node = rest.pop()
        if node not in nodes:
            nodes.add(node)
            rest += [following for following, _ in node.next_functions if following is not None]
    return nodes


@final
class _FakeLogger:
    """Logs nothing."""

    def __init__(self, reducer: object) -> None: ...

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
