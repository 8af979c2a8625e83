"""A version reads what the one before it wrote: ``run_of_format_2.zip`` is a run that commit 4aae11a stopped."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from helpers.small_run import equal, rows_of, writer_of
from safetensors.torch import load_file

from graphckpt.config.trainer import trainer_from
from graphckpt.train.loop import HookBase
from graphckpt.train.snapshot import folder as snapshot

WORDS = ["model.config.n_layer=1", "model.config.n_embd=8", "data.vocab_size=270"]
AMP = ["train.amp.enabled=True", "train.amp.dtype=float16"]


class Look(HookBase):
    """Notes the whole state as it was read."""

    def before_train(self, loop):
        state = writer_of(loop)._state
        self.weights = {name: value.clone() for name, value in state.weights().items()}
        self.states = state.states({})
        self.states["trainer"]["hooks"] = loop.hook_states()
        torch.save(self.states, "read.pt")
        self.states = torch.load("read.pt", weights_only=True)


def test_every_bit_of_a_snapshot_of_the_version_before_is_read(place):
    with zipfile.ZipFile(Path(__file__).with_name("run_of_format_2.zip")) as archive:
        archive.extractall(place)
    old = place / "out" / "model_0000003"
    written = {name: snapshot.read_state(old, name) for name in ("graph", "trainer")}
    trainer = trainer_from("tiny.py", [*WORDS, *AMP, "train.train_iter=10"], resume=True)
    trainer._more_hooks = (look := Look(),)
    assert trainer.train().iterations == 10
    assert equal(look.weights, load_file(old / "model.safetensors"))
    assert equal(look.states["graph"], written["graph"])
    for name in ("random", "buffers", "extra", "hooks"):
        assert equal(look.states["trainer"][name], written["trainer"][name])
    assert [row["iteration"] for row in rows_of(place / "out")] == [0, 2, 5, 8, 9]
    assert snapshot.check(place / "out" / "model_final")["run"] == snapshot.read_info(old)["run"]
