"""A policy that a block may get, as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

from graphckpt.rules import Joined, Keep, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphckpt.rules import Site

MOST = 4
"""Levels of a block. More of them cost runs, and plans mix two that lie around what they need."""


@final
@dataclass(frozen=True, slots=True)
class Option:
    """One policy that a block may get."""

    name: str
    """As tables show it: ``"full"``, ``"selective(matmul)"``, ``"full + host"``."""
    fields: Mapping[str, Any]
    """What :func:`graphckpt.apply` is given for the block."""
    rule: Rule
    is_far: bool = False
    """What is kept leaves the device."""
    recompute_seconds: float | None = field(default=None, compare=False)
    """What its second run takes, by a clock on each op; ``None`` if nobody has looked."""
    is_part: bool = False
    """What is kept is cut over ranks."""


KEEP = Option("keep", {"activation_checkpointing": False}, Keep())

JOINED = Option("joined", {"activation_checkpointing": "joined"}, Joined())
"""What a plan gives to the blocks of a run behind the first."""


@final
@dataclass(frozen=True)
class SelectiveLevel(Rule):
    """Stands for the level of a block with this number, before one is looked at: the first keeps most."""

    name: ClassVar[str] = "level"
    number: int = 0

    def describe(self) -> str:
        """Counts from 1."""
        return f"selective(level {self.number + 1})"

    def run(self, site: Site, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Is never called: what a block gets in its place is ``selective``."""
        raise NotImplementedError
