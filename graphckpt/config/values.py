"""The values of a config, by dotted key, and where each is set."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, final

import yaml
from omegaconf import OmegaConf

from graphckpt.config.instantiate import dotted_name, importable


@final
class Origins:
    """Where each value of a config is set last."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}  # by key: the text of the value, and where it is set

    def note(self, config: Any, origin: str) -> None:
        """Notes that the values that are new or have changed are set at ``origin``."""
        for key, text in leaves(plain_values(config)):
            if self._found.get(key, ("", ""))[0] != text:
                self._found[key] = text, origin

    def of(self, key: str) -> str:
        """Returns where a value is set."""
        return self._found[key][1]


def plain_values(node: Any) -> Any:
    """Returns a config as dicts, lists and plain values, other objects as their dotted name or text.

    Warns:
        UserWarning: A callable cannot be imported by a name.
    """
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, Mapping):
        return {key: plain_values(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain_values(value) for value in node]
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return node
    if not callable(node):
        return str(node)
    name = dotted_name(node)
    if not importable(node):
        warnings.warn(f"{name} cannot be imported by this name: the saved config will not load", stacklevel=2)
    return name


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the YAML text of each value in a section.

    >>> dict(leaves({"train": {"seed": 1, "betas": [0.9, 0.95]}}))
    {'train.seed': '1', 'train.betas': '[0.9, 0.95]'}
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, yaml_text(node)


def yaml_text(value: Any) -> str:
    """Returns a value as YAML on one line.

    >>> yaml_text("*.h"), yaml_text(None), yaml_text({"rule": "full"})
    ("'*.h'", 'null', '{rule: full}')
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(text).removesuffix("...\n").rstrip("\n")
