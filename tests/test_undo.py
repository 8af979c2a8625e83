"""The list of what a recomputation puts back."""

from __future__ import annotations

import pytest

from graphckpt.undo import Undo, put_back


def test_everything_is_put_back_from_the_last_to_the_first_although_one_raises() -> None:
    order: list[str] = []

    def fail() -> None:
        raise ValueError("it cannot be put back")

    undo: Undo = [(order.append, ("first",)), (fail, ()), (order.append, ("last",))]
    with pytest.raises(ValueError, match="it cannot be put back"):
        put_back(undo)
    assert order == ["last", "first"]
    assert undo == []
