"""The command that runs all that needs a GPU, walked on the CPU, and what its page says of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_summary

    return gpu_summary


@pytest.mark.slow
def test_dry_run_walks_all_parts_and_sums_them_up(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    steps = [
        json.loads(line) for path in sorted(tmp_path.glob("gpu_part_*.jsonl")) for line in path.read_text().splitlines()
    ]
    ends = {row["step"]: row.get("failed") for row in steps if "step" in row}
    assert ends == dict.fromkeys(("probe", "tests", "capture", "stores", "planner"))
    for name in ("gpu_probe", "capture_gpu", "stores_gpu", "planner_gpu"):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        # Transformers' own offload pins its memory, which no CPU does.
        failed = [row for row in rows if "failed" in row and row.get("variant") != "Transformers, offload"]
        assert rows
        assert not failed
    page = (tmp_path / "gpu.md").read_text()
    assert "a dry run on the CPU" in page
    assert ", 0 failed" in page
    assert " met " not in page  # a CPU says nothing of a GPU
    assert " missed " not in page
    assert (tmp_path / "gpu.png").stat().st_size > 0


def test_a_job_that_fails_or_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import argparse

    import jobs

    script = tmp_path / "steps.py"
    script.write_text(
        "import json, sys, time\n"
        "job = json.loads(sys.argv[2])\n"
        "if job['does'] == 'hang': time.sleep(60)\n"
        "if job['does'] == 'fail': raise ValueError('as it was asked to')\n"
        "print(json.dumps({**job, 'seconds': 1}))\n"
    )
    options = argparse.Namespace(minutes=1, out=tmp_path, dry_run=False)
    ours = jobs.Jobs(str(script), options, {"device": "none"})
    monkeypatch.setattr(jobs, "JOB_SECONDS", 20)
    ours.run({"does": "fail"})
    ours.run({"does": "work"})
    monkeypatch.setattr(jobs, "JOB_SECONDS", 0.5)
    ours.run({"does": "hang"})
    ours.end = 0
    ours.run({"does": "work"})
    header, *rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert header == {"header": {"device": "none"}}
    assert rows == [
        {"does": "fail", "failed": "ValueError: as it was asked to"},
        {"does": "work", "seconds": 1},
        {"does": "hang", "failed": "took longer than its time limit"},
        {"does": "work", "failed": "no time left"},
    ]


def test_goals_are_met_missed_or_not_measured(summary: Any) -> None:
    def row(policy: str, captured: float) -> dict[str, Any]:
        seconds = {"eager_seconds": {"median": 2.0}, "captured_seconds": {"median": captured}, "ratio": captured / 2}
        return {"policy": policy, "batch": 8, "tokens": 1024, **seconds}

    assert summary.captured([row("none", 1.0), row("full", 1.9)]).state == "met"
    assert summary.captured([row("none", 1.0), row("full", 2.1)]).state == "missed"
    failed = {"policy": "full", "batch": 8, "tokens": 1024, "failed": "out of memory"}
    goal = summary.captured([row("none", 1.0), failed])
    assert (goal.state, goal.note) == ("not measured", "out of memory")

    peaks = {"model": "gpt2", "precision": "autocast", "is_captured": False, "peak_bytes": 100, "foretold_bytes": 102}
    measured, alone = summary.predicted([peaks])
    assert (measured.state, alone.state) == ("missed", "not measured")


def test_offload_counts_only_where_its_copies_fit(summary: Any) -> None:
    probe = [{"probe": "copy_rates", "answer": {"out_idle_bytes_per_second": 100.0}}]

    def row(variant: str, seconds: float, pinned: int) -> dict[str, Any]:
        place = {"model": "gpt2", "tokens": 1024, "variant": variant}
        return {**place, "step_seconds": {"median": seconds}, "pinned_bytes": pinned}

    rows = [row("plain", 3.0, 0), row("full", 4.0, 0), row("full, offload", 4.04, 90), row("offload all", 9.0, 900)]
    goal = summary.offloaded(rows, probe)
    assert goal.state == "met"
    assert goal.value == pytest.approx(1.01)


def test_the_page_names_each_failed_test(summary: Any, tmp_path: Path) -> None:
    rows = [
        {"header": {}},
        {"test": "a::b", "outcome": "passed", "when": "call"},
        {"test": "a::c", "outcome": "failed", "when": "call", "failed": "assert 1 == 2"},
    ]
    (tmp_path / "tests_gpu.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    page = summary.summarize(tmp_path)
    assert "1 passed, 1 failed, 0 skipped" in page
    assert "- `a::c`: assert 1 == 2" in page
