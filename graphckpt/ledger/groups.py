"""Groups of blocks and of bytes, and their colours: the same in every table, picture and page. Knows no plotting."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, final

from graphckpt.ledger.record import Row, StepRecord, TensorLife

SAVED, RECOMPUTED, TRANSIENT = "saved for backward", "recomputed", "transient"
KINDS = {
    "weights": "#8d95a1",
    "optimizer states": "#b3a1d0",
    "gradients": "#72b078",
    "inputs": "#4fb3b0",
    SAVED: "#4c78a8",
    RECOMPUTED: "#f2a33c",
    TRANSIENT: "#dc6f7e",
}
"""The kinds of bytes from the bottom of a picture to its top, with their colours."""
PHASES = {"forward": "#86a8ce", "recompute": "#f6c27d", "backward": "#9fcba3", "optimizer": "#cabde0"}
"""The phases of a step. Each has a tint of the kind of bytes that it leaves behind."""
OUTSIDE = "outside of blocks"
GREY = "#c9ced6"
_RULES = {
    "keep": "#a9c1df",
    "selective": "#e8c840",
    "segments": "#a5744f",
    "full": "#f2922f",
    "joined": "#d9576a",
    "tiles": "#cf6fa5",
    "part": "#f7cfa0",
    "own": "#86a83b",
}
_OTHER_RULES = ("#6b7fd7", "#4fb3b0", "#3d8fc4", "#7a9e57")
_LEVEL = re.compile(r"\(level (\d+)")
_LEVELS = "#f3e08a", "#a87f00"  # of selective, between which the more is recomputed, the darker
_COUNTS = ("bytes_before", "bytes_after", "bytes_host", "bytes_disk", "runs", "reruns")
_TIMES = ("forward_seconds", "recompute_seconds", "copy_seconds", "wait_seconds")
_MAX_PERIOD = 32  # rows; a layer with more policies inside is printed ungrouped
_MAX_BLOCKS = 24  # of a kind; more would be too small to read, and would make the page slow
_MAX_TENSORS = 4  # of a block

_T = TypeVar("_T")


# ---- colours


def rule_colour(option: str) -> str:
    """Returns the colour of a policy: that of its rule, darker with a store, and darker from level to level.

    >>> rule_colour("full"), rule_colour("full + host"), rule_colour("selective(matmul)")
    ('#f2922f', '#b66e23', '#e8c840')
    """
    rule, _, store = option.partition(" + ")
    name = re.split(r"[(, ]", rule)[0]
    # Not by `hash`, which differs from process to process: a rule of the user's has one colour in all pictures.
    colour = _RULES.get(name) or _OTHER_RULES[zlib.crc32(name.encode()) % len(_OTHER_RULES)]
    if level := _LEVEL.search(rule):
        colour = mixed(*_LEVELS, 1 - 0.75 ** (int(level[1]) - 1))
    return mixed(colour, "#000000", 0.25) if store else colour


def mixed(colour: str, other: str, share: float) -> str:
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + "".join(f"{round((1 - share) * one + share * two):02x}" for one, two in pairs)


def sorted_rules(options: Iterable[str]) -> list[str]:
    """Sorts policies for a legend: the usual rules from keeping everything to keeping least, then all others.

    >>> sorted_rules(["selective(level 2 of 9)", "full + host", "mine", "full", "selective(level 1 of 9)", "keep"])
    ['keep', 'selective(level 1 of 9)', 'selective(level 2 of 9)', 'full', 'full + host', 'mine']
    """
    order = {name: number for number, name in enumerate(_RULES)}

    def key(option: str) -> tuple[int, list[str | int]]:
        parts: list[str | int] = [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", option)]
        return order.get(re.split(r"[(, ]", option)[0], len(order)), parts

    return sorted(dict.fromkeys(options), key=key)


# ---- blocks


def group_names(
    names: Sequence[str], values: Sequence[object], max_period: int = _MAX_PERIOD
) -> Iterator[tuple[str, range]]:
    """Groups consecutive layers that have equal values and differ only in their number.

    Works on periods up to ``max_period`` too: ``h.0, h.0.attn, h.1, h.1.attn`` becomes ``h.0-1, h.0-1.attn``. Yields
    the name of each group, with the range of its numbers, and the positions of its members.

    >>> [name for name, _ in group_names(["wte", "h.0", "h.1", "h.2"], ["keep", "full", "full", "keep"])]
    ['wte', 'h.0-1', 'h.2']
    """
    start = 0
    while start < len(names):
        period, repeats = _best_period(names, values, start, max_period)
        for offset in range(period):
            members = range(start + offset, start + period * repeats, period)
            yield _range_name([names[at] for at in members]), members
        start += period * repeats


def _best_period(names: Sequence[str], values: Sequence[object], start: int, max_period: int) -> tuple[int, int]:
    """Returns the period and the number of repeats at ``start`` that remove the most rows.

    ::

        start                 period 2, 3 repeats: 4 rows fewer
          v
        | h.0  h.0.attn | h.1  h.1.attn | h.2  h.2.attn | norm
    """

    def is_repeated(period: int, times: int, place: int, step: int) -> bool:
        later = range(start + times * period, start + (times + 1) * period)
        return later.stop <= len(names) and all(
            values[at - times * period] == values[at]
            and _number_step(names[at - times * period], names[at]) == (place, step * times)
            for at in later
        )

    best, num_removed = (1, 1), 0
    for period in range(1, min(max_period, (len(names) - start) // 2) + 1):
        if names[start + period - 1].count(".") < names[start].count("."):
            break  # it would begin inside a layer, and separate the rest from its first row
        step = _number_step(names[start], names[start + period])
        repeats = 1
        while step is not None and is_repeated(period, repeats, *step):
            repeats += 1
        if period * (repeats - 1) > num_removed:
            best, num_removed = (period, repeats), period * (repeats - 1)
    return best


def _number_step(first: str, later: str) -> tuple[int, int] | None:
    """Returns where and by how much one number in a path grew, if nothing else differs."""
    ours, theirs = first.split("."), later.split(".")
    if len(ours) != len(theirs):
        return None
    differ = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if len(differ) != 1 or not (ours[differ[0]].isdecimal() and theirs[differ[0]].isdecimal()):
        return None
    step = int(theirs[differ[0]]) - int(ours[differ[0]])
    return (differ[0], step) if step > 0 else None


def _range_name(names: Sequence[str]) -> str:
    """Returns one name for equal layers, such as ``h.0-2`` or ``h.0,2,..,6``."""
    step = _number_step(names[0], names[1]) if len(names) > 1 else None
    if step is None:
        return names[0]
    place, size = step
    parts, numbers = names[0].split("."), [name.split(".")[place] for name in names]
    some = [numbers[0], numbers[1], "..", numbers[-1]] if len(names) > 2 else numbers
    parts[place] = f"{numbers[0]}-{numbers[-1]}" if size == 1 else ",".join(some)
    return ".".join(parts)


def group_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Groups consecutive layers that differ only in their number and times into one row of sums."""
    no_times: dict[str, Any] = dict.fromkeys(_TIMES)
    for name, members in group_names([r.block for r in rows], [replace(r, block="", **no_times) for r in rows]):
        same = [rows[at] for at in members]
        if len(same) == 1:
            yield same[0]
        else:
            yield replace(same[0], block=f"{name} ({len(same)}x)", **sums(same, *_COUNTS, *_TIMES))


