"""What tests of the planner share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphckpt.planning import steps


@pytest.fixture(autouse=True, scope="module")
def timed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_TIMED_RUNS", 1)
        yield
