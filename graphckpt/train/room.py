"""Says what to do when memory runs out, in place of an allocator's own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphckpt.train.loop import TrainError
from graphckpt.train.snapshot import first_line

_CPU_WORDS = "can't allocate memory"  # of PyTorch's allocator for the CPU, which raises a plain RuntimeError


@contextmanager
def said_if_there_is_none(*, micro_batch: int, is_checkpointed: bool) -> Iterator[None]:
    """Turns the errors of allocators into one that says how a step needs less.

    Args:
        micro_batch: samples in one forward.
        is_checkpointed: whether blocks are recomputed already.

    Raises:
        TrainError: there was not enough memory; the allocator's error is the cause.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fixes = [] if is_checkpointed else ["train.activation_checkpoint.enabled=True"]
        if micro_batch > 1:
            fixes.append(f"a train.train_micro_batch_size below {micro_batch}, with more train.num_accumulation_steps")
        fix = ", or ".join(fixes) or "use a smaller model, shorter samples, or a device with more memory"
        raise TrainError(f"memory ran out: {first_line(error)} · fix: {fix}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an allocator raised ``error``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_WORDS in str(error)
    )
