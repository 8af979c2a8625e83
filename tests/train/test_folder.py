"""The output folder: a run is never replaced unasked, and one that cannot start leaves no trace."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.small_run import Calls, rows_of, same_weights, stopped, train, trainer_of
from omegaconf import OmegaConf
from transformers import GenerationConfig

from graphckpt.cli import main
from graphckpt.config.trainer import trainer_from
from graphckpt.errors import ConfigError
from graphckpt.train.build_model import TrainGraph
from graphckpt.train.loop import Loop
from graphckpt.train.snapshot import folder as snapshot

BRIEF = ["train.train_iter=3", "train.evaluation.enabled=False"]


def content(folder: Path) -> dict[str, Any]:
    """What is in a folder, and when it was written."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def broken_off(done: int) -> None:
    """Ends a run by an error after some iterations."""

    def fail(loop: Loop) -> None:
        if loop.done == done:
            raise OSError("the machine is gone")

    with pytest.raises(OSError, match="the machine is gone"):
        trainer_of("out", hooks=[Calls(after_step=fail)]).train()


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_is_not_replaced_unasked(place: Path, capsys: pytest.CaptureFixture[str], is_finished: bool) -> None:
    assert train(*BRIEF) == 0 if is_finished else stopped("out", 2)
    before = content(place / "out")
    capsys.readouterr()
    for words in ([], ["--fast-dev-run", "train.output_dir=out"], ["optim.lr=0.1"]):
        assert train(*words) == 2
        error = capsys.readouterr().err
        name = "final" if is_finished else "0"
        assert error.startswith(f"error: train.output_dir: out already contains a run: model_{name}")
        assert "fix: --resume to continue it, another train.output_dir, or train.overwrite=True to replace it" in error
        assert len(error.splitlines()) == 1
        assert content(place / "out") == before


def test_a_run_that_has_no_snapshot_yet_is_not_replaced_either(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken_off(2)
    before = content(place / "out")
    assert train() == 2
    error = capsys.readouterr().err
    assert "out already contains a run: metrics.json, log.txt, config.yaml · fix: another train.output_dir, or" in error
    assert error.endswith("train.overwrite=True to replace it (--resume needs a snapshot, and there is none)\n")
    assert content(place / "out") == before


def test_files_that_are_not_of_a_run_do_not_hinder_one_and_stay(place: Path) -> None:
    (place / "out").mkdir()
    (place / "out" / "notes.txt").write_text("mine")
    (place / "out" / ".mine.old").write_text("mine too")
    (place / "out" / ".mine.tmp").write_text("mine too")
    assert train(*BRIEF) == 0
    assert [(place / "out" / name).read_text()[:4] for name in ("notes.txt", ".mine.old", ".mine.tmp")] == ["mine"] * 3


def test_the_same_trainer_does_not_train_over_its_own_run_nor_over_a_snapshot_alone(place: Path) -> None:
    trainer = trainer_from("tiny.py", BRIEF)
    trainer.train()
    before = content(place / "out")
    with pytest.raises(ConfigError, match="out already contains a run"):
        trainer.train()
    assert content(place / "out") == before
    for path in (path for path in list((place / "out").iterdir()) if path.is_file()):
        path.unlink()
    before = content(place / "out")
    with pytest.raises(ConfigError, match="already contains a run: model_final · fix"):
        trainer_from("tiny.py").train()
    assert content(place / "out") == before


def test_overwrite_leaves_the_new_run_alone_and_what_is_not_of_a_run(place: Path) -> None:
    assert train() == 0
    (place / "out" / "notes.txt").write_text("mine")
    (place / "out" / "plan.yaml").write_text("of the old run")
    old = snapshot.read_info(place / "out" / "model_final")["run"]
    assert train(*BRIEF, "train.overwrite=True") == 0
    files = ["config.yaml", "last_checkpoint", "log.txt", "metrics.json", "notes.txt", "run.lock", "step.png"]
    assert sorted(path.name for path in (place / "out").iterdir()) == sorted([*files, "model_final"])
    assert snapshot.read_info(place / "out" / "model_final")["run"] != old
    assert [row["iteration"] for row in rows_of(place / "out")] == [0, 2]
    assert train(*BRIEF, "train.output_dir=fresh") == 0
    assert same_weights(place / "out", place / "fresh")


def test_overwrite_is_not_in_the_saved_config_and_does_not_go_with_resume(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*BRIEF, "train.overwrite=True") == 0
    saved = OmegaConf.load("out/config.yaml")
    assert saved.train.overwrite is False
    assert "import_from" not in saved, "it names no module of the user"
    before = content(place / "out")
    assert main(["train", "--config-file", "out/config.yaml"]) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert train("--resume", "train.overwrite=True") == 2
    error = capsys.readouterr().err
    assert "train.overwrite: True is not supported with --resume · fix: leave one of them out" in error
    assert content(place / "out") == before


@pytest.mark.parametrize(
    ("more", "num_good"),
    [([], 0), (["train.overwrite=True"], 0), (["--resume", "train.train_iter=7"], 1)],
    ids=["new", "overwrite", "resume"],
)
def test_a_run_that_cannot_start_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], num_good: int
) -> None:
    def content_of_runs() -> dict[str, Any]:
        is_lock = "--resume" not in more and Path("out/run.lock")  # it notes its last holder
        found = content(place).items()
        return {path: what[1] for path, what in found if path.parts[0] != "cache" and path != is_lock}

    def without_memory(self: Any, **batch: Any) -> None:
        raise MemoryError("no room")

    if more:
        stopped("out", 2)
    before = content_of_runs()
    for words in (
        ["model.config.n_embd=33"],
        ["optim.betas=[2, 3]"],
        ["data.seq_length=100000"],
        ["train.activation_checkpoint.enabled=True", "train.activation_checkpoint.select=Nothing"],
        [],  # fails in the first step
        *[["model.config.n_embd=32"]] * num_good,  # the snapshot is of another model
    ):
        with monkeypatch.context() as patch:
            if not words:
                patch.setattr(TrainGraph, "build", without_memory)
            assert train(*words, *more) == 2
        assert content_of_runs() == before, words
    assert train("train.load_weight=nowhere", *more) == (0 if num_good else 2)  # which a resume does not read
    assert (content_of_runs() == before) is not bool(num_good)


