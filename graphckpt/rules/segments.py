"""Cuts a container into runs of children, keeps the inputs of the runs, and runs one of them again at a time.

::

    "sqrt", 9 children   [0 1 2] [3 4 5]  6 7 8      the last run is kept whole: backward needs it at once
    "log",  8 children   [[0 1] [2] 3] [[4] 5] [6] 7    halves of halves: a bracket runs again when backward gets there
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, final

from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.rules.base import Rule
from graphckpt.rules.engine.frame import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphckpt.rules.engine.context import BlockContext


Wrap: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


@final
@dataclass(frozen=True)
class Segments(Rule):
    """Recomputes the children of an ``nn.Sequential`` run by run.

    Args:
        runs: The number of runs; ``"sqrt"`` for about as many runs as each has children (least memory with one second
            run of each child: Chen et al. 2016, arXiv:1604.06174); ``"log"`` for halves of halves (O(log n) memory,
            O(n log n) time).

    Raises:
        ConfigError: ``runs`` is neither a positive integer nor one of these words.
    """

    name: ClassVar[str] = "segments"
    runs: int | str = "sqrt"

    def __post_init__(self) -> None:
        is_number = isinstance(self.runs, int) and not isinstance(self.runs, bool) and self.runs > 0
        if not is_number and self.runs not in ("sqrt", "log"):
            raise ConfigError(
                f"segments: {self.runs!r} is no number of runs · fix: use a positive int, 'sqrt' or 'log'"
            )

    def check(self, module: nn.Module) -> str | None:
        """Only a plain ``nn.Sequential`` is known to call its children in order."""
        if type(module).forward is not nn.Sequential.forward:
            return (
                f"segments needs a container that calls its children in order, and {type(module).__name__} is none · "
                "fix: set it on an nn.Sequential, or use activation_checkpointing = True on the layers"
            )
        if isinstance(self.runs, int) and self.runs > len(module):  # type: ignore[arg-type]
            return f"segments = {self.runs} is more than its {len(module)} children · fix: use 'sqrt'"  # type: ignore[arg-type]
        return None

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the container; ``function`` is its bound forward."""
        children = list(function.__self__)  # type: ignore[attr-defined]
        if kwargs or len(args) != 1:
            return function(*args, **kwargs)  # raises what nn.Sequential raises
        return run_segments(block, children, self.runs, args[0], wrap=getattr(function, "wrap", _as_it_is))


def run_segments(
    block: BlockContext, children: Sequence[Callable[..., Any]], runs: int | str, value: Any, *, wrap: Wrap = _as_it_is
) -> Any:
    """Passes ``value`` through ``children``, all but the last run of them under recompute.

    Every call of children goes through ``wrap``, which returns what to call in its place.
    """
    if runs == "log":
        return _run_halves(block, children, wrap, 0, len(children), value)
    starts = (*run_starts(num_children=len(children), runs=runs), len(children))
    for first, end in pairwise(starts):
        if end == len(children):
            return wrap(_call_in_order)(children[first:end], value)
        value = _frame(block, children, first, end, wrap(partial(_call_in_order, children[first:end])), value)
    return value


def run_starts(*, num_children: int, runs: int | str) -> tuple[int, ...]:
    """Cuts a chain of children into runs of nearly equal length.

    SavedTensor at once: one input per run and one run in full, so the peak is least near ``sqrt(num_children)`` runs
    (Chen et al. 2016, arXiv:1604.06174).

    >>> run_starts(num_children=10, runs=3)
    (0, 3, 6)
    >>> run_starts(num_children=10, runs="sqrt")
    (0, 3, 6)
    """
    count = max(1, math.isqrt(num_children)) if runs == "sqrt" else min(int(runs), max(1, num_children))
    return tuple(number * num_children // count for number in range(count))


def _run_halves(
    block: BlockContext, children: Sequence[Callable[..., Any]], wrap: Wrap, first: int, end: int, value: Any
) -> Any:
    while end - first > 1:
        middle = (first + end) // 2
        halves = wrap(partial(_run_halves, block, children, wrap, first, middle))
        value = _frame(block, children, first, middle, halves, value)
        first = middle
    return wrap(_call_in_order)(children[first:end], value)


def _frame(
    block: BlockContext,
    children: Sequence[Callable[..., Any]],
    first: int,
    end: int,
    function: Callable[[Any], Any],
    value: Any,
) -> Any:
    return Frame(block.part((first, end), children[first:end]), function).run((value,), {})


def _call_in_order(children: Sequence[Callable[..., Any]], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
