"""Chooses what captures a step, from ``config.capture`` and the devices of the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphckpt.capture.backend import CaptureBackend
from graphckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def backend_for(capture: Any, devices: Sequence[torch.device]) -> CaptureBackend | None:
    """Returns the backend that ``config.capture`` means for modules on ``devices``; ``None`` runs every step eagerly.

    Raises:
        ConfigError: ``"cuda_graph"`` is requested, but the modules are not on exactly one CUDA device.
    """
    if isinstance(capture, CaptureBackend):
        return capture
    if capture == "eager":
        return None
    if len(devices) == 1 and devices[0].type == "cuda":
        from graphckpt.capture.cuda_graph import CudaGraphBackend  # noqa: PLC0415  # only with CUDA

        return CudaGraphBackend(devices[0])
    if capture == "cuda_graph":
        raise ConfigError(
            "Graph.config.capture: 'cuda_graph' expected modules on one CUDA device, got "
            f"{', '.join(str(device) for device in devices) or 'none'} · fix: move them, or use 'auto'"
        )
    return None
