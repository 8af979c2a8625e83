"""The refusals that are documented: the plain step runs, and the package raises an error that says why it does not.

A refusal is an error. No entry can excuse a difference between the two steps.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from graphckpt.errors import GraphckptError, MutatedError, RecomputeError

if TYPE_CHECKING:
    from fuzz.programme import Programme


class Refusal(NamedTuple):
    """The class of the error, the family of programmes, regular expressions of the message and of the programme, and
    the words of docs/limits.md."""

    error: type[GraphckptError]
    family: str
    message: str
    part: str
    words: str


DOCUMENTED = (
    Refusal(
        RecomputeError,
        "edits an argument from a later call on",
        "modified its argument `[^`]+` in place, and the recomputation has no copy of it",
        "",
        "has no copy of it",
    ),
    Refusal(
        RecomputeError,
        "edits an argument from a later call on",
        "its argument `[^`]+` was modified in place",
        "EditsItsInputLater",
        "only from a later call on",
    ),
    Refusal(
        RecomputeError,
        "an argument is edited after the block",
        "its argument `[^`]+` was modified in place",
        r"EditsChildsOutput\('after'\)",
        "modified in place after the block",
    ),
    Refusal(
        MutatedError,
        "hooks that copy saved tensors hide an edit",
        "a tensor that one of its ops saves was modified in place",
        "saved_as_copies",
        "save_on_cpu",
    ),
)


def family_of(error: GraphckptError, programme: Programme) -> str | None:
    """Returns the family of a documented refusal, or ``None`` for any other error."""
    parts = f"{programme.model_expression()} {[step.shape for step in programme.steps]}"
    families = (
        refusal.family
        for refusal in DOCUMENTED
        if type(error) is refusal.error and re.search(refusal.part, parts) and re.search(refusal.message, str(error))
    )
    return next(families, None)
