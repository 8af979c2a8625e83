"""Trainers write into the environment of their process, which later tests hand to theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from graphckpt.planning import steps


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Puts the environment back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are of no interest here."""
    monkeypatch.setattr(steps, "_TIMED_RUNS", 1)
