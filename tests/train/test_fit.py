"""``train.activation_checkpoint.fit`` chooses micro-batch and accumulation, and keeps the global batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.small_run import rows_of, same_weights, train
from omegaconf import DictConfig, OmegaConf

from graphckpt.config.trainer import trainer_from
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.train.snapshot.saved_run import CONFIG

pytestmark = pytest.mark.usefixtures("place")

MIB = 2**20
CHECKPOINT = "train.activation_checkpoint"
SHORT = ["train.train_iter=3", "train.global_batch_size=6", "train.num_accumulation_steps=null"]
FIT = [*SHORT, f"{CHECKPOINT}.fit=batch", f"{CHECKPOINT}.memory_budget=1MiB"]
LONG = ["model.config.n_layer=4", "data.seq_length=32", "train.evaluation.enabled=False"]


def saved(folder: Path) -> DictConfig:
    return OmegaConf.load(folder / CONFIG).train


def test_a_run_has_the_sizes_and_policies_that_fit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveBytes(record_timeline=False)
    words = [*FIT, *LONG, "train.checkpointer.period=2"]
    trainer = trainer_from("tiny.py", words)
    with live:
        trainer.train()
    assert live.peak_bytes <= MIB
    fit = saved(place / "out")
    assert fit.train_micro_batch_size * fit.num_accumulation_steps == fit.global_batch_size == 6
    assert fit.activation_checkpoint.fit is None
    assert fit.activation_checkpoint.policies
    assert f"fit: micro-batch {fit.train_micro_batch_size} x {fit.num_accumulation_steps}" in capsys.readouterr().out
    sizes = [f"train.{key}={fit[key]}" for key in ("train_micro_batch_size", "num_accumulation_steps")]
    assert train(*SHORT, *LONG, *sizes, "train.output_dir=plain") == 0
    assert same_weights(place / "out", place / "plain")
    losses = [[row["total_loss"] for row in rows_of(place / name)] for name in ("out", "plain")]
    assert losses[0] == losses[1]

    longer = [word.replace("train_iter=3", "train_iter=4") for word in words]
    assert train(*longer, f"{CHECKPOINT}.memory_budget=1KiB", "--resume") == 0
    assert "as at the start of the run" in capsys.readouterr().out
    assert saved(place / "out").train_micro_batch_size == fit.train_micro_batch_size


def test_a_short_trial_run_chooses_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (place / "tiny.py").open("a") as config:
        config.write("train.update(global_batch_size=6, num_accumulation_steps=None)\n")
        config.write("train.activation_checkpoint.update(fit='batch', memory_budget='1MiB')\n")
    assert train("--fast-dev-run") == 0
    assert "train.activation_checkpoint.fit=null" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.global_batch_size=null"], "activation_checkpoint.fit: expected a fixed number of samples"),
        (
            ["train.num_accumulation_steps=2"],
            "activation_checkpoint.fit: expected no num_accumulation_steps, which fit chooses",
        ),
        ([f"{CHECKPOINT}.memory_budget=min"], "expected a budget independent of the batch size, got 'min' · fix"),
        ([f"{CHECKPOINT}.policies={{'*.h.0': True}}"], "fit: the plan of the chosen batch size sets the"),
        ([f"{CHECKPOINT}.fit=fastest"], "activation_checkpoint.fit"),
        (["train.dist.data_parallel_size=2"], "activation_checkpoint.fit: expected one process, got 2"),
        ([f"{CHECKPOINT}.memory_budget=1KiB"], "global batch 6|no batch fits"),
    ],
)
def test_faults_are_one_clear_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*FIT, *words) == 2
    assert re.search(message, capsys.readouterr().err)
