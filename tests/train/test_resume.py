"""Stopping, resuming, evaluating alone, starting from weights: whole runs of the command line."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.small_run import CONFIG, TIMES, rows_of, same_weights, stopped, train, trainer_of
from transformers import AutoModelForCausalLM

from graphckpt.train.hooks.metrics import tag_of
from graphckpt.train.hooks.snapshot import BestHook
from graphckpt.train.loop import Loop
from graphckpt.train.snapshot import folder as snapshot

pytestmark = pytest.mark.usefixtures("place")


def test_a_finished_run_has_the_files_of_libai_and_is_evaluated_and_resumed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    out = place / "out"
    files = ["config.yaml", "last_checkpoint", "log.txt", "metrics.json", "run.lock", "step.png"]
    folders = ["model_0000003", "model_0000007", "model_best", "model_final"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*files, *folders])
    assert (out / "last_checkpoint").read_text() == "model_final\n"
    info = snapshot.check(out / "model_0000007")
    assert (info["iteration"], info["done"], info["consumed_samples"]) == (7, 8, 32)
    best = min((row for row in rows_of(out) if "eval_ppl" in row), key=lambda row: row["eval_ppl"])
    info = snapshot.read_info(out / "model_best")
    assert (info["iteration"], info["metrics"]["eval_ppl"]) == (best["iteration"], best["eval_ppl"])
    assert "saved model_0000003 in " in capsys.readouterr().out

    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file() and path.name != "log.txt"}
    AutoModelForCausalLM.from_pretrained(out / "model_final").save_pretrained(place / "theirs")
    last = rows_of(out)[-1]
    told = f": held-out loss {last['eval_loss']:.4f}  ppl {last['eval_ppl']:.4f}"
    for words in ([], ["--resume"], ["train.load_weight=out/model_final"]):
        assert train("--eval-only", *words) == 0
        assert f"model_final{told}" in capsys.readouterr().out
    assert train("--eval-only", "train.load_weight=theirs", "train.output_dir=again") == 0
    assert f"theirs{told}" in capsys.readouterr().out
    assert (out / "log.txt").read_text().count("model_final: held-out loss") == 3
    after = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file() and path.name != "log.txt"}
    assert after == before
    assert train("train.load_weight=theirs", "train.output_dir=again", "train.train_iter=1", "optim.lr=0.0") == 0
    assert same_weights(out, place / "again")

    capsys.readouterr()
    assert train("--resume") == 0
    assert "already finished · fix: raise train.train_iter" in capsys.readouterr().out
    assert (out / "metrics.json").read_bytes() == before[out / "metrics.json"]
    assert train("--resume", "train.train_iter=12") == 0
    assert [row["iteration"] for row in rows_of(out)][-3:] == [8, 9, 11]
    assert snapshot.check(out / "model_final")["done"] == 12


@pytest.mark.parametrize(
    ("optimizer", "number"), [("torch.optim.AdamW", signal.SIGINT), ("torch.optim.NAdam", signal.SIGTERM)]
)
def test_stopped_and_resumed_it_ends_at_the_same_bits(place: Path, optimizer: str, number: signal.Signals) -> None:
    """With dropout, accumulation, a schedule, evaluation, and a stop between two lines of the log."""
    words = [f"optim._target_={optimizer}", "train.amp.enabled=True"]
    if optimizer.endswith("NAdam"):
        (place / "tiny.py").write_text(CONFIG + "del optim['eps']\n", encoding="utf-8")
    assert train("train.output_dir=whole", *words) == 0
    for done, is_resumed in ((2, False), (5, True)):
        outcome = stopped("parts", done, *words, number=number, resume=is_resumed)
        assert (outcome.iterations, outcome.is_stopped) == (done, True)
    assert (place / "parts" / "last_checkpoint").read_text() == "model_0000004\n"
    assert "stopped after 5 iterations" in (place / "parts" / "log.txt").read_text()
    outcome = trainer_of("parts", *words, resume=True).train()
    assert (outcome.iterations, outcome.is_stopped) == (10, False)
    assert same_weights(place / "whole", place / "parts")
    assert rows_of(place / "parts") == rows_of(place / "whole")
    log = (place / "parts" / "log.txt").read_text()
    assert log.count("iteration: 9/10  consumed_samples: 36") == 1
    assert "resumed from parts/model_0000004, after iteration: 5/10" in log


def test_another_batch_size_goes_on_with_the_samples_that_come_next(place: Path) -> None:
    stopped("out", 3)
    assert train("--resume", "train.num_accumulation_steps=4", "train.train_iter=6") == 0
    assert [row["consumed_samples"] for row in rows_of(place / "out") if "lr" in row] == [4, 12, 36]


def test_a_snapshot_of_another_model_is_one_clear_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped("out", 5)
    assert train("--resume", "model.config.n_embd=32") == 2
    error = capsys.readouterr().err
    assert "out/model_0000004: is of another model: transformer.wte.weight is (300, 16), not (300, 32)" in error
    assert "more · fix: describe the model" in error
    assert train("--resume", "optim.params.weight_decay_bias=0.1") == 2
    error = capsys.readouterr().err
    assert "out/model_0000004/graph.pt: System-Train-Optimizer-0.param_groups: expected groups of [10, 5, 13]" in error
    assert "fix: resume with the config that it was written with, or start from its weights" in error
    assert train("--resume") == 0


def test_a_changed_data_set_and_number_of_threads_are_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped("out", 3)
    assert train("--resume", "train.train_iter=4") == 0
    assert "changed since" not in capsys.readouterr().out
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    (place / "texts" / "more.txt").write_text("w1 w2 w3 " * 500, encoding="utf-8")
    assert train("--resume", "train.train_iter=5") == 0
    printed = capsys.readouterr().out
    assert "the data changed since" in printed
    assert "-> 77; sums may be rounded differently" in printed


def test_a_metric_that_is_not_measured_is_told_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("train.evaluation.eval_metric=acc") == 0
    printed = capsys.readouterr().out
    assert printed.count("train.evaluation.eval_metric: 'acc' was not measured") == 1
    assert "fix: use one of eval_loss, eval_ppl" in printed
    assert not (place / "out" / "model_best").exists()


def test_best_is_by_the_mode() -> None:
    saved = []
    loop = types.SimpleNamespace(metrics={})
    first, resumed = (
        BestHook(lambda name, loop, **_: saved.append(loop.metrics["acc"]), metric="acc", mode="max") for _ in range(2)
    )
    for hook, value in ((first, 0.5), (first, 0.4), (first, float("nan")), (first, 0.6), (resumed, 0.55)):
        if hook is resumed:
            hook.load_state_dict(first.state_dict())
        loop.metrics = {"acc": value}
        hook.after_step(loop)
    assert saved == [0.5, 0.6]


@pytest.mark.parametrize(("fails_late", "expected"), [(True, [0.6, 0.7, 0.65]), (False, [0.6, 0.55, 0.7, 0.65])])
def test_a_metric_whose_snapshot_could_not_be_written_is_not_the_best(fails_late: bool, expected: list[float]) -> None:
    """A failure may show only when the next snapshot is about to be written."""
    saved: list[float] = []
    failed: list[Callable[[], None]] = []

    def save(name: str, loop: Loop, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        while failed:
            failed.pop()()
        saved.append(loop.metrics["acc"])
        if saved[-1] > 0.55:
            failed.append(otherwise)
            if not fails_late:
                failed.pop()()
        else:
            then()

    hook = BestHook(save, metric="acc", mode="max")
    for value in (0.6, 0.55, 0.7):
        hook.after_step(types.SimpleNamespace(metrics={"acc": value}))
    for otherwise in failed:
        otherwise()
    failed.clear()
    hook.after_step(types.SimpleNamespace(metrics={"acc": 0.65}))
    assert saved == expected


def test_tensorboard_gets_every_metric(place: Path, pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    written, pictures = [], {}

    class SummaryWriter:
        def __init__(self, folder: Path, purge_step: int | None) -> None:
            written.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def add_image(self, name: str, picture: np.ndarray, step: int, dataformats: str) -> None:
            pictures[name] = picture.shape, step, dataformats

        def close(self) -> None:
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert train("train.tensorboard=True", "train.activation_checkpoint.enabled=True") == 0
    assert written[0] == ("out", 0)
    assert written[-1] == "closed"
    last = max(step for _, _, step in written[1:-1])
    expected = {
        (tag_of(name), value, row["iteration"])
        for row in rows_of(place / "out")
        for name, value in row.items()
        if name != "iteration"
    }
    found = {row for row in written[1:-1] if row[0] not in map(tag_of, TIMES)}
    kept = {name: value for name, value, step in found - expected if step == last}
    assert expected - found == set()
    assert kept.keys() == {"memory/kept_bytes", "memory/kept_bytes_plain"}
    assert kept["memory/kept_bytes"] < kept["memory/kept_bytes_plain"]
    assert {name for name, *_ in found} >= {"train/total_loss", "train/lr", "eval/ppl"}
    assert pictures == {"memory/step": ((*pictures["memory/step"][0][:2], 4), last, "HWC")}


def test_wandb_gets_every_metric_and_goes_on_with_the_same_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, logged = [], []
    run = types.SimpleNamespace(finish=lambda: begun.append("end"))
    run.log = lambda values, step: logged.append((step, values))
    module = types.ModuleType("wandb")
    module.init = lambda **settings: begun.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    words = ["train.wandb.enabled=True", "train.wandb.project=tests", "train.wandb.mode=offline"]
    assert train(*words, "train.train_iter=4") == 0
    assert train(*words, "--resume") == 0
    first, _, second, _ = begun
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["mode"], first["resume"]) == ("tests", "out", "offline", None)
    assert second["resume"] == "allow"
    rows = {row["iteration"]: row for row in rows_of(place / "out")}
    assert {step for step, _ in logged} == set(rows)
    sent = [
        (step, name, value) for step, found in logged for name, value in found.items() if name not in map(tag_of, TIMES)
    ]
    assert all({tag_of(key): number for key, number in rows[step].items()}[name] == value for step, name, value in sent)


def test_epochs_between_snapshots_and_evaluations(place: Path) -> None:
    assert train("train.train_iter=1", "train.evaluation.enabled=False") == 0
    num_samples = snapshot.read_info(place / "out" / "model_final")["data"]["num_samples"]
    batch = [f"train.train_micro_batch_size={num_samples // 2 - 1}", "train.num_accumulation_steps=1"]
    words = ["train.checkpointer.save_model_after_n_epoch=1", "train.checkpointer.max_to_keep=9"]
    assert train(*batch, *words, "train.evaluation.eval_after_n_epoch=2", "train.output_dir=epochs") == 0
    names = [path.name for path in sorted((place / "epochs").glob("model_0*"))]
    assert names == [f"model_000000{n}" for n in (1, 3, 5, 7)]
    evaluated = [row["iteration"] for row in rows_of(place / "epochs") if "eval_ppl" in row]
    assert evaluated == [3, 7, 9]  # libai counts whole updates in an epoch: 2, although a few samples are left over
