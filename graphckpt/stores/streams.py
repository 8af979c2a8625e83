"""The CUDA streams that graphckpt uses beside the user's own: three for each device, however many stores there are.

PyTorch hands out 32 streams in turn. With new ones for each store, those of a later one would be the stream of a
capture or of another store, and its copies would run in one queue with what they are to run beside.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Streams(NamedTuple):
    """Those of one device."""

    capture: torch.cuda.Stream
    """Steps are captured on it, and warmed up: cuBLAS keeps a workspace for each stream."""
    out: torch.cuda.Stream
    """Copies to the host."""
    back: torch.cuda.Stream
    """Copies to the device."""


def streams_of(device: torch.device) -> Streams:
    """Returns the streams of ``device``."""
    has_index = device.type != "cuda" or device.index is not None
    return _made(device if has_index else torch.device("cuda", torch.cuda.current_device()))


@cache
def _made(device: torch.device) -> Streams:
    return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device))
