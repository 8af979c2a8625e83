"""The command line of ``graphckpt``: joins the commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import takewhile
from typing import Any, final

from rich.console import Console

from graphckpt import __version__
from graphckpt.commands.estimate import add_estimate
from graphckpt.commands.find_batch_size import add_find_batch_size
from graphckpt.commands.plan import add_plan
from graphckpt.commands.profile_device import add_profile_device
from graphckpt.commands.selftest import add_selftest
from graphckpt.commands.train import INTERRUPTED, add_train
from graphckpt.errors import GraphckptError, did_you_mean

_FAULT = 2  # exit code for user errors, as in argparse


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
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: PLC0415 - of torch

            get_error_handler().record_exception(error)
        return _FAULT
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", style="yellow")
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphckpt",
        description="Choose, block by block, what a PyTorch training step saves, recomputes or offloads.",
    )
    parser.add_argument("--version", action="version", version=f"graphckpt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=_CommandParser)
    for add in (add_train, add_plan, add_find_batch_size, add_estimate, add_selftest, add_profile_device):
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
