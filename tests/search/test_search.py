"""One search over configurations: each runs once, and its result or its error is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphckpt import progress
from graphckpt.search.search import Search, pareto, reporting


def test_each_configuration_runs_once_and_one_that_cannot_run_is_skipped() -> None:
    runs: list[int] = []

    def run(size: int) -> int:
        runs.append(size)
        if size == 3:
            raise ValueError("odd")
        return 10 * size

    search: Search[int, int] = Search(run, skips=lambda error: isinstance(error, ValueError), where="at {}".format)
    assert [search.result(size) for size in (2, 3, 2, 3, 4)] == [20, None, 20, None, 40]
    assert runs == [2, 3, 4]
    assert search.results == {2: 20, 4: 40}
    assert {size: str(error) for size, error in search.errors.items()} == {3: "odd"}


def test_another_error_ends_the_search_and_names_the_configuration() -> None:
    def run(size: int) -> int:
        raise KeyError(size)

    search: Search[int, int] = Search(run, skips=lambda error: isinstance(error, ValueError), where="at {}".format)
    with pytest.raises(KeyError) as info:
        search.result(7)
    assert info.value.__notes__ == ["at 7"]
    assert not search.errors


def test_an_error_that_is_kept_holds_nothing_of_the_step() -> None:
    class Activation:
        pass

    alive: list[weakref.ref[Activation]] = []

    def run(size: int) -> int:
        activation = Activation()
        alive.append(weakref.ref(activation))

        def backward() -> None:
            raise MemoryError(str(activation))

        backward()
        return size

    search: Search[int, int] = Search(run, skips=lambda error: isinstance(error, MemoryError), where="at {}".format)
    assert search.result(1) is None
    gc.collect()
    assert alive[0]() is None
    (note,) = search.errors[1].__notes__
    assert note.startswith("at 1:")
    assert "in backward" in note


def test_what_a_bound_rules_out_never_runs() -> None:
    search: Search[int, int] = Search(lambda size: size, skips=lambda error: False, where=str)
    assert search.possible([1, 2, 3], lambda size: "even" if size % 2 == 0 else None) == [1, 3]
    assert search.result(2) is None
    assert {size: str(error) for size, error in search.errors.items()} == {2: "even"}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_no_result_of_the_front_is_worse_than_another(rows: list[tuple[int, int]]) -> None:
    front = pareto(rows, costs=lambda row: row)
    assert set(front) <= set(rows)
    for row in rows:
        is_worse = any(a <= row[0] and b <= row[1] and (a, b) != row for a, b in rows)
        assert (row in front) is not is_worse


def test_lines_go_to_the_function_of_the_caller_or_are_printed_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    lines: list[str] = []
    for choice in (lines.append, False, True):
        with reporting(choice) as report:
            report(f"{choice is True}")
    assert lines == ["False"]
    assert "True" in capsys.readouterr().err
