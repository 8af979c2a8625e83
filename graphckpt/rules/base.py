"""The base class of rules, which decide what of a block is saved for backward."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from graphckpt.extras import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from graphckpt.engine.block import BlockContext

ENTRY_POINTS = "graphckpt.rules"
"""The entry-point group that installed packages use to name their rules."""


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """Decides what of a block is saved for backward.

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
        """Runs the block's forward with autograd off, where nothing is kept anyway: as it is."""
        del block
        return function(*args, **kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns why ``torch.compile`` cannot trace a block under this rule; ``None`` if it can."""
        acts = has_gradients or type(self).run_without_gradients is not Rule.run_without_gradients
        return f"the rule {self.name!r} cannot be traced" if acts else None

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


Rule._registry = Registry("Rule", ENTRY_POINTS)
