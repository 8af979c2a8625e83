"""Runs a block on one slice of its input at a time, in forward and in backward, so that one slice's results are alive.

It saves most in a loss head with a large vocabulary, where the logits are the peak of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from graphckpt._compat import reduction_of
from graphckpt.engine.block import BlockContext
from graphckpt.engine.frame import Frame
from graphckpt.engine.objects import copy_objects, differs
from graphckpt.errors import ConfigError
from graphckpt.rules.base import Rule
from graphckpt.tree import build_value, flatten_call, flatten_value


@final
@dataclass(frozen=True)
class Tiles(Rule):
    """Splits the tensor arguments into slices along ``tile_dim`` and runs the block on each.

    It splits the first tensor argument and all others of the same size along ``tile_dim``, and passes the rest whole.
    Outputs that have the dimension are concatenated. Random ops draw per slice, and weight gradients are added slice by
    slice, so the result equals that of the plain step up to rounding, not in every bit.

    Args:
        num_tiles: How many slices.
        tile_dim: The dimension to split.
        reduce: How to reduce outputs without dimensions: ``"sum"`` for a loss that sums over the split dimension,
            ``"mean"`` for one that averages over it: slices weigh by their size, so labels that the loss ignores make
            it another mean; sum then, and divide outside of the block. With it, slices are taken without gradients too,
            as in evaluation.

    Raises:
        ConfigError: A setting is out of range; at the call: the outputs of the slices cannot be joined, or a loss of
            PyTorch has another reduction.
    """

    name: ClassVar[str] = "tiles"
    num_tiles: int = 8
    tile_dim: int = 0
    reduce: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_tiles, bool) or not isinstance(self.num_tiles, int) or self.num_tiles < 1:
            raise ConfigError(f"tiles: expected a positive int, got {self.num_tiles!r} · fix: use the number of slices")
        if isinstance(self.tile_dim, bool) or not isinstance(self.tile_dim, int):
            raise ConfigError(f"tiles: tile_dim: expected an int, got {self.tile_dim!r} · fix: use a dimension")
        if self.reduce not in (None, "sum", "mean"):
            raise ConfigError(
                f"tiles: reduce: expected 'sum', 'mean' or None, got {self.reduce!r} · fix: use one of these"
            )

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block slice by slice."""
        # Each slice has a frame of its own, so that backward recomputes one, goes through it and frees it before the
        # next: logits of 8192 tokens x 128 Ki entries are 4 GiB in float32, of which 8 slices have 512 MiB at a time.
        return self._in_slices(block.title, lambda *tile: Frame(block, function).run(*tile), args, kwargs, block.note)

    def run_without_gradients(
        self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a loss in slices, also in evaluation, since logits that do not fit in training do not fit there either.

        Others run as they are: a block may be generating text, with a cache that cannot be cut.
        """
        if self.reduce is None:
            return function(*args, **kwargs)
        return self._in_slices(block.title, lambda args, kwargs: function(*args, **kwargs), args, kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns why the block cannot be traced; without gradients, only losses are cut into slices."""
        return super().graph_break(has_gradients=has_gradients) if has_gradients or self.reduce else None

    @property
    def _least_dims(self) -> int:
        # Dimensions 1 and -2 exist in tensors of 2 dimensions or more.
        return self.tile_dim + 1 if self.tile_dim >= 0 else -self.tile_dim

    def _in_slices(
        self,
        name: str,
        run: Callable[[Any, dict[str, Any]], Any],
        args: Any,
        kwargs: dict[str, Any],
        note: Callable[[str], None] | None = None,
    ) -> Any:
        leaves, shape = flatten_call(args, kwargs)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
            if self.num_tiles == 1:
                return run(args, kwargs)
            what = "expected arguments that can be cut into slices, got a nested tensor"
            raise ConfigError(f"{name}: tiles: {what} · fix: use activation_checkpointing = True on this block")
        with_dim = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() >= self._least_dims
        ]
        size = leaves[with_dim[0]].shape[self.tile_dim] if with_dim else 0
        if not size:
            raise ConfigError(
                f"{name}: tiles: expected a tensor argument with a dimension {self.tile_dim} · fix: set tile_dim"
            )
        tiled = [i for i in with_dim if leaves[i].shape[self.tile_dim] == size]
        num_tiles = min(self.num_tiles, size)
        if num_tiles < self.num_tiles and note is not None:
            note(f"tiles: {num_tiles} slices in place of {self.num_tiles}, the size of dimension {self.tile_dim}")
        if num_tiles == 1:
            return run(args, kwargs)
        cuts = {i: torch.tensor_split(leaves[i], num_tiles, self.tile_dim) for i in tiled}
        outputs: Any = []
        sizes: list[int] = []
        # Such as a cache that each slice extends: slices 2 to n would attend to the keys of those before.
        shared = copy_objects(leaves)
        for number in range(num_tiles):
            slices = [cuts[i][number] if i in cuts else leaf for i, leaf in enumerate(leaves)]
            sizes.append(slices[tiled[0]].shape[self.tile_dim])
            outputs.append(run(*shape.assemble(slices)))
            if any(differs(owner, then) for owner, then in shared):  # the next slice would read what this one left
                raise ConfigError(
                    f"{name}: tiles: its forward changes an argument that all slices share, such as a cache of keys · "
                    "fix: call the model with use_cache=False, or use activation_checkpointing = True"
                )
        outputs, specs = zip(*map(flatten_value, outputs), strict=True)
        return build_value(specs[0], [self._join(name, each, sizes) for each in zip(*outputs, strict=True)])

    def _join(self, name: str, leaves: tuple[Any, ...], sizes: list[int]) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor):
            if any(leaf is not first and leaf != first for leaf in leaves):
                what = f"expected tensors or equal values from all tiles, got different {type(first).__name__}"
                raise ConfigError(f"{name}: {what} · fix: return tensors")
            return first
        if first.dim() == 0:
            if self.reduce is None:
                raise ConfigError(
                    f"{name}: tiles gave outputs without dimensions, and how to join them is not said · fix: use "
                    f"activation_checkpointing = Tiles({self.num_tiles}, reduce='sum') for a summed loss, 'mean' for a "
                    "mean"
                )
            actual = reduction_of(first)
            # With another reduction, loss and gradients would be too large or too small by about the number of slices.
            if actual not in (None, self.reduce):
                raise ConfigError(
                    f"{name}: tiles: reduce: expected {actual!r}, as its loss has reduction={actual!r}, got "
                    f"{self.reduce!r} · fix: Tiles({self.num_tiles}, reduce={actual!r})"
                )
            # 10 rows in slices of 4, 3 and 3: their means count 0.4, 0.3 and 0.3.
            if self.reduce == "mean":
                leaves = tuple(leaf * (size / sum(sizes)) for leaf, size in zip(leaves, sizes, strict=True))
            return torch.stack(leaves).sum()
        if any(leaf.dim() < self._least_dims for leaf in leaves) or any(
            leaf.shape[self.tile_dim] != size for leaf, size in zip(leaves, sizes, strict=True)
        ):
            raise ConfigError(
                f"{name}: a tile of {sizes[0]} along dimension {self.tile_dim} gave an output of shape "
                f"{list(first.shape)}, which cannot be joined · fix: tile a block that keeps this dimension"
            )
        return torch.cat(leaves, self.tile_dim)
