"""Splits the live bytes at the peak of a step by kind, block and tensor. Knows the record only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

from graphckpt.ledger.record import StepRecord, TensorLife

_MAX_BLOCKS = 24  # of a kind; more would be too small to read, and would make the page slow
_MAX_TENSORS = 4  # of a block
_OUTSIDE = "outside of blocks"
KINDS = ("weights", "gradients", "optimizer states", "inputs", "saved by blocks", "recomputed", "transient")
"""The kinds of tensors, in the order in which they are shown."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A part of the peak; the parts below it sum to its bytes."""

    name: str
    num_bytes: int
    parts: tuple[Part, ...] = ()
    tensor: TensorLife | None = None
    """The tensor, if it is a single one."""


def peak_index(explanation: StepRecord) -> int:
    """Returns the index of the event with the highest level."""
    levels = [event.live_bytes for event in explanation.timeline]
    return levels.index(max(levels))


def kind_of(life: TensorLife, at: int) -> str:
    """Returns the kind of a tensor after event ``at``, one of :data:`KINDS`."""
    if life.kind:
        return life.kind
    if life.is_saved(at):
        return "saved by blocks"
    return "recomputed" if life.recomputed_by else "transient"


def composition(explanation: StepRecord) -> Part:
    """Returns the peak as kinds, their blocks and the largest tensors of those, each with its exact bytes.

    >>> from graphckpt.ledger.record import Event
    >>> lives = (TensorLife(num_bytes=3, begin=0, end=None, kind="weights"), TensorLife(num_bytes=2, begin=1, end=2))
    >>> levels = (Event(3, "", "forward"), Event(5, "", "forward"), Event(3, "", "forward"))
    >>> whole = composition(
    ...     StepRecord(title="Net", rows=(), bytes_before=0, bytes_after=0, timeline=levels, tensors=lives)
    ... )
    >>> whole.num_bytes, [(part.name, part.num_bytes) for part in whole.parts]
    (5, [('weights', 3), ('transient', 2)])
    """
    at = peak_index(explanation)
    groups: dict[str, dict[str, list[TensorLife]]] = {kind: defaultdict(list) for kind in KINDS}
    for life in explanation.tensors:
        if life.is_alive(at):
            kind = kind_of(life, at)
            groups[kind][_block_of(life, kind)].append(life)
    kinds = (
        _sum(kind, _largest((_sum(block, _tensors(lives)) for block, lives in blocks.items()), _MAX_BLOCKS, "blocks"))
        for kind, blocks in groups.items()
        if blocks
    )
    return _sum("peak", kinds)


def _block_of(life: TensorLife, kind: str) -> str:
    block = {"saved by blocks": life.saved_by, "recomputed": life.recomputed_by}.get(kind, life.block)
    return block or _OUTSIDE


def _tensors(lives: Iterable[TensorLife]) -> Iterator[Part]:
    parts = (Part(tensor_name(life), life.num_bytes, tensor=life) for life in lives)
    return _largest(parts, _MAX_TENSORS, "tensors")


def tensor_name(life: TensorLife) -> str:
    """Returns shape and type of a tensor.

    >>> tensor_name(TensorLife(num_bytes=24, begin=0, end=None, shape=(2, 3), dtype="float32"))
    'float32[2, 3]'
    """
    return f"{life.dtype}[{', '.join(map(str, life.shape))}]"


def _largest(parts: Iterable[Part], most: int, what: str) -> Iterator[Part]:
    """Yields the largest parts, and the sum of all others."""
    ordered = sorted(parts, key=lambda part: -part.num_bytes)
    yield from ordered[:most]
    others = ordered[most:]
    if others:
        yield Part(f"{len(others)} other {what}", sum(part.num_bytes for part in others))


def _sum(name: str, parts: Iterable[Part]) -> Part:
    listed = tuple(parts)
    return Part(name, sum(part.num_bytes for part in listed), listed)
