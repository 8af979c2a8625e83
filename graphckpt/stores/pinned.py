"""Pinned host memory of exactly the requested size, and the CUDA streams that all stores share."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, final

import torch

from graphckpt._compat import unseen_by_modes

# Note [Streams are shared]
# PyTorch hands out 32 streams round-robin. If each store took new ones, those of a later store would be the stream of a
# capture or of another store, and its copies would be serialized with the work that they should overlap with.


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
    needs_index = device.type == "cuda" and device.index is None
    return _streams_of(torch.device("cuda", torch.cuda.current_device()) if needs_index else device)


@cache
def _streams_of(device: torch.device) -> Streams:
    return Streams(*(torch.cuda.Stream(device) for _ in Streams._fields))


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_postponed: list[Callable[[], None]] = []  # releases that wait until no capture is under way

# Note [Nothing is unpinned in a capture]
# Memory is unpinned, and a store's copies are waited for, where the last reference goes, by Python's garbage collector
# too. In a capture CUDA forbids both, and makes the capture invalid: not one of ours, which run without the collector,
# but one that a user makes by hand.


@final
class HostBuffer:
    """Host memory that asynchronous copies can use: ``flat`` is ``uint8``, and ``release`` runs once.

    It runs when the buffer is garbage-collected at the latest. At exit it is left to the store.
    """

    # Finalizers run at exit in the reverse order of their creation: that of a buffer before that of its store, which
    # waits for the copies. Memory would be unpinned under a running one.

    __slots__ = ("__weakref__", "flat", "is_captured", "release")

    def __init__(self, flat: torch.Tensor, release: Callable[[], None]) -> None:
        self.flat = flat
        self.release = weakref.finalize(self, release)
        self.release.atexit = False
        self.is_captured = False
        """A captured graph has its address; see Note [Captured buffers are not released]."""


def pinned_buffer(num_bytes: int, device: torch.device, note: Callable[[str], None]) -> HostBuffer:
    def clear_error() -> None:  # of a failed call, which CUDA would report for the next kernel
        with suppress(RuntimeError):
            torch.empty(1, dtype=torch.uint8, device=device).fill_(0)

    with torch.cuda.device(device), unseen_by_modes():
        return HostBuffer(*pin(num_bytes, torch.cuda.cudart(), clear_error, note))


def pin(
    num_bytes: int, cudart: Any, clear_error: Callable[[], None], note: Callable[[str], None]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Returns ``num_bytes`` (above 0) of pinned memory, flat, as ``uint8``, and a function that unpins it.

    PyTorch's caching allocator for pinned memory rounds up to powers of two, nearly twice the size at worst. So pages
    of the operating system are registered instead. They are shared pages: after a fork, as data loaders do, the kernel
    would move private pages to another address at the next write, under a running copy.

    Raises:
        MemoryError: The operating system cannot allocate it.
        RuntimeError: CUDA cannot pin it, in either way.
    """
    # Those of now alone: in a capture a store's release postpones itself again, and `while` would not end.
    for _ in range(len(_postponed)):
        _postponed.pop()()
    try:
        pages = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise MemoryError(str(error)) from error
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    address = flat.data_ptr()
    code = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
    is_pinned = code == 0 and flat.is_pinned()
    if code == 0 and not is_pinned:  # a sandbox may accept the call without an effect
        cudart.cudaHostUnregister(address)
    if is_pinned:

        def unpin(pages: mmap.mmap = pages) -> None:  # holds the pages: they must be freed after it
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                postpone(lambda: _unregister(cudart, address, pages))
            else:
                _unregister(cudart, address, pages)

        return flat, unpin
    clear_error()
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    note(
        f"offload: registering host memory failed (CUDA error {code}{'' if code else ', and it is not pinned'}): "
        "PyTorch's pinned memory is used, which is larger"
    )
    return flat, lambda: None


def postpone(release: Callable[[], None]) -> None:
    """Runs ``release`` when memory is pinned next, which no capture allows either."""
    _postponed.append(release)


def _unregister(cudart: Any, address: int, pages: mmap.mmap) -> None:
    cudart.cudaHostUnregister(address)
