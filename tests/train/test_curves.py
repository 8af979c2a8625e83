"""Checkpointing changes no bit of a loss curve, over 80 updates with dropout, accumulation and both kinds of task."""

from __future__ import annotations

import io

import pytest
from helpers.small_run import CONFIG
from rich.console import Console

from graphckpt.config.trainer import trainer_from
from graphckpt.train.loop import HookBase
from graphckpt.train.output import Report

_LONG = """
optim.lr = 3e-3
train.update(train_iter=80, log_period=80, warmup_ratio=0.1, overwrite=True)
train.evaluation.enabled = False
"""
_GPT2 = "model.config.n_layer = 3"
_BERT = """
from graphckpt.config import LazyCall
from graphckpt.train.tasks import MaskedLM

task = LazyCall(MaskedLM)()
model = get_config("common/models/bert.py").model
model.config.update(num_hidden_layers=3, num_attention_heads=2, hidden_size=16, intermediate_size=16)
"""


class Curve(HookBase):
    def __init__(self):
        self.losses = []

    def after_step(self, loop):
        self.losses.append({name: loss.item().hex() for name, loss in loop.losses.items()})


def _curve(*words):
    curve = Curve()
    trainer = trainer_from("tiny.py", [f"train.activation_checkpoint.{word}" for word in words])
    trainer.report, trainer._more_hooks = Report(Console(file=io.StringIO())), (curve,)
    trainer.train()
    return curve.losses


@pytest.mark.slow
@pytest.mark.parametrize("model", [_GPT2, _BERT], ids=["gpt2", "bert"])
def test_loss_curve_is_the_same_in_every_bit(place, model):
    (place / "tiny.py").write_text(CONFIG + _LONG + model, encoding="utf-8")
    plain = _curve("enabled=false")
    assert len(plain) == 80
    first, last = (float.fromhex(plain[number]["total_loss"]) for number in (0, -1))
    assert last < first - 0.5
    assert _curve("enabled=true", "rule=true") == plain
    assert _curve("enabled=true", 'blocks={"*.0": "selective", "*.1": false}') == plain  # and the third in full
