"""Names and colours of blocks in a plot, with the layers of a stack together. Knows no plotting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_MAX_NAMES = 12  # colours that are easy to distinguish
_OUTSIDE = "outside of blocks"
_OTHER = "other blocks"
_GREYS = {_OUTSIDE: "#c9ced6", _OTHER: "#98a1ae"}
_COLOURS = (
    "#4c78a8", "#f2922f", "#58a55c", "#d9576a", "#4fb3b0", "#a06fb0",
    "#e3bf3a", "#a5744f", "#6b7fd7", "#cf6fa5", "#86a83b", "#3d8fc4",
)  # fmt: skip
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path's component that is a number


def legend_names(blocks: Iterable[str]) -> dict[str, str]:
    """Returns the name of each block in the legend, at most 12 names in all.

    ``blocks`` names the running block of each step, so that the blocks that run longest keep their names.
    A few blocks have their own names, layers of a stack share one, and the rest are "other blocks".

    >>> names = legend_names([f"h.{layer}.{part}" for layer in range(24) for part in ("attn", "mlp")])
    >>> names["h.7.attn"], len(set(names.values()))
    ('h.0-23.attn', 2)
    """
    steps_of = Counter(blocks)
    for shorten in (str, _any_number, _up_to_number):
        stacks = {block: shorten(block) for block in steps_of}
        if len(set(stacks.values())) <= _MAX_NAMES:
            break
    steps_of_stack = Counter[str]()
    for block, stack in stacks.items():
        steps_of_stack[stack] += steps_of[block]
    num_named = _MAX_NAMES if len(steps_of_stack) <= _MAX_NAMES else _MAX_NAMES - 1
    keep = [stack for stack, _ in steps_of_stack.most_common(num_named)]
    names = {stack: _stack_name(stack, [block for block in stacks if stacks[block] == stack]) for stack in keep}
    return {block: names.get(stack, _OTHER) for block, stack in stacks.items()}


def _any_number(block: str) -> str:
    return _NUMBER.sub("*", block)


def _up_to_number(block: str) -> str:
    """Returns the stack of a block: ``h.3.mlp`` is part of ``h.*``.

    >>> _up_to_number("h.3.mlp"), _up_to_number("embed.norm")
    ('h.*', 'embed')
    """
    stack, star, _ = _any_number(block).partition("*")
    return stack + star if star else block.partition(".")[0]


def _stack_name(stack: str, blocks: Sequence[str]) -> str:
    """Replaces the star by the range of the first number.

    >>> _stack_name("h.*.mlp", ["h.0.mlp", "h.1.mlp"]), _stack_name("", [""])
    ('h.0-1.mlp', 'outside of blocks')
    """
    if "*" not in stack:
        return stack or _OUTSIDE
    numbers = [int(found.group()) for block in blocks if (found := _NUMBER.search(block))]
    return stack.replace("*", f"{min(numbers)}-{max(numbers)}" if len(numbers) > 1 else str(numbers[0]), 1)


def shades(names: dict[str, str]) -> dict[str, tuple[float, float, float]]:
    """Returns the colour of each block: that of its legend name, light in the first layer and dark in the last."""
    own = [name for name in dict.fromkeys(names.values()) if name not in _GREYS]
    colour_of = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(own)} | _GREYS
    layers_of: dict[str, set[int]] = {name: set() for name in names.values()}
    for block, name in names.items():
        layers_of[name].add(_layer(block))
    shade_of = {}
    for block, name in names.items():
        layers = sorted(layers_of[name])
        is_stack = len(layers) > 1 and name not in _GREYS
        light = 0.5 * (1 - layers.index(_layer(block)) / (len(layers) - 1)) if is_stack else 0.0
        channels = (value / 255 for value in bytes.fromhex(colour_of[name][1:]))
        red, green, blue = (value + (1 - value) * light for value in channels)
        shade_of[block] = (red, green, blue)
    return shade_of


def _layer(block: str) -> int:
    found = _NUMBER.search(block)
    return int(found.group()) if found else -1
