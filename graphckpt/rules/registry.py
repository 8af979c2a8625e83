"""Finds rules by name, and parses what a user writes for one."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from functools import cache
from typing import Any

from graphckpt.errors import ConfigError, did_you_mean, shown
from graphckpt.rules.base import Rule


def rule_classes() -> dict[str, type[Rule]]:
    """Returns the loaded rules by name. A new rule of this package is one new file in this folder."""
    _import_folder()
    return Rule._registry.classes()


@cache
def _import_folder() -> None:
    package = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{info.name}")


def parse_rule(value: Any) -> Rule | None:
    """Returns the rule that ``value`` means; ``None`` means that the enclosing block decides.

    ``True`` is ``full``, ``False`` is ``keep``; else a rule object, a rule's name, or ``{"rule": name, **settings}``.

    Raises:
        ConfigError: ``value`` means no rule. The message has no place in it; the caller knows that.
    """
    if value is None or isinstance(value, Rule):
        return value
    if isinstance(value, bool):
        return _class("full" if value else "keep")()
    if isinstance(value, dict) and "rule" in value:
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "rule"}
        rule = _class(value["rule"])
        known = [f.name for f in dataclasses.fields(rule)]
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"rule {rule.name!r}: expected one of its settings, got {key!r}{did_you_mean(key, known)} · "
                    f"fix: use {', '.join(map(repr, known)) or 'none'}"
                )
        return rule(**settings)
    if isinstance(value, str):
        return _class(value)()
    raise ConfigError(f"expected a rule, got {shown(value)} · fix: use True, False, None, {_names()} or a rule object")


def _class(name: Any) -> type[Rule]:
    _import_folder()
    found = Rule._registry.find(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"expected a rule, got {name!r}{did_you_mean(str(name), Rule._registry.names())} · fix: use {_names()}"
        )
    return found


def _names() -> str:
    return ", ".join(repr(name) for name in Rule._registry.names())
