"""Pins host memory of exactly the size asked for."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def pin(
    num_bytes: int, cudart: Any, clear_error: Callable[[], None], note: Callable[[str], None]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Returns ``num_bytes`` (above 0) of pinned memory, flat, as ``uint8``, and what unpins it.

    PyTorch's own pinned memory comes from a cache that rounds up to powers of two, nearly twice what is needed at
    worst. So pages of the operating system are registered instead. They are shared pages: after a fork, as data
    loaders do, the kernel would move private ones to another address at the next write, away from under a copy.

    Raises:
        MemoryError: The operating system has no such memory.
        RuntimeError: CUDA cannot pin it, neither way.
    """
    try:
        pages = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise MemoryError(str(error)) from error
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    address = flat.data_ptr()
    code = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
    is_pinned = code == 0 and flat.is_pinned()
    if code == 0 and not is_pinned:  # a sandbox may accept the call and do nothing
        cudart.cudaHostUnregister(address)
    if is_pinned:

        def unpin(pages: mmap.mmap = pages) -> None:  # holds the pages: they must not go before
            cudart.cudaHostUnregister(address)

        return flat, unpin
    clear_error()
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    note(
        f"offload: host memory cannot be registered (CUDA error {code}{'' if code else ', and it is not pinned'}): "
        "PyTorch's pinned memory is bigger than needed"
    )
    return flat, _nothing


def _nothing() -> None:
    return None
