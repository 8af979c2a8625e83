"""Allocates pinned host memory of exactly the requested size."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch

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
            cudart.cudaHostUnregister(address)

        return flat, unpin
    clear_error()
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    note(
        f"offload: registering host memory failed (CUDA error {code}{'' if code else ', and it is not pinned'}): "
        "PyTorch's pinned memory is used, which is larger"
    )
    return flat, _no_op


def _no_op() -> None:
    return None
