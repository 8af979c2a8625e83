"""What several commands share: their parser, their flags for a step and for plans, and how results are printed."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphckpt.errors import ConfigError
from graphckpt.extras import LazyPackage, require
from graphckpt.simulation.profile_files import packaged_names

if TYPE_CHECKING:
    import yaml

    Commands = argparse._SubParsersAction[Any]
    from graphckpt.search.cards import CardTable
    from graphckpt.search.layout_result import LayoutComparison
    from graphckpt.simulation.profile import DeviceProfile
else:
    yaml = LazyPackage("yaml", "plan")


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], **texts: Any
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser, what: str = "numbers") -> None:
    text = f"print all {what} as JSON to stdout, and nothing else there"
    parser.add_argument("--json", action="store_true", help=text)


def device_help() -> str:
    names = ", ".join(packaged_names("device"))
    return f"device profile: a packaged name ({names}), or a file of 'graphckpt profile-device'"


def add_step_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], *, budget_help: str, **texts: Any
) -> argparse.ArgumentParser:
    parser = add_command(commands, name, run, **texts)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="config of the step: .py or .yaml")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help=device_help(),
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="cluster profile, for a config of several processes: a packaged name "
        f"({', '.join(packaged_names('cluster'))}), or a file; by default that of the device",
    )
    parser.add_argument("--memory", metavar="SIZE", help="the device's memory in place of its profile's, such as 24GiB")
    parser.add_argument("--memory-budget", default="max", metavar="SIZE", help=budget_help)
    for option, kind, meaning in planner_options():
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


def planner_options() -> Iterator[tuple[str, str, str]]:
    return options_of("planning/options.py", "PlanOptions")


def options_of(module: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yields name, type and meaning of each option of a class that is a flag.

    From the text of the class: to import it takes seconds, which ``--help`` can do without.
    """
    # `batch: int = 1`, with the text "Samples of one step, of each rank." below it, is a flag --batch of type "int",
    # whose help is "samples of one step, of each rank": only the first sentence, up to an ", as".
    text = (Path(__file__).parents[1] / module).read_text(encoding="utf-8")
    (options,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    assert isinstance(options, ast.ClassDef)
    for node, doc in pairwise(options.body):
        if isinstance(node, ast.AnnAssign) and "'command'" not in ast.unparse(node) and isinstance(doc, ast.Expr):
            assert isinstance(node.target, ast.Name)
            meaning = " ".join(re.sub('``True`` or |``|"', "", ast.literal_eval(doc.value)).split())
            sentence, *_ = re.split(r"[.;] |, as ", meaning.removesuffix("."))
            yield node.target.id, ast.unparse(node.annotation), sentence[:1].lower() + sentence[1:]


def machine_of(parsed: argparse.Namespace) -> DeviceProfile:
    from graphckpt.simulation.profile import load_profile  # noqa: PLC0415 - takes seconds

    require("train", "omegaconf")  # the config needs more than the profile: name the extra that installs both
    machine = load_profile(parsed.device)
    return machine if parsed.memory is None else machine.with_memory(parsed.memory)


def step_options(parsed: argparse.Namespace) -> dict[str, Any]:
    from graphckpt.planning.options import PlanOptions  # noqa: PLC0415
    from graphckpt.simulation.cluster_profile import load_cluster  # noqa: PLC0415 - as above
    from graphckpt.stores.base import parse_offload  # noqa: PLC0415

    values = {option: value for option, _, _ in planner_options() if (value := getattr(parsed, option)) is not None}
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


def print_result(result: CardTable | LayoutComparison, parsed: argparse.Namespace) -> None:
    if parsed.json:
        print(json.dumps(result.to_dict(), indent=1), file=parsed.stdout)
    else:
        result.explain()
