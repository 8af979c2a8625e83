"""Splits a container into segments, keeps the inputs of the segments, and recomputes one segment at a time.

::

    "sqrt", 9 children   [0 1 2] [3 4 5]  6 7 8      the last segment is kept: backward needs it first
    "log",  8 children   [[[0] 1] [2] 3] [[4] 5] [6] 7    halves of halves: a bracket is recomputed when needed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from graphckpt.engine.block import BlockContext
from graphckpt.engine.excluded import run_kept_part
from graphckpt.engine.frame import Frame
from graphckpt.errors import ConfigError
from graphckpt.rules.base import Rule
from graphckpt.rules.in_graph import checkpoint_in_graph, contexts_of_full

Wrap: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"
"""Returns the function to call in place of a child or a segment, such as one with the layers' own checkpointing off."""


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


@final
@dataclass(frozen=True)
class Segments(Rule):
    """Recomputes the children of an ``nn.Sequential`` segment by segment.

    Args:
        num_segments: The number of segments; ``"sqrt"`` for about as many as each has children (least memory with one
            recomputation of each child: Chen et al. 2016, arXiv:1604.06174); ``"log"`` for halves of halves (O(log n)
            memory, O(n log n) time).

    Raises:
        ConfigError: ``num_segments`` is neither a positive int nor one of these strings.
    """

    name: ClassVar[str] = "segments"
    num_segments: int | str = "sqrt"

    def __post_init__(self) -> None:
        is_number = isinstance(self.num_segments, int) and not isinstance(self.num_segments, bool)
        if not (is_number and self.num_segments > 0) and self.num_segments not in ("sqrt", "log"):  # type: ignore[operator]
            raise ConfigError(
                f"segments: expected a positive int, 'sqrt' or 'log', got {self.num_segments!r} · fix: use one of these"
            )

    def check(self, module: nn.Module) -> str | None:
        """Rejects modules that are not known to call their children in order."""
        if type(module).forward is not nn.Sequential.forward:
            return (
                f"segments: expected an nn.Sequential, got {type(module).__name__} · "
                "fix: set it on an nn.Sequential, or use activation_checkpointing = True on the layers"
            )
        if isinstance(self.num_segments, int) and self.num_segments > len(module):  # type: ignore[arg-type]
            return (
                f"segments: expected at most {len(module)} for its children, got {self.num_segments} · fix: use 'sqrt'"  # type: ignore[arg-type]
            )
        return None

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the container; ``function`` is its bound forward."""
        children = list(function.__self__)  # type: ignore[attr-defined]
        if kwargs or len(args) != 1:
            return function(*args, **kwargs)  # raises what nn.Sequential raises
        with block.run_in_record():
            # `function` itself is not called. What it does around forward, the method `wrap` that it may have repeats
            # around each part: see `_Suspended` in graphckpt/blocks/forward.py.
            return run_segments(block, children, self.num_segments, args[0], wrap=getattr(function, "wrap", _as_it_is))

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Returns ``None``, except for ``"log"``, whose segments lie within one another."""
        return "segments='log' cannot be traced" if has_gradients and self.num_segments == "log" else None

    def run_in_graph(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs each segment but the last under PyTorch's checkpoint."""
        if kwargs or len(args) != 1:
            return function(*args, **kwargs)
        return run_segments_in_graph(list(module.children()), self.num_segments, args[0], contexts_of_full(function))


def run_segments(
    block: BlockContext,
    children: Sequence[Callable[..., Any]],
    num_segments: int | str,
    value: Any,
    *,
    wrap: Wrap = _as_it_is,
    determinism_check: str | None = None,
) -> Any:
    """Passes ``value`` through ``children``, and recomputes all but the last segment in backward.

    Every call of children goes through ``wrap``, which returns what to call in its place. ``determinism_check`` is that
    of this call; ``None`` for that of the block.
    """
    chain = _Chain(block, children, wrap, determinism_check)
    if num_segments == "log":
        return chain.run_halves(0, len(children), value)
    starts = segment_starts(num_children=len(children), num_segments=num_segments)
    for first, end in pairwise(starts):
        value = chain.recompute(first, end, partial(_call_in_order, children[first:end]), value)
    for child in children[starts[-1] :]:  # a call with all of them would keep its argument alive
        value = run_kept_part(block, wrap(child), value)
    return value


class _Chain(NamedTuple):
    block: BlockContext
    children: Sequence[Callable[..., Any]]
    wrap: Wrap
    determinism_check: str | None

    def recompute(self, first: int, end: int, function: Callable[[Any], Any], value: Any) -> Any:
        block = self.block.part((first, end), self.children[first:end])
        return Frame(block, self.wrap(function), determinism_check=self.determinism_check).run((value,), {})

    def run_halves(self, first: int, end: int, value: Any) -> Any:
        # Each half runs this for its children, as frames within its frame: forward does not keep their inputs, the
        # recomputation of the half does. See Note [Blocks within blocks] in graphckpt/engine/frame.py. With 8 children
        # these are called, where a comma ends a recomputation:
        #
        #     forward 0 1 2 3 4 5 6 7    backward 6, 4 5, 4, 0 1 2 3, 2, 0 1, 0
        while end - first > 1:
            middle = (first + end) // 2
            value = self.recompute(first, middle, partial(self.run_halves, first, middle), value)
            first = middle
        return run_kept_part(self.block, self.wrap(self.children[first]), value)


def run_segments_in_graph(
    children: Sequence[Callable[..., Any]],
    num_segments: int | str,
    value: Any,
    context_fn: Callable[[], Any] = noop_context_fn,
) -> Any:
    """Runs segments as :func:`run_segments` does, while ``torch.compile`` traces them."""
    starts = segment_starts(num_children=len(children), num_segments=num_segments)
    for first, end in pairwise(starts):
        value = checkpoint_in_graph(_call_in_order, (children[first:end], value), {}, context_fn)
    return _call_in_order(children[starts[-1] :], value)


def segment_starts(*, num_children: int, num_segments: int | str) -> tuple[int, ...]:
    """Splits a chain of children into segments of nearly equal length.

    Saved at once are the input of each segment and all tensors of one segment, so the peak is least near
    ``sqrt(num_children)`` segments (Chen et al. 2016, arXiv:1604.06174).

    Returns:
        The position of the first child of each segment.

    >>> segment_starts(num_children=10, num_segments=3)
    (0, 3, 6)
    >>> segment_starts(num_children=10, num_segments="sqrt")
    (0, 3, 6)
    """
    count = max(1, math.isqrt(num_children)) if num_segments == "sqrt" else min(int(num_segments), max(1, num_children))
    return tuple(number * num_children // count for number in range(count))


def _call_in_order(children: Sequence[Callable[..., Any]], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
