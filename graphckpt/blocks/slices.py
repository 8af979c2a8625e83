"""Consecutive blocks of a container, as a slice gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from graphckpt.blocks.config import check_attribute
from graphckpt.blocks.graph_module import GraphModule, NamedBlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphckpt.blocks.config import BlockConfig


@final
class BlockSlice:
    """Some consecutive blocks of a container. What is set on ``config`` is set on each of them."""

    def __init__(self, origin: Any, blocks: list[NamedBlock], path: str, key: slice) -> None:
        self.origin = origin
        self.name = f"{path}[{'' if key.start is None else key.start}:{'' if key.stop is None else key.stop}]"
        self.config = ConfigOfEach([block.config for block in blocks])
        self._blocks = blocks

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``to(GraphModule)`` is the policy of all; ``to(nn.Module)`` the modules; else it moves them."""
        if args and args[0] is GraphModule:
            return self.config
        if not (args and isinstance(args[0], type)):
            self.origin.to(*args, **kwargs)
        return self.origin if args and isinstance(args[0], type) else self

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("origin", "name", "config", "_blocks"):
            check_attribute(self.name, self.origin, name)
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the part of the container."""
        return self.origin(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._blocks[key]

    def __iter__(self) -> Iterator[NamedBlock]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"{self.name}: {self.origin!r}"


@final
class ConfigOfEach:
    """The configs of several blocks: what is set is set on each, what is read is a list."""

    def __init__(self, configs: list[BlockConfig]) -> None:
        object.__setattr__(self, "_configs", configs)

    def __setattr__(self, field: str, value: Any) -> None:
        for config in self._configs:
            setattr(config, field, value)

    def __getattr__(self, field: str) -> list[Any]:
        return [getattr(config, field) for config in self._configs]

    def set_stage(self, stage_id: int | None = None, placement: object = None) -> None:
        """Sets the pipeline stage of each."""
        for config in self._configs:
            config.set_stage(stage_id, placement)
