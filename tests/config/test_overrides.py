"""Overrides of the command line."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from graphckpt.config import LazyConfig
from graphckpt.errors import ConfigError


def _config() -> Any:
    config = {"a": {"b": 1, "list": [1, 2], "map": {"x": 1}, "nothing": None}, "text": "t"}
    return OmegaConf.create(config, flags={"allow_objects": True})


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("a.b=2", "a.b", 2),
        ("a.b=-3", "a.b", -3),
        ("a.b=1e-4", "a.b", 1e-4),
        ("a.b=.5", "a.b", 0.5),
        ("a.b=true", "a.b", True),
        ("a.b=False", "a.b", False),
        ("a.b=null", "a.b", None),
        ("a.b=word", "a.b", "word"),
        ("a.b='1'", "a.b", "1"),
        ("a.b=x=y", "a.b", "x=y"),
        ("a.b=", "a.b", None),
        ("a.b=[1, two, 3.5]", "a.b", [1, "two", 3.5]),
        ("a.list=[7]", "a.list", [7]),
        ("a.list.1=7", "a.list", [1, 7]),
        ("a.map={y: 2}", "a.map", {"x": 1, "y": 2}),
        ("a.nothing={h.*: {deep: [1]}}", "a.nothing", {"h.*": {"deep": [1]}}),
        ("a.new.deeper=1", "a.new", {"deeper": 1}),
        ("text=http://x/y", "text", "http://x/y"),
    ],
)
def test_values_of_each_type(word: str, key: str, value: Any) -> None:
    config = LazyConfig.apply_overrides(_config(), [word])
    found = OmegaConf.select(config, key)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert found == value
    assert type(found) is type(value)


def test_later_words_win() -> None:
    assert LazyConfig.apply_overrides(_config(), ["a.b=2", "a.b=3"]).a.b == 3


def test_every_senseless_word_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LazyConfig.apply_overrides(
            _config(), ["a.b", "=3", "a..b=1", "a.b=[1", "a.list.x=1", "~a.b", "~a.c=1", "~", "+text"]
        )
    default = "as to its default, which --print-config shows"
    assert str(caught.value).splitlines() == [
        "the overrides have faults:",
        "  • override 'a.b': expected key=value",
        "  • override '=3': expected key=value",
        "  • override 'a..b=1': expected key=value",
        "  • a.b: expected a YAML value, got '[1' · fix: quote it (while parsing a flow sequence)",
        "  • a.list.x: expected a key, or an index of a list (invalid literal for int() with base 10: 'x')",
        f"  • override '~a.b': a key can be set, not removed · fix: set a.b=..., {default}",
        "  • override '~a.c=1': 'a.c' is not set, so there is nothing to remove · fix: leave '~a.c=1' out",
        "  • override '~': '' is not set, so there is nothing to remove · fix: leave '~' out",
        "  • override '+text': expected key=value · fix: leave '+' out",
    ]
