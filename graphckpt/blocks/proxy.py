"""What a Graph hands out for its modules: a block, which is the module with a policy beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import nn

from graphckpt.blocks.config import FIELDS, BlockConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@final
class BlockTree:
    """The blocks of one Graph: one per module, made when they are asked for."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.configs: dict[nn.Module, BlockConfig] = {}
        self._blocks: dict[nn.Module, Block] = {}
        self._changed = changed

    def block(self, module: nn.Module, prefix: str, name: str) -> Block:
        """Returns the block of ``module``; a module with two names goes by the first."""
        if module not in self._blocks:
            self._blocks[module] = Block(module, prefix, name, self)
        return self._blocks[module]

    def config(self, module: nn.Module, path: str) -> BlockConfig:
        """Returns the config of ``module``."""
        if module not in self.configs:
            self.configs[module] = BlockConfig(path, self._changed, getattr(module, "config", None))
        return self.configs[module]


class Block:
    """A module in a Graph. Reading, writing and calling reach the module itself; ``config`` is the block's policy.

    ``isinstance`` sees the module's class. Children come as blocks. Inside of ``build`` and of every ``forward`` the real
    modules are in place, so a module's own ``self.config`` is its own there.
    """

    __slots__ = ("_children", "_name", "_origin", "_prefix", "_tree")

    def __init__(self, origin: nn.Module, prefix: str, name: str, tree: BlockTree) -> None:
        for slot, value in (("_origin", origin), ("_prefix", prefix), ("_name", name), ("_tree", tree)):
            object.__setattr__(self, slot, value)

    @property
    def __class__(self) -> type:
        return type(self._origin)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self._origin.__class__ = kind

    @property
    def origin(self) -> nn.Module:
        """The module itself."""
        return self._origin  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The last part of the block's path."""
        return self._name  # type: ignore[no-any-return]

    @property
    def name_prefix(self) -> str:
        """The path before the name, with a dot at its end if there is one."""
        return self._prefix  # type: ignore[no-any-return]

    @property
    def config(self) -> BlockConfig:
        """The block's policy. Fields that it does not have are read from the module's own ``config``."""
        return self._tree.config(self._origin, self._prefix + self._name)  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``to(GraphModule)`` is the policy in OneFlow's later spelling, ``to(nn.Module)`` the module; else it moves it."""
        if args and args[0] is GraphModule:
            return GraphModule(self)
        if args and isinstance(args[0], type) and issubclass(args[0], nn.Module):
            return self._origin
        self._origin.to(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._origin(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._origin, name)
        return self._child(name, value) if isinstance(value, nn.Module) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._origin, name, unwrap(value))

    def __delattr__(self, name: str) -> None:
        delattr(self._origin, name)

    def __getitem__(self, key: Any) -> Any:
        value = self._origin[key]
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self._origin))
            return BlockSlice(value, [self[i] for i in range(start, stop, step)], f"{self._prefix}{self._name}", key)
        if not isinstance(value, nn.Module):
            return value
        name = next(name for name, child in self._origin._modules.items() if child is value)
        return self._child(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._origin[key] = unwrap(value)

    def __delitem__(self, key: Any) -> None:
        del self._origin[key]

    def __len__(self) -> int:
        return len(self._origin)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._origin, nn.ModuleDict):
            return iter(self._origin)
        return (self._child_of(value) for value in self._origin)

    def __contains__(self, item: Any) -> bool:
        return unwrap(item) in self._origin

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._origin), "config", "name", "name_prefix", "origin"})

    def __repr__(self) -> str:
        return repr(self._origin)

    def keys(self) -> Any:
        """The keys of an ``nn.ModuleDict``."""
        return self._origin.keys()

    def values(self) -> list[Any]:
        """The blocks of an ``nn.ModuleDict``."""
        return [self._child_of(value) for value in self._origin.values()]

    def items(self) -> list[tuple[str, Any]]:
        """The keys and blocks of an ``nn.ModuleDict``."""
        return [(key, self._child_of(value)) for key, value in self._origin.items()]

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """Yields the names and blocks of the direct children."""
        for name, child in self._origin.named_children():
            yield name, self._child(name, child)

    def children(self) -> Iterator[Any]:
        """Yields the blocks of the direct children."""
        return (child for _, child in self.named_children())

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Yields every module below and this one, once each, as blocks, with their paths."""
        for path, module in self._origin.named_modules():
            head, _, name = path.rpartition(".")
            start = f"{self._prefix}{self._name}."
            prefix = start + head + "." if head else start
            yield path, self._tree.block(module, prefix, name) if path else self

    def modules(self) -> Iterator[Any]:
        """Yields every module below and this one, once each, as blocks."""
        return (block for _, block in self.named_modules())

    def get_submodule(self, target: str) -> Any:
        """Returns the block at a path below this one."""
        return dict(self.named_modules())[target] if target else self

    def _child(self, name: str, module: nn.Module) -> Block:
        return self._tree.block(module, f"{self._prefix}{self._name}.", name)  # type: ignore[no-any-return]

    def _child_of(self, value: Any) -> Any:
        name = next((name for name, child in self._origin._modules.items() if child is value), None)
        return value if name is None else self._child(name, value)


@final
class BlockSlice:
    """Some consecutive blocks of a container. What is set on ``config`` is set on each of them."""

    def __init__(self, origin: Any, blocks: list[Block], path: str, key: slice) -> None:
        self.origin = origin
        self.name = f"{path}[{'' if key.start is None else key.start}:{'' if key.stop is None else key.stop}]"
        self.config = _ConfigOfEach([block.config for block in blocks])
        self._blocks = blocks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.origin(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._blocks[key]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"{self.name}: {self.origin!r}"


@final
class _ConfigOfEach:
    def __init__(self, configs: list[BlockConfig]) -> None:
        object.__setattr__(self, "_configs", configs)

    def __setattr__(self, field: str, value: Any) -> None:
        for config in self._configs:
            setattr(config, field, value)

    def __getattr__(self, field: str) -> list[Any]:
        return [getattr(config, field) for config in self._configs]


@final
class GraphModule:
    """A block's policy in the spelling of OneFlow since 0.9: ``block.to(GraphModule).activation_checkpointing = True``."""

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


def unwrap(value: Any) -> Any:
    """Returns the module of a block, and everything else as it is."""
    return value.origin if type(value) in (Block, BlockSlice) else value
