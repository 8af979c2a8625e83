"""``graphckpt selftest``: checks on a device of this machine that steps under policies equal plain ones."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from graphckpt import __version__
from graphckpt.commands.common import add_command, add_json
from graphckpt.progress import CommandProgress

if TYPE_CHECKING:
    from graphckpt.commands.common import Commands

_DIFFERS = 1  # exit code where a check failed

_EPILOG = """\
examples:
  graphckpt selftest
  graphckpt selftest --device cpu
  graphckpt selftest --json > selftest.json

Small models with dropout, BatchNorm, attention and autocast train under every rule and store, and every bit of their
gradients, weights, buffers and RNG states is compared with the plain step. If the plain step differs from itself, the
ops are named, and compared by tolerance. Then: a captured step, offloading while other streams are busy, predicted and
measured memory, and the rates of copies. It takes less than two minutes, and less than 1 GiB of memory.

exit codes: 0 all checks passed, 1 a check failed, 2 invalid input, 130 stopped by Ctrl-C
"""


def add_selftest(commands: Commands) -> None:
    parser = add_command(
        commands,
        "selftest",
        _selftest,
        help="check on this machine's GPU or CPU that steps under policies equal plain ones",
        description="Checks on a device of this machine that training steps under policies are bitwise equal to plain "
        "ones, and that memory is as predicted.",
        epilog=_EPILOG,
    )
    parser.add_argument("--device", metavar="NAME", help="such as cuda:0 or cpu; the accelerator by default")
    add_json(parser, "results")


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
