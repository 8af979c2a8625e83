"""Snapshots that four ranks wrote share by share: a lost rank, the same bits again, and other numbers of ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import small_run
from helpers.ranks import run_on_ranks
from helpers.small_run import equal, rows_of, same_weights, writer_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from graphckpt.train.loop import HookBase, Loop, TrainError
from graphckpt.train.parallel.ranks import ParallelError
from graphckpt.train.parallel.sharding import full_tensor_tree, restore_sharded
from graphckpt.train.snapshot import dcp
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import SnapshotWriteError
from graphckpt.train.snapshot.schema import SnapshotError
from graphckpt.train.snapshot.weights import read_weights

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

BRIEF = ["train.train_iter=6", "train.log_period=2", "train.checkpointer.period=2", "train.evaluation.eval_period=9"]
ZERO = ["train.zero_optimization.enabled=True", "train.zero_optimization.stage=3"]
SQUARE = [
    *("train.dist.data_parallel_size=2", "train.dist.tensor_parallel_size=2", "train.dist.timeout_seconds=20"),
    *("train.train_micro_batch_size=1", "train.num_accumulation_steps=2", *ZERO),
]
LAST = "model_0000003"


def trainer_of(folder: str, *words: str, **how: Any) -> Any:
    return small_run.trainer_of(folder, *BRIEF, *words, **how)


# ---- four ranks: one of them is lost; all of them go on


class Leave(HookBase):
    """One rank dies in the midst of a run."""

    def before_step(self, loop: Loop) -> None:
        if os.environ["RANK"] == "3" and loop.done == 5:
            os._exit(0)


def lose(rank: int, folder: Path) -> None:
    if rank == 3:
        (folder / "3 is done").touch()
    with pytest.raises(ParallelError, match=rf"^rank {rank}: another process is gone, or .* · fix: .*--resume"):
        trainer_of("lost", *SQUARE, hooks=(Leave(),)).train()


def go_on(rank: int, folder: Path) -> None:
    del folder
    trainer_of("lost", *SQUARE, resume=True).train()
    trainer_of("whole", *SQUARE).train()
    trainer_of("async", *SQUARE, "train.checkpointer.async_save=True").train()
    metrics = trainer_of("lost", *SQUARE, eval_only=True).evaluate()
    assert metrics["eval_loss"] > 0
    refuse_a_full_disk(rank)


def refuse_a_full_disk(rank: int) -> None:
    """One rank cannot write its share, and all hear of it."""
    path = Path("blocked")
    if rank == 1:
        save, dcp.save = dcp.save, full
    with pytest.raises(SnapshotWriteError, match=r"^blocked: No space left on device"):
        dcp.write(path, {"x": torch.ones(2)}, dist.group.WORLD)
    if rank == 1:
        dcp.save = save


def full(state: Any, *, storage_writer: Any, process_group: Any) -> Any:
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - the real one

    def write_data(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    storage_writer.write_data = write_data
    return save(state, storage_writer=storage_writer, process_group=process_group)


# ---- a weight of which one rank's shard is not finite


class Spoil(HookBase):
    """Makes the last shard of a weight infinite on one rank, in an iteration with a snapshot."""

    def after_step(self, loop: Loop) -> None:
        if os.environ["RANK"] == "1" and loop.done == 4:
            weights: Any = writer_of(loop)._state.model.named_parameters()
            weight = next(weight for name, weight in weights if name == "transformer.h.1.mlp.c_fc.weight")
            with torch.no_grad():
                weight.to_local()[-1, -1] = float("inf")


def spoil(rank: int, folder: Path) -> None:
    del rank, folder
    for kind, words in (("tensor", []), ("data", ["train.train_micro_batch_size=1", *ZERO])):
        trainer = trainer_of(kind, f"train.dist.{kind}_parallel_size=2", *words, hooks=(Spoil(),))
        with pytest.raises(TrainError, match=r"^transformer\.h\.1\.mlp\.c_fc\.weight is not finite after iteration 4,"):
            trainer.train()


def test_a_shard_that_is_not_finite_ends_all_ranks_before_the_snapshot(place: Path) -> None:
    run_on_ranks(spoil, place)
    for kind in ("tensor", "data"):
        assert [path.name for path in (place / kind).glob("*model_0*")] == ["model_0000001"]
        assert (place / kind / "last_checkpoint").read_text() == "model_0000001\n"


# ---- other numbers of ranks


class Copy(HookBase):
    """Notes the whole state as it was read, and writes it anew by as many ranks as there are now."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer = trainer
        self._name = name

    def before_train(self, loop: Loop) -> None:
        saver = writer_of(loop)
        shards: dict[str, torch.Tensor] = {}
        weights, states = saver._state.weights(), saver._state.states(shards)
        graph = restore_sharded(states["graph"], full_tensor_tree(shards))
        if self._trainer.ranks.is_main:
            torch.save({"weights": weights, "graph": graph}, f"{self._name}.pt")
        saver.save(LAST, loop, lambda: None)
        loop._is_asked = True


