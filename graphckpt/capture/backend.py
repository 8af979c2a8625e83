"""What it takes to record a step: a small interface, so that all but the device's calls is tested without a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch


class Capture(ABC):
    """The device work of one step, and what the step returned: tensors whose memory each replay writes anew."""

    output: Any

    @abstractmethod
    def replay(self) -> None:
        """Does the work again, on the present stream, at the same addresses. No Python of the step runs."""

    @abstractmethod
    def release(self) -> None:
        """Gives the memory of the recording back."""


class CaptureBackend(ABC):
    """Records steps on one kind of device."""

    name: str
    """Its word for ``config.capture`` and in messages."""
    device: torch.device | None = None
    """Where the work of a recording is done. What lies elsewhere is read once, by Python; ``None``: nothing does."""

    @abstractmethod
    def warming(self) -> AbstractContextManager[None]:
        """Returns a context for the steps before a recording, which run as they are, where it will be recorded."""

    @abstractmethod
    def record(self, step: Callable[[], Any]) -> Capture:
        """Records ``step``. It changes nothing on the device: the work is done by the first replay.

        Raises:
            Exception: Whatever ``step`` raises, or the device of something that cannot be recorded. Nothing is left.
        """

    def pool_bytes(self) -> int | None:
        """Returns the bytes that recordings hold on the device, or ``None`` if they have no memory of their own."""
        return None


CHOICES = ("auto", "cuda_graph", "eager")
"""The words that ``config.capture`` knows."""