def sums(rows: Sequence[Row], *fields: str) -> dict[str, Any]:
    columns = {field: [value for row in rows if (value := getattr(row, field)) is not None] for field in fields}
    return {field: sum(values) if values else None for field, values in columns.items()}


def rule_and_place(row: Row) -> str:
    """Returns the rule of a block, and the store of its saved tensors if they leave the device."""
    return row.rule if row.place in ("", "device") else f"{row.rule} + {row.place}"


def nest(rows: Sequence[Row]) -> list[Row]:
    """Puts each block below the one that contains it; otherwise the order stays."""
    order = {row.block: number for number, row in enumerate(rows)}

    return sorted(rows, key=lambda row: [order[path] for path in paths_to(row.block) if path in order])


def common_prefix(names: Iterable[str]) -> str:
    """Returns the common prefix of all paths, if it is as long as PEFT's ``base_model.model.``; a stack keeps its name.

    >>> common_prefix(["base_model.model.layers.0", "base_model.model.layers.1", "(outside of blocks)"])
    'base_model.model.'
    >>> common_prefix(["transformer.h.0", "transformer.h.1"])
    ''
    """
    paths = [name.split(".") for name in names if not name.startswith("(")]
    shortest = min((len(path) - 1 for path in paths), default=0)
    num_parts = 0
    while num_parts < shortest and len({path[num_parts] for path in paths}) == 1:
        num_parts += 1
    while num_parts and any(path[num_parts].isdecimal() for path in paths):
        num_parts -= 1
    return ".".join(paths[0][:num_parts]) + "." if num_parts > 1 and len(paths) > 1 else ""


def paths_to(block: str) -> Iterator[str]:
    """Yields the paths of the modules that contain a block, from the outermost to its own.

    >>> list(paths_to("h.3.mlp"))
    ['h', 'h.3', 'h.3.mlp']
    """
    return accumulate(block.split("."), lambda path, part: f"{path}.{part}")


class Span(NamedTuple):
    label: str
    colour: str
    begin: float
    end: float


def spans(values: Sequence[_T], starts: Sequence[float], end: float) -> Iterator[tuple[_T, float, float]]:
    """Yields runs of equal values, each with its start and its end on the axis.

    >>> list(spans(["a", "a", "b"], [0, 2, 4], 6))
    [('a', 0, 4), ('b', 4, 6)]
    """
    changes = [at for at in range(len(values)) if at == 0 or values[at] != values[at - 1]]
    for at, until in pairwise([*changes, len(values)]):
        yield values[at], starts[at], end if until == len(values) else starts[until]


