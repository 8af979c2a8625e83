"""Turns errors of other code into ones that say what to do: keys of the config, or how to use less memory."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from graphckpt.errors import GraphckptError, first_line
from graphckpt.graph.out_of_memory import is_out_of_memory
from graphckpt.train.loop import TrainError
from graphckpt.train.parallel.ranks import is_connection_error

_MAX_CHARACTERS = 400  # of the error's message


@contextmanager
def attribute_errors(keys: str, what: str) -> Iterator[None]:
    """Raises a ``TrainError`` for an error of other code, with the config ``keys``, what failed, file and line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GraphckptError) or is_out_of_memory(error) or is_connection_error(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        message = " ".join(str(error).split())[:_MAX_CHARACTERS]  # in one line
        text = f"{keys}: {what} failed, {type(error).__name__}: {message} (at {place})"
        # contextlib raises a StopIteration itself in place of a RuntimeError that it is the cause of
        cause = None if isinstance(error, StopIteration) else error
        raise TrainError(f"{text} · fix: check these keys of the config") from cause


@contextmanager
def explain_out_of_memory(*, micro_batch: int, is_checkpointed: bool) -> Iterator[None]:
    """Replaces an allocator's out-of-memory error by a ``TrainError`` with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fixes = [] if is_checkpointed else ["train.activation_checkpoint.enabled=True"]
        if micro_batch > 1:
            fixes.append(f"a train.train_micro_batch_size below {micro_batch}, with more train.num_accumulation_steps")
        fix = ", or ".join(fixes) or "use a smaller model, shorter samples, or a device with more memory"
        notes = "".join(f" ({note.partition(' · fix: ')[0]})" for note in getattr(error, "__notes__", ())[-1:])
        raise TrainError(f"memory ran out: {first_line(error)} · fix: {fix}{notes}") from error
