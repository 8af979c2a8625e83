"""Gives the processes that run one step together the same plan.

Each process measures, since all of them must run a step that contains collectives. All of them use the traces of the
leader, which has the highest peak, and the times of the process that is slowest within the blocks, since the others
wait for that one. So all choose the same plan.

The stages of a pipeline plan different blocks, in different numbers of runs, and still have to run each step together.
They agree before each run on whether there is one, and a stage that is done runs on until all are.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, final

import torch.distributed as dist

from graphckpt.errors import ConfigError, GraphckptError, PlanError
from graphckpt.planning.intervals import Interval, LevelLog, LevelSpan, Phase
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.stores.partition import RendezvousTimeout, exchange

_SECONDS_TO_REPORT = 10.0  # that a failed process waits for the others to read its error
_SECONDS_TO_READ = 0.1  # for the others, before this process ends, which may host the store

# Note [One plan for all processes]
# The recomputation of a block issues its collectives again, so processes with different plans would deadlock. All that
# plans and the number of runs follow from is therefore exchanged: traces, times, levels, the bytes of a real step. The
# rest is computed alike on all. Messages go through the key-value store of the group, not through its collectives as
# with `dist.broadcast_object_list`: a process whose step has failed is at another collective than the others, and must
# still be able to report its error.


@final
class GroupError(PlanError):
    """Another process has failed, exited or did not join: the processes cannot plan together."""


@final
class PlanGroup:
    """The processes that plan together. As a context manager: if one fails, all raise.

    ``step_group`` are the processes that run the step together, if they are more than these.
    """

    def __init__(
        self, process_group: Any = None, step_group: PlanGroup | None = None, topic: str = "graphckpt plan"
    ) -> None:
        self._group = process_group
        self._topic = topic
        self._step_group = step_group
        self._members = [0] if process_group is None else dist.get_process_group_ranks(process_group)
        self._is_over = False
        self.size = len(self._members)
        self.rank = 0 if process_group is None else process_group.rank()
        self.leader = -1
        """The process whose traces all use; -1 before there is one."""
        self.notes: list[str] = []
        """Notes for the plans."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._end(error)
        finally:
            if self._step_group is not None and error is not None:  # without one, they have agreed on the end already
                self._step_group._end(error)

    def _end(self, error: BaseException | None) -> None:
        # Each `all_gather` has a number: a process that ends without an error takes part in one more, in which a
        # process that has failed can report it. Without it, the error would be read in the next plan.
        if self._is_over or self.size == 1:
            return
        if error is None:
            self.all_gather(None)  # no process has failed until now
            return
        text = str(error) if isinstance(error, GraphckptError) else f"{type(error).__name__}: {error}"
        with suppress(RendezvousTimeout, RuntimeError):
            self._exchange({"fault": text}, _SECONDS_TO_REPORT if isinstance(error, Exception) else 0.0)
            time.sleep(_SECONDS_TO_READ)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values that the processes pass, by rank, which are JSON."""
        if self.size == 1:
            return [value]
        fix = "fix: plan on all processes of the group at once, or select another `group`"
        seconds = self._group.get_group_store().timeout.total_seconds()
        try:
            answers = self._exchange({"value": value}, seconds)
        except RendezvousTimeout as absent:
            self._is_over = True
            raise GroupError(f"{absent} to plan with this process for {seconds:g} s · {fix}") from None
        except RuntimeError as error:
            self._is_over = True
            first_line = str(error).split("\n", 1)[0]
            raise GroupError(f"another process exited while planning together ({first_line}) · {fix}") from error
        for member, answer in zip(self._members, answers, strict=True):
            if "fault" in answer:
                self._is_over = True
                more = "" if " · fix: " in answer["fault"] else " · fix: see the error of that process"
                raise GroupError(f"rank {member}: {answer['fault']}{more}")
        return [answer["value"] for answer in answers]

    def begin_step(self) -> None:
        """Waits for the processes of the step group, before a step that all of them run."""
        if self._step_group is not None:
            self._step_group.all_gather(True)

    def run_until_all_are_done(self, step: Callable[[], object]) -> None:
        """Runs the step for the processes of the step group that measure still."""
        while self._step_group is not None and any(self._step_group.all_gather(False)):
            step()

    def num_sharing(self, memory_id: str | None) -> int:
        """Returns how many processes that run the step have the same memory; the first exchange of a plan."""
        return (self._step_group or self).all_gather(memory_id).count(memory_id)

    def from_leader(self, value: Any) -> Any:
        return self.all_gather(value)[self.leader]

    def levels(self, levels: LevelLog) -> LevelLog:
        """Returns those that the leader passes."""
        if self.size == 1:
            return levels
        rows = self.from_leader([(*interval, *span) for interval, span in levels.items()])
        return {Interval(Phase(phase), call): LevelSpan(*span) for phase, call, *span in rows}

    def max(self, value: float) -> Any:
        return max(self.all_gather(value))

    def times(self, measured: MeasuredStep) -> MeasuredStep:
        """Returns the measured step with the times of the process whose forwards take the longest.

        Times of whole steps are no guide: processes that average gradients in backward wait for each other.
        """
        rows = self.all_gather((measured.step_seconds, measured.forward_seconds, measured.backward_seconds))
        _, *slowest = max(rows, key=lambda row: sum(map(sum, row[1])))
        forward, backward = (tuple(map(tuple, table)) for table in slowest)
        step = max(row[0] for row in rows)
        return replace(measured, step_seconds=step, forward_seconds=forward, backward_seconds=backward)

    def elect_leader(self, peak: int) -> None:
        """Makes the process whose plain step has the highest peak the leader, unless there is one."""
        if self.leader >= 0:
            return
        peaks = self.all_gather(peak)
        self.leader = peaks.index(max(peaks))
        if min(peaks) != max(peaks):
            highest = f"rank {self._members[self.leader]}, which has the highest"
            self.notes.append(f"peaks differ between processes; planned for {highest}")

    def check_equal(self, **settings: Any) -> None:
        """Checks that all processes are about to plan the same."""
        rows = self.all_gather(settings)
        for member, row in zip(self._members, rows, strict=True):
            for name, value in row.items():
                if value != rows[0][name]:
                    raise PlanError(
                        f"{name}: rank {self._members[0]} has {_short(rows[0][name])}, rank {member} {_short(value)} · "
                        "fix: plan the same on all processes, or select those that run the same blocks by `group`"
                    )

    def _exchange(self, message: dict[str, Any], seconds: float) -> list[Any]:
        data = zlib.compress(json.dumps(message).encode(), 1)  # the store takes up to 8 MiB at a time
        answers = exchange(self._group, self._members, data, topic=self._topic, seconds=seconds)
        return [json.loads(zlib.decompress(answer)) for answer in answers]


def planning_group(group: Any = None, step_group: Any = None) -> PlanGroup:
    """Returns the processes of ``group``.

    Args:
        group: a ``ProcessGroup``; ``None`` is all processes, where ``torch.distributed`` is initialised; ``False`` is
            this process alone.
        step_group: the ``ProcessGroup`` that runs the step, if it is larger; ``None`` is the one of ``group``.

    >>> planning_group().size
    1
    """
    others = None
    if step_group is not None:
        _check_group(step_group, "step_group", "None where all processes plan the same blocks")
        others = PlanGroup(step_group, topic="graphckpt steps")
    if group is False:
        return PlanGroup(None, others)
    if group is None:
        is_real = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
        return PlanGroup(dist.group.WORLD if is_real else None, others)
    _check_group(group, "group", "use None for all processes, or False for one")
    return PlanGroup(group, others)


def _check_group(group: Any, name: str, fix: str) -> None:
    is_there = dist.is_available() and dist.is_initialized()
    if is_there and isinstance(group, dist.ProcessGroup):
        return
    is_outside = is_there and group == dist.GroupMember.NON_GROUP_MEMBER
    what = "a group of this process" if is_outside else "a ProcessGroup"
    raise ConfigError(f"{name}: expected {what}, got {group!r} · fix: {fix}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
