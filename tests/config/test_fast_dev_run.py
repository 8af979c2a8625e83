"""--fast-dev-run: the settings that it reduces, and those that it leaves unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from graphckpt.config import LazyConfig
from graphckpt.config.files import find_packaged, override
from graphckpt.config.schema import check, read
from graphckpt.config.source import ConfigSource, shrink
from graphckpt.errors import ConfigError
from graphckpt.train.settings import TrainConfig


def _shrunk(train: Any, *words: str) -> tuple[Any, ...]:
    config = OmegaConf.create({"train": train})
    override(config, words)
    settings, faults = read(TrainConfig, OmegaConf.to_container(config), "train")
    assert not faults
    return config.train, shrink(config, settings, words)


@pytest.mark.parametrize("name", ["bert_large_pretrain.py", "gpt2_pretrain.py", "llama_pretrain.py"])
def test_packaged_configs_become_small_and_stay_without_fault(name: str) -> None:
    config = LazyConfig.load(find_packaged(name))
    override(config, ["train.device=cpu"])
    lines = shrink(config, check(config)[0].train, ["train.device=cpu"])
    run, faults = check(config)
    assert not faults
    assert (run.train.sizes.global_batch, run.train.train_iter, run.train.test_micro_batch_size) == (2, 3, 2)
    assert (run.train.evaluation.eval_period, run.train.evaluation.eval_iter, run.train.log_period) == (2, 2, 1)
    assert "  train.train_iter=3  (else 100000)" in lines


@pytest.mark.parametrize(
    ("train", "words", "batch"),
    [
        ({"train_micro_batch_size": 16, "global_batch_size": 64}, [], (2, 2, None)),
        ({"train_micro_batch_size": None, "global_batch_size": 64, "num_accumulation_steps": 8}, [], (2, 2, None)),
        ({"train_micro_batch_size": 1}, [], (1, None, None)),
        ({"train_micro_batch_size": 16}, ["train.train_micro_batch_size=5"], (5, None, None)),
        ({"train_micro_batch_size": 16}, ["train.num_accumulation_steps=6"], (2, 6, None)),
        ({"train_micro_batch_size": 16}, ["train.global_batch_size=32"], (16, None, 32)),
        ({"train_micro_batch_size": 16}, ["train={train_micro_batch_size: 7}"], (7, None, None)),
    ],
)
def test_batch(train: dict[str, Any], words: list[str], batch: tuple[Any, ...]) -> None:
    made, _ = _shrunk(train, *words)
    names = ("train_micro_batch_size", "num_accumulation_steps", "global_batch_size")
    assert tuple(made.get(name) for name in names) == batch


def test_each_change_is_told_and_no_other_key_is_touched() -> None:
    small = {"train_iter": 2, "train_micro_batch_size": 1, "test_micro_batch_size": 1, "log_period": 1}
    small["evaluation"] = {"eval_period": 1, "eval_iter": 1}
    before = OmegaConf.create({"train": small})
    made, lines = _shrunk(small)
    assert (made, lines) == (before.train, [])
    made, lines = _shrunk({"train_epoch": 3, **small, "evaluation": {"eval_iter": 1, "eval_after_n_epoch": 1}})
    assert [line.split()[0] for line in lines[1:]] == [
        "train.evaluation.eval_period=2",
        "train.train_epoch=0",
        "train.evaluation.eval_after_n_epoch=null",
    ]
    assert made.evaluation.eval_period == 2


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda", True), (None, torch.cuda.is_available())])
def test_the_shorter_type_is_left_out_where_it_is_emulated(device: str | None, expected: Any) -> None:
    amp = {"amp": {"enabled": True}, "device": device}
    assert _shrunk(amp)[0].amp.enabled is expected
    assert _shrunk(amp, "train.amp.enabled=True")[0].amp.enabled is True


@pytest.mark.parametrize(
    "train",
    [
        "x",
        None,
        {"train_micro_batch_size": "many", "train_iter": "all", "amp": 3, "evaluation": None},
        {"train_micro_batch_size": None},
        {"train_iter": "${nowhere}", "dist": []},
    ],
)
def test_faults_are_those_of_the_schema(tmp_path: Path, train: dict[str, Any] | str | None) -> None:
    config = OmegaConf.merge(LazyConfig.load(find_packaged("quickstart.yaml")), {"train": None})
    OmegaConf.save(OmegaConf.merge(config, {"train": train}), tmp_path / "config.yaml")
    with pytest.raises(ConfigError) as expected, ConfigSource(tmp_path / "config.yaml").checked():
        pass
    with pytest.raises(ConfigError) as caught:
        ConfigSource(tmp_path / "config.yaml", fast_dev_run=True)
    assert str(caught.value) == str(expected.value)
    assert "train" in str(caught.value)
