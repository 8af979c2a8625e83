"""Applies ``key=value`` overrides to a config. Values are YAML, as omegaconf reads it."""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from graphckpt.config.numbers import fault_of, odd_numbers
from graphckpt.errors import first_line


def apply(config: DictConfig, overrides: Iterable[str]) -> list[str]:
    """Applies overrides in order, in place, and returns the faults.

    A mapping is merged into the mapping that stands there; any other value replaces what is there.
    A key that is not there yet is added: whether it may be there at all is for the schema to say.

    >>> config = OmegaConf.create({"train": {"log_period": 20}})
    >>> apply(config, ["train.log_period=5", "train.seed"])
    ["override 'train.seed': expected key=value"]
    >>> config.train.log_period
    5
    """
    return [fault for override in overrides if (fault := _apply_one(config, override))]


def _apply_one(config: DictConfig, override: str) -> str:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        return f"override {override!r}: expected key=value"
    try:
        odd = next(odd_numbers(text), None)
        value = OmegaConf.from_dotlist([f"value={text}"])["value"]
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        return f"{key}: expected a YAML value, got {text!r} · fix: quote it ({first_line(error)})"
    if odd is not None:
        inner = f".{odd[0]}" if odd[0] and not odd[0].startswith("[") else odd[0]
        return f"{key}{inner}: {fault_of(odd[1])}"
    if fault := _no_section(config, key):
        return fault
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
        return f"{key}: {first_line(error)}"
    return ""


def _no_section(config: DictConfig, key: str) -> str:
    """Returns a fault if a parent of ``key`` is a plain value."""
    node: object = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if isinstance(node, ListConfig):
            if not part.isdecimal() or int(part) >= len(node):
                return f"{key}: expected an index of {above} below {len(node)}, got {part!r}"
            node = node[int(part)]
        elif isinstance(node, DictConfig):
            if part not in node or OmegaConf.is_interpolation(node, part):
                return ""
            node = node[part]
        elif node is None:
            return ""
        else:
            return f"{key}: {above} is a value ({node!r}), not a section"
    return ""
