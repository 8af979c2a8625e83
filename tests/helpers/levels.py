"""Tables of levels of measured steps, held against sampled runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from graphckpt.planning.candidates import NEAR, Option
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import RealStep, peak_of
from graphckpt.planning.sweep import measure


class Sampled(NamedTuple):
    """A measured step, and what runs it under any options."""

    measured: MeasuredStep
    blocks: Blocks
    step: RealStep

    def real_peak(self, plan: Sequence[int]) -> int:
        chosen = [own[option] for own, option in zip(self.measured.options_of, plan, strict=True)]
        with self.blocks.under(chosen, [None] * len(chosen)):
            return peak_of(self.step.levels())  # not a sample, which times the step as well


def sampled(
    model: nn.Module,
    step_fn: Callable[[], object],
    named: Sequence[tuple[str, nn.Module]],
    options: Sequence[Option] = NEAR,
) -> Sampled:
    step, blocks = RealStep(model, step_fn), Blocks(named)
    return Sampled(measure(step, blocks, options), blocks, step)


def mixed_plans(measured: MeasuredStep, count: int, seed: int = 0) -> Iterator[list[int]]:
    """Yields the uniform plans, and some drawn at random."""
    rng, num_blocks, num_options = random.Random(seed), len(measured.names), len(measured.options)
    yield from ([option] * num_blocks for option in range(num_options))
    yield from ([rng.randrange(num_options) for _ in range(num_blocks)] for _ in range(count))


def differences(models: Sampled, count: int = 6) -> tuple[float, float]:
    """Returns the lowest and the highest difference of the table from sampled runs, in percent of their peaks."""
    values = [0.0]
    for plan in mixed_plans(models.measured, count):
        peak = models.real_peak(plan)
        values.append(100 * (models.measured.model.peak(plan) - peak) / peak)
    return min(values), max(values)
