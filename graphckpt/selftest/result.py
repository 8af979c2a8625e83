"""What one check of ``graphckpt selftest`` has shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

EQUAL, CLOSE, MEASURED, SKIPPED = "equal", "close", "measured", "skipped"
DIFFERS, ERROR = "differs", "error"


@final
@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result."""

    check: str
    subject: str
    store: str
    outcome: str
    """``"equal"`` in every bit, ``"close"`` up to rounding, ``measured``, ``skipped``, ``differs`` or ``error``."""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.outcome in (DIFFERS, ERROR)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)
