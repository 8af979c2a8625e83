"""Resolves the configs of a tree of modules to the wrapper that each module needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn

from graphckpt.blocks.config import RECOMPUTATION, BlockConfig
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.select import has_forward
from graphckpt.errors import ConfigError, warn_once, without_repeats
from graphckpt.rules.base import Rule
from graphckpt.rules.basic import Full, Keep
from graphckpt.rules.selective import Selective
from graphckpt.stores.base import parse_offload
from graphckpt.stores.placement import Placement, placement_of

# Note [What a block takes over from those around it]
#
# {"": {"offload": "disk"}, "layers.*": True, "layers.*.norm": False, "layers.*.mlp": True,
#  "layers.*.attn": {"compile": True}}
#
#     module         wrapper               it
#     (the model)    Keep, on disk         moves what is saved outside of the layers, such as by an embedding
#     layers.0       Full, on disk         is recomputed, and its inputs go to the disk of the model: one store for all
#     layers.0.attn  Keep, only compiles   belongs to layers.0: compiled code that is recomputed with it
#     layers.0.norm  Keep, on disk         is excluded: its outputs and what it saves are kept, and moved
#     layers.0.mlp   Full, on disk         is noted as idle: in a recomputed block it acts as a part of it. It has a
#                                          wrapper, as other code may call it outside of layers.0
#
# Each field of a store is inherited alone, and so is how a block is recomputed; a rule is not. What could have no
# effect is found on the way down, since only there it is known what is around a module.


@final
@dataclass(frozen=True, slots=True)
class ResolvedPolicies:
    """The wrappers of a tree of modules, in order, and why flags on other modules have no effect."""

    wrappers: list[BlockForward]
    idle: dict[str, str]
    selected: list[str]
    """The names of all modules with a field, also of those that keep everything and need no wrapper."""


def resolve_policies(
    roots: Iterable[tuple[str, nn.Module]], configs: Mapping[nn.Module, BlockConfig], determinism_check: str
) -> ResolvedPolicies:
    """Resolves the policies of all modules below ``roots``; ``determinism_check`` is that of blocks that name none."""
    walk = _Resolver(configs)
    for name, root in roots:
        walk.visit(name, root, _Inherited(determinism_check))
    for name, why in walk.plan.idle.items():
        if "has no effect" in why:
            warn_once(name, why)
    if walk.faults:
        lines = without_repeats(walk.faults)
        raise ConfigError("\n".join(f"- {line}" for line in lines) if len(lines) > 1 else lines[0])
    return walk.plan


@dataclass(frozen=True, slots=True)
class _Inherited:
    """Settings that a module inherits from the blocks around it."""

    determinism_check: str
    early_stop: bool = True
    rule: Rule | None = None
    """The rule of the recomputed block that contains the module."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields on placement that are inherited."""
    is_scripted: bool = False
    """Whether the module around it is scripted, which calls it in C++."""
    covering: Placement | None = None
    """The store of a block around it that is not recomputed: what the module saves goes there already."""


