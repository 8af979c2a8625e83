"""Allocates pinned host memory of exactly the requested size."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch

_postponed: list[Callable[[], None]] = []
"""What waits until no capture is under way; see Note [Nothing is unpinned in a capture]."""

# Note [Nothing is unpinned in a capture]
# Memory is unpinned, and a store's copies are waited for, where the last reference goes, by Python's garbage collector
# too. In a capture CUDA forbids both, and makes the capture invalid: not one of ours, which run without the collector,
# but one that a user makes by hand.

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


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
    _run_postponed()
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
    return flat, _no_op


def postpone(release: Callable[[], None]) -> None:
    """Runs ``release`` when memory is pinned next, which no capture allows either."""
    _postponed.append(release)


def _run_postponed() -> None:
    for _ in range(len(_postponed)):
        _postponed.pop()()


def _unregister(cudart: Any, address: int, pages: mmap.mmap) -> None:
    cudart.cudaHostUnregister(address)


def _no_op() -> None:
    return None
