"""Storages that are resized, which is not an op: counted at once, in every active counter and in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes, StorageLog
from graphckpt.simulation.allocations import AllocationTrace

KIB = 1024


def kib() -> Tensor:
    return torch.zeros(KIB // 4)


def is_replaced() -> bool:
    """Whether ``resize_`` is not the one of PyTorch."""
    return "resize_" in vars(torch.UntypedStorage)


def free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def gather(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


def test_a_resized_storage_counts_with_its_new_size_at_once() -> None:
    with LiveBytes() as live:
        x, y = kib(), kib()
        free(x)
        z = kib()
        gather(x)
        del x, y, z
    assert [event.live_bytes for event in live.timeline] == [n * KIB for n in (1, 2, 1, 2, 3, 2, 1, 0)]
    assert live.peak_bytes == 3 * KIB


def test_a_storage_that_no_op_has_shown_counts_from_its_resize() -> None:
    x = kib()
    free(x)
    with LiveBytes() as live, LiveBytes("meta") as elsewhere:
        gather(x)
        assert live.live_bytes == KIB
        assert elsewhere.live_bytes == 0
        free(x)
        assert live.live_bytes == 0


def test_fake_storages_count_only_where_they_are_counted_at_all() -> None:
    x = torch.empty(KIB // 4, device="meta")
    with LiveBytes(counts_fake=True) as fake, LiveBytes() as live:
        x.untyped_storage().resize_(2 * KIB)
        assert (fake.live_bytes, live.live_bytes) == (2 * KIB, 0)


def by_op(x: Tensor) -> None:
    x.resize_(2 * KIB // 4)


def by_set(x: Tensor) -> None:
    x.set_(torch.UntypedStorage(2 * KIB))  # type: ignore[call-overload]


def by_typed_storage(x: Tensor) -> None:
    x._typed_storage()._resize_(2 * KIB // 4)  # FSDP1


def by_op_of_the_compiler(x: Tensor) -> None:
    torch.ops.inductor.resize_storage_bytes_(x, 2 * KIB)


@pytest.mark.parametrize("resize", [by_op, by_set, by_typed_storage, by_op_of_the_compiler])
def test_every_way_to_resize_counts_at_once(resize: Callable[[Tensor], None]) -> None:
    with LiveBytes() as live:
        x = kib()
        resize(x)
        assert live.live_bytes == 2 * KIB


def test_nothing_is_replaced_while_nothing_counts() -> None:
    before = torch.UntypedStorage.resize_
    assert not is_replaced()
    outer, inner = LiveBytes(), LiveBytes()
    with outer:
        x = kib()
        with inner, inner:
            free(x)
            assert is_replaced()
        assert is_replaced()
        gather(x)
    assert not is_replaced()
    assert torch.UntypedStorage.resize_ is before
    assert (outer.live_bytes, inner.live_bytes) == (KIB, 0)
    free(x)
    assert outer.live_bytes == KIB, "it has ended"


def test_an_exception_leaves_nothing_replaced() -> None:
    live = LiveBytes()
    with pytest.raises(ZeroDivisionError), live, LiveBytes():
        1 / 0
    assert not is_replaced()
    with pytest.raises(RuntimeError), live:
        torch.zeros(4).untyped_storage().resize_(-1)
    assert not is_replaced()


def test_counters_that_do_not_end_in_reverse_order() -> None:
    one, other = LiveBytes(), LiveBytes()
    barrier, x = threading.Barrier(2), kib()
    free(x)

    def count() -> None:
        with other:
            barrier.wait()  # both count
            barrier.wait()  # `one` has ended
            gather(x)

    thread = threading.Thread(target=count)
    with one:
        thread.start()
        barrier.wait()
    barrier.wait()
    thread.join()
    assert (one.live_bytes, other.live_bytes) == (0, KIB)
    assert not is_replaced()


def test_resizes_in_another_thread_count() -> None:
    with LiveBytes() as live:
        tensors = [kib() for _ in range(64)]
        threads = [threading.Thread(target=lambda n=n: [free(x) for x in tensors[n::4]]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert live.live_bytes == 0


def test_live_bytes_nest_in_pytorchs_own_tracker_in_either_order() -> None:
    resize = torch.UntypedStorage.resize_
    try:
        with LiveBytes() as live:
            x = kib()
            with MemTracker():
                free(x)
                assert live.live_bytes == 0
            gather(x)
            assert live.live_bytes == KIB
        with MemTracker(), LiveBytes() as live:
            gather(y := kib())
            free(y)
            assert live.live_bytes == 0
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        del torch.UntypedStorage.resize_  # MemTracker leaves what it replaced on the class
    assert not is_replaced()


# ---- what is logged


def test_a_log_has_a_death_and_a_birth() -> None:
    with StorageLog() as log:
        x = kib()
        log.recomputed = "h.0"
        free(x)
        gather(x)
        assert log.recomputed == "h.0"
        x.add_(1)
        del x
    lives = [(life.begin, life.end, life.num_bytes, life.is_resized) for life in log.lives]
    assert lives == [(0, 1, KIB, True), (2, 3, KIB, False)]
    assert [life.recomputed_by for life in log.lives] == [None, None], "the plain step gathers it as well"


def test_an_allocation_trace_has_a_death_and_a_birth() -> None:
    trace = AllocationTrace("cpu")
    with trace:
        x = kib()
        trace.begin_step()
        free(x)
        gather(x)
        free(x)
        del x
        kib()
    assert trace.allocations.steps == [[0], [~0, 1, ~1, 2, ~2]]
    assert trace.allocations.sizes == 3 * [KIB]
    assert trace.live_bytes == 0


# ---- what is saved


@as_module(lambda: {"inner": nn.Linear(16, 16), "weights": [torch.empty(4, 16)]})
def Layer(self: Any, x: Tensor) -> Tensor:
    """Multiplies by a weight that has memory only around each use, as one that FSDP2 gathers."""
    (weight,) = self.weights

    def fill(_: Tensor | None = None) -> None:
        gather(weight)
        weight.data.fill_(2.0)

    fill()
    product = torch.tanh(self.inner(x)) * weight
    free(weight)
    product.register_hook(fill)
    return product


def test_explain_does_not_count_a_freed_weight_as_saved() -> None:
    model = stack_of(Layer, 3)
    x = torch.randn(4, 16, requires_grad=True)
    model(x).sum().backward()
    with graphckpt.apply(model, {"[0-2]": None}) as handle:
        model(x).sum().backward()
        forward_alone = handle.explain(show=False)
        with handle.measure():
            model(x).sum().backward()
        measured = handle.explain(show=False)
    for explanation in (forward_alone, measured):
        rows = {row.block: row.bytes_after for row in explanation.rows}
        assert rows["1"] == rows["2"] == 2 * x.nbytes, "its input and the result of tanh"
    assert not is_replaced()
