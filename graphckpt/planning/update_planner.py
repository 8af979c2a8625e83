"""Chooses what the next updates of a training run: options that are not known yet, and then the fastest plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from math import inf, sqrt
from typing import NamedTuple, final

import torch
from torch import nn

from graphckpt.errors import PlanError
from graphckpt.ledger.table import time_of
from graphckpt.planning.candidates import FULL, Option, parse_compile, parse_partition_request
from graphckpt.planning.candidates import options as candidates_of
from graphckpt.planning.frontier import Frontier, Move
from graphckpt.planning.op_levels import with_levels
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan import KEEP_ALL, Plan
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.program import Interval, Phase
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.planning.steps import RealStep
from graphckpt.planning.update_table import UpdateKey, UpdateTable
from graphckpt.rules.basic import Full
from graphckpt.stores.base import Store, parse_offload
from graphckpt.stores.placement import placement_of
from graphckpt.units import at_least, format_bytes, format_sizes

_ATTEMPTS = 6  # an update whose backward takes another order than its forward needs more than one
_MARGIN = 0.01  # of the budget, where options were shown by smaller batches only
_CUTS = 16  # positions at which one option may end and another begin


@final
@dataclass(frozen=True)
class Candidates:
    """The options of each block."""

    options: Sequence[Option]
    """``keep`` is the first."""
    base: int
    """The number of ``full``, with which updates begin."""
    stores: Sequence[Store | None]
    """Where each option stores saved tensors; ``None`` is the device."""
    is_base_allowed: bool = True
    """Whether plans may have ``full``."""
    notes: Sequence[str] = ()

    def on_device(self, number: int) -> int:
        """Returns the option with the same rule that offloads nothing."""
        option = self.options[number]
        return next(n for n, other in enumerate(self.options) if other.rule == option.rule and not other.is_far)


def candidates_for_updates(
    named: Sequence[tuple[str, nn.Module]], options: PlanOptions, device: torch.device, group: PlanGroup
) -> Candidates:
    """Returns the options of each block. All processes of ``group`` must have the same."""
    code = parse_compile(options.compile, options.candidates)
    ranks, notes = parse_partition_request(options.partition, group.size)
    target, offload = parse_offload(options.offload), options.offload
    if target is not None and target.tier == "host" and device.type == "cpu":
        offload = False
        notes.append(RealStep.no_copies)
    listed = candidates_of(offload, options.candidates, code=code, partition=ranks)
    _, by_class = with_levels(listed, [0], lambda: [[]])  # fixed ones: to find some takes timing op by op
    candidates = by_class[0]
    full = (n for n, o in enumerate(candidates) if o.rule == Full() and not (o.is_far or o.is_part))
    base = next(full, len(candidates))
    is_base_allowed = base < len(candidates)
    if not is_base_allowed:
        candidates = [*candidates, FULL]
    group.check_equal(
        compile=repr(options.compile),
        blocks=[name for name, _ in named],
        options=[option.name for option in candidates],
        check=options.check,
    )
    stores = [placement_of(option.fields).store if option.is_far or option.is_part else None for option in candidates]
    return Candidates(candidates, base, stores, is_base_allowed, notes)


class _Choice(NamedTuple):
    seconds: float
    peak: int
    plan: tuple[int, ...]


@final
class UpdateChain:
    """A forward and its backward as a chain of blocks for :class:`~graphckpt.planning.frontier.Frontier`."""

    start = ()

    def __init__(
        self, table: UpdateTable, key: UpdateKey, calls: Sequence[int], allowed: Sequence[Sequence[int]]
    ) -> None:
        self._table, self._key, self._calls, self._allowed = table, key, calls, allowed
        self.blocks = [key[1][call] for call in calls]
        self.num_blocks = len(calls)
        spans = table.base(key)
        starts = [spans[Interval(Phase.FORWARD, call)].start for call in calls]
        self._levels = [*starts, spans[Interval(Phase.FORWARD, calls[-1])].end]
        """Before each block, and after the last one."""
        self.base = table.start_bytes + starts[0]
        self._after_forward = [0] * len(calls)
        self._after_backward = [0] * len(calls)
        self._head = 0
        fixed = 0
        place = {call: number for number, call in enumerate(calls)}
        before = Interval(Phase.BEFORE)
        for interval, span in spans.items():
            if interval.is_of_block:
                before = interval
            elif before.call not in place:
                fixed = max(fixed, span.peak)
            elif before.phase is Phase.BACKWARD:
                number = place[before.call]
                if interval.phase is Phase.OPTIMIZER:
                    fixed = max(fixed, span.peak)
                else:
                    self._after_backward[number] = max(self._after_backward[number], span.peak)
            elif before.call == calls[-1]:
                self._head = max(self._head, span.peak)
            else:
                number = place[before.call]
                self._after_forward[number] = max(self._after_forward[number], span.peak)
        self.fixed_peak = table.start_bytes + fixed
        self._backward_starts = [
            spans[interval].start if (interval := Interval(Phase.BACKWARD, call)) in spans else 0 for call in calls
        ]

    def options(self, block: int) -> list[float]:
        number = self.blocks[block]
        return [self._table.seconds(number, option) for option in range(max(self._allowed[number]) + 1)]

    def move(self, block: int, option: int, state: object) -> Move | None:
        del state
        if option not in self._allowed[self.blocks[block]]:
            return None
        row = self._table.row(self._key, self._calls[block], option)
        retained = max(row.retained, row.retained_later)
        level, after = self._levels[block : block + 2]
        own = self._backward_starts[block] + row.output + row.rise_backward
        return Move(
            forward_peak=max(row.rise_forward, self._after_forward[block] - level + retained),
            change=after - level + retained,
            backward_peak=max(own - after, self._after_backward[block] - after - retained),
            state=(),
        )

    def head_peak(self, state: object) -> int:
        del state
        return max(0, self._head - self._levels[-1])


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class UpdatePlanner:
    """The plans for the largest update of a table."""

    table: UpdateTable
    names: Sequence[str]
    candidates: Candidates
    options: PlanOptions
    model: nn.Module
    device: str
    too_large: frozenset[int] = frozenset()
    """The blocks that may not be offloaded, since the host budget is full."""
    removed: Sequence[int] = ()
    """The blocks that the program has taken out of the model."""
    notes: tuple[str, ...] = ()

    @cached_property
    def key(self) -> UpdateKey:
        return self.table.largest

    @cached_property
    def called(self) -> list[int]:
        return sorted(set(self.key[1]))

    @cached_property
    def allowed(self) -> list[list[int]]:
        """The numbers of the options of each block that updates have shown."""
        base = self.candidates.base
        classes = {}
        for kind in set(self.table.classes):
            shown = [o for o in range(len(self.candidates.options)) if o != base and self.table.has_read(kind, o)]
            classes[kind] = sorted([*shown, base]) if self.candidates.is_base_allowed or not shown else shown
        local = [number for number, option in enumerate(self.candidates.options) if not option.is_far]
        return [
            [option for option in classes[kind] if option in local or block not in self.too_large]
            for block, kind in enumerate(self.table.classes)
        ]

    @property
    def plain_peak(self) -> int:
        return self.table.peak([0] * len(self.names))

    @property
    def num_missing(self) -> int:
        """The number of blocks that no update of the largest size has called."""
        return len(set(range(len(self.names))).difference(self.called, self.removed))

    def fits_plain(self, limit: int | None) -> bool:
        """Whether all blocks may keep everything within ``limit`` bytes, as far as updates have shown."""
        return limit is not None and self.is_plain_known and self.plain_peak <= limit

    @cached_property
    def is_exact(self) -> bool:
        """Whether all options were shown by updates of the largest size."""
        return all(
            self.table.is_exact(self.key, call, option)
            for call, block in enumerate(self.key[1])
            for option in self.allowed[block]
        )

    @property
    def is_plain_known(self) -> bool:
        return all(0 in self.allowed[block] for block in self.called)

    def next_turn(self, limit: int | None, *, is_first: bool, only_keep: bool) -> list[int] | None:
        """Returns the options of the next update, which show what is not known yet; ``None`` if nothing fits.

        Args:
            limit: No peak is expected to exceed these bytes. Without a limit one block of each class has an option.
            is_first: Whether updates are compared from the next one on: a block without an equal one then is
                recomputed, to compare it with itself.
            only_keep: Whether other options than ``keep`` are of no interest.
        """
        base = self.table.base_option
        turn = [base] * len(self.names)
        classes = list(dict.fromkeys(self.table.classes[block] for block in self.called))
        free = {kind: list(self._positions(kind)) for kind in classes}
        if is_first:
            classes = [kind for kind in classes if len(self._alike(kind)) > 1]
        for option in range(1 if only_keep else len(self.candidates.options)):
            for kind in classes:
                if option == base or self.table.has_read(kind, option):
                    continue
                for block in free[kind]:
                    if len(self._alike(kind)) > 1 and self._has_neighbour(turn, block):
                        continue  # what a block holds for the next one would count as what that one frees
                    trial = [*turn[:block], option, *turn[block + 1 :]]
                    if limit is None or self.table.peak(trial) <= limit:
                        turn = trial
                        free[kind].remove(block)
                        if limit is None or len(free[kind]) == 1:  # the last one is for comparison
                            free[kind].clear()
                        break
        return None if set(turn) == {base} else turn

    def _has_neighbour(self, turn: Sequence[int], block: int) -> bool:
        """Whether a block next to this one has another option than ``full``."""
        place = self.called.index(block)
        others = self.called[max(0, place - 1) : place] + self.called[place + 1 : place + 2]
        return any(turn[other] != self.table.base_option for other in others)

    def _positions(self, kind: int) -> Iterator[int]:
        """Yields the blocks of a class for other options: first those with neighbours that are compared."""
        alike = self._alike(kind)
        yield from dict.fromkeys([*alike[-2::-2], *alike[-3::-2], *alike])

    def _alike(self, kind: int) -> list[int]:
        """Returns the blocks of a class, without those that compute less in backward."""
        typical = self.table.typical_blocks(self.key)
        alike = [block for block in self.called if self.table.classes[block] == kind]
        return [block for block in alike if block in typical] or alike

    def room(self, turn: Sequence[int], limit: int | None) -> float:
        """Returns how much longer a batch may be within ``limit`` bytes; attention may grow by the square of that."""
        start = self.table.start_bytes
        if limit is None:
            return 1.0
        return sqrt(max(1.0, (limit - start) / max(1, self.table.peak(turn) - start)))

    def fastest(self, limit: int) -> _Choice | None:
        """Returns the fastest plan whose peak is at most ``limit`` bytes, and whose offloads fit on the host."""
        choice = self._fastest(limit)
        if choice is None or self.options.host_bytes is None:
            return choice
        moved = {block: self._moved_bytes(block, choice.plan[block]) for block in self.called}
        if sum(moved.values()) <= self.options.host_bytes:
            return choice
        largest = max(moved, key=lambda block: (moved[block], block))
        return replace(self, too_large=self.too_large | {largest}).fastest(limit)

    def _fastest(self, limit: int) -> _Choice | None:
        plain = self._choice([0] * len(self.names))
        if self.is_plain_known and plain.peak <= limit:
            return plain
        fitting = [choice for choice in self._baselines if choice.peak <= limit]
        bound = limit
        for _ in range(_ATTEMPTS):
            parts = [part for _, front in self._fronts if (part := front.fastest(bound)) is not None]
            if not parts or len(parts) < len(self._fronts):
                break
            choice = self._choice(self._joined(parts))
            if choice.peak <= limit:
                fitting.append(choice)
                break
            bound -= choice.peak - limit
        return min(fitting, default=None)

    @cached_property
    def lowest(self) -> _Choice:
        return min(self._baselines, key=lambda choice: (choice.peak, *choice))

    def plan(self, budget: int | None, correction: int = 0, *, or_lowest: bool = False) -> tuple[Plan, tuple[int, ...]]:
        """Returns the fastest plan for ``budget`` bytes, ``None`` being the lowest possible peak, and its options.

        Args:
            budget: The bound of the peak.
            correction: By how many bytes predictions are raised.
            or_lowest: Whether the plan with the lowest peak is returned if none fits, with a warning.

        Raises:
            PlanError: No plan fits.
        """
        correction = max(0, correction) if budget is None else correction
        margin = 0 if budget is None or self.is_exact else int(_MARGIN * budget)
        choice = self.lowest if budget is None else self.fastest(budget - correction - margin)
        if choice is None:
            fault = self._infeasible(budget or 0, correction)
            if not or_lowest:
                raise fault
            warnings.warn(f"graphckpt: {fault} · using the plan with the lowest peak", stacklevel=2)
            choice = self.lowest
        budget = choice.peak + correction if budget is None else budget
        return self._to_plan(choice, budget, correction), choice.plan

    @cached_property
    def _fronts(self) -> list[tuple[UpdateChain, Frontier]]:
        """A chain for the blocks of each pass, from the last pass on; none if a pass runs a block twice."""
        fronts: list[tuple[UpdateChain, Frontier]] = []
        covered: set[int] = set()
        for calls in reversed(list(_passes(self.table.base(self.key)))):
            blocks = [self.key[1][call] for call in calls]
            if len(set(blocks)) < len(blocks):
                return []
            if covered.isdisjoint(blocks):
                chain = UpdateChain(self.table, self.key, calls, self.allowed)
                fronts.append((chain, Frontier(chain)))
                covered.update(blocks)
        return fronts if covered == set(self.called) else []

    @cached_property
    def _baselines(self) -> list[_Choice]:
        """One option for all blocks, or one for the first ones and another for the rest; and the lowest peaks."""
        every, num_blocks = range(len(self.candidates.options)), len(self.names)
        plans = [[option] * num_blocks for option in every]
        if not self._fronts:
            ends = sorted({n * num_blocks // _CUTS for n in range(1, _CUTS)} - {0})
            plans += [[a] * end + [b] * (num_blocks - end) for a, b in permutations(every, 2) for end in ends]
        else:
            plans.append(self._joined([front.least_peak() for _, front in self._fronts]))
        return [self._choice(plan) for plan in plans]

    def _joined(self, parts: Sequence[Sequence[int]]) -> list[int]:
        plan = [0] * len(self.names)
        for (chain, _), part in zip(self._fronts, parts, strict=True):
            for block, option in zip(chain.blocks, part, strict=True):
                plan[block] = option
        return plan

    def _choice(self, plan: Sequence[int]) -> _Choice:
        base = self.table.base_option
        options = [option if option in self.allowed[block] else base for block, option in enumerate(plan)]
        by_class = {self.table.classes[block]: options[block] for block in self.called}
        default = 0 if set(by_class.values()) == {0} else base
        for block in set(range(len(plan))).difference(self.called):
            options[block] = by_class.get(self.table.classes[block], default)
        seconds = sum(self.table.seconds(block, options[block]) for block in self.called)
        return _Choice(seconds, self.table.peak(options), tuple(options))

    def _to_plan(self, choice: _Choice, budget: int, correction: int) -> Plan:
        plain = self._choice([0] * len(self.names))
        levels = list(self.table.levels(choice.plan))
        highest = max(levels, key=lambda level: level.peak)
        seconds = self.table.plain_seconds
        peak = choice.peak + correction
        return Plan(
            rows=tuple(self._rows(choice.plan)),
            predicted_peak_bytes=peak,
            predicted_step_seconds=seconds + choice.seconds - plain.seconds,
            binding=self._name(highest.interval),
            floor_bytes=min(self.lowest.peak + max(0, correction), peak),
            budget_bytes=budget,
            plain_peak_bytes=plain.peak + correction,
            plain_step_seconds=seconds,
            device=self.device,
            stages=tuple(
                Stage(name=self._name(level.interval), start_bytes=level.start, peak_bytes=level.peak)
                for level in levels
            ),
            notes=self._notes(),
            correction_bytes=correction,
            memory_budget=None,
            model=self.model,
            front=lambda: self._front(correction),
        )

    def _front(self, correction: int) -> list[Plan]:
        """Returns the Pareto-optimal plans, lowest peak first."""
        parts = zip(*(front.plans() for _, front in self._fronts), strict=False)
        choices = sorted([*self._baselines, *(self._choice(self._joined(each)) for each in parts)], key=_by_peak)
        best = [c for n, c in enumerate(choices) if c.seconds < min((o.seconds for o in choices[:n]), default=inf)]
        return [self._to_plan(choice, choice.peak + correction, correction) for choice in best]

    def _rows(self, plan: Sequence[int]) -> Iterator[PlanRow]:
        compile_field = parse_compile(self.options.compile, self.options.candidates).field
        for block, number in enumerate(plan):
            if block in self.removed:
                continue
            option = self.candidates.options[number]
            name, fields = option.name, dict(option.fields)
            if compile_field is not None:
                name, fields = f"{name}, compiled", {"compile": compile_field, **fields}
            if self.options.contiguous and not option.is_far:
                name, fields = f"{name} + slab", {**fields, "contiguous": True}
            if self.options.determinism_check is not None and fields != KEEP_ALL:
                fields["determinism_check"] = self.options.determinism_check
            extra = self.table.seconds(block, number) - self.table.seconds(block, 0)
            yield PlanRow(
                block=self.names[block],
                option=name,
                fields=fields,
                extra_seconds=extra,
                moved_bytes=self._moved_bytes(block, number),
            )

    def _moved_bytes(self, block: int, number: int) -> int:
        """Returns what a block offloads: what it retains less than without."""
        if not self.candidates.options[number].is_far:
            return 0
        calls = [call for call, other in enumerate(self.key[1]) if other == block]
        on_device, offloaded = (
            sum(self.table.row(self.key, call, each).retained for call in calls)
            for each in (self.candidates.on_device(number), number)
        )
        return max(0, on_device - offloaded)

    def _notes(self) -> tuple[str, ...]:
        if not self.num_missing:
            return self.notes
        what = f"the update that was measured did not call {self.num_missing} of the blocks"
        return (*self.notes, f"{what}; one that does takes more memory")

    def _infeasible(self, budget: int, correction: int) -> PlanError:
        levels = list(self.table.levels(self.lowest.plan))
        where = time_of(self._name(max(levels, key=lambda level: level.peak).interval))
        limit, peak = format_sizes(budget, self.lowest.peak + correction)
        content = "weights, optimizer state, inputs and what runs before"
        return PlanError(
            f"memory_budget {limit}: no plan fits · the lowest possible peak is {peak}, reached {where}; "
            f"{format_bytes(self.table.start_bytes)} of it are alive before the first block: {content} it · "
            f"fix: a smaller batch, or a larger budget: {at_least(self.lowest.peak + correction)!r}, or 'min'"
        )

    def _name(self, interval: Interval) -> str:
        """Returns the name of an interval for tables and messages, such as ``"backward of h.1"``."""
        if interval.call < 0 or interval.phase is Phase.OPTIMIZER:
            return interval.phase.value
        name = self.names[self.key[1][interval.call]]
        if interval.phase is Phase.AFTER_FORWARD and interval.call == len(self.key[1]) - 1:
            return f"the head and the loss, after {name}"
        return f"{interval.phase.value} {name}"


def _by_peak(choice: _Choice) -> tuple[int, float]:
    return choice.peak, choice.seconds


def _passes(intervals: Iterable[Interval]) -> Iterator[list[int]]:
    """Yields the calls of forwards without a backward between them."""
    calls: list[int] = []
    is_over = False
    for phase, call in intervals:
        if phase is Phase.FORWARD:
            if is_over:
                yield calls
                calls, is_over = [], False
            calls.append(call)
        is_over |= phase is Phase.BACKWARD
    yield calls
