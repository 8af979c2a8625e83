"""Starts ranks on 127.0.0.1 that talk by gloo, and ends them without an abort."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.ranks import start


def launch(check: Callable[..., None], num_ranks: int, folder: Path, *args: Any) -> None:
    """Runs ``check(rank, *args)`` on each rank, and fails if one of them does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start(_rank, (check, num_ranks, port, str(folder), args), num_ranks)
    assert sorted(path.name for path in folder.iterdir()) == [f"{rank} is done" for rank in range(num_ranks)]


def say_done(rank: int, folder: str) -> None:
    """This rank needs the others no more."""
    Path(folder, f"{rank} is done").touch()


def _rank(rank: int, check: Callable[..., None], num_ranks: int, port: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    check(rank, *args)
    # gloo's threads can abort a process that takes its group down while another rank still talks to it: each rank
    # waits for the others' word, and leaves without taking anything down. An error above ends in the usual way.
    say_done(rank, folder)
    deadline = time.monotonic() + 30
    while len(list(Path(folder).iterdir())) < num_ranks and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)
