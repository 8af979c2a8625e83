"""The bytes of a step on two ranks, as `explain()` and plans state them, against a counter of its own.

FSDP2 gathers and frees weights by resizing their storages, and DDP's buckets belong to its reducer: no op shows either.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.ranks import launch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import graphckpt
from graphckpt._compat_memory import gradient_buckets
from graphckpt.budget import Budget
from graphckpt.planning.plan_step import frozen_objects
from graphckpt.planning.steps import RealStep, peak_of
from tests.parallel.test_products import Block, D, sequence_parallel, sharded, tensor_parallel

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

# Legend: B samples, T tokens, D width
LAYERS = 4
ATTEMPTS = 5
"""gloo's threads may free what they have sent a little late, in any of the steps that are compared."""


@as_module(lambda: {"wide": nn.Linear(D, 64 * D)})
def Head(self: Any, x_BTD: Tensor) -> Tensor:
    """Most bytes are alive here, when no op of this step has touched a bucket yet."""
    return torch.tanh(self.wide(x_BTD))


class Meter(TorchDispatchMode):
    """Sums the bytes of all storages that an op, or a resize, has shown; it shares no code with the library."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0
        self.ends: list[Any] = []
        for tensor in tensors:
            self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if hasattr(tensor, "elem"):  # the result of a collective that has not been waited for; it has no memory itself
            tensor = tensor.elem
        self.count(tensor.untyped_storage())

    def count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self.sizes:
            self.ends.append(weakref.ref(storage, lambda _, key=id(storage): self.sizes.pop(key)))
        self.sizes[id(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self.sizes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.see_all((args, kwargs, out))
        return out

    def see_all(self, value: object) -> None:
        """Sees all tensors of arguments and results of an op; `tree_leaves` takes longer than the op."""
        if isinstance(value, Tensor):
            self.see(value)
        elif isinstance(value, (list, tuple, dict)):
            for each in value.values() if isinstance(value, dict) else value:
                self.see_all(each)

    def __enter__(self) -> Self:
        resize = torch._C.StorageBase.resize_  # type: ignore[attr-defined]

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        del torch.UntypedStorage.resize_


class Case:
    """A model that is spread over the ranks in one way, and its step."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(1)
        self.inner = stack_of(Block, LAYERS).append(Head())
        self.buckets: dict[int, Tensor] = {}
        """DDP's own, by a hook that a program may set."""
        self.model = self.inner if way == "alone" else WAYS[way](self)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1, momentum=0.9, foreach=False)
        num_tokens = 16 if way == "tp + sp" else 32
        generator = torch.Generator().manual_seed(0 if way.startswith("tp") else dist.get_rank())
        self.x_BTD = torch.randn(2, num_tokens, D, generator=generator)

    def step(self) -> None:
        self.model(self.x_BTD).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        moments = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        gradients = [p.grad for p in self.inner.parameters() if p.grad is not None]
        return [*self.inner.parameters(), *gradients, *moments, *self.buckets.values()]

    def metered(self) -> int:
        with Meter(self.state()) as meter:
            self.step()
        return meter.peak


def ddp(case: Case, **how: Any) -> nn.Module:
    model = DistributedDataParallel(case.inner, **how)

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        case.buckets[bucket.index()] = bucket.buffer()
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(2))
        return done

    average.__annotations__.clear()  # they are strings here, and DDP compares them with the classes
    model.register_comm_hook(None, average)
    return model


def fsdp(**how: Any) -> Callable[[Case], nn.Module]:
    return lambda case: sharded(case.inner, **how)


def of_blocks(spread: Callable[[nn.Sequential], nn.Module]) -> Callable[[Case], nn.Module]:
    def wrap(case: Case) -> nn.Module:
        spread(case.inner[:LAYERS])
        return case.inner

    return wrap


WAYS: dict[str, Callable[[Case], nn.Module]] = {
    "ddp": ddp,
    "ddp, views": lambda case: ddp(case, gradient_as_bucket_view=True),
    "fsdp2": fsdp(reshard_after_forward=True),
    "fsdp2, not resharded": fsdp(reshard_after_forward=False),
    "fsdp2, bfloat16": fsdp(
        reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "fsdp2, on the host": fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "tp": of_blocks(tensor_parallel),
    "tp + sp": of_blocks(sequence_parallel),
}


def budgets(case: Case) -> dict[str, Any]:
    """Returns the budgets for which the planner keeps everything, recomputes all layers, and does some of both."""
    lowest = graphckpt.plan(case.inner, case.step, memory_budget="min", progress=False, candidates=["full"])
    middle = (lowest.predicted_peak_bytes + lowest.plain_peak_bytes) // 2
    return {"keep": 10 * lowest.plain_peak_bytes, "full": "min", "mixed": middle}


def peaks(case: Case, budget: Budget) -> tuple[dict[str, int], set[str]]:
    """Returns the peak of one step under the plan for a budget, as each part of the library states it and as it is."""
    plan = graphckpt.plan(case.inner, case.step, memory_budget=budget, progress=False, candidates=["full"])
    with plan.apply() as handle:
        case.step()
        metered = case.metered()
        with handle.measure():
            case.step()
        explanation = handle.explain(show=False)
        step = peak_of(RealStep(case.inner, case.step).levels())
    assert explanation.peak_bytes is not None
    stated = {"plan": plan.predicted_peak_bytes, "explain()": explanation.peak_bytes, "step": step, "meter": metered}
    return stated, {row.option for row in plan.rows[:LAYERS]}


def bytes_agree(rank: int, way: str) -> None:
    del rank
    case = Case(way)
    for _ in range(3):
        case.step()
    options = {"keep": {"keep"}, "full": {"full"}, "mixed": {"keep", "full"}}
    limits = budgets(case)
    for policy in limits:
        lowest: dict[str, int] = {}
        for _ in range(ATTEMPTS):
            stated, rows = peaks(case, limits[policy])
            if rows != options[policy]:
                limits = budgets(case)  # bytes that were freed late have changed them, on all ranks alike
                continue
            lowest = {name: min(n, lowest.get(name, n)) for name, n in stated.items()}
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, lowest)
            if all(len(set(each.values())) == 1 for each in everywhere):
                break
        assert len(set(lowest.values())) == 1, (way, policy, rows, lowest)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_equal_those_of_an_independent_counter(tmp_path: Path, way: str) -> None:
    launch(bytes_agree, 2, tmp_path, way)


