"""How long do the planner's solvers take, and what do they lose where they must thin?

    OMP_NUM_THREADS=1 python benchmarks/solve.py

Chains are made up: blocks like those of a 7B decoder, equal or scaled by 0.5..1.5 at random. Options go from keeping
all to recomputing all, and two move bytes to host memory; states say whether a tensor is held by a block before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np
from report import header, write

from graphckpt.planning.frontier import Frontier, Move, peak, seconds
from graphckpt.planning.search import CopyTiming, schedule_copies, search_offload

MIB = 2**20
FORWARD, BACKWARD = 10, 20  # milliseconds
# MiB kept, MiB there again in backward, milliseconds more: keep, four selective levels, full; move some, move all
OPTIONS = [(1200, 0, 0.0), (900, 300, 0.5), (700, 500, 1.4), (450, 750, 3.1), (250, 950, 6), (64, 1136, 10)]
OPTIONS += [(80, 1140, 3.5), (0, 1200, 0.0)]
MOVED = [0] * 6 + [170, 1200]  # MiB


@dataclass
class Blocks:
    """A chain whose block ``i`` is ``scale[i]`` of a 7B decoder's; ``states`` say which of shared tensors are held."""

    scale: list[float]
    states: int
    move_all: float = 0.0  # milliseconds that the last option waits; what it really waits is the timing's matter
    base: int = 20 * 2**30
    fixed_peak: int = 21 * 2**30
    start: Hashable = 0
    offloads: bool = True

    @property
    def num_blocks(self) -> int:
        return len(self.scale)

    def options(self, block: int) -> Sequence[float]:
        extras = [extra for _, _, extra in OPTIONS[:-1]] + [self.move_all]
        return [(FORWARD + BACKWARD + extra) * self.scale[block] / 1000 for extra in extras]

    def move(self, block: int, option: int, held: Hashable) -> Move | None:
        if not self.offloads and MOVED[option]:
            return None
        kept, again, _ = OPTIONS[option]
        assert isinstance(held, int)
        after = (held + option) % self.states
        shared = 16 * MIB * abs(after - held)
        scale = self.scale[block]
        forward, backward = int(scale * 1500 * MIB), int(scale * (again + 300) * MIB)
        return Move(forward, int(scale * kept * MIB) + shared, backward, after)

    def head_peak(self, held: Hashable) -> int:
        return 4000 * MIB


def timing_of(scale: list[float], gib_per_second: float) -> CopyTiming:
    return CopyTiming(
        forward_seconds=[[FORWARD * s / 1000] * len(OPTIONS) for s in scale],
        backward_seconds=[[(BACKWARD + extra) * s / 1000 for _, _, extra in OPTIONS] for s in scale],
        moved_bytes=[[int(mib * MIB * s) for mib in MOVED] for s in scale],
        out_rate=gib_per_second * 2**30,
        back_rate=gib_per_second * 2**30,
    )


def scales(num_blocks: int, kind: str) -> list[float]:
    rng = np.random.default_rng(num_blocks)
    return [1.0 if kind == "equal" else float(s) for s in rng.uniform(0.5, 1.5, num_blocks)]


def fronts(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for num_blocks, kind, states in [
        (32, "equal", 1),
        (100, "equal", 1),
        (100, "mixed", 1),
        (100, "mixed", 2),
        (100, "mixed", 4),
    ]:
        chain = Blocks(scales(num_blocks, kind), states, move_all=12)
        spent, finding, lost = [], [], []
        for _ in range(repeats):
            began = time.process_time()
            front = Frontier(chain)
            spent.append(time.process_time() - began)
        fine = Frontier(chain, 16 * 4096)
        floor, most = peak(chain, front.least_peak()), peak(chain, (0,) * num_blocks)
        for share in (0.1, 0.2, 0.4, 0.6, 0.8):
            budget = int(floor + share * (most - floor))
            began = time.process_time()
            plan = front.fastest(budget)
            finding.append(time.process_time() - began)
            other = fine.fastest(budget)
            assert plan is not None
            assert other is not None
            assert peak(chain, plan) <= budget
            lost.append(seconds(chain, plan) / seconds(chain, other) - 1)
        rows.append(
            {
                "blocks": f"{num_blocks} {kind}",
                "options": len(OPTIONS),
                "states": states,
                "front, s": round(median(spent), 3),
                "one plan, s": round(median(finding), 4),
                "exact": "yes" if front.is_exact else "no",
                "slower than 65536 labels, %": round(100 * max(lost), 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def offloads(num_blocks_of: list[int]) -> list[dict[str, Any]]:
    rows = []
    for num_blocks, kind, rate, share in product(num_blocks_of, ("equal", "mixed"), (50, 20), (0.2, 0.4)):
        chain = Blocks(scales(num_blocks, kind), 1)
        timing = timing_of(chain.scale, rate)
        plain = (0,) * num_blocks
        budget = max(chain.fixed_peak, int(chain.base + share * (peak(chain, plain) - chain.base)))
        least = schedule_copies(timing, plain).seconds

        def more(plan: tuple[int, ...] | None, least: float = least, timing: CopyTiming = timing) -> float | None:
            return None if plan is None else round(100 * (schedule_copies(timing, plan).seconds / least - 1), 2)

        moves_not = Frontier(Blocks(chain.scale, 1, offloads=False)).fastest(budget)
        blind = Frontier(chain).fastest(budget)  # as if copies took no time and no memory: it may be over the budget
        began = time.process_time()
        found = search_offload(chain, timing, budget)
        spent = time.process_time() - began
        rows.append(
            {
                "blocks": f"{num_blocks} {kind}",
                "GiB/s": rate,
                "budget, % of what the plain step keeps": round(100 * share),
                "nothing moves, % slower": more(moves_not),
                "copies thought free, % slower": more(blind),
                "improve, % slower": more(None if found is None else found.plan),
                "improve, s": round(spent, 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "| " + " | ".join("---" for _ in rows[0]) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row.values()) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 100], help="of the chains that move bytes")
    args = parser.parse_args()
    head = header(repeats=args.repeats, clock="CPU seconds of the process")
    rows, others = fronts(args.repeats), offloads(args.blocks)
    text = f"CPU seconds of one thread.\n\n{table(rows)}\n\n## With copies\n\n{table(others)}"
    write("solve", head, [*rows, *others], text)


if __name__ == "__main__":
    main()
