"""The refusals that are documented: the plain step runs, and the package says why it does not."""

from __future__ import annotations

import re

DOCUMENTED: tuple[tuple[str, str], ...] = (
    (
        r"forward edited its argument `[^`]+` in place, which it did not do on its first call",
        "only from a later call on",
    ),
)
"""Regular expressions of messages, and the words of docs/limits.md that describe the refusal."""


def reason_for(message: str) -> str | None:
    """Returns the words that describe a refusal, or ``None`` if none do."""
    return next((reason for pattern, reason in DOCUMENTED if re.search(pattern, message)), None)
