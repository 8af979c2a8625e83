"""The generated parts of the reference list every config key and every option of the command line."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import load_script
from omegaconf import DictConfig

import graphckpt
from graphckpt import blocks, graph, planning, train
from graphckpt.cli import main
from graphckpt.config import LazyConfig
from graphckpt.config.schema import RunConfig
from graphckpt.train import tasks
from graphckpt.train.data import TextData
from graphckpt.train.own_data import OwnData
from graphckpt.train.settings import TrainConfig

SECOND_NAMES = {"fit"}
"""Of names that the reference has under their first one."""
ROOT = Path(__file__).parent.parent.parent
REFERENCE = load_script("reference")


def page(name: str) -> str:
    return str(REFERENCE.fill_in((ROOT / "docs/reference" / name).read_text(encoding="utf-8")))


def keys_of(kind: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default_factory):
            yield from keys_of(field.default_factory, f"{prefix}.{field.name}")
        else:
            yield f"{prefix}.{field.name}"


def set_keys(config: Any, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, DictConfig) and not path.startswith("model"):
            yield from set_keys(value, f"{path}.")
        elif key not in {"_target_", "_args_"}:
            yield path


def test_the_page_of_config_keys_describes_every_key() -> None:
    text = page("config.md")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `.+?` \| `.+?` \| (.*) \|$", text, re.MULTILINE))
    wanted = {*keys_of(TrainConfig, "train"), *keys_of(TextData, "data"), *keys_of(OwnData, "data")}
    assert wanted - set(rows) == set()
    assert [key for key, meaning in rows.items() if len(meaning.split()) < 3] == []
    for field in dataclasses.fields(RunConfig):
        assert re.search(rf"^## {field.name}$", text, re.MULTILINE), field.name


@pytest.mark.parametrize("name", ["quickstart.py", "bert_large_pretrain.py"])
def test_every_key_of_the_packaged_configs_is_on_the_page(name: str) -> None:
    text = page("config.md")
    missing = [key for key in set_keys(LazyConfig.load(ROOT / "configs" / name)) if f"`{key}`" not in text]
    assert [key for key in missing if not key.startswith(("model", "optim.eps"))] == []


@pytest.mark.parametrize("command", ["train", "plan", "find-batch-size", "estimate", "selftest", "profile-device"])
def test_the_page_of_the_command_line_shows_the_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert f"```text\n{shown}```" in page("cli.md")
    assert ":`" not in shown, "markup of the API page"


def test_the_page_of_the_api_begins_with_a_line_for_each_name() -> None:
    text = page("api.md")
    short, _, table = text.partition("## All names")
    assert [name for name in re.findall(r"^\| \[`(\w+)`\]", short, re.MULTILINE) if name != "explain"] == [
        "apply", "remove", "plan", "verify", "estimate", "find_batch_size", "Graph"
    ]  # fmt: skip
    rows = dict(re.findall(r"^\| \[`([\w.]+)`\]\(api/\w+.md#[\w.]+\) \| (.+) \|$", table, re.MULTILINE))
    assert {f"graphckpt.{name}" for name in {*graphckpt.__all__} - SECOND_NAMES} - rows.keys() == set()
    assert "graphckpt.blocks.presets.every_k" in rows
    for name in rows:
        module, _, attribute = name.rpartition(".")
        assert not module or hasattr(importlib.import_module(module), attribute), name
    assert [name for name, summary in rows.items() if len(summary) > 140] == []


def test_the_page_of_plans_lists_every_option_and_where_it_can_be_set() -> None:
    table = page("planning.md").partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (yes)? ?\| (yes)? ?\|$", table, re.MULTILINE)
    assert {name for name, *_ in rows} == {*planning.PlanOptions.names()}
    assert {name for name, in_config, _ in rows if in_config} == {*planning.PlanOptions.names("config")}
    assert {name for name, _, in_command in rows if in_command} == {*planning.PlanOptions.names("command")}


def test_every_public_name_is_in_the_reference() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").rglob("*.md")]
    shown = {name.rpartition(".")[2] for text in pages for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    public = {*graphckpt.__all__, *blocks.__all__, *planning.__all__, *graph.__all__, *train.__dict__["_PUBLIC"]}
    (row,) = re.findall(r"^\| Python \|.*$", (ROOT / "docs/stability.md").read_text(encoding="utf-8"), re.MULTILINE)
    public |= {*tasks.__all__, *re.findall(r"`[\w.]*?([A-Z]\w+)`", row)}
    assert public - shown == SECOND_NAMES
