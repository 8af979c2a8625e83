"""A block's policy in OneFlow's later spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from graphckpt.blocks.config import FIELDS

if TYPE_CHECKING:
    from graphckpt.blocks.proxy import Block


@final
class GraphModule:
    """A block's policy as OneFlow has it since 0.9: ``block.to(GraphModule).activation_checkpointing = True``."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        object.__setattr__(self, "_block", block)

    @property
    def name(self) -> str:
        """The last part of the block's path."""
        return self._block.name  # type: ignore[no-any-return]

    @property
    def name_prefix(self) -> str:
        """The path before the name."""
        return self._block.name_prefix  # type: ignore[no-any-return]

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
