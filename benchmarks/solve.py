"""How long do the planner's solvers take, and what do they lose where they must thin?

    OMP_NUM_THREADS=1 python benchmarks/solve.py

Chains are made up: blocks like those of a 7B decoder, equal or scaled by 0.5..1.5 at random, with options from keeping
all to recomputing all, and two kinds of moving to host memory; the states say whether a tensor is held by a block before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from report import header, write

from graphckpt.plan.solve import Front, Move, peak, seconds

MIB = 2**20
# kept, taken again in backward (of 1200 MiB), milliseconds beyond 30: keep, four selective levels, full, two that move
OPTIONS = [(1200, 0, 0), (900, 300, 0.5), (700, 500, 1.4), (450, 750, 3.1), (250, 950, 6), (64, 1136, 10)]
OPTIONS += [(80, 1140, 3.5), (0, 1200, 12)]


@dataclass
class Blocks:
    """A chain whose block ``i`` is ``scale[i]`` of a 7B decoder's; ``states`` say which of shared tensors are held."""

    scale: list[float]
    states: int
    base: int = 20 * 2**30
    fixed_peak: int = 21 * 2**30
    start: Hashable = 0
    calls: int = field(default=0)

    @property
    def num_blocks(self) -> int:
        return len(self.scale)

    def options(self, block: int) -> Sequence[float]:
        return [(30 + extra) * self.scale[block] / 1000 for _, _, extra in OPTIONS]

    def move(self, block: int, option: int, held: Hashable) -> Move:
        self.calls += 1
        kept, again, _ = OPTIONS[option]
        assert isinstance(held, int)
        after = (held + option) % self.states
        shared = 16 * MIB * abs(after - held)
        scale = self.scale[block]
        forward, backward = int(scale * 1500 * MIB), int(scale * (again + 300) * MIB)
        return Move(forward, int(scale * kept * MIB) + shared, backward, after)

    def head_peak(self, held: Hashable) -> int:
        return 4000 * MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for num_blocks, kind, states in [
        (32, "equal", 1),
        (100, "equal", 1),
        (100, "mixed", 1),
        (100, "mixed", 2),
        (100, "mixed", 4),
    ]:
        rng = np.random.default_rng(num_blocks + states)
        scale = [1.0 if kind == "equal" else float(s) for s in rng.uniform(0.5, 1.5, num_blocks)]
        spent = []
        for _ in range(args.repeats):
            chain = Blocks(scale, states)
            began = time.perf_counter()
            front = Front(chain)
            spent.append(time.perf_counter() - began)
        fine = Front(chain, 16 * 4096)
        floor = front.least_peak()[1]
        most = peak(chain, (0,) * num_blocks)
        lost, finding = [], []
        for share in (0.1, 0.2, 0.4, 0.6, 0.8):
            budget = int(floor + share * (most - floor))
            began = time.perf_counter()
            plan = front.cheapest(budget)
            finding.append(time.perf_counter() - began)
            other = fine.cheapest(budget)
            assert plan is not None and other is not None and peak(chain, plan) <= budget  # noqa: PT018
            lost.append(seconds(chain, plan) / seconds(chain, other) - 1)
        rows.append(
            {
                "blocks": num_blocks,
                "kind": kind,
                "options": len(OPTIONS),
                "states": states,
                "front_seconds": round(median(spent), 4),
                "plan_seconds": round(median(finding), 4),
                "labels": max(len(labels[0]) for level in front._labels for labels in level.values()),
                "exact": front.is_exact,
                "lost_percent": round(100 * max(lost), 4),
            }
        )
        print(rows[-1], flush=True)
    head = header(repeats=args.repeats)
    table = ["| blocks | options | states | front s | one plan s | labels | exact | slower than 65536 labels, % |"]
    table += ["| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"]
    table += [
        f"| {r['blocks']} {r['kind']} | {r['options']} | {r['states']} | {r['front_seconds']} | {r['plan_seconds']} "
        f"| {r['labels']} | {'yes' if r['exact'] else 'no'} | {r['lost_percent'] if not r['exact'] else 0} |"
        for r in rows
    ]
    write("solve", head, rows, "\n".join(table))


if __name__ == "__main__":
    main()
