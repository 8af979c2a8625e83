"""Plans policies in a training loop, from the updates of the loop: nothing runs twice, is recorded or is faked.

::

    update      policies                             what it is for
    1           every block is recomputed            warm-up; creates the states of optimizers
    2, ...      most blocks are recomputed, some     shows what the other options take: equal blocks of one update
                have other options                   are compared with each other
    then        those of the plan                    is measured; its levels may show a faster plan, or one that fits
    a larger    every block is recomputed            is noticed before its first block runs, and measured; a plan that
    batch                                            counts it in follows: of several processes after 4, 8, 16, ...
                                                     updates, of one right after this update
    then        most blocks are recomputed, some     shows what options take of that batch that only smaller ones have
                have other options                   shown, if not all fits anyway; then as above

Recomputing every block takes little memory, so that a step fits before there is a plan for it. Other options are tried
on as many blocks as surely fit. A step without a backward, such as one that the loop skips, shows nothing: the next one
takes its place. Where nothing fits, the next policy of the head that the options name is put on, and updates are
measured anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

from torch import nn
from torch.optim import Optimizer

from graphckpt.blocks.apply import Handle
from graphckpt.blocks.forward import policy_of
from graphckpt.budget import Budget, check_budget
from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.planning.level_meter import block_classes
from graphckpt.planning.levels import KEEP_NUMBER
from graphckpt.planning.options import PlanOptions, budget_bytes, device_memory, memory_id
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_group import PlanGroup, planning_group
from graphckpt.planning.plan_step import check_parameters, find_blocks, head_rows
from graphckpt.planning.planner import CheckedPlan, Dialogue, Planners, corrected
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.search import PolicyChoice
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import StepRun
from graphckpt.planning.update_planner import UpdatePlanner, candidates_for_updates
from graphckpt.planning.update_policies import ModulePolicies, UpdatePolicies
from graphckpt.planning.update_table import PlannedUpdate, UpdateKey, UpdateTable, highest_levels
from graphckpt.planning.update_watch import BlockCall, UpdateWatch, covers
from graphckpt.progress import Progress
from graphckpt.undo import Undo, scope
from graphckpt.units import format_sizes

MOST_UPDATES = 8  # until there is a plan that was checked
_CHECKS = 2  # another plan may run other ops at its peak
_CHECKS_ANEW = 4  # what smaller batches have shown is scaled to what it can be at most
_TRAINS_MORE = "there are more parameters to train, or states of optimizers: plans"


# Note [The states of a live plan]
#
#     `plan`   `_present`                    an update is
#     None     the options of `_turn`        measured, and added to the table
#     a plan   the options of `_choice`      compared with the plan while `_checks_left`, else not measured
#     a plan   every block is recomputed     of a larger batch, which was noticed before its first block: measured, and
#                                            held in `_larger`
#
# After the last, `end_step` applies the plan again. It alone makes plans, from what `_exchanged` returns on all
# processes alike: one whose update had no backward has nothing to add, but takes part in the exchange.
#
# A loop calls `begin_step` and `end_step`, and hooks see its optimizers and inputs. A Graph knows both and passes them:
# it calls `begin_update`, runs the update within `metering` if `begin_update` returns True, and calls `end_step`. So
# nothing is registered on the model, which is freed with its Graph.


class _Options(NamedTuple):
    """The options that the blocks have at present, or in updates that show what is not known."""

    options: Sequence[int]
    safe_sizes: Sequence[Mapping[str, int]] | None
    """The largest inputs of each update that they fit; ``None`` if every block is recomputed."""
    is_plan: bool = False


class _Limit(NamedTuple):
    num_bytes: int | None
    """``None`` is the lowest possible peak, or not known yet."""
    headroom: int


@final
class LivePlan:
    """The policies of a training that is planned while it runs.

    Args:
        model: The model that the loop trains, without policies.
        memory_budget: The peak of an update, as :func:`graphckpt.plan` takes it.
        options: What the planner may use.
        report: Is called with each line of news.
        policies: Sets the policies; ``None`` sets them on the modules.
        optimizers: Those of the updates; ``None`` finds them in the first update.

    Raises:
        ConfigError: An option cannot be used, or no layers were found in the model.
        PlanError: The parameters alone exceed the budget.
    """

    def __init__(
        self,
        model: nn.Module,
        memory_budget: Budget,
        options: PlanOptions,
        report: Callable[[str], None],
        *,
        policies: UpdatePolicies | None = None,
        optimizers: Iterable[Optimizer] | None = None,
    ) -> None:
        _check_options(options)
        self._model, self._options, self._report = model, options, report
        self._budget = check_budget(memory_budget)
        self._blocks = find_blocks(model, options.select)
        self._policies = ModulePolicies(model, options) if policies is None else policies
        self._updates = UpdateWatch(model, optimizers or ())
        self._num_updates = self._checks_left = 0
        self._num_replans = self._next_replan = 0  # plans for larger batches, and the update from which the next is due
        self._num_measured = 0  # updates, for the first plan
        self._table: UpdateTable | None = None
        self._is_warm_up = True
        """Whether the table has nothing but an update that has added states of optimizers, or lasting gradients."""
        self._is_trial = False
        """Whether the present plan is a trial of what the largest update has not shown."""
        self._larger: PlannedUpdate | None = None
        """The largest update that was larger than planned for, until it is planned for."""
        self.plan: Plan | None = None
        self._head = _Head(model, options, self._blocks, is_least=self._budget == "min")
        check_parameters(model, self._budget)
        with planning_group(options.group) as group:
            self._candidates = candidates_for_updates(self._blocks, options, self._updates.device, group)
            group.check_equal(head=self._head.names)
            self._num_sharing = group.num_sharing(memory_id(self._updates.device))
            self._is_alone = group.size == 1
            is_shown = False if callable(options.progress) or group.rank else options.progress
        self._progress = Progress(is_shown=is_shown)
        self._most_updates = min(MOST_UPDATES, len(self._candidates.options) + 1 + _CHECKS)
        self._turn = _Options(self._all_recomputed, None)
        self._present = self._turn
        self._dialogue: Dialogue | None = None
        """Finds the plan; ``None`` until all options have been shown."""
        self._choice: PolicyChoice | None = None
        """The options of blocks under the plan."""
        if optimizers is None:
            self._updates.add_hooks((name for name, _ in self._blocks), self._check_inputs)
        self._install(self._turn)
        report(f"plans from at most {self._most_updates} updates")

    @property
    def _all_recomputed(self) -> list[int]:
        return [self._candidates.base] * len(self._blocks)

    @property
    def checks(self) -> bool:
        """Whether the first step under a plan that stays is of interest."""
        return self._options.check

    @property
    def is_settled(self) -> bool:
        """Whether there is a plan, and no further step under it is to be measured."""
        return self.plan is not None and not self._checks_left

    @property
    def handle(self) -> Handle | None:
        """The handle of the plan, where its policies are applied to the modules themselves."""
        return self._policies.handle

    def begin_step(self) -> None:
        """Begins a step, which is an update or, with accumulated gradients, a micro-batch."""
        if self._updates.sizes is not None:
            return
        self._updates.begin()
        if self.is_settled and self._is_alone and self._updates.trains_more():
            self._begin_anew(_TRAINS_MORE)
        self.renew_blocks()
        if not (self.is_settled and self._present.is_plan):
            self._measure()

    def begin_update(self, sizes: Mapping[str, int]) -> bool:
        """Begins an update of a program that has registered its optimizers.

        Args:
            sizes: What tells its batch from larger ones: numbers of elements, or lengths, by name.

        Returns:
            Whether it is to run within :meth:`metering`.
        """
        self._updates.begin(sizes)
        if self.is_settled and self._is_safe(sizes):
            return False
        self.renew_blocks()
        if not self._is_safe(sizes):
            self._install(_Options(self._all_recomputed, None))
        return True

    @scope
    def metering(self, undo: Undo) -> Iterator[None]:
        """Measures an update that :meth:`begin_update` has begun."""
        undo.append((self._updates.stop, ()))
        self._measure()
        yield

    def discard_levels(self) -> None:
        """Makes the present update show nothing, as one whose optimizers are skipped."""
        self._updates.discard()

    def abandon_step(self) -> None:
        """Ends a step that has failed; the next one takes its place."""
        self._updates.abandon()

    def end_step(self, *, is_update: bool = True) -> bool:
        """Ends a step; returns whether there is a new plan.

        Raises:
            PlanError: No plan fits.
        """
        if self._updates.sizes is None or not is_update:
            self._updates.begin_micro_batch()
            return False
        update = self._updates.end(self._present.options)
        if update is not None and update.is_later and self._is_warm_up:
            update = None  # it does not show the whole update
        self._num_updates += 1
        if self.plan is None:
            is_planned = self._plan_first(update)
        else:
            # One with every block recomputed may also be a check of a plan that recomputes all.
            is_check = self._checks_left and (self._choice is None or self._present.options == [*self._choice.plan])
            if update is not None and not (is_check or self._present.is_plan):
                self._add_larger(update)
            is_planned = bool(self._checks_left) and self._check(update)
            is_planned = self._plan_anew() or is_planned
        if self.plan is not None and not self._present.is_plan and (is_planned or update is not None):
            self._apply()
        return is_planned

    def close(self) -> None:
        """Removes all policies and hooks."""
        self._updates.close()
        self._remove_policies()

    def _check_inputs(self, call: BlockCall | None) -> None:
        """Notices a batch that is larger than the present policies are for, mostly before any block runs."""
        if self._is_safe(self._updates.sizes or {}):
            return
        options = self._all_recomputed
        if call is not None and policy_of(self._blocks[call.block][1]) is None:
            options[call.block] = KEEP_NUMBER  # a call that has begun takes no policy
        self._install(_Options(options, None))
        if not self._updates.measure_rest(Blocks(self._blocks), call):
            self._turn = _Options(self._all_recomputed, None)  # the next update shows what all take

    def _is_safe(self, sizes: Mapping[str, int]) -> bool:
        """Whether the present policies were chosen for inputs of these sizes, or larger ones."""
        safe = self._present.safe_sizes
        return safe is None or any(covers(each, sizes) for each in safe)

    def renew_blocks(self) -> None:
        """Sets the policies anew if the program has replaced modules, as a teacher that is copied from a student."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        blocks = [(name, modules.get(name, module)) for name, module in self._blocks]
        is_changed = blocks != self._blocks
        self._blocks = blocks
        if self.plan is None:
            self._install(self._turn)
        elif is_changed:
            self._apply()

    def _remove_policies(self) -> None:
        self._present = self._present._replace(is_plan=False)
        self._policies.remove(self._blocks)

    def _install(self, turn: _Options) -> None:
        """Sets the options of all blocks."""
        if self._present.is_plan:
            self._remove_policies()
        every = [*zip(self._candidates.options, self._candidates.stores, strict=True)]
        self._policies.install(self._blocks, [every[number] for number in turn.options], self._head.rows)
        self._present = turn

    def _measure(self) -> None:
        """Measures the update from here on."""
        self._updates.measure(Blocks(self._blocks))

    def _plan_first(self, update: PlannedUpdate | None) -> bool:
        """Adds an update to the table; returns whether it was the last one before the plan."""
        with planning_group(self._options.group) as group:
            updates = _exchanged(group, update)
            if not updates:
                return False
            self._num_measured += 1
            self._say_progress()
            if self._table is None or self._is_warm_up:
                classes = block_classes(Blocks(self._blocks), updates[0].levels)
                self._table = self._candidates.table(classes)
            self._table.add(updates, self._removed)
            is_last = self._num_measured >= self._most_updates - _CHECKS
            adds_lasting = any(each.adds_lasting for each in updates)
            self._is_warm_up = not is_last and (self._num_measured == 1 or adds_lasting)
            planner = self._planner(group)
            limit = self._limit(planner, group)
            turn = None
            if not (is_last or planner.fits_plain(limit.num_bytes)):
                only_keep = self._budget == "min" and self._candidates.is_base_allowed
                turn = planner.next_turn(limit.num_bytes, is_first=self._is_warm_up, only_keep=only_keep)
            if not is_last and (turn is not None or self._is_warm_up or planner.num_missing):
                room = 1.0 if turn is None else planner.room(turn, limit.num_bytes)
                safe_sizes = [{name: int(room * size) for name, size in planner.key[0]}]
                self._turn = _Options(turn or self._all_recomputed, None if turn is None else safe_sizes)
                return False
            checks = self._most_updates - self._num_measured if self._options.check else 0
            self._checks_left = min(_CHECKS, checks)
            self._begin_dialogue(planner, limit)
        return self.plan is not None

    def _begin_anew(self, why: str) -> None:
        """Measures updates anew, after what has changed levels everywhere."""
        self._remove_policies()
        self._table, self._is_warm_up, self._num_measured = None, True, 0
        self.plan = self._choice = self._larger = None
        self._turn = _Options(self._all_recomputed, None)
        self._report(f"{why} from at most {self._most_updates} updates")

    def _check(self, update: PlannedUpdate | None) -> bool:
        """Tells the dialogue an update under the plan; returns whether there is another plan."""
        plan, choice, dialogue = self.plan, self._choice, self._dialogue
        assert plan is not None
        assert choice is not None
        assert dialogue is not None
        assert self._table is not None
        with planning_group(self._options.group) as group:
            updates = [each for each in _exchanged(group, update) if tuple(each.options) == choice.plan]
            if not updates:
                return False
            self._checks_left -= 1
            peak = max(each.levels.peak_bytes for each in updates)
            exceeds = peak > max(plan.budget_bytes, plan.predicted_peak_bytes) and self._budget != "min"
            if exceeds:
                excess = "a step took {} under a plan for {}".format(*format_sizes(peak, plan.budget_bytes))
                warnings.warn(f"graphckpt: {excess}; planning again with a correction", stacklevel=5)
            of_largest = [each for each in updates if each.key == self._table.largest]
            if of_largest:
                off = max(each.levels.peak_bytes for each in of_largest) - plan.predicted_peak_bytes
            else:  # a smaller batch proves less: only how much more is needed than predicted for it
                off = max(each.levels.peak_bytes - self._predicted_peak(each.key, plan) for each in updates)
                if off <= 0 and not self._is_trial:
                    return False
            plan, levels = corrected(plan, off), highest_levels(each.levels.levels for each in of_largest)
            if self._is_trial:
                self._table.add(updates, self._removed)
            else:
                self._table.add_runs(updates)
            planner = self._planner(group)
            dialogue = dialogue.renewed(planner.planner, margin=planner.margin(dialogue.limit))
            if of_largest or off > 0:
                dialogue.tell(choice, CheckedPlan(plan, StepRun(levels, 0.0), plan.predicted_peak_bytes), levels)
            self._dialogue = dialogue
            # No update would check a further plan: then one that has fitted stays.
            best = None if self._checks_left else dialogue.best
            best = best or self._propose(planner) or dialogue.best
            is_best = not exceeds if best is None else best.key == choice.key
            if not is_best:
                self._choose(best, plan.headroom_bytes, or_lowest=True)
            elif of_largest:
                self.plan, self._checks_left = plan, 0
        return not is_best and self.plan is not None

    def _propose(self, planner: UpdatePlanner) -> PolicyChoice | None:
        """Returns what is to run next: a trial of what the largest update has not shown, or else the fastest plan."""
        dialogue = self._dialogue
        assert dialogue is not None
        trial = planner.trial(dialogue.limit) if self._checks_left > 1 else None
        self._is_trial = trial is not None
        return trial or dialogue.ask()

    def _predicted_peak(self, key: UpdateKey, plan: Plan) -> int:
        """Returns the peak of a smaller update under the plan; of one that is not in the table that of the plan."""
        assert self._table is not None
        assert self._choice is not None
        return self._table.peak(self._choice.plan, key) if key in self._table else plan.predicted_peak_bytes

    def _plan_anew(self) -> bool:
        """Plans again if there was a larger batch: at once in a program of one process, else at certain updates."""
        if self._is_alone:
            # Not in each update, if batches grow with each; but without delay if the next policy of the head may help.
            if self._larger is None or (self._num_updates < self._next_replan and not self._needs_next_head):
                return False
        elif self._num_updates & (self._num_updates - 1):
            # Zero for powers of two alone: all processes reach them, whatever their batches are.
            return False
        with planning_group(self._options.group) as group:
            if not self._is_alone and self.is_settled and any(group.all_gather(self._updates.trains_more())):
                self._begin_anew(_TRAINS_MORE)
                return False
            updates = _exchanged(group, self._larger)
            if not updates:
                return False
            assert self._table is not None
            self._table.add(updates, self._removed)
            self._larger = None
            self._checks_left = _CHECKS_ANEW if self._options.check else 0
            planner = self._planner(group)
            self._begin_dialogue(planner, self._limit(planner, group), or_lowest=True)
        if self.plan is None:
            return False
        self._num_replans += 1
        self._next_replan = self._num_updates + 2**self._num_replans
        self._report("planned again, for the largest batch so far")
        return True

    @property
    def _needs_next_head(self) -> bool:
        """Whether the larger update exceeded the budget, with every block recomputed, and there is a further head."""
        assert self._larger is not None
        assert self.plan is not None
        return not self._head.is_last and self._larger.levels.peak_bytes > self.plan.budget_bytes

    def _add_larger(self, update: PlannedUpdate) -> None:
        if self._larger is None or update.levels.peak_bytes > self._larger.levels.peak_bytes:
            self._larger = update

    def _planner(self, group: PlanGroup) -> UpdatePlanner:
        assert self._table is not None
        return UpdatePlanner(
            table=self._table,
            removed=self._removed,
            names=[name for name, _ in self._blocks],
            candidates=self._candidates,
            options=self._options,
            model=self._model,
            device=str(self._updates.device),
            notes=(*self._candidates.notes, *group.notes),
        )

    def _limit(self, planner: UpdatePlanner, group: PlanGroup) -> _Limit:
        """Returns the bytes that an update of any process may take, and the headroom."""
        budget = self._budget
        plain_peak = self._head.plain_peak
        if plain_peak is None and planner.is_plain_known:
            plain_peak = planner.plain_peak
        if budget == "min" or (isinstance(budget, float) and plain_peak is None):
            return _Limit(None, 0)
        memory = device_memory(self._updates.device, planner.table.start_bytes, self._num_sharing)
        headroom = memory.headroom if budget == "max" else 0
        limits = group.all_gather([budget_bytes(budget, memory, plain_peak or 0), headroom])
        return _Limit(*map(int, min(limits)))

    def _begin_dialogue(self, planner: UpdatePlanner, limit: _Limit, *, or_lowest: bool = False) -> None:
        """Chooses the first plan for the updates of the table."""
        margin = planner.margin(limit.num_bytes)
        self._dialogue = Dialogue(planner.planner, limit.num_bytes, margin=margin, is_cautious=True)
        self._choose(self._propose(planner), limit.headroom, or_lowest=or_lowest)

    def _choose(self, choice: PolicyChoice | None, headroom: int, *, or_lowest: bool = False) -> None:
        """Makes the plan of a choice the present one.

        Without a choice updates are measured anew with the next policy of the head, if there is one; else the plan is
        that of the lowest peak, or PlanError is raised.
        """
        dialogue = self._dialogue
        assert dialogue is not None
        planner, limit = dialogue.planner, dialogue.limit
        if choice is None and self._head.begin_next(planner.plain.peak):
            (row,) = self._head.rows
            self._begin_anew(f"no plan fits; plans with {row.option} on {row.block}")
            return
        if choice is None:
            assert limit is not None
            choice = planner.floor
            fault = planner.infeasible(limit, choice.peak)
            if not or_lowest:
                raise fault
            warnings.warn(f"graphckpt: {fault} · using the plan with the lowest peak", stacklevel=5)
        run, names = dialogue.runs.get(choice.key), self._names()
        plan = planner.to_plan(choice, choice.peak if limit is None else limit) if run is None else run.plan
        rows = *(row for row in plan.rows if row.block in names), *self._head.rows
        front = Planners([planner]).front
        self.plan = replace(plan, rows=rows, memory_budget=self._budget, headroom_bytes=headroom, front=front)
        self._choice = choice
        self._updates.trains_more()
        self._checks_left *= run is None
        self._remove_policies()

    def _apply(self) -> None:
        assert self.plan is not None
        assert self._table is not None
        self._remove_policies()
        names = self._names()
        self._policies.apply({block: fields for block, fields in self.plan.policies.items() if block in names})
        assert self._choice is not None
        limit = max(self.plan.budget_bytes, self.plan.predicted_peak_bytes)
        fitting = [key for key in self._table.keys if self._table.peak(self._choice.plan, key) <= limit]
        self._present = _Options(list(self._choice.plan), [dict(sizes) for sizes, _ in fitting], is_plan=True)

    @property
    def _removed(self) -> list[int]:
        """The blocks that the program has taken out of the model."""
        names = self._names()
        return [number for number, (name, _) in enumerate(self._blocks) if name not in names]

    def _names(self) -> set[str]:
        """Returns the names of the modules that the program has not taken out of the model."""
        return {name for name, _ in self._model.named_modules(remove_duplicate=False)}

    def _say_progress(self) -> None:
        if callable(self._options.progress):
            self._options.progress(self._num_measured, self._most_updates)
        self._progress.begin(f"update {self._num_measured} of at most {self._most_updates} is measured")


