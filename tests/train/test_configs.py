"""The packaged configs of other models and tasks train, shrunk, and so does the one in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.small_run import rows_of
from omegaconf import DictConfig, OmegaConf

from graphckpt.cli import main
from graphckpt.config import LazyConfig

_DATA = ["data.vocab_size=400", "data.seq_length=32", "data.max_bytes=300000", "data.cache_dir=cache"]
_RUN = [
    *("train.device=cpu", "train.output_dir=out", "train.train_iter=3", "train.train_micro_batch_size=2"),
    *("train.test_micro_batch_size=2", "train.amp.enabled=False", "train.activation_checkpoint.enabled=True"),
]
_BERT = [f"model.config.{word}" for word in ("num_hidden_layers=2", "hidden_size=32", "num_attention_heads=2")]


@pytest.mark.parametrize(
    ("name", "small", "metrics"),
    [
        ("bert_large_pretrain.py", _BERT, {"lm_loss", "nsp_loss", "eval_loss", "eval_ppl", "eval_nsp_acc"}),
        ("text_classification.py", _BERT, {"cls_loss", "eval_loss", "eval_acc"}),
        ("gpt2_pretrain.py", ["model.config.n_layer=2", "model.config.n_embd=24"], {"lm_loss", "eval_ppl"}),
        ("llama_pretrain.py", [*_BERT, "model.config.num_key_value_heads=2"], {"lm_loss", "eval_ppl"}),
        ("quickstart.yaml", [], {"lm_loss", "eval_ppl"}),
    ],
)
def test_a_packaged_config_trains_evaluates_and_recomputes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, small: list[str], metrics: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--config-file", f"configs/{name}", "--fast-dev-run", *_DATA, *_RUN, *small]
    assert main(words) == 0
    rows = rows_of(tmp_path / "out")
    assert metrics | {"total_loss"} <= {key for row in rows for key in row}
    assert [row["total_loss"] for row in rows if "nsp_loss" in row] == pytest.approx(
        [row["lm_loss"] + row["nsp_loss"] for row in rows if "nsp_loss" in row]
    )
    log = (tmp_path / "out" / "log.txt").read_text()
    assert " full " in log or "selective" in log
    assert "kept for backward" in log


def _own(kinds: dict[str, str]) -> DictConfig:
    parts = {"train": {"output_dir": "out", "device": "cpu"}, "optim": {"_target_": "torch.optim.SGD"}}
    return OmegaConf.create(parts | {name: {"_target_": kind} for name, kind in kinds.items()})


@pytest.mark.parametrize(
    ("kinds", "messages"),
    [
        (
            {"data": "builtins.list", "task": "builtins.dict", "model": "torch.nn.Identity"},
            [
                "data: expected an object with a method open, got list · fix: wrap",
                "task: expected a Task, got dict · fix: call",
            ],
        ),
        (
            {"data": "graphckpt.train.data.TextData", "model": "builtins.list"},
            ["model: expected an nn.Module, got list · fix: call a class of modules"],
        ),
    ],
)
def test_parts_of_the_wrong_kind_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kinds: dict[str, Any],
    messages: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    LazyConfig.save(_own(kinds), "wrong.yaml")
    assert main(["train", "--config-file", "wrong.yaml"]) == 2
    error = capsys.readouterr().err
    for message in messages:
        assert message in error
