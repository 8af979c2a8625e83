"""Rules: what a block saves for backward. A registered rule is found by its name."""

from __future__ import annotations

from graphckpt.engine.block import BlockContext
from graphckpt.engine.execution import running
from graphckpt.engine.frame import Contexts, Frame
from graphckpt.rules.base import Rule, parse_rule, rule_classes
from graphckpt.rules.basic import Full, Joined, Keep
from graphckpt.rules.segments import Segments, run_segments
from graphckpt.rules.selective import Selective
from graphckpt.rules.tiles import Tiles

__all__ = [
    "BlockContext", "Contexts", "Frame", "Full", "Joined", "Keep", "Rule", "Segments", "Selective", "Tiles",
    "parse_rule", "rule_classes", "run_segments", "running",
]  # fmt: skip
