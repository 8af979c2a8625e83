"""LiveBytes against independent truths: counts by hand, the allocator's record, walks over tensors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from helpers.layer_stacks import stack_of
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.ledger.record import Event

KIB = 1024  # bytes; also the size of 256 float32


def kib(num: int = 1) -> torch.Tensor:
    return torch.zeros(num * KIB // 4)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def mlp(width: int = 32, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.5), nn.Linear(2 * width, width))]
    layers += [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(depth - 1)]
    return nn.Sequential(*layers)


# ---- by hand


def test_each_change_is_one_event_with_its_level_block_and_phase() -> None:
    with LiveBytes() as live, LiveBytes(record_timeline=False) as without_timeline:
        x = kib()
        live.block, live.phase = "a", "backward"
        y = torch.cat([x, x])
        del x
        live.block = "b"
        del y
    assert live.timeline == [
        Event(KIB, "", "forward"),
        Event(3 * KIB, "a", "backward"),
        Event(2 * KIB, "a", "backward"),
        Event(0, "b", "backward"),
    ]
    assert live.peak_bytes == without_timeline.peak_bytes == 3 * KIB
    assert live.live_bytes == 0
    assert without_timeline.timeline == []


def test_a_storage_counts_once_for_all_its_views_and_lives_as_long_as_the_last() -> None:
    with LiveBytes() as live:
        x = kib(4)
        views = [x.view(4, -1), x[:1], x.detach(), x.view(2, -1).T, nn.Parameter(x)]
        x.add_(1)
        assert live.live_bytes == 4 * KIB
        del x
        small = views[1]
        del views
        assert live.live_bytes == 4 * KIB, "one element still holds the whole storage"
        del small
        assert live.live_bytes == 0


def test_an_older_tensor_counts_when_an_op_takes_it_or_when_tracked() -> None:
    x, w, unused = kib(), kib(2), kib(4)
    with LiveBytes() as live:
        y = torch.cat([x, w])
        assert live.live_bytes == (1 + 2 + 3) * KIB
        live.track([unused, unused, None, x])
        assert live.live_bytes == (1 + 2 + 3 + 4) * KIB
    del unused, y
    assert live.live_bytes == 3 * KIB, "what is freed after the mode was left is subtracted too"


def test_an_output_argument_and_keyword_arguments_count() -> None:
    with LiveBytes() as live:
        out = torch.add(input=kib(), other=1, out=torch.empty(0))
        assert live.live_bytes == KIB
        del out


def test_a_tensor_that_only_the_autograd_graph_holds_is_alive_until_backward() -> None:
    with LiveBytes() as live:
        x = kib().requires_grad_()
        y = x.exp()
        loss = y.sum()
        assert live.live_bytes == 2 * KIB + 4
        del y
        assert live.live_bytes == 2 * KIB + 4, "exp saves its result"
        live.phase = "backward"
        loss.backward()
        assert live.live_bytes == 2 * KIB + 4, "the result is gone, the gradient has come"
        x.grad = None
        assert live.live_bytes == KIB + 4
        unused = x.exp().exp().sum()
        assert live.live_bytes == 3 * KIB + 8
        del unused
        assert live.live_bytes == KIB + 4, "a graph that never runs backward frees what it held"
    assert live.peak_bytes == live.timeline[-1].live_bytes + 2 * KIB + 4, "the seed of backward has 4 bytes"


def test_a_resize_is_counted_at_once() -> None:
    with LiveBytes() as live:
        x = kib()
        x.resize_(512)
        assert live.live_bytes == 2 * KIB
        x.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        x.untyped_storage().resize_(4 * KIB)
        x.add_(1)
        assert live.live_bytes == 4 * KIB
        del x
        assert live.live_bytes == 0


def test_a_tensor_tracked_late_raises_every_level_so_far() -> None:
    state = kib(4)
    with LiveBytes() as live:
        x = kib()
        y = x + 1
        del y
        live.track_as_old([state, x])
        state.add_(1)
    assert [event.live_bytes for event in live.timeline] == [5 * KIB, 6 * KIB, 5 * KIB]
    assert live.peak_bytes == 6 * KIB
    assert live.live_bytes == 5 * KIB


def test_meta_tensors_and_other_devices_count_nothing() -> None:
    with LiveBytes() as live:
        torch.zeros(256, device="meta") + 1
    with LiveBytes(device="cuda") as on_cuda:
        kib() + 1
    assert live.peak_bytes == on_cuda.peak_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")  # said once a process
def test_sparse_tensors_and_gradients_count_their_indices_and_values() -> None:
    x = torch.eye(16).to_sparse()
    csr = torch.eye(16).to_sparse_csr()
    with LiveBytes() as live:
        live.track([x])
        assert live.live_bytes == 16 * (2 * 8 + 4)
        doubled = x * 2
        assert live.live_bytes == 2 * 16 * (2 * 8 + 4)
        del doubled, x
        live.track([csr])
        assert live.live_bytes == storage_bytes([csr.crow_indices(), csr.col_indices(), csr.values()])
        del csr
        assert live.live_bytes == 0
    table = nn.Embedding(64, 8, sparse=True)
    with LiveBytes() as live:
        table(torch.tensor([1, 2])).sum().backward()
        before = live.live_bytes
        table.weight.grad = None
        assert before - live.live_bytes >= 2 * 8 + 2 * 8 * 4


def test_a_wrapper_subclass_counts_what_it_holds() -> None:
    with LiveBytes() as live:
        pair = TwoTensor(kib(), kib())
        live.track([pair])
        assert live.live_bytes == 2 * KIB
        more = pair + 1
        assert isinstance(more, TwoTensor)
        assert live.live_bytes == 4 * KIB
        del pair, more
        assert live.live_bytes == 0


def test_modes_nest_and_one_may_be_entered_twice() -> None:
    inner, outer = LiveBytes(), LiveBytes()
    with outer, inner:
        x = kib()
    with inner:
        y = kib()
    assert inner.live_bytes == 2 * KIB
    assert outer.live_bytes == KIB
    del x, y
    assert [event.live_bytes for event in inner.timeline] == [KIB, 2 * KIB]


def test_a_dropped_counter_leaves_storages_alone_and_is_freed() -> None:
    live = LiveBytes()
    with live:
        x = kib()
    gone = weakref.ref(live)
    del live
    gc.collect()
    assert gone() is None
    assert x.sum() == 0


def test_storages_freed_by_another_thread_are_subtracted() -> None:
    with LiveBytes() as live:
        held = [kib() for _ in range(64)]
        threads = [threading.Thread(target=lambda: [held.pop() for _ in range(16)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert live.live_bytes == 0


# ---- Note [One storage, one object]


def test_one_storage_one_object() -> None:
    x = kib().requires_grad_()
    y = x.exp()
    name, alive = id(y.untyped_storage()), weakref.ref(y.untyped_storage())
    for _ in range(1000):
        assert id(y.detach().untyped_storage()) == name
    loss = y.sum()
    del y
    gc.collect()
    assert alive() is not None, "held by the graph alone"
    assert id(alive()) == name
    loss.backward()
    assert alive() is None, "freed at once"


# ---- against the allocator and the objects


def test_after_backward_it_equals_the_allocators_own_sum(
    allocator_bytes: Callable[[Callable[[], object]], int],
) -> None:
    model, x = mlp(), torch.randn(64, 32)

    def step() -> None:
        model(x).square().mean().backward()

    truth = allocator_bytes(step)
    model.zero_grad()
    with LiveBytes() as live:
        live.track([*model.parameters(), x])
        before = live.live_bytes
        step()
    assert live.live_bytes - before == truth == storage_bytes(p.grad for p in model.parameters())


@pytest.mark.gpu
def test_live_bytes_on_cuda_equal_those_of_the_caching_allocator() -> None:
    model = stack_of(
        lambda: nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(128)), 4
    ).cuda()
    x = torch.randn(512, 128, device="cuda")
    model(x).square().mean().backward()
    model.zero_grad()
    gc.collect()  # of other tests
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    with LiveBytes(device="cuda") as live:
        live.track([*model.parameters(), x])
        before = live.live_bytes
        out = model(x)
        assert live.live_bytes - before == torch.cuda.memory_allocated() - start
        out.square().mean().backward()
    assert live.live_bytes > before


def test_live_bytes_equal_a_walk_over_all_tensors_and_all_saved_tensors() -> None:
    model, x = mlp(), torch.randn(64, 32)
    saved = []
    with LiveBytes() as live:
        live.track([*model.parameters(), x])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = model(x)
        assert live.live_bytes == storage_bytes([*model.parameters(), x, out, *saved])


def test_a_whole_step_with_optimizer_ends_with_what_must_stay() -> None:
    model, x = mlp(), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveBytes() as live:
        live.track([*model.parameters(), x])
        for _ in range(3):
            model(x).square().mean().backward()
            live.phase = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
            live.phase = "forward"
        state = [t for values in optimizer.state.values() for t in values.values()]
        assert live.live_bytes == storage_bytes([*model.parameters(), x, *state])
    assert {event.phase for event in live.timeline} == {"forward", "optimizer"}
    assert max(event.live_bytes for event in live.timeline) == live.peak_bytes


@pytest.mark.slow
def test_a_compiled_block_runs_and_its_results_count() -> None:
    block = torch.compile(lambda x: (x + 1).exp(), backend="aot_eager")
    with LiveBytes() as live:
        x = kib()
        y = block(x)
        z = y + 1
        assert live.live_bytes == 3 * KIB
    assert torch.equal(z, torch.full_like(z, torch.e) + 1)