@final
class _Head:
    """The policies of the head, which computes the loss: none at first, and where no plan fits, the next one.

    Args:
        model: The model.
        options: Of which ``head`` names the policies.
        blocks: The planned layers.
        is_least: Whether the last one, the finest, is wanted from the start.
    """

    def __init__(
        self, model: nn.Module, options: PlanOptions, blocks: Sequence[tuple[str, nn.Module]], *, is_least: bool
    ) -> None:
        alternatives = head_rows(model, options.head, blocks)
        self._alternatives = alternatives[-1:] if is_least else alternatives
        self.plain_peak: int | None = None
        """The peak of the plain step, where the present policy is not the first."""

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        return self._alternatives[0]

    @property
    def is_last(self) -> bool:
        return len(self._alternatives) == 1

    @property
    def names(self) -> list[list[str]]:
        return [[row.block, row.option] for rows in self._alternatives for row in rows]

    def begin_next(self, plain_peak: int) -> bool:
        """Goes on to the next policy, if there is one; returns whether there is."""
        if self.is_last:
            return False
        self.plain_peak = plain_peak if self.plain_peak is None else self.plain_peak
        self._alternatives = self._alternatives[1:]
        return True


def _check_options(options: PlanOptions) -> None:
    require("plan", "numpy")
    if options.step_group is not None:
        what = "expected None in a training loop, whose steps all processes run"
        raise ConfigError(f"step_group: {what} · fix: group=, with the processes that plan the same blocks")


def _exchanged(group: PlanGroup, update: PlannedUpdate | None) -> list[PlannedUpdate]:
    """Returns the updates of all processes that have one."""
    messages = group.all_gather(None if update is None else update.to_message())
    return [PlannedUpdate.from_message(message) for message in messages if message is not None]
