"""Interrupts steps at many moments, and prints what was wrong after each.

python tests/interrupts/run.py --count 5000
python tests/interrupts/run.py --policy disk --every 1
python tests/interrupts/run.py --policy torch.utils.checkpoint
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from interrupts.harness import POLICIES, RIVAL, Fault, Trial

_SECONDS = 60  # an interrupted step and the one after it take some milliseconds; else they hang


def main() -> int:
    """Returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="random moments, over all policies")
    parser.add_argument("--every", type=int, help="not at random, but at every so many-th moment of a step")
    parser.add_argument("--policy", choices=[*POLICIES, RIVAL], action="append", help="all but the last if not given")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random moments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    policies = arguments.policy or list(POLICIES)
    num_faults = 0
    for number, policy in enumerate(policies):
        trial = Trial(policy, arguments.seed + number, autocast=bool(number % 2))
        count = arguments.count // len(policies)
        begin = time.monotonic()
        groups: dict[tuple[str, ...], list[Fault]] = collections.defaultdict(list)
        num = 0
        for fault in _all(trial, arguments.every) if arguments.every else _random(trial, count):
            faulthandler.dump_traceback_later(_SECONDS, exit=True)
            num += 1
            if fault is not None:
                groups[fault.kind].append(fault)
        faults = sum(map(len, groups.values()))
        num_faults += faults
        print(
            f"{policy}: {num} interrupts in {time.monotonic() - begin:.0f} s, {faults} with faults; {trial.outside} "
            f"where the engine did not run, {trial.swallowed} that Python swallowed",
            flush=True,
        )
        for kind, found in sorted(groups.items(), key=lambda item: -len(item[1])):
            print(f"  {len(found)} x {'; '.join(kind)}")
            for where in list(dict.fromkeys(f"{fault.number}: {fault.where}" for fault in found))[:5]:
                print(f"      {where}")
        trial.close()
    print(f"{num_faults} faults")
    return 1 if num_faults else 0


def _random(trial: Trial, count: int) -> Iterator[Fault | None]:
    """Interrupts half of the steps by a timer, and half of them at a random event."""
    for number in range(count):
        yield trial.interrupt(by_timer=number % 2 == 0)


def _all(trial: Trial, every: int) -> Iterator[Fault | None]:
    for is_fresh in (True, False):
        for number in range(1, trial.num_events(is_fresh=is_fresh) + 1, every):
            yield trial.interrupt(number=number, is_fresh=is_fresh)


if __name__ == "__main__":
    sys.exit(main())
