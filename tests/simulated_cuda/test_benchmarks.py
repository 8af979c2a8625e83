"""Benchmarks for a GPU, at a size that tells nothing: rows come out, with what only a CUDA device has in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.parametrize("policy", ["none", "full", "full, offload"])
def test_captures(policy: str) -> None:
    import capture_gpu  # noqa: PLC0415
    from device import Cuda  # noqa: PLC0415

    measured = capture_gpu.measure(policy, 2, 16, 4, 1, SIZES, Cuda(is_dry=True))
    rows: dict[str, dict[str, Any]] = {row["kind"]: row for row in measured}
    assert rows["eager"]["peak_bytes"] > rows["eager"]["static_bytes"] > 0
    assert rows["captured"]["pool_bytes"] > 0
    assert rows["captured"]["capture"].startswith("cuda_graph, 1 capture, ")


@pytest.mark.one_schedule("it starts processes, which run lazily")
def test_rows_of_stores_come_from_processes_with_the_device(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    paths = [str(Path(__file__).parent / "site"), str(root / "tests"), str(root)]
    words = [sys.executable, str(root / "benchmarks" / "stores_gpu.py"), "--dry-run", "--out", str(tmp_path)]
    words += ["--variants", "plain", "full, offload", "offload all"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "stores_gpu.json").read_text())
    rows = results["rows"]
    assert "Simulated CUDA device" in results["header"]["device"]
    assert len(rows) == 6
    assert [row["failed"] for row in rows if "failed" in row] == []
    assert max(row["pinned_bytes"] for row in rows) > 0
