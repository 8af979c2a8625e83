"""A limit of the live bytes, as an allocator would have it. Not a test itself."""

from __future__ import annotations

import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphckpt.ledger.live_memory import LiveBytes


class MemoryLimit(LiveBytes):
    """Raises ``torch.OutOfMemoryError`` in the op after which more than ``limit`` bytes are alive, while armed.

    It counts what the step allocates: tensors that exist before are counted by :meth:`track` at its start.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(record_timeline=False)
        self.limit = limit
        self.num_raised = 0
        self.functions: set[str] = set()
        """The names of the functions that ran when it raised."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.limit is not None and self.live_bytes > self.limit:
            del result
            self.num_raised += 1
            self.functions = {frame.name for frame in traceback.extract_stack()}
            raise torch.OutOfMemoryError(f"tried to allocate more than {self.limit} bytes")
        return result


@contextmanager
def limited_address_space(num_bytes: int = 2**46) -> Iterator[None]:
    """Limits the address space, by default to more than any test uses: allocations then fail with an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
