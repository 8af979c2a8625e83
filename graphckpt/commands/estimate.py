"""``graphckpt estimate``: memory and time of training a Transformers model, from its config."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from graphckpt.commands.common import add_command, add_json, device_help, options_of, print_result
from graphckpt.errors import ConfigError
from graphckpt.ledger.table import show
from graphckpt.progress import CommandProgress
from graphckpt.search.trainer_lines import TRAINERS
from graphckpt.simulation.profile_files import profile_path

if TYPE_CHECKING:
    from graphckpt.commands.common import Commands
    from graphckpt.config.model_layouts import LayoutRanking
    from graphckpt.search.estimate_options import EstimateOptions
    from graphckpt.search.estimate_result import Estimate

_EPILOG = """\
examples:
  graphckpt estimate meta-llama/Llama-3.1-8B --device h100 --batch 4 --seq 4096
  graphckpt estimate ./my_model --device rtx4090 --quantization nf4-double --lora 16 --lora-targets all-linear
  graphckpt estimate config.json --device h100 --memory 40GiB --optimizer adamw-fused --autocast bfloat16
  graphckpt estimate google-t5/t5-large --cards --batch 16
  graphckpt estimate meta-llama/Llama-2-13b-hf --device h100 --world-size 64 --nodes 8 --optimizer adamw-fused
  graphckpt estimate google-bert/bert-large-uncased --device a100-80g --batch 64 --policy full --json

MODEL is a folder with a config.json, that file, or the name of a Transformers model in its cache or on the hub. Weights
are not loaded, the code of a model is not run, and no tensor allocates memory. The device may be absent.

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C
"""

_OPTIONS = (
    ("estimate_options", "EstimateOptions"),
    ("finetune_options", "FineTuneOptions"),
    ("loop_options", "LoopOptions"),
)
_METAVARS = {
    "batch": "N", "seq": "TOKENS", "packed": "TOKENS", "dtype": "TYPE", "autocast": "TYPE", "lora": "RANK",
    "policy": "RULE", "memory_budget": "SIZE", "memory": "SIZE", "world_size": "N", "nodes": "N",
    "lora_targets": "NAMES", "lora_dtype": "TYPE", "lora_dropout": "P", "accumulation": "N",
}  # fmt: skip


def add_estimate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "estimate",
        _estimate,
        help="estimate the memory and the time of training a Transformers model, from its config",
        description="Estimates the memory and the time of a training step of a Transformers model, from its config "
        "alone: with everything kept, with every layer recomputed, and under the best plan for the device.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a name")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=device_help(),
    )
    for module, name in _OPTIONS:
        for option, kind, meaning in options_of(f"search/{module}.py", name):
            flag: dict[str, Any] = {"metavar": _METAVARS.get(option, "NAME")}
            if kind == "bool":
                flag = {"action": "store_true", "default": None}
            text = meaning.replace("%", "%%")
            parser.add_argument(f"--{option.replace('_', '-')}", dest=option, help=text, **flag)
    parser.add_argument(
        "--for",
        dest="trainer",
        metavar="TRAINER",
        help=f"also print the lines of Python that train like this: {', '.join(TRAINERS)}",
    )
    parser.add_argument("--save", metavar="FILE", help="write the policies to a .yaml file, for graphckpt.apply")
    parser.add_argument(
        "--cards",
        action="store_true",
        help="compare all device profiles in place of --device: the largest batch on each, or with --batch the time",
    )
    add_json(parser)


def _estimate(parsed: argparse.Namespace) -> int:
    options = _checked_options(parsed)
    if parsed.cards:
        from graphckpt.search.cards import compare_cards  # noqa: PLC0415 - takes seconds

        with CommandProgress() as progress:
            batch = None if parsed.batch is None else options.batch
            table = compare_cards(parsed.model, options, batch, progress.begin)
        print_result(table, parsed)
        return 0
    from graphckpt.search.estimate import estimate_model  # noqa: PLC0415

    ranking: LayoutRanking | None = None
    with CommandProgress() as progress:
        estimate = estimate_model(parsed.model, parsed.device, options, progress.begin, trainer=parsed.trainer)
        if options.world_size is not None and options.world_size > 1:
            ranking = _layouts(parsed, options, estimate, progress)
    if parsed.save is not None:
        estimate.save(parsed.save)
    lines = None if parsed.trainer is None else estimate.lines(parsed.trainer)
    if parsed.json:
        values = estimate.to_dict() | ({} if lines is None else {"trainer": parsed.trainer, "lines": lines})
        values |= {} if ranking is None else {"layouts": ranking.to_dict()}
        print(json.dumps(values, indent=1), file=parsed.stdout)
        return 0
    estimate.explain()
    if ranking is not None:
        show(ranking.renderables())
    if parsed.save is not None:
        print(f"graphckpt.apply(model, {parsed.save!r})")
    if lines is not None:
        print(f"\n# {parsed.trainer}\n{lines}")
    return 0


def _checked_options(parsed: argparse.Namespace) -> EstimateOptions:
    """Returns the options of the step. All that takes no seconds of imports is checked before what takes them."""
    from graphckpt.search.estimate_options import EstimateOptions  # noqa: PLC0415
    from graphckpt.search.trainer_lines import check_policy_file, check_trainer  # noqa: PLC0415

    if parsed.device is None and not parsed.cards:
        fix = "--device h100, or --cards for a table of all devices"
        raise ConfigError(f"--device: expected a device profile, got nothing · fix: {fix}")
    if parsed.cards:
        for flag, value in (("--device", parsed.device), ("--for", parsed.trainer), ("--save", parsed.save)):
            if value is not None:
                raise ConfigError(
                    f"--cards: expected no {flag} with it, got {flag} {value} · fix: leave out one of them"
                )
    else:
        profile_path("device", parsed.device)
    options = EstimateOptions.of_text(vars(parsed))
    if options.cluster is not None:
        profile_path("cluster", options.cluster)
    if parsed.trainer is not None:
        check_trainer(parsed.trainer, options)
    if parsed.save is not None:
        check_policy_file(parsed.save)
    return options


def _layouts(
    parsed: argparse.Namespace, options: EstimateOptions, estimate: Estimate, progress: CommandProgress
) -> LayoutRanking:
    from graphckpt.config.model_layouts import rank_layouts  # noqa: PLC0415 - takes seconds
    from graphckpt.search.estimate import network_of  # noqa: PLC0415
    from graphckpt.simulation.profile import load_profile  # noqa: PLC0415

    machine = load_profile(parsed.device)
    if options.memory is not None:
        machine = machine.with_memory(options.memory)
    network = network_of(options, machine)
    assert network is not None
    fitting = [policy.seconds for policy in estimate.policies.values() if policy.fits]
    seconds = fitting[0] if fitting else None  # with everything kept, if that fits
    return rank_layouts(parsed.model, machine, network, options, simulated_seconds=seconds, begin=progress.begin)
