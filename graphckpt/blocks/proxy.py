"""What a Graph hands out for its modules: a block, which is the module with a policy beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from functools import wraps
from types import MethodType
from typing import Any, final
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from graphckpt.blocks.config import FIELDS, BlockConfig, check_attribute


@final
class BlockTree:
    """The blocks of one Graph: one per module, created on demand."""

    def __init__(self, roots: Mapping[str, nn.Module], changed: Callable[[], None]) -> None:
        self.configs: MutableMapping[nn.Module, BlockConfig] = WeakKeyDictionary()
        self._blocks: MutableMapping[nn.Module, Block] = WeakValueDictionary()  # a block references its tree
        self._paths: MutableMapping[nn.Module, str] = WeakKeyDictionary()
        self._roots = roots
        self._changed = changed  # to be called when a policy or a module was changed

    def mark_changed(self) -> None:
        """Notes that a module was replaced, added or removed."""
        self._paths = WeakKeyDictionary()
        self._changed()

    def wrap(self, value: Any) -> Any:
        """Returns blocks instead of the Graph's modules: of one, or of those in a list, tuple, view or iterator."""
        if isinstance(value, nn.Module):
            return self._blocks.get(value) or self._block(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.wrap, value))
        if isinstance(value, (ItemsView, ValuesView)):
            return list(map(self.wrap, value))
        return map(self.wrap, value) if isinstance(value, Iterator) else value

    def _block(self, module: nn.Module) -> Any:
        if module not in self._paths:
            for root, top in self._roots.items():
                for path, each in top.named_modules():
                    self._paths.setdefault(each, f"{root}.{path}" if path else root)
        if module not in self._paths:
            return module
        block = self._blocks[module] = Block(module, self._paths[module], self)
        return block

    def config(self, module: nn.Module, path: str) -> BlockConfig:
        """Returns the config of ``module``."""
        if module not in self.configs:
            self.configs[module] = BlockConfig(path, self._changed, getattr(module, "config", None))
        return self.configs[module]

    def policies(self) -> list[tuple[nn.Module, str, dict[str, Any]]]:
        """Returns ``(module, path, fields)`` of every block on which something is set."""
        return [(module, config.block, config.fields()) for module, config in self.configs.items() if config.fields()]


class Block:
    """A module in a Graph. Reading, writing and calling reach the module itself; ``config`` is the block's policy.

    ``isinstance`` sees the module's class. Children come as blocks, copies as modules. Inside of ``build`` and of every
    ``forward`` the real modules are in place, so a module's own ``self.config`` is its own there.
    """

    __slots__ = ("__weakref__", "_origin", "_path", "_tree")

    def __init__(self, origin: nn.Module, path: str, tree: BlockTree) -> None:
        for slot, value in (("_origin", origin), ("_path", path), ("_tree", tree)):
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
        return self._path.rpartition(".")[2]  # type: ignore[no-any-return]

    @property
    def name_prefix(self) -> str:
        """The path before the name, with a dot at its end if there is one."""
        return self._path.removesuffix(self.name)  # type: ignore[no-any-return]

    @property
    def config(self) -> BlockConfig:
        """The block's policy. Fields that it does not have are read from the module's own ``config``."""
        return self._tree.config(self._origin, self._path)  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``to(GraphModule)`` is the policy in OneFlow's later spelling, ``to(nn.Module)`` the module; else moves."""
        if args and args[0] is GraphModule:
            return GraphModule(self)
        if args and isinstance(args[0], type) and issubclass(args[0], nn.Module):
            return self._origin
        self._origin.to(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self._origin(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in Block.__slots__:  # a block that is being created
            raise AttributeError(name)
        value = getattr(self._origin, name)
        if isinstance(value, MethodType) and value.__self__ is self._origin:
            return self._wrapped(value)
        return self._tree.wrap(value) if isinstance(value, nn.Module) else value

    def _wrapped(self, method: MethodType) -> Callable[..., Any]:
        """Returns a method that takes and returns blocks, and notes whether it has changed the modules below."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            modules = list(self._origin.modules())
            result = method(*map(_unwrapped, args), **{key: _unwrapped(value) for key, value in kwargs.items()})
            if modules != list(self._origin.modules()):
                self._tree.mark_changed()
            return self._tree.wrap(result)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, nn.Module):
            check_attribute(self._path, self._origin, name)
        setattr(self._origin, name, unwrap(value))
        if isinstance(value, nn.Module):
            self._tree.mark_changed()

    def __delattr__(self, name: str) -> None:
        delattr(self._origin, name)
        self._tree.mark_changed()

    def __copy__(self) -> nn.Module:
        return copy.copy(self.origin)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.origin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._origin.__reduce_ex__(protocol)

    def __getitem__(self, key: Any) -> Any:
        value = self._origin[key]
        if isinstance(key, slice):
            return BlockSlice(value, [self._tree.wrap(child) for child in value], self._path, key)
        return self._tree.wrap(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._origin[key] = unwrap(value)
        self._tree.mark_changed()

    def __delitem__(self, key: Any) -> None:
        del self._origin[key]
        self._tree.mark_changed()

    def __len__(self) -> int:
        return len(self._origin)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return map(self._tree.wrap, self._origin)

    def __contains__(self, item: Any) -> bool:
        return unwrap(item) in self._origin

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._origin), "config", "name", "name_prefix", "origin"})

    def __repr__(self) -> str:
        return repr(self._origin)


@final
class GraphModule:
    """A block's policy as OneFlow has it since 0.9: ``block.to(GraphModule).activation_checkpointing = True``."""

    __slots__ = ("_block",)

    def __init__(self, block: Block) -> None:
        self._block: Block
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
        return f"GraphModule({self._block.config.describe()})"


@final
class BlockSlice:
    """Some consecutive blocks of a container. What is set on ``config`` is set on each of them."""

    def __init__(self, origin: Any, blocks: list[Block], path: str, key: slice) -> None:
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

    def __iter__(self) -> Iterator[Block]:
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


def unwrap(value: Any) -> Any:
    """Returns the module of a block, and everything else as it is."""
    return value.origin if type(value) in (Block, BlockSlice) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unwrap(module) for key, module in value.items()}
    return [unwrap(module) for module in value] if isinstance(value, (list, tuple)) else unwrap(value)
