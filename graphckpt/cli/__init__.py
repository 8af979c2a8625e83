"""The command line: ``graphckpt train --config-file configs/quickstart.py``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from graphckpt.cli.fit import add_fit
from graphckpt.cli.plan import add_plan, add_profile_device
from graphckpt.errors import GraphckptError

_FAULT = 2  # exit code for user errors, as in argparse
_INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT, as in shells

_TRAIN_EXAMPLES = """\
examples:
  graphckpt train --config-file configs/quickstart.py
  graphckpt train --config-file configs/quickstart.py --fast-dev-run
  graphckpt train --config-file configs/quickstart.py --resume
  graphckpt train --config-file configs/quickstart.py --eval-only
  graphckpt train --config-file configs/quickstart.py train.train_iter=1000 optim.lr=3e-4
  graphckpt train --config-file configs/quickstart.py 'data.paths=[~/texts, notes.txt]'
  graphckpt train --config-file configs/quickstart.py train.activation_checkpoint.enabled=False
  torchrun --nproc-per-node 2 -m graphckpt train --config-file configs/quickstart.py train.dist.tensor_parallel_size=2
  graphckpt train --config-file configs/quickstart.py \\
      'train.activation_checkpoint.blocks={"transformer.h.*": {"activation_checkpointing": "selective"}}'

sections of a config:
  data    texts or a data set, tokenizer, sequence length
  model   the model and its arguments
  optim   the optimizer and its arguments, weight decay, gradient clipping
  train   iterations, batch sizes, evaluation, snapshots, parallelism, train.activation_checkpoint
  task    how the loss is computed
  hooks   more hooks of the training loop

--print-config lists every key with its value. docs/reference/config.md describes them. The packaged configs
(quickstart, bert_large_pretrain, gpt2_pretrain, llama_pretrain, text_classification) are found by name from any folder:
--config-file quickstart.py. Unknown keys and values of the wrong type are reported before anything runs.

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C after a snapshot
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 2 for a user error, or 130 after Ctrl-C."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if not hasattr(parsed, "overrides") and rest:
        parser.error(f"unexpected argument {rest[0]!r} · see 'graphckpt {parsed.command} --help'")
    parsed.overrides = getattr(parsed, "overrides", [])
    parsed.overrides += [word for word in rest if not word.startswith("-")]  # flags may be placed between overrides
    if unknown := [word for word in rest if word.startswith("-")]:
        parser.error(f"unknown option {', '.join(unknown)} · see 'graphckpt {parsed.command} --help'")
    try:
        code: int = parsed.run(parsed)
    except GraphckptError as error:
        who = f" on rank {rank}" if (rank := os.environ.get("RANK", "0")) != "0" else ""  # torchrun's name for it
        text = f"error{who}: {error}"
        Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun ends its own report with this
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
    parser.add_argument("--version", action="version", version=f"graphckpt {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_train(commands)
    add_plan(commands)
    add_fit(commands)
    add_profile_device(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train the model of a config file",
        description="Trains the model of a config file, and shows what checkpointing saved.",
        epilog=_TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        help="print the config with the overrides as YAML, and where each value is set, and exit",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the config, such as optim.lr=3e-4"
    )
    parser.set_defaults(run=_train)


def _train(parsed: argparse.Namespace) -> int:
    if parsed.print_config:
        from graphckpt.config.describe import describe_config  # noqa: PLC0415 - as below

        print(describe_config(parsed.config_file, parsed.overrides, fast_dev_run=parsed.fast_dev_run), end="")
        return 0
    from graphckpt.config.run import trainer_from  # noqa: PLC0415 - seconds of imports that --help can do without

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


def _version() -> str:
    try:
        return version("graphckpt")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
