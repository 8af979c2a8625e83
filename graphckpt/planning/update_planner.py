"""Chooses the options of the next updates of a training, which show what is not known yet, and predicts from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import final

import torch
from torch import nn

from graphckpt.planning.candidates import FULL, Option, parse_compile, parse_partition_request
from graphckpt.planning.candidates import options as candidates_of
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.op_levels import with_levels
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.planner import Planner
from graphckpt.planning.search import PolicyChoice, PolicySearch
from graphckpt.planning.steps import RealStep
from graphckpt.planning.update_table import UpdateKey, UpdateTable
from graphckpt.rules.basic import Full
from graphckpt.rules.selective import Selective
from graphckpt.stores.base import Store, parse_offload
from graphckpt.stores.placement import placement_of

_MARGIN = 0.01  # of the budget, where options were shown by smaller batches only


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

    def table(self, classes: Sequence[int]) -> UpdateTable:
        """Returns an empty table for blocks of these classes."""
        selective = (number for number, option in enumerate(self.options) if isinstance(option.rule, Selective))
        return UpdateTable(classes, self.base, len(self.options), selective)

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
    full = (n for n, o in enumerate(candidates) if o.rule == Full() and not (o.is_far or o.is_partitioned))
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
    stores = [
        placement_of(option.fields).store if option.is_far or option.is_partitioned else None for option in candidates
    ]
    return Candidates(candidates, base, stores, is_base_allowed, notes)


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
    def called_classes(self) -> list[int]:
        return list(dict.fromkeys(self.table.classes[block] for block in self.called))

    @cached_property
    def allowed(self) -> dict[int, list[int]]:
        """The numbers of the options of each class of blocks that updates have shown.

        Where a budget did not leave room to show all of them, ``full`` takes their place.
        """
        base, allowed = self.candidates.base, {}
        others = [option for option in range(len(self.candidates.options)) if option != base]
        for kind in set(self.table.classes):
            shown = [option for option in others if self.table.has_read(kind, option)]
            allowed[kind] = [*shown, base] if self.candidates.is_base_allowed or shown != others else shown
        return allowed

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
            self.table.has_read(kind, option, of_largest=True)
            for kind in self.called_classes
            for option in self.allowed[kind]
        )

    @property
    def is_plain_known(self) -> bool:
        return all(0 in self.allowed[kind] for kind in self.called_classes)

    def next_turn(
        self, limit: int | None, *, is_first: bool, only_keep: bool, of_largest: bool = False
    ) -> list[int] | None:
        """Returns the options of the next update, which measure what is not known yet; ``None`` if nothing fits.

        Args:
            limit: No peak is expected to exceed these bytes. Without a limit one block of each class has an option.
            is_first: Whether updates are compared from the next one on: a block without an equal one then is
                recomputed, to compare it with itself.
            only_keep: Whether other options than ``keep`` are of no interest.
            of_largest: Whether only what the largest update has shown is known.
        """
        base = self.table.base_option
        turn = [base] * len(self.names)
        classes = self.called_classes
        free = {kind: list(self._positions(kind)) for kind in classes}
        if is_first:
            classes = [kind for kind in classes if len(self._alike(kind)) > 1]
        for option in range(1 if only_keep else len(self.candidates.options)):
            for kind in classes:
                if option == base or self.table.has_read(kind, option, of_largest=of_largest):
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

    def trial(self, limit: int | None) -> PolicyChoice | None:
        """Returns what shows options that only smaller updates have shown, if that fits and is needed for a plan."""
        if limit is None or self.is_exact or self.fits_plain(limit):
            return None
        limit -= self.margin(limit)
        turn = self.next_turn(limit, is_first=False, only_keep=False, of_largest=True)
        if turn is None:
            return None
        seconds = sum(sum(self.table.seconds(block, option)) for block, option in enumerate(turn))
        return PolicyChoice(tuple(turn), self.table.peak(turn), seconds)

    def _has_neighbour(self, turn: Sequence[int], block: int) -> bool:
        """Whether a block next to this one has another option than ``full``."""
        place = self.called.index(block)
        others = self.called[max(0, place - 1) : place] + self.called[place + 1 : place + 2]
        return any(turn[other] != self.table.base_option for other in others)

    def _positions(self, kind: int) -> Iterator[int]:
        """Yields the blocks of a class for other options: first those with neighbours that are compared."""
        alike = self._alike(kind)
        # From the last but one on every second block, so that both neighbours stay recomputed. Not the last one, whose
        # forward ends before the head.
        yield from dict.fromkeys([*alike[-2::-2], *alike[-3::-2], *alike])

    def _alike(self, kind: int) -> list[int]:
        """Returns the blocks of a class, without those that compute less in backward."""
        typical = self.table.typical_blocks
        alike = [block for block in self.called if self.table.classes[block] == kind]
        return [block for block in alike if block in typical] or alike

    def room(self, turn: Sequence[int], limit: int | None) -> float:
        """Returns how much longer a batch may be within ``limit`` bytes; attention may grow by the square of that."""
        start = self.table.start_bytes
        if limit is None:
            return 1.0
        return sqrt(max(1.0, (limit - start) / max(1, self.table.peak(turn) - start)))

    def margin(self, limit: int | None) -> int:
        """Returns the bytes of a limit that plans leave free, as long as not all is read from the largest update."""
        return 0 if limit is None or self.is_exact else int(_MARGIN * limit)

    @cached_property
    def planner(self) -> Planner:
        """The planner of the largest update as a measured step."""
        table, options, every = self.table, self.candidates.options, range(len(self.names))
        seconds = [[table.seconds(block, option) for option in range(len(options))] for block in every]
        notes = self.notes
        if self.num_missing:
            what = f"the update that was measured did not call {self.num_missing} of the blocks"
            notes = (*notes, f"{what}; one that does takes more memory")
        if not self.candidates.is_base_allowed and any(self.candidates.base in each for each in self.allowed.values()):
            notes = (*notes, "the budget leaves no room to measure all candidates: layers may have full in their place")
        equal = {table.classes[block]: block for block in self.called}
        measured = MeasuredStep(
            names=tuple(self.names),
            options=tuple(options),
            options_of=(tuple(options),) * len(self.names),
            model=table.levels(),
            forward_seconds=tuple(tuple(forward for forward, _ in row) for row in seconds),
            backward_seconds=tuple(tuple(backward for _, backward in row) for row in seconds),
            far_bytes=tuple(tuple(self._moved_bytes(block, n) for n in range(len(options))) for block in every),
            step_seconds=table.plain_seconds,
            banned=frozenset(
                (b, n) for b in every for n in range(len(options)) if n not in self.allowed[table.classes[b]]
            ),
            uncalled={block: equal.get(table.classes[block]) for block in every if block not in self.called},
            notes=notes,
        )
        search = PolicySearch(measured, host_budget=self.options.host_bytes, joins=False)
        return Planner(search, options=self.options, model=self.model, device=self.device, is_of_training=True)

    def _moved_bytes(self, block: int, number: int) -> int:
        """Returns the bytes that a block offloads: how much less it retains than without."""
        if not self.candidates.options[number].is_far:
            return 0
        levels = self.table.levels()
        calls = [call for call, other in enumerate(levels.block_of_call) if other == block]
        numbers = self.candidates.on_device(number), number
        on_device, offloaded = (sum(levels.retained.get(call, each) for call in calls) for each in numbers)
        return max(0, on_device - offloaded)
