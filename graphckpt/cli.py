"""The command line: ``graphckpt train``, ``plan``, ``fit``, ``estimate``, ``selftest`` and ``profile-device``."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console

from graphckpt import __version__
from graphckpt.cli_examples import ESTIMATE, FIT, PLAN, PROFILE, SELFTEST, TRAIN
from graphckpt.errors import ConfigError, GraphckptError, PlanError, did_you_mean
from graphckpt.extras import LazyPackage, require
from graphckpt.progress import CommandProgress
from graphckpt.simulation.profile_files import packaged_names
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    import yaml

    _Commands = argparse._SubParsersAction[Any]
    from graphckpt.config.run import FakeConfigSteps
    from graphckpt.planning.options import Budget
    from graphckpt.planning.plan import Plan
    from graphckpt.planning.planner import Planners
    from graphckpt.search.estimate_result import Estimate
    from graphckpt.search.fit_result import Fit
    from graphckpt.search.layout_result import LayoutComparison
    from graphckpt.simulation.profile import DeviceProfile
else:
    yaml = LazyPackage("yaml", "plan")

_FAULT = 2  # exit code for user errors, as in argparse
_DIFFERS = 1  # exit code of a selftest in which a check failed
_INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT, as in shells


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 2 for a user error, or 130 after Ctrl-C."""
    parser = _parser()
    names: tuple[str, ...] = parser.get_default("names")
    word = next(iter(sys.argv[1:] if arguments is None else arguments), "-")
    if not word.startswith("-") and word not in names:
        parser.error(f"unknown command {word!r}{did_you_mean(word, names)} · fix: use one of {', '.join(names)}")
    parsed, rest = parser.parse_known_args(arguments)
    if not hasattr(parsed, "overrides") and rest:
        parser.error(f"unexpected argument {rest[0]!r} · see 'graphckpt {parsed.command} --help'")
    parsed.overrides = [*getattr(parsed, "overrides", []), *rest]  # flags may be placed between overrides
    parsed.stdout = sys.stdout
    try:
        # With --json what the code of a config prints goes to stderr, too.
        with redirect_stdout(sys.stderr if getattr(parsed, "json", False) else sys.stdout):
            code: int = parsed.run(parsed)
    except GraphckptError as error:
        who = f" on rank {rank}" if (rank := os.environ.get("RANK", "0")) != "0" else ""  # as torchrun names it
        text = f"error{who}: {error}"
        Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun ends its report with this
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: PLC0415 - as below

            get_error_handler().record_exception(error)
        return _FAULT
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", style="yellow")
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphckpt",
        description="Choose, block by block, what a PyTorch training step saves, recomputes or offloads.",
    )
    parser.add_argument("--version", action="version", version=f"graphckpt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=_CommandParser)
    for add in (add_train, add_plan, add_fit, add_estimate, add_selftest, add_profile_device):
        add(commands)
    parser.set_defaults(names=tuple(commands.choices))
    return parser


@final
class _CommandParser(argparse.ArgumentParser):
    """Refuses an unknown option first: a misspelt one that is required would be reported as missing."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = [*self._option_string_actions]  # not the strings of `format_usage`, which Python 3.14 colours
        names = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", args)]
        unknown = [name for name in names if re.fullmatch(r"-+[A-Za-z][\w-]*", name) and name not in options]
        if unknown:
            listed = ", ".join(f"{name}{did_you_mean(name, options)}" for name in unknown)
            self.error(f"unknown option {listed} · see '{self.prog} --help'")
        return super().parse_known_args(args, namespace)


def _add_command(
    commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], **texts: Any
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(run=run)
    return parser


def add_train(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "train",
        _train,
        help="train the model of a config file",
        description="Trains the model of a config file, and shows what checkpointing saved.",
        epilog=TRAIN,
    )
    parser.add_argument(
        "--config-file",
        required=True,
        metavar="FILE",
        help="config to run: .py or .yaml, or the name of a packaged one",
    )
    parser.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="run 3 iterations and two evaluations of small batches, to check that all parts work",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume from the last snapshot in train.output_dir; results are bitwise equal to an uninterrupted run",
    )
    parser.add_argument(
        "--eval-only", action="store_true", help="evaluate train.load_weight, or the last snapshot, without training"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every key of the config as YAML, with its default and where it is set, and exit",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the config, such as optim.lr=3e-4"
    )


def add_plan(commands: _Commands) -> None:
    parser = _add_step_command(
        commands,
        "plan",
        _plan,
        budget_help="the peak of the whole step: bytes, 24GiB, 50%% of the device's memory, 0.6 of the plain step's "
        "peak, max (the device's memory less a headroom, the default), or min",
        help="choose the policy of each block for a memory budget",
        description="Chooses the policy of each block so that the step is as fast as possible within a memory budget.",
        epilog=PLAN,
    )
    _add_json(parser)
    parser.add_argument("--save", metavar="FILE", help="write the plan as YAML")
    parser.add_argument("--plot", metavar="FILE", help="draw the step's memory: .png, .svg or .html")
    parser.add_argument("--sweep", metavar="FILE", help="draw peak against step time for all budgets")


def add_fit(commands: _Commands) -> None:
    parser = _add_step_command(
        commands,
        "fit",
        _fit,
        budget_help="the peak of the whole step: bytes, 24GiB, 50%% of the device's memory, or max (that memory less a "
        "headroom, the default)",
        help="find the largest and the fastest batch size for a memory budget",
        description="Finds the largest batch for a memory budget, the fastest one, and the policies of each size.",
        epilog=FIT,
    )
    parser.add_argument(
        "--batch-sizes",
        metavar="SIZES",
        help="micro-batch sizes: 1,2,4,8, or 1:64 to search from 1 to 64; by default the largest that fits is searched",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="samples of one update of a rank: find the fastest micro-batch x accumulation; by default those of the "
        "config",
    )
    parser.add_argument(
        "--sequence-lengths",
        metavar="LENGTHS",
        help="fit for each of these lengths, such as 512,1024, in place of data.seq_length",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="compare layouts of N ranks: data, tensor and pipeline parallelism, and the stages of ZeRO, with the "
        "micro-batch and the samples of an update that the config has",
    )
    parser.add_argument(
        "--layout",
        action="append",
        metavar="SIZES",
        help="with --world-size, a layout to compare: 'dp=8 tp=8 zero=3'; several may be given",
    )
    _add_json(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw throughput, peak and policies over the batch: .png or .svg"
    )


def _add_step_command(
    commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], *, budget_help: str, **texts: Any
) -> argparse.ArgumentParser:
    parser = _add_command(commands, name, run, **texts)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="config of the step: .py or .yaml")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help=_device_help(),
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="cluster profile, for a config of several processes: a packaged name "
        f"({', '.join(packaged_names('cluster'))}), or a file; by default that of the device",
    )
    parser.add_argument("--memory", metavar="SIZE", help="the device's memory in place of its profile's, such as 24GiB")
    parser.add_argument("--memory-budget", default="max", metavar="SIZE", help=budget_help)
    for option, kind, meaning in _planner_options():
        flag: dict[str, Any] = {"metavar": "VALUE", "help": meaning}
        if kind == "bool":
            flag = {"action": argparse.BooleanOptionalAction, "help": meaning}
        elif "Mapping" in kind or "Iterable" in kind:
            example = "loss_head=tiles:8:sum" if "Mapping" in kind else "full, or '{rule: selective, save: matmul}'"
            text = f"{meaning.partition(': ')[0]}: {example}; several may be given"
            flag = {"action": "append", "metavar": "NAME=RULE" if "Mapping" in kind else "RULE", "help": text}
        parser.add_argument(f"--{option.replace('_', '-')}", dest=option, **flag)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    return parser


def _add_json(parser: argparse.ArgumentParser, what: str = "numbers") -> None:
    text = f"print all {what} as JSON to stdout, and nothing else there"
    parser.add_argument("--json", action="store_true", help=text)


def _device_help() -> str:
    names = ", ".join(packaged_names("device"))
    return f"device profile: a packaged name ({names}), or a file of 'graphckpt profile-device'"


def _planner_options() -> Iterator[tuple[str, str, str]]:
    return _options_of("planning/options.py", "PlanOptions")


def _options_of(module: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yields name, type and meaning of each option of a class that is a flag.

    From the text of the class: to import it takes seconds, which ``--help`` can do without.
    """
    text = (Path(__file__).parent / module).read_text(encoding="utf-8")
    (options,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    assert isinstance(options, ast.ClassDef)
    for node, doc in pairwise(options.body):
        if isinstance(node, ast.AnnAssign) and "'command'" not in ast.unparse(node) and isinstance(doc, ast.Expr):
            assert isinstance(node.target, ast.Name)
            meaning = " ".join(re.sub('``True`` or |``|"', "", ast.literal_eval(doc.value)).split())
            sentence, *_ = re.split(r"[.;] |, as ", meaning.removesuffix("."))
            yield node.target.id, ast.unparse(node.annotation), sentence[:1].lower() + sentence[1:]


def add_estimate(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "estimate",
        _estimate,
        help="estimate the memory and the time of training a Transformers model, from its config",
        description="Estimates the memory and the time of a training step of a Transformers model, from its config "
        "alone: with everything kept, with every layer recomputed, and under the best plan for the device.",
        epilog=ESTIMATE,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a name")
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME",
        help=_device_help(),
    )
    for option, _, meaning in _options_of("search/estimate_options.py", "EstimateOptions"):
        parser.add_argument(
            f"--{option.replace('_', '-')}", dest=option, metavar="VALUE", help=meaning.replace("%", "%%")
        )
    _add_json(parser)


def add_profile_device(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "profile-device",
        _profile,
        help="measure the device of this machine for the planner",
        description="Measures the rates and the allocator of a device, and writes a profile for 'graphckpt plan'.",
        epilog=PROFILE,
    )
    parser.add_argument("file", metavar="FILE", help="where to write the profile: a .yaml")
    parser.add_argument("--device", metavar="NAME", help="such as cuda:0; the accelerator by default")
    parser.add_argument("--name", help="the name of the profile")
    parser.add_argument("--seconds", type=float, default=0.5, help="the least time for which each rate is measured")
    parser.add_argument("--folder", help="a folder on the disk to measure")


def add_selftest(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "selftest",
        _selftest,
        help="check on this machine's GPU or CPU that steps under policies equal plain ones",
        description="Checks on a device of this machine that training steps under policies are bitwise equal to plain "
        "ones, and that memory is as predicted.",
        epilog=SELFTEST,
    )
    parser.add_argument("--device", metavar="NAME", help="such as cuda:0 or cpu; the accelerator by default")
    _add_json(parser, "results")


def _train(parsed: argparse.Namespace) -> int:
    if parsed.print_config:
        from graphckpt.config.source import ConfigSource  # noqa: PLC0415 - as below

        source = ConfigSource(parsed.config_file, parsed.overrides, fast_dev_run=parsed.fast_dev_run)
        print(source.describe(), end="")
        return 0
    from graphckpt.config.trainer import trainer_from  # noqa: PLC0415 - seconds of imports that --help can do without

    trainer = trainer_from(
        parsed.config_file,
        parsed.overrides,
        fast_dev_run=parsed.fast_dev_run,
        resume=parsed.resume,
        eval_only=parsed.eval_only,
    )
    is_stopped = False
    if parsed.eval_only:
        trainer.evaluate()
    else:
        is_stopped = trainer.train().is_stopped
    trainer.ranks.close()
    return _INTERRUPTED if is_stopped else 0


def _plan(parsed: argparse.Namespace) -> int:
    from graphckpt.planning.options import check_budget  # noqa: PLC0415
    from graphckpt.planning.plan import save_stages  # noqa: PLC0415

    machine = _machine(parsed)  # it and the budget are checked before the config is imported
    budget = check_budget(parsed.memory_budget)
    if parsed.plot:
        from graphckpt.ledger.plot import file_of  # noqa: PLC0415

        file_of(parsed.plot, has_page=True)  # raises now, not after the measurements
    plans: list[Plan] = []
    values: list[dict[str, Any]] = []
    with CommandProgress() as progress:
        progress.begin("loading the config and its model")
        from graphckpt.config.run import fake_stages_from  # noqa: PLC0415 - takes seconds

        options = _options(parsed)
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


def _machine(parsed: argparse.Namespace) -> DeviceProfile:
    from graphckpt.simulation.profile import load_profile  # noqa: PLC0415 - as above

    require("train", "omegaconf")  # the config needs more than the profile: name the extra that installs both
    machine = load_profile(parsed.device)
    return machine if parsed.memory is None else machine.with_memory(parsed.memory)


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    from graphckpt.planning.options import PlanOptions  # noqa: PLC0415
    from graphckpt.simulation.cluster_profile import load_cluster  # noqa: PLC0415 - as above
    from graphckpt.stores.base import parse_offload  # noqa: PLC0415

    values = {option: value for option, _, _ in _planner_options() if (value := getattr(parsed, option)) is not None}
    if "candidates" in values:
        values["candidates"] = [yaml.safe_load(rule) for rule in values["candidates"]]
    if "head" in values:
        values["head"] = _heads(values["head"])
    PlanOptions.of(values, "plan")  # raises before the config is imported
    try:
        parse_offload(parsed.offload)
    except ConfigError as error:
        raise ConfigError(f"--offload: {error}") from None
    return {"options": values, "cluster": None if parsed.cluster is None else load_cluster(parsed.cluster)}


def _fit(parsed: argparse.Namespace) -> int:
    from graphckpt.planning.options import check_budget  # noqa: PLC0415 - as above

    machine = _machine(parsed)  # it and the budget are checked before the config is imported
    budget = check_budget(parsed.memory_budget, for_fit=True)
    from graphckpt.config.run import fake_steps_from  # noqa: PLC0415

    if parsed.world_size is not None:
        return _compare_layouts(parsed, machine, budget)
    if parsed.layout is not None:
        raise ConfigError("--layout: expected --world-size with it, got none · fix: --world-size 64")
    sizes = None if parsed.batch_sizes is None else batch_sizes_of(parsed.batch_sizes)
    lengths = [None] if parsed.sequence_lengths is None else _numbers(parsed.sequence_lengths, "--sequence-lengths")
    if parsed.plot is not None:
        from graphckpt.ledger.plot import file_of  # noqa: PLC0415

        file_of(parsed.plot)  # raises now, not after the measurements
    fits: list[tuple[int | None, Fit]] = []
    with CommandProgress() as progress:
        for length in lengths:
            progress.begin("loading the config and its model")
            overrides = [*parsed.overrides, *([] if length is None else [f"data.seq_length={length}"])]
            with fake_steps_from(parsed.config_file, overrides, device=machine, **_options(parsed)) as steps:
                fits.append((length, steps.fit(budget, sizes, parsed.global_batch_size, progress.begin)))
    if parsed.json:
        rows = [fit.to_dict() if one is None else {"sequence_length": one, **fit.to_dict()} for one, fit in fits]
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=1), file=parsed.stdout)
    for length, fit in fits:
        if not parsed.json:
            if length is not None:
                print(f"sequence length {length}")
            fit.explain()
        if parsed.plot is not None:
            path = Path(parsed.plot)
            path = fit.plot(path if length is None else path.with_name(f"{path.stem}_{length}{path.suffix}"))
            print(f"drawn: {path}")
    return 0


