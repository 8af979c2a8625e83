"""The commands ``graphckpt plan`` and ``graphckpt profile-device``."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, final

from graphckpt.extras import LazyPackage

if TYPE_CHECKING:
    import yaml

    from graphckpt.planning.planner import Planners
else:
    yaml = LazyPackage("yaml", "plan")

_PLAN_EXAMPLES = """\
examples:
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget 24GiB
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget 48GiB \\
      train.train_micro_batch_size=64
  graphckpt plan --config-file configs/llama_pretrain.py --device rtx4090 --memory-budget max --offload cpu
  graphckpt plan --config-file configs/gpt2_pretrain.py --device a100-80g --memory-budget 50% --save plan.yaml
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --sweep front.png
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget min \\
      --head loss_head=tiles:8:sum task.loss_head=True

The device need not be present, and no tensor allocates memory. The file of --save has a section `blocks` for
train.activation_checkpoint.

exit codes: 0 done, 2 invalid input, such as a budget that no plan fits, 130 stopped by Ctrl-C
"""

_PROFILE_EXAMPLES = """\
examples:
  graphckpt profile-device my_gpu.yaml
  graphckpt profile-device my_cpu.yaml --device cpu --seconds 0.1
  graphckpt plan --config-file quickstart.py --device my_gpu.yaml

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C
"""


_FLAGS: dict[str, dict[str, Any]] = {
    "offload": {"metavar": "TARGET", "help": "where saved tensors may go: cpu or disk"},
    "host_budget": {"metavar": "SIZE", "help": "the most bytes that may be offloaded at a time, such as 64GiB"},
    "candidates": {
        "action": "append",
        "metavar": "RULE",
        "help": "a rule to consider beside keep, such as full or '{rule: selective, save: matmul}'; several may be "
        "given; all by default",
    },
    "head": {
        "action": "append",
        "metavar": "NAME=RULE",
        "help": "the block that computes the loss and how it may run beside whole, such as loss_head=tiles:8:sum: in 8 "
        "slices whose losses are added up; several may be given, to choose from",
    },
    "contiguous": {"action": argparse.BooleanOptionalAction, "help": "keep the saved tensors of each layer in a slab"},
}
"""How each option of :class:`~graphckpt.planning.PlanOptions` is given on the command line."""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``graphckpt plan``."""
    parser = add_command(
        commands,
        "plan",
        budget_help="the peak of the whole step: bytes, 24GiB, max (all memory of the device, the default), min, or "
        "50%% of the activations of the plain step",
        help="choose the policy of each block for a memory budget",
        description="Chooses the policy of each block so that the step is as fast as possible within a memory budget.",
        epilog=_PLAN_EXAMPLES,
    )
    parser.add_argument("--save", default=None, metavar="FILE", help="write the plan as YAML")
    parser.add_argument("--plot", default=None, metavar="FILE", help="draw the step's memory: .png, .svg or .html")
    parser.add_argument("--sweep", default=None, metavar="FILE", help="draw peak against step time for all budgets")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.set_defaults(run=_plan)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, *, budget_help: str, **texts: Any
) -> argparse.ArgumentParser:
    """Adds a command that simulates the step of a config: with its device, its budget, and the planner's options."""
    parser = commands.add_parser(
        name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.add_argument("--config-file", required=True, metavar="FILE", help="config of the step: .py or .yaml")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="device profile: a packaged name (a100-80g, h100, h200, rtx3090, rtx4090, cpu), or a file of "
        "'graphckpt profile-device'",
    )
    parser.add_argument("--memory-budget", default=None, metavar="SIZE", help=budget_help)
    for option, flag in _FLAGS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", dest=option, default=None, **flag)
    return parser


def plan_options_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the planner that are given."""
    given = {name: getattr(parsed, name) for name in _FLAGS}
    return {name: _READ.get(name, lambda value: value)(value) for name, value in given.items() if value is not None}


def add_profile_device(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``graphckpt profile-device``."""
    parser = commands.add_parser(
        "profile-device",
        allow_abbrev=False,
        help="measure the device of this machine for the planner",
        description="Measures the rates and the allocator of a device, and writes a profile for 'graphckpt plan'.",
        epilog=_PROFILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="where to write the profile: a .yaml")
    parser.add_argument("--device", default=None, metavar="NAME", help="such as cuda:0; the accelerator by default")
    parser.add_argument("--name", default=None, help="the name of the profile")
    parser.add_argument("--seconds", type=float, default=0.5, help="the least time for which each rate is measured")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    parser.set_defaults(run=_profile)


