"""A simulated step at any batch size and on any device of a kind, from a few runs of it.

The sizes of a step's storages, and the costs of its ops, grow linearly with the batch. Two runs tell those of any other
size, and a third one checks that it is so. Which kernels of attention a device has decides what a step allocates; its
rates do not. So the devices that have the same kernels share the runs, and each has its own seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from graphckpt.simulation.allocations import NUM_STEPS, AllocationLog, Replay, replay
from graphckpt.simulation.op_costs import FUSED_KERNELS, OpCost
from graphckpt.simulation.profile import DeviceProfile

# Note [From two runs to all sizes]
# A storage of 800 bytes at batch 2 and of 1600 at batch 4 is one of 400 n, one of 800 at both is of weights. The sizes
# of all storages at batch 58 are (1 - 28) mine + 28 others, with 28 = (58 - 2) / (4 - 2). It is not known before that
# this holds: an op may allocate more from some size on, as the backward of an embedding does above 3072 tokens. So the
# largest size that is found this way runs, see `SizedRuns.check`, and if its log is another one, all sizes run from
# then on.
#
# 19 devices with three sets of kernels take 18 runs of a model: two policies at three sizes each.

_Numbers = NDArray[np.float64]
_MANY = 2**40  # bytes or operations, beside which the launch of a kernel takes no time
_MOST = 2**20  # samples


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class SizedRun:
    """A step at one batch size: the allocations of the first steps, and what the ops of the second cost."""

    batch: int
    log: AllocationLog
    """The second step is repeated in it."""
    keys: Sequence[OpCost]
    """The costs of the ops, without their bytes and operations."""
    amounts: _Numbers
    """The bytes and the floating point operations of each op."""

    @classmethod
    def of(cls, batch: int, log: AllocationLog, costs: Sequence[OpCost]) -> SizedRun:
        amounts = np.array([cost[1:3] for cost in costs], np.float64).reshape(-1, 2)
        keys = [cost._replace(num_bytes=0, flops=0.0) for cost in costs]
        # A copy: the trace of a run goes on to log what is freed later, such as its inputs.
        return cls(batch=batch, log=log.repeated(NUM_STEPS), keys=keys, amounts=amounts)

    @property
    def attention(self) -> tuple[str, ...]:
        """The fused kernels of attention that it runs."""
        return tuple(dict.fromkeys(key.kinds[0] for key in self.keys if key.kinds and key.kinds[0] in FUSED_KERNELS))

    def has_structure_of(self, other: SizedRun) -> bool:
        """Whether the other run has the same storages and ops, of whatever sizes."""
        mine, others = ((run.log.steps, run.log.streams, len(run.log.sizes), run.keys) for run in (self, other))
        return mine == others

    def seconds(self, machine: DeviceProfile) -> float:
        """Returns the seconds of the step on a device with the same kernels."""
        numbers: dict[OpCost, list[int]] = {}
        for number, key in enumerate(self.keys):
            numbers.setdefault(key, []).append(number)
        total = 0.0
        for key, listed in numbers.items():
            # The seconds of an op are the larger of two that are linear: those of its bytes and of its operations.
            # Their slopes are read from the profile once for each kind of op, not for each op: a step has thousands, of
            # each device and size.
            launch = machine.seconds(OpCost(key.side, 0))
            of_byte = (machine.seconds(OpCost(key.side, _MANY)) - launch) / _MANY
            of_flop = (machine.seconds(key._replace(flops=float(_MANY))) - launch) / _MANY if key.rate else 0.0
            num_bytes, flops = self.amounts[listed].T
            total += float(np.maximum(of_byte * num_bytes, of_flop * flops).sum()) + launch * len(listed)
        return total

    def at(self, batch: int, other: SizedRun) -> SizedRun:
        """Returns the step at a batch size, from two runs with the same structure."""
        share = (batch - self.batch) / (other.batch - self.batch)
        sizes, amounts = (
            (1 - share) * np.asarray(mine, np.float64) + share * np.asarray(others, np.float64)
            for mine, others in ((self.log.sizes, other.log.sizes), (self.amounts, other.amounts))
        )
        log = replace(self.log, sizes=np.rint(sizes).astype(np.int64).tolist())
        return replace(self, batch=batch, log=log, amounts=amounts)

    def with_workspaces(self, num_bytes: int) -> AllocationLog:
        """Returns the allocations on a device with other workspaces of cuBLAS."""
        sizes = self.log.sizes.copy()
        for storage, kind in self.log.kinds.items():
            if kind == "workspaces":
                sizes[storage] = num_bytes
        return replace(self.log, sizes=sizes)


class Figures(NamedTuple):
    """The figures of a step at one batch size on one device."""

    batch: int
    allocated_bytes: int
    reserved_bytes: int
    nvidia_smi_bytes: int
    seconds: float


@final
class SizedRuns:
    """The runs of a step under one choice of policies, on devices with the same kernels.

    Args:
        run: Runs the step at a batch size.
        small: The smaller one of two sizes that run.
        workspace_bytes: Those of the device that is simulated.
    """

    def __init__(self, run: Callable[[int], SizedRun], small: int, workspace_bytes: int) -> None:
        self._run = run
        self._small = small
        self._workspace_bytes = workspace_bytes
        self._runs: dict[int, SizedRun] = {}
        self._replays: dict[tuple[int, int], Replay] = {}
        self._is_linear = True
        self._line: tuple[SizedRun, SizedRun] | None = None

    def run(self, batch: int) -> SizedRun:
        """Returns the run of the step at a batch size, which runs if it has not yet."""
        if batch not in self._runs:
            self._runs[batch] = self._run(batch)
        return self._runs[batch]

    def at(self, batch: int) -> SizedRun:
        """Returns the step at a batch size, as two others tell it where that is possible."""
        if batch == 1 or not self._is_linear or batch in self._runs:  # with one sample some copies are views
            return self.run(batch)
        if self._line is None:
            self._line = self.run(self._small), self.run(2 * self._small)
            self._is_linear = self._line[0].has_structure_of(self._line[1])
            return self.at(batch)
        one, other = self._line
        return one.at(batch, other)

    def check(self, batch: int) -> bool:
        """Runs the step at a batch size; returns whether it is as two others tell.

        If it is not, all sizes run from now on.
        """
        if not self._is_linear:
            return True
        expected, run = self.at(batch), self.run(batch)
        is_equal = run.has_structure_of(expected) and run.log.sizes == expected.log.sizes
        if not (is_equal and np.allclose(run.amounts, expected.amounts, rtol=1e-9)):
            self._is_linear = False
            self._replays = {}
        return self._is_linear

    def figures(self, batch: int, machine: DeviceProfile) -> Figures:
        """Returns the figures on a device, whose memory may be too small."""
        reserved = self._replay(batch, machine).reserved_bytes
        run = self.at(batch)
        allocated = sum(self._log(run, machine).parts_at_peak(machine.rounded, step=2).values())
        return Figures(batch, allocated, reserved, reserved + machine.context_bytes, run.seconds(machine))

    def fits(self, batch: int, machine: DeviceProfile) -> bool:
        """Whether the allocator reserves no more than the device has, so that it never has to release memory."""
        return self._replay(batch, machine).reserved_bytes <= _capacity(machine)

    def largest(self, machine: DeviceProfile) -> int:
        """Returns the largest batch size that fits on a device; 0 if none does."""
        small = self._small
        if not self.fits(small, machine):
            return next((batch for batch in range(small - 1, 0, -1) if self.fits(batch, machine)), 0)
        limit, num_tries = _capacity(machine), 0
        while True:
            # Of all devices with the same workspaces, whose replays tell about where the memory of this one ends.
            sizes = {n: one.reserved_bytes for (n, key), one in self._replays.items() if key == machine.workspace_bytes}
            low = max(n for n, num_bytes in sizes.items() if num_bytes <= limit)
            high = min((n for n, num_bytes in sizes.items() if num_bytes > limit and n > low), default=_MOST)
            if high - low <= 1:
                return low
            other = high if high in sizes else max((n for n in sizes if n < low), default=0)
            guess = 2 * low
            if num_tries % 4 == 3 and other == high:
                guess = (low + high) // 2  # where the other guesses hardly move
            elif other:  # reserved bytes are almost linear
                per_sample = max(1.0, (sizes[other] - sizes[low]) / (other - low))
                guess = low + int((limit - sizes[low]) / per_sample)
            num_tries += 1
            self.fits(min(max(guess, low + 1), high - 1), machine)

    def _replay(self, batch: int, machine: DeviceProfile) -> Replay:
        key = batch, machine.workspace_bytes
        if key not in self._replays:
            self._replays[key] = replay(self._log(self.at(batch), machine))
        return self._replays[key]

    def _log(self, run: SizedRun, machine: DeviceProfile) -> AllocationLog:
        is_own = machine.workspace_bytes == self._workspace_bytes
        return run.log if is_own else run.with_workspaces(machine.workspace_bytes)


def _capacity(machine: DeviceProfile) -> int:
    return machine.memory_bytes - machine.context_bytes
