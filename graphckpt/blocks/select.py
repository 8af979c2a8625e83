"""Finds the modules that a selector means: a name pattern, a regular expression, or a class."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from graphckpt.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

Selector: TypeAlias = str | re.Pattern[str] | type[nn.Module]
"""``"transformer.h.*"`` as for :mod:`fnmatch`, ``re.compile(r"h\\.[0-3]")`` or ``"re:h\\.[0-3]"``, or a class."""


def select(model: nn.Module, selector: Selector) -> list[tuple[str, nn.Module]]:
    """Returns the ``(name, module)`` pairs below ``model`` that ``selector`` means, in the model's order.

    Modules inside of a matching module are not matched again, so that ``"layers.*"`` means the layers and not all that
    is in them. ``""`` is the model itself; no pattern with a star means it.

    Raises:
        ConfigError: The selector is of another type, is no valid expression, or matches nothing.
    """
    named = list(model.named_modules(remove_duplicate=False))
    if isinstance(selector, type):
        found = [(name, module) for name, module in named if isinstance(module, selector)]
        known: Iterable[str] = {type(module).__name__ for _, module in named}
        word, described = selector.__name__, f"class {selector.__name__}"
    elif isinstance(selector, (str, re.Pattern)):
        pattern = _pattern(selector)
        found = [(name, module) for name, module in named if pattern.fullmatch(name) and (name or selector == "")]
        word = described = selector if isinstance(selector, str) else selector.pattern
        known = {_with_stars(name) for name, _ in named} | {name for name, _ in named if "*" not in word}
        described = repr(described)
    else:
        raise ConfigError(
            f"expected a selector, got {selector!r} · fix: use a name pattern, a regular expression or a class"
        )
    if not found:
        near = did_you_mean(word, known) or f" · the model has {', '.join(map(repr, sorted(known)[:8]))}"
        raise ConfigError(f"{described} matches no module of {type(model).__name__}{near} · fix: the selector")
    return _outermost(found)


def _pattern(selector: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(selector, re.Pattern):
        return selector
    if not selector.startswith("re:"):
        return re.compile(fnmatch.translate(selector))
    try:
        return re.compile(selector[3:])
    except re.error as error:
        raise ConfigError(f"{selector!r}: expected a regular expression: {error} · fix: correct the selector") from None


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inner = {id(below) for _, module in found for below in module.modules() if below is not module}
    return [(name, module) for name, module in found if id(module) not in inner]


def _with_stars(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def describe(selector: Any) -> str:
    """Names a selector in messages."""
    return selector.__name__ if isinstance(selector, type) else str(getattr(selector, "pattern", selector))
