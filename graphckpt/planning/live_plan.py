"""Plans policies in a training loop, on the loop's own steps: nothing of the loop runs twice.

::

    update      policies                       what it is for
    1           every block is recomputed      warm-up; creates the states of optimizers
    2           every block is recomputed      is recorded; at its end the planner measures the blocks and plans
    3, ...      those of the plan
    a larger    every block is recomputed      is noticed before its first block runs, and recorded; the plan made
    batch                                      after 4, 8, 16, ... updates counts it in

Recomputing every block takes little memory, so that a step fits before there is a plan for it. A step without a
backward, such as one that the loop skips, cannot be planned: the next one is recorded in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.blocks.apply import Handle, apply
from graphckpt.blocks.forward import policy_of
from graphckpt.blocks.hooks import ModuleHook
from graphckpt.errors import ConfigError
from graphckpt.planning.candidates import compiled_forwards, parse_compile
from graphckpt.planning.options import Budget, PlanOptions
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import planning_group
from graphckpt.planning.plan_step import find_blocks, plan_recorded
from graphckpt.planning.recorded_step import FULL, RecordedStep, refuse_sharded
from graphckpt.planning.trace import Blocks
from graphckpt.planning.traced_stores import TracedStore
from graphckpt.training_state import on_optimizer_step
from graphckpt.tree import tensors_in
from graphckpt.units import format_sizes

_MOST_RECORDED = 16  # updates, until one calls all blocks: of 12 that are dropped one time in ten, one in four does


@final
class LivePlan:
    """The policies of a training that is planned while it runs.

    Args:
        model: The model that the loop trains, without policies.
        memory_budget: The peak of an update, as :func:`graphckpt.plan` takes it.
        options: What the planner may use.
        report: Is called with each line of news.

    Raises:
        ConfigError: An option cannot be used, or no layers were found in the model.
    """

    def __init__(
        self, model: nn.Module, memory_budget: Budget, options: PlanOptions, report: Callable[[str], None]
    ) -> None:
        if options.step_group is not None:
            what = "expected None in a training loop, whose steps all processes run anyway"
            raise ConfigError(f"step_group: {what} · fix: group=, with the processes that plan the same blocks")
        self._model = model
        self._budget = memory_budget
        self._options = options
        self._report = report
        self._blocks = find_blocks(model, options.select)
        self._code = parse_compile(options.compile, options.candidates)
        self._optimizers: dict[int, Optimizer] = {}
        self._hooks = ExitStack()
        self._policies = ExitStack()
        """Those of the plan if there is a ``handle``, or else those that recompute every block."""
        self._recording = ExitStack()
        self._store = TracedStore()
        self._num_updates = self._num_recorded = 0
        self._begin = self._seconds = 0.0
        self._input_sizes: dict[str, int] | None = None
        """The largest input of the modules around the blocks in this update, by name; ``None`` between updates."""
        self._current: RecordedStep | None = None
        """The step that is being recorded."""
        self._recorded: RecordedStep | None = None
        """The last one that was recorded and can be planned."""
        self._planned: RecordedStep | None = None
        """The recorded step that the plan is for."""
        self.plan: Plan | None = None
        self.handle: Handle | None = None
        refuse_sharded(self._blocks)
        self._hooks.enter_context(
            on_optimizer_step(lambda optimizer: self._optimizers.update({id(optimizer): optimizer}))
        )
        parts = self._blocks[0][0].split(".")
        for name in (".".join(parts[:number]) for number in range(len(parts))):
            module = model.get_submodule(name)
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                watch = ModuleHook(partial(self._before_call, name))
                self._hooks.callback(module.register_forward_pre_hook(watch, with_kwargs=True, prepend=True).remove)
        self._recompute_all()

    @property
    def checks(self) -> bool:
        """Whether a step under the plan is to be measured, for :meth:`correct`."""
        return self.plan is not None and self._options.check

    def begin_step(self) -> None:
        """Begins a step, which is an update or, with accumulated gradients, a part of one."""
        if self._input_sizes is not None:
            return
        self._input_sizes = {}
        self._renew_blocks()
        self._begin = perf_counter()
        if self.plan is None and self._num_updates:
            self._record()

    def end_step(self, *, is_update: bool = True) -> bool:
        """Ends a step; returns whether there is a new plan."""
        if self._input_sizes is None or not is_update:
            return False
        self._input_sizes = None
        self._recording.close()
        step, self._current = self._current, None
        is_recorded = step is not None and step.has_backward  # otherwise it cannot be planned
        if is_recorded:
            self._recorded = step
        self._num_updates += 1
        if self._num_updates == 1:
            self._seconds = perf_counter() - self._begin
        is_planned = self._plan_first(is_recorded=is_recorded) if self.plan is None else self._plan_anew()
        if self.plan is not None and self.handle is None:
            self._apply()
        return is_planned

    def correct(self, peak: int) -> bool:
        """Plans anew if a step under the plan took ``peak`` bytes, which exceed the budget; returns whether it did."""
        plan = self.plan
        if plan is None or self._recorded is None or self._budget == "min":
            return False
        if peak <= max(plan.budget_bytes, plan.predicted_peak_bytes):  # the latter if no plan fits
            return False
        excess = "a step took {} under a plan for {}".format(*format_sizes(peak, plan.budget_bytes))
        if planning_group(self._options.group).size > 1:  # only some may have seen it
            warnings.warn(f"graphckpt: {excess} · fix: a lower memory_budget, or a smaller batch", stacklevel=3)
            return False
        warnings.warn(f"graphckpt: {excess}; planning again with a correction", stacklevel=3)
        self._plan(plan.correction_bytes + peak - plan.predicted_peak_bytes, or_lowest=True)
        self._apply()
        return True

    def close(self) -> None:
        """Removes all policies and hooks."""
        self._recording.close()
        self._policies.close()
        self._hooks.close()
        self._input_sizes = None

    def _before_call(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Notices a batch that is larger than the one planned for, before any block runs."""
        sizes = self._input_sizes
        if sizes is None or not (torch.is_grad_enabled() and module.training):
            return
        size = max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
        sizes[name] = max(size, sizes.get(name, 0))
        if self.handle is None or self._planned is None or size <= self._planned.input_sizes.get(name, size):
            return
        assert self._recorded is not None
        is_largest = size > self._recorded.input_sizes.get(name, 0)
        self._recompute_all()
        if is_largest:
            self._record()

    def _renew_blocks(self) -> None:
        """Sets the policies anew if the program has replaced modules, as a teacher that is copied from a student."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        blocks = [(name, modules[name]) for name, _ in self._blocks if name in modules]
        if blocks == self._blocks:
            return
        self._blocks = blocks
        if self.handle is None:
            self._recompute_all()
        else:
            self._apply()

    def _remove_policies(self) -> None:
        self._policies.close()
        self.handle = None
        for _, module in self._blocks:
            if (wrapper := policy_of(module)) is not None:  # of a copy, which took it along
                wrapper.uninstall()

    def _recompute_all(self) -> None:
        self._remove_policies()
        modules = [module for _, module in self._blocks]
        self._policies.enter_context(compiled_forwards(modules, self._code.options))
        num_blocks = len(self._blocks)
        self._policies.enter_context(Blocks(self._blocks).under([FULL] * num_blocks, [self._store] * num_blocks))

    def _record(self) -> None:
        assert self._input_sizes is not None
        self._current = RecordedStep(self._model, Blocks(self._blocks), self._optimizers.values(), self._seconds)
        self._current.input_sizes = self._input_sizes
        self._recording.enter_context(self._current.recording(self._store))

    def _plan_first(self, *, is_recorded: bool) -> bool:
        if self._num_updates == 1:
            return False
        step = self._recorded
        with planning_group(self._options.group) as group:
            if group.max(not is_recorded):
                return False
            assert step is not None
            self._num_recorded += 1
            misses = step.has_new_states or step.num_blocks < len(self._blocks)
            if group.max(misses) and self._num_recorded < _MOST_RECORDED:
                return False
        self._plan()
        return True

    def _plan_anew(self) -> bool:
        """Plans again after 4, 8, 16, ... updates, if a larger batch was seen: processes do so together."""
        if self._num_updates & (self._num_updates - 1):
            return False
        with planning_group(self._options.group) as group:
            if not group.max(self._recorded is not self._planned):
                return False
        self._plan(or_lowest=True)
        self._report("planned again, for the largest batch so far")
        return True

    def _plan(self, extra_bytes: int = 0, *, or_lowest: bool = False) -> None:
        assert self._recorded is not None
        self._remove_policies()
        step, options = self._recorded, self._options
        num_missing = len(self._blocks) - step.num_blocks
        what = f"the step that was measured did not call {num_missing} of the blocks; one that does takes more memory"
        notes = [what] * (num_missing > 0)
        with planning_group(options.group) as group:
            self.plan = plan_recorded(
                step,
                self._model,
                step.named_blocks,
                self._budget,
                options,
                group,
                extra_bytes=extra_bytes,
                or_lowest=or_lowest,
                notes=notes,
            )
        self._planned = step

    def _apply(self) -> None:
        assert self.plan is not None
        self._remove_policies()
        names = {name for name, _ in self._model.named_modules(remove_duplicate=False)}
        self.handle = apply(
            self._model, {block: fields for block, fields in self.plan.policies.items() if block in names}
        )
        self._policies.callback(self.handle.remove)
