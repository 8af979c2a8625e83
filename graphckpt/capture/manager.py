"""Decides for each call of a step whether it runs eagerly, is captured, or replays a capture."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from graphckpt.capture.attention_masks import AttentionMasks
from graphckpt.capture.backend import Capture, CaptureBackend
from graphckpt.capture.diagnose import ModuleAttributes, capture_failure
from graphckpt.capture.inputs import StaticInputs, input_key
from graphckpt.errors import GraphError
from graphckpt.tree import build_value, flatten_value

_FEW_REPLAYS = 3  # a capture takes the time of about ten steps: with fewer replays it was not worth it
_MOST_WASTED = 3  # captures in a row


class Program(ABC):
    """A step as a capture needs it: its device work, apart from what Python does in every call."""

    name: str
    """The Graph's name, for messages."""

    @abstractmethod
    def roots(self) -> Sequence[tuple[str, nn.Module]]:
        """Returns the modules of the step."""

    @abstractmethod
    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the whole step eagerly."""

    @abstractmethod
    def pre_replay(self) -> None:
        """Runs the Python part before the device work of every call: applies what users changed since."""

    @abstractmethod
    def body(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Runs the device work. Returns the output, and what :meth:`post_replay` needs of this capture."""

    @abstractmethod
    def post_replay(self, kept: Any) -> None:
        """Runs the Python part after it: schedulers, counters, optimizers that cannot be captured."""

    @abstractmethod
    def abandon(self) -> None:
        """Discards an incomplete step, so that the next one starts from the state before it."""

    @abstractmethod
    def fingerprint(self) -> tuple[Hashable, Hashable, Any]:
        """Returns what the device work depends on besides its inputs.

        First the modes, each of which needs its own warm-up; then what is baked into a capture, such as the addresses
        of parameters; then the objects whose identity is part of that.
        """


@dataclass(frozen=True, slots=True)
class _CachedCapture:
    capture: Capture
    inputs: StaticInputs
    held: Any


@dataclass(slots=True)
class _CallKind:
    """Calls with the same kind of inputs, in the same modes."""

    num_calls: int = 0
    num_captures: int = 0
    num_replays: int = 0
    """Since the last capture."""
    num_wasted: int = 0
    """Captures in a row, up to the last, with too few replays before the next one was needed."""
    masks: AttentionMasks = field(default_factory=AttentionMasks)

    def count_capture(self) -> bool:
        """Counts a capture that is needed now. Returns whether to make it, which depends on those before."""
        is_wasted = self.num_captures > 0 and self.num_replays < _FEW_REPLAYS
        self.num_wasted = self.num_wasted + 1 if is_wasted else 0
        self.num_captures += 1
        self.num_replays = 0
        return not self.is_eager

    @property
    def is_eager(self) -> bool:
        """Whether these calls are not captured any more."""
        return self.num_wasted >= _MOST_WASTED


