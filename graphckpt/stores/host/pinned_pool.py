"""Allocates pinned host memory for one step: buffer by buffer at first, then in one slab."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from graphckpt._compat import unseen_by_modes
from graphckpt.errors import StoreError
from graphckpt.stores.slab.slab_plan import SlabPlan
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    import torch

    from graphckpt.stores.host.copy_engine import CopyEngine, HostBuffer

_log = logging.getLogger("graphckpt")

_MOST_RANGES = 10_000  # of the slab that are held as tensors


@final
class PinnedBlock:
    """Bytes of host memory that are in use."""

    __slots__ = ("buffer", "flat", "number")

    def __init__(self, number: int, flat: torch.Tensor, buffer: HostBuffer | None) -> None:
        self.number = number
        self.flat = flat
        self.buffer = buffer
        """Its own buffer, if it is not in the slab."""


# Note [Captured buffers are not released]
# A captured graph copies to the addresses of its capture at every replay. So a buffer that was used in a capture is not
# released before the end, and nothing is pinned in a capture: CUDA forbids that. Eager steps and graphs share the slab:
# a whole step leaves nothing in it, so they may alternate, but a replay must not come between an eager forward and its
# backward.

# Note [Tensors that exist only in a capture stay on the device]
# The slab is exactly as large as the steps before the capture needed. In a capture Transformers makes attention masks
# that those steps did not have, since it may not check there whether they are needed. Such a tensor gets no memory in
# the slab, where it would displace a block that is planned to come later: it stays on the device.


@final
class PinnedPool:
    """The slab, and single buffers for steps that it does not fit.

    The first step takes buffers one by one. From its allocations and frees, the second gets one slab of exactly the
    size it needs. A step that differs from all before looks for gaps in the slab, and takes single buffers again where
    there are none; if it took any, the slab is planned anew when the step is over.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._plan = SlabPlan()
        self._slab: HostBuffer | None = None
        self._ranges: dict[tuple[int, int], torch.Tensor] = {}  # of the slab, by begin and size: most are reused
        self._buffers: list[HostBuffer] = []
        self._spare: dict[int, list[HostBuffer]] = {}  # free single buffers, by size
        self._captured: list[HostBuffer] = []
        self._refused = 0  # size of a slab that could not be allocated

    @property
    def slab_bytes(self) -> int:
        """Size of the slab; 0 before the second step."""
        return 0 if self._slab is None else self._slab.flat.numel()

    @property
    def num_bytes(self) -> int:
        """All host memory that is held."""
        return self.slab_bytes + sum(buffer.flat.numel() for buffer in (*self._buffers, *self._captured))

    def put(self, num_bytes: int, block: str) -> PinnedBlock | None:
        """Returns memory for bytes saved by ``block``; ``None`` in a capture for what no earlier step offloaded.

        Raises:
            StoreError: Host memory cannot be allocated, or a capture is the first step.
        """
        is_captured = self._engine.is_capturing()
        if is_captured and self._plan.is_extra(num_bytes):
            return None  # see Note [Tensors that exist only in a capture stay on the device]
        slab = self._slab
        number, begin = self._plan.put(num_bytes, self.slab_bytes)
        if slab is not None and begin is None:
            begin = self._plan.put_in_gap(number, num_bytes, self.slab_bytes)
        if slab is not None and begin is not None:
            slab.is_captured |= is_captured
            return PinnedBlock(number, self._range(slab, begin, num_bytes), None)
        try:
            buffer = self._single_buffer(num_bytes, is_captured, block)
        except BaseException:
            self._plan.free(number)
            raise
        if buffer is None:
            self._plan.free(number)
            return None
        buffer.is_captured |= is_captured
        return PinnedBlock(number, buffer.flat, buffer)

    def free(self, used: PinnedBlock) -> None:
        """Frees the memory. All copies to and from it were waited for."""
        self._plan.free(used.number)
        if used.buffer is not None:
            self._spare.setdefault(used.flat.numel(), []).append(used.buffer)

    def begin_step(self) -> None:
        """Allocates the slab, or a larger one, if the last step did not fit. Nothing is in use."""
        self._plan.begin_step()
        if self._engine.is_capturing():
            return  # see Note [Captured buffers are not released]
        wanted = self._plan.num_bytes
        grows = wanted > self.slab_bytes and not 0 < self._refused <= wanted
        if not grows and (not self._buffers or self._refused):
            return
        self._engine.synchronize()
        buffers, self._buffers, self._spare = self._buffers, [], {}
        self._release_buffers(buffers)
        if grows:
            self._grow(wanted)

    def release(self) -> None:
        """Releases all memory. Nothing is in use, and no captured graph will be replayed."""
        for buffer in (*self._buffers, *self._captured, *([] if self._slab is None else [self._slab])):
            buffer.release()
        self._slab, self._buffers, self._captured, self._spare, self._ranges = None, [], [], {}, {}
        self._plan = SlabPlan()

    def _grow(self, num_bytes: int) -> None:
        old = self.slab_bytes
        slab, self._slab, self._ranges = self._slab, None, {}
        if slab is not None:
            self._release_buffers([slab])
        del slab  # the old slab is freed before the new one is allocated
        try:
            self._slab = self._engine.buffer(num_bytes)
        except (MemoryError, RuntimeError) as error:
            self._refused = num_bytes  # single buffers may still fit; if not, `put` names the block
            _log.warning("offload: cannot allocate a slab of %s of host memory: %s", format_bytes(num_bytes), error)
            return
        if old:
            _log.info(
                "offload: the slab in host memory grows from %s to %s", format_bytes(old), format_bytes(num_bytes)
            )
        else:
            _log.info("offload: a slab of %s in host memory", format_bytes(num_bytes))

    def _release_buffers(self, buffers: list[HostBuffer]) -> None:
        for buffer in buffers:
            if buffer.is_captured:
                self._captured.append(buffer)
            else:
                buffer.release()

    def _single_buffer(self, num_bytes: int, is_captured: bool, block: str) -> HostBuffer | None:
        spare = self._spare.get(num_bytes)
        if spare:
            return spare.pop()
        if is_captured and self.num_bytes:
            return None
        if is_captured:
            raise StoreError(
                f"{block}: offload: expected a step before the capture, as host memory cannot be pinned in one, got "
                "none · fix: run two steps with the same shapes first"
            )
        try:
            buffer = self._engine.buffer(num_bytes)
        except (MemoryError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise StoreError(
                f"{block}: offload: expected {format_bytes(num_bytes)} of host memory besides the "
                f"{format_bytes(self.num_bytes)} in use, got none ({reason}) "
                "· fix: offload fewer blocks, set activation_checkpointing as well, or offload = 'disk'"
            ) from error
        self._buffers.append(buffer)
        return buffer

    def _range(self, slab: HostBuffer, begin: int, num_bytes: int) -> torch.Tensor:
        found = self._ranges.get((begin, num_bytes))
        if found is None:
            if len(self._ranges) >= _MOST_RANGES:
                self._ranges.clear()
            with unseen_by_modes():
                found = self._ranges[begin, num_bytes] = slab.flat[begin : begin + num_bytes]
        return found
