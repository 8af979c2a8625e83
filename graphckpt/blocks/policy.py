"""From the configs of a tree of modules to the wrapper that each module needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import nn

from graphckpt.blocks.forward import BlockForward
from graphckpt.errors import ConfigError
from graphckpt.rules import Full, Keep, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphckpt.blocks.config import BlockConfig

_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # containers without a forward


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The wrappers of a tree of modules, in its order, and why flags on other modules do nothing."""

    wrappers: list[BlockForward]
    idle: dict[str, str]


def make_plan(roots: Iterable[tuple[str, nn.Module]], configs: Mapping[nn.Module, BlockConfig]) -> Plan:
    """Walks the trees below ``roots`` and decides, for each module with a config, what its flag means where it stands.

    Raises:
        ConfigError: Rules that cannot act on their modules; all of them at once.
    """
    plan = Plan([], {})
    faults: list[str] = []
    seen: dict[nn.Module, None] = {}
    for name, root in roots:
        _walk(name, root, None, configs, plan, faults, seen)
    if faults:
        raise ConfigError("\n".join(f"- {fault}" for fault in faults) if len(faults) > 1 else faults[0])
    return plan


def _walk(
    name: str,
    module: nn.Module,
    around: Rule | None,
    configs: Mapping[nn.Module, BlockConfig],
    plan: Plan,
    faults: list[str],
    seen: dict[nn.Module, None],
) -> None:
    if module in seen:
        return
    seen[module] = None
    config = configs.get(module)
    rule = config.rule if config is not None else None
    if rule is not None:
        around = _decide(name, module, rule, around, plan, faults)
    for key, child in module.named_children():
        _walk(f"{name}.{key}" if name else key, child, around, configs, plan, faults, seen)


def _decide(
    name: str, module: nn.Module, rule: Rule, around: Rule | None, plan: Plan, faults: list[str]
) -> Rule | None:
    if isinstance(rule, Keep):
        if around is not None:
            plan.wrappers.append(BlockForward(module, name, rule))
        return None
    if isinstance(module, _UNCALLED):
        plan.idle[name] = f"a flag on {type(module).__name__} does nothing: it has no forward; set it on its items"
        return around
    fault = rule.check(module)
    if fault is not None:
        faults.append(f"{name}: {fault}")
        return around
    if isinstance(rule, Full) and around is not None:
        # Nested True is one segment. The wrapper still acts where the module is called from elsewhere.
        plan.idle[name] = "runs again as a part of the block around it"
    plan.wrappers.append(BlockForward(module, name, rule))
    return rule
