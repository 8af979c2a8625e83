"""A part of the matrix of what works: no case is worse than in the committed results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("matrix")


@pytest.mark.slow
def test_no_case_is_worse_than_in_the_results() -> None:
    words = [sys.executable, str(BENCHMARKS / "matrix.py"), "--check"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 of them worse" in done.stdout


CASE = {"model": "gpt2", "mode": "eager", "policy": "full, device"}


@pytest.mark.parametrize(
    ("then", "worse", "not_worse"),
    [
        ("equal", "close differs idle", "equal"),
        ("close", "error refused", "equal"),
        ("refused", "differs error", "refused"),
        ("error", "differs", "refused"),
        ("differs", "", "equal"),
        (None, "differs", "equal"),
    ],
)
def test_an_outcome_is_worse_than_a_better_one(
    matrix: ModuleType, then: str | None, worse: str, not_worse: str
) -> None:
    before = {} if then is None else {tuple(CASE.values()): {"outcome": then}}
    for now in (*worse.split(), not_worse):
        assert bool(matrix.worse([{**CASE, "outcome": now}], before)) == (now != not_worse), now


def test_a_decision_record_allows_a_case_to_be_worse(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row, before = {**CASE, "outcome": "refused"}, {tuple(CASE.values()): {"outcome": "equal"}}
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    assert matrix.worse([row], before)
    (tmp_path / "docs" / "decisions" / "1.md").write_text("- `matrix: gpt*/eager/full*`: for a reason.\n")
    assert matrix.worse([row], before) == []


def test_rows_are_read_as_they_were_written(matrix: ModuleType, tmp_path: Path) -> None:
    rows = [
        {**CASE, "outcome": "differs", "difference": 0.25, "kept": 1, "plain": 2, "text": "a, note"},
        {**CASE, "policy": "joined, disk", "outcome": "refused", "text": "a, note"},
    ]
    matrix.write_csv(rows, tmp_path / "matrix.csv")
    read = matrix.read_csv(tmp_path / "matrix.csv")
    assert [(row["outcome"], row["difference"], row["text"]) for row in read.values()] == [
        ("differs", "2.5e-01", "#0"),
        ("refused", "", "#0"),
    ]
    assert "joined, disk" in matrix.summary(rows)
