"""Finds levels of ``selective`` between keeping all and nothing: times the ops of a block, and cuts their graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch.autograd.graph import saved_tensors_hooks

from graphckpt._compat import call_with_autocast
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.engine.block import BlockContext
from graphckpt.planning.candidates import MOST, Option
from graphckpt.planning.step_clock import Blocks, TimeMark, seconds_between, time_mark
from graphckpt.rules.base import Rule
from graphckpt.rules.basic import Full
from graphckpt.rules.ops import OpGraph, is_counted
from graphckpt.rules.selective import PRESETS, Selective
from graphckpt.simulation.allocations import OpSeconds
from graphckpt.stores.base import KEEP_ON_DEVICE


@final
@dataclass
class OpTimes:
    log: OpGraph = field(default_factory=OpGraph)
    marks: list[tuple[TimeMark, TimeMark]] = field(default_factory=list)
    """The begin and the end of each op."""

    @property
    def seconds(self) -> list[float]:
        return [seconds_between(*marks) for marks in self.marks]


@final
@dataclass(frozen=True, eq=False)
class _OpObserver(Rule, is_registered=False):
    """Logs the ops of a block with their inputs, their times, and whether autograd saves their results."""

    name: ClassVar[str] = "observe"
    calls: list[OpTimes]
    device: torch.device
    op_seconds: OpSeconds | None = None

    def run(self, context: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        del context
        ops = OpTimes()
        self.calls.append(ops)

        @never_compiled
        def pack(tensor: Any) -> Any:
            ops.log.saves(tensor)
            return KEEP_ON_DEVICE[0](tensor)

        with saved_tensors_hooks(pack, KEEP_ON_DEVICE[1]), _OpTimer(ops, self):
            output = function(*args, **kwargs)
        ops.log.close()
        return output


@final
class _OpTimer(DispatchMode):
    def __init__(self, ops: OpTimes, observer: _OpObserver) -> None:
        super().__init__()
        self._ops = ops
        self._observer = observer
        self._calls: dict[Any, int] = defaultdict(int)

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, device, seconds_of = kwargs or {}, self._observer.device, self._observer.op_seconds
        begin: TimeMark = time_mark(device) if seconds_of is None else 0.0
        output = call_with_autocast(func, args, kwargs)
        end: TimeMark = time_mark(device) if seconds_of is None else 0.0
        if is_counted(func, args, kwargs):
            end = end if seconds_of is None else seconds_of(func, args, kwargs, output)
            self._ops.marks.append((begin, end))
            self._ops.log.add(func, self._calls[func], args, kwargs, output)
            self._calls[func] += 1
        return output


def record_ops(
    blocks: Blocks, run: Callable[[], object], device: torch.device, op_seconds: OpSeconds | None = None
) -> list[list[OpTimes]]:
    """Returns the ops of each call of each block while ``run`` runs, timed on the device, or by ``op_seconds``."""
    ops_of_blocks: list[list[OpTimes]] = [[] for _ in blocks.names]
    observers = [_OpObserver(ops, device, op_seconds) for ops in ops_of_blocks]
    with blocks.under([Option("observe", {}, each) for each in observers], [None] * len(observers)):
        run()
    return ops_of_blocks


_MOST_CUTS = 16
_TICKS = 10**12  # of a second: sums of integers do not depend on their order
_NEAR_ALL = 0.98  # a level that keeps more than this share of the bytes of `keep` is left out


# Note [Levels of selective]
# A result is either kept, which takes bytes, or recomputed, which takes time and needs the inputs of the op; or it is
# not needed at all. For a price per byte in seconds the cheapest choice is a minimum cut:
#
#     source --inf--> wanted(op) --bytes x price--> recomputed(op) --seconds--> sink
#                         ^                               |
#                         +------ wanted(input of op) <---+ inf
#
# The result of an op that is wanted and not recomputed is kept: the cut includes its bytes. From the cheapest choices
# for all prices, a few that lie apart are the levels.


class _KeptOps(NamedTuple):
    num_bytes: int
    ticks: int
    results: frozenset[int]


def selective_levels(runs: Sequence[OpTimes]) -> list[tuple[list[str], float]]:
    """Returns the ``save`` argument of ``selective`` and the seconds of the recomputation, for each level.

    The level that keeps most comes first; the last one keeps nothing.
    """
    log = runs[0].log if runs else OpGraph()
    alike = [ops for ops in runs if ops.log.is_complete and len(ops.log.calls) == len(log.calls)]
    if not log.is_complete or not alike:
        return []
    seconds = [min(each) for each in zip(*(ops.seconds for ops in alike), strict=True)]
    views = [took for took, call in zip(seconds, log.calls, strict=True) if call.is_view]
    idle = median(views) if views else 0.0  # an op that computes nothing: the time to call and to time an op
    ticks = [round(max(0.0, took - idle) * _TICKS) for took in seconds]
    choices = _cheapest(log, ticks[: log.num_saving])
    while len(choices) > MOST + 2:  # and the ends
        del choices[min(range(1, len(choices) - 1), key=lambda n: _bulge(*choices[n - 1 : n + 2]))]
    nothing: tuple[list[str], float] = [], sum(ticks[: log.num_saving]) / _TICKS
    return [*((_names(log, choice.results), choice.ticks / _TICKS) for choice in choices[1:-1]), nothing]


def _cheapest(log: OpGraph, ticks: Sequence[int]) -> list[_KeptOps]:
    """Returns the cheapest choices for many prices per byte, from what autograd saves to nothing.

    The price at which two neighbours are equally good shows whether there is another choice between them. The pair with
    the largest gap is examined first.
    """
    keep = _KeptOps(log.saved_bytes, 0, frozenset(log.saved))
    nothing = _cheapest_at(log, ticks, price=float("inf"))
    choices = {choice.results: choice for choice in (keep, nothing)}
    todo = [(keep, nothing)]
    for _ in range(_MOST_CUTS):
        if not todo:
            break
        pair = max(todo, key=lambda pair: (pair[0].num_bytes - pair[1].num_bytes) * (pair[1].ticks - pair[0].ticks))
        todo.remove(pair)
        one, other = pair
        if one.num_bytes <= other.num_bytes:
            continue
        price = (other.ticks - one.ticks) / (one.num_bytes - other.num_bytes)
        middle = _cheapest_at(log, ticks, price)
        gain = (one.ticks - middle.ticks) + price * (one.num_bytes - middle.num_bytes)
        # Prices are floats and ticks integers: a gain of one tick is rounding.
        if middle.results not in choices and gain > 1:
            choices[middle.results] = middle
            todo += [(one, middle), (middle, other)]
    between = (choice for choice in choices.values() if 0 < choice.num_bytes <= _NEAR_ALL * log.saved_bytes)
    return [keep, *sorted((choice for choice in between if choice not in (keep, nothing)), reverse=True), nothing]


def _cheapest_at(log: OpGraph, ticks: Sequence[int], price: float) -> _KeptOps:
    import networkx as nx  # noqa: PLC0415 - a third of a second that only levels take

    graph = nx.DiGraph()
    roots = log.roots()
    # Above the cost of recomputing everything, so that no minimum cut has such an edge; networkx takes an edge without
    # a capacity as infinite.
    infinite = sum(ticks) + 1
    for number, took in enumerate(ticks):
        call = log.calls[number]
        wanted, recomputed = ("wanted", number), ("recomputed", number)
        if call.can_be_kept:
            seconds = round(price * call.num_bytes) if price < infinite else infinite
            graph.add_edge(wanted, recomputed, capacity=min(infinite, seconds))
        else:
            graph.add_edge(wanted, recomputed)
        graph.add_edge(recomputed, "sink", capacity=took)
        for maker in call.inputs:
            graph.add_edge(recomputed, ("wanted", maker))
        if number in roots:
            graph.add_edge("source", wanted)
    if "source" not in graph:
        return _KeptOps(0, 0, frozenset())
    _, (side, _) = nx.minimum_cut(graph, "source", "sink")
    recomputations = {node[1] for node in side if node[0] == "recomputed"}
    results = frozenset(node[1] for node in side if node[0] == "wanted") - recomputations
    num_bytes = sum(log.calls[number].num_bytes for number in results)
    return _KeptOps(num_bytes, sum(ticks[number] for number in recomputations), results)


def _bulge(before: _KeptOps, choice: _KeptOps, after: _KeptOps) -> float:
    """Returns the area by which a point extends a Pareto front."""
    (a, b, _), (c, d, _), (e, f, _) = before, choice, after
    return abs((c - a) * (f - b) - (e - a) * (d - b))


def _names(log: OpGraph, results: Iterable[int]) -> list[str]:
    numbers: dict[str, list[int]] = {}
    for number in sorted(results):
        call = log.calls[number]
        is_attention = call.func in PRESETS["attention"]  # whose kernel differs between devices
        numbers.setdefault("attention" if is_attention else str(call.func), []).append(call.number)
    return [f"{name}[{','.join(map(str, which))}]" for name, which in numbers.items()]


_BY_HAND: tuple[tuple[list[str], float | None], ...] = (
    *(([name], None) for name in ("matmul+attention", "matmul", "attention")),
    ([], None),
)
"""The levels of a block whose ops are not visible."""


def with_levels(
    options: Sequence[Option],
    kinds: Sequence[int],
    look: Callable[[], Sequence[Sequence[OpTimes]]],
    broadcast: Callable[[Any], Any] = lambda value: value,
) -> tuple[list[Option], dict[int, list[Option]]]:
    """Replaces levels of ``selective`` by those found for the blocks; returns the options, and those of each class."""
    if all(option.level is None for option in options):
        return list(options), {kind: list(options) for kind in kinds}
    runs: dict[int, list[OpTimes]] = {}
    for kind, calls in zip(kinds, look(), strict=True):
        runs.setdefault(kind, []).extend(calls)
    levels = dict(zip(runs, broadcast([selective_levels(calls) or _BY_HAND for calls in runs.values()]), strict=True))
    count = max(map(len, levels.values())) - 1
    some = [option for option in options if option.level is None or option.level < count]
    return some, {kind: [_for_levels(option, of_kind) for option in some] for kind, of_kind in levels.items()}


def _for_levels(option: Option, levels: Sequence[tuple[Sequence[str], float | None]]) -> Option:
    """Returns an option for a block with these levels; the last level replaces those that the block does not have."""
    *between, (_, full_seconds) = levels
    is_near = not (option.is_far or option.is_partitioned)
    if option.level is None:
        return replace(option, recompute_seconds=full_seconds) if option.rule == Full() and is_near else option
    value: Any = True
    rule: Rule = Full()  # of a block without levels
    seconds = full_seconds
    if between:
        number = min(option.level, len(between) - 1)
        names, seconds = between[number]
        value = {"rule": "selective", "save": names[0] if names[0] in PRESETS else list(names)}
        if names[0] not in PRESETS:
            value["label"] = f"level {number + 1} of {len(between)}"
        rule = Selective(value["save"], label=value.get("label", ""))
    return replace(
        option,
        name=option.name.replace(option.rule.describe(), rule.describe()),
        fields={"activation_checkpointing": value, **option.fields},
        rule=rule,
        recompute_seconds=seconds if is_near else None,
        level=None,
    )