def freed_weights_are_not_saved(rank: int) -> None:
    """Blocks save what they save in one process: FSDP2 frees the weights that autograd refers to."""
    del rank
    saved = []
    for way in ("alone", "fsdp2"):
        case = Case(way)
        with graphckpt.apply(case.inner, {"[0-2]": None, "3": True}) as handle:
            case.step()
            after_forward = {row.block: row.bytes_after for row in handle.explain(show=False).rows}
            with handle.measure():
                case.step()
            measured = {row.block: row.bytes_after for row in handle.explain(show=False).rows}
        assert after_forward == measured
        saved.append([measured[str(number)] for number in range(LAYERS)])
    alone, sharded_bytes = saved
    assert alone == sharded_bytes


def test_freed_weights_are_not_saved(tmp_path: Path) -> None:
    launch(freed_weights_are_not_saved, 2, tmp_path)


# ---- DDP's buckets


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {id(tensor.untyped_storage()) for tensor in tensors}


def buckets_are_those_of_the_hook(rank: int) -> None:
    del rank
    for way in ("ddp", "ddp, views"):
        case, other = Case(way), Case(way)
        weights = list(case.inner.parameters())
        size = sum(weight.nbytes for weight in weights)
        assert sum(bucket.nbytes for bucket in gradient_buckets(weights)) == size, "before any step"
        for _ in range(3):
            case.step()
            other.step()
            assert storages(gradient_buckets(weights)) == storages(case.buckets.values())
        assert storages(gradient_buckets([*weights, *other.inner.parameters()])) == storages(
            [*case.buckets.values(), *other.buckets.values()]
        )
        assert gradient_buckets(weight.detach() for weight in weights) == []
    assert gradient_buckets(nn.Linear(2, 2).parameters()) == []


def buckets_count_once_in_each_step(rank: int) -> None:
    """DDP makes its buckets anew in the second step, in the order in which gradients came in the first."""
    del rank
    for way in ("ddp", "ddp, views"):
        lowest: list[int] = []
        for _ in range(ATTEMPTS):  # gloo's threads may let go of old buckets, and of DDP's messages, late
            lowest = list(map(min, lowest or [sys.maxsize] * 4, peaks_of_first_steps(way)))
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, lowest)
            if all(len(set(each[1:])) == 1 for each in everywhere):
                break
        assert len(set(lowest[1:])) == 1, (way, lowest, "the first creates the optimizer's states")


def peaks_of_first_steps(way: str) -> list[int]:
    case = Case(way)
    size = sum(weight.nbytes for weight in case.inner.parameters())
    explanations, is_new = [], []
    with graphckpt.apply(case.inner, dict.fromkeys(map(str, range(LAYERS)))) as handle:
        for _ in range(4):
            before = storages(gradient_buckets(case.inner.parameters()))
            case.buckets.clear()  # the old ones would live on
            with handle.measure():
                case.step()
            explanations.append(handle.explain(show=False))
            is_new.append(before != storages(gradient_buckets(case.inner.parameters())))
    assert is_new == [False, True, False, False]
    old = [life for life in explanations[2].tensors if life.is_old and life.kind == "gradients"]
    assert sum(life.num_bytes for life in old) == size
    assert all(life.end is None for life in old)
    peaks = [each.peak_bytes for each in explanations]
    assert None not in peaks
    return [peak for peak in peaks if peak is not None]


def buckets_of_a_frozen_wrapper_count(rank: int) -> None:
    """As in a plan, and in a program that freezes what it has built, which the collector lists no longer."""
    del rank
    case = Case("ddp")
    weights = list(case.inner.parameters())
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    assert sum(bucket.nbytes for bucket in gradient_buckets(weights)) == sum(weight.nbytes for weight in weights)
    assert gc.get_freeze_count() >= num_frozen > 0
    gc.unfreeze()
    with frozen_objects():
        assert gradient_buckets(weights)
    assert gc.get_freeze_count() == 0


def sparse_gradients_have_no_bucket_at_first(rank: int) -> None:
    del rank
    inner = nn.Sequential(nn.Embedding(32, D, sparse=True), nn.Linear(D, D))
    model = DistributedDataParallel(inner)
    tokens = torch.arange(8)
    with graphckpt.apply(inner, {"1": True}) as handle:
        for _ in range(3):
            gradient_buckets(inner.parameters())  # raises nothing
            with handle.measure():
                model(tokens).sum().backward()
            inner.zero_grad()
        assert handle.explain(show=False).peak_bytes is not None


@pytest.mark.parametrize(
    "check",
    [
        buckets_are_those_of_the_hook,
        buckets_count_once_in_each_step,
        buckets_of_a_frozen_wrapper_count,
        sparse_gradients_have_no_bucket_at_first,
    ],
    ids=lambda check: check.__name__,
)
def test_gradient_buckets(tmp_path: Path, check: Callable[[int], None]) -> None:
    launch(check, 2, tmp_path)


def test_without_a_process_group_there_are_no_buckets() -> None:
    assert gradient_buckets(nn.Linear(2, 2).parameters()) == []