class _Resolver:
    def __init__(self, configs: Mapping[nn.Module, BlockConfig]) -> None:
        self.plan = ResolvedPolicies([], {}, [])
        self.faults: list[str] = []
        self._configs = configs
        self._visited: dict[nn.Module, None] = {}
        self._placements: list[Placement] = []

    def visit(self, name: str, module: nn.Module, outer: _Inherited) -> None:
        # A module with two paths, as tied layers have, has one forward: the policy of its first path holds for both.
        if module in self._visited:
            return
        self._visited[module] = None
        config = self._configs.get(module)
        if config is not None and config.fields() and has_forward(module):
            self.plan.selected.append(name)
        if outer.is_scripted and config is not None and config.fields():
            what = "expected a module that Python calls, got a child of a scripted or traced module"
            self.faults.append(f"{name}: {what} · fix: set the policy on the module that was scripted")
        if config is not None and (fields := config.placement()):
            offload = parse_offload(fields.get("offload"))
            if offload is not None and (fault := offload.check()) is not None:
                self.faults.append(f"{name or '(model)'}: {fault}")
            outer = replace(outer, fields={**outer.fields, **fields})
        own = {k: v for k, v in config.fields().items() if k in RECOMPUTATION} if config is not None else {}
        if own:
            outer = replace(outer, **own)
        first = len(self.plan.wrappers)  # from here on, they are those of the module and of all below it
        inside = self._decide(name, module, config, outer)
        if isinstance(module, torch.jit.ScriptModule):
            inside = replace(inside, is_scripted=True)
        for key, child in module.named_children():
            self.visit(f"{name}.{key}" if name else key, child, inside)
        if config is not None and "min_elements" in config.placement() and name not in self.plan.idle:
            stores = [w.placement for w in self.plan.wrappers[first:]] + [outer.covering]
            if all(store is None or store.is_plain for store in stores):
                self.plan.idle[name] = "min_elements has no effect here: saved tensors stay on their device in any case"
        is_recomputed = any(not isinstance(wrapper.rule, Keep) for wrapper in self.plan.wrappers[first:])
        if own and not is_recomputed and name not in self.plan.idle:
            what = "it is not recomputed as a separate block"
            self.plan.idle[name] = f"{' and '.join(own)} has no effect here: {what}"

    def _decide(self, name: str, module: nn.Module, config: BlockConfig | None, outer: _Inherited) -> _Inherited:
        rule = config.rule if config is not None else None
        options = config.compile_options if config is not None else None
        placement: Placement | None = None
        if outer.fields:  # the same object for the same fields: blocks that share it share its store
            placement = placement_of(outer.fields)
            if placement not in self._placements:
                self._placements.append(placement)
            placement = self._placements[self._placements.index(placement)]
        if rule is None or isinstance(rule, Keep):
            return self._decide_kept(name, module, config, placement, outer)
        if not has_forward(module):
            what = type(module).__name__
            self.plan.idle[name] = f"{what} has no forward, so this policy has no effect; set it on its items"
            return outer
        fault = rule.check(module)
        if fault is not None:
            self.faults.append(f"{name or '(model)'}: {fault}")
            return outer
        if isinstance(rule, Full) and outer.rule is not None:
            # Nested True is one segment. The wrapper still acts where the module is called from elsewhere.
            self.plan.idle[name] = "is recomputed with the block around it"
        if options is not None and isinstance(rule, Selective):
            self.plan.idle[name] = "selective has no effect beyond full here: it cannot see the ops of compiled code"
        wrapper = BlockForward(
            module,
            name,
            rule,
            placement,
            compile_options=options,
            determinism_check=outer.determinism_check,
            early_stop=outer.early_stop,
        )
        self.plan.wrappers.append(wrapper)
        return replace(outer, rule=rule)

    def _decide_kept(
        self, name: str, module: nn.Module, config: BlockConfig | None, placement: Placement | None, outer: _Inherited
    ) -> _Inherited:
        # A module without a rule that recomputes needs a wrapper if it is excluded from the block around it, if it has
        # another store than that block, or if it is compiled.
        is_excluded = config is not None and config.rule is not None and outer.rule is not None
        options = config.compile_options if config is not None else None
        if outer.rule is not None and not is_excluded:
            if options is not None and has_forward(module):
                self.plan.wrappers.append(
                    BlockForward(module, name, Keep(), compile_options=options, only_compiles=True)
                )
            if config is not None and config.placement():
                fields = " and ".join(config.placement())
                self.plan.idle[name] = (
                    f"{fields} has no effect here: it is recomputed with the block around it, and keeps nothing"
                )
            return outer
        if not has_forward(module):
            if options is not None:
                what = type(module).__name__
                self.plan.idle[name] = f"{what} has no forward, so compile has no effect; set it on its items"
            return replace(outer, rule=None)
        is_placed = placement is not None and placement != (outer.covering or Placement())
        if is_excluded or is_placed or options is not None:
            store = placement if is_excluded or is_placed else None
            self.plan.wrappers.append(
                BlockForward(module, name, Keep(), store, compile_options=options, is_excluded=is_excluded)
            )
        return replace(outer, rule=None, covering=placement)