@final
class CaptureManager:
    """The captures of one Graph.

    The first calls of each kind are warm-up: real steps that run eagerly. The next call is captured and replayed. No
    step runs twice, and none is discarded.

    Args:
        program: The step.
        backend: Captures the step.
        num_warm_up: Calls of each kind before the capture.
        max_captures: Captures that are held; the least recently used one is released first.
        must_capture: Whether a step that cannot be captured is an error; else it runs eagerly, with one warning.
    """

    def __init__(
        self, program: Program, backend: CaptureBackend, *, num_warm_up: int, max_captures: int, must_capture: bool
    ) -> None:
        self.backend = backend
        self.num_captured = 0
        self.num_replays = 0
        self.reason: str | None = None
        """Why no calls are captured any more."""
        self._program = program
        self._num_warm_up = num_warm_up
        self._max_captures = max_captures
        self._must_capture = must_capture
        self._entries: OrderedDict[tuple[Hashable, Hashable, Hashable], _CachedCapture] = OrderedDict()
        self._kinds: dict[Hashable, _CallKind] = {}
        self._has_warned = False

    @property
    def num_held(self) -> int:
        """Number of captures that are held now."""
        return len(self._entries)

    @property
    def notes(self) -> list[str]:
        """How captures differ from the eager step, each difference once."""
        kinds = self._kinds.values()
        notes = list(dict.fromkeys(kind.masks.note for kind in kinds if kind.masks.note is not None))
        num_eager = sum(kind.is_eager for kind in kinds)
        if num_eager:
            notes.append(f"{num_eager} of {len(kinds)} kinds of calls run without capture: captured too often")
        return notes

    def call(self, args: Sequence[Any], kwargs: dict[str, Any], *, must_run: bool = False) -> tuple[Any, bool]:
        """Runs one step. Returns its output, and whether that has its own memory, as after a replay.

        Args:
            args: Positional arguments of the step.
            kwargs: Its keyword arguments.
            must_run: Whether Python must run, because the step is recorded; the call then counts as a warm-up.
        """
        program = self._program
        if self.reason is not None:
            return program.run(args, kwargs), False
        program.pre_replay()
        inputs, cannot = input_key(args, kwargs, self.backend.device)
        if cannot is not None:
            self._give_up(cannot, None)
            return program.run(args, kwargs), False
        modes, identity, held = program.fingerprint()
        key = inputs, modes, identity
        entry = self._entries.get(key)
        kind = self._kinds.setdefault((inputs, modes), _CallKind())
        if entry is not None and not must_run:
            self._entries.move_to_end(key)
            entry.inputs.load(args, kwargs)
            return self._replay(entry, kind), True
        kind.num_calls += 1
        runs_eager = must_run or kind.num_calls <= self._num_warm_up or kind.is_eager
        if not runs_eager and not kind.count_capture():
            self._stop_capturing(inputs, modes)
            runs_eager = True
        if runs_eager:
            with kind.masks.observing(), self.backend.warmup():
                output = program.run(args, kwargs)
            self.backend.pass_on(output)
            return output, False
        entry = self._try_capture(args, kwargs, kind, held)
        if entry is None:
            return program.run(args, kwargs), False
        self._entries[key] = entry
        while len(self._entries) > self._max_captures:
            _, oldest = self._entries.popitem(last=False)
            oldest.capture.release()
        return self._replay(entry, kind), True

    def until_replayed(self, call: Callable[[], Any]) -> None:
        """Repeats ``call`` until the step is replayed, or cannot be captured."""
        replays = self.num_replays
        for _ in range(self._num_warm_up + 1):
            if self.num_replays == replays and self.reason is None:
                call()

    def release(self) -> None:
        """Releases all captures; later calls start with the warm-up again."""
        for entry in self._entries.values():
            entry.capture.release()
        self._entries.clear()
        self._kinds.clear()

    def _try_capture(
        self, args: Sequence[Any], kwargs: dict[str, Any], kind: _CallKind, held: Any
    ) -> _CachedCapture | None:
        """Returns ``None`` if it fails; all that the attempt held is freed, including the error."""
        rng_state = torch.get_rng_state()
        try:
            with kind.masks.capturing():
                return self._capture(args, kwargs, held)
        except Exception as error:  # any error of the step or the device
            torch.set_rng_state(rng_state)
            self._program.abandon()
            self._give_up(capture_failure(error, self._program.roots()), error)
        gc.collect()  # the error's frames held the step's tensors
        return None

    def _capture(self, args: Sequence[Any], kwargs: dict[str, Any], held: Any) -> _CachedCapture:
        inputs = StaticInputs(args, kwargs)
        attributes = ModuleAttributes(self._program.roots(), self.backend.device)
        try:
            capture = self.backend.capture(lambda: _detach(*self._program.body(inputs.args, inputs.kwargs)))
        except BaseException:
            attributes.restore()
            raise
        changed = attributes.changed()
        if changed is not None:
            capture.release()
            attributes.restore()
            raise GraphError(
                f"{changed}: forward changes it, which a replay would not · fix: use a buffer, modified in place"
            )
        self.num_captured += 1
        return _CachedCapture(capture, inputs, (held, attributes))

    def _replay(self, entry: _CachedCapture, kind: _CallKind) -> Any:
        entry.capture.replay()
        self.num_replays += 1
        kind.num_replays += 1
        output, kept = entry.capture.output
        leaves, spec = flatten_value(output)
        fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._program.post_replay(kept)
        return build_value(spec, fresh)

    def _stop_capturing(self, inputs: Hashable, modes: Hashable) -> None:
        """Runs calls of one kind without capture from now on, since capturing them repeatedly takes longer."""
        own = [key for key in self._entries if key[:2] == (inputs, modes)]
        for key in own:
            self._entries.pop(key).capture.release()
        if own:
            why = "settings baked into a capture change between calls, such as an optimizer's betas or momentum"
            fix = "keep them fixed (cycle_momentum=False for OneCycleLR and CyclicLR)"
        else:
            why = f"more than max_captures={self._max_captures} kinds of inputs alternate"
            fix = "pad batches to fewer shapes, or set a larger config.max_captures"
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._program.name}: the step was captured {_MOST_WASTED} times in a row for fewer than "
                f"{_FEW_REPLAYS} replays: {why}; such calls run without capture · fix: {fix}",
                stacklevel=5,
            )

    def _give_up(self, why: str, error: Exception | None) -> None:
        text = f"{self._program.name}: the step cannot be captured: {why}"
        if self._must_capture:
            raise GraphError(text) from error
        self.release()
        self.reason = why
        warnings.warn(f"{text} · the step runs without capture", stacklevel=6)


def _detach(output: Any, kept: Any) -> tuple[Any, Any]:
    """Detaches outputs from the autograd graph, which would live as long as the capture."""
    leaves, spec = flatten_value(output)
    return build_value(spec, [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]), kept
