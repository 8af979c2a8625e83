"""The record of a step: what each block saved, how often and how long it ran. Data only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One block in the table that ``explain()`` prints."""

    block: str
    """Path of the block below the wrapped module, such as ``"model.layers.3"``."""
    rule: str
    """The active rule, as ``describe()`` of the rule prints it: ``"keep"``, ``"full"``, ``"selective(matmul)"``."""
    place: str = "device"
    """The store of saved tensors."""
    bytes_before: int
    """Bytes that the plain step would save for backward because of this block, when it saves most in all."""
    bytes_after: int
    """Bytes that this block saves on its device, on this rank, when the step saves most in all."""
    bytes_host: int = 0
    """Bytes that it saves in host memory besides them."""
    bytes_disk: int = 0
    """Bytes that it saves in a file."""
    runs: int
    """Forward runs in the recorded step."""
    reruns: int
    """Recomputations in the recorded step."""
    is_own: bool = False
    """Whether the model's gradient checkpointing recomputes it, in a way that may not be seen."""
    forward_seconds: float | None = None
    """Seconds of all original forwards; ``None`` if the record has no times."""
    recompute_seconds: float | None = None
    """Seconds of all recomputations; ``None`` if the record has no times."""
    copy_seconds: float | None = None
    """Seconds of copies to its store and back; ``None`` if there were none, or no times."""
    wait_seconds: float | None = None
    """Seconds that the step waited for them."""
    note: str = ""
    """Why a policy has no effect, or how the rule deviated."""


@dataclass(frozen=True, slots=True)
class Event:
    """The level of live bytes right after a tensor was allocated or freed."""

    live_bytes: int
    """Bytes of all tensor storages that are alive."""
    block: str
    """The block that was running; ``""`` outside of every block."""
    phase: str
    """``"forward"``, ``"backward"``, ``"recompute"`` or ``"optimizer"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLife:
    """One tensor storage of the step: the op that allocated it, its holders, and when it was freed."""

    num_bytes: int
    begin: int
    """The index of the event that allocated it; 0 if it existed before the step."""
    end: int | None
    """The index of the event that freed it; ``None`` if it outlives the step."""
    kind: str = ""
    """``"weights"``, ``"gradients"``, ``"optimizer states"`` or ``"inputs"``; empty for all others."""
    is_old: bool = False
    """Whether it existed before the step."""
    block: str = ""
    """The block that was running when it was allocated."""
    phase: str = ""
    """The phase in which it was allocated."""
    recomputed_by: str = ""
    """The block in whose recomputation it was allocated."""
    op: str = ""
    """The op that returned it; empty if it is not the result of a recorded op."""
    shape: tuple[int, ...] = ()
    """The shape of the first tensor that was seen to use it."""
    dtype: str = ""
    """The element type of that tensor, such as ``"float32"``."""
    source: str = ""
    """The innermost line outside of PyTorch and graphckpt that led to it, such as ``"model.py:12 in forward"``."""
    saved_by: str = ""
    """The first block that saved it for backward."""
    saved_from: int = 0
    """The index of the event after which it was first saved."""
    saved_until: int = 0
    """The index of the event from which nothing saves it any more."""

    def is_alive(self, at: int) -> bool:
        """Returns whether it was alive right after event ``at``."""
        return self.begin <= at and (self.end is None or at < self.end)

    def is_saved(self, at: int) -> bool:
        """Returns whether a block held it for backward right after event ``at``."""
        return self.saved_from <= at < self.saved_until


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of a step: one row per block, the totals and the warnings."""

    title: str
    """The name of the Graph or the class of the model."""
    rows: tuple[Row, ...]
    """One for each selected block, and for the tensors that other modules save, in the order of the model."""
    bytes_before: int
    """The most bytes that the plain step saves for backward at one time, each storage counted once."""
    bytes_after: int
    """The most bytes that this step saves on the device at one time, each storage counted once.

    With micro-batches it is that of one micro-batch, or of those in a pipeline that are between forward and backward.
    """
    bytes_host: int = 0
    """Bytes saved in host memory besides them."""
    bytes_disk: int = 0
    """Bytes saved in a file."""
    peak_bytes: int | None = None
    """Largest sum of live tensor storage during the step: parameters, gradients, optimizer state and the rest."""
    plain_peak_bytes: int | None = None
    """The predicted peak of the step without policies; ``None`` if it cannot be predicted from this step.

    Stores, ``Tiles``, compiled blocks and the model's gradient checkpointing prevent a prediction.
    """
    unpredictable: str = ""
    """Why the peak of the step without policies cannot be predicted."""
    static_bytes: int = 0
    """Bytes of weights, buffers and optimizer states, which no policy changes."""
    has_optimizer_states: bool = True
    """``False`` if an optimizer created its states in this step: later steps need more memory."""
    timeline: tuple[Event, ...] = field(default=(), repr=False)
    """Every change of the live bytes in the measured step; empty if it was not measured."""
    plain_levels: tuple[int, ...] = field(default=(), repr=False)
    """The predicted live bytes of the step without policies, at each event of :attr:`timeline`."""
    tensors: tuple[TensorLife, ...] = field(default=(), repr=False)
    """Every tensor storage of the measured step, in order of allocation."""
    sketch_bytes: int = 0
    """The most that the value check has held for each block, in steps that it has checked."""
    legend: tuple[tuple[str, str], ...] = ()
    """Names of rules in the rows, with their full texts."""
    warnings: tuple[str, ...] = ()
    """Advice and notes, as printed below the table."""
    capture: str = ""
    """How the step runs: captured, with the ops outside of the capture, or why not; empty without capture."""

    @property
    def peak_at(self) -> str:
        """The phase or block that runs at the peak, such as ``"backward of h.3"``; empty without :attr:`timeline`."""
        if not self.timeline:
            return ""
        at = max(range(len(self.timeline)), key=lambda number: self.timeline[number].live_bytes)
        peak = self.timeline[at]
        phase = "recomputation" if peak.phase == "recompute" else peak.phase
        if phase == "optimizer":
            return "optimizer step"
        block = peak.block or (self.title if peak.phase == "recompute" else "")  # the model itself is recomputed
        return f"{phase} of {block}" if block else self._place_between_blocks(at)

    def _place_between_blocks(self, at: int) -> str:
        """Returns where an event outside of the blocks is, in the words of a plan, whose blocks are the layers."""
        earlier = [event for event in reversed(self.timeline[:at]) if event.block]
        after = next((event for event in self.timeline[at:] if event.block), None)
        if not earlier:
            return f"{self.timeline[at].phase}, outside any block" if after is None else "before the first block"
        before = earlier[0]
        if before.phase == "forward" and (after is None or after.phase != "forward"):
            # The norm before the head may be a block too: after h.0, ..., h.11 and ln_f it is h.11 that a plan knows.
            layers = (event for event in earlier if any(map(str.isdecimal, event.block.split("."))))
            return f"the head and the loss, after {next(layers, before).block}"
        return f"after the {'forward' if before.phase == 'forward' else 'backward'} of {before.block}"

    @property
    def bytes_saved(self) -> int:
        """Bytes alive after forward that the policies save."""
        return self.bytes_before - self.bytes_after
