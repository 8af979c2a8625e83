"""Compares layouts of a run over the ranks of a cluster: sizes of data, tensor and pipeline parallelism, and ZeRO.

Arithmetic rules most of them out, and the most promising of the others are simulated, as ``graphckpt find-batch-size
--world-size`` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphckpt.budget import Budget, check_budget
from graphckpt.config.layout_checks import LayoutChecks
from graphckpt.config.source import ConfigSource
from graphckpt.errors import ConfigError, PlanError, bullets, first_line
from graphckpt.planning.options import absent_memory, budget_bytes
from graphckpt.search.layout_result import (
    LayoutComparison,
    LayoutRow,
    SkippedLayout,
    StagePlan,
    option_overrides,
    size_overrides,
)
from graphckpt.search.layouts import Layout, layouts_of, parse_layout
from graphckpt.search.search import Search
from graphckpt.simulation.cluster_profile import Cluster
from graphckpt.simulation.fake_cluster import cluster_of
from graphckpt.simulation.profile import DeviceProfile, load_profile
from graphckpt.train.settings import ActivationCheckpointConfig
from graphckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from graphckpt.config.run import FakeConfigSteps
    from graphckpt.planning.plan import Plan

MOST_SIMULATED = 12
"""The number of layouts that are simulated; one of billions of parameters takes about a minute."""


def compare_layouts(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    device: str | Path | DeviceProfile,
    world_size: int,
    layouts: Iterable[str] | None = None,
    cluster: Cluster = None,
    memory_budget: Budget = "max",
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LayoutComparison:
    """Compares layouts of the run that a config describes, of which at most :data:`MOST_SIMULATED` are simulated.

    All have the same samples of an update, and each has the best policies for the memory of a rank. The micro-batch is
    the config's, or the next smaller one that divides the samples of a rank.

    Args:
        config_file: a path, or the name of a packaged config.
        overrides: words such as ``"train.global_batch_size=256"``. A layout replaces the sizes in ``train.dist`` and
            the stage in ``train.zero_optimization``.
        device: the profile of the device.
        world_size: the number of ranks, 2 or more.
        layouts: those to compare, such as ``["dp=8 tp=8 zero=3", "dp=64 zero=3"]``; ``None`` is all, without tensor
            parallelism across nodes.
        cluster: the nodes and the links between them; ``None`` is the profile of the device.
        memory_budget: bytes of each rank, ``"50%"`` of the device's memory, or ``"max"``.
        options: fields of :class:`~graphckpt.planning.PlanOptions` that replace those of the config.
        progress: called with a line about what begins.

    Raises:
        ConfigError: the config or an argument cannot be used.
        PlanError: no layout fits; the message has the reasons.
    """
    from graphckpt.config.run import fake_stages_from  # noqa: PLC0415 - loads the planner

    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
        raise ConfigError(f"world_size: expected an int of 2 or more, got {world_size!r} · fix: world_size=64")
    wanted = layouts_of(world_size) if layouts is None else [parse_layout(text, world_size) for text in layouts]
    budget = check_budget(memory_budget, for_fit=True)
    machine = load_profile(device)
    network = cluster_of(cluster, machine)
    limit = budget_bytes(budget, absent_memory(machine.kind, machine.memory_bytes, machine.context_bytes))
    changes, own_options, report = list(overrides), dict(options or {}), progress or (lambda _: None)
    report("loading the config and its model")
    with ConfigSource(config_file, changes).checked() as settings:
        checks = LayoutChecks.of(settings, machine, network, limit, stays_in_node=layouts is None)
        section = settings.train.activation_checkpoint

    def run(layout: Layout) -> LayoutRow:
        sizes = checks.train_of(layout).sizes
        of_sizes = size_overrides(sizes.micro_batch, sizes.accumulation, checks.global_batch)
        own_changes = [*changes, *layout.overrides(), *of_sizes]
        name = f"layout {to_simulate.index(layout) + 1} of {len(to_simulate)}, {layout}"
        plans: list[StagePlan] = []
        with fake_stages_from(config_file, own_changes, device=machine, cluster=network, options=own_options) as stages:
            # One stage at a time: a simulated rank sets PyTorch's default process group, of which a process has one.
            for numbers in checks.equal_stages(layout):
                where = f"{name}, stage {numbers[0]}" if len(stages) > 1 else name
                report(f"{where}: loading the config and its model")
                with stages[numbers[0]] as steps:
                    plan = _plan(steps, budget, partial(_report_run, report, where))
                plans.append(StagePlan(numbers, replace(plan, model=None, front=None)))  # which hold the model
        row = LayoutRow(
            layout=layout, micro_batch=sizes.micro_batch, accumulation=sizes.accumulation, stages=tuple(plans)
        )
        report(f"{name}: {format_seconds(row.seconds)} within {format_bytes(row.peak_bytes)}")
        return row

    # All are checked, which takes no time beside a simulation. Those that are left are sorted by a formula, in which
    # near ones may be in another order: so a dozen is simulated, and not the first one alone.
    search = Search(run, lambda error: isinstance(error, (ConfigError, PlanError)), "layout {}".format)
    possible = search.possible(dict.fromkeys(wanted), checks.reason_against)
    seconds = {layout: checks.estimated_seconds(layout) for layout in possible}
    possible.sort(key=seconds.__getitem__)
    to_simulate, slower = possible[:MOST_SIMULATED], possible[MOST_SIMULATED:]
    rows = [row for layout in to_simulate if (row := search.result(layout)) is not None]
    ruled_out = [
        SkippedLayout(layout, first_line(error) if isinstance(error, PlanError) else str(error))
        for layout, error in search.errors.items()
    ]
    if not rows:
        head = f"world_size {world_size}: no layout fits into {format_bytes(limit)} on {machine.name}"
        raise PlanError(bullets(head, SkippedLayout.grouped(ruled_out)))
    return LayoutComparison(
        device=machine.name,
        cluster=network,
        world_size=world_size,
        memory_budget=budget,
        limit_bytes=limit,
        global_batch=checks.global_batch,
        rows=tuple(sorted(rows, key=lambda row: row.seconds)),
        ruled_out=tuple(ruled_out),
        left_out=tuple(_left_out(seconds[layout], layout) for layout in slower),
        train_arguments=("--config-file", str(config_file), *changes, *_unset(section), *option_overrides(own_options)),
    )


def _plan(steps: FakeConfigSteps, budget: Budget, progress: Callable[[int, int], None]) -> Plan:
    """Returns the plan of a stage. Where everything fits, nothing is faster, and no other policy is measured."""
    options = steps.options
    if not options.head:
        steps.options = replace(options, candidates=())
        try:
            plan = steps.plan(budget, progress)
        except PlanError:
            pass
        else:
            if plan.predicted_nvidia_smi_bytes <= steps.machine.memory_bytes:
                return plan
        finally:
            steps.options = options
    return steps.plan(budget, progress)


def _report_run(report: Callable[[str], None], where: str, done: int, total: int) -> None:
    report(f"{where}: simulated run {done} of {total}")


def _left_out(seconds: float, layout: Layout) -> SkippedLayout:
    about = format_seconds(seconds)
    return SkippedLayout(layout, f"about {about} by arithmetic, slower than the {MOST_SIMULATED} that were simulated")


def _unset(section: ActivationCheckpointConfig) -> list[str]:
    """Returns the overrides that remove policies of the config, which a memory budget replaces."""
    names = [name for name in ("plan", "policies") if getattr(section, name) is not None]
    return [f"train.activation_checkpoint.{name}=null" for name in names]
