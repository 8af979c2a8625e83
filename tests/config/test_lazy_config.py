"""Describing calls, loading and saving config files."""

from __future__ import annotations

import collections
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.yaml_bombs import BOMBS
from omegaconf import DictConfig, OmegaConf

from graphckpt.config import LazyCall, LazyConfig, get_config, instantiate, try_get_key
from graphckpt.errors import ConfigError


@dataclass
class Point:
    x: int


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_call_is_made_late_inside_out_and_with_changes() -> None:
    described = LazyCall(torch.nn.Sequential)
    layer = LazyCall(torch.nn.Linear)(in_features=2, out_features=3, bias=False)
    layer.out_features = 5
    made = instantiate(layer)
    assert tuple(made.weight.shape) == (5, 2)
    nested = LazyCall(dict)(inner=layer, many=[layer, {"deep": layer}])
    result = instantiate(nested, extra=1)
    assert result["inner"].bias is None
    assert result["many"][1]["deep"].out_features == 5
    assert result["extra"] == 1
    assert type(result["many"]) is list
    with pytest.raises(ConfigError, match="expected only keyword arguments, got 1 positional"):
        described(layer)
    with pytest.raises(ConfigError, match="expected a callable or its dotted name, got 3"):
        LazyCall(3)


def test_instantiate_returns_a_value_that_is_not_a_call() -> None:
    assert instantiate(None) is None
    assert instantiate(7) == 7
    assert instantiate(OmegaConf.create({"a": [1, 2]})) == {"a": [1, 2]}


def test_dataclass_is_a_target_like_any_other() -> None:
    described = LazyCall(Point)(x=3)
    assert isinstance(described, DictConfig)
    assert instantiate(described) == Point(3)


def test_error_in_target_names_it() -> None:
    with pytest.raises(ConfigError, match=r"error in call to 'torch\.nn\.modules\.linear\.Linear': TypeError"):
        instantiate(LazyCall(torch.nn.Linear)(in_feature=2))
    with pytest.raises(ConfigError, match="has no 'Lineax' · did you mean 'Linear'"):
        instantiate({"_target_": "torch.nn.Lineax"})
    with pytest.raises(ConfigError, match="no module is called 'no_such_package'"):
        instantiate({"_target_": "no_such_package.f"})


def test_relative_imports_go_by_file_and_every_load_is_fresh(tmp_path: Path) -> None:
    _write(tmp_path / "common" / "deep" / "model.py", "from ..base import base\nmodel = {'width': base.width}")
    _write(tmp_path / "common" / "base.py", "base = {'width': 4}\nnumber = 3\n_hidden = {'a': 1}")
    main = _write(
        tmp_path / "main.py",
        "from .common.deep.model import model\nfrom .common.base import base, number\n"
        "base.width += number\n"
        "import math\nouter = dict(pi=math.floor(math.pi), again='${base.width}')",
    )
    config = LazyConfig.load(main)
    assert OmegaConf.to_container(config, resolve=True) == {
        "model": {"width": 4},
        "base": {"width": 7},
        "outer": {"pi": 3, "again": 7},
    }
    assert LazyConfig.load(main) == config  # nothing of the first load was kept: 4 + 3 once more


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nb = dict(c=undefined)\n", r"main\.py:2: b = dict\(c=undefined\): NameError"),
        ("a = (\n", r"main\.py:1: '\(' was never closed"),
        ("from .inner import x\n", r"inner\.py:2: x = 1 / 0: ZeroDivisionError"),
        ("from .nowhere import x\n", r"main\.py:1: from \.nowhere import x: no config file .*nowhere\.py"),
        ("from . import inner\n", r"main\.py:1: from \. import inner: 'from \. import' names a folder"),
        ("from .main import x\n", r"main\.py:1: .*imports this file"),
        ("import no_such_package\n", r"main\.py:1: import no_such_package: ModuleNotFoundError"),
        ("from graphckpt.config import LazyCall as L\na = L(3)\n", r"main\.py:2: a = L\(3\): LazyCall: expected"),
    ],
)
def test_config_that_raises_shows_its_own_line(tmp_path: Path, text: str, message: str) -> None:
    _write(tmp_path / "inner.py", "# a comment\nx = 1 / 0\n")
    with pytest.raises(ConfigError, match=message) as caught:
        LazyConfig.load(_write(tmp_path / "main.py", text))
    assert "importlib" not in str(caught.value)


def test_yaml_and_what_is_no_config_file(tmp_path: Path) -> None:
    config = LazyConfig.load(_write(tmp_path / "a.yaml", "train:\n  seed: 3\n  lr: 1e-3\n"))
    assert config.train.seed == 3
    assert config.train.lr == 1e-3
    with pytest.raises(ConfigError, match=r"b\.yaml:4"):
        LazyConfig.load(_write(tmp_path / "b.yaml", "a: 1\nb:\n  c: [1,\n"))
    with pytest.raises(ConfigError, match="expected a mapping at the top level"):
        LazyConfig.load(_write(tmp_path / "c.yaml", "- 1\n"))
    with pytest.raises(ConfigError, match=r"ends in \.py, \.yaml or \.yml"):
        LazyConfig.load(tmp_path / "d.toml")
    with pytest.raises(ConfigError, match="no such config file"):
        LazyConfig.load(tmp_path / "d.py")


@pytest.mark.parametrize("name", BOMBS)
def test_yaml_with_aliases_without_end_is_one_error(tmp_path: Path, name: Any) -> None:
    text, message = BOMBS[name]
    with pytest.raises(ConfigError, match=rf"^\S+a\.yaml: {re.escape(message)}") as caught:
        LazyConfig.load(_write(tmp_path / "a.yaml", text))
    assert "\n" not in str(caught.value)


def test_yaml_with_aliases(tmp_path: Path) -> None:
    text = "a: &a {lr: 1, deep: {b: 2}}\nc: *a\nd: {<<: *a, lr: 3}\ne: [*a, *a]\n"
    config = OmegaConf.to_container(LazyConfig.load(_write(tmp_path / "a.yaml", text)))
    one = {"lr": 1, "deep": {"b": 2}}
    assert config == {"a": one, "c": one, "d": {**one, "lr": 3}, "e": [one, one]}


def test_saving_what_cannot_be_imported_warns(tmp_path: Path) -> None:
    config = OmegaConf.create({"a": LazyCall(lambda: 1)()}, flags={"allow_objects": True})
    with pytest.warns(UserWarning, match="cannot be imported by this name"):
        LazyConfig.save(config, tmp_path / "config.yaml")
    importable = OmegaConf.create({"a": LazyCall(collections.Counter)(x=1)}, flags={"allow_objects": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LazyConfig.save(importable, tmp_path / "config.yaml")


def test_packaged_configs() -> None:
    assert get_config("common/train.py").train.log_period == 20
    assert get_config("common/models/gpt2.py").model.config.n_layer == 12
    with pytest.raises(ConfigError, match=r"did you mean 'common/train\.py'"):
        get_config("common/trian.py")


def test_try_get_key() -> None:
    config = OmegaConf.create({"a": {"b": None}, "c": 1})
    assert try_get_key(config, "x.y", "c") == 1
    assert try_get_key(config, "a.b", default=5) is None
    assert try_get_key(config, "a.z", default=5) == 5
