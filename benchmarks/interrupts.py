"""Interrupts steps at moments of a timer, as Ctrl-C does, and looks at what is left and at the two steps after each.

A step of a small model under each policy, a call of ``graphckpt.plan``, and, beside them, a step under PyTorch's
checkpoint. After each interrupt: hooks, modes, autocast and grad mode of the thread are as before; buffers are those
before or after the step; the next two steps have the results of a twin that was not interrupted; memory, stores and
threads are as before.

    python benchmarks/interrupts.py [--count 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from report import header, table, write
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.interrupts import POLICIES, Subject

import graphckpt
from graphckpt._compat import NO_MODES
from graphckpt.engine.execution import put_surroundings_back

PEER, PLANNING = "torch.utils.checkpoint", "planning"
SHARE_OF_PLANNING = 5  # a call of it takes as long as a hundred steps


def under_checkpoint(model: nn.Module) -> None:
    for layer in list(model.children())[1:4]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def plan(subject: Subject) -> None:
    step = partial(subject.step, 5)
    graphckpt.plan(subject.model, step, memory_budget="1GiB", select=["1", "2", "3"], progress=False)


class Timer:
    """Interrupts a call at a random moment of the time that it takes."""

    def __init__(self, call: Callable[[], object], moments: random.Random) -> None:
        self._call, self.moments = call, moments
        self._is_armed = False
        begin = perf_counter()
        for _ in range(5):
            call()
        self._seconds = (perf_counter() - begin) / 5

    def interrupts(self) -> bool:
        """Calls once, and returns whether the interrupt came before the end."""
        self._is_armed = True
        previous = signal.signal(signal.SIGALRM, self._raise)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, self.moments.uniform(0, self._seconds)))
            self._call()
            self._is_armed = False
        except KeyboardInterrupt:
            return True
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        return False

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise KeyboardInterrupt


def measure(name: str, count: int, seed: int) -> dict[str, Any]:
    subject = subject_of(name)
    call = partial(plan, subject) if name == PLANNING else partial(subject.step, 5)
    timer = Timer(call, random.Random(f"{name} {seed}"))
    faults: Counter[str] = Counter()
    num_interrupts = num_wrong = 0
    begin = perf_counter()
    while num_interrupts < count:
        came = [False]

        def interrupt(timer: Timer = timer, came: list[bool] = came) -> None:
            came[0] = timer.interrupts()

        # A recomputation of the peer's updates buffers a second time.
        found = subject.faults(interrupt, checks_bytes=num_interrupts % 10 == 0, checks_state=name != PEER)
        num_interrupts += came[0]
        num_wrong += bool(found)
        faults.update(found)
        if found:  # which the interrupts after it would show again
            subject.close()
            put_surroundings_back((None, None, NO_MODES, 0))
            subject = subject_of(name)
            call = partial(plan, subject) if name == PLANNING else partial(subject.step, 5)
            timer = Timer(call, timer.moments)
    subject.close()
    seconds = perf_counter() - begin
    return {"name": name, "interrupts": num_interrupts, "wrong": num_wrong, "faults": faults, "seconds": seconds}


def subject_of(name: str) -> Subject:
    return Subject(under_checkpoint if name == PEER else {} if name == PLANNING else POLICIES[name])


def report(rows: list[dict[str, Any]]) -> str:
    cells = [[row["name"], str(row["interrupts"]), str(row["wrong"]), "; ".join(row["faults"]) or "-"] for row in rows]
    return table(["policy", "interrupts", "wrong after it", "what was wrong"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="interrupts of all policies and planning together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[*POLICIES, PLANNING, PEER], help="policies")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # Python prints an interrupt in a destructor, and goes on
    of_planning = arguments.count // SHARE_OF_PLANNING
    of_policy = -(-(arguments.count - of_planning) // len(POLICIES))
    head = header(count=arguments.count, seed=arguments.seed)
    rows = []
    for name in arguments.only:
        rows.append(measure(name, of_planning if name == PLANNING else of_policy, arguments.seed))
        write("interrupts", head, rows, report(rows))


if __name__ == "__main__":
    main()
