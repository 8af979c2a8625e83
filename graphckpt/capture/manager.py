"""Decides for each call of a step whether it runs as it is, is recorded, or replays a recording."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.capture.attention_masks import AttentionMasks
from graphckpt.capture.diagnose import ModuleAttributes, capture_failure
from graphckpt.capture.inputs import StaticInputs, input_key
from graphckpt.errors import GraphError
from graphckpt.tree import build_value, flatten_value

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import nn

    from graphckpt.capture.backend import Capture, CaptureBackend


_FEW_REPLAYS = 3  # a capture takes the time of some ten steps: one with fewer replays was not worth it
_MOST_WASTED = 3  # captures in a row


class Program(ABC):
    """A step, as far as a recording must know it: its device work apart from what Python does in every call."""

    name: str
    """The Graph's name, for messages."""

    @abstractmethod
    def roots(self) -> Sequence[tuple[str, nn.Module]]:
        """Returns the modules of the step."""

    @abstractmethod
    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the whole step as it is."""

    @abstractmethod
    def before(self) -> None:
        """Does what Python does before the device work of every call: what users changed since is put in force."""

    @abstractmethod
    def work(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Does the device work. Returns the output, and what :meth:`after` needs of this recording."""

    @abstractmethod
    def after(self, kept: Any) -> None:
        """Does what Python does after it: schedules, counts, optimizers that cannot be recorded."""

    @abstractmethod
    def abandon(self) -> None:
        """Drops what half a step has left behind, so that the next one begins as if that had never been."""

    @abstractmethod
    def held(self) -> tuple[Hashable, Hashable, Any]:
        """Returns what the device work depends on beside its inputs.

        First the modes, each of which has to be warmed up; then what a recording has built in, such as the addresses of
        parameters; then the objects whose identity is a part of that.
        """


@dataclass(frozen=True, slots=True)
class _CachedCapture:
    recording: Capture
    inputs: StaticInputs
    held: Any


@dataclass(slots=True)
class _CallKind:
    """Calls whose inputs are of one kind, in one set of modes."""

    num_calls: int = 0
    num_captures: int = 0
    num_replays: int = 0
    """Since the last capture."""
    num_wasted: int = 0
    """Captures in a row, up to the last, that were replayed too few times before the next one was needed."""
    masks: AttentionMasks = field(default_factory=AttentionMasks)

    def count_capture(self) -> bool:
        """Counts a capture that is needed now. Returns whether to make it: the ones before were worth it."""
        is_wasted = self.num_captures > 0 and self.num_replays < _FEW_REPLAYS
        self.num_wasted = self.num_wasted + 1 if is_wasted else 0
        self.num_captures += 1
        self.num_replays = 0
        return not self.is_eager

    @property
    def is_eager(self) -> bool:
        """Whether it is captured no more."""
        return self.num_wasted >= _MOST_WASTED


