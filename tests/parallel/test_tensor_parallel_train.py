"""Runs over two ranks: the numbers of one process, snapshots for any number of them, and an end for all at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_on_ranks
from helpers.small_run import STILL, StopAfter, near, near_rows, rows_of, same_weights, stopped, train_in, trainer_of

from graphckpt.errors import ConfigError
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.parallel.ranks import ParallelError
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import SnapshotWriteError

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

TWO = "train.dist.tensor_parallel_size=2"


class StopOne(StopAfter):
    """One rank is asked to stop, and both do."""

    def after_step(self, loop: Loop) -> None:
        if os.environ["RANK"] == "1":
            super().after_step(loop)


def stop_one(folder: str, *words: str) -> None:
    outcome = trainer_of(folder, TWO, *words, hooks=(StopOne(5),)).train()
    assert (outcome.iterations, outcome.is_stopped) == (5, True)


def runs(rank: int, folder: Path) -> None:
    assert train_in("cut", TWO, *STILL) == 0
    assert train_in("begun alone", TWO, *STILL, "--resume") == 0
    stop_one("begun together", *STILL)
    assert train_in("whole", TWO) == 0
    stop_one("halves")
    assert train_in("halves", TWO, "--resume") == 0
    assert train_in("recomputed", TWO, "train.activation_checkpoint.enabled=True") == 0
    assert train_in("cut", TWO, *STILL, "--eval-only") == 0
    refuse_sizes()
    go_on_with_a_full_disk(rank, folder)


def refuse_sizes() -> None:
    with pytest.raises(ConfigError) as raised:
        trainer_of("refused", "model.config.n_head=1", "model.config.vocab_size=301", TWO).train()
    for part in ("num_attention_heads is 1 · fix: use 2", "transformer.wte: vocab_size is 301 · fix: use 302"):
        assert part in str(raised.value)


def go_on_with_a_full_disk(rank: int, folder: Path) -> None:
    """Both ranks learn that the first could not write, and stay in step."""
    write = snapshot.write

    def full(path: Path, **parts: Any) -> None:
        if path.name in {"model_best", "model_0000003"}:
            raise SnapshotWriteError(f"{path}: No space left on device")
        write(path, **parts)

    snapshot.write = full
    try:
        assert train_in("full", TWO) == 0
    finally:
        snapshot.write = write
    found = {path.name for path in (folder / "full").glob("model_*")}
    assert rank == 1 or found == {"model_0000007", "model_final"}


def test_runs_agree_with_one_process_and_resume_at_any_number(place: Path) -> None:
    assert train_in("alone", *STILL) == 0
    stopped("begun alone", 5, *STILL)
    run_on_ranks(runs, place)
    assert near(place / "alone", place / "cut")
    assert near_rows(place / "alone", place / "cut")
    assert near(place / "alone", place / "begun alone")
    assert train_in("begun together", *STILL, "--resume") == 0
    assert near(place / "alone", place / "begun together")
    assert same_weights(place / "whole", place / "halves")
    assert rows_of(place / "whole") == rows_of(place / "halves")
    assert same_weights(place / "whole", place / "recomputed")
    log = (place / "begun alone" / "log.txt").read_text()
    assert log.count("resumed from") == 1
    assert re.search(r"tensor_parallel_size \S+ -> 2.*; sums may be rounded differently", log)


class Leave(HookBase):
    """One rank dies, or sleeps, in the midst of a run."""

    def __init__(self, how: str) -> None:
        self._how = how

    def before_step(self, loop: Loop) -> None:
        if os.environ["RANK"] == "1" and loop.done == 3:
            if self._how == "dies":
                os._exit(0)
            time.sleep(30)


def lose(rank: int, folder: Path, how: str) -> None:
    trainer = trainer_of("out", TWO, "train.dist.timeout_seconds=4", hooks=(Leave(how),))
    if rank == 1:
        (folder / "1 is done").touch()
    started = time.monotonic()
    with pytest.raises(
        ParallelError, match=rf"^rank {rank}: another process is gone, or has not answered for 4 s \(.* · fix: "
    ):
        trainer.train()
    assert rank == 1 or time.monotonic() - started < 25  # it is rank 1 that sleeps


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_lost_rank_ends_the_others(place: Path, how: str) -> None:
    run_on_ranks(lose, place, how, joins=False)


def test_another_number_of_processes_is_an_error(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "train.dist: data_parallel_size 1 x tensor_parallel_size 2 is 2, and"
    torchrun = "torchrun --nproc-per-node 2 -m graphckpt train"
    half = ["train.amp.enabled=True", "train.amp.dtype=float16"]
    for started, words, message in (
        ("1", [], f"{what} 1 process was started · fix: {torchrun}"),
        ("4", [], f"{what} 4 processes were started · fix: train.dist.data_parallel_size=2, or {torchrun}"),
        ("4", half, "train.amp.dtype: 'float16' is not supported with dist.tensor_parallel_size above 1"),
    ):
        monkeypatch.setenv("WORLD_SIZE", started)
        assert train_in("out", TWO, *words) == 2
        assert message in capsys.readouterr().err
    assert not (place / "out").exists()


def test_torchrun_starts_a_run_that_stops_at_a_signal(place: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words = ["-m", "graphckpt", "train", "--config-file", "tiny.py", TWO, "train.train_iter=100000"]
    with (place / "output.txt").open("w") as output:
        run = subprocess.Popen([*command, *words], stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 200
        while not (place / "out" / "last_checkpoint").exists() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=100) != 0
    text = (place / "output.txt").read_text()
    assert text.count("model: GPT2LMHeadModel, 11,648 parameters on 2 processes on cpu") == 1, text
    last = (place / "out" / "last_checkpoint").read_text().strip()
    info = json.loads((place / "out" / last / "snapshot.json").read_text())
    assert f"saved {last}" in text, text
    assert info["machine"]["tensor_parallel_size"] == 2
    assert "stopped after" in text, text
