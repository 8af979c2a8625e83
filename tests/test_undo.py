"""The list of what a recomputation puts back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.interrupts import interrupt_at, name_of, places

from graphckpt.undo import Undo, enter, put_back, scope


def test_everything_is_put_back_from_the_last_to_the_first_although_one_raises() -> None:
    order: list[str] = []

    def fail() -> None:
        raise ValueError("it cannot be put back")

    undo: Undo = [(order.append, ("first",)), (fail, ()), (order.append, ("last",))]
    with pytest.raises(ValueError, match="it cannot be put back"):
        put_back(undo)
    assert order == ["last", "first"]
    assert undo == []


class Switch:
    is_on = False


@scope
def switched(undo: Undo, log: list[str]) -> Iterator[str]:
    undo.append((setattr, (Switch, "is_on", Switch.is_on)))
    Switch.is_on = True
    try:
        yield "on"
    except ValueError:
        log.append("caught")
    log.append("behind")


@scope
def switched_within(undo: Undo, log: list[str]) -> Iterator[None]:
    enter(undo, switched(log))
    yield


def test_a_scope_is_a_context_manager() -> None:
    log: list[str] = []
    with switched(log) as value:
        assert (value, Switch.is_on) == ("on", True)
    with switched(log):
        raise ValueError
    with pytest.raises(KeyError), switched(log):
        raise KeyError
    with switched_within(log):
        assert Switch.is_on
    assert (Switch.is_on, log) == (False, ["behind", "caught", "behind"])

    @switched(log)
    def call() -> bool:
        return Switch.is_on

    assert (call(), call(), Switch.is_on) == (True, True, False)
    with ExitStack() as stack:
        assert stack.enter_context(switched(log)) == "on"
    assert not Switch.is_on


@pytest.mark.parametrize("within", [switched, switched_within])
def test_a_scope_ends_wherever_an_interrupt_comes_although_the_traceback_is_kept(
    within: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # in the callback of a weak reference it is lost

    def call() -> None:
        with within([]):
            pass

    errors = []
    for place in places(call):
        try:
            interrupt_at(call, place)
        except KeyboardInterrupt as error:
            errors.append(error)
        assert not Switch.is_on, name_of(place)
    assert len(errors) > 50
