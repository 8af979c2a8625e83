"""The dynamic programme of rotor (Beaumont et al. 2019, arXiv:1911.13214), on what our planner has measured.

Written from the recurrence in the paper. Its schedules run a stage forward several times, which policies of single
blocks cannot say; so it gives a prediction, not a step to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphckpt.planning.intervals import Interval, Phase

if TYPE_CHECKING:
    from graphckpt.planning.measured_step import MeasuredStep

SLOTS = 2000  # to which memory is rounded, always to the worse


@dataclass
class Stage:
    """One block, or what comes after the last. Bytes are above the level that its forward finds."""

    forward: float
    """Seconds."""
    backward: float
    output: int
    """Bytes of what it hands on."""
    kept: int
    """What is alive after its forward when everything is kept, its output included."""
    forward_peak: int
    """When nothing is kept but its input."""
    kept_peak: int
    """When everything is kept."""
    backward_peak: int
    gradient: int
    """Bytes of the gradient of its output."""


class Rotor:
    """The least time of a persistent schedule of a chain, for any budget."""

    def __init__(self, measured: MeasuredStep) -> None:
        model, names = measured.model, measured.names
        full = next(number for number, option in enumerate(measured.options) if option.name == "full")
        kept, ran = ({at.interval: at for at in model.levels([option] * len(names))} for option in (0, full))
        self._plain_seconds = measured.step_seconds
        blocks = range(len(names))
        forward, backward = [f[0] for f in measured.forward_seconds], [b[0] for b in measured.backward_seconds]
        stages = []
        for n in blocks:
            before, after, back, behind = (Interval(phase, n) for phase in _PHASES)
            start, ran_start = kept[before].start, ran[before].start
            following = after if n == len(names) - 1 else Interval(Phase.FORWARD, n + 1)
            around = [kept[i].peak for i in (back, behind) if i in kept]
            peak = max(kept[before].peak, 0 if following == after else kept[after].peak)
            stages.append(
                Stage(
                    forward=forward[n],
                    backward=backward[n],
                    output=ran[following].start - ran_start,
                    kept=kept[following].start - start,
                    forward_peak=ran[before].peak - ran_start,
                    kept_peak=peak - start,
                    backward_peak=max(around[: 1 if n == 0 else 2]) - start,
                    gradient=max(0, kept[back].start - kept[following].start),
                )
            )
        head = kept[Interval(Phase.AFTER_FORWARD, len(names) - 1)]
        rest = measured.step_seconds - sum(forward) - sum(backward)
        stages.append(Stage(rest, 0.0, 0, 0, 0, 0, head.peak - head.start, 0))
        first = kept[Interval(Phase.FORWARD, 0)].start
        outside = [at.peak for i, at in kept.items() if i.phase in (Phase.BEFORE, Phase.OPTIMIZER)]
        outside += [kept[i].peak for i in (Interval(Phase.AFTER_BACKWARD, 0),) if i in kept]
        self._least, self._base = max(outside, default=0), first
        self._slot = max(1, -(-(max(at.peak for at in kept.values()) - first) // SLOTS))
        self._seconds = seconds_by_slot(stages, self._slot)

    def ratio(self, budget: int) -> float | None:
        """Returns the seconds of the step against keeping everything; ``None`` if nothing fits."""
        slot = min(SLOTS, (budget - self._base) // self._slot)
        if budget < self._least or slot < 0 or not np.isfinite(self._seconds[slot]):
            return None
        return float(self._seconds[slot] / self._plain_seconds)


_PHASES = (Phase.FORWARD, Phase.AFTER_FORWARD, Phase.BACKWARD, Phase.AFTER_BACKWARD)


def seconds_by_slot(stages: list[Stage], slot: int) -> NDArray[np.float64]:
    """Returns the least seconds of the whole chain with 0, 1, 2.. ``SLOTS`` times ``slot`` bytes above its start.

    Stages ``s`` to ``t`` either keep all of ``s``, or keep its input, run on to some ``cut``, do what follows, and
    begin anew with ``s`` to ``cut - 1``.
    """
    last = len(stages) - 1
    best: dict[tuple[int, int], NDArray[np.float64]] = {}

    def within(seconds: NDArray[np.float64], taken: int, needed: int) -> NDArray[np.float64]:
        """Seconds where ``taken`` bytes are not free, and impossible below ``needed``."""
        result = np.full(SLOTS + 1, np.inf)
        shift, least = -(-max(0, taken) // slot), -(-max(0, needed) // slot)
        if shift <= SLOTS:
            result[shift:] = seconds[: SLOTS + 1 - shift]
        result[:least] = np.inf
        return result

    def by_length() -> list[tuple[int, int]]:
        return [(s, s + length) for length in range(last + 1) for s in range(last + 1 - length)]

    for s, t in by_length():
        stage, gradient = stages[s], stages[t].gradient
        needed = max(stage.kept_peak + gradient, stage.backward_peak)
        own = np.full(SLOTS + 1, stage.forward + stage.backward)
        if s == t:
            best[s, t] = within(own, 0, needed)
            continue
        found = own + within(best[s + 1, t], stage.kept, needed)
        ran = list(accumulate(stages[n].forward for n in range(s, t)))
        on_the_way = [stages[n].forward_peak + (stages[n - 1].output if n > s else 0) for n in range(s, t)]
        highest = list(accumulate(on_the_way, max))
        for cut in range(s + 1, t + 1):
            after = within(best[cut, t], stages[cut - 1].output, highest[cut - 1 - s] + gradient)
            found = np.minimum(found, ran[cut - 1 - s] + after + best[s, cut - 1])
        best[s, t] = found
    return best[0, last]
