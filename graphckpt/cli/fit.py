"""The command ``graphckpt fit``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphckpt.cli.plan import Progress, add_command, budget_of, plan_options_of

if TYPE_CHECKING:
    from graphckpt.planning.fit.result import Fit

_EXAMPLES = """\
examples:
  graphckpt fit --config-file configs/gpt2_pretrain.py --device h200
  graphckpt fit --config-file configs/gpt2_pretrain.py --device rtx4090 --global-batch-size 512 --plot fit.png
  graphckpt fit --config-file configs/gpt2_pretrain.py --device a100-80g --memory-budget 40GiB --batch-sizes 8,16,32
  graphckpt fit --config-file configs/gpt2_pretrain.py --device h200 --batch-sizes 1:64 --json
  graphckpt fit --config-file configs/llama_pretrain.py --device h100 --sequence-lengths 1024,2048,4096
  graphckpt fit --config-file configs/gpt2_pretrain.py --device h200 task.loss_head=True --head loss_head=tiles:8:sum

The device need not be present, and no tensor allocates memory. The step is simulated at each batch size of the table,
under all policies and then under its plan. The largest batch is exact: with one sample more, no plan fits.

exit codes: 0 done, 2 invalid input, such as a budget that no batch fits, 130 stopped by Ctrl-C
"""


def add_fit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``graphckpt fit``."""
    parser = add_command(
        commands,
        "fit",
        budget_help="the peak of the whole step: bytes, 24GiB, max (all memory of the device, the default), or 50%% of "
        "that",
        help="find the largest and the fastest batch size for a memory budget",
        description="Finds the largest batch for a memory budget, the fastest one, and the policies of each size.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--batch-sizes",
        default=None,
        metavar="SIZES",
        help="micro-batch sizes: 1,2,4,8, or 1:64 to search from 1 to 64; by default the largest that fits is searched",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int,
        default=None,
        metavar="N",
        help="samples of one update: find the fastest micro-batch x accumulation; by default that of the config",
    )
    parser.add_argument(
        "--sequence-lengths",
        default=None,
        metavar="LENGTHS",
        help="fit for each of these lengths, such as 512,1024, in place of data.seq_length",
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, and no table")
    parser.add_argument(
        "--plot", default=None, metavar="FILE", help="draw throughput, peak and policies over the batch: .png or .svg"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.set_defaults(run=_fit)


def _fit(parsed: argparse.Namespace) -> int:
    from graphckpt.config.planning import fit_from  # noqa: PLC0415 - seconds of imports that --help can do without
    from graphckpt.planning.fit.search import check_fit_budget  # noqa: PLC0415

    budget = check_fit_budget(budget_of(parsed.memory_budget))
    sizes = None if parsed.batch_sizes is None else batch_sizes_of(parsed.batch_sizes)
    lengths = [None] if parsed.sequence_lengths is None else _numbers(parsed.sequence_lengths, "--sequence-lengths")
    if parsed.plot is not None:
        from graphckpt.ledger.plot import file_of  # noqa: PLC0415

        file_of(parsed.plot)  # raises now, not after the measurements
    found: list[tuple[int | None, Fit]] = []
    with Progress() as progress:
        for length in lengths:
            progress.begin("loading the config and its model")
            fit = fit_from(
                parsed.config_file,
                [*parsed.overrides, *([] if length is None else [f"data.seq_length={length}"])],
                device=parsed.device,
                memory_budget=budget,
                batch_sizes=sizes,
                global_batch=parsed.global_batch_size,
                options=plan_options_of(parsed),
                progress=progress.begin,
            )
            found.append((length, fit))
    if parsed.json:
        print(json.dumps(_as_json(found), indent=1))
    for length, fit in found:
        if not parsed.json:
            if length is not None:
                print(f"sequence length {length}")
            fit.explain()
        if parsed.plot is not None:
            path = fit.plot(_with_length(Path(parsed.plot), length))
            print(f"drawn: {path}", file=sys.stderr if parsed.json else sys.stdout)
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


def _numbers(text: str, flag: str, count: int | None = None) -> list[int]:
    from graphckpt.errors import ConfigError  # noqa: PLC0415

    words = text.split(",")
    if not all(word.strip().isdigit() for word in words) or count not in (None, len(words)):
        fix = "8,16,32, or 1:64" if flag == "--batch-sizes" else "512,1024"
        raise ConfigError(f"{flag}: expected whole numbers, got {text!r} · fix: {flag} {fix}")
    return [int(word) for word in words]


def _as_json(found: list[tuple[int | None, Fit]]) -> Any:
    each = [fit.to_dict() if length is None else {"sequence_length": length, **fit.to_dict()} for length, fit in found]
    return each[0] if len(each) == 1 else each


def _with_length(path: Path, length: int | None) -> Path:
    return path if length is None else path.with_name(f"{path.stem}_{length}{path.suffix}")
