"""Reads batches and copies them to the device ahead of the steps that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

Batch = dict[str, Tensor]


@final
class Prefetcher:
    """Batches by iteration, on the device.

    On a CUDA device :meth:`prefetch` reads the next batch while the step that was launched before still runs, and
    copies it from pinned memory on a stream of its own: neither the host nor the device waits. On any other device a
    batch is read when it is asked for.

    Args:
        read: Returns the batch of an iteration, on the host.
        device: Where batches are wanted.
        num_iterations: No batch is read from this iteration on.
    """

    def __init__(self, read: Callable[[int], Batch], device: torch.device, num_iterations: int) -> None:
        self._read = read
        self._device = device
        self._num_iterations = num_iterations
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: tuple[int, Batch | Exception] | None = None

    def get(self, iteration: int) -> Batch:
        """Returns the batch of ``iteration``.

        Raises:
            Exception: What ``read`` raised for it, even if that was ahead of time.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != iteration:
            return to_device(self._read(iteration), self._device)
        batch = ahead[1]
        if isinstance(batch, Exception):
            raise batch
        if self._stream is not None:
            present = torch.cuda.current_stream(self._device)
            present.wait_stream(self._stream)
            for tensor in batch.values():  # their memory is the other stream's, which must not reuse it too early
                tensor.record_stream(present)
        return batch

    def prefetch(self, iteration: int) -> None:
        """Reads the batch of ``iteration`` and starts to copy it."""
        if self._stream is None or iteration >= self._num_iterations:
            return
        try:
            with torch.cuda.stream(self._stream):
                self._ahead = iteration, to_device(self._read(iteration), self._device)
        except Exception as error:  # raised later, after the previous iteration is logged and saved
            self._ahead = iteration, error


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copies a batch to ``device``; for CUDA asynchronously, from pinned memory."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def synchronize(device: torch.device) -> None:
    """Synchronizes a CUDA device; does nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
