"""Checkpointing changes no bit of a loss curve, over 80 updates with dropout, accumulation and both kinds of task."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.small_run import CONFIG, run

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


@pytest.mark.slow
@pytest.mark.parametrize("model", [_GPT2, _BERT], ids=["gpt2", "bert"])
def test_loss_curve_is_the_same_in_every_bit(place: Path, model: str) -> None:
    (place / "tiny.py").write_text(CONFIG + _LONG + model, encoding="utf-8")
    policies = (
        ["enabled=false"],
        ["enabled=true", "rule=true"],
        ["enabled=true", 'policies={"*.0": "selective", "*.1": false}'],
    )
    plain, *others = (
        run("out", *(f"train.activation_checkpoint.{word}" for word in words)).losses for words in policies
    )
    assert len(plain) == 80
    assert plain[-1] < plain[0] - 0.5
    assert others == [plain] * 2  # in the last one the third layer is recomputed in full
