"""Levels between keeping all of a block and nothing: which op results to keep, from what its ops take and need.

A result is either kept, which takes bytes, or computed again, which takes time and needs what it was computed from; or
nobody asks for it. For a price of a byte in seconds the cheapest choice is a minimum cut::

    source --inf--> wanted(op) --bytes x price--> again(op) --seconds--> sink
                        ^                             |
                        +---- again(op that reads) ---+ inf

An op that is wanted and not run again is kept: the cut takes its bytes. From the cheapest choices for all prices, some
that lie apart are the levels.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from graphckpt.planning.option import MOST
from graphckpt.rules.op_log import OpLog
from graphckpt.rules.selective import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphckpt.planning.model.op_times import OpTimes

_MOST_CUTS = 16
_TICKS = 10**12  # of a second: sums of whole numbers do not depend on their order
_NEAR_ALL = 0.98  # a level that keeps more than this share of what `keep` keeps is no other policy


class _KeptOps(NamedTuple):
    num_bytes: int
    ticks: int
    kept: frozenset[int]


def selective_levels(seen: Sequence[OpTimes], most: int = MOST) -> list[tuple[list[str], float]]:
    """Returns what each level keeps, as ``selective`` takes it, and the seconds of its second run.

    The level that keeps most comes first; behind the last there is one that keeps nothing.

    Args:
        seen: calls of equal blocks, of which the fastest counts op by op.
        most: how many levels at most.
    """
    log = seen[0].log if seen else OpLog()
    alike = [ops for ops in seen if ops.log.is_whole and len(ops.log.calls) == len(log.calls)]
    if not log.is_whole or not alike:
        return []
    seconds = [min(each) for each in zip(*(ops.seconds for ops in alike), strict=True)]
    views = [took for took, call in zip(seconds, log.calls, strict=True) if call.is_view]
    idle = median(views) if views else 0.0  # an op that computes nothing: what it takes to call one, and to look
    ticks = [round(max(0.0, took - idle) * _TICKS) for took in seconds]
    found = _cheapest(log, ticks[: log.num_saving])
    while len(found) > most + 2:  # beside the ends
        del found[min(range(1, len(found) - 1), key=lambda n: _bulge(*found[n - 1 : n + 2]))]
    nothing: tuple[list[str], float] = [], sum(ticks[: log.num_saving]) / _TICKS
    return [*((_names(log, choice.kept), choice.ticks / _TICKS) for choice in found[1:-1]), nothing]


def _cheapest(log: OpLog, ticks: Sequence[int]) -> list[_KeptOps]:
    """Returns the cheapest choices for many prices of a byte: from what autograd keeps to nothing.

    The price at which two neighbours are equally good shows whether there is another one between them. The pair with
    most room between them is asked about first.
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


def _cut(log: OpLog, ticks: Sequence[int], price: float) -> _KeptOps:
    """Returns the cheapest choice when a byte costs so many ticks."""
    import networkx as nx  # noqa: PLC0415 - a third of a second that only levels take

    graph = nx.DiGraph()
    roots = log.roots()
    dear = sum(ticks) + 1
    for number, took in enumerate(ticks):
        call = log.calls[number]
        wanted, again = ("wanted", number), ("again", number)
        if call.can_be_kept:
            graph.add_edge(wanted, again, capacity=min(dear, round(price * call.num_bytes)) if price < dear else dear)
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
    """Returns the area by which a front grows with one of its points."""
    (a, b, _), (c, d, _), (e, f, _) = before, choice, after
    return abs((c - a) * (f - b) - (e - a) * (d - b))


def _names(log: OpLog, kept: Iterable[int]) -> list[str]:
    numbers: dict[str, list[int]] = {}
    for number in sorted(kept):
        call = log.calls[number]
        is_attention = call.func in PRESETS["attention"]  # which has another kernel on another device
        numbers.setdefault("attention" if is_attention else str(call.func), []).append(call.number)
    return [f"{name}[{','.join(map(str, which))}]" for name, which in numbers.items()]
