"""Runs random programmes for a time or over a range of seeds, and prints a script for each kind of failure.

python tests/fuzz/run.py --minutes 30 --workers 2
python tests/fuzz/run.py --seeds 0:300
python tests/fuzz/run.py --seed 17
python tests/fuzz/run.py --minutes 30 --device simulated

On the simulated CUDA device, each seed runs under a schedule of its own: lazy, eager, or random.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
if "simulated" in sys.argv:  # before PyTorch is imported, which looks for CUDA then
    from simulated_cuda.bindings import install_on_import
    from simulated_cuda.library import load, use_schedule

    load()
    install_on_import()

import torch

from fuzz.execute import Outcome, execute, execute_apart, execute_captured
from fuzz.programme import CONTAINERS, LAYERS, RULES, SHAPES, Programme, generate, is_left_out, nodes
from fuzz.script import script_of
from fuzz.shrink import shrink

Run = Callable[[Programme], Outcome]
_SECONDS = 60  # for one programme, which takes some milliseconds


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    for name in arguments.without:
        for kinds in (LAYERS, CONTAINERS, SHAPES):
            kinds.pop(name, None)  # type: ignore[attr-defined]
        RULES[:] = [rule for rule in RULES if name.lower() not in rule.lower()]
    how = partial(execute_captured if arguments.captured else execute, determinism_check=arguments.determinism_check)
    if arguments.worker:
        return _work(*arguments.worker, minutes=arguments.minutes, execute=how)
    if arguments.seed is not None:
        return _run_one(arguments.seed, partial(_run_scheduled, arguments.seed, how))
    return _Run(arguments).run()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--seed", type=int, help="one seed: its outcome, and the smallest programme that fails so")
    how.add_argument("--seeds", help="a range, such as 0:300")
    parser.add_argument("--minutes", type=float, default=None, help="how long to go on, from a seed made of the time")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--device", choices=["cpu", "simulated"], default="cpu", help="where the models are")
    parser.add_argument("--captured", action="store_true", help="captured steps alone; on the simulated device")
    parser.add_argument(
        "--determinism-check", choices=["none", "default", "values"], default="default", help="what policies compare"
    )
    parser.add_argument("--without", nargs="*", default=[], help="kinds of layers, steps, rules to leave out")
    parser.add_argument("--scripts", type=Path, help="a folder for the scripts, which are printed otherwise")
    parser.add_argument("--worker", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if all(end is None for end in (arguments.seed, arguments.seeds, arguments.minutes, arguments.worker)):
        arguments.minutes = 30.0
    return arguments


class _Run:
    """Several workers, and what they have found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._counts: collections.Counter[str] = collections.Counter()
        self._families: collections.Counter[str] = collections.Counter()
        self._seeds_of: dict[str, list[int]] = collections.defaultdict(list)
        self._lock = threading.Lock()

    def run(self) -> int:
        arguments = self._arguments
        seeds = map(int, arguments.seeds.split(":")) if arguments.seeds else (int(time.time()) % 10**7 * 1000, 2**62)
        first, end = seeds
        begin = time.monotonic()
        print(f"from seed {first} on, {arguments.workers} workers", flush=True)
        threads = [threading.Thread(target=self._drive, args=(first + i, end)) for i in range(arguments.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = ", ".join(f"{count} {kind}" for kind, count in self._counts.most_common())
        print(f"{sum(self._counts.values())} programmes in {time.monotonic() - begin:.0f} s: {counts}")
        valid = self._counts["same"] + self._counts["documented"]
        print(f"refused as documented: {self._counts['documented']} of {valid} that are the same or refused")
        for family, count in self._families.most_common():
            print(f"  {count} x {family}")
        for key, seeds in self._seeds_of.items():
            print(f"  {len(seeds)} x {key}: seeds {', '.join(map(str, seeds[:8]))}")
        return 1 if self._seeds_of else 0

    def _drive(self, seed: int, end: int) -> None:
        """Has one worker run every so many-th seed, and starts another one in its place when it dies."""
        arguments = self._arguments
        until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
        while seed < end and (until is None or time.monotonic() < until):
            words = self._command("--worker", str(seed), str(end), str(arguments.workers))
            if until is not None:
                words += ["--minutes", str((until - time.monotonic()) / 60)]
            with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
                assert worker.stdout is not None
                assert worker.stderr is not None
                is_running = False
                for line in worker.stdout:
                    told = json.loads(line)
                    seed, is_running = told["seed"], "kind" not in told
                    if not is_running:
                        self._note(told)
                error = worker.stderr.read()
            if worker.returncode and not is_running:
                raise RuntimeError(error)
            if is_running:
                one = subprocess.run(self._command("--seed", str(seed)), capture_output=True, text=True, check=False)
                self._note({"seed": seed, "kind": "died", "key": "died", "script": error + one.stdout})
            elif not worker.returncode:
                return
            seed += arguments.workers

    def _command(self, *words: str) -> list[str]:
        arguments = self._arguments
        settings = ["--device", arguments.device, "--determinism-check", arguments.determinism_check]
        settings += [*["--captured"] * arguments.captured, "--without", *arguments.without]
        return [sys.executable, __file__, *settings, *words]

    def _note(self, told: dict[str, Any]) -> None:
        with self._lock:
            self._counts[told["kind"]] += 1
            if told.get("family"):
                self._families[told["family"]] += 1
            if not told.get("key"):
                return
            self._seeds_of[told["key"]].append(told["seed"])
            if len(self._seeds_of[told["key"]]) > 1:
                return
            if (folder := self._arguments.scripts) is None:
                print(f"\n{told['script']}", flush=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{told['seed']}.py").write_text(told["script"], encoding="utf-8")
                print(f"seed {told['seed']}: {told['key']}", flush=True)


def _work(seed: int, end: int, stride: int, *, minutes: float | None, execute: Run) -> int:
    """Runs seeds, and writes a line before and after each."""
    until = None if minutes is None else time.monotonic() + 60 * minutes
    faulthandler.enable()
    while seed < end and (until is None or time.monotonic() < until):
        print(json.dumps({"seed": seed}), flush=True)
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        programme, run = generate(seed), partial(_run_scheduled, seed, execute)
        outcome = run(programme)
        told = {"seed": seed, "kind": outcome.kind, "family": outcome.where if outcome.kind == "documented" else ""}
        if outcome.failed:
            faulthandler.dump_traceback_later(20 * _SECONDS, exit=True)
            small = shrink(programme, lambda other, like=outcome: run(other).is_like(like), most=300)
            outcome = run(small)
            told |= {"key": _key(small, outcome), "script": script_of(small, outcome, f"seed {seed}")}
        print(json.dumps(told), flush=True)
        seed += stride
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # threads of stores that a failure has left need not be waited for


def _run_scheduled(seed: int, execute: Run, programme: Programme) -> Outcome:
    """Runs a programme under the schedule of a seed, from its beginning, if the device is simulated."""
    if is_left_out(programme):
        return Outcome("invalid", "its plain step is not determined")
    if "simulated" in sys.argv:
        with suppress(RuntimeError):  # which the device raises late, in an invalid programme before this one
            torch.cuda.synchronize()
        use_schedule(("lazy", "eager", f"random:{seed}", f"random:{seed + 1}")[seed % 4])
    return execute(programme)


def _key(programme: Programme, outcome: Outcome) -> str:
    """Names what failures with one cause have in common, as a rule."""
    kinds = sorted({node.kind for node in nodes(programme.root)} - {"Linear", "Chain"})
    values = {dict(fields).get("activation_checkpointing", "a store") for fields in programme.rules().values()}
    rules = sorted(value.partition("(")[0] for value in values)
    shapes = sorted({step.shape for step in programme.steps} - {"plain"})
    return " ".join([outcome.kind, *kinds, "under", *dict.fromkeys(rules), *shapes])


def _run_one(seed: int, run: Run) -> int:
    """Runs one seed, each programme in a process of its own."""
    programme = generate(seed)
    outcome = execute_apart(programme, seconds=_SECONDS, execute=run)
    print(f"seed {seed}: {json.dumps(asdict(outcome))}")
    if not outcome.failed:
        return 0
    apart = partial(execute_apart, seconds=5, execute=run)
    small = shrink(programme, lambda p: apart(p).is_like(outcome), most=150 if outcome.kind == "died" else 500)
    print(f"\n{script_of(small, apart(small), f'seed {seed}')}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
