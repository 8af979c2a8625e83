"""One slab: same addresses in every step, nothing allocated after the first, nothing in use overwritten."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.hard_modules import chain
from torch import nn

import graphckpt
from graphckpt import StoreError
from graphckpt.stores import Placement, TensorGroup
from graphckpt.stores.slab import SlabStore
from graphckpt.stores.tensor_store import TensorStore


def store() -> TensorStore:
    placed = Placement(contiguous=True, min_elements=1).store
    assert isinstance(placed, TensorStore)
    return placed


def group(block: str = "block") -> TensorGroup:
    return TensorGroup(block, list, lambda _: None)


def arena_of(placed: TensorStore) -> SlabStore:
    (arena,) = placed._open_stores()
    assert isinstance(arena, SlabStore)
    return arena


def keep(placed: TensorStore, *tensors: torch.Tensor) -> list[Any]:
    keys = []
    for tensor in tensors:
        opened = placed.open_group(group())
        keys.append(placed.put(tensor, opened))
        placed.close_group(opened)
    return keys


def test_same_addresses_and_no_allocation_from_the_second_step_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placed = store()
    allocated: list[int] = []
    allocate = SlabStore._allocate

    def counted(self: SlabStore, num_bytes: int, opened: TensorGroup) -> torch.Tensor:
        allocated.append(num_bytes)
        return allocate(self, num_bytes, opened)

    monkeypatch.setattr(SlabStore, "_allocate", counted)
    addresses = []
    with caplog.at_level(logging.INFO, logger="graphckpt"):
        for step in range(5):
            tensors = [torch.randn(50, size) for size in (7, 300, 1, 64)]
            keys = keep(placed, *tensors)
            kept = [placed.get(key) for key in keys]
            assert all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=True))
            addresses.append([t.data_ptr() for t in kept])
            if step == 1:
                assert allocated == [50 * 7 * 4, 50 * 300 * 4, 200, 50 * 64 * 4, arena_of(placed).slab_bytes]
            del kept, keys
            assert placed.num_alive == 0
    assert addresses[1:] == [addresses[1]] * 4
    assert len(allocated) == 5
    slab = arena_of(placed)._slab
    assert all(slab.data_ptr() <= a < slab.data_ptr() + slab.numel() for a in addresses[4])
    assert [r.message for r in caplog.records] == ["contiguous: a slab of 73.0 KiB on cpu"]


def test_the_slab_grows_with_one_line_on_a_new_shape(caplog: pytest.LogCaptureFixture) -> None:
    placed = store()
    with caplog.at_level(logging.INFO, logger="graphckpt"):
        for rows in (8, 8, 64, 64, 8, 64):
            keys = keep(placed, torch.randn(rows, 64))
            del keys
    assert len(caplog.records) == 2
    assert arena_of(placed).slab_bytes == 64 * 64 * 4


def test_a_range_still_in_use_is_not_overwritten() -> None:
    placed = store()
    ours = torch.randn(50, 64)
    for _ in range(2):
        keys = keep(placed, ours)
        view = placed.get(keys[0])[:2]
        del keys
    want = view.clone()
    for _ in range(3):
        keys = keep(placed, torch.zeros(50, 64))
        assert torch.equal(view, want)
        del keys
    del view
    keys = keep(placed, torch.zeros(50, 64))
    slab = arena_of(placed)._slab
    assert placed.get(keys[0]).data_ptr() == slab.data_ptr()


class ReturnsWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


def test_a_saved_tensor_may_be_a_gradient() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ReturnsWhatItSaved.apply(x, torch.full((64, 32), 3.0))

    model = Layer()
    with graphckpt.apply(model, {"": {"contiguous": True}}):
        inputs = []
        for step in range(4):
            x = torch.zeros(64, 32, requires_grad=True)
            model(x + step).sum().backward()
            inputs.append(x)
    assert all(torch.equal(x.grad, torch.full((64, 32), 3.0)) for x in inputs)


def test_forwards_without_gradients_leave_it_alone() -> None:
    model, x = chain("mlp"), torch.randn(300, 16)
    with graphckpt.apply(model, {"[123]": {"activation_checkpointing": True, "contiguous": True}}) as handle:
        for _ in range(2):
            model(x).sum().backward()
        arena = arena_of(handle._wrappers[0].context.store)
        size = arena.slab_bytes
        loss = model(x).sum()
        with torch.no_grad():
            model(torch.randn(500, 16))
        loss.backward()
        model(x).sum().backward()
        assert arena.slab_bytes == size == 3 * 300 * 16 * 4


def test_no_memory_is_one_error_that_names_block_bytes_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = store()
    keys = keep(placed, torch.randn(50, 64))
    del keys

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

    opened = placed.open_group(group("layers.3"))
    with monkeypatch.context() as patched:
        patched.setattr("graphckpt.stores.slab.torch.empty", fails)
        with pytest.raises(StoreError, match=r"layers\.3: contiguous: expected 12\.5 KiB free on cpu, got none"):
            placed.put(torch.randn(50, 64), opened)
    assert placed.num_alive == 0
    kept = keep(placed, torch.randn(50, 64))
    assert len(kept) == placed.num_alive == 1


def test_an_interrupt_while_a_larger_slab_is_allocated_leaves_no_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = store()
    for size in (10, 10, 2000):  # the third step needs a larger slab, which the fourth allocates
        keep(placed, torch.ones(size))
    arena = arena_of(placed)
    small = arena.slab_bytes

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("graphckpt.stores.slab._log.info", interrupt)
        with pytest.raises(KeyboardInterrupt):
            keep(placed, torch.ones(2000))
    tensor = torch.randn(2000)
    (key,) = keep(placed, tensor)
    restored = placed.get(key)
    assert restored is not None
    assert torch.equal(restored, tensor)
    assert 0 < small < arena.slab_bytes
