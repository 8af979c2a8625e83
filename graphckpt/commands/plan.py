"""``graphckpt plan``: chooses the policy of each block for a memory budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphckpt.commands.common import add_json, add_step_command, machine_of, step_options
from graphckpt.errors import PlanError
from graphckpt.progress import CommandProgress
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.budget import Budget
    from graphckpt.commands.common import Commands
    from graphckpt.config.run import FakeConfigSteps
    from graphckpt.planning.plan import Plan
    from graphckpt.planning.planner import Planners

_EPILOG = """\
examples:
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget 24GiB
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget 48GiB \\
      train.train_micro_batch_size=64
  graphckpt plan --config-file configs/llama_pretrain.py --device rtx4090 --memory-budget max --offload cpu
  graphckpt plan --config-file configs/gpt2_pretrain.py --device a100-80g --memory-budget 0.6 --save plan.yaml
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h100 --memory 24GiB
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --json > plan.json
  graphckpt plan --config-file configs/llama_pretrain.py --device h100 --cluster dgx-h100 \\
      train.dist.data_parallel_size=8 train.dist.tensor_parallel_size=8
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --sweep front.png
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget min \\
      --head loss_head=tiles:8:sum task.loss_head=True

  graphckpt plan --config-file configs/llama_pretrain.py --device h200 --memory-budget 24GiB \\
      train.dist.data_parallel_size=8 train.zero_optimization.enabled=True train.zero_optimization.stage=3

The device may be absent, and no tensor allocates memory. With train.dist and train.zero_optimization one rank is
planned, and of a pipeline one rank of each stage. The file of --save has a section `policies` for
train.activation_checkpoint.

exit codes: 0 done, 2 invalid input, such as a budget that no plan fits, 130 stopped by Ctrl-C
"""


def add_plan(commands: Commands) -> None:
    parser = add_step_command(
        commands,
        "plan",
        _plan,
        budget_help="the peak of the whole step: bytes, 24GiB, 50%% of the device's memory, 0.6 of the plain step's "
        "peak, max (the device's memory less a headroom, the default), or min",
        help="choose the policy of each block for a memory budget",
        description="Chooses the policy of each block so that the step is as fast as possible within a memory budget.",
        epilog=_EPILOG,
    )
    add_json(parser)
    parser.add_argument("--save", metavar="FILE", help="write the plan as YAML")
    parser.add_argument("--plot", metavar="FILE", help="draw the step's memory: .png, .svg or .html")
    parser.add_argument("--sweep", metavar="FILE", help="draw peak against step time for all budgets")


def _plan(parsed: argparse.Namespace) -> int:
    from graphckpt.budget import check_budget  # noqa: PLC0415
    from graphckpt.planning.plan import save_stages  # noqa: PLC0415

    machine = machine_of(parsed)  # it and the budget are checked before the config is imported
    budget = check_budget(parsed.memory_budget)
    if parsed.plot:
        from graphckpt.ledger.plot import file_of  # noqa: PLC0415

        file_of(parsed.plot, has_page=True)  # raises now, not after the measurements
    plans: list[Plan] = []
    values: list[dict[str, Any]] = []
    with CommandProgress() as progress:
        progress.begin("loading the config and its model")
        from graphckpt.config.run import fake_stages_from  # noqa: PLC0415 - takes seconds

        options = step_options(parsed)
        with fake_stages_from(parsed.config_file, parsed.overrides, device=machine, **options) as stages:
            names = [""] if len(stages) == 1 else [f"stage {number}: " for number in range(len(stages))]
            for number, stage in enumerate(stages):
                with stage as steps:
                    sweep = parsed.sweep and _numbered(parsed.sweep, number, len(stages))
                    plan = _plan_steps(steps, budget, progress, names[number], sweep)
                    values.append(steps.to_dict(plan))
                plans.append(plan)
    highest = max(range(len(plans)), key=lambda number: plans[number].predicted_peak_bytes)
    if parsed.json:
        policies = {block: fields for plan in plans for block, fields in plan.policies.items()}
        staged = {"stages": values, "highest_stage": highest, "policies": policies}
        print(json.dumps(values[0] if len(plans) == 1 else staged, indent=1), file=parsed.stdout)
    else:
        for name, plan in zip(names, plans, strict=True):
            if name:
                print(name.rstrip(": "))
            plan.explain()
        if len(plans) > 1:
            print(f"highest peak: stage {highest}, {format_bytes(plans[highest].predicted_peak_bytes)}")
    if parsed.save:
        save_stages(plans, parsed.save)
        print(f"written: {parsed.save}")
    for number, plan in enumerate(plans) if parsed.plot else ():
        print(f"drawn: {plan.plot(_numbered(parsed.plot, number, len(plans)))}")
    return 0


def _plan_steps(
    steps: FakeConfigSteps, budget: Budget, progress: CommandProgress, name: str, sweep: str | None
) -> Plan:
    def on_measured(planners: Planners) -> None:
        progress.begin(f"{name}choosing the policies of {len(planners.plain.measured.names)} blocks")
        if sweep:
            from graphckpt.planning.plot import draw_sweep  # noqa: PLC0415 - loads matplotlib
            from graphckpt.planning.rows import print_sweep  # noqa: PLC0415

            front, uniform = planners.front(), planners.plain.uniform()
            print_sweep(front, uniform)
            draw_sweep(front, uniform, sweep)
            print(f"drawn: {sweep}")

    try:
        return steps.plan(
            budget, lambda done, total: progress.begin(f"{name}simulated run {done} of {total}"), on_measured
        )
    except PlanError as error:
        raise PlanError(f"{name}{error}") from None


def _numbered(file: str, number: int, count: int) -> str:
    """Returns the file of one stage: with several, ``front.png`` becomes ``front_0.png``."""
    path = Path(file)
    return file if count == 1 else str(path.with_name(f"{path.stem}_{number}{path.suffix}"))
