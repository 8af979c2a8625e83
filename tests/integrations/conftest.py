"""Trainers write into the environment of their process, which later tests hand to theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Puts the environment back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
