"""A process that imports once and then runs the command line in children that it kills; not a test itself.

Reads one JSON object a line: ``words`` for the command line, ``folder`` of the run, and for a kill ``when``, the
pattern of a file in the folder that starts the clock, and ``after`` how many seconds; or ``dies_at``, the number of the
call that changes a name or waits for the disk before which the child ends. Answers with a line of JSON: the exit code,
or the signal as -9.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import transformers.models.gpt2.modeling_gpt2  # noqa: F401 - seconds, which each child would need otherwise

import graphckpt.config.trainer  # noqa: F401 - before the children start
from graphckpt.cli import main
from graphckpt.ledger.explanation import Explanation
from graphckpt.train.hooks.metrics import ExplainHook
from graphckpt.train.snapshot import folder as snapshot

DIED = 77  # exit code of a child that ended itself
_SYNC_SECONDS = 0.002  # a slow disk, so that there is time to be killed in the midst of a snapshot


def _slowly(sync: Callable[[Path], None]) -> Callable[[Path], None]:
    def slow_sync(path: Path) -> None:
        time.sleep(_SYNC_SECONDS)
        sync(path)

    return slow_sync


def _dying(module: ModuleType, name: str, calls: Iterator[int], number: int) -> None:
    call = getattr(module, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os._exit(DIED)
        return call(*args, **kwargs)

    setattr(module, name, dying)


def _child(order: dict[str, Any]) -> None:
    if order.get("dies_at") is not None:
        calls = itertools.count()
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "ftruncate"):
            _dying(os, name, calls, order["dies_at"])
        _dying(torch, "save", calls, order["dies_at"])
        _dying(snapshot, "save_file", calls, order["dies_at"])
    if order.get("when"):
        snapshot.sync = _slowly(snapshot.sync)
    if order.get("draws"):
        Explanation.plot = lambda explanation, path: Path(path).write_text(str(explanation.title))
    else:
        ExplainHook.after_train = lambda self, loop: None  # a picture takes longer than all of the run
    with Path(order["output"]).open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os._exit(main(order["words"]))


def _run(order: dict[str, Any]) -> int:
    pid = os.fork()
    if not pid:
        try:
            _child(order)
        finally:
            os._exit(99)
    ended, status = 0, 0
    if order.get("when"):
        while not ended and not any(Path(order["folder"]).glob(order["when"])):
            time.sleep(0.0005)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            time.sleep(order["after"])
            os.kill(pid, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
