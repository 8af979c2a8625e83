"""Tensors cut over ranks: the same bits as the plain step, a slice of the bytes on each rank, nothing left behind."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.hard_modules import ZOO, chain, differing, run_steps
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.ranks import launch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphckpt
from graphckpt import ConfigError, Segments, Selective
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.stores import Partition, Placement, TensorGroup, partition

PARTITION: dict[str, Any] = {"partition": True, "min_elements": 1}
FULL: dict[str, Any] = {"activation_checkpointing": True, **PARTITION}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[123]": FULL},
    "slab": {"[123]": FULL | {"contiguous": True}},
    "disk": {"[123]": FULL | {"offload": "disk"}},
    "all that is saved": {"": PARTITION},
    "selective": {"[123]": FULL | {"activation_checkpointing": Selective("matmul")}},
    "segments": {"": FULL | {"activation_checkpointing": Segments("sqrt")}},
    "nested": {"": FULL, "[123]": FULL},
    "one block kept": {"": FULL, "2": False},
}


class Log:
    """What a rank sends and takes, in order, with the whole bytes of each gather."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        issue, take = partition.all_gather_bytes, partition.PendingGather.take

        def logged_issue(group: Any, output: Tensor, *args: Any) -> Any:
            self.events.append(("gather", output.numel()))
            return issue(group, output, *args)

        def logged_take(arrival: Any, index: int) -> Tensor:
            run = take(arrival, index)
            self.events.append(("take", run.numel()))
            return run

        partition.all_gather_bytes = logged_issue
        partition.PendingGather.take = logged_take  # type: ignore[method-assign]

    def flush(self) -> list[tuple[str, int]]:
        events, self.events = self.events, []
        return events


def stores_of(handle: graphckpt.Handle) -> list[Any]:
    return [wrapper.placement.store for wrapper in handle._wrappers if wrapper.placement is not None]


def group_of(block: str = "block", notes: list[str] | None = None) -> TensorGroup:
    return TensorGroup(block, lambda: (), [].append if notes is None else notes.append)


