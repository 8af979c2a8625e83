"""Records the runs by which a step is measured, and replays them for other batch sizes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, cast, final

from graphckpt.collection import without_collection
from graphckpt.planning.fit.interpolate import NotAffineError, Position, SizedTrace, is_affine, predicted_sample
from graphckpt.planning.measure.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from graphckpt.planning.measure.instrument import Blocks
    from graphckpt.planning.measure.sweep import MeasurableStep
    from graphckpt.planning.model.measured_step import StepSample
    from graphckpt.planning.model.op_times import OpTimes
    from graphckpt.planning.option import Option
    from graphckpt.stores.offload import Offload

    _Levels: TypeAlias = Sequence[Sequence[tuple[Sequence[str], float | None]]]
    """Of each class of blocks: what each level of ``selective`` saves, and the seconds of its recomputation."""


@final
@dataclass(frozen=True, slots=True)
class _Run:
    """One run, and the names of its blocks and of their options."""

    names: tuple[tuple[str, str], ...]
    sample: StepSample


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """All that measuring a step at one batch size has asked of the step, in order."""

    size: int
    runs: list[_Run] = field(default_factory=list)
    levels: list[_Levels] = field(default_factory=list)
    are_shorter: list[bool] = field(default_factory=list)
    """Whether the step ran without the other blocks, when that was asked."""
    rates: list[tuple[float, float] | None] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Seconds of the step with everything kept."""
        return self.runs[0].sample.step_seconds


@final
class RecordedStep:
    """A step that records what it is asked.

    Args:
        step: the step at one batch size.
        size: the batch size.
        first: the recording at another size, whose levels of ``selective`` are measured here too, so that the runs at
            both sizes are the same; ``None`` takes the levels that are found here.
    """

    def __init__(self, step: MeasurableStep, size: int, first: Recording | None = None) -> None:
        self.recording = Recording(size)
        self._step = step
        self._first = first

    @property
    def no_copies(self) -> str:
        """Why nothing can be offloaded."""
        return self._step.no_copies

    @property
    def device_name(self) -> str:
        """The device that plans are for."""
        return self._step.device_name

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        """Returns the rates of copies."""
        rates = self._first.rates[0] if self._first is not None else self._step.copy_rates(target)
        self.recording.rates.append(rates)
        return rates

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Runs the step, without the garbage collector, which would free reference cycles at any moment."""
        with without_collection():
            found = self._step.sample(blocks, options)
            assert isinstance(found.trace, Trace)
            found = replace(found, trace=SizedTrace.of(found.trace))
        self.recording.runs.append(_Run(_names(blocks, options), found))
        return found

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        """Times the ops, unless the levels are known."""
        return self._step.ops(blocks) if self._first is None else [[] for _ in blocks.names]

    @contextmanager
    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> Iterator[bool]:
        """Runs the step without the other blocks, if possible."""
        with self._step.restricted_to(blocks, numbers) as is_shorter:
            self.recording.are_shorter.append(is_shorter)
            yield is_shorter

    def levels(self, found: _Levels) -> _Levels:
        """Returns the levels to measure."""
        if self._first is not None:
            number = len(self.recording.levels)
            factor = self.recording.step_seconds / self._first.step_seconds if self._first.step_seconds else 1.0
            found = _scaled(self._first.levels[number], factor) if number < len(self._first.levels) else found
        self.recording.levels.append(found)
        return found


@final
class ReplayedStep:
    """A step at a batch size at which it does not run.

    Args:
        size: the batch size.
        low: a recording at another one.
        high: a recording of the same runs at a third one.
    """

    def __init__(self, size: int, low: Recording, high: Recording, step: MeasurableStep) -> None:
        if not _has_equal_runs(low, high):
            raise NotAffineError
        self._at = Position(size, low.size, high.size)
        self._low = low
        self._pairs = iter(zip(low.runs, high.runs, strict=True))
        self._shorter = iter(low.are_shorter)
        self._levels = iter(low.levels)
        self._seconds = low.step_seconds
        self.no_copies, self.device_name = step.no_copies, step.device_name

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        """Returns the rates of copies."""
        del target
        return self._low.rates[0]

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Returns the run at this size.

        Raises:
            NotAffineError: it cannot be predicted from the two others.
        """
        low, high = next(self._pairs, (None, None))
        if low is None or high is None or low.names != _names(blocks, options):
            raise NotAffineError
        found = predicted_sample(self._at, low.sample, high.sample)
        if not self._low.runs or low is self._low.runs[0]:
            self._seconds = found.step_seconds
        return found

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        """Returns no ops: the levels are known."""
        return [[] for _ in blocks.names]

    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> AbstractContextManager[bool]:
        """Yields whether the step ran without the other blocks."""
        del blocks, numbers
        return nullcontext(next(self._shorter))

    def levels(self, found: _Levels) -> _Levels:
        """Returns the levels that were measured."""
        known = next(self._levels, None)
        if known is None or len(known) != len(found):
            raise NotAffineError
        return _scaled(known, self._seconds / self._low.step_seconds if self._low.step_seconds else 1.0)


def are_affine(recordings: Sequence[Recording]) -> bool:
    """Returns whether the storages of all runs are affine in the size; of three recordings in ascending order."""
    low, middle, high = recordings
    if not (_has_equal_runs(low, middle) and _has_equal_runs(low, high)):
        return False
    runs = zip(*([(each.size, run.sample.trace) for run in each.runs] for each in recordings), strict=True)
    return all(is_affine(cast("Sequence[tuple[int, SizedTrace]]", traces)) for traces in runs)


def _has_equal_runs(one: Recording, other: Recording) -> bool:
    return one.are_shorter == other.are_shorter and [run.names for run in one.runs] == [r.names for r in other.runs]


def _names(blocks: Blocks, options: Sequence[Option]) -> tuple[tuple[str, str], ...]:
    return tuple((name, option.name) for name, option in zip(blocks.names, options, strict=True))


def _scaled(levels: _Levels, factor: float) -> _Levels:
    """Returns levels of ``selective`` with the seconds of their recomputation multiplied."""
    return [[(names, None if took is None else took * factor) for names, took in own] for own in levels]
