"""The copies of a CUDA device to host memory and back, with a record of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphckpt.stores.base import Traffic
from graphckpt.stores.host import CopyEngine, CopyEvent
from graphckpt.stores.pinned import HostBuffer

_TICKS = itertools.count(1)


@dataclass(eq=False)
class Copy:
    """One copy, ``"out"`` or ``"back"``, and the ticks of its issue and of the first wait for it (0: none yet)."""

    what: str
    event: CopyEvent
    issued_at: int
    joined_at: int = 0


class WatchedCopies:
    """Passes everything on to the device's own engine. ``live_bytes`` counts what is not released yet."""

    def __init__(self) -> None:
        self._engine = CopyEngine(torch.device("cuda", 0), print)
        self.history: list[Copy] = []
        self.num_buffers = self.live_bytes = 0

    def buffer(self, num_bytes: int) -> HostBuffer:
        buffer = self._engine.buffer(num_bytes)
        self.num_buffers += 1
        self.live_bytes += num_bytes

        def release() -> None:
            buffer.release()
            self.live_bytes -= num_bytes

        return HostBuffer(buffer.flat, release)

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Traffic | None = None) -> Copy:
        return self._note("out", self._engine.offload(device_flat, host_flat, traffic))

    def reload(
        self, host_flats: Sequence[torch.Tensor], device_flats: Sequence[torch.Tensor], traffic: Traffic | None = None
    ) -> list[Copy]:
        return [self._note("back", event) for event in self._engine.reload(host_flats, device_flats, traffic)]

    def _note(self, what: str, event: CopyEvent) -> Copy:
        self.history.append(Copy(what, event, next(_TICKS)))
        return self.history[-1]

    def wait(self, event: Copy) -> bool:
        event.joined_at = event.joined_at or next(_TICKS)
        return self._engine.wait(event.event)

    def wait_in_order(self, events: Sequence[Copy]) -> None:
        for event in events:
            event.joined_at = event.joined_at or next(_TICKS)
        self._engine.wait_in_order([event.event for event in events])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
