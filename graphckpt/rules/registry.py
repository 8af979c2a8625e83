"""Finds every rule by the name of its file, and reads a rule from what a user writes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.rules.base import Rule


@cache
def rule_classes() -> dict[str, type[Rule]]:
    """Returns every rule class by its name. A new rule is one new file in this folder."""
    found: dict[str, type[Rule]] = {}
    package = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, Rule) and value is not Rule and value.__module__ == module.__name__:
                found[value.name] = value
    return found


def parse_rule(value: Any) -> Rule | None:
    """Returns the rule that ``value`` means; ``None`` means that the enclosing block decides.

    ``True`` is ``full``, ``False`` is ``keep``; else a rule object, a rule's name, or ``{"rule": name, **settings}``.

    Raises:
        ConfigError: ``value`` means no rule. The message has no place in it; the caller knows that.
    """
    if value is None or isinstance(value, Rule):
        return value
    classes = rule_classes()
    if isinstance(value, bool):
        return classes["full" if value else "keep"]()
    if isinstance(value, dict) and "rule" in value:
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "rule"}
        rule = _class(value["rule"])
        known = [f.name for f in dataclasses.fields(rule)]
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"rule {rule.name!r} has no setting {key!r}{did_you_mean(key, known)} · "
                    f"fix: use {', '.join(map(repr, known)) or 'none'}"
                )
        return rule(**settings)
    if isinstance(value, str):
        return _class(value)()
    raise ConfigError(f"{value!r} is no rule · fix: use True, False, None, {_names()} or a rule object")


def _class(name: Any) -> type[Rule]:
    classes = rule_classes()
    if name not in classes:
        raise ConfigError(f"there is no rule {name!r}{did_you_mean(str(name), classes)} · fix: use {_names()}")
    return classes[name]


def _names() -> str:
    return ", ".join(repr(name) for name in sorted(rule_classes()))