def block_spans(
    blocks: Sequence[str], policies: Mapping[str, str], starts: Sequence[float], end: float
) -> Iterator[Span]:
    """Yields which of the outermost blocks with a policy run when, in the colours of their policies."""
    outermost = {block: next((path for path in paths_to(block) if path in policies), block) for block in set(blocks)}
    for block, begin, until in spans([outermost[block] for block in blocks], starts, end):
        yield Span(block, rule_colour(policies[block]) if block in policies else GREY, begin, until)


def fitting_label(span: Span, room: float) -> str:
    """Returns the last name of a path with its number, or what of it fits; ``room`` is in characters per unit.

    >>> [fitting_label(Span("transformer.h.3", "", 0, size), room=1) for size in (20, 2, 0)]
    ['h.3', '3', '']
    """
    parts = span.label.split(".")
    label = ".".join(parts[-2:] if parts[-1].isdecimal() else parts[-1:])
    while len(label) > room * (span.end - span.begin):
        label = label.partition(".")[2]
    return label


# ---- bytes


def thin(levels: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Returns at most ``limit`` points: where each begins, and where the highest level is from there to the next."""
    size = -(-len(levels) // limit)
    runs = (range(at, min(at + size, len(levels))) for at in range(0, len(levels), size))
    return [(run.start, max(run, key=levels.__getitem__)) for run in runs]


def kind_of(life: TensorLife, at: int) -> str:
    """Returns the kind of a tensor after event ``at``, one of :data:`KINDS`."""
    if life.kind:
        return life.kind
    if life.is_saved(at):
        return SAVED
    return RECOMPUTED if life.recomputed_by else TRANSIENT


def levels_by_kind(record: StepRecord) -> dict[str, list[int]]:
    """Returns the live bytes of each kind after each event; they sum to the level."""
    num_events = len(record.timeline)
    changes = {kind: [0] * (num_events + 1) for kind in KINDS}
    # The kind of a tensor changes where a block begins and ends to save it. One that lives from 2 to 9 and is saved
    # from 4 to 7 is transient in 2 and 3, saved from 4 to 6, and transient again.
    for life in record.tensors:
        last = num_events if life.end is None else min(life.end, num_events)
        times = {life.begin, last, *(min(max(at, life.begin), last) for at in (life.saved_from, life.saved_until))}
        for begin, end in pairwise(sorted(times)):
            change = changes[kind_of(life, begin)]
            change[begin] += life.num_bytes
            change[end] -= life.num_bytes
    # What is transient is the rest of the level, so that all kinds sum to it exactly: also where a storage was counted
    # that no life is known of.
    levels = {kind: list(accumulate(change))[:num_events] for kind, change in changes.items() if kind != TRANSIENT}
    listed = zip(*levels.values(), strict=True)
    levels[TRANSIENT] = [event.live_bytes - sum(at) for event, at in zip(record.timeline, listed, strict=True)]
    return levels


@final
@dataclass(frozen=True, slots=True)
class Part:
    name: str
    num_bytes: int
    parts: tuple[Part, ...] = ()
    tensor: TensorLife | None = None
    """The tensor, if it is a single one."""


def peak_index(record: StepRecord) -> int:
    levels = [event.live_bytes for event in record.timeline]
    return levels.index(max(levels))


def composition(record: StepRecord) -> Part:
    """Returns the peak as kinds, their blocks and the largest tensors of those, each with its exact bytes."""
    at = peak_index(record)
    groups: dict[str, dict[str, list[Part]]] = {kind: defaultdict(list) for kind in KINDS}
    for life in record.tensors:
        if life.is_alive(at):
            kind = kind_of(life, at)
            block = {SAVED: life.saved_by, RECOMPUTED: life.recomputed_by}.get(kind, life.block)
            groups[kind][block or OUTSIDE].append(Part(tensor_name(life), life.num_bytes, tensor=life))
    kinds = []
    for kind, blocks in groups.items():
        parts = [_sum(block, _largest(tensors, _MAX_TENSORS, "tensors")) for block, tensors in blocks.items()]
        kinds.append(_sum(kind, _largest(parts, _MAX_BLOCKS, "blocks")))
    return _sum("peak", [kind for kind in kinds if kind.parts])


def tensor_name(life: TensorLife) -> str:
    return f"{life.dtype}[{', '.join(map(str, life.shape))}]"


def _largest(parts: Sequence[Part], limit: int, what: str) -> Iterator[Part]:
    ordered = sorted(parts, key=lambda part: -part.num_bytes)
    yield from ordered[:limit]
    others = ordered[limit:]
    if others:
        yield Part(f"{len(others)} other {what}", sum(part.num_bytes for part in others))


def _sum(name: str, parts: Iterable[Part]) -> Part:
    listed = tuple(parts)
    return Part(name, sum(part.num_bytes for part in listed), listed)
