"""Blocks, which a Graph returns for its modules: each is a module with its policy."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from functools import wraps
from types import MethodType
from typing import Any, final
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from graphckpt.blocks.config import FIELDS, BlockConfig, check_attribute

# Note [A block is a view of a module]
# `graph.model.layers[0]` makes a block each time that no other one of that module is alive, and the user drops it after
# the line. So a block holds nothing: the module has the weights, and the tree the config, by module. `setattr` and
# methods such as `append` pass on to the module, and have the tree forget its paths where they change which modules
# there are. Modules never see blocks: what goes in is unwrapped, what comes out is wrapped.


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
        # All paths at once: a walk of the tree for each of n layers would take n times as long.
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


def _delegate(function: Any, *, changes: bool = False) -> Callable[..., Any]:
    """Returns a method that calls ``function`` on the module of a block. Takes and returns blocks for modules."""

    def method(self: Block, *args: Any) -> Any:
        result = function(self._origin, *map(unwrap, args))
        if changes:
            self._tree.mark_changed()
        return self._tree.wrap(result)

    return method


class Block:
    """A module in a Graph. Attributes and calls are those of the module; ``config`` is the block's policy.

    ``isinstance`` sees the module's class. Children come as blocks, copies as modules. Inside of ``build`` and of every
    ``forward`` the real modules are in place, so ``self.config`` is the module's there.
    """

    __slots__ = ("__weakref__", "_origin", "_path", "_tree")

    _origin: Any
    _path: str
    _tree: BlockTree

    def __init__(self, origin: nn.Module, path: str, tree: BlockTree) -> None:
        for slot, value in (("_origin", origin), ("_path", path), ("_tree", tree)):
            object.__setattr__(self, slot, value)

    # `isinstance(block, nn.Linear)` asks for it, and is true.
    @property
    def __class__(self) -> type:
        return type(self._origin)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self._origin.__class__ = kind

    @property
    def origin(self) -> nn.Module:
        """The module itself."""
        module: nn.Module = self._origin
        return module

    @property
    def name(self) -> str:
        """The last component of the block's path."""
        return self._path.rpartition(".")[2]

    @property
    def name_prefix(self) -> str:
        """The path before the name, with a dot at its end if there is one."""
        return self._path.removesuffix(self.name)

    @property
    def config(self) -> BlockConfig:
        """The block's policy. Fields that it does not have are read from the module's ``config``."""
        return self._tree.config(self._origin, self._path)

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
        if not isinstance(value, MethodType) or value.__self__ is not self._origin:
            return self._tree.wrap(value) if isinstance(value, nn.Module) else value

        # A method such as `append` changes the tree, and takes and returns blocks in the place of modules.
        @wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            modules = list(self._origin.modules())
            result = value(*map(_unwrap_items, args), **{key: _unwrap_items(each) for key, each in kwargs.items()})
            if modules != list(self._origin.modules()):
                self._tree.mark_changed()
            return self._tree.wrap(result)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, nn.Module):
            check_attribute(self._path, self._origin, name)
        setattr(self._origin, name, unwrap(value))
        if isinstance(value, nn.Module):
            self._tree.mark_changed()

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            return self._tree.wrap(self._origin[key])
        start, stop = ("" if end is None else end for end in (key.start, key.stop))
        return BlockSlice(self._origin[key], f"{self._path}[{start}:{stop}]", self._tree)

    __delattr__ = _delegate(delattr, changes=True)
    __setitem__ = _delegate(operator.setitem, changes=True)
    __delitem__ = _delegate(operator.delitem, changes=True)
    __len__, __iter__, __contains__ = map(_delegate, (len, iter, operator.contains))
    __repr__, __copy__, __deepcopy__ = map(_delegate, (repr, copy.copy, copy.deepcopy))

    def __bool__(self) -> bool:
        return True  # by `__len__`, a block of an empty container would be false

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._origin.__reduce_ex__(protocol)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._origin), "config", "name", "name_prefix", "origin"})


@final
class GraphModule:
    """A block's policy in the style of OneFlow 0.9: ``block.to(GraphModule).activation_checkpointing = True``.

    That of a slice of blocks sets a field on each of them, and reads it as a list.
    """

    __slots__ = ("_block",)

    type = "MODULE"

    def __init__(self, block: Block) -> None:
        self._block: Block
        object.__setattr__(self, "_block", block)

    def set_stage(self, stage_id: int | None = None, placement: object = None) -> None:
        """Sets the pipeline stage."""
        for block in _blocks_of(self._block):
            block.config.set_stage(stage_id, placement)

    def __getattr__(self, name: str) -> Any:
        if name in ("name", "name_prefix"):
            return getattr(self._block, name)
        if name not in FIELDS:
            raise AttributeError(f"GraphModule has no attribute {name!r}")
        values = [getattr(block.config, name) for block in _blocks_of(self._block)]
        return values if type(self._block) is BlockSlice else values[0]

    def __setattr__(self, field: str, value: Any) -> None:
        for block in _blocks_of(self._block):
            setattr(block.config, field, value)

    def __repr__(self) -> str:
        return f"GraphModule({', '.join(block.config.describe() for block in _blocks_of(self._block))})"


def _blocks_of(block: Block) -> list[Block]:
    return list(block) if type(block) is BlockSlice else [block]


@final
class BlockSlice(Block):
    """Some consecutive blocks of a container. What is set on ``config`` is set on each of them."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The path of the container, and the slice."""
        return self._path

    @property
    def config(self) -> GraphModule:  # type: ignore[override]
        """The policies of all."""
        return GraphModule(self)

    def __repr__(self) -> str:
        return f"{self.name}: {self._origin!r}"


def unwrap(value: Any) -> Any:
    """Returns the module of a block, and everything else as it is."""
    return value.origin if type(value) in (Block, BlockSlice) else value


def _unwrap_items(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unwrap(module) for key, module in value.items()}
    return [unwrap(module) for module in value] if isinstance(value, (list, tuple)) else unwrap(value)
