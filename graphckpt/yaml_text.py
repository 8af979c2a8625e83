"""Parses YAML that users write, and refuses aliases by which a small file would become a huge or an endless one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphckpt.extras import LazyPackage

if TYPE_CHECKING:
    import yaml
else:
    yaml = LazyPackage("yaml", "plan")

_MOST = 10_000  # values, which take OmegaConf a second; above that, aliases may make ten of each


def compose(text: str) -> yaml.Node | None:
    """Parses a YAML document into its nodes.

    Raises:
        YAMLError: It is not YAML, or it is nested too deeply; an alias refers to a node that contains it, or aliases
            multiply the values.
    """
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise yaml.YAMLError("expected less nesting: it is too deep to be read") from None
    counts: dict[int, int] = {}
    num_values = _count(node, counts) if node is not None else 0
    if num_values > max(_MOST, 10 * len(counts)):
        raise yaml.YAMLError(f"expected {_MOST:,} values at most, got {num_values:,} by aliases of aliases")
    return node


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Returns the number of values below a node, those of an alias each time that it is used."""
    # Of `a: &a [x, x]`, `b: &b [*a, *a]`, `c: [*b, *b]` they are 3, 7 and 15, each list with itself. Each node is
    # counted once, which takes as long as the file is, and not as long as what it stands for. A count of 0 is of a node
    # that is being counted.
    key = id(node)
    if counts.get(key) == 0:
        line = node.start_mark.line + 1
        raise yaml.YAMLError(f"expected an alias outside of its anchor, got one inside of it, in line {line}")
    if key not in counts:
        counts[key] = 0
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        items = node.value if isinstance(node, yaml.SequenceNode) else [one for pair in pairs for one in pair]
        counts[key] = 1 + sum(_count(item, counts) for item in items)
    return counts[key]
