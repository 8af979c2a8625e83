"""Finds room in host memory for what one step moves there: piece by piece at first, then in one slab."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from graphckpt._compat import unseen_by_modes
from graphckpt.errors import StoreError
from graphckpt.stores.slab.slab_plan import SlabPlan
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    import torch

    from graphckpt.stores.host.copy_engine import Copies, HostBuffer

_log = logging.getLogger("graphckpt")

_MOST_RANGES = 10_000  # of a slab that are held as tensors


@final
class Spot:
    """Bytes of host memory that are in use."""

    __slots__ = ("flat", "number", "piece")

    def __init__(self, number: int, flat: torch.Tensor, piece: HostBuffer | None) -> None:
        self.number = number
        self.flat = flat
        self.piece = piece
        """The buffer that it is, if it lies in no slab."""


# Note [What a graph has captured stays]
# A captured graph copies to the addresses of its capture whenever it is replayed. So a buffer that was in use in a
# capture is never given back before the end, and nothing is pinned in one: CUDA forbids that. Eager steps and graphs
# share the slab: a whole step leaves nothing in it, so they may alternate, but a replay must not come between an eager
# forward and its backward.

# Note [What exists only in a capture stays on the device]
# The slab is exactly as big as the steps before the capture needed. Transformers makes attention masks in a capture
# that those steps did not have, since it may not look there whether they are needed. Such a tensor takes no room in the
# slab, for it would push out a block that is planned to come later: it is not moved.


@final
class HostMemory:
    """The slab, and the pieces of steps that it does not fit.

    The first step takes buffers one by one. From what it took and gave back, the second gets one slab of exactly the
    size it needs. A step that is like no other before looks for gaps in the slab, and takes single buffers again where
    there are none; if it took any, the slab is planned anew when the step is over.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._plan = SlabPlan()
        self._slab: HostBuffer | None = None
        self._ranges: dict[tuple[int, int], torch.Tensor] = {}  # of the slab, by begin and size: most are used again
        self._pieces: list[HostBuffer] = []
        self._spare: dict[int, list[HostBuffer]] = {}  # pieces that are free, by size
        self._captured: list[HostBuffer] = []
        self._refused = 0  # size of a slab that there was no memory for

    @property
    def slab_bytes(self) -> int:
        """Size of the slab; 0 before the second step."""
        return 0 if self._slab is None else self._slab.flat.numel()

    @property
    def num_bytes(self) -> int:
        """All host memory that is held."""
        return self.slab_bytes + sum(buffer.flat.numel() for buffer in (*self._pieces, *self._captured))

    def put(self, num_bytes: int, block: str) -> Spot | None:
        """Returns room for ``num_bytes`` kept by ``block``; ``None`` in a capture for what no step before it moved.

        Raises:
            StoreError: There is no host memory, or a capture is the first step.
        """
        is_captured = self._copies.is_capturing()
        if is_captured and self._plan.is_extra(num_bytes):
            return None  # see Note [What exists only in a capture stays on the device]
        slab = self._slab
        number, begin = self._plan.put(num_bytes, self.slab_bytes)
        if slab is not None and begin is None:
            begin = self._plan.put_in_gap(number, num_bytes, self.slab_bytes)
        if slab is not None and begin is not None:
            slab.is_captured |= is_captured
            return Spot(number, self._range(slab, begin, num_bytes), None)
        try:
            piece = self._piece(num_bytes, is_captured, block)
        except BaseException:
            self._plan.free(number)
            raise
        if piece is None:
            self._plan.free(number)
            return None
        piece.is_captured |= is_captured
        return Spot(number, piece.flat, piece)

    def free(self, spot: Spot) -> None:
        """Gives the room back. All copies to and from it have been joined."""
        self._plan.free(spot.number)
        if spot.piece is not None:
            self._spare.setdefault(spot.flat.numel(), []).append(spot.piece)

    def begin_step(self) -> None:
        """Makes the slab, or a bigger one, if the last step did not find room in it. Nothing is in use."""
        self._plan.begin_step()
        if self._copies.is_capturing():
            return  # see Note [What a graph has captured stays]; the pieces are still there
        wanted = self._plan.num_bytes
        grows = wanted > self.slab_bytes and not 0 < self._refused <= wanted
        if not grows and (not self._pieces or self._refused):
            return
        self._copies.finish()
        self._give_back(self._pieces)
        self._pieces, self._spare = [], {}
        if grows:
            self._grow(wanted)

    def release(self) -> None:
        """Gives all of it back. Nothing is in use, and no graph that was captured will be replayed."""
        for buffer in (*self._pieces, *self._captured, *([] if self._slab is None else [self._slab])):
            buffer.release()
        self._slab, self._pieces, self._captured, self._spare, self._ranges = None, [], [], {}, {}
        self._plan = SlabPlan()

    def _grow(self, num_bytes: int) -> None:
        old = self.slab_bytes
        if self._slab is not None:
            self._ranges.clear()
            self._give_back([self._slab])  # the old one goes before the new one comes
            self._slab = None
        try:
            self._slab = self._copies.buffer(num_bytes)
        except (MemoryError, RuntimeError) as error:
            self._refused = num_bytes  # single buffers may still fit; if not, `put` can say which block wanted them
            _log.warning("offload: no %s of host memory in one piece: %s", format_bytes(num_bytes), error)
            return
        if old:
            _log.info(
                "offload: the slab in host memory grows from %s to %s", format_bytes(old), format_bytes(num_bytes)
            )
        else:
            _log.info("offload: a slab of %s in host memory", format_bytes(num_bytes))

    def _give_back(self, buffers: list[HostBuffer]) -> None:
        for buffer in buffers:
            if buffer.is_captured:
                self._captured.append(buffer)
            else:
                buffer.release()

    def _piece(self, num_bytes: int, is_captured: bool, block: str) -> HostBuffer | None:
        spare = self._spare.get(num_bytes)
        if spare:
            return spare.pop()
        if is_captured and self.num_bytes:
            return None
        if is_captured:
            raise StoreError(
                f"{block}: offload: expected a step before the capture, for host memory cannot be pinned in one, got "
                "none · fix: run two steps of the same shapes before it"
            )
        try:
            piece = self._copies.buffer(num_bytes)
        except (MemoryError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise StoreError(
                f"{block}: offload: {format_bytes(num_bytes)} of host memory cannot be had, beside the "
                f"{format_bytes(self.num_bytes)} that offload holds ({reason}) "
                "· fix: offload fewer blocks, set activation_checkpointing as well, or offload = 'disk'"
            ) from error
        self._pieces.append(piece)
        return piece

    def _range(self, slab: HostBuffer, begin: int, num_bytes: int) -> torch.Tensor:
        found = self._ranges.get((begin, num_bytes))
        if found is None:
            if len(self._ranges) >= _MOST_RANGES:
                self._ranges.clear()
            with unseen_by_modes():
                found = self._ranges[begin, num_bytes] = slab.flat[begin : begin + num_bytes]
        return found
