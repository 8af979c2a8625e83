"""A fit of any ints as sizes, and of steps that can run only at some of them, which the search finds in a few tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from helpers.layer_stacks import ReLULayer, stack_of
from helpers.tally import Tally
from helpers.thinning import slow_unless
from torch import nn

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.planning import PlanError, options


def with_batch_norm(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)), torch.randn(batch_size, 16)
    return model, lambda: model(x).sum().backward()


def test_a_batch_too_small_for_batch_norm_does_not_hide_that_nothing_fits() -> None:
    for sizes in (None, range(1, 9), [1, 2]):
        with pytest.raises(PlanError, match=r"no batch fits · the lowest possible peak is .* at batch size [^1]"):
            graphckpt.fit(with_batch_norm, batch_sizes=sizes, memory_budget="1KiB", select="*").largest


@pytest.mark.parametrize("device", [None, "h200"])
@pytest.mark.parametrize(("sizes", "largest"), [(range(1, 9), 8), ([1, 2, 4], 4)])
def test_a_size_at_which_the_step_cannot_run_is_left_out(
    sizes: Iterable[int] | None, largest: int, device: str | None
) -> None:
    found = graphckpt.fit(with_batch_norm, batch_sizes=sizes, memory_budget="1GiB", select="*", device=device)
    assert found.largest.batch_size == largest
    assert 1 not in [row.batch_size for row in found.rows]
    assert "left out: the step cannot run at batch size 1: Expected more" in " ".join(str(found).split())


def test_a_search_goes_on_to_where_the_step_can_run() -> None:
    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        model, x = nn.Sequential(ReLULayer(), ReLULayer()), torch.randn(batch_size, 16)

        def step() -> None:
            if batch_size % 2:
                raise ValueError("an even batch, please")
            model(x).sum().backward()

        return model, step

    found = graphckpt.fit(make_step, batch_sizes=range(3, 20), memory_budget="1GiB", select="*")
    assert found.largest.batch_size == 18
    assert "largest of the given sizes: 18 (" in str(found)
    assert all(row.batch_size % 2 == 0 for row in found.rows)
    found = graphckpt.fit(make_step, memory_budget="100KiB", select="*")
    with pytest.raises(PlanError, match="no plan fits"):
        graphckpt.plan(*make_step(found.largest.batch_size + 2), memory_budget="100KiB", select="*")


@pytest.mark.parametrize("sizes", [None, [1], range(1, 2), range(1, 99)])
def test_a_step_that_runs_at_no_size_is_one_error_with_its_own_as_the_cause(sizes: Iterable[int] | None) -> None:
    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        if batch_size > 100:
            pytest.fail("the search does not end")
        return with_batch_norm(1)

    with pytest.raises(PlanError, match=r"cannot run at batch size \d+: Expected more than 1 .* · fix") as info:
        graphckpt.fit(make_step, batch_sizes=sizes, select="*")
    assert type(info.value.__cause__) is ValueError


class Limited:
    """Makes steps that run only at some sizes, and counts at how many they do not."""

    def __init__(self, runs_at: Callable[[int], bool], error: type[Exception] = ValueError) -> None:
        self.runs_at, self.error, self.failed = runs_at, error, Tally()
        self.model = stack_of(ReLULayer, 3)

    def __call__(self, batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        x = torch.ones(batch_size, 16)

        def step() -> None:
            if not self.runs_at(batch_size):
                self.failed.add(batch_size)
                raise self.error(f"got a batch of {batch_size}")
            self.model(x).sum().backward()

        return self.model, step


@pytest.mark.parametrize("device", [None, "h200"])
@pytest.mark.parametrize("unit", [pytest.param(unit, marks=slow_unless(unit in (2, 5))) for unit in (2, 4, 5, 12, 32)])
def test_a_search_finds_the_largest_multiple_at_which_the_step_runs(unit: int, device: str | None) -> None:
    make_step = Limited(lambda size: size % unit == 0)
    budget = {"memory_budget": "66MiB" if device else "2MiB", "candidates": ["full"]}  # 64 MiB are cuBLAS workspaces
    found = graphckpt.fit(make_step, device=device, **budget)
    largest = found.largest.batch_size
    assert largest % unit == 0
    assert len(set(make_step.failed)) <= 40
    with pytest.raises(PlanError, match="no batch fits"):
        graphckpt.fit(make_step, batch_sizes=[largest + unit], device=device, **budget)


@pytest.mark.parametrize("device", [None, "h200"])
@pytest.mark.parametrize("sizes", [None, range(1, 5000)])
@pytest.mark.parametrize("last", [1, 100])
def test_a_step_that_runs_up_to_a_size_is_tried_at_few_larger_ones(
    last: int, sizes: Iterable[int] | None, device: str | None
) -> None:
    make_step = Limited(lambda size: size <= last)
    found = graphckpt.fit(make_step, batch_sizes=sizes, memory_budget="100MiB", device=device, candidates=["full"])
    assert found.largest.batch_size == last
    assert not found.is_searched
    assert 2 <= len(set(make_step.failed)) <= 40
    (note,) = (note for note in found.notes if note.startswith("left out"))
    more = len(set(make_step.failed)) - 1
    first = min(make_step.failed)
    fault = f"batch size {first}: got a batch of {first} (and {more} more like it)"
    assert note == f"left out: the step cannot run at {fault}"


def test_sizes_at_which_some_steps_cannot_run_do_not_end_the_search() -> None:
    make_step = Limited(lambda size: size % 8 != 1)
    budget = {"memory_budget": "2MiB", "candidates": ["full"]}
    for sizes in (None, range(2, 5000)):
        found = graphckpt.fit(make_step, batch_sizes=sizes, **budget)
        with pytest.raises(PlanError, match="no batch fits"):
            graphckpt.fit(make_step, batch_sizes=[found.largest.batch_size + 2], **budget)


@pytest.mark.parametrize("unit", [2, 5, 8])
def test_sizes_that_run_under_plans_of_smaller_ones_are_such_multiples_too(
    unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "available_bytes", lambda device, alive, sharers: 400_000)
    make_step = Limited(lambda size: size % unit == 0)
    found = graphckpt.fit(make_step, candidates=["full"])
    assert not found.largest.is_measured
    assert all(row.fits and row.batch_size % unit == 0 for row in found.rows)
    (more,) = graphckpt.fit(make_step, batch_sizes=[found.rows[0].batch_size, found.largest.batch_size + unit]).rows[1:]
    assert not more.fits


def test_a_range_is_never_tried_below_its_first_size() -> None:
    make_step = Limited(lambda size: size % 5 == 0)
    found = graphckpt.fit(make_step, batch_sizes=range(3, 500), memory_budget="100MiB")
    assert found.largest.batch_size == 495
    assert min(make_step.failed) >= 3


@pytest.mark.parametrize("error", [RuntimeError, KeyError, torch.OutOfMemoryError])
def test_another_error_names_the_size_at_which_it_was_raised(error: type[Exception]) -> None:
    with pytest.raises(error, match="got a batch of 8") as info:
        graphckpt.fit(Limited(lambda size: False, error), batch_sizes=[16, 8], memory_budget="1GiB")
    assert info.value.__notes__ == ["find_batch_size: raised at batch size 8"]


def test_each_kind_of_fault_is_one_note() -> None:
    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        model, step = with_batch_norm(batch_size)
        return model, step if batch_size < 5 else Limited(lambda size: False)(batch_size)[1]

    found = graphckpt.fit(make_step, batch_sizes=range(1, 99), memory_budget="1GiB", select="*")
    notes = [note for note in found.notes if note.startswith("left out")]
    assert len(notes) == 2
    assert "batch size 1: Expected more than 1 value" in notes[0]
    assert "batch size 5: got a batch of 5 (and " in notes[1]


ANY = Limited(lambda size: True)


@pytest.mark.parametrize(
    "sizes",
    [
        np.array([4, 2, 8]),
        np.array([2, 4, 8], dtype=np.uint8),
        [np.int64(8), 2, torch.tensor(4)],
        torch.tensor([2, 4, 8]),
        {8: None, 4: None, 2: None}.keys(),
        (2**power for power in (1, 2, 3, 3)),
    ],
    ids=["array", "bytes", "scalars", "tensor", "keys", "generator"],
)
def test_sizes_are_any_iterable_of_ints(sizes: object) -> None:
    found = graphckpt.fit(ANY, batch_sizes=sizes, memory_budget="1GiB", candidates=["full"], global_batch=np.int64(8))
    assert [row.batch_size for row in found.rows] == [2, 4, 8]
    assert all(type(size) is int for size in (found.global_batch, *found.measured_sizes))


@pytest.mark.parametrize(("sizes", "rows"), [(range(2, 20, 4), [2, 6, 10, 14, 18]), (range(3, 0, -1), [1, 2, 3])])
def test_a_range_with_another_step_is_a_list_of_sizes(sizes: range, rows: list[int]) -> None:
    found = graphckpt.fit(ANY, batch_sizes=sizes, memory_budget="1GiB", candidates=["full"])
    assert [row.batch_size for row in found.rows] == rows


@pytest.mark.parametrize(
    "sizes",
    [[], [True, 2], [2, 0], [2.0], [None], ["1"], b"12", 8, np.int64(8), np.array(4), np.array([], dtype=int),
     np.array([True]), np.array([2.0]), np.array([[1, 2]]), torch.tensor(4), torch.tensor([True]), range(0, 9, 2)],
    ids=repr,
)  # fmt: skip
def test_sizes_that_are_not_positive_ints_are_one_clear_error(sizes: object) -> None:
    with pytest.raises(ConfigError, match=r"batch_sizes: expected a list or a range of ints of 1 or more, got .* · f"):
        graphckpt.fit(ANY, batch_sizes=sizes)


def test_an_error_of_the_sizes_themselves_is_raised() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        graphckpt.fit(ANY, batch_sizes=(1 + size for size in "12"))
