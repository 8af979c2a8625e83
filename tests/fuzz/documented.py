"""The refusals that are documented: the plain step runs, and the package says why it does not."""

from __future__ import annotations

import re

DOCUMENTED: tuple[tuple[str, str], ...] = ()
"""Regular expressions of messages, and where the refusal is documented."""


def reason_for(message: str) -> str | None:
    """Returns where a refusal is documented, or ``None`` if it is not."""
    return next((reason for pattern, reason in DOCUMENTED if re.search(pattern, message)), None)
