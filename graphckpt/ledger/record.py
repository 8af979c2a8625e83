"""The record of a step: what each block kept, how often and how long it ran. Data only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One block in the table that ``explain()`` prints."""

    block: str
    """Path of the block below the wrapped module, such as ``"model.layers.3"``."""
    rule: str
    """The rule in force, as ``describe()`` of the rule prints it: ``"keep"``, ``"full"``, ``"selective(matmul)"``."""
    place: str = "device"
    """Where kept bytes live."""
    bytes_before: int
    """Bytes that the plain step would keep for backward because of this block."""
    bytes_after: int
    """Bytes that this block really keeps on its device after its forward, on this rank."""
    bytes_host: int = 0
    """Bytes that it keeps in host memory beside them."""
    bytes_disk: int = 0
    """Bytes that it keeps in a file."""
    runs: int
    """Forward runs in the recorded step."""
    reruns: int
    """Recomputations in the recorded step."""
    forward_seconds: float | None = None
    """Seconds of all first runs; ``None`` if the record has no times."""
    recompute_seconds: float | None = None
    """Seconds of all second runs; ``None`` if the record has no times."""
    copy_seconds: float | None = None
    """Seconds that copies to its place and back took; ``None`` if there were none, or no times."""
    wait_seconds: float | None = None
    """Seconds that the step waited for them."""
    note: str = ""
    """Why a flag does nothing, or what the rule had to do beside its rule."""


@dataclass(frozen=True, slots=True)
class Event:
    """The level of live bytes right after one tensor came or went."""

    live_bytes: int
    block: str
    """The block that was running; ``""`` outside of every block."""
    phase: str
    """``"forward"``, ``"backward"``, ``"recompute"`` or ``"optimizer"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What ``explain()`` returns: one row per block, the totals, and what to know about them."""

    title: str
    rows: tuple[Row, ...]
    bytes_before: int
    """Bytes that the plain step keeps for backward, each storage counted once."""
    bytes_after: int
    """Bytes that this step keeps on the device for backward, each storage counted once."""
    bytes_host: int = 0
    """Bytes kept in host memory beside them."""
    bytes_disk: int = 0
    """Bytes kept in a file."""
    peak_bytes: int | None = None
    """Largest sum of live tensor storage during the step: parameters, gradients, optimizer state and all else."""
    timeline: tuple[Event, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    capture: str = ""
    """How the step runs: as a recording, since when and with what beside it, or why not; empty if nobody asked."""

    @property
    def bytes_saved(self) -> int:
        """Bytes that the policies take off what is alive after forward."""
        return self.bytes_before - self.bytes_after
