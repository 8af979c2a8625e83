"""The private names of ``torch.distributed`` that a simulated rank needs, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

MESH_READERS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "_get_all_submeshes")
"""The methods of ``DeviceMesh`` that read its tensor of ranks, or create a mesh that does."""


def start_fake_group(world_size: int, rank: int) -> None:
    """Initializes ``torch.distributed`` by PyTorch's fake backend, whose collectives return at once, without a peer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` so that it runs outside of all modes, on tensors with values."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


@contextmanager
def own_dtensor_caches() -> Iterator[None]:
    """Empties DTensor's caches at the start and the end, and has it find the shapes of results outside of all modes.

    The caches are keyed by meshes that compare equal for each rank, but the shapes in them are those of one rank. Where
    tensors are fake, DTensor runs the op on fake tensors of the global sizes in the same mode, and looks up less in its
    caches: a counter would take these tensors for some of the rank.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - takes a second

    kind: Any = type(DTensor._op_dispatcher.sharding_propagator)
    find_shapes = kind._propagate_tensor_meta_non_cached
    _clear_dtensor_caches()
    kind._propagate_tensor_meta_non_cached = without_modes(find_shapes)
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = find_shapes
        _clear_dtensor_caches()


def reader_of_resharding() -> Callable[..., Any]:
    """Returns the function of FSDP2 that reads a mesh for ``reshard_after_forward`` with a number of ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init  # noqa: PLC0415 - takes a second

    reader: Callable[..., Any] = _fsdp_init._get_post_forward_mesh_info
    return reader


def device_of_mesh() -> Callable[..., torch.device]:
    """Returns the function of FSDP2 that says on which device the parameters are."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init  # noqa: PLC0415 - takes a second

    return _fsdp_init._get_device_from_mesh


def _clear_dtensor_caches() -> None:
    from torch.distributed.tensor import DTensor, _redistribute  # noqa: PLC0415 - takes a second

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # of this thread; since 2.10
    if clear_native is not None:
        clear_native()
    transforms: Any = _redistribute._gen_transform_infos
    transforms.cache_clear()


def group_of(argument: Any) -> dist.ProcessGroup:
    """Returns the process group that an op of ``torch.distributed`` has as an argument: boxed, or its name."""
    if isinstance(argument, torch.ScriptObject):
        argument = dist.ProcessGroup.unbox(argument)
    if isinstance(argument, str):
        resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009 - mypy: not exported
        argument = resolve(argument)
    group: dist.ProcessGroup = argument
    return group


def work_of(result: Any) -> Any:
    """Returns the ``Work`` among the results of an op of ``c10d``: the object that its caller gets."""
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    return dist.Work.unbox(boxed)


@contextmanager
def on_wait(see: Callable[[Any], None]) -> Iterator[None]:
    """Calls ``see`` with each ``Work`` of the fake backend for which the code inside waits."""
    from torch._C import _distributed_c10d  # noqa: PLC0415

    kind: Any = _distributed_c10d.FakeWork
    wait = kind.wait

    def wait_and_see(work: Any, *args: Any, **kwargs: Any) -> Any:
        see(work)
        return wait(work, *args, **kwargs)

    kind.wait = wait_and_see
    try:
        yield
    finally:
        kind.wait = wait


DDP_NAMES = ("Reducer", "Logger", "_verify_params_across_processes")
"""The functions of ``torch.distributed`` that read values in C++, as ``DistributedDataParallel`` calls them."""


def bucket_assignment(parameters: list[torch.Tensor], size_limits: list[int], numbers: list[int]) -> list[list[int]]:
    """Returns how ``DistributedDataParallel`` divides gradients that become ready in this order among its buckets.

    Args:
        parameters: those of the gradients; a bucket has one device and one type.
        size_limits: the bytes of the first bucket, and of each after it; the last one is for all others.
        numbers: those of the parameters, of which the buckets consist.
    """
    assignment: tuple[list[list[int]], list[int]] = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        parameters, size_limits, [False] * len(parameters), numbers
    )
    return assignment[0]


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Calls ``function`` at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def schedule_of_stages() -> type[Any]:
    """Returns the base class of all schedules of ``torch.distributed.pipelining``."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle  # noqa: PLC0415 - takes a second

    return PipelineScheduleSingle.__mro__[1]


WARM_UP = "_warmup_p2p"
"""The method of a schedule in which ranks vote, since PyTorch 2.13, on whether all of them know the shapes."""


def take_known_shapes(stage: Any, *, has_backward: bool) -> bool:
    """Has a stage take the shapes that it was given, as if all ranks had voted for it; returns whether it can."""
    from torch.distributed.pipelining._utils import InferenceMode  # noqa: PLC0415

    if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
        return False
    stage._inference_mode = InferenceMode.STATIC
    return True
