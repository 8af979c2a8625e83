"""Every field of a block's config is in its help, and completes on Tab."""

from __future__ import annotations

import inspect
import re

from graphckpt import BlockConfig
from graphckpt.blocks.config import FIELDS


def test_the_docstring_describes_each_field_with_type_and_default() -> None:
    attributes = inspect.cleandoc(BlockConfig.__doc__ or "").partition("Attributes:\n")[2].partition("\nRaises:")[0]
    entries = re.findall(r"^    (\w+) \(([^)]+)\): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    assert [name for name, _, _ in entries] == list(FIELDS)
    for name, kind, text in entries:
        assert kind.endswith("| None"), name
        assert "``None``" in text, name


def test_fields_are_listed_by_dir() -> None:
    listed = dir(BlockConfig("layers.0"))
    assert set(FIELDS) <= set(listed)
    assert listed == sorted(set(listed))
