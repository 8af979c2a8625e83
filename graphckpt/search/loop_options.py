"""The options of ``graphckpt estimate`` for the loop: the loss, micro-batches, and clipping. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LOSSES = ("model", "tiles", "trl", "liger")


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of :class:`EstimateOptions` on what a step does beside forward, backward and the update."""

    loss: str = "model"
    """The loss of a causal language model: ``"model"`` for its own, with the logits of all tokens; ``"tiles"`` for head
    and loss in eight slices, by ``Tiles(8, reduce="sum")``; ``"trl"`` for TRL's, which computes logits in chunks;
    ``"liger"`` for Liger's fused linear cross entropy."""
    accumulation: int = 1
    """Micro-batches of ``batch`` samples whose gradients are accumulated before an update."""
    clip: bool = False
    """Clip gradients by their norm before the update."""

    def named(self, option: str) -> str:
        """Returns an option as the caller writes it."""
        return option

    def _loop_faults(self, *, fused_backward: bool) -> Iterator[tuple[str, str, str, Any]]:
        """Yields options that do not suit each other: the option, what is wrong, another option, its value."""
        if fused_backward and self.clip:
            what = f"expected gradients of all weights at once, got {self.named('fused_backward')}"
            yield "clip", what, "clip", False
        if fused_backward and self.accumulation != 1:
            fused = self.named("fused_backward")
            what = f"expected 1 with {fused}, which updates in each backward, got {self.accumulation!r}"
            yield "accumulation", what, "accumulation", 1
