"""The base class of rules, which decide what a block saves for backward, and how users name one."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from graphckpt.errors import ConfigError, did_you_mean, shown
from graphckpt.extras import Registry

if TYPE_CHECKING:
    from torch import nn

    from graphckpt.engine.block import BlockContext


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """Decides what a block saves for backward.

    A subclass is a frozen dataclass, registered by ``name``, under which config files find it; its fields are its keys
    there. An installed package makes its rule known by an entry point of the group ``graphckpt.rules``, whose name is
    the rule's. ``class MyRule(Rule, is_registered=False)`` can be used as an object only.
    """

    name: ClassVar[str]

    _registry: ClassVar[Registry[Rule]]

    def __init_subclass__(cls, *, is_registered: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if is_registered and "name" in cls.__dict__:
            Rule._registry.add(cls.name, cls)

    def check(self, module: nn.Module) -> str | None:
        """Returns why this rule cannot act on ``module`` and how to fix it, or ``None`` if it can."""
        del module
        return None

    @abstractmethod
    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs ``function(*args, **kwargs)``, the block's forward, with autograd on."""

    def run_without_gradients(
        self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs the block's forward with autograd off, where nothing is kept."""
        del block
        return function(*args, **kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns why ``torch.compile`` cannot trace a block under this rule; ``None`` if it can, by `run_in_graph`."""
        acts = has_gradients or type(self).run_without_gradients is not Rule.run_without_gradients
        is_traced = type(self).run_in_graph is not Rule.run_in_graph
        return f"the rule {self.name!r} cannot be traced" if acts and not is_traced else None

    def run_in_graph(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs ``function(*args, **kwargs)``, the forward of ``module``, in a graph that ``torch.compile`` traces."""
        del module
        return function(*args, **kwargs)

    def describe(self) -> str:
        """Returns the rule as tables show it: its name, its first setting, and others that are not the default."""
        settings = [
            str(value) if number == 0 else f"{field.name}={value}"
            for number, field in enumerate(dataclasses.fields(self))
            if (value := getattr(self, field.name)) is not None and (number == 0 or value != field.default)
        ]
        return f"{self.name}({', '.join(settings)})" if settings else self.name


Rule._registry = Registry("Rule", "graphckpt.rules")


def rule_classes() -> dict[str, type[Rule]]:
    """Returns the loaded rules by name. A new rule of this package is one new file in this folder."""
    _import_folder()
    return Rule._registry.classes()


# On first use and not at import: the modules of this folder import this one.
@cache
def _import_folder() -> None:
    package = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{info.name}")


def parse_rule(value: Any) -> Rule | None:
    """Returns the rule that ``value`` means; ``None`` means that the enclosing block decides.

    ``True`` is ``full``, ``False`` is ``keep``; else a rule object, a rule's name, or ``{"rule": name, **settings}``;
    ``"tiles:8:sum"`` is short for ``{"rule": "tiles", "num_tiles": 8, "reduce": "sum"}``.

    Raises:
        ConfigError: ``value`` means no rule. The message has no place in it; the caller knows that.

    >>> parse_rule("tiles:8:sum"), parse_rule("segments:log")
    (Tiles(num_tiles=8, tile_dim=0, reduce='sum'), Segments(num_segments='log'))
    """
    if value is None or isinstance(value, Rule):
        return value
    if isinstance(value, bool):
        return _class("full" if value else "keep")()
    if isinstance(value, dict) and "rule" in value:
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "rule"}
        rule_class = _class(value["rule"])
        fields = [f.name for f in dataclasses.fields(rule_class)]
        for key in settings:
            if key not in fields:
                raise ConfigError(
                    f"rule {rule_class.name!r}: expected one of its settings, got {key!r}{did_you_mean(key, fields)} · "
                    f"fix: use {', '.join(map(repr, fields)) or 'none'}"
                )
        return rule_class(**settings)
    if isinstance(value, str):
        name, *texts = value.split(":")
        fields = [f.name for f in dataclasses.fields(_class(name))]
        if texts and not fields:
            raise ConfigError(f"rule {name!r}: expected no setting, got {value!r} · fix: use {name!r}")
        # A number sets the first field; a word sets `reduce` ("tiles:8:sum"), or the first field ("segments:log").
        named = "reduce" if "reduce" in fields else fields[0] if fields else ""
        values = {fields[0] if text.isdigit() else named: int(text) if text.isdigit() else text for text in texts}
        return parse_rule({"rule": name, **values})
    raise ConfigError(f"expected a rule, got {shown(value)} · fix: use True, False, None, {_names()} or a rule object")


def _class(name: Any) -> type[Rule]:
    _import_folder()
    rule_class = Rule._registry.find(name) if isinstance(name, str) else None
    if rule_class is None:
        suggestion = did_you_mean(str(name), Rule._registry.names())
        raise ConfigError(f"expected a rule, got {name!r}{suggestion} · fix: use {_names()}")
    return rule_class


def _names() -> str:
    return ", ".join(repr(name) for name in Rule._registry.names())
