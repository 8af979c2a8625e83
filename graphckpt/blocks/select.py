"""Finds the modules that a selector matches: by name, by class, or the module itself."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from graphckpt.errors import ConfigError, did_you_mean, shown

Selector: TypeAlias = str | re.Pattern[str] | type[nn.Module] | nn.Module
"""A name or name pattern as for :mod:`fnmatch` (``"transformer.h.*"``), a regular expression
(``re.compile(r"h\\.[0-3]")`` or ``"re:h\\.[0-3]"``), a class or its name (``"GPT2Block"``), or a module."""


def select(model: nn.Module, selector: Selector) -> list[tuple[str, nn.Module]]:
    """Returns the ``(name, module)`` pairs of ``model`` that ``selector`` matches, in the model's order.

    Modules inside a matching module are not matched again, so that ``"layers.*"`` selects the layers and not everything
    in them. ``""`` is the model itself; no other string selects it. A string that matches no name selects the modules
    of the class of that name.

    Raises:
        ConfigError: The selector has another type, is not a valid expression, or matches nothing.
    """
    named = list(model.named_modules(remove_duplicate=False))
    if isinstance(selector, nn.Module):
        matches = [(name, module) for name, module in named if module is selector][:1]
    elif isinstance(selector, type):
        matches = [(name, module) for name, module in named if isinstance(module, selector)]
    elif isinstance(selector, (str, re.Pattern)):
        pattern = _pattern(selector)
        matches = [(name, module) for name, module in named if pattern.fullmatch(name) and (name or selector == "")]
        if not matches and isinstance(selector, str):
            matches = [(name, module) for name, module in named if name and selector in _class_names(module)]
    else:
        raise ConfigError(
            f"expected a name pattern, a regular expression, a class or a module, got {shown(selector)} · "
            "fix: a name of model.named_modules(), such as 'layers.0', or 'layers.*'"
        )
    if not matches:
        raise ConfigError(_matches_nothing(model, selector, named))
    return _outermost(matches)


def _class_names(module: nn.Module) -> Iterator[str]:
    for kind in type(module).__mro__:
        yield kind.__name__
        yield f"{kind.__module__}.{kind.__name__}"


def _matches_nothing(model: nn.Module, selector: Selector, named: Sequence[tuple[str, nn.Module]]) -> str:
    owner = type(model).__name__
    if isinstance(selector, nn.Module):
        return f"a {type(selector).__name__} is not a module of {owner} · fix: select a module of the model"
    classes = {type(module).__name__ for _, module in named}
    word = describe(selector)
    if isinstance(selector, type):
        described, names, hint = f"class {word}", classes, did_you_mean(word, classes)
    else:
        described, names = repr(word), {_with_stars(name) for name, _ in named}
        names |= {name for name, _ in named if "*" not in word}
        hint = did_you_mean(word, names) or did_you_mean(word, classes)
    hint = hint or f" · the model has {', '.join(map(repr, sorted(names)[:8]))}{', ...' if len(names) > 8 else ''}"
    return f"{described} matches no module of {owner}{hint} · fix: use a name or class of model.named_modules()"


def _pattern(selector: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(selector, re.Pattern):
        return selector
    if not selector.startswith("re:"):
        return re.compile(fnmatch.translate(selector))
    try:
        return re.compile(selector[3:])
    except re.error as error:
        raise ConfigError(f"{selector!r} is not a valid regular expression: {error} · fix: correct it") from None


def _outermost(matches: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inner = {id(child) for _, module in matches for child in module.modules() if child is not module}
    return [(name, module) for name, module in matches if id(module) not in inner]


def _with_stars(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def describe(selector: Any) -> str:
    if isinstance(selector, nn.Module):
        return type(selector).__name__
    return selector.__name__ if isinstance(selector, type) else str(getattr(selector, "pattern", selector))
