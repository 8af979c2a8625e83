"""A policy that a block may get, as the planner sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from graphckpt.engine.block import BlockContext
from graphckpt.rules.base import Rule
from graphckpt.rules.joined import Joined
from graphckpt.rules.keep import Keep

MOST = 4
"""Levels of ``selective`` for a block. Each costs runs, and plans mix neighbouring ones."""


@final
@dataclass(frozen=True, slots=True)
class Option:
    """One policy that a block may get."""

    name: str
    """The name in tables: ``"full"``, ``"selective(matmul)"``, ``"full + host"``."""
    fields: Mapping[str, Any]
    """The fields of the block, as :func:`graphckpt.apply` takes them."""
    rule: Rule
    is_far: bool = False
    """Whether saved tensors are offloaded."""
    recompute_seconds: float | None = field(default=None, compare=False)
    """Seconds of the recomputation, timed op by op; ``None`` if not timed."""
    is_part: bool = False
    """Whether saved tensors are partitioned over ranks."""


KEEP = Option("keep", {"activation_checkpointing": False}, Keep())

JOINED = Option("joined", {"activation_checkpointing": "joined"}, Joined())
"""The option of the blocks of a run after the first."""


@final
@dataclass(frozen=True)
class SelectiveLevel(Rule, is_registered=False):
    """A placeholder for a level of ``selective`` that is not known yet; level 0 keeps most."""

    name: ClassVar[str] = "level"
    number: int = 0

    def describe(self) -> str:
        """Returns the name, counted from 1."""
        return f"selective(level {self.number + 1})"

    def run(self, context: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Is never called: ``selective`` replaces it."""
        raise NotImplementedError