def test_a_resume_that_finds_nothing_makes_no_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--resume", "train.output_dir=some/where") == 2
    assert "some/where holds no last_checkpoint" in capsys.readouterr().err
    assert not (place / "some").exists()
    (place / "some").mkdir()
    assert train("--resume", "train.output_dir=some") == 2
    assert list((place / "some").iterdir()) == []


def test_evaluation_alone_makes_no_folder_and_begins_no_log(place: Path) -> None:
    assert train(*BRIEF) == 0
    assert train("--eval-only", "train.load_weight=out/model_final", "train.output_dir=other") == 0
    assert not (place / "other").exists()


def test_fast_dev_run_writes_to_a_temporary_folder_and_says_which(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*BRIEF) == 0
    before = content(place / "out")
    (place / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))
    capsys.readouterr()
    assert train("--fast-dev-run") == 0
    assert content(place / "out") == before
    (made,) = (place / "temporary").iterdir()
    assert f"--fast-dev-run writes to {made}, which stays until you remove it" in capsys.readouterr().out
    assert {"model_final", "metrics.json", "log.txt"} <= {path.name for path in made.iterdir()}
    assert OmegaConf.load(made / "config.yaml").train.output_dir == str(made)
    assert train("--fast-dev-run", "--resume") == 2
    assert re.search(r"nothing to --resume · fix: leave one of them out", capsys.readouterr().err)
    assert len(list((place / "temporary").iterdir())) == 1


def test_the_old_run_is_there_until_an_iteration_of_the_new_one_is_done(place: Path) -> None:
    stopped("out", 2)
    before = content(place / "out")

    seen = []

    def look(loop: Loop) -> None:
        if loop.done == 0:
            seen.append(content(place / "out"))

    trainer_of("out", "train.overwrite=True", *BRIEF, hooks=[Calls(before_step=look)]).train()
    for found in (*seen, before):
        found.pop(Path("run.lock"))
    assert seen == [before]
    assert not (place / "out" / "model_0000001").exists()


def test_a_config_that_cannot_be_saved_is_an_error_before_the_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("model.config.output_attentions=True") == 2  # which Transformers saves in no generation config
    assert "error: model: saving its config failed, " in capsys.readouterr().err
    assert not (place / "out").exists()


def test_a_snapshot_whose_companions_cannot_be_written_does_not_end_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, calls = GenerationConfig.save_pretrained, iter(range(100))

    def refuse_later(self: Any, folder: Path) -> None:
        if next(calls) == 1:
            raise ValueError("a generation config that means nothing")
        save(self, folder)

    monkeypatch.setattr(GenerationConfig, "save_pretrained", refuse_later)
    assert train("train.evaluation.enabled=False") == 0
    out = capsys.readouterr().out
    assert "a generation config that means nothing · no snapshot was saved; training continues" in out
    assert "saved model_final" in out
