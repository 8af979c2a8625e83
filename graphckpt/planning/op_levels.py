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

from collections import defaultdict
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt._compat_autocast import call_with_autocast
from graphckpt._compat_compiler import never_compiled
from graphckpt.planning.run import Option
from graphckpt.rules import Full, Rule, Selective
from graphckpt.rules.op_log import OpLog
from graphckpt.rules.op_modes import is_counted
from graphckpt.rules.selective import PRESETS
from graphckpt.rules.stored import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from graphckpt.planning.run import Blocks
    from graphckpt.planning.trace import Seconds
    from graphckpt.rules import Site

MOST = 4
"""Levels of a block. More of them cost runs, and plans mix two that lie around what they need."""

_BY_HAND: tuple[tuple[list[str], float | None], ...] = (
    *(([name], None) for name in ("matmul+attention", "matmul", "attention")),
    ([], None),
)
"""The levels of a block whose ops cannot be seen."""
_MOST_CUTS = 16
_TICKS = 10**12  # of a second: sums of whole numbers do not depend on their order
_NEAR_ALL = 0.98  # a level that keeps more than this share of what `keep` keeps is no other policy


@final
@dataclass(frozen=True)
class Level(Rule):
    """Stands for the level of a block with this number, before one is looked at: the first keeps most."""

    name: ClassVar[str] = "level"
    number: int = 0

    def describe(self) -> str:
        """Counts from 1."""
        return f"selective(level {self.number + 1})"

    def run(self, site: Site, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Is never called: what a block gets in its place is ``selective``."""
        raise NotImplementedError


@final
@dataclass
class Ops:
    """The ops of one forward of a block, and what each takes."""

    log: OpLog = field(default_factory=OpLog)
    seconds: list[float] = field(default_factory=list)


@final
@dataclass(frozen=True, eq=False)
class Look(Rule):
    """Runs a block as it is and notes its ops.

    Args:
        seen: gets the ops of each call.
        clock: says what time it is, in seconds.
        op_seconds: says what an op takes, where the clock cannot.
    """

    name: ClassVar[str] = "look"
    seen: list[Ops]
    clock: Callable[[], float]
    op_seconds: Seconds | None = None

    def run(self, site: Site, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; all is kept."""
        del site
        ops = Ops()
        self.seen.append(ops)

        @never_compiled
        def pack(tensor: Any) -> Any:
            ops.log.saves(tensor)
            return IN_PLACE[0](tensor)

        with saved_tensors_hooks(pack, IN_PLACE[1]), _Watch(ops, self.clock, self.op_seconds):
            output = function(*args, **kwargs)
        ops.log.close()
        return output


@final
class _Watch(TorchDispatchMode):
    def __init__(self, ops: Ops, clock: Callable[[], float], op_seconds: Seconds | None) -> None:
        super().__init__()
        self._ops = ops
        self._clock = clock
        self._op_seconds = op_seconds
        self._calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Sees nothing of what compiled code does, which else would not run as such."""
        return True

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        begin = self._clock()
        output = call_with_autocast(func, args, kwargs)
        took = self._clock() - begin
        if not is_counted(func, args):
            return output
        if self._op_seconds is not None:
            took = self._op_seconds(func, args, kwargs, output)
        number = self._calls[func]
        self._calls[func] = number + 1
        self._ops.log.add(func, number, args, kwargs, output)
        self._ops.seconds.append(took)
        return output


def ops_of(
    blocks: Blocks, run: Callable[[], object], clock: Callable[[], float], op_seconds: Seconds | None = None
) -> list[list[Ops]]:
    """Returns, by block, the ops of each forward during ``run``; see :class:`Look` for the arguments."""
    seen: list[list[Ops]] = [[] for _ in blocks.names]
    with blocks.under([Option("look", {}, Look(each, clock, op_seconds)) for each in seen], lambda _: None):
        run()
    return seen


class _Choice(NamedTuple):
    num_bytes: int
    ticks: int
    kept: frozenset[int]


def levels(seen: Sequence[Ops], most: int = MOST) -> list[tuple[list[str], float]]:
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


def with_levels(
    options: Sequence[Option],
    kinds: Sequence[int],
    look: Callable[[], Sequence[Sequence[Ops]]],
    told: Callable[[Any], Any] = lambda value: value,
) -> tuple[list[Option], dict[int, list[Option]]]:
    """Returns options without more levels than there are, and by class what each option is for its blocks.

    Args:
        options: of which some may be a :class:`Level`.
        kinds: the class of each block.
        look: returns what the ops of each block take; called if there are levels to be found.
        told: given a plain value, returns that of the process by whose times several of them go.
    """
    if not any(isinstance(option.rule, Level) for option in options):
        return list(options), {kind: list(options) for kind in kinds}
    seen: dict[int, list[Ops]] = {kind: [] for kind in kinds}
    for kind, calls in zip(kinds, look(), strict=True):
        seen[kind] += calls
    found = dict(zip(seen, told([levels(calls) or _BY_HAND for calls in seen.values()]), strict=True))
    most = max(map(len, found.values())) - 1
    some = [o for o in options if not isinstance(o.rule, Level) or o.rule.number < most]
    return some, {kind: [_own(option, own) for option in some] for kind, own in found.items()}


def _own(option: Option, found: Sequence[tuple[Sequence[str], float | None]]) -> Option:
    """Returns what an option is for a block with these levels; the last one stands for those that it does not have."""
    value: Any
    rule: Rule
    *between, (_, all_again) = found
    is_near = not (option.is_far or option.is_part)
    if option.rule == Full() and is_near:
        return replace(option, again_seconds=all_again)
    if not isinstance(option.rule, Level):
        return option
    label, value, rule, again = "full", True, Full(), all_again  # a block with nothing between all and nothing
    if between:
        number = min(option.rule.number, len(between) - 1)
        names, again = between[number]
        save = names[0] if names[0] in PRESETS else list(names)
        label = f"selective({save})" if isinstance(save, str) else f"selective(level {number + 1} of {len(between)})"
        value, rule = {"rule": "selective", "save": save}, Selective(save)
    return replace(
        option,
        name=option.name.replace(option.rule.describe(), label),
        fields={"activation_checkpointing": value, **option.fields},
        rule=rule,
        again_seconds=again if is_near else None,
    )


def _cheapest(log: OpLog, ticks: Sequence[int]) -> list[_Choice]:
    """Returns the cheapest choices for many prices of a byte: from what autograd keeps to nothing.

    The price at which two neighbours are equally good shows whether there is another one between them. The pair with
    most room between them is asked about first.
    """
    keep = _Choice(log.saved_bytes, 0, frozenset(log.saved))
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


def _cut(log: OpLog, ticks: Sequence[int], price: float) -> _Choice:
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
        return _Choice(0, 0, frozenset())
    _, (near, _) = nx.minimum_cut(graph, "source", "sink")
    again_too = {node[1] for node in near if node[0] == "again"}
    kept = frozenset(node[1] for node in near if node[0] == "wanted") - again_too
    num_bytes = sum(log.calls[number].num_bytes for number in kept)
    return _Choice(num_bytes, sum(ticks[number] for number in again_too), kept)


def _room(pair: tuple[_Choice, _Choice]) -> int:
    one, other = pair
    return (one.num_bytes - other.num_bytes) * (other.ticks - one.ticks)


def _bulge(before: _Choice, choice: _Choice, after: _Choice) -> float:
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
