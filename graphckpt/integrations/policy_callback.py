"""The base of all callbacks: applies policies to a model, reports once what they save, and removes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack
from weakref import WeakMethod

import torch
from torch import nn

from graphckpt.blocks.apply import Handle, apply, close_plans
from graphckpt.blocks.config import FIELDS, OTHER_NAMES, BlockConfig, fields_of
from graphckpt.blocks.select import Selector, describe, layers, select
from graphckpt.budget import Budget, check_budget
from graphckpt.deprecation import rename
from graphckpt.engine.objects import replaced
from graphckpt.errors import ConfigError, GraphError, did_you_mean, shown
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.plot import file_of
from graphckpt.ledger.record import Row
from graphckpt.ledger.table import offloaded_bytes
from graphckpt.planning.options import PlanOptions, SharedOptionsDict
from graphckpt.planning.plan import Plan, plan_line
from graphckpt.rules.base import Rule
from graphckpt.rules.basic import Keep
from graphckpt.thread_state import HostRNGState
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.planning.live_plan import LivePlan

Value = Mapping[str, Any] | Rule | bool | str | None

_ARGUMENTS = ("rule", "select", "policies", "memory_budget", "report", "plot")
_OLD_NAMES = {"unit": "select", "blocks": "policies"}
_OWN_FLAG = "gradient_checkpointing"


class CallbackOptionsDict(SharedOptionsDict, total=False):
    """The ``**fields`` of a callback: those of :class:`graphckpt.BlockConfig`, or options of the planner."""

    min_elements: int | None
    segments: int | str | None
    tiles: int | None
    progress: Callable[[int, int], None] | bool | None


# Note [The step that is reported]
#
#                               explained                      reported
#   a line, in Transformers     the first step                 at its end, from what blocks record in any case
#   a table or a picture, and   the first step, measured       if training ends before the second
#   all in Lightning            the second step, measured      at its end: the optimizer's states exist, and its peak
#                                                              is that of all later steps
#   with a memory budget        the first that begins under    at its end
#                               a plan that stays, measured
#
# `_is_first` tells the first of two measured steps, and `_is_reported` ends all. Where an update has several steps, one
# of the first update is measured. If `end_step` brings another plan, the step ran under two, and is not explained.


class PolicyCallback:
    """The base of all callbacks: checks its arguments at once, holds the applied policies, and reports on a step.

    Subclasses document the arguments, and decide when to act.
    """

    def __init__(
        self,
        rule: Value = True,
        *,
        select: Selector | Sequence[Selector] | None = None,
        policies: Mapping[Selector, Value] | None = None,
        memory_budget: Budget | None = None,
        report: bool | Literal["table"] = True,
        plot: str | None = None,
        **fields: Unpack[CallbackOptionsDict],
    ) -> None:
        self._owner = type(self).__name__
        options: dict[str, Any] = {**fields, "select": select, "policies": policies}
        rename(options, _OLD_NAMES, self._owner)
        select, policies = options.pop("select"), options.pop("policies")
        if type(report) is not bool and report not in ("table",):
            what = f"{self._owner}.report: expected True, False or 'table', got {report!r}"
            raise ConfigError(f"{what} · fix: report='table'")
        if plot is not None:
            file_of(plot, has_page=True)  # raises now, not in the middle of training
        if policies is not None and not isinstance(policies, Mapping):
            what = f"expected a mapping of selectors to policies, got {shown(policies)}"
            raise ConfigError(f"{self._owner}.policies: {what} · fix: policies={{'layers.0': False}}")
        self._select = select
        self._policies = dict(policies or {})
        self._budget = memory_budget
        self._options = options
        self._fields = {"activation_checkpointing": rule, **options}
        if memory_budget is None:
            self._check_fields(rule)
        else:
            self._check_plan(rule, memory_budget)
        own_rule = rule if memory_budget is None else None
        self._arguments = {"rule": own_rule, "select": select, "policies": policies}
        self._arguments |= {"memory_budget": memory_budget, **options}
        self._report = report
        self._plot = plot
        self._measuring = ExitStack()
        self._disabled = ExitStack()
        self._is_reported = self._is_first = self._has_planned_step = self._is_planned_for = False
        self._live: LivePlan | None = None
        self._write: Callable[[str], None] = print
        self.handle: Handle | None = None
        """The handle of the policies of the last training, which are removed at its end; ``None`` before it."""
        self.plan: Plan | None = None
        """The plan of the last training, with ``memory_budget``."""
        self.explanation: Explanation | None = None
        """The bytes that a step of the last training saved, block by block; ``None`` before it.

        It is measured on the second step, when the optimizer's states exist, or on the first one if training ends
        before.
        """

    def _check_plan(self, rule: Value, memory_budget: Budget) -> None:
        if rule is not True or self._policies:
            what = "policies" if self._policies else "rule"
            raise ConfigError(
                f"{self._owner}: {what} and memory_budget cannot be combined, as the plan chooses the policies · "
                f"fix: omit {what}"
            )
        check_budget(memory_budget)
        PlanOptions.of(self._options, self._owner)

    def _check_fields(self, rule: Any) -> None:
        names = [*_ARGUMENTS, *(name for name in FIELDS if name not in {"activation_checkpointing", "stage_id"})]
        for name in self._options:
            if name not in names and name not in OTHER_NAMES:
                hint = did_you_mean(name, names)
                raise ConfigError(f"{self._owner}: unexpected argument {name!r}{hint} · fix: use {', '.join(names)}")
        try:
            BlockConfig(self._owner).update(self._fields)
        except ConfigError as error:
            text = str(error).replace(".activation_checkpointing:", ".rule:", 1)
            if text.startswith(f"{self._owner}.rule: expected a rule") and (argument := _argument_of(rule)):
                text = f"{self._owner}.rule: expected a rule, got {shown(rule)} · fix: {argument}={shown(rule)}"
            raise ConfigError(text) from None
        for selector, value in self._policies.items():
            BlockConfig(f"{self._owner}.policies[{selector!r}]").update(fields_of(value))

    def __repr__(self) -> str:
        arguments = (f"{name}={shown(value)}" for name, value in self._arguments.items() if value is not None)
        return f"{self._owner}({', '.join(arguments)})"

    def _begin(self, model: nn.Module, write: Callable[[str], None], *, is_writer: bool = True) -> None:
        """Applies the policies, or begins to plan on the steps of the training.

        Args:
            model: The model that is trained.
            write: Prints a text next to the trainer's progress bar.
            is_writer: Whether this process prints; all others are silent.
        """
        self._remove()  # left by a training that ended in an error
        self.explanation = self.plan = self.handle = None
        self._is_reported = self._is_first = self._has_planned_step = self._is_planned_for = False
        self._write = write if is_writer and self._report else lambda text: None
        if self._budget is None:
            self._apply(model)
        else:
            self._begin_plan(model, self._budget)

    def _apply(self, model: nn.Module) -> None:
        selected: dict[Selector, Any] = {}
        if any(value is not None for value in self._fields.values()):
            selected = dict.fromkeys(self._selectors(model), self._fields)
        # With rule="full", offload="cpu" and policies={"*.h.0": False}, h.0 has both: it keeps all, and is offloaded.
        # Without `offload`, "*.h.0" replaces all that h.0 has from the rule, so that h.0 is not selected for it.
        rules: dict[Selector, Any] = {}
        for selector, value in self._policies.items():
            fields = fields_of(value)
            rules[selector] = {**selected.pop(selector, {}), **fields}
            if fields.keys() >= self._fields.keys():
                with suppress(ConfigError):  # apply() raises it, with those of other selectors
                    for name, _ in select(model, selector):
                        selected.pop(name, None)  # apply() refuses policies that later ones replace in full
        self.handle = apply(model, {**selected, **rules})
        self.handle._watcher.advice = partial(_advice, self._owner, tuple(self._policies.items()))
        # Transformers 5.17 checkpoints in `__call__`, around the forward that a policy replaces, without effect then:
        # off, until the policies are removed.
        for wrapper in self.handle._wrappers:
            block = wrapper.module
            if block is None or isinstance(wrapper.rule, Keep) or type(block).__call__ is nn.Module.__call__:
                continue
            if block.__dict__.get(_OWN_FLAG):
                self._disabled.enter_context(replaced([block], _OWN_FLAG, value=False))

    def _begin_plan(self, model: nn.Module, budget: Budget) -> None:
        from graphckpt.planning.live_plan import LivePlan  # noqa: PLC0415 - of use with a budget alone

        options = PlanOptions.of({"select": self._selectors(model), **self._options}, self._owner)
        has_own = [module for module in model.modules() if module.__dict__.get(_OWN_FLAG)]
        self._disabled.enter_context(replaced(has_own, _OWN_FLAG, value=False))
        if has_own:
            self._write("graphckpt: the plan replaces the model's own gradient checkpointing")
        # For `graphckpt.remove(model)` after an error of which the trainer does not tell its callbacks. Weakly, so that
        # the model does not keep the callback after its training. During it the hooks on the model do, by way of the
        # plan and the function to which it reports.
        close_plans[model] = WeakMethod(self._remove)
        try:
            self._live = LivePlan(model, budget, options, lambda line: self._write(f"graphckpt: {line}"))
        except BaseException:
            self._remove()
            raise

    def _selectors(self, model: nn.Module) -> list[Selector]:
        if self._select is not None:
            if isinstance(self._select, (str, type, re.Pattern, nn.Module)):
                return [self._select]
            return list(self._select)
        names = layers(model)
        if not names and not self._policies:
            fix = f"name its class or its blocks: {self._owner}(select='Block'), or {self._owner}(select='layers.*')"
            raise ConfigError(f"{self._owner}: {type(model).__name__} has no stack of layers · fix: {fix}")
        return list(names)

    def _begin_step(self, num_updates: int, *, measures: bool) -> None:
        """Begins a step; measures it op by op if ``measures``, or if it is the first one under a plan that stays.

        After a measured first step another one is measured, under the states that the first update creates.
        """
        if self._live is not None:
            self._has_planned_step |= self.plan is not None
            # Read before the step: in its end the plan may settle, and this step did not run under it throughout.
            self._is_planned_for = self._live.is_settled
            self._live.begin_step()
            measures = self._is_planned_for and (measures or self._live.checks)
            num_updates += 1  # a plan begins after the first
        self._is_first = measures and num_updates == 0
        if measures and self.handle is not None and not self._is_reported and not (self._is_first and self.explanation):
            self._measuring.close()
            self._measuring.enter_context(self.handle.measure())

    def _end_micro_batch(self) -> None:
        """Ends a micro-batch that is not the last one of its update."""
        if self._live is not None:
            self._live.end_step(is_update=False)

    def _end_step(self, log: Callable[[dict[str, float]], None], *, is_update: bool = True) -> None:
        """Ends a step, and reports once what one saved; ``log`` is called with its numbers."""
        live = self._live
        try:
            if live is not None:
                is_planned = live.end_step(is_update=is_update)
                self.plan = live.plan  # whose peak is what the last step says
                if is_planned or live.handle is not self.handle:
                    self._measuring.close()  # of a step that did not run under one plan
                    self._follow(live, is_planned=is_planned)
                    return
                if not self._is_planned_for:
                    return
            self._explain_once(log)
        except BaseException:
            self._remove()  # training ends here, and not every trainer notifies its callbacks
            raise

    def _end(self, log: Callable[[dict[str, float]], None]) -> None:
        """Ends the training: reports on its first step if there was no second, and removes the policies."""
        try:
            self._explain_once(log, is_last=True)
            if self._budget is not None and not self._has_planned_step:
                what = "there was a plan" if self.plan is None else "a step ran under the plan"
                self._write(f"graphckpt: training ended before {what}; every planned block was recomputed")
        finally:
            self._remove()

    def _explain_once(self, log: Callable[[dict[str, float]], None], *, is_last: bool = False) -> None:
        """Reports once what the measured step saved."""
        self._measuring.close()
        if self.handle is None or self._is_reported:
            return
        with suppress(GraphError):
            if not (is_last and self.explanation):
                self.explanation = self.handle.explain(show=False)
            if self._is_first and not is_last:
                return
            assert self.explanation is not None
            drawing = None if self._plot is None else self.explanation.plot(self._plot)
            self._is_reported = True
            if self._report:
                explanation = self.explanation
                numbers = {
                    "kept_bytes_plain": explanation.bytes_before,
                    "kept_bytes": explanation.bytes_after,
                    "host_bytes": explanation.bytes_host,
                    "disk_bytes": explanation.bytes_disk,
                    "peak_bytes": explanation.peak_bytes,
                }
                log({f"graphckpt/{name}": float(value) for name, value in numbers.items() if value is not None})
                self._write(str(self.explanation) if self._report == "table" else saved_line(self.explanation))
            if drawing is not None:
                self._write(f"graphckpt: drawn: {drawing}")

    def _follow(self, live: LivePlan, *, is_planned: bool) -> None:
        self.plan, self.handle = live.plan, live.handle
        if is_planned and self.plan is not None:
            text = f"plan\n{self.plan}" if self._report == "table" else plan_line(self.plan)
            self._write(f"graphckpt: {text}")

    def _remove(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None
        self._measuring.close()
        self._disabled.close()
        if self.handle is not None:
            self.handle.remove()


def _advice(owner: str, policies: Sequence[tuple[Selector, Value]], names: Sequence[str]) -> str:
    """Returns the argument of the callback with which blocks keep everything."""
    before = [f"{describe(selector)!r}: {shown(value)}" for selector, value in policies]
    listed = ", ".join([*before, *(f"{name!r}: False" for name in names)])
    return f"{owner}(..., policies={{{listed}}})"


def _argument_of(value: Any) -> str | None:
    """Returns the argument that ``value`` was meant for, if it was passed as the rule; ``None`` if unclear."""
    if value == "table":
        return "report"
    if isinstance(value, Mapping):
        return None if "rule" in value else "policies"
    if isinstance(value, (nn.Module, type)) or (isinstance(value, str) and ("*" in value or "." in value)):
        return "select"
    with suppress(ConfigError):
        check_budget(value)
        return "memory_budget"
    return None


@contextmanager
def restored_rng() -> Iterator[None]:
    # `fork_rng` restores PyTorch's generators alone; data sets and collators draw from NumPy's and Python's too.
    host = HostRNGState.read()
    accelerator = torch.accelerator.current_accelerator()
    # All devices, as a trainer seeds all. Named, since it warns of several that are not.
    devices = range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else accelerator.type):
        try:
            yield
        finally:
            host.restore()


def _saves(row: Row) -> bool:
    return any((row.bytes_before, row.bytes_after, row.bytes_host, row.bytes_disk))


def saved_line(explanation: Explanation) -> str:
    change = f"{format_bytes(explanation.bytes_before)} -> {format_bytes(explanation.bytes_after)}"
    offloaded = offloaded_bytes(explanation)
    # A block that saves nothing, as a frozen one, has nothing for its store.
    blocks = sum((row.reruns and not row.is_own) or (row.place != "device" and _saves(row)) for row in explanation.rows)
    count = f"{blocks} block{'s' if blocks != 1 else ''}"
    effect = f"policies act on {count}" if blocks else "no block is recomputed"
    return f"graphckpt: {effect}; kept for backward: {change}{f'; offloaded: {offloaded}' if offloaded else ''}"
