"""``graphckpt profile-device``: measures the device of this machine, and writes a profile for plans."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from graphckpt.commands.common import add_command

if TYPE_CHECKING:
    from graphckpt.commands.common import Commands

_EPILOG = """\
examples:
  graphckpt profile-device my_gpu.yaml
  graphckpt profile-device my_cpu.yaml --device cpu --seconds 0.1
  graphckpt plan --config-file quickstart.py --device my_gpu.yaml

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C
"""


def add_profile_device(commands: Commands) -> None:
    parser = add_command(
        commands,
        "profile-device",
        _profile,
        help="measure the device of this machine for the planner",
        description="Measures the rates and the allocator of a device, and writes a profile for 'graphckpt plan'.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", metavar="FILE", help="where to write the profile: a .yaml")
    parser.add_argument("--device", metavar="NAME", help="such as cuda:0; the accelerator by default")
    parser.add_argument("--name", help="the name of the profile")
    parser.add_argument("--seconds", type=float, default=0.5, help="the least time for which each rate is measured")
    parser.add_argument("--folder", help="a folder on the disk to measure")


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
