"""The interface of capture backends; everything above it is tested without a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch


class Capture(ABC):
    """The captured device work of one step, and its output: tensors that each replay overwrites."""

    output: Any

    @abstractmethod
    def replay(self) -> None:
        """Runs the work again, on the current stream, at the same addresses. No Python of the step runs."""

    @abstractmethod
    def release(self) -> None:
        """Releases the memory of the capture."""


class CaptureBackend(ABC):
    """Captures steps on one kind of device."""

    name: str
    """The word for ``config.capture`` and in messages."""
    device: torch.device | None = None
    """The device of the captured work. Tensors elsewhere are read once, at capture; ``None``: there are none."""

    @abstractmethod
    def warmup(self) -> AbstractContextManager[None]:
        """Returns a context for the eager steps before a capture, such as the stream of the capture."""

    @abstractmethod
    def capture(self, step: Callable[[], Any]) -> Capture:
        """Captures ``step``. It changes nothing on the device: the first replay runs the work.

        Raises:
            Exception: Any error of ``step``, or of the device for work that cannot be captured. Nothing is left behind.
        """

    @abstractmethod
    def pass_on(self, output: Any) -> None:
        """Prepares the output of a warm-up call for use outside of :meth:`warmup`."""

    def pool_bytes(self) -> int | None:
        """Returns the bytes that captures hold on the device, or ``None`` if they have no memory of their own."""
        return None


CHOICES = ("auto", "cuda_graph", "eager")
"""The values of ``config.capture``."""