def _compare_layouts(parsed: argparse.Namespace, machine: DeviceProfile, budget: Budget) -> int:
    from graphckpt.config.layouts import compare_layouts  # noqa: PLC0415 - as above

    fixes = {
        "batch_sizes": "leave it out; the micro-batch is the config's",
        "global_batch_size": f"train.global_batch_size={parsed.global_batch_size}, the samples of all ranks",
        "sequence_lengths": f"data.seq_length={parsed.sequence_lengths}",
        "plot": "leave it out; --json has all numbers",
    }
    for name, fix in fixes.items():
        if getattr(parsed, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: not supported with --world-size · fix: {fix}")
    with CommandProgress() as progress:
        comparison = compare_layouts(
            parsed.config_file,
            parsed.overrides,
            device=machine,
            world_size=parsed.world_size,
            layouts=parsed.layout,
            memory_budget=budget,
            progress=progress.begin,
            **_options(parsed),
        )
    _print_result(comparison, parsed)
    return 0


def _estimate(parsed: argparse.Namespace) -> int:
    from graphckpt.search.estimate_options import EstimateOptions  # noqa: PLC0415

    options = EstimateOptions.of_text(vars(parsed))  # checked before seconds of imports
    from graphckpt.search.estimate import estimate_model  # noqa: PLC0415

    with CommandProgress() as progress:
        estimate = estimate_model(parsed.model, parsed.device, options, progress.begin)
    _print_result(estimate, parsed)
    return 0


def _print_result(result: Estimate | LayoutComparison, parsed: argparse.Namespace) -> None:
    if parsed.json:
        print(json.dumps(result.to_dict(), indent=1), file=parsed.stdout)
    else:
        result.explain()


def _selftest(parsed: argparse.Namespace) -> int:
    from graphckpt.checks import selftest  # noqa: PLC0415 - loads torch
    from graphckpt.graph import Graph  # noqa: PLC0415
    from graphckpt.simulation.write_profile import present_device  # noqa: PLC0415

    began = time.monotonic()
    device = present_device(parsed.device, "--device")
    with CommandProgress("selftest") as progress:
        rows = list(selftest.run(device, Graph, progress.begin))
    seconds, machine = time.monotonic() - began, f"graphckpt {__version__}, {selftest.machine(device)}"
    if parsed.json:
        results = {"machine": machine, "seconds": round(seconds, 1), "checks": [row.as_dict() for row in rows]}
        print(json.dumps(results, indent=2), file=parsed.stdout)
    else:
        print(selftest.report(machine, rows, seconds))
    return _DIFFERS if any(row.is_fault for row in rows) else 0


def _profile(parsed: argparse.Namespace) -> int:
    from graphckpt.simulation.write_profile import write_profile  # noqa: PLC0415 - loads torch

    write_profile(
        parsed.file,
        parsed.device,
        name=parsed.name,
        seconds=parsed.seconds,
        folder=parsed.folder,
        report=partial(print, flush=True),
    )
    print(f"written: {parsed.file} · use it: graphckpt plan --device {parsed.file} ...")
    return 0


def batch_sizes_of(text: str) -> range | list[int]:
    """Reads batch sizes.

    >>> batch_sizes_of("1,2,4"), batch_sizes_of("8:64")
    ([1, 2, 4], range(8, 65))
    """
    first, colon, last = text.partition(":")
    if not colon:
        return _numbers(text, "--batch-sizes")
    (low,), (high,) = _numbers(first, "--batch-sizes", 1), _numbers(last, "--batch-sizes", 1)
    return range(low, high + 1)


def _numbers(text: str, flag: str, count: int = 0) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts) or count not in (0, len(parts)):
        fix = "8,16,32, or 1:64" if flag == "--batch-sizes" else "512,1024"
        raise ConfigError(f"{flag}: expected whole numbers, got {text!r} · fix: {flag} {fix}")
    return [int(part) for part in parts]


def _heads(rules: Iterable[str]) -> dict[str, list[str]]:
    """Reads ``NAME=RULE``, each name with all of its rules.

    >>> _heads(["loss_head=tiles:8:sum", "loss_head=full"])
    {'loss_head': ['tiles:8:sum', 'full']}
    """
    from graphckpt.rules import parse_rule  # noqa: PLC0415 - loads torch

    heads: dict[str, list[str]] = {}
    for text in rules:
        name, _, rule = text.partition("=")
        if not name or not rule:
            raise ConfigError(f"--head: expected NAME=RULE, got {text!r} · fix: --head loss_head=tiles:8:sum")
        try:
            parse_rule(rule)
        except ConfigError as error:
            raise ConfigError(f"--head {text!r}: {error}") from None
        heads.setdefault(name, []).append(rule)
    return heads