def step(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Returns the loss and all gradients."""
    model.zero_grad()
    loss = model(*args, **kwargs).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def wide(length: int = 5, width: int = 33) -> nn.Sequential:
    torch.manual_seed(0)
    return stack_of(lambda: nn.Sequential(nn.Linear(width, 3 * width), nn.Linear(3 * width, width)), length)


# ---- two ranks


def two_ranks(rank: int) -> None:
    log = Log()
    keeps_bits(log)
    keeps_any_tensor(rank)
    keeps_distributed_tensors(rank, log)
    leaves_differing_tensors_whole(rank)
    can_be_taken_twice(log)
    sends_a_shared_tensor_once(log)
    goes_with_tensor_parallelism(log)
    does_not_grow(rank, log)


def keeps_bits(log: Log) -> None:
    """Dropout, None, non-tensors, keyword and nested arguments, edits in place, state."""
    for kind in ZOO:
        plain = run_steps(chain(kind))
        for name, policy in POLICIES.items():
            if name != "full" and kind not in {"mlp", "attention", "containers", "edits_its_input"}:
                continue
            model = chain(kind)
            with graphckpt.apply(model, policy) as handle, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*begins to move")
                assert differing(run_steps(model), plain) == [], f"{kind}, {name}"
                assert all(store.num_alive == 0 for store in stores_of(handle))
            assert any(what == "gather" for what, _ in log.flush()), f"{kind}, {name}"


def keeps_any_tensor(rank: int) -> None:
    """Without blocks: each size, type and stride comes back as it was, and the caller's tensor is not touched."""
    torch.manual_seed(3)
    base = torch.randn(40, 30)
    tensors = [torch.randn(size) for size in (1, 2, 3, 4, 5, 7, 8, 31, 33, 1000, 4099)]
    tensors += [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (1, 15, 16, 17, 32, 33, 1001)]
    tensors += [base.t(), base[3:, 1:7], base[::2], base[0].expand(9, 30), torch.randn(3, 5, dtype=torch.complex64)]
    tensors += [torch.randn(9).bfloat16(), torch.rand(77) > 0.5, torch.tensor(3.0), torch.randn(6).conj()]
    for contiguous in (False, True):
        store: Any = Placement(partition=True, contiguous=contiguous, min_elements=1).store
        for _ in range(2):
            group = store.open_group(group_of())
            keys = [store.put(tensor, group) for tensor in tensors]
            copies = [tensor.clone() for tensor in tensors]
            store.close_group(group)
            for tensor, copy, key in zip(tensors, copies, keys, strict=True):
                back = store.get(key)
                assert torch.equal(back, copy)
                assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
                assert torch.equal(tensor, copy)
            del keys, key, back
            assert store.num_alive == 0


def keeps_distributed_tensors(rank: int, log: Log) -> None:
    """A DTensor that each rank has in full is cut; a sharded one stays; a collective's result is waited for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    x = torch.randn(6, 8)
    for placement, gathers in ((Replicate(), 1), (Shard(0), 0), (Shard(1), 0)):
        model = nn.Sequential(nn.Tanh(), nn.Dropout(0.0))
        results = []
        for flags in (None, FULL):
            given = distribute_tensor(x, mesh, [placement]).requires_grad_()
            with graphckpt.apply(model, {"": flags} if flags else {}) as handle:
                log.flush()
                model(given).pow(2).sum().backward()
                events = log.flush()
                note = "" if flags is None else handle.explain(show=False).rows[0].note
            assert isinstance(given.grad, DTensor)
            results.append(given.grad.full_tensor())
        assert same(results[:1], results[1:])
        assert sum(what == "gather" for what, _ in events) == gathers
        assert ("sharded tensors are not partitioned" in note) == (gathers == 0)
    model = nn.Sequential(nn.Tanh())
    log.flush()
    with graphckpt.apply(model, {"": FULL}):
        for _ in range(20):
            reduced = all_reduce(torch.full((50_000,), rank + 1.0).requires_grad_(), "sum", dist.group.WORLD)
            assert hasattr(reduced, "trigger_wait")
            y = model(reduced)
            y.sum().backward()
            assert torch.equal(y, torch.full((50_000,), 3.0).tanh())
    assert sum(what == "gather" for what, _ in log.flush()) == 20


def leaves_differing_tensors_whole(rank: int) -> None:
    """As under sequence parallelism, where each rank has other rows; the mask beside them is equal and is cut."""

    @as_module(lambda: {"linear": nn.Linear(8, 8)})
    def Masked(self: Any, x: Tensor, *, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * mask

    torch.manual_seed(7)
    mask, x = torch.rand(40, 8), torch.randn(2, 40, 8)[rank].clone()
    for inner in ({}, {"contiguous": True}, {"offload": "disk"}):
        torch.manual_seed(0)
        model = Masked()
        plain = step(model, x, mask=mask)
        with graphckpt.apply(model, {"": FULL | inner}) as handle:
            with pytest.warns(UserWarning, match=r"1 of its 2 tensors differs between ranks: already sharded, left wh"):
                assert same(step(model, x, mask=mask), plain)
            for _ in range(2):  # no more warnings
                assert same(step(model, x, mask=mask), plain)
            (row,) = handle.explain(show=False).rows
            assert "1 of its 2 tensors differs between ranks" in row.note
            if not inner:
                assert row.bytes_after == x.nbytes + mask.nbytes // 2
            assert all(store.num_alive == 0 for store in stores_of(handle))


def can_be_taken_twice(log: Log) -> None:
    model = wide(3)
    torch.manual_seed(2)
    x = torch.randn(9, 33)
    plain = step(model, x)
    with graphckpt.apply(model, {"*": FULL, "re:.*\\..*": None}) as handle:
        log.flush()
        loss = model(x).square().sum()
        results = []
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert all(same(result, plain) for result in results)
        assert sum(what == "gather" for what, _ in log.flush()) == 6
        del loss
        assert all(store.num_alive == 0 for store in stores_of(handle))


def sends_a_shared_tensor_once(log: Log) -> None:
    """Three blocks are given one mask; it is kept once, and comes back once."""

    @as_module(lambda: {"layers": nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(3))})
    def Shared(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x

    torch.manual_seed(4)
    model = Shared()
    x, mask = torch.randn(16, 8), torch.randn(16, 8)
    plain = step(model, x, mask)
    with graphckpt.apply(model, {"layers.*": FULL}):
        log.flush()
        assert same(step(model, x, mask), plain)
        assert sum(size for what, size in log.flush() if what == "gather") == 3 * x.nbytes + mask.nbytes


def goes_with_tensor_parallelism(log: Log) -> None:
    """PyTorch's own, whose blocks pass plain tensors that are equal on all ranks, or rows of them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(11)
    x = torch.randn(6, 16)
    for rows, gathers in ((False, 3), (True, 0)):
        kept: Any = Shard(0) if rows else Replicate()
        plan = {"up": ColwiseParallel(input_layouts=kept), "down": RowwiseParallel(output_layouts=kept)}
        results = []
        for flags in (None, FULL, {"partition": True, "min_elements": 1}):
            model = chain("mlp")[1:4]
            for block in model:
                block.drop.p = 0.0
                parallelize_module(block, mesh, plan)
            given = x.chunk(2)[mesh.get_local_rank()].clone() if rows else x
            with graphckpt.apply(model, {"*": flags, "re:.*\\..*": None} if flags else {}), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*already sharded, left whole")
                log.flush()
                results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in step(model, given)])
                if flags is FULL:
                    assert sum(what == "gather" for what, _ in log.flush()) == gathers
        assert same(results[1], results[0])
        assert same(results[2], results[0])


