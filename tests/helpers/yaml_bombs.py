"""YAML whose aliases have no end, or make a small text huge: shared by the tests of what reads YAML. Not a test."""

from __future__ import annotations


def _many() -> str:
    """Returns 9 ** 5 values: more than the limit, and few enough that a reader without one ends."""
    levels = [f"l{n}: &l{n} {{{', '.join(f'k{key}: *l{n - 1}' for key in range(9))}}}" for n in range(1, 6)]
    return "\n".join(["l0: &l0 {a: True}", *levels])


BOMBS = {
    "a mapping in itself": (
        "a: &a\n  b: {c: *a}\n",
        "expected an alias outside of its anchor, got one inside of it, in line 1",
    ),
    "a list in itself": (
        "a: 1\nb: &b [*b]\n",
        "expected an alias outside of its anchor, got one inside of it, in line 2",
    ),
    "a mapping merged into itself": (
        "a: &a {<<: *a, c: True}\n",
        "expected an alias outside of its anchor, got one inside of it, in line 1",
    ),
    "many": (_many(), "expected 10,000 values at most, got 282,"),
    "deep": ("a: " + "[" * 5000 + "]" * 5000, "expected less nesting: it is too deep to be read"),
}
"""By name: the text, and what the error says."""
