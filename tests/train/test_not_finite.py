"""A loss or a weight that is not finite ends the run, is named with its iteration, and is never saved."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small_run import CONFIG, rows_of, train
from safetensors.torch import load_file
from torch import nn

from graphckpt.train.hooks import log
from graphckpt.train.hooks.log import LogHook
from graphckpt.train.loop import Loop, TrainError
from graphckpt.train.output import Report
from graphckpt.train.snapshot.folder import check

pytestmark = pytest.mark.usefixtures("place")

_MODEL = '''
import torch
from transformers import GPT2LMHeadModel


class Model(GPT2LMHeadModel):
    """In its fourth update, the gradient of the last norm is not finite, or the loss; the two are seldom both."""

    at, of_loss, updates = 3, False, 0

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.updates += self.training
        if self.training and self.updates > 2 * self.at and self.updates <= 2 * self.at + 2:
            bias = self.transformer.ln_f.bias
            zero = (bias[0] - bias[0].detach()).abs()
            output.loss = output.loss + (float("nan") if self.of_loss else zero.sqrt())
        return output


class Loses(Model):
    of_loss = True
'''


@pytest.fixture
def broken(place: Path) -> Path:
    (place / "broken.py").write_text(_MODEL, encoding="utf-8")
    (place / "tiny.py").write_text(f"{CONFIG}model._target_ = 'broken.Model'\n", encoding="utf-8")
    return place


def assert_whole(folder: Path, *names: Any) -> None:
    """Only the snapshots of these names are there, and they are finite but for masks."""
    found = sorted(path.name for path in folder.glob("model_*"))
    assert found == sorted(names)
    for name in names:
        weights = load_file(folder / name / "model.safetensors")
        assert weights.pop("mask").isinf().all()
        assert all(weight.isfinite().all() for weight in weights.values())
        check(folder / name)


def test_a_gradient_that_is_not_finite_spoils_no_snapshot(
    broken: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of its iteration is finite, and the only good snapshot would be pruned."""
    words = ["train.checkpointer.period=1", "train.checkpointer.max_to_keep=1", "train.evaluation.enabled=False"]
    assert train(*words, "train.log_period=20") == 2
    error = capsys.readouterr().err
    assert "error: transformer.h.0.ln_1.weight is not finite after iteration 4, although the loss is; no" in error
    assert "fix: --resume from the last one, and find the op by torch.autograd.set_detect_anomaly(True), or" in error
    assert_whole(broken / "out", "model_0000002")
    assert (broken / "out" / "last_checkpoint").read_text() == "model_0000002\n"
    monkeypatch.setattr(sys.modules["broken"].Model, "at", 99)
    assert train("--resume", *words) == 0
    assert_whole(broken / "out", "model_0000008", "model_final")


@pytest.mark.parametrize("is_async", ["True", "False"])
def test_in_the_last_iteration_no_final_model_is_written(
    broken: Path, capsys: pytest.CaptureFixture[str], is_async: str
) -> None:
    words = ["train.train_iter=4", "train.checkpointer.period=2", "train.evaluation.enabled=False"]
    assert train(*words, f"train.checkpointer.async_save={is_async}") == 2
    assert "is not finite after iteration 4" in capsys.readouterr().err
    assert_whole(broken / "out", "model_0000001")
    assert (broken / "out" / "last_checkpoint").read_text() == "model_0000001\n"


def test_the_loss_is_named_with_its_iteration_and_no_snapshot_comes_first(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=broken.Loses", "train.evaluation.enabled=False", "train.log_period=20"]
    for folder, period, done in (("rare", 20, 0), ("often", 3, 1)):
        capsys.readouterr()
        assert train(*words, f"train.output_dir={folder}", f"train.checkpointer.period={period}") == 2
        assert "error: the loss is nan at iteration 4 · fix: lower optim.lr" in capsys.readouterr().err
        assert_whole(broken / folder, *["model_0000002"] * done)
        assert {row["iteration"] for row in rows_of(broken / folder)} == {0}


@pytest.mark.parametrize(("period", "most", "ends_at"), [(4, 1000, 8), (100, 5, 6), (100, 1000, 9)])
@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_the_first_loss_is_named_on_any_device(
    quiet: Report, monkeypatch: pytest.MonkeyPatch, device: str, period: int, most: int, ends_at: int
) -> None:
    """On a device its line is read one period late, and a long period is looked through before its end."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(log, "_MOST_LOSSES", most)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    hook = LogHook(optimizer, device=torch.device(device), log_period=period, batch_size=3, seq_length=5)
    values = [1.0, 1.0, math.inf, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0]
    loop = Loop(lambda done: {"total_loss": torch.tensor(values[done])}, train_iter=9, report=quiet, hooks=[hook])
    with pytest.raises(TrainError, match=r"^the loss is inf at iteration 3 "):
        loop.run()
    assert loop.done == (ends_at if device == "xpu" or period > 4 else 4)
