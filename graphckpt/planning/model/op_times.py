"""The ops of one forward of a block, and how long each takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from graphckpt.rules.op_log import OpLog


@final
@dataclass
class OpTimes:
    """The ops of one forward of a block, and what each takes."""

    log: OpLog = field(default_factory=OpLog)
    seconds: list[float] = field(default_factory=list)
