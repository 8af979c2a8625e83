"""The base of all callbacks: applies policies to a model, reports once what they save, and removes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakMethod

import torch
from torch import nn

from graphckpt.blocks.apply import Handle, apply, close_plans
from graphckpt.blocks.config import FIELDS, OTHER_NAMES, BlockConfig, fields_of
from graphckpt.blocks.select import Selector, layers, select
from graphckpt.engine.objects import replaced
from graphckpt.errors import ConfigError, GraphError, did_you_mean, shown
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.plot import file_of
from graphckpt.ledger.table import offloaded_bytes
from graphckpt.planning.options import Budget, PlanOptions, check_budget
from graphckpt.planning.plan import Plan
from graphckpt.planning.rows import summary_lines
from graphckpt.rules.base import Rule
from graphckpt.rules.basic import Keep
from graphckpt.thread_state import HostRNGState
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.planning.live_plan import LivePlan

Value = Mapping[str, Any] | Rule | bool | str | None

_ARGUMENTS = ("rule", "unit", "blocks", "memory_budget", "report", "plot")
_OWN_FLAG = "gradient_checkpointing"


class PolicyCallback:
    """The base of all callbacks: checks its arguments at once, and holds the applied policies.

    Subclasses document the arguments, and decide when to act.
    """

    def __init__(
        self,
        rule: Value = True,
        *,
        unit: Selector | Sequence[Selector] | None = None,
        blocks: Mapping[Selector, Value] | None = None,
        memory_budget: Budget | None = None,
        report: bool | Literal["table"] = True,
        plot: str | None = None,
        **fields: Any,
    ) -> None:
        self._owner = type(self).__name__
        if type(report) is not bool and report not in ("table",):
            what = f"{self._owner}.report: expected True, False or 'table', got {report!r}"
            raise ConfigError(f"{what} · fix: report='table'")
        if plot is not None:
            file_of(plot, has_page=True)  # raises now, not in the middle of training
        self._unit = unit
        given: Any = blocks
        if given is not None and not isinstance(given, Mapping):
            what = f"expected a mapping of selectors to policies, got {shown(given)}"
            raise ConfigError(f"{self._owner}.blocks: {what} · fix: blocks={{'layers.0': False}}")
        self._blocks = dict(blocks or {})
        self._budget = memory_budget
        self._options = fields
        self._fields = {"activation_checkpointing": rule, **fields}
        if memory_budget is None:
            self._check_fields()
        else:
            self._check_plan(rule, memory_budget)
        self._given = {"rule": rule, "unit": unit, "blocks": blocks, "memory_budget": memory_budget, **fields}
        self._plans = memory_budget is not None
        self._report = report
        self._plot = plot
        self._measuring = ExitStack()
        self._is_reported = self._is_first = self._has_planned_step = False
        self._disabled = ExitStack()
        self._live: LivePlan | None = None
        self._report_line: Callable[[str], None] = print
        self.handle: Handle | None = None
        """The handle of the policies of the last training, which are removed at its end; ``None`` before it."""
        self.plan: Plan | None = None
        """The plan of the last training, with ``memory_budget``."""
        self.explanation: Explanation | None = None
        """What a step of the last training saved; ``None`` before it.

        It is measured on the second step, when the optimizer's states exist, or on the first one if training ends
        before.
        """

    def _check_plan(self, rule: Value, memory_budget: Budget) -> None:
        if rule is not True or self._blocks:
            what = "blocks" if self._blocks else "rule"
            raise ConfigError(f"{self._owner}.memory_budget: the plan chooses the policies · fix: leave {what} out")
        check_budget(memory_budget)
        if PlanOptions.of(self._options, self._owner).head:
            fix = "graphckpt.plan with a step of your own, and GraphckptCallback(None, blocks=plan.blocks)"
            raise ConfigError(f"{self._owner}.head: not supported with a memory_budget · fix: {fix}")

    def _check_fields(self) -> None:
        known = [*_ARGUMENTS, *(name for name in FIELDS if name not in {"activation_checkpointing", "stage_id"})]
        for name in self._options:
            if name not in known and name not in OTHER_NAMES:
                hint = did_you_mean(name, known)
                raise ConfigError(f"{self._owner}: unexpected argument {name!r}{hint} · fix: use {', '.join(known)}")
        try:
            BlockConfig(self._owner).update(self._fields)
        except ConfigError as error:
            rule: Any = self._fields["activation_checkpointing"]
            text = str(error).replace(".activation_checkpointing:", ".rule:", 1)
            with suppress(ConfigError):
                what = f"expected a rule, got the memory budget {check_budget(rule)!r}"
                text = f"{self._owner}.rule: {what} · fix: {self._owner}(memory_budget={rule!r})"
            raise ConfigError(text) from None
        for selector, value in self._blocks.items():
            BlockConfig(f"{self._owner}.blocks[{selector!r}]").update(fields_of(value))

    def __repr__(self) -> str:
        given = (f"{name}={shown(value)}" for name, value in self._given.items() if value is not None)
        return f"{type(self).__name__}({', '.join(given)})"

    def _apply(self, model: nn.Module) -> None:
        self._start()
        units: dict[Selector, Any] = {}
        if any(value is not None for value in self._fields.values()):
            units = dict.fromkeys(self._units(model), self._fields)
        rules: dict[Selector, Any] = {}
        for selector, value in self._blocks.items():
            fields = fields_of(value)
            rules[selector] = {**units.pop(selector, {}), **fields}
            if fields.keys() >= self._fields.keys():
                with suppress(ConfigError):  # apply() raises it, with those of other selectors
                    for name, _ in select(model, selector):
                        units.pop(name, None)  # apply() refuses policies that later ones replace in full
        self.handle = apply(model, {**units, **rules})
        self._disable_own_checkpointing()

    def _start_plan(self, model: nn.Module, report: Callable[[str], None]) -> None:
        """Begins to plan on the steps of the training; ``report`` is called with each line of news."""
        from graphckpt.planning.live_plan import LivePlan  # noqa: PLC0415 - of use with a budget alone

        self._start()
        assert self._budget is not None
        options = PlanOptions.of({"blocks": self._units(model), **self._options}, self._owner)
        has_own = [module for module in model.modules() if module.__dict__.get(_OWN_FLAG)]
        self._disabled.enter_context(replaced(has_own, _OWN_FLAG, value=False))
        if has_own:
            report("graphckpt: the plan replaces the model's own gradient checkpointing")
        self._report_line = report
        close_plans[model] = WeakMethod(self._remove)
        try:
            # Through the callback, which the plan so keeps alive, for `close_plans`.
            self._live = LivePlan(model, self._budget, options, lambda line: self._report_line(f"graphckpt: {line}"))
        except BaseException:
            self._remove()
            raise

    def _begin_step(self, num_updates: int, *, measures: bool) -> None:
        """Measures the step if ``measures``, or if it is the first one under a plan."""
        if self._live is not None:
            self._has_planned_step |= self.plan is not None
            self._live.begin_step()
            measures = measures or self._live.checks
            num_updates += 1  # a plan begins after the first
        if measures:
            self._measure(num_updates)

    def _end_step(self, *, is_update: bool = True) -> Explanation | None:
        """Returns what the measured step saved, once."""
        live = self._live
        try:
            if live is not None:
                is_planned = live.end_step(is_update=is_update)
                if is_planned or live.handle is not self.handle:
                    self._measuring.close()  # of a step that did not run under one plan
                    self._take_over(live, is_planned=is_planned)
                    return None
            explanation = self._explain_once()
            if live is not None and explanation is not None and live.correct(explanation.peak_bytes or 0):
                self._take_over(live, is_planned=True)
        except BaseException:
            self._remove()
            raise
        return explanation

    def _take_over(self, live: LivePlan, *, is_planned: bool) -> None:
        self.plan, self.handle = live.plan, live.handle
        if is_planned and self.plan is not None:
            self._report_line("\n".join(f"graphckpt: plan: {line}" for line in summary_lines(self.plan)))

    def _units(self, model: nn.Module) -> list[Selector]:
        if self._unit is not None:
            return [self._unit] if isinstance(self._unit, (str, type, re.Pattern, nn.Module)) else list(self._unit)
        found = layers(model)
        if not found and not self._blocks:
            fix = f"name its class or its blocks: {self._owner}(unit='Block'), or {self._owner}(unit='layers.*')"
            raise ConfigError(f"{self._owner}: {type(model).__name__} has no stack of layers · fix: {fix}")
        return list(found)

    def _disable_own_checkpointing(self) -> None:
        """Disables, until the policies are removed, checkpointing that a recomputed block does in ``__call__``.

        Transformers 5.17 does it there, around the forward that a policy replaces, so that the policy has no effect.
        """
        for wrapper in self.handle._wrappers if self.handle is not None else ():
            block = wrapper.module
            if block is None or isinstance(wrapper.rule, Keep) or type(block).__call__ is nn.Module.__call__:
                continue
            if block.__dict__.get(_OWN_FLAG):
                self._disabled.enter_context(replaced([block], _OWN_FLAG, value=False))

    def _start(self) -> None:
        self._remove()  # left by a training that ended in an error
        self.explanation = self.plan = self.handle = None
        self._is_reported = self._is_first = self._has_planned_step = False

    def _measure(self, num_updates: int) -> None:
        """Measures the next step op by op, until one after the first update, which creates the optimizer's states."""
        self._is_first = num_updates == 0
        if self.handle is not None and not self._is_reported and not (self._is_first and self.explanation):
            self._measuring.close()
            self._measuring.enter_context(self.handle.measure())

    def _explain_once(self, *, is_last: bool = False) -> Explanation | None:
        """Returns what the measured step saved, once; ``None`` before and afterwards, or if the model has not run."""
        self._measuring.close()
        if self.handle is None or self._is_reported:
            return None
        try:
            if not (is_last and self.explanation):
                self.explanation = self.handle.explain(show=False)
            if self._is_first and not is_last:
                return None
            if self._plot is not None:
                self.explanation.plot(self._plot)
        except GraphError:
            return None
        except BaseException:
            self._remove()  # training ends here, and not every trainer tells its callbacks
            raise
        self._is_reported = True
        return self.explanation

    def _missing(self) -> str:
        """Returns what a training that ended early has missed of its plan, in a sentence; empty if nothing."""
        if not self._plans or self._has_planned_step:
            return ""
        what = "there was a plan" if self.plan is None else "a step ran under the plan"
        return f"graphckpt: training ended before {what}; all blocks were recomputed"

    def _text(self, seen: Explanation) -> str:
        return str(seen) if self._report == "table" else saved_line(seen)

    def _remove(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None
        self._measuring.close()
        self._disabled.close()
        if self.handle is not None:
            self.handle.remove()


@contextmanager
def restored_rng() -> Iterator[None]:
    host = HostRNGState.read()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            host.restore()


def saved_line(seen: Explanation) -> str:
    change = f"{format_bytes(seen.bytes_before)} -> {format_bytes(seen.bytes_after)}"
    offloaded = offloaded_bytes(seen)
    blocks = sum(1 for row in seen.rows if (row.reruns and not row.is_own) or row.place != "device")
    count = f"{blocks} block{'s' if blocks != 1 else ''}"
    effect = f"policies act on {count}" if blocks else "everything fits; no block is recomputed"
    return f"graphckpt: {effect}; kept for backward: {change}{f'; offloaded: {offloaded}' if offloaded else ''}"


def saved_metrics(seen: Explanation) -> dict[str, float]:
    metrics = {
        "graphckpt/kept_bytes_plain": float(seen.bytes_before),
        "graphckpt/kept_bytes": float(seen.bytes_after),
        "graphckpt/host_bytes": float(seen.bytes_host),
        "graphckpt/disk_bytes": float(seen.bytes_disk),
    }
    return metrics if seen.peak_bytes is None else {**metrics, "graphckpt/peak_bytes": float(seen.peak_bytes)}
