"""Weights to start from, in one file and in shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from graphckpt.train.snapshot.schema import SnapshotError
from graphckpt.train.snapshot.weights import INDEX, load_weights, read_weights


def _model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=3, n_head=2))


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[GPT2LMHeadModel, Path]:
    """A model, and the folder that Transformers saved it to, in shards."""
    model = _model()
    folder = tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) >= 3
    return model, folder


def test_shards_are_read_as_one_and_one_file_wins_over_them(sharded: tuple[GPT2LMHeadModel, Path]) -> None:
    model, folder = sharded
    other = _model()
    load_weights(other, read_weights(folder), "x")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    save_file({"alone": torch.ones(1)}, folder / "model.safetensors")
    assert list(read_weights(folder)) == ["alone"]


def test_every_missing_shard_is_named_at_once(sharded: tuple[GPT2LMHeadModel, Path]) -> None:
    _, folder = sharded
    first, second, *_ = sorted(folder.glob("model-*-of-*.safetensors"))
    first.unlink()
    second.unlink()
    with pytest.raises(SnapshotError) as caught:
        read_weights(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / INDEX} names shards that cannot be read:")
    assert f"• {first.name} is missing" in message
    assert f"• {second.name} is missing" in message
    assert message.endswith("fix: copy or download the missing shards")


def test_a_broken_shard_and_one_of_another_version_are_named(sharded: tuple[GPT2LMHeadModel, Path]) -> None:
    _, folder = sharded
    shard = min(folder.glob("model-*-of-*.safetensors"))
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(SnapshotError, match=rf"{shard.name}: lacks .*, which {INDEX} places there · fix: copy or"):
        read_weights(folder)
    shard.write_bytes(b"\x00" * 5)
    with pytest.raises(SnapshotError, match=rf"{shard.name}: cannot be read \(.*\) · fix: copy or download it again"):
        read_weights(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"index\.json: cannot be read \(Expecting property name"),
        ("[]", r"index\.json: has no weight_map from tensors to shards · fix"),
        ('{"weight_map": {}}', r"index\.json: has no weight_map"),
        ('{"weight_map": {"w": 3}}', r"index\.json: has no weight_map"),
        (
            json.dumps({"weight_map": {"w": "../model.safetensors"}}),
            r"expected the name of a file in this folder, got '\.\./model\.safetensors'",
        ),
    ],
)
def test_faults_of_an_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(SnapshotError, match=message):
        read_weights(tmp_path)


def test_a_folder_without_such_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    message = r"has no model\.safetensors and no .*, but pytorch_model\.bin · fix: name a snapshot"
    with pytest.raises(SnapshotError, match=message):
        read_weights(tmp_path)
    with pytest.raises(SnapshotError, match=r"pytorch_model\.bin: is a file · fix: name the folder"):
        read_weights(tmp_path / "pytorch_model.bin")
    with pytest.raises(SnapshotError, match="nowhere: no such folder"):
        read_weights(tmp_path / "nowhere")


def test_weights_of_another_kind_are_refused() -> None:
    weights = {name: value.to(torch.int64) for name, value in nn.Linear(2, 2).state_dict().items()}
    with pytest.raises(SnapshotError, match=r"here: is of another model: weight is torch\.int64, not torch\.float32"):
        load_weights(nn.Linear(2, 2), weights, "here")
