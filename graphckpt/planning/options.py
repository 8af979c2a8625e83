"""The policies that a planner considers for each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphckpt.blocks.compiled import share_of
from graphckpt.errors import ConfigError
from graphckpt.planning.compiled import NOT_COMPILED, Compiling
from graphckpt.planning.op_levels import MOST, Level
from graphckpt.planning.run import KEEP, Option
from graphckpt.rules import Full, Joined, Keep, parse_rule
from graphckpt.stores import parse_offload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from graphckpt.rules import Rule

_FLAG = "activation_checkpointing"

NEAR: tuple[Option, ...] = (
    KEEP,
    Option("full", {_FLAG: True}, Full()),
    *(Option(Level(number).describe(), {}, Level(number)) for number in range(MOST)),
)
"""What a block keeps on its device: everything, its inputs alone, or the results of some of its ops beside them."""


def options(
    offload: bool | str = False,
    only: Iterable[Any] | None = None,
    *,
    code: Compiling = NOT_COMPILED,
) -> tuple[Option, ...]:
    """Returns the options, ``keep`` first.

    Args:
        offload: where kept tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``.
        only: rules to consider beside ``keep``, as ``activation_checkpointing`` takes them; ``None`` is all. That
            blocks may be ``joined`` is no option of one of them: see :func:`joins`.
        code: how blocks are compiled. Nobody sees ops then, and the levels between keeping all and nothing are the
            compiler's.

    Raises:
        ConfigError: there is no such place or rule.
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


def _compiled(options: dict[str, Any]) -> Option:
    return Option(f"{KEEP.name}{share_of(options)}", {**KEEP.fields, "compile": options}, Keep())


def joins(blocks: Iterable[nn.Module], only: Iterable[Any] | None = None) -> bool:
    """Returns whether blocks may run again as one: ``only`` lists no rules or that one too, and the blocks can."""
    is_asked = only is None or any(isinstance(_rule(value), Joined) for value in only)
    return is_asked and all(Joined().check(block) is None for block in blocks)


def _rule(value: Any) -> Rule:
    rule = parse_rule(value)
    if rule is None or isinstance(rule, Keep):
        raise ConfigError(f"rules: {value!r} is no rule · fix: leave it out; keep is always considered")
    return rule


def _option(value: Any) -> Option:
    rule = _rule(value)
    return Option(rule.describe(), {_FLAG: value}, rule)
