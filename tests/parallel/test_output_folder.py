"""Two ranks and an output folder that holds a run: the first decides, and all of them end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from helpers.ranks import run_on_ranks
from helpers.small_run import train, trainer_of

from graphckpt.config.trainer import trainer_from
from graphckpt.errors import GraphckptError

pytestmark = [pytest.mark.multi_process]

WORDS = ["train.dist.data_parallel_size=2", "train.train_iter=2", "train.evaluation.enabled=False"]
WORDS += ["train.dist.timeout_seconds=20"]


def refuse_then_replace(rank: int, folder: Path) -> None:
    fresh = trainer_of("fresh", *WORDS)
    fresh.train()
    for name, trainer in (("out", trainer_of("out", *WORDS)), ("fresh", fresh)):
        message = f"{name} already contains a run" if rank == 0 else "rank 0 ended with ConfigError"
        with pytest.raises(GraphckptError, match=message):
            trainer.train()
    trainer_of("out", *WORDS, "train.overwrite=True").train()
    tempfile.tempdir = str(folder)
    trial = trainer_from("tiny.py", WORDS, fast_dev_run=True)
    trial.train()
    (folder / f"trial of {rank}").write_text(str(trial.folder))


@pytest.mark.slow
def test_the_first_rank_decides_and_none_is_left_waiting(place: Path) -> None:
    assert train("train.train_iter=1") == 0
    run_on_ranks(refuse_then_replace, place, joins=False)
    assert '"data_parallel_size": 2' in (place / "out" / "model_final" / "snapshot.json").read_text()
    trials = {(place / f"trial of {rank}").read_text() for rank in range(2)}
    assert len(trials) == 1
    assert (Path(trials.pop()) / "model_final").is_dir()
