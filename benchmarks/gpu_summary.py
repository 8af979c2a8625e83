"""Sums up on one page what ``gpu.py`` found: how the tests ended, which goals are met, what failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs import row_in
from report import table

Row = dict[str, Any]
SHARE_OF_FORWARD = 1 / 3
"""Of a step without recompute: what copies out have to hide behind, as those back have in backward."""


@dataclass(frozen=True)
class Goal:
    """A figure that should be at most ``limit``; ``value`` is ``None`` where it was not measured."""

    name: str
    limit: float
    value: float | None
    note: str = ""

    @property
    def state(self) -> str:
        """Returns ``"met"``, ``"missed"`` or ``"not measured"``."""
        if self.value is None:
            return "not measured"
        return "met" if self.value <= self.limit else "missed"


def load(folder: Path, name: str) -> tuple[Row, list[Row]]:
    """Returns header and rows of all runs of a benchmark, be they done or cut off; both are empty where none ran."""
    head: Row = {}
    rows: list[Row] = []
    for stem in sorted({path.stem for path in folder.glob(f"{name}*.json*")}):
        done, begun = folder / f"{stem}.json", folder / f"{stem}.jsonl"
        if begun.exists():
            lines = [row for line in begun.read_text().splitlines() if (row := row_in(line))]  # the last may be cut off
            head, rows = lines[0]["header"] if lines else {}, rows + lines[1:]
        else:
            result = json.loads(done.read_text())
            head, rows = result["header"], rows + result["rows"]
    return head, rows


# ---- the goals


def goals(probe: list[Row], capture: list[Row], stores: list[Row], planner: list[Row]) -> list[Goal]:
    """Returns all goals, with what was measured for them."""
    store_goals = [offloaded(stores, probe, kind) for kind in ("eager", "captured")]
    return [captured(capture), *half(planner), *store_goals, partitioned(stores), *predicted(planner)]


def captured(rows: list[Row]) -> Goal:
    """A captured step that recomputes everything, against an eager one that keeps everything."""
    name = "captured `full` / eager without recompute, GPT-2 124M, up to 8 x 1024"
    of = {(row["policy"], row["batch"], row["kind"]): row["seconds"]["median"] for row in rows if "seconds" in row}
    ratios = {
        f"batch {batch}": seconds / of["none", batch, "eager"]
        for (policy, batch, kind), seconds in of.items()
        if (policy, kind) == ("full", "captured") and batch <= 8 and ("none", batch, "eager") in of
    }
    return worst(name, 1.0, ratios, rows)


def half(rows: list[Row]) -> Iterator[Goal]:
    """What plans for half of BERT-large cost, the faster of those with and without offload: for both readings."""
    for target in ("50% of activations", "50% of the plain peak"):
        name = f"BERT-large at {target} / plain, time"
        mine = [row for row in rows if row.get("target") == target and "ratio" in row and row["model"] != "gpt2"]
        ratios = {
            f"{row['method']}, peak {row['peak_share']:.2f} of plain's": row["ratio"]["median"]
            for row in mine
            if row["allocator_peak_bytes"] <= row["budget_bytes"]
        }
        if mine and not ratios:
            yield Goal(name, 1.1, None, "no plan's step was within its budget")
            continue
        best = dict(sorted(ratios.items(), key=lambda item: item[1])[:1])
        yield worst(name, 1.1, best, [row for row in rows if "family" in row or "shares" in row])


def offloaded(rows: list[Row], probe: list[Row], kind: str) -> Goal:
    """Offload against recompute, where the copies fit beside the computation."""
    name = f"offload / recompute where the copies fit, {kind}, time"
    rates = [
        row["answer"]["out_idle_bytes_per_second"]
        for row in probe
        if row.get("probe") == "copy_rates" and "answer" in row
    ]
    if not rates:
        return Goal(name, 1.02, None, "the rate of copies was not measured")
    of = {place_of(row): row for row in rows if "step_seconds" in row and row.get("kind") == kind}
    ratios = {}
    for (model, batch, tokens, variant), row in of.items():
        plain, full = (of.get((model, batch, tokens, other)) for other in ("plain", "full"))
        if variant not in ("full, offload", "offload all") or plain is None or full is None:
            continue
        room = plain["step_seconds"]["median"] * SHARE_OF_FORWARD * rates[0]
        if row["pinned_bytes"] is not None and row["pinned_bytes"] <= room:
            ratio = row["step_seconds"]["median"] / full["step_seconds"]["median"]
            ratios[f"{variant}, {model}, {batch} x {tokens}"] = ratio
    return worst(name, 1.02, ratios, rows)


def place_of(row: Row) -> tuple[Any, ...]:
    """Returns what a row of the stores was measured on."""
    return row["model"], row["batch"], row["tokens"], row["variant"]


def partitioned(rows: list[Row]) -> Goal:
    """What forward keeps on one of two tensor-parallel ranks, against the plain model on them."""
    of = {place_of(row): row for row in rows if "ranks" in row and "kept_bytes" in row}
    ratios, layers = {}, {}
    for (*place, variant), row in of.items():
        plain = of.get((*place, "plain"))
        if variant != "plain" and plain is not None:
            ratios[variant] = row["kept_bytes"] / plain["kept_bytes"]
            layers[variant] = f"{row['layers_kept_bytes'] / plain['layers_kept_bytes']:.3f} without the loss"
    goal = worst("cpu + partition + contiguous / plain, kept after forward on 2 ranks", 0.35, ratios, rows)
    return replace(goal, note="; ".join([goal.note, *(f"{key}: {text}" for key, text in layers.items())]))


def predicted(rows: list[Row]) -> list[Goal]:
    """How far off the predicted peaks are."""
    found = []
    for name, limit, real, foretold in (
        ("peak predicted after measuring, off by", 0.01, "peak_bytes", "foretold_bytes"),
        ("peak predicted from the profile alone, off by", 0.05, "alone_bytes", "alone_foretold_bytes"),
    ):
        errors = {
            f"{row['model']}, {row['precision']}{', captured' * row['is_captured']}": abs(row[foretold] / row[real] - 1)
            for row in rows
            if real in row and foretold in row
        }
        found.append(worst(name, limit, errors, [row for row in rows if "precision" in row]))
    return found


def worst(name: str, limit: float, values: dict[str, float], rows: list[Row]) -> Goal:
    """Returns the goal with the largest of ``values``; without any, with why there is none."""
    failed = [str(row["failed"]) for row in rows if "failed" in row]
    note = f"; {len(failed)} rows failed" if failed else ""
    if not values:
        return Goal(name, limit, None, failed[0] if failed else "no such row")
    place = max(values, key=lambda key: values[key])
    return Goal(name, limit, values[place], f"{place}, the worst of {len(values)}{note}")


# ---- the page


def summarize(folder: Path) -> str:
    """Writes ``gpu.md`` and ``gpu.png`` from what lies in ``folder``, and returns the page."""
    parts = [load(folder, path.stem) for path in sorted(folder.glob("gpu_part_*.jsonl"))]
    steps = [row for _, rows in parts for row in rows]
    probe, tests, capture, stores, planner = (
        load(folder, name)[1] for name in ("gpu_probe", "tests_gpu", "capture_gpu", "stores_gpu", "planner_gpu")
    )
    is_dry = any("a dry run" in head.get("device", "") for head, _ in parts)
    states = [
        [
            g.name,
            f"<= {g.limit:g}",
            "-" if g.value is None else f"{g.value:.3f}",
            "dry run" if is_dry else g.state,
            g.note,
        ]
        for g in goals(probe, capture, stores, planner)
    ]
    ends = [[row["step"], f"{row['seconds']:.0f} s", str(row.get("failed", "done"))] for row in steps]
    blocks = ["# On a GPU", *about(head for head, _ in parts), "## Goals"]
    blocks += [table(["goal", "limit", "measured", "state", "where"], states), picture(capture, stores, folder)]
    blocks += ["## Tests", *tested(tests)]
    blocks += ["## Probe", *(f"- {row['probe']}: {row.get('failed') or json.dumps(row['answer'])}" for row in probe)]
    blocks += ["## Steps", table(["step", "time", "end"], ends) if ends else "None ran."]
    lost = [
        (name, row) for name, rows in (("capture", capture), ("stores", stores), ("planner", planner)) for row in rows
    ]
    blocks += ["## Rows that failed", *failures(lost)]
    text = "\n\n".join(blocks) + "\n"
    (folder / "gpu.md").write_text(text)
    return text


def picture(capture: list[Row], stores: list[Row], folder: Path) -> str:
    """Draws the picture of the page; without it, as where matplotlib is missing, the page says why."""
    try:
        draw(capture, stores, folder / "gpu.png")
    except Exception as error:
        return f"No picture: {type(error).__name__}: {error}"
    return "![](gpu.png)"


def about(heads: Iterable[Row]) -> list[str]:
    """Returns what ran where, a line for each machine and set of versions."""
    lines = {
        f"- {head['device']}; " + ", ".join(f"{name} {number}" for name, number in head["versions"].items()): None
        for head in heads
        if head
    }
    return list(lines) or ["Nothing ran."]


def tested(rows: list[Row]) -> list[str]:
    """Returns how many tests ended how, and a line for each that failed."""
    if not rows:
        return ["No test ended."]
    counts = Counter("failed" if "failed" in row else row["outcome"] for row in rows)
    lines = [", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))]
    return lines + [f"- `{row['test']}`: {row['failed']}" for row in rows if "failed" in row]


def failures(rows: list[tuple[str, Row]]) -> list[str]:
    """Returns a line for each row that failed."""
    keys = (
        "policy",
        "pair",
        "variant",
        "model",
        "method",
        "precision",
        "is_captured",
        "batch",
        "tokens",
        "kind",
        "ranks",
    )
    lines = []
    for name, row in rows:
        if "failed" in row:
            place = ", ".join(f"{key} {row[key]}" for key in keys if key in row)
            lines.append(f"- {name}, {place}: {row['failed']}")
    return lines or ["None."]


def draw(capture: list[Row], stores: list[Row], path: Path) -> None:
    """Draws the time of each kind of step, as a multiple of the plain, eager one's."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    seconds = {
        (row["policy"], row["batch"], row["kind"]): row["seconds"]["median"] for row in capture if "seconds" in row
    }
    bars = {
        f"{policy}, batch {batch}, {kind}": value / seconds["none", batch, "eager"]
        for (policy, batch, kind), value in seconds.items()
        if ("none", batch, "eager") in seconds
    }
    steps = {(*place_of(row), row["kind"]): row["step_seconds"]["median"] for row in stores if "step_seconds" in row}
    places = {
        f"{variant}, {model}, {batch} x {tokens}, {kind}": value / steps[model, batch, tokens, "plain", "eager"]
        for (model, batch, tokens, variant, kind), value in steps.items()
        if (model, batch, tokens, "plain", "eager") in steps
    }
    for axes, title, values in ((left, "captured and eager steps", bars), (right, "places of saved tensors", places)):
        axes.set(title=title, xlabel="time of a step, x plain")
        axes.barh(list(values), list(values.values()))
        axes.axvline(1, color="black", linewidth=0.7)
        axes.invert_yaxis()
        axes.tick_params(labelsize=6)
        if not values:
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    figure.savefig(path, dpi=120)
