"""Errors of processes that are gone or do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch.distributed as dist

from graphckpt.errors import GraphckptError, first_line

_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo", "socket")


@final
class ParallelError(GraphckptError, RuntimeError):
    """Another process of the run is gone, or does not answer."""


@contextmanager
def connection_errors(rank: int, timeout_seconds: int) -> Iterator[None]:
    """Turns an error of a backend about a lost connection into one that says what to do.

    Args:
        rank: of this process.
        timeout_seconds: how long it waits for another.

    Raises:
        ParallelError: another process is gone, or has not answered in time.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GraphckptError) or not is_connection_error(error):
            raise
        what = f"another process is gone, or has not answered for {timeout_seconds} s ({first_line(error)})"
        fix = (
            "see the errors of the other processes, and use --resume; if one is slow, raise train.dist.timeout_seconds"
        )
        raise ParallelError(f"rank {rank}: {what} · fix: {fix}") from error


def is_connection_error(error: BaseException) -> bool:
    """Returns whether ``error`` says that another process is gone or does not answer."""
    if not (dist.is_available() and dist.is_initialized() and isinstance(error, RuntimeError)):
        return False
    said = first_line(error).lower()
    return isinstance(error, dist.DistError) or any(word in said for word in _LOST)
