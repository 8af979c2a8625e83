"""Compares the peak that is predicted for a simulated rank, in one process, with that of real ranks of gloo.

The real peak is that of a counter which shares no code with the library. Rows are written as they come.

    PYTHONPATH=tests:. python benchmarks/cluster.py [--plans 6] [--ways ddp hsdp ...] [--add]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from helpers.ranks import run_on_ranks
from helpers.simulated_ranks import WAYS, Case, PipelineCase, peaks, planned, planned_evenly, planned_stage
from report import RESULTS, header, table, write

ATTEMPTS = 2
STAGES = {"1F1B of 2": 6, "1F1B of 4": 3, "GPipe of 2": 3}
"""The most plans of each stage."""
Plans = list[tuple[Mapping[str, Any], int]]


def measure(rank: int, folder: str, make: Callable[[], Any], plans: list[Plans]) -> None:
    """Writes the peaks of all ranks under each plan; ``plans`` has one list for all ranks, or one for each."""
    case = make()
    rows = [peaks(case, policies, predicted, ATTEMPTS) for policies, predicted in plans[rank % len(plans)]]
    if rank == 0:
        Path(folder, "peaks").write_text(json.dumps(rows))


def compared(way: str, make: Callable[[], Any], num_ranks: int, plans: list[Plans]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(measure, Path(folder), make, plans, num_ranks=num_ranks)
        measured = json.loads(Path(folder, "peaks").read_text())
    rows = []
    for rank, of_rank in enumerate(plans):
        for number, ((policies, predicted), peak) in enumerate(zip(of_rank, measured, strict=True)):
            real = peak[rank] if len(plans) > 1 else max(peak)
            name = way if len(plans) == 1 else f"{way}, stage {rank}"
            recomputed = f"{number + 1}: {len(policies)} recomputed" if policies else "1: all kept"
            rows.append({"way": name, "ranks": num_ranks, "plan": recomputed, "predicted": predicted, "real": real})
    return rows


def report(rows: list[dict[str, Any]], head: dict[str, Any]) -> None:
    cells = [
        [
            row["way"],
            str(row["ranks"]),
            row["plan"],
            f"{row['predicted']:,}",
            f"{row['real']:,}",
            f"{row['predicted'] - row['real']:+,}" if row["predicted"] != row["real"] else "0",
        ]
        for row in rows
    ]
    num_equal = sum(row["predicted"] == row["real"] for row in rows)
    text = (
        f"{num_equal} of {len(rows)} plans are equal to the byte. A Llama of 4 layers (in pipelines of 8, with 8 "
        "micro-batches), hidden size 128, AdamW. Plans: everything kept, the lowest peak, and budgets evenly between "
        "them. Bytes of the rank that has the most; in a pipeline, of each stage.\n\n"
        + table(["way", "ranks", "plan", "predicted", "real", "difference"], cells)
    )
    write("cluster", head, rows, text)


def main() -> None:
    names = [*WAYS, *STAGES]
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=6)
    parser.add_argument("--ways", nargs="*", default=names)
    parser.add_argument("--add", action="store_true", help="keep the rows of other ways")
    options = parser.parse_args()
    head = header(n=f"the lowest of {ATTEMPTS} steps for each plan; ranks by gloo, all on this machine")
    earlier = json.loads((RESULTS / "cluster.json").read_text())["rows"] if options.add else []
    rows = [row for row in earlier if row["way"].partition(", stage")[0] not in options.ways]
    for way in options.ways:
        if way in WAYS:
            plans = [planned_evenly(partial(planned, way), options.plans)]
            rows += compared(way, partial(Case, way), WAYS[way].num_ranks, plans)
        else:
            schedule, _, size = way.split()
            num_plans = min(options.plans, STAGES[way])
            plans = [
                planned_evenly(partial(planned_stage, schedule, int(size), rank), num_plans)
                for rank in range(int(size))
            ]
            rows += compared(way, partial(PipelineCase, schedule), int(size), plans)
        report(rows, head)


if __name__ == "__main__":
    main()
