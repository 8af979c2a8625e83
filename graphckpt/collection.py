"""Python's garbage collector where it would only slow down: around imports and measurements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection within the context, for imports: they make many objects and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def rare_collection() -> Iterator[None]:
    """Makes garbage collection rare within the context, for imports and a simulation, of which little is garbage."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
