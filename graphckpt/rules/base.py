"""The base class of rules, which decide what of a block is saved for backward."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from graphckpt.rules.engine.context import BlockContext


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """Decides what of a block is saved for backward.

    A subclass is a frozen dataclass in a file of its own; the file's name is the rule's name in config files, and the
    dataclass fields are its keys there.
    """

    name: ClassVar[str]

    def check(self, module: nn.Module) -> str | None:
        """Returns why this rule cannot act on ``module`` and how to fix it, or ``None`` if it can."""
        del module
        return None

    @abstractmethod
    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs ``function(*args, **kwargs)``, the block's forward, with autograd on."""

    def run_without_gradients(self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the forward of the block ``name`` with autograd off, where nothing is kept anyway: as it is."""
        del name
        return function(*args, **kwargs)

    def describe(self) -> str:
        """Returns the rule as tables show it: its name, and its settings that are not the default."""
        settings = [
            str(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None and value != field.default
        ]
        return f"{self.name}({', '.join(settings)})" if settings else self.name
