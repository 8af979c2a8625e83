"""`graphckpt train --print-config`: the config of a run as YAML, and where each value is set."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import yaml

from graphckpt.cli import main
from graphckpt.config.packaged import get_config

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict, dict[str, str]]:
    """Returns the printed config, and the origin of each last part of a key."""
    assert main(["train", "--print-config", "--config-file", *words]) == 0
    text = capsys.readouterr().out
    origins = dict(re.findall(r"^ *'?([\w.*]+)'?: .* # (.+)$", text, flags=re.MULTILINE))
    return yaml.safe_load(text), origins


def test_each_value_is_that_of_the_run_and_names_its_origin(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = '{"*.h.0": {"activation_checkpointing": false}}'
    words = ["optim.lr=3e-4", f"train.activation_checkpoint.blocks={blocks}"]
    config, origins = printed(capsys, "quickstart.py", "--fast-dev-run", *words)
    assert config["optim"]["lr"] == 3e-4
    assert config["train"]["activation_checkpoint"]["blocks"] == {"*.h.0": {"activation_checkpointing": False}}
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


def test_the_printed_config_of_a_yaml_file_is_a_config(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, _ = printed(capsys, "quickstart.py", "optim.lr=0.5")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    again, origins = printed(capsys, "own.yaml", "train.seed=7")
    config["train"]["seed"] = 7
    assert again == config
    assert (origins["lr"], origins["seed"]) == ("own.yaml", "command line")


def test_faults_are_reported(capsys):
    assert main(["train", "--print-config", "--config-file", "quickstart.py", "train.sead=7"]) == 2
    assert "train.sead" in capsys.readouterr().err


def test_help_names_the_sections_and_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        main(["train", "--help"])
    except SystemExit:
        text = capsys.readouterr().out
    for word in ("data ", "model ", "optim ", "train ", "task ", "docs/reference/config.md", "exit codes"):
        assert word in text


def test_packaged_configs_are_found_from_any_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, "configs/quickstart.py") == printed(capsys, "quickstart.py")
