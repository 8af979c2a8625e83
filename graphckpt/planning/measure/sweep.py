"""Measures a step under each option of each block, in as few runs as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from graphckpt.planning.candidates import with_levels
from graphckpt.planning.errors import PlanError
from graphckpt.planning.measure.collect import TraceCollector
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.model.measured_step import MeasuredStep, StepSample
from graphckpt.planning.model.op_times import OpTimes
from graphckpt.planning.model.program import StepLog
from graphckpt.planning.option import KEEP, Option
from graphckpt.stores.offload import Offload

_MOST_TIMED = 16
"""Of equal blocks, so many have their ops timed one by one: the fastest of each op counts."""


class MeasurableStep(Protocol):
    """A training step that can be run with one option on each block."""

    @property
    def no_copies(self) -> str:
        """Why nothing can be offloaded, where :meth:`copy_rates` returns ``None``."""

    @property
    def device_name(self) -> str:
        """The device that plans are for."""

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        """Returns the bytes per second of copies to ``target`` and back; ``None`` if nothing can be offloaded."""

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Runs the step once and traces it."""

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        """Runs the step and times the ops of the blocks; returns, by block, those of each forward."""

    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> AbstractContextManager[bool]:
        """Runs the step without the other blocks within the ``with`` block, if possible; yields whether it is."""


def measure(
    step: MeasurableStep,
    blocks: Blocks,
    options: Sequence[Option],
    progress: Callable[[int, int], None] | None = None,
    classes: Callable[[Sequence[int]], Sequence[int]] = list,
    broadcast: Callable[[Any], Any] = lambda value: value,
) -> MeasuredStep:
    """Measures every option on every block. Equal blocks share the options, so that each option runs on one of them.

    Args:
        step: what to run.
        blocks: the blocks to plan.
        options: the first one must be ``keep``.
        progress: called with the runs that are done, and their number.
        classes: returns the classes of blocks that hold on all processes, given those of this one.
        broadcast: returns the value of the leader of several processes.

    Raises:
        PlanError: no block runs with gradients.
    """
    assert options[0] is KEEP
    every = range(len(blocks.names))
    kept = step.sample(blocks, [KEEP] * len(every))
    base = StepLog(kept.trace)
    if not base.calls:
        raise PlanError("no block ran with gradients on · fix: let step_fn run forward and backward of this model")
    if not base.has_backward:
        raise PlanError("no backward went through the blocks · fix: let step_fn call loss.backward()")
    found = TraceCollector(base, classes(_classes(base, blocks)))
    found.add(kept, every, [0] * len(every))
    some = _excerpt(found.classes, len(options))  # enough to measure each option in a short run
    with step.restricted_to(blocks, some) as is_shorter:
        numbers = some if is_shorter else list(every)
        part = Blocks([(blocks.names[number], blocks.modules[number]) for number in numbers])
        kinds = [found.classes[number] for number in numbers]
        timed = _excerpt(kinds, _MOST_TIMED)
        few = Blocks([(part.names[number], part.modules[number]) for number in timed])
        options, own = with_levels(options, [kinds[number] for number in timed], lambda: step.ops(few), broadcast)
        turns = list(_turns(kinds, len(options), is_shorter=is_shorter))
        for done, turn in enumerate(turns, start=1):
            if progress is not None:
                progress(done, len(turns) + 1)
            found.add(step.sample(part, [own[kind][o] for kind, o in zip(kinds, turn, strict=True)]), numbers, turn)
    if progress is not None:
        progress(len(turns) + 1, len(turns) + 1)
    return found.measured(blocks, options, own, kept.step_seconds, len(turns) + 1)


def _excerpt(classes: Sequence[int], most: int) -> list[int]:
    """Returns the numbers of the first blocks of each class, at most ``most`` of each."""
    seen: dict[int, int] = {}
    numbers = []
    for number, kind in enumerate(classes):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= most:
            numbers.append(number)
    return numbers


def _classes(base: StepLog, blocks: Blocks) -> list[int]:
    """Returns the class of each block: blocks of one class did the same, byte by byte, and policies do so on them.

    Policies copy buffers, of which a step without them shows nothing.
    """
    base.name_roles([base.leaving(call) for call in range(len(base.calls))])
    seen: dict[Any, int] = {}
    marks: list[list[Any]] = [[] for _ in blocks.names]
    for number, call in enumerate(base.calls):
        border = sorted((role, base.sizes.get(storage, 0)) for storage, role in base.roles(number).items())
        marks[call.block].append((base.program(number), tuple(border)))
    return [
        seen.setdefault((type(module), module.training, _sizes(module.buffers()), tuple(mark)), len(seen))
        for module, mark in zip(blocks.modules, marks, strict=True)
    ]


def _sizes(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.dtype, int], ...]:
    return tuple((tensor.dtype, tensor.numel()) for tensor in tensors)


def _turns(classes: Sequence[int], num_options: int, *, is_shorter: bool) -> Iterator[list[int]]:
    """Yields the option of each block in each run, until every class has had each option but the first.

    In a shorter run one block of each class with enough blocks keeps all, to compare it with the whole run.
    """
    if num_options < 2:
        return
    others = num_options - 1
    sizes = [classes.count(kind) for kind in range(max(classes) + 1)]
    for run in range(-(-others // min(size for size in sizes if size))):
        places = [0] * len(sizes)
        turn = []
        for kind in classes:
            place = places[kind] + run * sizes[kind]
            is_spare = is_shorter and sizes[kind] == num_options and places[kind] == others
            turn.append(0 if is_spare else 1 + place % others)
            places[kind] += 1
        yield turn
