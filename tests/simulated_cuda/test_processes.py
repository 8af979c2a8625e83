"""Processes with the simulated device: random programmes of `tests/fuzz`, and benchmarks for a GPU, in tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
once = pytest.mark.one_schedule("it starts processes, which have schedules of their own")

TESTS = Path(__file__).parents[1]
ENDS_DURING_COPIES = """
import torch, graphckpt
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
graphckpt.apply(model, {"0": {"offload": True}})
y = model(torch.randn(64, 64).cuda())
"""
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}


@once
@pytest.mark.parametrize("words", [("--seeds", "0:24"), ("--seeds", "28:34", "--captured")])
def test_fixed_seeds(words: tuple[str, ...]) -> None:
    command = [sys.executable, str(TESTS / "fuzz" / "run.py"), "--device", "simulated", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert " same" in done.stdout


@once
def test_host_memory_stays_pinned_at_exit_until_its_copies_are_over() -> None:
    """Finalizers run at exit in reverse order: the memory is younger than the store that waits for the copies."""
    done = run("-c", ENDS_DURING_COPIES)
    assert (done.returncode, done.stderr) == (0, "")


# --- benchmarks: rows come out, with what only a CUDA device has in them


@pytest.mark.parametrize("policy", ["none", "full", "full, offload"])
def test_captures(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS.parent / "benchmarks"))
    import capture_gpu  # noqa: PLC0415
    from device import Cuda  # noqa: PLC0415

    pair = [(policy, "eager"), (policy, "captured")]
    measured = capture_gpu.measure(pair, 2, 16, 4, 1, SIZES, Cuda(is_dry=True))
    rows: dict[str, dict[str, Any]] = {row["kind"]: row for row in measured}
    assert rows["eager"]["peak_bytes"] > rows["eager"]["static_bytes"] > 0
    assert rows["captured"]["pool_bytes"] > 0
    assert rows["captured"]["capture"].startswith("cuda_graph, 1 capture, ")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process that has the device."""
    paths = os.pathsep.join(map(str, (TESTS / "simulated_cuda" / "site", TESTS, TESTS.parent)))
    command, environment = [sys.executable, *words], {**os.environ, **environment, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_benchmark(script: str, *words: str, **environment: str) -> None:
    done = run(str(TESTS.parent / "benchmarks" / script), "--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def rows_in(path: Path) -> list[dict[str, Any]]:
    results = json.loads(path.read_text())
    rows: list[dict[str, Any]] = results["rows"]
    assert "Simulated CUDA device" in results["header"]["device"]
    assert rows, path
    assert [row for row in rows if "failed" in row] == [], path
    return rows


@once
def test_rows_of_stores_come_from_processes_with_the_device(tmp_path: Path) -> None:
    run_benchmark("stores_gpu.py", "--out", str(tmp_path), "--variants", "full, offload")
    rows = rows_in(tmp_path / "stores_gpu.json")
    assert [row["kind"] for row in rows] == ["eager", "captured"]
    assert min(row["pinned_bytes"] for row in rows) > 0


@once
def test_every_row_of_a_run_on_a_gpu_is_measured(tmp_path: Path) -> None:
    """All steps of all parts, but for most of the tests, which run here by themselves."""
    few_tests = "-p simulated_cuda.plugin -k test_clock.py"
    words = ["--minutes", "60", "--out", str(tmp_path / "gpu"), "--archive", str(tmp_path / "all")]
    run_benchmark("gpu.py", *words, PYTEST_ADDOPTS=few_tests)
    out = tmp_path / "gpu"
    steps = [json.loads(line) for path in out.glob("gpu_part_*.jsonl") for line in path.read_text().splitlines()]
    ends = {row["step"]: row.get("failed") for row in steps if "step" in row}
    assert len(ends) == 15
    assert set(ends.values()) == {None}
    rows = {path.stem: rows_in(path) for path in out.glob("*_gpu_*.json")} | {"": rows_in(out / "gpu_probe_probe.json")}
    assert len(rows) == 11
    every = [row for many in rows.values() for row in many]
    captured = [row for row in every if row.get("kind") == "captured" or row.get("is_captured")]
    assert len(captured) > 10
    assert all(row["capture"].startswith("cuda_graph, 1 capture, ") for row in captured)
    losses = [row["loss"] for row in rows["stores_gpu_ranks"]]
    assert len(losses) == 3
    assert losses == losses[:1] * 3
    assert all(row["kept_bytes"] > row["layers_kept_bytes"] > 0 for row in rows["stores_gpu_ranks"])
    for row in rows["planner_gpu_plan"]:
        assert "budget_bytes" not in row or row["allocator_peak_bytes"] <= row["budget_bytes"]
    page = (out / "gpu.md").read_text()
    assert ", 0 failed" in page
    for line in page.partition("## Goals")[2].partition("## Tests")[0].splitlines():
        assert "| - |" not in line.replace("  ", ""), line
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert "gpu/gpu.md" in archive.getnames()
