"""Predicts the live bytes of a recorded step if some of its blocks kept everything. Integers only, no torch.

::

    recorded      |--forward--|                |--recomputation--|--backward--|
    saved tensor   =====                         ==========================      two storages: one each
    kept           =====================================================        the first lives on, the second never is

While the recorded step discards a tensor that the plain step would save, autograd holds a placeholder in its place. So
the placeholder's end is the end of the tensor in the plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(slots=True)
class Hold:
    """Something that holds a storage for backward."""

    block: str | None
    """The block; ``None`` if no policy changes what it saves."""
    end: int | None = None
    """The number of changes by then; ``None`` if it outlives the step."""
    begin: int = 0
    """The number of changes when it began."""
    saved_by: str | None = None
    """The block that really saves the tensor; ``None`` for what the plain step alone would save."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What allocated a storage, for people to read."""

    block: str
    phase: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    source: str


@dataclass(slots=True)
class StorageLife:
    """A storage, from its allocation to its end, in numbers of changes since the step began."""

    begin: int
    num_bytes: int
    recomputed_by: str | None = None
    """The outermost block in whose recomputation it was allocated."""
    end: int | None = None
    last_use: int = 0
    """By an op that is not a recomputed one."""
    is_resized: bool = False
    """Whether it ended because its size changed, so that nothing could have held it."""
    saved: list[Hold] = field(default_factory=list)
    """What holds it in the plain step."""
    kept: list[Hold] = field(default_factory=list)
    """The blocks that keep it for a recomputation."""
    origin: Origin | None = None
    """What allocated it; ``None`` until a tensor is seen that uses it."""
    kind: str = ""
    """See :attr:`graphckpt.ledger.record.TensorLife.kind`."""
    is_old: bool = False
    """Whether it existed before the step."""


def levels_if_kept(lives: Iterable[StorageLife], num_changes: int, is_kept: Callable[[str], bool]) -> list[int]:
    """Returns the live bytes after each change of the step if the blocks in ``is_kept`` kept everything.

    >>> first = StorageLife(0, 8, end=1, saved=[Hold("h.0", end=3)])
    >>> again = StorageLife(2, 8, recomputed_by="h.0", end=3)
    >>> levels_if_kept([first, again], 4, lambda block: False), levels_if_kept([first, again], 4, lambda block: True)
    ([8, 0, 8, 0], [8, 8, 8, 0])
    """
    changes = [0] * (num_changes + 1)
    for life in lives:
        if life.recomputed_by is None or not is_kept(life.recomputed_by):
            changes[min(life.begin, num_changes)] += life.num_bytes
            changes[min(_end(life, is_kept, num_changes), num_changes)] -= life.num_bytes
    return list(accumulate(changes))[:num_changes]


def _end(life: StorageLife, is_kept: Callable[[str], bool], num_changes: int) -> int:
    """Returns the end of a storage if the blocks in ``is_kept`` kept everything."""

    def ends(holds: Iterable[Hold]) -> list[int]:
        return [num_changes if hold.end is None else hold.end for hold in holds]

    def is_changed(hold: Hold) -> bool:
        return hold.block is not None and is_kept(hold.block)

    end = num_changes if life.end is None else life.end
    if life.is_resized:
        return end
    dropped = [hold for hold in life.kept if is_changed(hold)]
    if dropped and end <= max(ends(dropped)):  # only for the recomputation was it alive that long
        others = [hold for hold in life.kept if not is_changed(hold)]
        real = [hold for hold in life.saved if hold.block is None]
        end = max([life.last_use + 1, *ends(others), *ends(real)])
    return max([end, *ends(hold for hold in life.saved if is_changed(hold))])
