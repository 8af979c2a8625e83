"""The policies that the planner considers for each block, with placeholders for levels of ``selective``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch.distributed as dist
from torch import nn

from graphckpt.blocks.compiled import SHARE, CompiledForward, share_of, takes_share
from graphckpt.blocks.config import BlockConfig
from graphckpt.engine.objects import replaced
from graphckpt.errors import ConfigError
from graphckpt.rules.base import Rule, parse_rule
from graphckpt.rules.basic import Full, Joined, Keep
from graphckpt.rules.selective import Selective
from graphckpt.stores.base import Offload, parse_offload
from graphckpt.stores.partition import parse_partition
from graphckpt.undo import Undo, enter, scope

SHARES = (0.8, 0.5, 0.3, 0.1)
"""Shares of the bytes that the compiler saves by default; plans mix them for values in between."""


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


@scope
def compiled_forwards(undo: Undo, modules: Iterable[nn.Module], options: dict[str, Any] | None) -> Iterator[None]:
    """Compiles the forward of each module within the ``with`` block, inside of policies that are set there."""
    for module in modules if options is not None else ():
        enter(undo, replaced([module], "forward", CompiledForward(module.forward, options or {})))
    yield


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
    is_partitioned: bool = False
    """Whether saved tensors are partitioned over ranks."""
    level: int | None = None
    """The number of a level of ``selective`` that :mod:`graphckpt.planning.op_levels` finds; 0 keeps most."""


_FLAG = "activation_checkpointing"

KEEP = Option("keep", {_FLAG: False}, Keep())
FULL = Option("full", {_FLAG: True}, Full())

JOINED = Option("joined", {_FLAG: "joined"}, Joined())
"""The option of the blocks of a run after the first."""


NEAR: tuple[Option, ...] = (
    KEEP,
    FULL,
    *(Option(f"selective(level {n + 1})", {}, Selective(label=f"level {n + 1}"), level=n) for n in range(MOST)),
)
"""The options without offloading: ``keep``, ``full``, and the levels of ``selective``."""


def options(
    offload: bool | str | Offload = False,
    only: Iterable[Any] | None = None,
    *,
    code: LayerCompilation = LayerCompilation(),
    partition: Any = None,
) -> tuple[Option, ...]:
    """Returns the options, ``keep`` first.

    Args:
        offload: Where saved tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``.
        only: Rules to consider besides ``keep``, as ``activation_checkpointing`` takes them; ``None`` is all.
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
        result += [replace(o, name=f"{o.name} + part", fields=o.fields | ranks, is_partitioned=True) for o in on_device]
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


def can_join(blocks: Iterable[nn.Module], only: Iterable[Any] | None = None) -> bool:
    """Whether runs of the blocks may be joined: if ``only`` is not given, or has the rule.

    Raises:
        ConfigError: ``only`` has it, and a block cannot be joined.
    """
    if only is not None and not any(isinstance(_rule(value), Joined) for value in only):
        return False
    fault = next(filter(None, map(Joined().check, blocks)), None)
    if fault is not None and only is not None:
        raise ConfigError(f"candidates: {fault}, or leave 'joined' out of candidates")
    return fault is None


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
