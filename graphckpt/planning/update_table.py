"""A table of levels from the updates of a training, each of which runs its blocks under several options.

Equal blocks of one update are compared with each other, so that each update has a base::

    update   options of five equal blocks   what it shows of `keep`, relative to `full`
    2        full full full keep full       retained, rise in forward, rise in backward, seconds
    base     full full full full full       the levels of the update, minus what `keep` retains while it is open

So updates with other batches do not disturb each other. Where a batch shows an option that a larger one does not, the
row grows by what recomputations under ``full`` add more; and what plans were off by in a smaller batch is expected of
them in a larger one. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any, NamedTuple, Self, TypeAlias, final

from graphckpt.planning.intervals import Interval, LevelLog, LevelSpan, Phase, StepReadings
from graphckpt.planning.levels import Calls, IntervalLevel, LevelTable, Rise

InputSizes: TypeAlias = tuple[tuple[str, int], ...]
"""The largest input of each module around the blocks, by name, in elements. Updates of equal sizes are compared."""

# Note [Two borders]
# What a call retains shows twice: as what the level rises by over its forward, and as what it falls by over its
# backward, each relative to an equal call under `full`. The two differ where code between them frees what the block
# still holds, such as autocast's copies of weights. A block that saves its output, such as a ReLU, holds what the
# block after it holds as its argument, and so delays the fall over that one's backward. The fall is therefore read over
# both, between blocks under `full`, and what its backward shows beyond that counts as its rise. The gradient of
# the last block may be a number, which takes no memory: falls from there on are compared with each other only.


class UpdateRow(NamedTuple):
    """The effect of a call on the level under an option, in bytes; see Note [Two borders]."""

    retained: int
    """From its forward to the first backward, relative to ``full``; it may be negative."""
    retained_later: int
    """From the first backward to that of the block."""
    output: int
    """In the backward of the block, beyond that."""
    rise_forward: int
    rise_backward: int

    def grown(self, retained: int, rises: int, ratio: float, bound: UpdateRow | None) -> UpdateRow:
        """Returns the row for a batch that is ``ratio`` times as large: retains and rises more, up to a bound."""
        first, later, output = self.retained + retained, self.retained_later + retained, ceil(ratio * self.output)
        rise = self.rise_backward + rises
        if bound is not None:
            first, later = min(first, bound.retained), min(later, bound.retained)
            rise = min(rise, bound.retained + bound.rise_backward - max(first, later))
        return UpdateRow(first, later, output, self.rise_forward + rises, rise)


_Border: TypeAlias = tuple[tuple[int, int, bool], ...]
"""The blocks before and after: the class of each, its distance, and whether its backward is the first one."""


class _Kind(NamedTuple):
    """Calls of one kind are equal."""

    block_class: int
    place: int
    """The number of the call among those of its block, the last one first: micro-batches may lack the first ones."""
    is_typical: bool


@final
@dataclass
class _CallReadings:
    """The readings of calls of one kind under one option, in bytes, by the blocks before and after them."""

    added: dict[_Border, list[int]] = field(default_factory=lambda: defaultdict(list))
    """To the level: from the start of the forward to that of the next block, or to its end, which has no border."""
    freed: dict[_Border, list[int]] = field(default_factory=lambda: defaultdict(list))
    """From the start of the backward before that of the block to the start of the one after it."""
    own_freed: dict[_Border, list[int]] = field(default_factory=lambda: defaultdict(list))
    """From the start of its backward to the start of the one after it."""
    rises_forward: list[int] = field(default_factory=list)
    rises_backward: list[int] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    """Added by a recomputation."""
    allocated: list[int] = field(default_factory=list)
    """In the forward."""
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)

    def freed_twice(self) -> Mapping[_Border, list[int]]:
        """Returns what this call and an equal one before it free, each between blocks under ``full``."""
        return {
            ((block_class, -distance, is_first), (block_class, distance, False)): [2 * value for value in values]
            for ((block_class, distance, _),), values in self.own_freed.items()
            for is_first in (False, True)
        }

    def scaled(self, factor: float) -> _CallReadings:
        """Returns the bytes between borders, scaled; rises and seconds are left out."""
        added, freed, own_freed = (
            {border: [ceil(factor * value) for value in values] for border, values in read.items()}
            for read in (self.added, self.freed, self.own_freed)
        )
        return _CallReadings(added, freed, own_freed)

    @property
    def seconds(self) -> float:
        return sum(median(each) for each in (self.forward_seconds, self.backward_seconds) if each)


@final
@dataclass(frozen=True)
class PlannedUpdate:
    """The levels of an update, and the number of the option of each block."""

    levels: StepReadings
    options: Sequence[int]
    sizes: InputSizes
    adds_lasting: bool = False
    """Whether states of optimizers, or gradients, came in it that are alive from then on."""
    is_later: bool = False
    """Whether the levels are those of later micro-batches alone, which begin with gradients of the first ones."""

    @property
    def next_start_bytes(self) -> int:
        """The level at the start of the next update. At the end of this one its batch may be alive as well."""
        return self.levels.end_bytes if self.adds_lasting else self.levels.start_bytes

    @property
    def key(self) -> UpdateKey:
        return self.sizes, tuple(self.levels.block_of_call)

    def from_start(self, start: int) -> Self:
        """Returns it with levels that are relative to the start of the update, also those of later micro-batches."""
        if not self.is_later:
            return self
        spans = {i: span.raised(self.levels.start_bytes - start) for i, span in self.levels.spans.items()}
        return replace(self, levels=replace(self.levels, spans=spans, start_bytes=start))

    def to_message(self) -> list[Any]:
        """Returns plain values, for JSON."""
        return [self.levels.to_message(), [*self.options], [*self.sizes], self.adds_lasting, self.is_later]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Self:
        levels, options, sizes, *flags = message
        sizes_by_name = tuple((name, size) for name, size in sizes)
        return cls(StepReadings.from_message(levels), options, sizes_by_name, *flags)


def highest_levels(logs: Iterable[LevelLog]) -> LevelLog:
    """Returns the levels of an update, as those of the processes that have run it are at their highest."""
    levels: dict[Interval, LevelSpan] = {}
    for log in logs:
        for interval, own in log.items():
            levels[interval] = LevelSpan(*map(max, own, levels.get(interval, own)))
    return levels


# Note [Skipped blocks]
# LayerDrop skips other blocks in each update, and in one of the next it may skip none. So the base is that of an update
# which calls all that any has called: one that it has skipped is put in each pass that calls an equal one, next to
# the call of a block whose number is near, and adds and frees what the equal one does:
#
#     measured    forward 0 | forward 3 | head | backward 3 | backward 0
#     completed   forward 0 | forward 1, as 3 | forward 2, as 3 | forward 3 | head | backward 3 | backward 2 | ...
#
# What options take is read from updates as they were.


def completed(update: PlannedUpdate, blocks: Iterable[int], classes: Sequence[int], base_option: int) -> PlannedUpdate:
    """Returns an update that calls all of ``blocks``, if this one has skipped some; see Note [Skipped blocks]."""
    levels, order = update.levels, update.levels.block_of_call
    of_blocks = [interval for interval in levels.spans if interval.is_of_block]
    added = {i: levels.spans[j].start - levels.spans[i].start for i, j in pairwise(of_blocks) if i.phase is j.phase}
    inner = [c for c in range(len(order)) if {(Phase.FORWARD, c), (Phase.BACKWARD, c)} <= added.keys()]
    passes = Calls(levels.spans, order, classes, levels.dropped).passes
    options, groups = [*update.options], [[(block, call)] for call, block in enumerate(order)]
    skipped = sorted({*blocks}.difference(order))
    for calls in ({order[call]: call for call in each} for each in passes):
        for block in skipped if [*calls] == sorted(calls) else ():
            kind = classes[block]
            alike = [call for call in calls.values() if call in inner and classes[order[call]] == kind]
            if not alike:
                continue
            like = min(alike, key=lambda call: (options[order[call]] != base_option, not levels.are_typical[call]))
            options[block] = options[order[like]]
            neighbour = min(calls, key=lambda other: (classes[other] != kind, other > block, abs(other - block)))
            groups[calls[neighbour]].append((block, like))
    return update if max(map(len, groups), default=1) == 1 else _woven(update, options, [*map(sorted, groups)], added)


def _woven(
    update: PlannedUpdate,
    options: Sequence[int],
    groups: Sequence[Sequence[tuple[int, int]]],
    added: Mapping[Interval, int],
) -> PlannedUpdate:
    """Returns an update that calls each of ``groups`` of blocks in place of one block, each like a call of its own."""
    levels, order = update.levels, update.levels.block_of_call
    entries = [(call, *entry) for call, group in enumerate(groups) for entry in group]
    number_of = {(call, block): number for number, (call, block, _) in enumerate(entries)}
    spans: dict[Interval, LevelSpan] = {}
    raised, seconds = 0, 0.0
    for interval, span in levels.spans.items():
        phase, call = interval
        if phase in (Phase.BEFORE, Phase.OPTIMIZER):
            spans[interval] = span.raised(raised)
            continue
        group = groups[call] if phase in (Phase.FORWARD, Phase.AFTER_FORWARD) else groups[call][::-1]
        if not interval.is_of_block:  # the code behind all of them
            spans[Interval(phase, number_of[call, group[-1][0]])] = span.raised(raised)
            continue
        start = span.start
        for block, like in group:
            source = Interval(phase, like)
            moved = levels.spans[source].raised(start + raised - levels.spans[source].start)
            spans[Interval(phase, number_of[call, block])] = moved
            if block == order[call]:
                start = span.end
            else:
                raised += added[source]
                seconds += levels.seconds.get(source, 0.0)
    result = replace(
        levels,
        block_of_call=[block for _, block, _ in entries],
        spans=spans,
        dropped=frozenset(number_of[call, order[call]] for call in levels.dropped),
        are_typical=[levels.are_typical[like] for _, _, like in entries],
        total_seconds=levels.total_seconds + seconds,
    )
    return replace(update, levels=result, options=options)


UpdateKey: TypeAlias = "tuple[InputSizes, tuple[int, ...]]"
"""Updates of one key have calls of the same sizes in the same order."""


@final
class UpdateTable:
    """The levels of an update under any plan, and its seconds. Option 0 keeps everything.

    Args:
        classes: The class of each block; blocks of one class are equal.
        base_option: The number of ``full``, which recomputes the block.
        num_options: The number of options.
        selective: The numbers of those that keep results of ops, which backward may not need.
    """

    def __init__(
        self, classes: Sequence[int], base_option: int, num_options: int, selective: Iterable[int] = ()
    ) -> None:
        self.classes = classes
        self.base_option = base_option
        self.num_options = num_options
        self._selective = frozenset(selective)
        self._measured: list[PlannedUpdate] = []
        self._updates: dict[UpdateKey, list[PlannedUpdate]] = {}
        """These, completed."""
        self._runs: dict[tuple[UpdateKey, tuple[int, ...]], list[PlannedUpdate]] = {}
        """Updates under plans, by key and plan, as each process has run them."""
        self._readings: dict[tuple[InputSizes, _Kind, int], _CallReadings] = {}
        self._own_rises: dict[tuple[UpdateKey, int, int], tuple[int, int]] = {}
        """The rises of a call under an option, by the key of the update, the call and the option."""
        self._rows: dict[tuple[InputSizes, _Kind, int], UpdateRow] = {}
        self._tables: dict[UpdateKey, LevelTable] = {}
        self._largest: UpdateKey | None = None
        self.start_bytes = 0
        """The level at the start of the next update."""

    def add(self, updates: Sequence[PlannedUpdate], removed: Collection[int] = ()) -> None:
        """Adds one update, as each of the processes that plan together has run it.

        The blocks ``removed`` are not in the model any more.
        """
        self._forget()
        starts = (update.next_start_bytes for update in updates if update.adds_lasting or not update.is_later)
        self.start_bytes = max(starts, default=self.start_bytes)
        for update in (each.from_start(self.start_bytes) for each in updates):
            self._measured.append(update)
            self._read(update)
        called = {block for update in self._measured for block in update.levels.block_of_call}.difference(removed)
        self._updates.clear()
        for update in self._measured:
            result = completed(update, called, self.classes, self.base_option)
            self._updates.setdefault(result.key, []).append(result)

    def add_runs(self, updates: Sequence[PlannedUpdate]) -> None:
        """Adds one update under a plan, as each process has run it: it shows what rows do not explain."""
        self._forget()
        for update in updates:
            if update.key in self._updates:
                self._runs.setdefault((update.key, tuple(update.options)), []).append(update)

    def _forget(self) -> None:
        """Forgets what follows from readings."""
        self._rows.clear()
        self._tables.clear()
        self._largest = None

    @property
    def largest(self) -> UpdateKey:
        """The key of the updates that call most of the blocks, and of these the one that takes most under ``full``."""
        if self._largest is None:
            full = [self.base_option] * len(self.classes)
            self._largest = max(self._updates, key=lambda key: (len(set(key[1])), self.levels(key).peak(full)))
        return self._largest

    @property
    def keys(self) -> Iterable[UpdateKey]:
        """Those of all updates."""
        return self._updates.keys()

    def __contains__(self, key: UpdateKey) -> bool:
        return key in self._updates

    @property
    def typical_blocks(self) -> set[int]:
        """The blocks of which every call in the largest update has an argument with history."""
        calls = zip(self.largest[1], self._kinds(self._updates[self.largest][0]), strict=True)
        return set(self.largest[1]) - {block for block, kind in calls if not kind.is_typical}

    def has_read(self, block_class: int, option: int, *, of_largest: bool = False) -> bool:
        """Whether any update, or one of the largest sizes, has shown what an option does to the calls of a class."""
        full = self._full if of_largest else self._scaled_full
        return any(
            self._row_read(sizes, kind, option, full(sizes, kind)) is not None
            for sizes, kind, read in self._readings
            if kind.block_class == block_class and read == option and not (of_largest and sizes != self.largest[0])
        )

    def peak(self, plan: Sequence[int], key: UpdateKey | None = None) -> int:
        """Returns the most live bytes of an update, for the number of the option of each block.

        What updates of the largest size were off by under plans counts for smaller ones too.
        """
        is_smaller = key is not None and key != self.largest
        off = max(0, int(self.levels().rest(plan)[:, 1].max())) if is_smaller else 0
        return self.levels(key).peak(plan) + off

    def levels(self, key: UpdateKey | None = None) -> LevelTable:
        """Returns the levels of an update under any plan, by default those of the largest one.

        An option that no update has shown counts with the most that it can take.
        """
        key = self.largest if key is None else key
        if key not in self._tables:
            base: dict[Interval, LevelSpan] = {}
            for update in self._updates[key]:
                # A table over the measured levels predicts them plus what the terms of its options add: that is taken
                # off again, which leaves the base of this update, with every block recomputed.
                table = self._table_over(update, update.levels.spans)
                for level, span in zip(table.levels(update.options), update.levels.spans.values(), strict=True):
                    moved = span.raised(self.start_bytes + span.start - level.start)
                    base[level.interval] = LevelSpan(*map(max, moved, base.get(level.interval, moved)))
            self._tables[key] = self._table_over(self._updates[key][0], base)
            self._add_runs_to(key)
        return self._tables[key]

    def _add_runs_to(self, key: UpdateKey) -> None:
        """Adds the runs of updates of a key to its table, and what others were off by, scaled."""
        table = self._tables[key]
        for (own, plan), updates in self._runs.items():
            if own == key:
                spans = highest_levels(update.levels.spans for update in updates).items()
                levels = (IntervalLevel(interval, span.start, span.peak) for interval, span in spans)
                table.add_run((level.raised(self.start_bytes) for level in levels), plan)
        for own, plan in self._runs:
            if own[1] == key[1] and own != key:
                table.add_rest(self.levels(own), plan, _ratio(key[0], own[0]))

    def _table_over(self, update: PlannedUpdate, spans: LevelLog) -> LevelTable:
        """Returns a table with the terms that updates have shown, and a base relative to the start of an update."""
        base = {interval: span.raised(self.start_bytes) for interval, span in spans.items()}
        calls = Calls(base, update.levels.block_of_call, self.classes, update.levels.dropped)
        table = LevelTable(calls, self.base_option)
        table.head_shares = dict.fromkeys(calls.heads, 0.0)  # nothing is late before backward begins
        for call, kind in enumerate(self._kinds(update)):
            for option in range(self.num_options):
                row = self._row(update.sizes, kind, option)
                rises = self._own_rises.get((update.key, call, option), (row.rise_forward, row.rise_backward))
                table.rises.add(call, option, Rise(*rises))
                table.retained.add(call, option, row.retained)
                table.late.add(call, option, row.retained_later - row.retained)
                table.output.add(call, option, row.output)
        return table

    def seconds(self, block: int, option: int) -> tuple[float, float]:
        """Returns the seconds of all forwards of a block in the largest update, and of all backwards.

        No option is as fast as ``keep``, which has the lead of a millionth: times of a training vary.
        """
        calls = zip(self._kinds(self._updates[self.largest][0]), self.largest[1], strict=True)
        parts = [self._full_seconds(self.largest[0], kind) for kind, called in calls if called == block]
        forward, backward = sum(pair[0] for pair in parts), sum(pair[1] for pair in parts)
        total = (forward + backward) * max(self._speed(self.classes[block], each) for each in (option, 0))
        total *= 1.000001 if option else 1
        return min(forward, total), max(0.0, total - forward)

    @property
    def plain_seconds(self) -> float:
        """The seconds of the largest update if all blocks kept everything."""
        blocks = range(len(self.classes))
        return median(
            update.levels.total_seconds
            - sum(sum(self.seconds(block, update.options[block])) - sum(self.seconds(block, 0)) for block in blocks)
            for update in self._updates[self.largest]
        )

    def _read(self, update: PlannedUpdate) -> None:
        levels, key = update.levels, update.key
        kinds = self._kinds(update)
        drops = {Interval(Phase.BACKWARD, call) for call in levels.dropped}
        borders = [i for i in levels.spans if i.is_of_block and i not in drops]
        phases = [Phase.FORWARD, *(interval.phase for interval in borders)]
        # The first backward of each batch: before it comes the head, whose gradient may take no memory.
        first = {
            i for i, phase in zip(borders, phases, strict=False) if (phase, i.phase) == (Phase.FORWARD, Phase.BACKWARD)
        }
        for before, interval, after in zip([None, *borders], borders, [*borders[1:], None], strict=False):
            call, span = interval.call, levels.spans[interval]
            block = levels.block_of_call[call]
            option = update.options[block]
            readings = self._readings.setdefault((update.sizes, kinds[call], option), _CallReadings())
            rises = self._own_rises.get((key, call, option), (0, 0))
            rise, seconds = span.peak - span.start, levels.seconds.get(interval, 0.0)
            end = self._border(update, interval, after)
            if interval.phase is Phase.FORWARD:
                readings.rises_forward.append(rise)
                readings.forward_seconds.append(seconds)
                readings.allocated.append(levels.allocated.get(interval, 0))
                readings.added[()].append(span.end - span.start)
                if after is not None and end:
                    readings.added[end].append(levels.spans[after].start - span.start)
                self._own_rises[key, call, option] = max(rises[0], rise), rises[1]
                continue
            readings.rises_backward.append(rise)
            if call in levels.recomputed:
                readings.recomputed.append(levels.recomputed[call])
            readings.backward_seconds.append(seconds)
            self._own_rises[key, call, option] = rises[0], max(rises[1], rise)
            if after is None or not end or update.options[levels.block_of_call[after.call]] != self.base_option:
                continue
            readings.own_freed[end].append(span.start - levels.spans[after].start)
            begin = self._border(update, interval, before, is_first=before in first)
            if before is None or not begin:
                continue
            if update.options[levels.block_of_call[before.call]] == self.base_option:
                readings.freed[begin + end].append(levels.spans[before].start - levels.spans[after].start)

    def _border(
        self, update: PlannedUpdate, interval: Interval, other: Interval | None, *, is_first: bool = False
    ) -> _Border:
        """Returns the border to a neighbouring block; nothing if it runs in another phase."""
        if other is None or other.phase is not interval.phase:
            return ()
        block, neighbour = (update.levels.block_of_call[each.call] for each in (interval, other))
        return ((self.classes[neighbour], neighbour - block, is_first),)

    def _kinds(self, update: PlannedUpdate) -> list[_Kind]:
        levels = update.levels
        places: dict[int, int] = {}
        kinds = []
        for call, block in reversed([*enumerate(levels.block_of_call)]):
            kinds.append(_Kind(self.classes[block], places.get(block, 0), levels.are_typical[call]))
            places[block] = places.get(block, 0) + 1
        return kinds[::-1]

    def _row(self, sizes: InputSizes, kind: _Kind, option: int) -> UpdateRow:
        entry = sizes, kind, option
        if entry not in self._rows:
            self._rows[entry] = self._read_row(*entry) or self._bound(*entry) or _NO_ROW
        return self._rows[entry]

    def _read_row(self, sizes: InputSizes, kind: _Kind, option: int) -> UpdateRow | None:
        """Returns the row of an update of these sizes, or else one that is scaled."""
        # From the most reliable reading to the least: these sizes and an equal call; another batch that shows the
        # option and `full` together; another batch, next to a `full` that is scaled itself. Larger batches come first.
        alike = sorted(
            {other for _, other, _ in self._readings if other.block_class == kind.block_class},
            key=lambda other: (other != kind, other.place != kind.place, not other.is_typical, other.place),
        )
        others = {other for other, _, read in self._readings if read == option}
        in_order = sorted(others, key=lambda other: (other != sizes, -_ratio(other, sizes), other))
        for full_readings in (self._full, self._scaled_full):
            for other_sizes in in_order:
                for other in alike:
                    row = self._row_read(other_sizes, other, option, full_readings(other_sizes, other))
                    if row is not None:
                        if other_sizes == sizes or option == self.base_option:
                            return row
                        growths = self._growths(other_sizes, sizes, other, row.retained)
                        return row.grown(*growths, _ratio(sizes, other_sizes), self._bound(sizes, kind, option))
        return None

    def _growths(self, other: InputSizes, sizes: InputSizes, kind: _Kind, retained: int) -> tuple[int, int]:
        """Returns by how much more an option retains of ``sizes`` than of ``other``, and by how much more it rises.

        At most, as ``full`` does: parts are constant, such as gradients of weights; and all that a recomputation adds
        more may be what the option retains, as scores of attention grow by the square of the length.
        """
        ratio, both = _ratio(sizes, other), (self._full(other, kind), self._full(sizes, kind))
        before, after = (0 if each is None else max(each.rises_backward, default=0) for each in both)
        rise = max(0, (after or ceil(before * ratio)) - (before or ceil(after / ratio)))
        before, after = (0 if each is None else max(each.recomputed, default=0) for each in both)
        return (max(0, after - before) if before and after else ceil((ratio - 1) * retained)), rise

    def _full(self, sizes: InputSizes, kind: _Kind) -> _CallReadings | None:
        return self._readings.get((sizes, kind, self.base_option))

    def _scaled_full(self, sizes: InputSizes, kind: _Kind) -> _CallReadings | None:
        """Returns the readings of ``full``, from another batch if it was not read with this one: its bytes scale."""
        read_with = {other for other, each, read in self._readings if each == kind and read == self.base_option}
        if not read_with:
            return None
        other = min(read_with, key=lambda each: (each != sizes, -_ratio(each, sizes), each))
        return self._readings[other, kind, self.base_option].scaled(_ratio(sizes, other))

    def _row_read(self, sizes: InputSizes, kind: _Kind, option: int, full: _CallReadings | None) -> UpdateRow | None:
        readings = self._readings.get((sizes, kind, option))
        if readings is None or full is None or not readings.rises_forward:
            return None
        rises = max(readings.rises_forward), max(readings.rises_backward, default=0)
        if option == self.base_option:
            return UpdateRow(0, 0, 0, *rises)
        retained = _difference(readings.added, full.added, kind.block_class)
        if retained is None:
            return None
        freed = _difference(readings.own_freed, full.own_freed, kind.block_class)
        later = _difference(readings.freed, full.freed, kind.block_class)
        if later is None and (twice := _difference(readings.freed, full.freed_twice(), kind.block_class)) is not None:
            later = max(retained, twice)  # less, if the first gradient is a number
        if later is None:
            later = retained if freed is None else max(retained, freed)
        return UpdateRow(retained, later, max(0, (freed or 0) - later), *rises)

    def _bound(self, sizes: InputSizes, kind: _Kind, option: int) -> UpdateRow | None:
        """Returns the most that an option can take: a recomputation creates all that it can retain.

        Results of ops that a rule keeps may be freed by a recomputation, so that all that the forward allocates counts.
        """
        full, readings = self._read_row(sizes, kind, self.base_option), self._full(sizes, kind)
        if full is None:
            return None
        retained, rise = full.rise_backward, full.rise_backward
        if readings is not None and readings.recomputed:
            retained = min(rise, max(readings.recomputed))
        if option in self._selective and readings is not None:
            unsaved = max(0, max(readings.allocated, default=0) - retained)
            retained, rise = retained + unsaved, rise + unsaved
        return UpdateRow(retained, retained, 0, max(rise, full.rise_forward), rise - retained)

    def _full_seconds(self, sizes: InputSizes, kind: _Kind) -> tuple[float, float]:
        for other_sizes in sorted({each for each, _, _ in self._readings}, key=lambda each: (each != sizes, each)):
            readings = self._readings.get((other_sizes, kind, self.base_option))
            if readings is not None:
                ratio = _ratio(sizes, other_sizes)
                return median(readings.forward_seconds) * ratio, median(readings.backward_seconds or [0.0]) * ratio
        return 0.0, 0.0

    def _speed(self, block_class: int, option: int) -> float:
        """Returns the seconds of an option as a multiple of those of ``full``; 1 if it was not read."""
        speeds = []
        for (sizes, kind, read), readings in self._readings.items():
            full = self._readings.get((sizes, kind, self.base_option))
            if kind.block_class != block_class or read != option or full is None or not full.seconds:
                continue
            speed = readings.seconds / full.seconds
            if option == 0 and speed >= 1:  # noise: `full` runs the forward once more
                speed = 1 - median(full.forward_seconds) / full.seconds
            speeds.append(speed)
        return median(speeds) if speeds else 1.0


_NO_ROW = UpdateRow(0, 0, 0, 0, 0)


def _difference(
    readings: Mapping[_Border, list[int]], full: Mapping[_Border, list[int]], block_class: int
) -> int | None:
    """Returns what an option adds to a border beyond ``full``: preferably one to an equal block."""
    borders = [border for border in readings if border in full]
    if not borders:
        return None
    best = min(borders, key=lambda border: (not border, any(other != block_class for other, *_ in border), border))
    return max(readings[best]) - min(full[best])


def _ratio(sizes: InputSizes, others: InputSizes) -> float:
    """Returns how much larger an input is."""
    before = dict(others)
    return max((size / before[name] for name, size in sizes if before.get(name)), default=1.0)
