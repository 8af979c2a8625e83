"""The plans of one Graph: made for inputs of a shape, set on its blocks, and changed with the shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final
from weakref import ref

import torch
from torch import nn

from graphckpt.blocks.layers import layers
from graphckpt.errors import ConfigError, GraphError
from graphckpt.graph.verify import unchanged
from graphckpt.planning.api import find_blocks, plan_step
from graphckpt.planning.compiled import without_share
from graphckpt.planning.measure.real_step import RealStep
from graphckpt.planning.plan_group import planning_group
from graphckpt.tree import flatten_call

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from graphckpt.blocks.proxy import BlockTree
    from graphckpt.graph.step import Step
    from graphckpt.planning import Plan
    from graphckpt.planning.plan_group import PlanGroup

_NOTHING = dict.fromkeys(
    ("activation_checkpointing", "segments", "tiles", "offload", "partition", "contiguous", "compile")
)


@final
class Planned:
    """Knows which plan is in force, and those of other shapes."""

    def __init__(self, step: Step, tree: BlockTree) -> None:
        self._held = ref(step)  # weak: a cycle would keep a deleted Graph alive
        self._tree = tree
        self._plans: dict[Hashable, Plan] = {}
        self._in_force: Hashable = None
        self._placed: list[str] = []

    @property
    def _step(self) -> Step:
        step = self._held()
        assert step is not None
        return step

    def plan(
        self,
        fields: dict[str, Any],
        build: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        wanted: Mapping[str, Any],
    ) -> Plan:
        """Plans for inputs like these, and sets the policies."""
        options = dict(wanted)
        with planning_group(options.pop("group", None)) as team:
            return self._planned(fields, build, args, kwargs, options, team)

    def _planned(
        self,
        fields: dict[str, Any],
        build: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        options: dict[str, Any],
        team: PlanGroup,
    ) -> Plan:
        step = self._step
        if not step.update.optimizers:
            raise GraphError(f"{step.name}.plan: an evaluation graph keeps nothing · fix: plan the training graph")
        step.prepare()
        model = _Roots(step.roots)
        selectors = options.pop("blocks", None)
        if selectors is None:
            selectors = [".".join(filter(None, (root, n))) for root, m in step.roots.items() for n in layers(m)]
        if not selectors:
            raise ConfigError(f"{step.name}.plan: no module has a list of layers · fix: blocks='model.layers.*'")
        blocks = find_blocks(model, selectors)
        if options.get("compile") is None:
            options["compile"] = self._compile_of(blocks)
        if step.recorded is not None:  # the plan's policies would drop them; until then their pool would count as taken
            step.recorded.release()
            torch.cuda.empty_cache()
        real = RealStep(model, lambda: step.call(fields, build, args, kwargs))
        with step.bare():
            plan = plan_step(real, model, blocks, unchanged(step), team, **options)
        self._set(model, plan)
        return plan

    def _compile_of(self, blocks: Sequence[tuple[str, nn.Module]]) -> Any:
        """Returns how the blocks are compiled already, which a plan takes over, but for what they save.

        Raises:
            ConfigError: not all of them alike.
        """
        how = {module: without_share(fields.get("compile")) for module, _, fields in self._tree.policies()}
        values = [how.get(module) for _, module in blocks]
        inside = [how.get(child) for _, module in blocks for child in list(module.modules())[1:]]
        if any(value != values[0] for value in values) or any(value is not None for value in inside):
            raise ConfigError(
                f"{self._step.name}.plan: not all of the planned blocks are compiled alike and as a whole · "
                "fix: set `compile` on all of them, or plan with compile=True or compile=False"
            )
        return values[0]

    def see_to_it(self, fields: dict[str, Any], build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Has the plan in force that ``config.memory_budget`` asks for with inputs like these.

        Several processes plan together, at the first call: later ones may bring new shapes to some of them alone.
        """
        config = self._step.config
        shapes = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None
            for leaf in flatten_call(args, kwargs)[0]
        )
        if planning_group(config.plan_options.get("group")).size > 1:
            shapes = ()
        key = shapes, str(config.memory_budget), tuple(sorted((k, str(v)) for k, v in config.plan_options.items()))
        if key == self._in_force:
            return
        if key in self._plans:
            self._set(_Roots(self._step.roots), self._plans[key])
        else:
            wanted = {"memory_budget": config.memory_budget, **config.plan_options}
            self._plans[key] = self.plan(fields, build, args, kwargs, wanted)
        self._in_force = key

    def _set(self, model: nn.Module, plan: Plan) -> None:
        self._in_force = None
        for name in self._placed:  # by the plan before, which may have said something about other blocks
            self._tree.config(model.get_submodule(name), name).update(dict(_NOTHING))
        self._placed = [row.block for row in plan.rows]
        for row in plan.rows:
            for name, module in model.get_submodule(row.block).named_modules(prefix=row.block):
                config = self._tree.config(module, name)
                if any(config.fields().get(field) is not None for field in _NOTHING):
                    config.update(dict(_NOTHING))
            if row.fields.get("activation_checkpointing") is not False or len(row.fields) > 1:
                fields = {**_NOTHING, **row.fields}
                self._tree.config(model.get_submodule(row.block), row.block).update(fields)


class _Roots(nn.Module):
    """The modules of a Graph as one, by their names."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in roots.items():
            self.add_module(name, module)
