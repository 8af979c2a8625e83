"""``graphckpt find-batch-size``: finds the largest and the fastest batch, and compares layouts of a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from graphckpt.commands.common import add_json, add_step_command, machine_of, print_result, step_options
from graphckpt.errors import ConfigError
from graphckpt.progress import CommandProgress

if TYPE_CHECKING:
    from graphckpt.budget import Budget
    from graphckpt.commands.common import Commands
    from graphckpt.search.fit_result import Fit
    from graphckpt.simulation.profile import DeviceProfile

_EPILOG = """\
examples:
  graphckpt find-batch-size --config-file configs/gpt2_pretrain.py --device h200
  graphckpt find-batch-size --config-file configs/gpt2_pretrain.py --device rtx4090 \\
      --global-batch-size 512 --plot fit.png
  graphckpt find-batch-size --config-file configs/gpt2_pretrain.py --device a100-80g --memory-budget 40GiB \\
      --batch-sizes 8,16,32
  graphckpt find-batch-size --config-file configs/gpt2_pretrain.py --device h200 --batch-sizes 1:64 --json
  graphckpt find-batch-size --config-file configs/llama_pretrain.py --device h100 --sequence-lengths 1024,2048,4096
  graphckpt find-batch-size --config-file configs/gpt2_pretrain.py --device h200 \\
      task.loss_head=True --head loss_head=tiles:8:sum
  graphckpt find-batch-size --config-file configs/llama_pretrain.py --device h200 --world-size 64 \\
      train.global_batch_size=256
  graphckpt find-batch-size --config-file configs/llama_pretrain.py --device h200 --world-size 16 \\
      train.global_batch_size=64 --layout "dp=16 zero=3" --layout "dp=4 tp=4 zero=2"

The device may be absent, and no tensor allocates memory. With train.dist and train.zero_optimization the step and its
batch sizes are those of one rank. The step is simulated at each batch size of the table, under all policies and then
under its plan. The largest batch is exact: with one sample more, no plan fits. With --world-size layouts are compared
instead, of which at most 12 are simulated.

exit codes: 0 done, 2 invalid input, such as a budget that no batch fits, 130 stopped by Ctrl-C
"""


def add_find_batch_size(commands: Commands) -> None:
    parser = add_step_command(
        commands,
        "find-batch-size",
        _find_batch_size,
        aliases=["fit"],
        budget_help="the peak of the whole step: bytes, 24GiB, 50%% of the device's memory, or max (that memory less a "
        "headroom, the default)",
        help="find the largest and the fastest batch size for a memory budget",
        description="Finds the largest batch for a memory budget, the fastest one, and the policies of each size.",
        epilog=_EPILOG,
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
    add_json(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw throughput, peak and policies over the batch: .png or .svg"
    )


def _find_batch_size(parsed: argparse.Namespace) -> int:
    from graphckpt.budget import check_budget  # noqa: PLC0415 - as above

    machine = machine_of(parsed)  # it and the budget are checked before the config is imported
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
            with fake_steps_from(parsed.config_file, overrides, device=machine, **step_options(parsed)) as steps:
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
            **step_options(parsed),
        )
    print_result(comparison, parsed)
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