def does_not_grow(rank: int, log: Log) -> None:
    """200 steps of three shapes: no bytes and no words beyond those of the first ones."""
    words_of = dist.group.WORLD.get_group_store()
    model = wide(3, 16)
    shapes = (7, 64, 65)
    x = torch.randn(65, 16)
    flags = FULL | {"contiguous": True}
    with graphckpt.apply(model, {"[0-2]": flags}) as handle, LiveBytes(record_timeline=False) as live:
        (store,) = {id(store): store for store in stores_of(handle)}.values()
        level = words = asked = 0
        for number in range(200):
            model.zero_grad()
            model(x[: shapes[number % 3]]).sum().backward()
            assert store.num_alive == 0
            if number == 10:
                time.sleep(0.5)
                level = live.live_bytes
                words, asked = words_of.num_keys(), words_of.add(f"graphckpt/{rank}", 0)
            log.flush()
        time.sleep(0.5)  # gloo's thread lets go of a gather a moment after it is over
        assert live.live_bytes == level
        with torch.no_grad():
            model(x)
    assert words_of.add(f"graphckpt/{rank}", 0) == asked
    assert words_of.num_keys() == words


# ---- four ranks


def four_ranks(rank: int) -> None:
    log = Log()
    keeps_a_slice(log)
    gathers_ahead(log)
    knows_meshes(rank)


def keeps_a_slice(log: Log) -> None:
    """After forward the bytes of the blocks' inputs have fallen to a quarter, padded; as `explain` says."""

    def kept_by(model: nn.Sequential) -> int:
        x = torch.ones(65, 33)
        step(model, x)
        with LiveBytes(record_timeline=False) as live:
            live.track([x, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
            before = live.live_bytes
            loss = model(x).sum()
            kept = live.live_bytes - before
        loss.backward()
        return kept

    whole = 65 * 33 * 4
    slice_bytes = -(-whole // 64) * 16
    policies: dict[str, dict[str, Any]] = {name: {} for name in ("plain", "cut", "slab", "disk")}
    policies["slab"], policies["disk"] = {"contiguous": True}, {"offload": "disk"}
    kept = {}
    for name, inner in policies.items():
        flags = {"activation_checkpointing": True} | ({} if name == "plain" else {"partition": True} | inner)
        model = wide()
        with graphckpt.apply(model, {"[0-4]": flags}) as handle:
            kept[name] = kept_by(model)
            rows = handle.explain(show=False).rows
        if name == "cut":  # the first block's input is the caller's own, and stays alive whatever is kept
            assert all(row.bytes_after == slice_bytes for row in rows)
    assert kept["plain"] - kept["cut"] == 4 * whole - 5 * slice_bytes
    log.flush()


def gathers_ahead(log: Log) -> None:
    """One collective for each block, and the next block's is under way before this one's bytes are taken."""
    model = wide()
    for flags in ({"partition": True}, {"partition": True, "contiguous": True}, {"partition": True, "offload": "disk"}):
        with graphckpt.apply(model, {"[0-4]": {"activation_checkpointing": True} | flags}):
            for _ in range(2):
                log.flush()
                step(model, torch.ones(65, 33))
                order = "".join("G" if what == "gather" else "t" for what, _ in log.flush())
                assert order == "GGtGtGtGtt", order


def knows_meshes(rank: int) -> None:
    """Ranks of one row of the mesh hold equal tensors; the rows differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    own = nn.Sequential(nn.Linear(32, 32))
    own[0].weight = nn.Parameter(distribute_tensor(own[0].weight.detach(), mesh["tp"], [Replicate()]))
    torch.manual_seed(rank // 2)
    x = torch.randn(64, 32)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for flag in (mesh, mesh["tp"], groups[rank // 2], Partition(mesh, timeout_seconds=20), True):
        notes: list[str] = []
        store: Any = Placement(partition=flag).store
        group = store.open_group(TensorGroup("block", lambda: list(own.parameters()), notes.append))
        key = store.put(x, group)
        store.close_group(group)
        shard = key.piece.store
        assert shard.stored_bytes(x.nbytes) == x.nbytes // 2
        assert key.piece.handle.slice.nbytes == x.nbytes // 2
        assert torch.equal(store.get(key), x)
        assert notes == []
    for wrong in (unnamed, Partition):
        with pytest.raises(ConfigError, match="fix: "):
            graphckpt.apply(wide(), {"0": {"partition": wrong}})
    # over all ranks the rows differ, so `dp` is not what was meant
    store = Placement(partition=mesh["dp"]).store
    notes = []
    group = store.open_group(group_of("rows", notes))
    key = store.put(x, group)
    with pytest.warns(UserWarning, match="rows: partition: its tensors differ between ranks"):
        store.close_group(group)
    assert torch.equal(store.get(key), x)
    assert len(notes) == 1


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [(two_ranks, 2), pytest.param(four_ranks, 4, marks=pytest.mark.slow)],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_cut_over_ranks(check: Callable[[int], None], num_ranks: int, tmp_path: Path) -> None:
    launch(check, num_ranks, tmp_path)
