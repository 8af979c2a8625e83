"""Chooses which op results ``selective`` keeps, from the bytes and seconds of each op.

A result is either kept, which takes bytes, or recomputed, which takes time and needs the inputs of the op; or it is not
needed at all. For a price per byte in seconds the cheapest choice is a minimum cut::

    source --inf--> wanted(op) --bytes x price--> again(op) --seconds--> sink
                        ^                             |
                        +---- again(op that reads) ---+ inf

The result of an op that is wanted and not recomputed is kept: the cut includes its bytes. From the cheapest choices for
all prices, a few that lie apart are the levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from graphckpt.planning.model.op_times import OpTimes
from graphckpt.planning.option import MOST
from graphckpt.rules.ops.schedule import OpGraph
from graphckpt.rules.selective import PRESETS

_MOST_CUTS = 16
_TICKS = 10**12  # of a second: sums of integers do not depend on their order
_NEAR_ALL = 0.98  # a level that keeps more than this share of the bytes of `keep` is left out


class _KeptOps(NamedTuple):
    num_bytes: int
    ticks: int
    kept: frozenset[int]


def selective_levels(seen: Sequence[OpTimes], most: int = MOST) -> list[tuple[list[str], float]]:
    """Returns the ``save`` argument of ``selective`` and the seconds of the recomputation, for each level.

    The level that keeps most comes first; the last one keeps nothing.

    Args:
        seen: calls of equal blocks; the fastest counts for each op.
        most: the largest number of levels.
    """
    log = seen[0].log if seen else OpGraph()
    alike = [ops for ops in seen if ops.log.is_complete and len(ops.log.calls) == len(log.calls)]
    if not log.is_complete or not alike:
        return []
    seconds = [min(each) for each in zip(*(ops.seconds for ops in alike), strict=True)]
    views = [took for took, call in zip(seconds, log.calls, strict=True) if call.is_view]
    idle = median(views) if views else 0.0  # an op that computes nothing: the time to call and to time an op
    ticks = [round(max(0.0, took - idle) * _TICKS) for took in seconds]
    found = _cheapest(log, ticks[: log.num_saving])
    while len(found) > most + 2:  # and the ends
        del found[min(range(1, len(found) - 1), key=lambda n: _bulge(*found[n - 1 : n + 2]))]
    nothing: tuple[list[str], float] = [], sum(ticks[: log.num_saving]) / _TICKS
    return [*((_names(log, choice.kept), choice.ticks / _TICKS) for choice in found[1:-1]), nothing]


def _cheapest(log: OpGraph, ticks: Sequence[int]) -> list[_KeptOps]:
    """Returns the cheapest choices for many prices per byte, from what autograd saves to nothing.

    The price at which two neighbours are equally good shows whether there is another choice between them. The pair with
    the largest gap is examined first.
    """
    keep = _KeptOps(log.saved_bytes, 0, frozenset(log.saved))
    nothing = _cut(log, ticks, price=float("inf"))
    found = {choice.kept: choice for choice in (keep, nothing)}
    todo = [(keep, nothing)]
    for _ in range(_MOST_CUTS):
        if not todo:
            break
        one, other = pair = max(todo, key=_room)
        todo.remove(pair)
        if one.num_bytes <= other.num_bytes:
            continue
        price = (other.ticks - one.ticks) / (one.num_bytes - other.num_bytes)
        middle = _cut(log, ticks, price)
        gain = (one.ticks - middle.ticks) + price * (one.num_bytes - middle.num_bytes)
        if middle.kept not in found and gain > 1:
            found[middle.kept] = middle
            todo += [(one, middle), (middle, other)]
    between = (choice for choice in found.values() if 0 < choice.num_bytes <= _NEAR_ALL * log.saved_bytes)
    return [keep, *sorted((choice for choice in between if choice not in (keep, nothing)), reverse=True), nothing]


def _cut(log: OpGraph, ticks: Sequence[int], price: float) -> _KeptOps:
    """Returns the cheapest choice for a price per byte in ticks."""
    import networkx as nx  # noqa: PLC0415 - a third of a second that only levels take

    graph = nx.DiGraph()
    roots = log.roots()
    infinite = sum(ticks) + 1
    for number, took in enumerate(ticks):
        call = log.calls[number]
        wanted, again = ("wanted", number), ("again", number)
        if call.can_be_kept:
            seconds = round(price * call.num_bytes) if price < infinite else infinite
            graph.add_edge(wanted, again, capacity=min(infinite, seconds))
        else:
            graph.add_edge(wanted, again)
        graph.add_edge(again, "sink", capacity=took)
        for maker in call.inputs:
            graph.add_edge(again, ("wanted", maker))
        if number in roots:
            graph.add_edge("source", wanted)
    if "source" not in graph:
        return _KeptOps(0, 0, frozenset())
    _, (near, _) = nx.minimum_cut(graph, "source", "sink")
    again_too = {node[1] for node in near if node[0] == "again"}
    kept = frozenset(node[1] for node in near if node[0] == "wanted") - again_too
    num_bytes = sum(log.calls[number].num_bytes for number in kept)
    return _KeptOps(num_bytes, sum(ticks[number] for number in again_too), kept)


def _room(pair: tuple[_KeptOps, _KeptOps]) -> int:
    one, other = pair
    return (one.num_bytes - other.num_bytes) * (other.ticks - one.ticks)


def _bulge(before: _KeptOps, choice: _KeptOps, after: _KeptOps) -> float:
    """Returns the area by which a point extends a Pareto front."""
    (a, b, _), (c, d, _), (e, f, _) = before, choice, after
    return abs((c - a) * (f - b) - (e - a) * (d - b))


def _names(log: OpGraph, kept: Iterable[int]) -> list[str]:
    numbers: dict[str, list[int]] = {}
    for number in sorted(kept):
        call = log.calls[number]
        is_attention = call.func in PRESETS["attention"]  # whose kernel differs between devices
        numbers.setdefault("attention" if is_attention else str(call.func), []).append(call.number)
    return [f"{name}[{','.join(map(str, which))}]" for name, which in numbers.items()]
