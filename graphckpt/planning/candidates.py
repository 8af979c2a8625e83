"""The policies that the planner considers for each block, with levels of ``selective`` that are found op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar, NamedTuple, final

import torch.distributed as dist
from torch import nn

from graphckpt.blocks.compiled import SHARE, CompiledForward, share_of, takes_share
from graphckpt.blocks.config import BlockConfig
from graphckpt.engine.block import BlockContext
from graphckpt.errors import ConfigError
from graphckpt.rules.base import Rule, parse_rule
from graphckpt.rules.basic import Full, Joined, Keep
from graphckpt.rules.ops import OpGraph
from graphckpt.rules.selective import PRESETS, Selective
from graphckpt.stores.base import parse_offload
from graphckpt.stores.partition import parse_partition

SHARES = (0.8, 0.5, 0.3, 0.1)
"""Shares of the bytes that the compiler saves by itself; plans mix them for values in between."""


@final
@dataclass(frozen=True, slots=True)
class LayerCompilation:
    field: bool | dict[str, Any] | None = None
    """The ``compile`` field of layers without one in their option; ``None`` if they are not compiled."""
    shares: tuple[dict[str, Any], ...] = ()
    """Arguments with which the compiler saves less for backward."""

    @property
    def options(self) -> dict[str, Any] | None:
        """The arguments of ``torch.compile``; ``None`` if layers are not compiled."""
        return compile_options(self.field)


def parse_compile(value: Any, rules: object = None) -> LayerCompilation:
    options = compile_options(value)
    if options is None:
        return LayerCompilation()
    if rules is not None or SHARE in options or not takes_share(options):
        return LayerCompilation(value)
    return LayerCompilation({**options, SHARE: 1.0}, tuple({**options, SHARE: share} for share in SHARES))


def compile_options(value: Any) -> dict[str, Any] | None:
    """Returns the arguments of ``torch.compile`` for a value of ``compile``; ``None`` if it does not compile."""
    config = BlockConfig("plan")
    config.update({"compile": value})
    return config.compile_options


def without_share(value: bool | dict[str, Any] | None) -> bool | dict[str, Any] | None:
    """Returns a block's ``compile`` without the share that the compiler saves, which plans choose."""
    options = compile_options(value)
    return None if options is None else {key: value for key, value in options.items() if key != SHARE} or True


