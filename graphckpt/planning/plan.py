"""A plan: the policy of each block, what the step will take with it, and how to put it on a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from graphckpt.blocks.apply import apply
from graphckpt.errors import ConfigError
from graphckpt.extras import LazyPackage
from graphckpt.planning.report import print_plan, summary

if TYPE_CHECKING:
    import yaml
    from torch import nn

    from graphckpt.blocks.apply import Handle
    from graphckpt.blocks.select import Selector
    from graphckpt.rules import Rule
else:
    yaml = LazyPackage("yaml", "plan")

KEEP_ALL: Mapping[str, Any] = {"activation_checkpointing": False}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What a plan does with one block."""

    block: str
    """Path of the block in the model."""
    option: str
    """The policy, as tables show it."""
    fields: Mapping[str, Any]
    """The policy, as :func:`graphckpt.apply` takes it."""
    extra_seconds: float = 0.0
    """Seconds of a step that the policy costs, against keeping everything."""
    moved_bytes: int = 0
    """Bytes that leave the device."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One interval of the step: the level of live bytes when it begins, and the highest in it."""

    name: str
    start_bytes: int
    peak_bytes: int


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Policies for the blocks of a model, chosen for a memory budget."""

    rows: tuple[PlanRow, ...]
    predicted_peak_bytes: int
    """The most bytes that are alive at once in a step: weights, gradients, optimizer state, inputs and all else."""
    predicted_step_seconds: float
    binding: str
    """The interval of the step that sets the peak, such as ``"backward of transformer.h.3"``."""
    floor_bytes: int
    """The least peak that these options can reach."""
    budget_bytes: int
    plain_peak_bytes: int
    """The peak when everything is kept."""
    plain_step_seconds: float
    correction_bytes: int = 0
    """By how much a real step was above the prediction, when that was checked; it is part of the prediction."""
    device: str = "cpu"
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def blocks(self) -> dict[str, Mapping[str, Any]]:
        """The policies by name, as :func:`graphckpt.apply` and ``train.activation_checkpoint.blocks`` take them.

        Blocks that keep everything are left out: that is what a block does by itself.
        """
        return {row.block: dict(row.fields) for row in self.rows if row.fields != KEEP_ALL}

    def apply(self, model: nn.Module | None = None) -> Handle:
        """Puts the policies on a model, until the handle's ``remove()`` or the end of the ``with`` block.

        Args:
            model: ``None`` is the model that was planned for; a plan that was loaded knows none.

        Raises:
            ConfigError: there is no model, or it has no blocks of these names.
        """
        model = model if model is not None else self.model
        if model is None:
            raise ConfigError("Plan.apply: a plan from a file knows no model · fix: plan.apply(model)")
        rules: dict[Selector, Mapping[str, Any] | Rule | bool | str] = dict(self.blocks.items())
        return apply(model, rules)

    def explain(self, *, show: bool = True) -> tuple[PlanRow, ...]:
        """Prints the policies and what they cost; returns the rows."""
        if show:
            print_plan(self)
        return self.rows

    def plot(self, path: str) -> None:
        """Draws the level of live bytes over the step, as predicted; ``path`` ends in ``.png`` or ``.svg``.

        Raises:
            ConfigError: the plan comes from a file, which does not say it.
        """
        from graphckpt.planning.picture import draw_plan  # noqa: PLC0415 - loads matplotlib

        if not self.stages:
            raise ConfigError("Plan.plot: a plan from a file has no levels to draw · fix: plan again")
        draw_plan(self, path)

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML: its section ``blocks`` is one of ``train.activation_checkpoint``.

        Raises:
            ConfigError: it cuts tensors over a process group, which no file can hold.
        """
        head = "".join(f"# {line}\n" for line in summary(self))
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        rows = [
            {"block": row.block, "option": row.option, "fields": dict(row.fields), "extra_seconds": row.extra_seconds}
            for row in self.rows
        ]
        try:
            text = yaml.dump(
                {"blocks": self.blocks, "plan": {**numbers, "rows": rows}}, Dumper=_dumper(), sort_keys=False
            )
        except yaml.representer.RepresenterError as error:
            raise ConfigError(f"Plan.save: {error} · fix: partition=True, and plain values in `rules`") from None
        Path(path).write_text(head + text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what :meth:`save` wrote.

        Raises:
            ConfigError: the file is missing or no plan.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: no plan can be read: {error} · fix: name a file that Plan.save wrote") from None
        try:
            numbers = content["plan"]
            rows = tuple(PlanRow(**row) for row in numbers["rows"])
            return cls(rows=rows, **{name: numbers[name] for name in _NUMBERS})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: is no plan: {error} is wrong · fix: name a file that Plan.save wrote") from None

    def below(self, name: str) -> Plan:
        """Returns the same plan with the blocks' paths as they are in the child ``name``."""
        rows = (replace(row, block=row.block.removeprefix(f"{name}.")) for row in self.rows)
        return replace(self, rows=tuple(rows), model=None)


def _dumper() -> type[yaml.SafeDumper]:
    """Returns a dumper that writes equal policies out, without anchors, for a reader."""
    return type("_Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})


_NUMBERS = (
    "predicted_peak_bytes", "predicted_step_seconds", "binding", "floor_bytes", "budget_bytes", "plain_peak_bytes",
    "plain_step_seconds", "correction_bytes", "device",
)  # fmt: skip