def copy(folder: str, name: str, *words: str) -> None:
    trainer = trainer_of(folder, *words, resume=True)
    trainer._more_hooks = (Copy(trainer, name),)
    trainer.train()


def copy_on_two(rank: int, folder: Path) -> None:
    two = "train.dist.{}_parallel_size=2"
    copy("moved", "tensor two", two.format("tensor"))
    dist.barrier()
    if rank == 0:
        shutil.copytree(folder / "moved", folder / "moved again")
    dist.barrier()
    one = ["train.train_micro_batch_size=1", "train.zero_optimization.enabled=True", "train.zero_optimization.stage=1"]
    copy("moved again", "data two", two.format("data"), *one)


def test_lost_and_resumed_and_read_by_other_numbers_of_ranks(place: Path) -> None:
    run_on_ranks(lose, place, joins=False, num_ranks=4)
    assert (place / "lost" / "last_checkpoint").read_text() == f"{LAST}\n"
    assert not (place / "lost" / "model_final").exists()
    shutil.copytree(place / "lost", place / "moved")
    held = {path.name for path in (place / "lost" / LAST / "shares").iterdir()}
    assert held == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert not (place / "lost" / LAST / "model.safetensors").exists()

    run_on_ranks(go_on, place, num_ranks=4)
    assert same_weights(place / "whole", place / "lost")
    assert rows_of(place / "whole") == rows_of(place / "lost")
    assert same_weights(place / "whole", place / "async")
    names = {path.name for path in (place / "async").glob("model_*")}
    assert names == {LAST, "model_0000001", "model_best", "model_final"}
    for name in ("whole", "async"):
        assert equal(read_weights(place / name / LAST), read_weights(place / "lost" / LAST))
    plain = AutoModelForCausalLM.from_pretrained(place / "whole" / "model_final")
    weights = load_file(place / "whole" / "model_final" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items() if name in weights)
    assert equal(weights, read_weights(place / "whole" / "model_final"))  # and the shares beside it hold the same

    run_on_ranks(copy_on_two, place)
    copy("moved", "one", "train.dist.tensor_parallel_size=1")
    read = {name: torch.load(f"{name}.pt", weights_only=True) for name in ("tensor two", "data two", "one")}
    states = read["one"]["graph"]["System-Train-Optimizer-0"]["state"]
    assert len(states) > 20
    assert all(state["exp_avg_sq"].count_nonzero() for state in states.values())
    assert equal(read["one"]["weights"], read_weights(place / "lost" / LAST))
    assert equal(read["tensor two"], read["one"])
    assert equal(read["data two"], read["one"])
    assert not (place / "moved" / LAST / "shares").exists()  # one process writes whole files

    is_refused(place / "lost" / LAST, place)


def is_refused(good: Path, place: Path) -> None:
    """A share that was cut short, and one of other bytes."""
    short = place / "short"
    shutil.copytree(good, short)
    path = short / "shares" / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match=r"__2_0.distcp: is broken, [\d,]+ bytes of"):
        snapshot.check(short)
    path.unlink()
    with pytest.raises(SnapshotError, match=r"__2_0.distcp: No such file"):
        snapshot.check(short)
    edited = place / "edited"
    shutil.copytree(good, edited)
    path = edited / "shares" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    for at in range(1000, len(content), 1000):
        content[at] ^= 255
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=r"shares: cannot be read \("):
        read_weights(edited)
