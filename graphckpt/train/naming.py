"""Says which keys of a config lead to an error of the code that they name."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from graphckpt.errors import GraphckptError
from graphckpt.train.loop import TrainError
from graphckpt.train.parallel import is_lost
from graphckpt.train.room import is_out_of_memory

_MOST_CHARACTERS = 400  # of the error's own words


@contextmanager
def naming(keys: str, what: str) -> Iterator[None]:
    """Turns an error of code that is not this library's into one that names keys, file and line.

    Args:
        keys: of the config, such as ``"model, data"``.
        what: failed, such as ``"iteration 3"``.

    Raises:
        TrainError: that; the error itself is its cause.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, GraphckptError) or is_out_of_memory(error) or is_lost(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        said = " ".join(str(error).split())  # in one line
        text = f"{keys}: {what} failed, {type(error).__name__}: {said[:_MOST_CHARACTERS]} (at {place})"
        raise TrainError(f"{text} · fix: see what these keys of the config say") from error
