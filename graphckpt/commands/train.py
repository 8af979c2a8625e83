"""``graphckpt train``: trains the model of a config file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from graphckpt.commands.common import add_command

if TYPE_CHECKING:
    from graphckpt.commands.common import Commands

_EPILOG = """\
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
      'train.activation_checkpoint.policies={"transformer.h.*": {"activation_checkpointing": "selective"}}'

sections of a config:
  data    texts or a data set, tokenizer, sequence length
  model   the model and its arguments
  optim   the optimizer and its arguments, weight decay, gradient clipping
  train   iterations, batch sizes, evaluation, snapshots, parallelism, train.activation_checkpoint
  task    how the loss is computed
  hooks   more hooks of the training loop

--print-config lists every key with its value. "Config keys" in the docs describes them. The packaged configs
(quickstart, bert_large_pretrain, gpt2_pretrain, llama_pretrain, text_classification) are found by name from any folder:
--config-file quickstart.py. Unknown keys and values of the wrong type are reported before anything runs.

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C after a snapshot
"""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""


def add_train(commands: Commands) -> None:
    parser = add_command(
        commands,
        "train",
        _train,
        help="train the model of a config file",
        description="Trains the model of a config file, and shows what checkpointing saved.",
        epilog=_EPILOG,
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
    return INTERRUPTED if is_stopped else 0
