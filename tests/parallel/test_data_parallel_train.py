"""Runs over four ranks that share batches, and matrices too: the numbers of one process, whatever is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_run
from helpers.ranks import run_on_ranks
from helpers.small_run import STILL, near, near_rows, same_weights
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.train.data.samples import heldout_batches
from graphckpt.train.parallel.data_parallel import AllReduceSync, DdpSync, apply_fsdp, make_grad_sync
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import full_tensor_tree, is_sharded, local_shard
from graphckpt.train.settings import DistConfig

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

BRIEF = ["train.train_iter=3", "train.log_period=2", "train.checkpointer.period=9", "train.evaluation.eval_period=9"]
FOUR = ["train.dist.data_parallel_size=4", "train.train_micro_batch_size=1", "train.num_accumulation_steps=1"]
SQUARE = [
    *("train.dist.data_parallel_size=2", "train.dist.tensor_parallel_size=2"),
    *("train.train_micro_batch_size=1", "train.num_accumulation_steps=2"),
]
RECOMPUTED = "train.activation_checkpoint.enabled=True"
PART = "train.activation_checkpoint.partition=True"


def zero(stage: int) -> list[str]:
    return ["train.zero_optimization.enabled=True", f"train.zero_optimization.stage={stage}"]


ALONE = ["train.train_micro_batch_size=1", "train.num_accumulation_steps=4"]
SCALED = ["train.amp.enabled=True", "train.amp.dtype=float16"]
PRODUCTS = {
    "ddp": (FOUR, 1.0, 1.0),
    "zero 1": ([*FOUR, *zero(1)], 0.22, 0.28),  # rows of weights are dealt out whole
    "zero 1, scaled": ([*FOUR, *zero(1), *SCALED], 0.22, 0.28),
    "dp x tp": (SQUARE, 0.5, 0.6),  # norms and positions are whole
    "zero 2 x tp": ([*SQUARE, *zero(2)], 0.25, 0.3),
    "zero 3 x tp": ([*SQUARE, *zero(3)], 0.25, 0.3),
}
"""Words of a run, and the least and most that a rank holds of the optimizer's state."""


def run(folder: str, *words: str) -> Any:
    return small_run.run(folder, *BRIEF, *words)


def state_bytes(held: Any) -> int:
    tensors = [value for state in held.state.optimizer.state.values() for value in state.values()]
    return sum((local_shard(value) if is_sharded(value) else value).nbytes for value in tensors)


def products(rank: int, folder: Path) -> None:
    found = {}
    for name, (words, *_) in PRODUCTS.items():
        held = run(name, *STILL, *words)
        found[name] = {"losses": held.losses, "state_bytes": state_bytes(held)}
    # With dropout each rank draws its own masks, and the same ones again.
    words, *_ = PRODUCTS["zero 3 x tp"]
    assert run("drawn", *words).losses == run("recomputed", *words, RECOMPUTED, PART).losses
    leave_unused(rank)
    hold_what_the_stage_says(rank)
    (folder / f"losses of {rank}").write_text(json.dumps(found))


class Forked(nn.Module):
    """Each rank goes another way; nobody goes the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, rank: int) -> torch.Tensor:
        return self.ways[rank](torch.full((2, 4), rank + 1.0)).sum()


def leave_unused(rank: int) -> None:
    """A part of a batch may leave out parameters that another uses; DDP has to be told."""
    for kind, may in ((DdpSync, True), (AllReduceSync, False), (DdpSync, False)):
        model = Forked()
        ranks = TrainRanks(DistConfig(data_parallel_size=4, find_unused_parameters=may), torch.device("cpu"))
        replicas = kind(model, lambda batch, model=model: {"loss": model(rank)}, ranks)
        backward(replicas)
        model.zero_grad()
        if kind is DdpSync and not may:
            with pytest.raises(ConfigError, match=r"· fix: train\.dist\.find_unused_parameters=True, or freeze"):
                backward(replicas)
            continue
        backward(replicas)
        for number, way in enumerate(model.ways[:4]):
            assert torch.equal(way.weight.grad, torch.full((4, 4), 2 * (number + 1.0) / 4)), (kind, number)
        unused = model.ways[4].weight.grad
        assert unused is None or not unused.count_nonzero()


def hold_what_the_stage_says(rank: int) -> None:
    """Between micro-batches: which weights are whole, and which gradients were cut already; and the sum after all."""
    ranks = TrainRanks(DistConfig(data_parallel_size=4), torch.device("cpu"))
    assert ranks.data_mesh is not None
    for stage, are_whole, is_reduced in ((1, True, False), (2, True, True), (3, False, True)):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        apply_fsdp(model, ranks.data_mesh, ["0"], stage=stage)
        held = list(model.parameters())
        x = torch.full((2, 4), rank + 1.0)
        replicas = make_grad_sync(model, lambda batch, model=model, x=x: {"loss": model(x).sum()}, ranks, stage=stage)
        for is_last in (False, True):
            with replicas.micro_batch(is_last=is_last):
                replicas.losses({})["loss"].backward()
            now = [is_last or not are_whole, is_last or is_reduced]
            assert [is_sharded(model[0].weight), held[0].grad is not None] == now, stage
        assert all(is_sharded(parameter.grad) for parameter in held)
        alone = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        alone.load_state_dict({name: full_tensor_tree(value) for name, value in model.state_dict().items()})
        for part in range(4):
            (2 * alone(torch.full((2, 4), part + 1.0)).sum() / 4).backward()
        for parameter, expected in zip(held, alone.parameters(), strict=True):
            torch.testing.assert_close(full_tensor_tree(parameter.grad), expected.grad)


def backward(replicas: DdpSync | AllReduceSync) -> None:
    with replicas.micro_batch(is_last=True):
        replicas.losses({})["loss"].backward()


def test_losses_and_weights_are_those_of_one_process(place: Path) -> None:
    alone = run("alone", *STILL, *ALONE)
    run_on_ranks(products, place, num_ranks=4)
    seen = [json.loads((place / f"losses of {rank}").read_text()) for rank in range(4)]
    alone_scaled = run("alone, scaled", *STILL, *ALONE, *SCALED)
    for name, (_, low, high) in PRODUCTS.items():
        is_scaled = "scaled" in name
        expected = alone_scaled if is_scaled else alone
        for rank in seen:  # the means over all, on each
            assert rank[name]["losses"] == seen[0][name]["losses"]
            assert low <= rank[name]["state_bytes"] / state_bytes(alone) <= high, name
        assert seen[0][name]["losses"] == pytest.approx(expected.losses, rel=1e-3 if is_scaled else 1e-4), name
        if is_scaled:
            continue
        assert near(place / "alone", place / name), name
        assert near_rows(place / "alone", place / name), name
    assert same_weights(place / "drawn", place / "recomputed")
    assert not near(place / "zero 3 x tp", place / "drawn")
    assert "full" in (place / "recomputed" / "log.txt").read_text()


class _Numbers:
    def __len__(self) -> int:
        return 10

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        return {"n": torch.tensor(indices)}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_held_out_batches_are_dealt_out_once_each(parts: int) -> None:
    def of(part: int) -> list[tuple[dict[str, torch.Tensor], bool]]:
        return list(heldout_batches(_Numbers(), size=2, limit=None, rank=part, num_ranks=parts))

    dealt = [of(part) for part in range(parts)]
    assert len({len(batches) for batches in dealt}) == 1
    counted = [n for batches in dealt for batch, counts in batches if counts for n in batch["n"].tolist()]
    assert sorted(counted) == list(range(10))
