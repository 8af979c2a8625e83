"""Chooses the calls that the value check compares, by the setting ``determinism_check``; by default, one in 64.

::

    calls of a block    0 1 2 3 4 ... 17 ... 81 ... 145 ...
    checked             x x x         x      x      x           one in 64 after the first three

A call that begins while bytes or times are measured is neither checked nor counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, final

from graphckpt.errors import ConfigError, did_you_mean, shown
from graphckpt.undo import Undo, enter, scope

CHECKS = ("none", "default", "values")
"""The values of ``determinism_check``."""


def parse_determinism_check(value: Any) -> str:
    if not isinstance(value, str) or value not in CHECKS:
        hint = did_you_mean(value, CHECKS) if isinstance(value, str) else ""
        what = f"expected 'none', 'default' or 'values', got {shown(value)}"
        fix = "use 'values' to compare the values of every call, 'default' for those of some, 'none' for none"
        raise ConfigError(f"determinism_check: {what}{hint} · fix: {fix}")
    return str(value)


_FIRST = 3  # the learning call, and two that use what it has taught
PERIOD = 64
"""Of the calls after them, one in so many is checked."""


@final
class CallSampler:
    """Chooses the calls whose values are checked by default, of one block or of a function that has no block.

    All ranks must choose the same call, since one that raises alone leaves the others in a collective: neither a
    random number nor a string's ``hash`` decides. Blocks take turns, so that no step pays for all of them.
    """

    __slots__ = ("_end", "_is_of_block", "_live_bytes", "_turn", "due", "has_warned", "num_bytes", "number")

    def __init__(self, name: str, *, is_of_block: bool = True) -> None:
        self._is_of_block = is_of_block  # otherwise each call is a learning call
        self.number = 0
        """Of the next call. The engine counts those before ``due`` itself, as it does in nearly all calls."""
        self.due = 0
        """The number of the next call that is checked, as far as is known."""
        self._end = _FIRST  # of the calls that are checked one after the other
        self._turn = zlib.crc32(name.encode()) % PERIOD
        self.has_warned = False
        self._live_bytes = 0
        self.num_bytes = 0
        """The most that the sketches have taken at a time: a block may be called several times in a step."""

    def is_due(self, *, is_learning: bool) -> bool:
        """Counts a call, and returns whether its values are checked."""
        # A turn is a remainder: with the turn 17, the calls 17, 81, 145 are checked, and after call 20 the next one is
        # due at 21 + (17 - 21) % 64 = 81.
        number = self.number
        after = self.number = number + 1
        if is_learning and self._is_of_block:
            self._end = number + _FIRST
        self.due = after if after < self._end else after + (self._turn - after) % PERIOD
        return number < self._end or number % PERIOD == self._turn

    def count_bytes(self, num_bytes: int) -> None:
        """Counts the sketches of one more call, or, if negative, of one less."""
        self._live_bytes += num_bytes
        self.num_bytes = max(self.num_bytes, self._live_bytes)


class ForcedCheck(NamedTuple):
    """What is compared whatever the blocks' ``determinism_check`` says, and without a count of their calls."""

    determinism_check: str
    differences: list[str]
    """Messages about differences that a device reports when the backward is over."""


forced_check: ContextVar[ForcedCheck | None] = ContextVar("forced_check", default=None)


@scope
def forcing_check(undo: Undo, determinism_check: str) -> Iterator[ForcedCheck]:
    """Has each call that begins in this context be checked by ``determinism_check``, ``"none"`` or ``"values"``."""
    forced = ForcedCheck(determinism_check, [])
    undo.append((forced_check.set, (forced_check.get(),)))
    forced_check.set(forced)
    yield forced


@scope
def without_value_checks(undo: Undo) -> Iterator[None]:
    """Checks and counts no call that begins in this context: bytes and times are measured in it."""
    enter(undo, forcing_check("none"))
    yield
