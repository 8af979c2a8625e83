"""The policies that a planner considers for each block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from graphckpt.blocks.compiled import share_of
from graphckpt.errors import ConfigError
from graphckpt.planning.compiled import NOT_COMPILED, LayerCompilation
from graphckpt.planning.option import KEEP, MOST, Option, SelectiveLevel
from graphckpt.planning.solve.op_levels import selective_levels
from graphckpt.rules.base import Rule
from graphckpt.rules.full import Full
from graphckpt.rules.joined import Joined
from graphckpt.rules.keep import Keep
from graphckpt.rules.registry import parse_rule
from graphckpt.rules.selective import PRESETS, Selective
from graphckpt.stores.offload import parse_offload
from graphckpt.stores.partition import parse_partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from graphckpt.planning.model.op_times import OpTimes
    from graphckpt.planning.plan_group import PlanGroup

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
    code: LayerCompilation = NOT_COMPILED,
) -> tuple[Option, ...]:
    """Returns the options, ``keep`` first.

    Args:
        offload: Where saved tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``.
        only: Rules to consider beside ``keep``, as ``activation_checkpointing`` takes them; ``None`` is all.
            ``joined`` is not an option of a single block: see :func:`can_join`.
        code: How blocks are compiled. Ops of compiled blocks are not visible, and the levels between keeping all and
            nothing are the compiler's.

    Raises:
        ConfigError: There is no such target or rule.
    """
    known = NEAR if code.field is None else (*NEAR[:-MOST], *map(_compiled, code.shares))
    near = (
        known if only is None else (KEEP, *(_option(value) for value in only if not isinstance(_rule(value), Joined)))
    )
    target = parse_offload(offload)
    if target is None:
        return near
    place = "cpu" if offload is True else offload
    return near + tuple(
        Option(f"{option.name} + {target.tier}", {**option.fields, "offload": place}, option.rule, is_far=True)
        for option in near
    )


def with_partition(options: Sequence[Option], partition: Any) -> tuple[Option, ...]:
    """Returns options, followed by those without offloading with their saved tensors partitioned over ranks."""
    parts = [
        replace(o, name=f"{o.name} + part", fields={**o.fields, "partition": partition}, is_part=True)
        for o in options
        if not o.is_far
    ]
    return (*options, *parts)


def parse_partition_request(partition: Any, group: PlanGroup) -> tuple[Any, list[str]]:
    """Returns the ranks over which saved tensors may be partitioned, if there are any, and notes for the plan.

    Raises:
        ConfigError: The value is not a partition, or the ranks do not plan together.
    """
    if parse_partition(partition) is None:
        return None, []
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None, ["partition has no effect: there is one process"]
    if group.size == 1:
        raise ConfigError("partition: expected the ranks to plan together, got group=False · fix: leave `group` out")
    return partition, []


def with_levels(
    options: Sequence[Option],
    kinds: Sequence[int],
    look: Callable[[], Sequence[Sequence[OpTimes]]],
    broadcast: Callable[[Any], Any] = lambda value: value,
) -> tuple[list[Option], dict[int, list[Option]]]:
    """Replaces levels of ``selective`` by those found for the blocks; returns the options, and those of each class.

    Args:
        options: The options, of which some may be a :class:`SelectiveLevel`.
        kinds: The class of each block.
        look: Returns the ops of each block and their times; called if there are levels to find.
        broadcast: Returns the value of the leader of several processes.
    """
    if not any(isinstance(option.rule, SelectiveLevel) for option in options):
        return list(options), {kind: list(options) for kind in kinds}
    seen: dict[int, list[OpTimes]] = {kind: [] for kind in kinds}
    for kind, calls in zip(kinds, look(), strict=True):
        seen[kind] += calls
    found = dict(zip(seen, broadcast([selective_levels(calls) or _BY_HAND for calls in seen.values()]), strict=True))
    most = max(map(len, found.values())) - 1
    some = [o for o in options if not isinstance(o.rule, SelectiveLevel) or o.rule.number < most]
    return some, {kind: [_own(option, own) for option in some] for kind, own in found.items()}


def _own(option: Option, found: Sequence[tuple[Sequence[str], float | None]]) -> Option:
    """Returns an option for a block with these levels; the last level replaces those that the block does not have."""
    value: Any
    rule: Rule
    *between, (_, all_again) = found
    is_near = not (option.is_far or option.is_part)
    if option.rule == Full() and is_near:
        return replace(option, recompute_seconds=all_again)
    if not isinstance(option.rule, SelectiveLevel):
        return option
    label, value, rule, again = "full", True, Full(), all_again  # a block without levels
    if between:
        number = min(option.rule.number, len(between) - 1)
        names, again = between[number]
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
        recompute_seconds=again if is_near else None,
    )


def _compiled(options: dict[str, Any]) -> Option:
    return Option(f"{KEEP.name}{share_of(options)}", {**KEEP.fields, "compile": options}, Keep())


def can_join(blocks: Iterable[nn.Module], only: Iterable[Any] | None = None) -> bool:
    """Returns whether blocks may be joined: ``only`` allows it, and the blocks do."""
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


def _option(value: Any) -> Option:
    rule = _rule(value)
    return Option(rule.describe(), {_FLAG: value}, rule)
