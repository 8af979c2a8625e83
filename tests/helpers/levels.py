"""Tables of levels from the runs that a sweep makes, beside the memory model of the same runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest.mock import patch

from torch import nn

from graphckpt.planning.candidates import NEAR, Option
from graphckpt.planning.levels import LevelTable
from graphckpt.planning.memory_model import JoinedRuns, MeasuredStep, Runs
from graphckpt.planning.program import StepLog
from graphckpt.planning.steps import RealStep
from graphckpt.planning.sweep import TraceCollector, measure
from graphckpt.planning.trace import Blocks
from graphckpt.rules.basic import Full


class TwoModels(NamedTuple):
    measured: MeasuredStep
    table: LevelTable
    blocks: Blocks
    step: RealStep


def two_models(
    model: nn.Module,
    step_fn: Callable[[], object],
    named: Sequence[tuple[str, nn.Module]],
    options: Sequence[Option] = NEAR,
) -> TwoModels:
    """Measures a step as plans do, and runs it once more with every block recomputed: the base of the table."""
    collectors: list[TraceCollector] = []
    of_collector = TraceCollector.measured

    def measured_by(collector: TraceCollector, *args: object) -> MeasuredStep:
        collectors.append(collector)
        return of_collector(collector, *args)  # type: ignore[arg-type]

    step, blocks = RealStep(model, step_fn), Blocks(named)
    with patch.object(TraceCollector, "measured", measured_by):
        measured = measure(step, blocks, options)
    (collector,) = collectors
    full = next(number for number, option in enumerate(measured.options) if option.rule == Full())
    base = step.sample(blocks, [own[full] for own in measured.options_of])
    runs = [(run.log, [run.options[block] for block in range(len(blocks.names))]) for run in collector._runs]
    return TwoModels(measured, LevelTable(StepLog(base.trace), full, collector.classes, runs), blocks, step)


def mixed_plans(measured: MeasuredStep, count: int, seed: int = 0) -> Iterator[list[int]]:
    """Yields the uniform plans, and some drawn at random."""
    rng, num_blocks, num_options = random.Random(seed), len(measured.names), len(measured.options)
    yield from ([option] * num_blocks for option in range(num_options))
    yield from ([rng.randrange(num_options) for _ in range(num_blocks)] for _ in range(count))


def joined_plans(measured: MeasuredStep, joined: JoinedRuns, count: int) -> Iterator[tuple[list[int], Runs]]:
    """Yields plans, drawn at random, in which runs of blocks are recomputed as one."""
    rng, num_blocks, num_options = random.Random(0), len(measured.names), len(measured.options)
    for _ in range(count):
        plan: list[int] = []
        runs: list[tuple[int, int]] = []
        while (block := len(plan)) < num_blocks:
            lengths = joined.lengths(block)
            if lengths and rng.random() < 0.7:
                runs.append((block, block + rng.choice(lengths)))
                plan += [joined.full] * (runs[-1][1] - block)
            else:
                plan.append(rng.randrange(num_options))
        yield plan, tuple(runs)


def differences_of_joined(models: TwoModels, count: int = 40) -> tuple[float, float]:
    """Returns the differences as :func:`differences` does, for plans with joined runs."""
    joined = JoinedRuns(models.measured)
    values = [0.0]
    for plan, runs in joined_plans(models.measured, joined, count):
        peak = models.measured.model.highest(plan, joined.events_of(runs)).peak
        values.append(100 * (models.table.peak(plan, runs) - peak) / peak)
    return min(values), max(values)


def differences(models: TwoModels, count: int = 40) -> tuple[float, float]:
    """Returns the lowest and the highest difference of the table from the memory model, in percent of its peaks."""
    values = [0.0]
    for plan in mixed_plans(models.measured, count):
        peak = models.measured.model.highest(plan).peak
        values.append(100 * (models.table.peak(plan) - peak) / peak)
    return min(values), max(values)
