"""A block's policy in OneFlow's later spelling."""

from __future__ import annotations

from typing import Any, Protocol, final

from graphckpt.blocks.config import FIELDS, BlockConfig


class NamedBlock(Protocol):
    """What this module and slices need to know of a :class:`~graphckpt.blocks.proxy.Block`."""

    @property
    def name(self) -> str:
        """The last part of the block's path."""

    @property
    def name_prefix(self) -> str:
        """The path before the name."""

    @property
    def config(self) -> BlockConfig:
        """The policy of the block."""


@final
class GraphModule:
    """A block's policy as OneFlow has it since 0.9: ``block.to(GraphModule).activation_checkpointing = True``."""

    __slots__ = ("_block",)

    def __init__(self, block: NamedBlock) -> None:
        self._block: NamedBlock
        object.__setattr__(self, "_block", block)

    @property
    def name(self) -> str:
        """The last part of the block's path."""
        return self._block.name

    @property
    def name_prefix(self) -> str:
        """The path before the name."""
        return self._block.name_prefix

    @property
    def type(self) -> str:
        """``"MODULE"``."""
        return "MODULE"

    def set_stage(self, stage_id: int | None = None, placement: object = None) -> None:
        """Sets the pipeline stage."""
        self._block.config.set_stage(stage_id, placement)

    def __getattr__(self, field: str) -> Any:
        if field not in FIELDS:
            raise AttributeError(f"GraphModule has no attribute {field!r}")
        return getattr(self._block.config, field)

    def __setattr__(self, field: str, value: Any) -> None:
        setattr(self._block.config, field, value)

    def __repr__(self) -> str:
        fields = repr(self._block.config).partition("(")[2]
        return f"(GraphModule:{self.name_prefix}{self.name}({fields})"
