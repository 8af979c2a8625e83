"""The CUDA streams of graphckpt: four for each device, shared by all stores.

PyTorch hands out 32 streams in turn. If each store took new ones, those of a later store would be the stream of a
capture or of another store, and its copies would be serialized with the work that they should overlap with.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Streams(NamedTuple):
    capture: torch.cuda.Stream
    """For captures and their warm-up: cuBLAS keeps a workspace per stream."""
    offload: torch.cuda.Stream
    """For copies to the host."""
    reload: torch.cuda.Stream
    """For copies to the device."""
    disk: torch.cuda.Stream
    """For copies between the device and the memory that files are written from: the thread of a file waits for each."""


def streams_of(device: torch.device) -> Streams:
    has_index = device.type != "cuda" or device.index is not None
    return _streams_of(device if has_index else torch.device("cuda", torch.cuda.current_device()))


@cache
def _streams_of(device: torch.device) -> Streams:
    return Streams(*(torch.cuda.Stream(device) for _ in Streams._fields))