@final
class CaptureManager:
    """The recordings of one Graph.

    The first calls of each kind are real steps that run as they are; the call after them is recorded and replayed. No
    step runs twice or is thrown away.

    Args:
        program: The step.
        runner: What records.
        num_warm_up: Calls of each kind before the recording.
        max_captures: Recordings that are kept; the one unused for longest goes first.
        must_capture: Whether a step that cannot be recorded is an error; else it goes on as it is, with one warning.
    """

    def __init__(
        self, program: Program, runner: CaptureBackend, *, num_warm_up: int, max_captures: int, must_capture: bool
    ) -> None:
        self.runner = runner
        self.num_captured = 0
        self.num_replays = 0
        self.reason: str | None = None
        """Why nothing is recorded any more."""
        self._program = program
        self._num_warm_up = num_warm_up
        self._max_captures = max_captures
        self._must_capture = must_capture
        self._entries: OrderedDict[tuple[Hashable, Hashable, Hashable], _CachedCapture] = OrderedDict()
        self._kinds: dict[Hashable, _CallKind] = {}
        self._has_warned = False

    @property
    def num_recordings(self) -> int:
        """How many recordings are kept now."""
        return len(self._entries)

    @property
    def notes(self) -> list[str]:
        """What recordings do unlike the plain step, each once."""
        kinds = self._kinds.values()
        notes = list(dict.fromkeys(kind.masks.note for kind in kinds if kind.masks.note is not None))
        num_eager = sum(kind.is_eager for kind in kinds)
        if num_eager:
            notes.append(f"{num_eager} of {len(kinds)} kinds of calls run without capture, which was needed too often")
        return notes

    def call(self, args: Sequence[Any], kwargs: dict[str, Any], *, must_run: bool = False) -> tuple[Any, bool]:
        """Runs one step. Returns its output, and whether that lies in memory of its own, as after a replay.

        Args:
            args: Positional arguments of the step.
            kwargs: Its keyword arguments.
            must_run: Whether Python must run, since someone watches; the call then counts as one before the recording.
        """
        program = self._program
        if self.reason is not None:
            return program.run(args, kwargs), False
        program.before()
        inputs, cannot = input_key(args, kwargs, self.runner.device)
        if cannot is not None:
            self._give_up(cannot, None)
            return program.run(args, kwargs), False
        modes, identity, held = program.held()
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
            with kind.masks.watching(), self.runner.warming():
                output = program.run(args, kwargs)
            return output, False
        entry = self._try_to_record(args, kwargs, kind, held)
        if entry is None:
            return program.run(args, kwargs), False
        self._entries[key] = entry
        while len(self._entries) > self._max_captures:
            _, oldest = self._entries.popitem(last=False)
            oldest.recording.release()
        return self._replay(entry, kind), True

    def until_replayed(self, call: Callable[[], Any]) -> None:
        """Calls until the step is replayed, or cannot be."""
        replays = self.num_replays
        for _ in range(self._num_warm_up + 1):
            if self.num_replays == replays and self.reason is None:
                call()

    def release(self) -> None:
        """Gives the memory of all recordings back; later calls warm up anew."""
        for entry in self._entries.values():
            entry.recording.release()
        self._entries.clear()
        self._kinds.clear()

    def _try_to_record(
        self, args: Sequence[Any], kwargs: dict[str, Any], kind: _CallKind, held: Any
    ) -> _CachedCapture | None:
        """Returns ``None`` if it cannot be done; all that the attempt held is free then, the error included."""
        random_state = torch.get_rng_state()
        try:
            with kind.masks.recording():
                return self._record(args, kwargs, held)
        except Exception as error:  # whatever the step or the device says
            torch.set_rng_state(random_state)
            self._program.abandon()
            self._give_up(capture_failure(error, self._program.roots()), error)
        gc.collect()  # the error's frames held the step's tensors
        return None

    def _record(self, args: Sequence[Any], kwargs: dict[str, Any], held: Any) -> _CachedCapture:
        inputs = StaticInputs(args, kwargs)
        attributes = ModuleAttributes(self._program.roots(), self.runner.device)
        try:
            recording = self.runner.record(lambda: _cut_off(*self._program.work(inputs.args, inputs.kwargs)))
        except BaseException:
            attributes.put_back()
            raise
        changed = attributes.changed()
        if changed is not None:
            recording.release()
            attributes.put_back()
            raise GraphError(
                f"{changed}: forward changes it, which no replay would do · fix: a buffer that forward edits in place"
            )
        self.num_captured += 1
        return _CachedCapture(
            recording, inputs, (held, attributes)
        )  # tensors that hang on modules must stay where they are

    def _replay(self, entry: _CachedCapture, kind: _CallKind) -> Any:
        entry.recording.replay()
        self.num_replays += 1
        kind.num_replays += 1
        output, kept = entry.recording.output
        leaves, spec = flatten_value(output)
        fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._program.after(kept)
        return build_value(spec, fresh)

    def _stop_capturing(self, inputs: Hashable, modes: Hashable) -> None:
        """Lets calls of one kind run without capture, since capturing them again and again takes longer."""
        own = [key for key in self._entries if key[:2] == (inputs, modes)]
        for key in own:
            self._entries.pop(key).recording.release()
        if own:
            why = "what is built into a capture changes between calls, such as an optimizer's betas or momentum"
            fix = "keep it fixed (cycle_momentum=False for OneCycleLR and CyclicLR)"
        else:
            why = f"more than max_captures={self._max_captures} kinds of inputs take turns"
            fix = "pad batches to fewer shapes, or set a larger config.max_captures"
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._program.name}: the step was captured {_MOST_WASTED} times in a row for fewer than "
                f"{_FEW_REPLAYS} replays: {why} · such calls run without capture · fix: {fix}",
                stacklevel=5,
            )

    def _give_up(self, why: str, error: Exception | None) -> None:
        text = f"{self._program.name}: the step cannot be captured: {why}"
        if self._must_capture:
            raise GraphError(text) from error
        self.release()
        self.reason = why
        warnings.warn(f"{text} · it goes on without capture", stacklevel=6)


def _cut_off(output: Any, kept: Any) -> tuple[Any, Any]:
    """Cuts outputs off from the graph of autograd, which would live as long as the recording."""
    leaves, spec = flatten_value(output)
    return build_value(spec, [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]), kept