@contextmanager
def compiled_forwards(modules: Iterable[nn.Module], options: dict[str, Any] | None) -> Iterator[None]:
    """Compiles the forward of each module within the ``with`` block, inside of policies that are set there."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module in modules if options is not None else ():
            fields, forward = module.__dict__, CompiledForward(module.forward, options or {})
            before.append((fields, fields.get("forward")))
            fields["forward"] = forward
        yield
    finally:
        for fields, forward in before:
            del fields["forward"]
            if forward is not None:
                fields["forward"] = forward


MOST = 4
"""Levels of ``selective`` for a block. Each costs runs, and plans mix neighbouring ones."""


@final
@dataclass(frozen=True, slots=True)
class Option:
    name: str
    """The name in tables: ``"full"``, ``"selective(matmul)"``, ``"full + host"``."""
    fields: dict[str, Any]
    """The fields of the block, as :func:`graphckpt.apply` takes them."""
    rule: Rule
    is_far: bool = False
    """Whether saved tensors are offloaded."""
    recompute_seconds: float | None = field(default=None, compare=False)
    """Seconds of the recomputation, timed op by op; ``None`` if not timed."""
    is_part: bool = False
    """Whether saved tensors are partitioned over ranks."""


KEEP = Option("keep", {"activation_checkpointing": False}, Keep())

JOINED = Option("joined", {"activation_checkpointing": "joined"}, Joined())
"""The option of the blocks of a run after the first."""


@final
@dataclass(frozen=True)
class SelectiveLevel(Rule, is_registered=False):
    """A placeholder for a level of ``selective`` that is not known yet; level 0 keeps most."""

    name: ClassVar[str] = "level"
    number: int = 0

    def describe(self) -> str:
        return f"selective(level {self.number + 1})"

    def run(self, context: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


@final
@dataclass
class OpTimes:
    log: OpGraph = field(default_factory=OpGraph)
    seconds: list[float] = field(default_factory=list)


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


def selective_levels(runs: Sequence[OpTimes], count: int = MOST) -> list[tuple[list[str], float]]:
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
    while len(choices) > count + 2:  # and the ends
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
        if middle.results not in choices and gain > 1:
            choices[middle.results] = middle
            todo += [(one, middle), (middle, other)]
    between = (choice for choice in choices.values() if 0 < choice.num_bytes <= _NEAR_ALL * log.saved_bytes)
    return [keep, *sorted((choice for choice in between if choice not in (keep, nothing)), reverse=True), nothing]


def _cheapest_at(log: OpGraph, ticks: Sequence[int], price: float) -> _KeptOps:
    import networkx as nx  # noqa: PLC0415 - a third of a second that only levels take

    graph = nx.DiGraph()
    roots = log.roots()
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


_FLAG = "activation_checkpointing"

_BY_HAND: tuple[tuple[list[str], float | None], ...] = (
    *(([name], None) for name in ("matmul+attention", "matmul", "attention")),
    ([], None),
)
"""The levels of a block whose ops are not visible."""

NEAR: tuple[Option, ...] = (
    KEEP,
    Option("full", {_FLAG: True}, Full()),
    *(Option(SelectiveLevel(number).describe(), {}, SelectiveLevel(number)) for number in range(MOST)),
)
"""The options without offloading: ``keep``, ``full``, and the levels of ``selective``."""


def options(
    offload: bool | str = False,
    only: Iterable[Any] | None = None,
    *,
    code: LayerCompilation = LayerCompilation(),
    partition: Any = None,
) -> tuple[Option, ...]:
    """Returns the options, ``keep`` first.

    Args:
        offload: Where saved tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``.
        only: Rules to consider beside ``keep``, as ``activation_checkpointing`` takes them; ``None`` is all.
            ``joined`` is not an option of a single block: see :func:`can_join`.
        code: How blocks are compiled. Ops of compiled blocks are not visible, and the levels between keeping all and
            nothing are the compiler's.
        partition: The ranks over which saved tensors may be partitioned; ``None``: they are not.
    """
    if only is not None:
        rules = [(value, _rule(value)) for value in only]
        others = (
            Option(rule.describe(), {_FLAG: value}, rule) for value, rule in rules if not isinstance(rule, Joined)
        )
        on_device = KEEP, *others
    elif code.field is None:
        on_device = NEAR
    else:
        compiled = (replace(KEEP, name=f"keep{share_of(o)}", fields={**KEEP.fields, "compile": o}) for o in code.shares)
        on_device = *NEAR[:-MOST], *compiled
    result = list(on_device)
    if (target := parse_offload(offload)) is not None:
        place = {"offload": "cpu" if offload is True else offload}
        result += [
            replace(o, name=f"{o.name} + {target.tier}", fields=o.fields | place, is_far=True) for o in on_device
        ]
    if partition is not None:
        ranks = {"partition": partition}
        result += [replace(o, name=f"{o.name} + part", fields=o.fields | ranks, is_part=True) for o in on_device]
    return tuple(result)


def parse_partition_request(partition: Any, num_planning: int) -> tuple[Any, list[str]]:
    """Returns the ranks over which saved tensors may be partitioned, if there are any, and notes for the plan."""
    if parse_partition(partition) is None:
        return None, []
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None, ["partition has no effect: there is one process"]
    if num_planning == 1:
        raise ConfigError("partition: expected the ranks to plan together, got group=False · fix: leave `group` out")
    return partition, []


def with_levels(
    options: Sequence[Option],
    kinds: Sequence[int],
    look: Callable[[], Sequence[Sequence[OpTimes]]],
    broadcast: Callable[[Any], Any] = lambda value: value,
) -> tuple[list[Option], dict[int, list[Option]]]:
    """Replaces levels of ``selective`` by those found for the blocks; returns the options, and those of each class."""
    if not any(isinstance(option.rule, SelectiveLevel) for option in options):
        return list(options), {kind: list(options) for kind in kinds}
    runs: dict[int, list[OpTimes]] = {}
    for kind, calls in zip(kinds, look(), strict=True):
        runs.setdefault(kind, []).extend(calls)
    levels = dict(zip(runs, broadcast([selective_levels(calls) or _BY_HAND for calls in runs.values()]), strict=True))
    count = max(map(len, levels.values())) - 1
    some = [o for o in options if not isinstance(o.rule, SelectiveLevel) or o.rule.number < count]
    return some, {kind: [_own(option, own) for option in some] for kind, own in levels.items()}


def _own(option: Option, levels: Sequence[tuple[Sequence[str], float | None]]) -> Option:
    """Returns an option for a block with these levels; the last level replaces those that the block does not have."""
    value: Any
    rule: Rule
    *between, (_, full_seconds) = levels
    is_near = not (option.is_far or option.is_part)
    if option.rule == Full() and is_near:
        return replace(option, recompute_seconds=full_seconds)
    if not isinstance(option.rule, SelectiveLevel):
        return option
    label, value, rule, seconds = "full", True, Full(), full_seconds  # a block without levels
    if between:
        number = min(option.rule.number, len(between) - 1)
        names, seconds = between[number]
        save = names[0] if names[0] in PRESETS else list(names)
        value, rule = {"rule": "selective", "save": save}, Selective(save)
        if not isinstance(save, str):
            value["label"] = f"level {number + 1} of {len(between)}"
            rule = Selective(save, label=value["label"])
        label = rule.describe()
    return replace(
        option,
        name=option.name.replace(option.rule.describe(), label),
        fields={"activation_checkpointing": value, **option.fields},
        rule=rule,
        recompute_seconds=seconds if is_near else None,
    )


def can_join(blocks: Iterable[nn.Module], only: Iterable[Any] | None = None) -> bool:
    is_asked = only is None or any(isinstance(_rule(value), Joined) for value in only)
    return is_asked and all(Joined().check(block) is None for block in blocks)


def _rule(value: Any) -> Rule:
    try:
        rule = parse_rule(value)
    except ConfigError as error:
        raise ConfigError(f"candidates: {error}") from None
    if rule is None or isinstance(rule, Keep):
        raise ConfigError(
            f"candidates: expected a rule other than keep, got {value!r} · fix: leave it out; keep is always considered"
        )
    return rule
