"""A process group for tensors of the simulated device, in the order of work that NCCL has; gloo cannot take them.

The bytes go over gloo, by way of host memory. An all-gather waits for the current stream, and the copy of its result
into ``output`` runs on a stream of its own: whoever uses that before ``wait()``, or frees it, shows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "staged"


class _Work(dist._Work):
    def __init__(self, event: torch.cuda.Event, staged: torch.Tensor) -> None:
        super().__init__()
        self._event = event
        self._staged = staged  # pinned: its copy may still be queued

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        return True


class Staged(dist.ProcessGroup):
    """All-gathers alone, which is what `partition` needs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.cuda.Stream()

    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:
        return NAME

    def _allgather_base(self, output: torch.Tensor, sent: torch.Tensor, options: Any = None) -> dist._Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            here = sent.cpu()
        staged = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        gathered = torch.empty(output.shape, dtype=output.dtype)
        self._gloo._allgather_base(gathered, here, options or dist.AllgatherOptions()).wait()
        staged.copy_(gathered)
        with torch.cuda.stream(self._stream):
            output.copy_(staged, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _Work(event, staged)


def register() -> None:
    dist.Backend.register_backend(NAME, Staged, devices=["cuda"])
