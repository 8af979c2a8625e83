"""Checkpointing changes no bit of a loss curve, over 80 updates with dropout, accumulation and both kinds of task."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from graphckpt.config.trainer import trainer_from
from graphckpt.train.loop import HookBase
from graphckpt.train.output import Report

_HEAD = """
from transformers import BertConfig, BertForPreTraining
from graphckpt.config import LazyCall, get_config
from graphckpt.train.tasks import MaskedLM

data = get_config("common/data.py").data
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

data.update(paths="texts", cache_dir="cache", vocab_size=300, seq_length=16, eval_fraction=0.2)
optim.lr = 3e-3
train.update(output_dir="out", train_micro_batch_size=2, num_accumulation_steps=2, device="cpu")
train.update(train_iter=80, log_period=80, warmup_ratio=0.1)
train.evaluation.enabled = False
"""
_GPT2 = """
model = get_config("common/models/gpt2.py").model
model.config.update(n_layer=3, n_head=2, n_embd=16)
"""
_BERT = """
task = LazyCall(MaskedLM)()
model = get_config("common/models/bert.py").model
model.config.update(num_hidden_layers=3, num_attention_heads=2, hidden_size=16, intermediate_size=16)
"""
_POLICIES = {
    "full": ["rule=true"],
    "mixed": ['blocks={"*.0": "selective", "*.1": false}'],  # and the third in full
}


class Curve(HookBase):
    def __init__(self):
        self.losses = []

    def after_step(self, loop):
        self.losses.append({name: loss.item().hex() for name, loss in loop.losses.items()})


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder with texts and two configs, to be in."""
    folder = tmp_path_factory.mktemp("curves")
    generator = random.Random(0)
    (folder / "texts").mkdir()
    for index in range(12):
        lines = [" ".join(generator.choices([f"w{n}" for n in range(30)], k=8)) for _ in range(30)]
        (folder / "texts" / f"{index}.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "gpt2.py").write_text(_HEAD + _GPT2, encoding="utf-8")
    (folder / "bert.py").write_text(_HEAD + _BERT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def plain():
    return {name: _curve(name, "enabled=false") for name in ("gpt2", "bert")}


def _curve(name, *words):
    curve = Curve()
    trainer = trainer_from(
        f"{name}.py", [f"train.activation_checkpoint.{word}" for word in words] + ["train.overwrite=True"]
    )
    trainer.report, trainer._more_hooks = Report(Console(file=io.StringIO())), (curve,)
    trainer.train()
    return curve.losses


@pytest.mark.slow
@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_loss_curve_is_the_same_in_every_bit(plain, name, policy):
    assert len(plain[name]) == 80
    assert _curve(name, "enabled=true", *_POLICIES[policy]) == plain[name]
    first, last = (float.fromhex(plain[name][place]["total_loss"]) for place in (0, -1))
    assert last < first - 0.5
