"""Decides for each call of a step whether it runs as it is, is recorded, or replays a recording."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.capture.hazards import Attributes, explain_hazard
from graphckpt.capture.inputs import StaticInputs, input_key
from graphckpt.errors import GraphError
from graphckpt.tree import build_value, flatten_value

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import nn

    from graphckpt.capture.runner import Recording, Runner


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
    def held(self) -> tuple[Hashable, Hashable, Any]:
        """Returns what the device work depends on beside its inputs.

        First the modes, each of which has to be warmed up; then what a recording has built in, such as the addresses of
        parameters; then the objects whose identity is a part of that.
        """


@dataclass(frozen=True, slots=True)
class _Entry:
    recording: Recording
    inputs: StaticInputs
    held: Any


@final
class Captures:
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
        self, program: Program, runner: Runner, *, num_warm_up: int, max_captures: int, must_capture: bool
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
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._seen: dict[Hashable, int] = {}

    @property
    def num_recordings(self) -> int:
        """How many recordings are kept now."""
        return len(self._entries)

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
        inputs, cannot = input_key(args, kwargs)
        if cannot is not None:
            self._give_up(f"{cannot} · fix: pass tensors without gradient, numbers and text", None)
            return program.run(args, kwargs), False
        modes, identity, held = program.held()
        key = inputs, modes, identity
        entry = self._entries.get(key)
        if entry is not None and not must_run:
            self._entries.move_to_end(key)
            entry.inputs.load(args, kwargs)
            return self._replay(entry), True
        count = self._seen[inputs, modes] = self._seen.get((inputs, modes), 0) + 1
        if must_run or count <= self._num_warm_up:
            with self.runner.warming():
                output = program.run(args, kwargs)
            return output, False
        random_state = torch.get_rng_state()
        try:
            entry = self._record(args, kwargs, held)
        except Exception as error:  # whatever the step or the device says
            torch.set_rng_state(random_state)
            self._give_up(explain_hazard(error, program.roots()), error)
            return program.run(args, kwargs), False
        self._entries[key] = entry
        while len(self._entries) > self._max_captures:
            _, oldest = self._entries.popitem(last=False)
            oldest.recording.release()
        return self._replay(entry), True

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
        self._seen.clear()

    def _record(self, args: Sequence[Any], kwargs: dict[str, Any], held: Any) -> _Entry:
        inputs = StaticInputs(args, kwargs)
        attributes = Attributes(self._program.roots())
        try:
            recording = self.runner.record(lambda: self._program.work(inputs.args, inputs.kwargs))
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
        return _Entry(recording, inputs, held)

    def _replay(self, entry: _Entry) -> Any:
        entry.recording.replay()
        self.num_replays += 1
        output, kept = entry.recording.output
        leaves, spec = flatten_value(output)
        fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._program.after(kept)
        return build_value(spec, fresh)

    def _give_up(self, why: str, error: Exception | None) -> None:
        text = f"{self._program.name}: the step cannot be captured: {why}"
        if self._must_capture:
            raise GraphError(text) from error
        self.release()
        self.reason = why
        warnings.warn(f"{text} · it goes on without capture", stacklevel=5)
