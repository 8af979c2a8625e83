"""Logs when each storage of a step is allocated and freed, and until when the plain step would save it."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch

from graphckpt.ledger.live_memory import LiveBytes, storages_of
from graphckpt.ledger.record import TensorLife
from graphckpt.ledger.saved_bytes import Hold, Origin, StorageLife, levels_if_kept

_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")


class _Release(weakref.ref[Any]):
    """A weak reference to what autograd holds in place of a saved tensor."""

    __slots__ = ("hold", "log")

    hold: Hold
    log: weakref.ref[StorageLog]


@final
class StorageLog(LiveBytes):
    """Counts live bytes as :class:`LiveBytes` does, and logs the lifetime of each storage.

    >>> with StorageLog() as log:
    ...     x = torch.zeros(256)
    ...     del x
    >>> [(life.num_bytes, life.begin, life.end) for life in log.lives]
    [(1024, 0, 1)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[StorageLife] = []
        """All storages so far, in order of allocation."""
        self.recomputed: str | None = None
        """The outermost block that is being recomputed."""
        self._static: dict[int, int] = {}
        self._life_of: dict[int, StorageLife] = {}
        self._releases: list[_Release] = []
        self._is_old = False

    @property
    def _now(self) -> int:
        return 0 if self._is_old else len(self._changes or ())

    def hold(
        self,
        tensor: torch.Tensor,
        block: str | None,
        owner: object,
        *,
        is_kept: bool = False,
        saved_by: str | None = None,
    ) -> None:
        """Logs who holds ``tensor`` while ``owner`` is alive; see :class:`Hold`."""
        for life in filter(None, (self._life_of.get(id(storage)) for storage in storages_of(tensor))):
            hold = Hold(block, begin=self._now, saved_by=saved_by)
            (life.kept if is_kept else life.saved).append(hold)
            release = _Release(owner, _end_hold)
            release.hold, release.log = hold, weakref.ref(self)
            self._releases.append(release)

    @property
    def static_bytes(self) -> int:
        return sum(self._static.values())

    def levels_if_kept(self, is_kept: Callable[[str], bool]) -> list[int]:
        """Returns the predicted live bytes at each event of :attr:`timeline` if some blocks kept everything."""
        return levels_if_kept(self.lives, len(self._changes or ()), is_kept)

    def mark_static(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that stay alive: weights and optimizer states."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                if storage.device.type != "meta":
                    self._static[id(storage)] = storage.nbytes()

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Sets the kind of living tensors; see :attr:`~graphckpt.ledger.record.TensorLife.kind`."""
        for tensor in tensors:
            for storage in () if tensor is None else storages_of(tensor):
                life = self._life_of.get(id(storage))
                if life is not None:
                    life.kind = kind

    @property
    def tensors(self) -> list[TensorLife]:
        """The storages of the step so far, in order of allocation; built at each access."""
        return [_tensor_life(life, len(self._changes or ())) for life in self.lives]

    def track_as_old(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts tensors that were alive all the time."""
        self._is_old = True
        try:
            super().track_as_old(tensors)
        finally:
            self._is_old = False

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        storage = super()._see(tensor)
        life = None if storage is None else self._life_of.get(id(storage))
        if life is None:
            return storage
        if self.recomputed is None:
            life.last_use = self._now
        if life.origin is None:
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if life.is_old:
                life.origin = Origin("", "", "", shape, dtype, "")
            else:
                op = "" if self.op is None else str(self.op)
                life.origin = Origin(self.block, self.phase, op, shape, dtype, _source())
        return storage

    def _change(self, num_bytes: int, key: int) -> None:
        now = self._now
        super()._change(num_bytes, key)
        life = self._life_of.pop(key, None)
        if life is not None:
            life.end = now
            num_bytes += life.num_bytes  # of a storage that was resized
        if num_bytes > 0:
            self._life_of[key] = StorageLife(now, num_bytes, self.recomputed, is_old=self._is_old or not self._depth)
            self.lives.append(self._life_of[key])

    def _resize(self, alive: Any, num_bytes: int) -> None:
        life = self._life_of.get(alive.key)
        if life is not None:
            life.is_resized = True
        super()._resize(alive, num_bytes)


def _source() -> str:
    """Returns the innermost line outside of PyTorch and graphckpt; empty in a thread of backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno} in {frame.f_code.co_name}"


def _tensor_life(life: StorageLife, num_changes: int) -> TensorLife:
    origin = life.origin or Origin("", "", "", (), "", "")
    holds = [hold for hold in (*life.saved, *life.kept) if hold.saved_by is not None]
    first = min(holds, key=lambda hold: hold.begin, default=None)
    return TensorLife(
        num_bytes=life.num_bytes,
        begin=life.begin,
        end=life.end,
        kind=life.kind,
        is_old=life.is_old,
        block=origin.block,
        phase=origin.phase,
        recomputed_by=life.recomputed_by or "",
        op=origin.op,
        shape=origin.shape,
        dtype=origin.dtype,
        source=origin.source,
        saved_by="" if first is None or first.saved_by is None else first.saved_by,
        saved_from=0 if first is None else first.begin,
        saved_until=max((num_changes if hold.end is None else hold.end for hold in holds), default=0),
    )


def _end_hold(release: weakref.ref[Any]) -> None:
    assert isinstance(release, _Release)
    log = release.log()
    if log is not None:
        release.hold.end = log._now
