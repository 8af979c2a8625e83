"""The refusals that are documented: the plain step runs, and the package says why it does not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fuzz.programme import Programme


class Refusal(NamedTuple):
    """A regular expression of messages or differences, one of the programme that causes them, and the words of
    docs/limits.md."""

    message: str
    part: str
    words: str


DOCUMENTED = (
    Refusal("modified its argument `[^`]+` in place, and the recomputation has no copy of it", "", "has no copy of it"),
    Refusal("its argument `[^`]+` was modified in place", "EditsItsInputLater", "only from a later call on"),
    Refusal(
        "its argument `[^`]+` was modified in place",
        r"EditsChildsOutput\('after'\)",
        "modified in place after the block",
    ),
    Refusal("a tensor that one of its ops saves was modified in place", "saved_on_cpu", "save_on_cpu"),
    Refusal(r"left behind .*alive in a store'\]$", "spectral, by hook", "as `torch.nn.utils.spectral_norm` sets one"),
    Refusal(
        r"^step \d+: (output|gradient of)",
        "(inplace=True|EditsItsInputLater).*saved_on_cpu",
        "holds tensors of the CPU themselves",
    ),
)


def reason_for(message: str, programme: Programme) -> str | None:
    """Returns the words that describe a refusal, or ``None`` if none do."""
    parts = f"{programme.model_expression()} {[step.shape for step in programme.steps]}"
    found = (
        refusal for refusal in DOCUMENTED if re.search(refusal.part, parts) and re.search(refusal.message, message)
    )
    return next((refusal.words for refusal in found), None)
