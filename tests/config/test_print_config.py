"""`graphckpt train --print-config`: the config of a run as YAML, and where each value is set."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphckpt.cli import main
from graphckpt.config import get_config
from graphckpt.train.settings import TrainConfig


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, ...]:
    """Returns the printed config, and the origin of each last part of a key."""
    assert main(["train", "--print-config", "--config-file", *words]) == 0
    text = capsys.readouterr().out
    origins = dict(re.findall(r"^ *'?([\w.*]+)'?: .* # ([^,\n]+)", text, flags=re.MULTILINE))
    return yaml.safe_load(text), origins


def test_each_value_is_that_of_the_run_and_names_its_origin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = '{"*.h.0": {"activation_checkpointing": false}}'
    words = ["optim.lr=3e-4", f"train.activation_checkpoint.policies={blocks}"]
    config, origins = printed(capsys, "quickstart.py", "--fast-dev-run", *words)
    assert config["optim"]["lr"] == 3e-4
    assert config["train"]["activation_checkpoint"]["policies"] == {"*.h.0": {"activation_checkpointing": False}}
    assert config["train"]["seed"] == get_config("quickstart.py").train.seed
    assert config["model"]["config"]["vocab_size"] == "${data.vocab_size}"
    expected = {
        "lr": "command line",
        "activation_checkpointing": "command line",
        "train_iter": "--fast-dev-run",
        "n_layer": "configs/quickstart.py",
        "weight_decay": "configs/quickstart.py",
        "eps": "configs/common/optim.py",
        "seed": "configs/common/train.py",
        "resid_pdrop": "configs/common/models/gpt2.py",
    }
    assert {key: origins[key] for key in expected} == expected
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_the_printed_config_of_a_yaml_file_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, _ = printed(capsys, "quickstart.py", "optim.lr=0.5")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    again, origins = printed(capsys, "own.yaml", "train.seed=7")
    config["train"]["seed"] = 7
    assert again == config
    assert (origins["lr"], origins["seed"]) == ("own.yaml", "command line")


def test_every_key_is_printed_with_its_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of an own config too, which sets few of them; an argument of a call that is not set is a comment."""
    calls = {
        "model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2},
        "optim": {"_target_": "torch.optim.SGD", "lr": 0.5},
        "data": {"_target_": "graphckpt.train.data.TextData", "seq_length": 8},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"train": {"seed": 7}, **calls}))
    assert main(["train", "--print-config", "--config-file", "own.yaml"]) == 0
    text = capsys.readouterr().out
    comments = {line.partition(": ")[0]: line.rpartition("  # ")[2] for line in text.splitlines()}
    assert comments["  seed"] == "own.yaml, default 1234"
    assert comments["  seq_length"] == "own.yaml, default 256"
    assert {comments[key] for key in ("    eval_period", "  # momentum", "  # bias", "  # paths")} == {"default"}
    (tmp_path / "again.yaml").write_text(text)
    config = yaml.safe_load(text)
    train, described = config["train"], config["train"].pop("scheduler")
    assert described == {"_target_": "graphckpt.train.optim.warmup_cosine_lr"}
    sections = asdict(TrainConfig(seed=7))
    del sections["scheduler"]
    assert train == sections
    assert (config["task"], {name: config[name] for name in calls}) == (
        {"_target_": "graphckpt.train.tasks.causal_lm.CausalLM"},
        calls,
    )
    assert printed(capsys, "again.yaml")[0] == yaml.safe_load(text)


def test_packaged_configs_are_found_from_any_folder_and_faults_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "configs/quickstart.py") == printed(capsys, "quickstart.py")
    assert main(["train", "--print-config", "--config-file", "quickstart.py", "train.sead=7"]) == 2
    assert "train.sead" in capsys.readouterr().err


def test_help_names_the_sections_and_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for word in ("data ", "model ", "optim ", "train ", "task ", "Config keys", "exit codes"):
        assert word in text
