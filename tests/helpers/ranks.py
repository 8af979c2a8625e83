"""Runs a function on several ranks of gloo on this machine; not a test itself."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from graphckpt.ledger.explanation import Explanation
from helpers.subprocess_runner import preload

_SECONDS = 600  # the slowest takes a minute, or five with six other processes on two cores
_SECONDS_TO_NOTICE = 20  # that a rank has failed; the others, in gloo or in a plan, would wait for it for half an hour


def run_on_ranks(
    work: Callable[..., None],
    folder: Path,
    *args: Any,
    joins: bool = True,
    num_ranks: int = 2,
    seconds: float = _SECONDS,
) -> None:
    """Calls ``work(rank, folder, *args)`` on each of several ranks; what one raises is raised here.

    Ranks that do not end within ``seconds`` show where they are, and are an error.

    They have a process group by then, or with ``joins=False`` what torchrun gives to make one.

    gloo's threads can abort a process that takes its group down while another rank still talks to it: each rank waits
    for the others' word, and leaves without taking anything down.
    """
    port = _unused_port()
    for kind in ("is done", "fault of", "stacks of"):  # of an earlier launch in this folder
        for path in folder.glob(f"*{kind}*"):
            path.unlink()
    preload()
    words = (port, num_ranks, work, str(folder), args, joins, seconds)
    start = torch.multiprocessing.start_processes
    context = start(_rank, words, nprocs=num_ranks, join=False, start_method="forkserver")
    assert context is not None
    try:
        while not context.join(grace_period=_SECONDS_TO_NOTICE):
            pass
    except ProcessException as error:
        for path in [*sorted(folder.glob("fault of *")), *sorted(folder.glob("stacks of *"))]:
            error.add_note(path.read_text())
        raise
    assert sorted(path.name for path in folder.glob("* is done")) == [f"{rank} is done" for rank in range(num_ranks)]


def _unused_port() -> int:
    """Returns a port below those that the system gives to connections, such as gloo's, before rank 0 listens on it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # not of a sequence that a test has seeded
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(check: Callable[..., None], num_ranks: int, folder: Path, *args: Any) -> None:
    """Calls ``check(rank, *args)`` on each of several ranks, where warnings are errors."""
    run_on_ranks(_check, folder, check, *args, num_ranks=num_ranks)


def _check(rank: int, _: Path, check: Callable[..., None], *args: Any) -> None:
    warnings.simplefilter("error")
    check(rank, *args)


def _rank(
    rank: int,
    port: int,
    num_ranks: int,
    work: Callable[..., None],
    folder: str,
    args: Any,
    joins: bool,
    seconds: float,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the collector walks what a rank makes, not what it was forked with
    # Ranks that wait for each other end, and show where.
    stacks = os.open(Path(folder, f"stacks of {rank}"), os.O_WRONLY | os.O_CREAT)
    faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
    Explanation.plot = lambda explanation, path: Path(path).touch()  # a plot takes as long as a run
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if joins:
        dist.init_process_group("gloo")
    try:
        work(rank, Path(folder), *args)
    except BaseException:
        Path(folder, f"fault of {rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    say_done(rank, folder)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all(
        Path(folder, f"{other} is done").exists() or Path(folder, f"fault of {other}").exists()
        for other in range(num_ranks)
    ):
        time.sleep(0.05)
    os._exit(0)


def say_done(rank: int, folder: str) -> None:
    """This rank needs the others no more."""
    Path(folder, f"{rank} is done").touch()
