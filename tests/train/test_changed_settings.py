"""A resumed run with other settings: they take effect, or one error says why they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_run import CONFIG, rows_of, same_weights, stopped, train

from graphckpt.config.trainer import trainer_from
from graphckpt.train.loop import Loop
from graphckpt.train.snapshot.run_state import RunState

_STEPS = """
from torch.optim.lr_scheduler import StepLR


def halves(optimizer, *, max_iter, warmup_iter, step_size=2):
    return StepLR(optimizer, step_size, gamma=0.5)
"""


def rates(folder: Path) -> dict[str, Any]:
    return {row["iteration"]: row["lr"] for row in rows_of(folder) if "lr" in row}


def resumed_by_hand(folder: Path, lr: float, groups: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumes with the former config, and sets the new values on the optimizer itself before the first iteration."""
    trainer = trainer_from("tiny.py", [f"train.output_dir={folder}", "train.log_period=1"], resume=True)
    restore = trainer.saved.restore

    def restore_and_set(state: RunState, loop: Loop, **how: Any) -> None:
        restore(state, loop, **how)
        (scheduler,) = state.graph._update.schedulers
        for group in state.optimizer.param_groups:
            share = group["lr"] / group["initial_lr"]
            group.update({key: value for key, value in groups.items() if key != "weight_decay" or group[key]})
            group.update(initial_lr=lr, lr=lr * share)
        scheduler.base_lrs = [lr] * len(scheduler.base_lrs)

    monkeypatch.setattr(trainer.saved, "restore", restore_and_set)
    trainer.train()


def test_another_learning_rate_decay_and_betas_take_effect(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is that of the new schedule at this iteration; the states are those of the snapshot."""
    for folder in ("ours", "by_hand", "unchanged"):
        stopped(folder, 5)
    words = ["optim.lr=0.02", "optim.weight_decay=0.3", "optim.betas=[0.8, 0.9]", "train.log_period=1"]
    capsys.readouterr()
    assert train("--resume", "train.output_dir=ours", *words, "optim.params.clip_grad_max_norm=0.5") == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "changed since" in text]
    assert line == (
        "optim, train.scheduler: clip_grad_max_norm, lr, betas, weight_decay, schedule changed since, "
        "which takes effect now"
    )
    new = {"weight_decay": 0.3, "betas": (0.8, 0.9), "clip_grad_max_norm": 0.5}
    resumed_by_hand("by_hand", 0.02, new, monkeypatch)
    assert train("--resume", "train.output_dir=unchanged") == 0
    assert rates(place / "ours") == pytest.approx(rates(place / "by_hand"))
    assert rates(place / "ours")[9] == pytest.approx(4 * rates(place / "unchanged")[9])
    assert same_weights(place / "ours", place / "by_hand")
    assert not same_weights(place / "ours", place / "unchanged")
    state = torch.load("ours/model_final/graph.pt", weights_only=True)["System-Train-Optimizer-0"]
    assert {group["clip_grad_max_norm"] for group in state["param_groups"]} == {0.5}
    assert "lr: 0.02" in (place / "ours" / "config.yaml").read_text()


def test_another_schedule_takes_effect_where_it_would_be_at_this_iteration(place: Path) -> None:
    (place / "schedules.py").write_text(_STEPS, encoding="utf-8")
    (place / "tiny.py").write_text(f"{CONFIG}del train.scheduler['warmup_factor'], train.scheduler['alpha']\n")
    words = ["train.scheduler._target_=schedules.halves", "train.log_period=1"]
    stopped("out", 5, *words, "train.scheduler.step_size=100")
    assert train("--resume", *words, "train.scheduler.step_size=2") == 0
    of_the_next = {n: 5e-3 * (1 if n < 5 else 0.5 ** ((n + 1) // 2)) for n in range(10)}
    assert rates(place / "out") == of_the_next
    assert train("--resume", *words, "train.scheduler.step_size=2", "train.train_iter=12") == 0
    assert rates(place / "out")[11] == 5e-3 * 0.5**6


@pytest.mark.parametrize(
    ("optimizer", "gone", "faults"),
    [
        (
            "AdamW",
            (),
            {
                "train.seed=7": "train.seed: expected 1234, got 7; in another order, some samples would be repeated",
                "optim.amsgrad=True": "optim.amsgrad: expected False, with which the optimizer's states were made, got",
                "optim._target_=torch.optim.Adamax": "optim: expected torch.optim.adamw.AdamW, whose states the "
                "snapshot has, got torch.optim.adamax.Adamax",
            },
        ),
        (
            "RMSprop",
            ("betas",),
            {"optim.momentum=0.9 optim.centered=True train.seed=7": "• optim.momentum: expected 0, with"},
        ),
        ("Rprop", ("betas", "eps", "weight_decay", "params"), {"optim.lr=0.1": "optim.lr: expected"}),
    ],
)
def test_settings_that_would_not_fit_the_states_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], optimizer: str, gone: tuple[str, ...], faults: dict[str, str]
) -> None:
    (place / "tiny.py").write_text(CONFIG + "".join(f"del optim[{key!r}]\n" for key in gone), encoding="utf-8")
    before = f"optim._target_=torch.optim.{optimizer}"
    stopped("out", 4, before)
    config = (place / "out" / "config.yaml").read_text()
    for words, message in faults.items():
        capsys.readouterr()
        assert train("--resume", before, *words.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: out/model_0000003: ")
        assert message in error
        fix = "fix: resume with the former value, or start a run from the weights: train.load_weight=out/model_0"
        assert fix in error
        assert (place / "out" / "config.yaml").read_text() == config
    assert train("--resume", before) == 0


def test_settings_of_the_device_are_those_of_the_run(place: Path) -> None:
    """A run that was fused goes on where its optimizer cannot be, and the other way round."""
    stopped("out", 5, "optim.fused=True", "train.log_period=1")
    stopped("plain", 5, "optim.foreach=False", "train.log_period=1")
    assert train("--resume", "optim.foreach=True") == 0
    assert train("--resume", "train.output_dir=plain", "optim.fused=True") == 0
    for folder, expected in (("out", (None, True)), ("plain", (True, None))):
        state = torch.load(place / folder / "model_final" / "graph.pt", weights_only=True)
        groups = state["System-Train-Optimizer-0"]["param_groups"]
        assert {(group["fused"], group["foreach"]) for group in groups} == {expected}
