"""Finds numbers that YAML 1.1 reads differently than they look: 12:30:45 is 45045, and 010 is 8."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from graphckpt.yaml_text import compose

_ODD = re.compile(r"[-+]?(?:[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?|0[0-9_]+)")
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}


def odd_numbers(text: str) -> Iterator[tuple[str, str, int]]:
    """Yields key, value and line, from 1, of each number in base 60 or with a zero in front, unless it is quoted.

    Raises:
        YAMLError: The text cannot be read.

    >>> list(odd_numbers("a: {b: 12:30:45, c: '12:30', d: 10}"))
    [('a.b', '12:30:45', 1)]
    """
    node = compose(text)
    yield from _found(node, "", set()) if node is not None else ()


def fault_of(value: str) -> str:
    """Returns the fault message of such a value."""
    fix = "write it in digits, without ':' and without a zero in front, or quote it"
    return f"expected a plain number, got {value} · fix: {fix}"


def _found(node: yaml.Node, key: str, seen: set[int]) -> Iterator[tuple[str, str, int]]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _found(value, f"{key}.{name.value}" if key else str(name.value), seen)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _found(value, f"{key}[{number}]", seen)
    elif node.style is None and node.tag in _NUMBERS and _ODD.fullmatch(node.value):
        yield key, node.value, node.start_mark.line + 1
