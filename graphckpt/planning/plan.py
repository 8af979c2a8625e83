"""The policies of blocks for a memory budget, with predictions, to apply, show, save and load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, final

from graphckpt.blocks.apply import apply
from graphckpt.deprecation import warn_deprecated
from graphckpt.errors import ConfigError, bullets, shown, without_repeats
from graphckpt.extras import LazyPackage
from graphckpt.ledger.page import notebook_html
from graphckpt.ledger.plot import PAGE, file_of
from graphckpt.ledger.table import show as show_parts
from graphckpt.ledger.table import text_of
from graphckpt.planning.rows import PlanData, PlanRow, budget_text, parts_of, summary_lines
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    import yaml
    from torch import nn

    from graphckpt.blocks.select import Selector
    from graphckpt.rules.base import Rule
else:
    yaml = LazyPackage("yaml", "plan")


class AppliedPolicies(Protocol):
    """The result of :meth:`Plan.apply`."""

    def remove(self) -> None:
        """Removes the policies."""

    def __enter__(self) -> Any:
        """Keeps the policies until the end of the ``with`` block."""

    def __exit__(self, *error: object) -> None:
        """Removes the policies."""


KEEP_ALL: Mapping[str, Any] = {"activation_checkpointing": False}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanData):
    """Policies for the blocks of a model, chosen for a memory budget."""

    model: nn.Module | None = field(default=None, repr=False, compare=False)
    apply_to_graph: Callable[[Plan], AppliedPolicies] | None = field(default=None, repr=False, compare=False)
    """Sets the policies on the blocks of the Graph that was planned."""

    front: Callable[[], Sequence[Plan]] | None = field(default=None, repr=False, compare=False)
    """Computes the Pareto-optimal plans of the same step, lowest peak first."""

    @property
    def policies(self) -> dict[str, Mapping[str, Any]]:
        """The policy of each block, as :func:`graphckpt.apply` and ``train.activation_checkpoint.policies`` take them.

        Blocks that keep everything are left out, as this is the default.
        """
        return {row.block: dict(row.fields) for row in self.rows if row.fields != KEEP_ALL}

    @property
    def blocks(self) -> dict[str, Mapping[str, Any]]:
        """The deprecated name of :attr:`policies`."""
        warn_deprecated("Plan.blocks is deprecated · fix: Plan.policies")
        return self.policies

    @property
    def keeps_everything(self) -> bool:
        """Whether every block keeps its saved tensors on the device."""
        return all(
            row.fields.get("activation_checkpointing") is False
            and not row.fields.get("offload")
            and not row.fields.get("partition")
            for row in self.rows
        )

    def apply(self, model: nn.Module | None = None, *, replace: bool = False) -> AppliedPolicies:
        """Sets the policies on a model, until the handle's ``remove()`` or the end of the ``with`` block.

        Args:
            model: ``None`` is the model or the Graph that was planned. A plan from a file, or for a
                ``device``, needs a model.
            replace: Whether existing policies of the model are removed first, so that a cell of a notebook can run
                again. Those of a Graph are replaced in any case.

        Raises:
            ConfigError: No model is known, or it has no blocks of these names.
        """
        if model is None and self.apply_to_graph is not None:
            return self.apply_to_graph(self)
        model = model if model is not None else self.model
        if model is None:
            source = f"simulated on {self.device}" if self.is_simulated else "from a file"
            raise ConfigError(f"Plan.apply: expected a model, since the plan is {source} · fix: plan.apply(model)")
        rules: dict[Selector, Mapping[str, Any] | Rule | bool | str] = dict(self.policies.items())
        return apply(model, rules, replace=replace)

    def __str__(self) -> str:
        """Returns the policies and their cost as a table, in plain text."""
        return text_of(parts_of(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        place = f", simulated on {self.device}" if self.is_simulated else ""
        peak = f"peak {format_bytes(self.predicted_peak_bytes)} of a budget of {budget_text(self)}"
        return f"<Plan of {len(self.rows)} blocks: {peak}{place}>"

    def _repr_html_(self) -> str:
        return notebook_html(parts_of(self), self.plot)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle: all but :attr:`front`, which needs the measurements."""
        return {**self.__dict__, "front": None}

    def explain(self, *, show: bool = True) -> Self:
        """Prints the policies and their cost unless ``show`` is false; returns the plan, which prints the same."""
        if show:
            show_parts(parts_of(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of a saved file: the policies as a section of a config, the predictions and the rows."""
        numbers = {name: getattr(self, name) for name in _NUMBERS} | {"assumptions": [*self.assumptions]}
        rows = [
            {"block": row.block, "option": row.option, "fields": dict(row.fields), "extra_seconds": row.extra_seconds}
            for row in self.rows
        ]
        return {"policies": self.policies, "plan": {**numbers, "rows": rows}}

    def plot(self, path: str | Path) -> Path:
        """Draws the predicted live bytes over the step; ``path`` ends in ``.png`` or ``.svg``.

        With ``.html`` it writes an interactive page, whose slider shows the plans for all budgets.

        Raises:
            ConfigError: the plan is from a file, which does not contain them.
        """
        from graphckpt.planning.plot import draw_plan, write_plans  # noqa: PLC0415

        if not self.stages:
            raise ConfigError("Plan.plot: a plan from a file has no levels to draw · fix: plan again")
        target = file_of(path, has_page=True)
        if target.suffix.lower() == PAGE:
            front = self.front() if self.front is not None else ()
            return write_plans(self, front, target)
        return draw_plan(self, target)

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, with a section ``policies`` for ``train.activation_checkpoint``.

        Raises:
            ConfigError: it partitions tensors over a process group, which cannot be written to a file, or the file
                cannot be written.
        """
        save_stages([self], path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file of :meth:`save`, of this version or an earlier one, whose missing fields get their defaults.

        Raises:
            ConfigError: the file is missing or does not contain a plan, or has fields of a newer version.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read: {error} · fix: name a file that Plan.save wrote") from None
        numbers = content.get("plan") if isinstance(content, Mapping) else None
        rows = numbers.get("rows") if isinstance(numbers, Mapping) else None
        if not isinstance(numbers, Mapping) or not isinstance(rows, list):
            what = "expected a section 'plan' with its 'rows', found none"
            raise ConfigError(f"{path}: {what} · fix: name a file that Plan.save wrote")
        faults = list(_field_faults(numbers, PlanData, "plan", ignored=("rows",)))
        faults += [fault for n, row in enumerate(rows) for fault in _field_faults(row, PlanRow, f"plan.rows[{n}]")]
        if faults:
            several = bullets(f"{path}: expected a plan", without_repeats(faults))
            what = several if len(faults) > 1 else f"{path}: {faults[0]}"
            raise ConfigError(f"{what} · fix: name a file that Plan.save wrote in this version or an earlier one")
        values = {name: value for name, value in numbers.items() if name != "rows"}
        values["assumptions"] = tuple(map(str, values.get("assumptions", ())))
        return cls(rows=tuple(PlanRow(**row) for row in rows), **values)

    def relative_to(self, name: str) -> Plan:
        """Returns the plan with the paths of blocks relative to the child ``name``."""
        rows = (changed(row, block=row.block.removeprefix(f"{name}.")) for row in self.rows)
        front = self.front
        relative = None if front is None else lambda: [plan.relative_to(name) for plan in front()]
        return changed(self, rows=tuple(rows), model=None, apply_to_graph=None, front=relative)


def plan_line(plan: Plan) -> str:
    """Returns a plan in one line."""
    if plan.keeps_everything and plan.predicted_peak_bytes <= plan.budget_bytes:
        budget, peak = format_bytes(plan.budget_bytes), format_bytes(plan.predicted_peak_bytes)
        return f"{budget} holds everything (predicted peak {peak}): nothing is recomputed"
    policies = ", ".join(f"{count}x {option}" for option, count in Counter(row.option for row in plan.rows).items())
    slower = plan.predicted_step_seconds / plan.plain_step_seconds - 1 if plan.plain_step_seconds else 0.0
    peak = f"predicted peak {format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)}"
    return f"planned {policies}; {peak}, step {slower:+.1%} over keeping everything".replace("%", " %")


def stage_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Yields the lines about each plan, after the number of its stage if there are several."""
    for stage, plan in enumerate(plans):
        yield from (f"stage {stage}: {line}" if len(plans) > 1 else line for line in summary_lines(plan))


def save_stages(plans: Sequence[Plan], path: str | Path) -> None:
    """Writes the plans of the stages of a pipeline as one, which :meth:`Plan.load` reads.

    It has the blocks of all stages, and the predictions of the stage with the highest peak.

    Raises:
        ConfigError: as :meth:`Plan.save`.
    """
    highest = max(plans, key=lambda plan: plan.predicted_peak_bytes)
    content = changed(highest, rows=tuple(row for plan in plans for row in plan.rows)).to_dict()
    head = "".join(f"# {line}\n" for line in stage_lines(plans))
    dumper = type("_PlainDumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    try:
        text = yaml.dump(content, Dumper=dumper, sort_keys=False)
    except yaml.representer.RepresenterError as error:
        raise ConfigError(f"Plan.save: {error} · fix: partition=True, and plain values in `candidates`") from None
    try:
        Path(path).write_text(head + text, encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{path}: cannot be written: {why} · fix: name a file in an existing folder") from None


def _field_faults(values: Any, kind: type, where: str, ignored: Sequence[str] = ()) -> Iterator[str]:
    if not isinstance(values, Mapping):
        yield f"{where}: expected a mapping, got {shown(values)}"
        return
    by_name = {each.name: each for each in fields(kind) if each.name not in _NOT_SAVED}
    for name, each in by_name.items():
        expected = _KINDS.get(str(each.type))
        if name not in values:
            if each.default is MISSING:
                yield f"{where}.{name}: expected a value, got nothing"
        elif expected is not None and not isinstance(values[name], expected):
            yield f"{where}.{name}: expected {each.type}, got {shown(values[name])}"
    for name in values:
        if name not in by_name and name not in ignored:
            yield f"{where}.{name}: unknown field"


_NOT_SAVED = ("rows", "stages", "notes", "peak_parts")  # rows are saved apart
_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool, "Mapping[str, Any]": Mapping}
_KINDS["tuple[str, ...]"] = list  # in a file
_NUMBERS = tuple(each.name for each in fields(PlanData) if each.name not in _NOT_SAVED)
