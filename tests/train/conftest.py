"""Fixtures of the tests of training runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from helpers.small_run import child, place
from rich.console import Console

from graphckpt.ledger.explanation import Explanation
from graphckpt.train.output import Report

__all__ = ["child", "place"]


@pytest.fixture
def pictures() -> None:
    """Has runs draw; of no use without being asked for by name."""


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as all else of a small run: an empty file stands for the picture."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(Explanation, "plot", lambda explanation, path: Path(path).touch())


@pytest.fixture
def quiet() -> Report:
    return Report(Console(file=io.StringIO()))