def _plan(parsed: argparse.Namespace) -> int:
    from graphckpt.config.planning import planner_from  # noqa: PLC0415 - seconds of imports that --help can do without
    from graphckpt.planning.budget import check_budget  # noqa: PLC0415
    from graphckpt.units import format_bytes  # noqa: PLC0415

    budget = check_budget(budget_of(parsed.memory_budget))
    options = plan_options_of(parsed)
    with Progress() as progress:
        progress.begin("loading the config and its model")
        planner, target = planner_from(
            parsed.config_file,
            parsed.overrides,
            device=parsed.device,
            options=options,
            progress=lambda done, total: progress.begin(f"simulated run {done} of {total}"),
        )
        if parsed.memory_budget is None:
            size = format_bytes(target.memory_bytes)
            print(f"--memory-budget is not set: planning for all memory of {target.name}, {size}", file=sys.stderr)
        progress.begin(f"choosing the policies of {len(planner.plain.measured.names)} blocks")
        if parsed.sweep:
            _sweep(planner, parsed.sweep)
        plan = planner.plan(planner.bytes_of(budget, target.memory_bytes))
    plan.explain()
    if parsed.save:
        plan.save(parsed.save)
        print(f"written: {parsed.save}")
    if parsed.plot:
        plan.plot(parsed.plot)
        print(f"drawn: {parsed.plot}")
    return 0


def _sweep(planner: Planners, path: str) -> None:
    from graphckpt.planning.show.plot import draw_sweep  # noqa: PLC0415 - loads matplotlib
    from graphckpt.planning.show.table import print_sweep  # noqa: PLC0415

    front = planner.front()
    uniform = planner.uniform()
    print_sweep([(peak, seconds, plan.rows) for peak, seconds, plan in front], uniform)
    draw_sweep([(peak, seconds) for peak, seconds, _ in front], uniform, path)
    print(f"drawn: {path}")


def _profile(parsed: argparse.Namespace) -> int:
    from graphckpt.planning.device.write_profile import write_profile  # noqa: PLC0415 - loads torch

    write_profile(
        parsed.file,
        parsed.device,
        name=parsed.name,
        seconds=parsed.seconds,
        folder=parsed.folder,
        report=lambda line: print(line, flush=True),
    )
    print(f"written: {parsed.file} · use it: graphckpt plan --device {parsed.file} ...")
    return 0


def budget_of(text: str | None) -> int | float | str:
    """Reads numbers, for on a command line all is text; without a budget it is ``"max"``."""
    if text is None:
        return "max"
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return number if "." in text else int(number)


def _rules(words: Iterable[str]) -> list[Any]:
    """Reads rules: a name, or a mapping in YAML.

    >>> _rules(["full", "{rule: selective, save: matmul}"])
    ['full', {'rule': 'selective', 'save': 'matmul'}]
    """
    return [yaml.safe_load(word) for word in words]


def _heads(words: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Reads ``NAME=RULE``, where ``tiles`` may have a number of slices and how to join their results behind it.

    >>> _heads(["loss_head=tiles:8:sum"])
    {'loss_head': [{'rule': 'tiles', 'num_tiles': 8, 'reduce': 'sum'}]}
    """
    from graphckpt.errors import ConfigError  # noqa: PLC0415
    from graphckpt.rules import parse_rule  # noqa: PLC0415 - loads torch

    found: dict[str, list[dict[str, Any]]] = {}
    for word in words:
        name, _, text = word.partition("=")
        rule, *settings = text.split(":")
        if not name or not rule:
            raise ConfigError(f"--head: expected NAME=RULE, got {word!r} · fix: --head loss_head=tiles:8:sum")
        fields: dict[str, Any] = {"rule": rule}
        fields |= {"num_tiles" if s.isdigit() else "reduce": int(s) if s.isdigit() else s for s in settings}
        try:
            parse_rule(fields)
        except ConfigError as error:
            raise ConfigError(f"--head {word!r}: {error}") from None
        found.setdefault(name, []).append(fields)
    return found


_PATIENCE = 2.0
"""The seconds after which a command says what it is doing."""

_READ: dict[str, Callable[[Any], Any]] = {"candidates": _rules, "head": _heads}


@final
class Progress:
    """Prints on stderr what is being done, once it has taken a while, and ends it on Ctrl-C.

    Python swallows a ``KeyboardInterrupt`` that is raised within a destructor: it is then raised where the next thing
    begins.
    """

    def __init__(self) -> None:
        self._is_interrupted = False
        self._handles_interrupts = False
        self._began = time.monotonic()
        self._text = ""
        self._timer = threading.Timer(_PATIENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        """Starts the clock."""
        self._timer.start()
        if threading.current_thread() is threading.main_thread():  # others cannot set a handler
            self._handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._handles_interrupts:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Prints nothing more."""
        self._timer.cancel()
        if self._handles_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self._check_interrupts()

    def _interrupt(self, *_: object) -> None:
        self._is_interrupted = True
        raise KeyboardInterrupt

    def _check_interrupts(self) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt

    def begin(self, text: str) -> None:
        """Names what begins now."""
        self._check_interrupts()
        self._text = text
        if time.monotonic() - self._began >= _PATIENCE:
            self._show()

    def _show(self) -> None:
        print(f"planning, {time.monotonic() - self._began:.0f} s: {self._text}", file=sys.stderr, flush=True)
