"""The largest batch runs inside the budget and one more does not; each size has the peaks of a plan for it alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.layer_stacks import ReLULayer, mlp_layers, stack_of, tiny_gpt2
from helpers.modules import as_module
from helpers.peaks import tracked_peak
from helpers.thinning import slow_unless
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.planning import PlanError, options
from graphckpt.planning.steps import FakeStep, RealStep, made_step
from graphckpt.search.fit import _gradients_missing_in_forward
from graphckpt.search.fit_result import BatchFit, Fit
from graphckpt.search.sizes import largest
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile
from graphckpt.units import format_bytes

MIB = 2**20
ModelAndInputs = tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]


def gpt2() -> ModelAndInputs:
    return tiny_gpt2(n_layer=5, n_embd=32, vocab_size=64), tokens


def bert() -> ModelAndInputs:
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=64, max_position_embeddings=32, num_labels=3)
    return BertForSequenceClassification(config), tokens_with_label


def resnet() -> ModelAndInputs:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 16, 32], "depths": [2, 1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=3)), images


def tokens(batch_size: int) -> dict[str, torch.Tensor]:
    x = torch.zeros(batch_size, 32, dtype=torch.long)
    return {"input_ids": x, "labels": x}


def tokens_with_label(batch_size: int) -> dict[str, torch.Tensor]:
    return {**tokens(batch_size), "labels": torch.zeros(batch_size, dtype=torch.long)}


def images(batch_size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(batch_size, 3, 32, 32), "labels": torch.zeros(batch_size, dtype=torch.long)}


class Case:
    """A model with its steps, and what they really take."""

    def __init__(self, made: ModelAndInputs) -> None:
        self.model, self.inputs = made
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)

    def make_step(self, batch_size: int, accumulation: int = 1) -> tuple[nn.Module, Callable[[], None]]:
        batch = self.inputs(batch_size)

        def step() -> None:
            for _ in range(accumulation):
                self.model(**batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return self.model, step

    def peak(self, batch_size: int, accumulation: int = 1) -> int:
        """The tracked peak of a step with the policies that the model has."""
        return tracked_peak(*self.make_step(batch_size, accumulation), [self.optimizer])


@pytest.fixture(
    scope="module",
    params=[pytest.param(make, marks=slow_unless(make is resnet)) for make in (gpt2, bert, resnet)],
    ids=lambda make: make.__name__,
)
def fitted(request: pytest.FixtureRequest) -> tuple[Case, Fit]:
    torch.manual_seed(0)
    case = Case(request.param())
    smallest = case.peak(2)
    found = graphckpt.fit(case.make_step, memory_budget=smallest + 4 * (case.peak(4) - smallest), progress=None)
    return case, found


def test_the_largest_batch_runs_inside_the_budget_and_one_more_does_not(fitted: tuple[Case, Fit]) -> None:
    case, found = fitted
    largest, plain = found.largest, found.largest_without_recompute
    assert largest.batch_size > plain.batch_size >= 8
    with largest.plan.apply():
        assert case.peak(largest.batch_size) <= found.budget_bytes
    assert case.peak(plain.batch_size) <= found.budget_bytes < case.peak(plain.batch_size + 1)
    more = largest.batch_size + 1
    with pytest.raises(PlanError, match="no plan fits"):
        graphckpt.plan(*case.make_step(more), memory_budget=found.budget_bytes)
    with graphckpt.plan(*case.make_step(more), memory_budget="min").apply():
        assert case.peak(more) > found.budget_bytes


@pytest.mark.slow
def test_each_size_has_the_peaks_of_a_plan_for_it_alone(fitted: tuple[Case, Fit]) -> None:
    case, found = fitted
    for row in found.rows:
        model, step = case.make_step(row.batch_size)
        plain = graphckpt.plan(model, step, memory_budget=2**40, candidates=["full"])
        least = graphckpt.plan(model, step, memory_budget="min")
        assert row.plain_peak_bytes == plain.plain_peak_bytes == case.peak(row.batch_size)
        assert row.floor_bytes == least.floor_bytes
        with row.plan.apply():
            assert case.peak(row.batch_size) == row.peak_bytes


def test_shown_sizes_are_measured_and_have_run_and_accumulating_takes_no_more_than_predicted(
    fitted: tuple[Case, Fit],
) -> None:
    case, found = fitted
    assert 6 <= len(found.rows) <= len(found.measured_sizes) <= 12
    assert all(row.is_measured and row.batch_size in found.measured_sizes for row in found.rows)
    for row in (found.largest, found.fastest):
        assert row.checked_peak_bytes == row.peak_bytes
        with row.plan.apply():
            assert case.peak(row.batch_size) == row.checked_peak_bytes
    for row, more in ((row, row.accumulating(3)) for row in found.rows):
        if more.fits:
            with more.plan.apply():
                assert case.peak(row.batch_size, accumulation=3) <= more.peak_bytes <= found.budget_bytes


def test_gradients_that_a_larger_step_has_count_as_the_device_allocates_them() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))  # six, two, two and one float
    steps = RealStep(model, list), SimpleNamespace(rounded=load_profile("h200").rounded)
    for step, expected in zip(steps, (4 * 11, 512 * 4), strict=True):
        with _gradients_missing_in_forward(model, model[1], step.rounded) as sizes:
            model(torch.ones(1, 3)).sum().backward()
        assert sizes == [expected]
        model.zero_grad()


def test_training_state_is_as_before() -> None:
    torch.manual_seed(0)
    case = Case(gpt2())
    case.make_step(2)[1]()
    before = [value.clone() for value in case.model.state_dict().values()]
    random = torch.get_rng_state()
    graphckpt.fit(case.make_step, batch_sizes=[1, 2, 3], candidates=["full"])
    assert all(torch.equal(one, other) for one, other in zip(before, case.model.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


@as_module(lambda: {"layers": stack_of(ReLULayer, 3)})
def Squared(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers before a head whose memory grows with the square of the batch."""
    x = self.layers(x)
    return (x @ x.T).square().mean()


def squared(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
    model, x = Squared(), torch.ones(batch_size, 16)
    return model, lambda: model(x).backward()


def test_listed_sizes_are_measured_where_memory_is_not_affine() -> None:
    found = graphckpt.fit(squared, batch_sizes=[2, 16, 64, 100, 256], memory_budget="max", candidates=["full"])
    for row in found.rows:
        assert row.is_measured
        direct = graphckpt.plan(*squared(row.batch_size), memory_budget=2**40, candidates=["full"])
        assert row.plain_peak_bytes == direct.plain_peak_bytes


def test_a_search_is_right_where_memory_is_not_affine() -> None:
    budget = {"memory_budget": "1MiB", "candidates": ["full"]}
    limit = graphckpt.fit(squared, device="cpu", **budget).largest.batch_size
    graphckpt.plan(*squared(limit), **budget)
    with pytest.raises(PlanError, match="no plan fits"):
        graphckpt.plan(*squared(limit + 1), **budget)


def test_sizes_that_do_not_fit_with_everything_kept_run_under_the_plans_of_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    case = Case(gpt2())
    smallest = case.peak(2)
    memory = smallest + 3 * (case.peak(4) - smallest)  # of a device: with everything kept 8 samples fit
    monkeypatch.setattr(options, "available_bytes", lambda device, alive, sharers: int(memory / 0.97) + 1)
    found = graphckpt.fit(case.make_step, candidates=["full"])
    assert memory <= found.budget_bytes <= memory + 1
    assert found.headroom_bytes == int(0.03 * (int(memory / 0.97) + 1))
    assert f"; headroom {format_bytes(found.headroom_bytes)}" in str(found)
    assert max(found.measured_sizes) == found.largest_without_recompute.batch_size == 8
    largest = found.largest
    assert largest.batch_size > 8
    assert not largest.is_measured
    assert largest.checked_peak_bytes == largest.peak_bytes <= memory
    with largest.plan.apply():
        assert case.peak(largest.batch_size) == largest.peak_bytes
    larger = case.make_step(largest.batch_size + 1)
    with graphckpt.plan(*larger, memory_budget="min", candidates=["full"]).apply():
        assert case.peak(largest.batch_size + 1) > memory
    more = largest.accumulating(3)
    if more.fits:
        with more.plan.apply():
            assert case.peak(largest.batch_size, accumulation=3) <= more.peak_bytes <= memory
    assert str(largest.batch_size) in str(found)


class Attention(ReLULayer):
    """A layer that keeps a matrix of all pairs of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x @ x.T).softmax(-1) @ x)


def test_the_largest_batch_has_run_where_predictions_are_too_low() -> None:
    model = stack_of(Attention, 6)

    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        x = torch.ones(batch_size, 16)
        return model, lambda: model(x).sum().backward()

    found = graphckpt.fit(make_step, batch_sizes=range(1, 1000), memory_budget="600KiB", candidates=["full"])
    largest = found.largest
    assert largest.batch_size > found.largest_without_recompute.batch_size
    assert largest.checked_peak_bytes <= found.budget_bytes
    with pytest.raises(PlanError, match="no plan fits"):
        graphckpt.plan(*make_step(largest.batch_size + 1), memory_budget="600KiB", candidates=["full"])


def simple(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
    model = stack_of(ReLULayer, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(batch_size, 16)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def absent() -> Fit:
    return graphckpt.fit(simple, memory_budget="65MiB", device="h200", global_batch=96, candidates=["full"])


def test_a_device_that_is_not_there(absent: Fit) -> None:
    assert absent.device == "h200"
    assert absent.largest.batch_size > absent.largest_without_recompute.batch_size
    assert absent.largest.checked_peak_bytes == absent.largest.peak_bytes <= 65 * MIB
    with pytest.raises(ConfigError, match="expected a model"):
        absent.largest.plan.apply()
    with absent.largest.plan.apply(simple(1)[0]):
        pass


def test_a_simulated_step_runs_once_under_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], FakeStep.run
    monkeypatch.setattr(FakeStep, "run", lambda step, *blocks: runs.append(step) or run(step, *blocks))
    (row,) = graphckpt.fit(simple, batch_sizes=[16], device="h200").rows
    assert len(runs) == 1
    again = made_step(lambda: simple(16), FakeDevice(load_profile("h200")), "model")[0].run()
    assert row.checked_peak_bytes == row.plain_peak_bytes == again.peak_bytes
    assert row.checked_seconds == pytest.approx(again.seconds)


def test_rows_at_a_global_batch(absent: Fit) -> None:
    best = absent.at_global_batch(96)
    assert best.batch_size * best.accumulation == best.global_batch == 96
    rows = [row for row in absent.rows if 96 % row.batch_size == 0]
    each = [row.accumulating(96 // row.batch_size) for row in rows]
    assert best.samples_per_second == max(row.samples_per_second for row in each)
    with pytest.raises(PlanError, match="global batch 97: expected a multiple of a batch size that was planned"):
        absent.at_global_batch(97)
    with pytest.raises(ConfigError, match="goal: expected 'throughput' or 'batch', got 'speed'"):
        absent.at_global_batch(96, "speed")


def test_a_size_that_takes_exactly_the_limit_fits() -> None:
    assert largest(lambda size: 12 * size - 996, 1, None, [8, 16]) == 83


def test_an_update_of_several_steps_has_one_step_of_the_optimizer() -> None:
    plan, sizes = SimpleNamespace(predicted_step_seconds=5.0), dict.fromkeys(("plain_peak_bytes", "floor_bytes"), 1)
    row = BatchFit(batch_size=1, plan=plan, is_measured=True, optimizer_seconds=1.0, time_factor=2.0, **sizes)
    assert row.seconds == 2 * 5
    assert replace(row, accumulation=3).seconds == 3 * (2 * 5 - 1) + 1


def test_a_fit_prints_its_sizes_in_80_columns(absent: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(absent)
    assert f"largest batch: {absent.largest.batch_size} (" in text
    assert "fastest: " in text
    assert "global batch 96: " in text
    assert max(map(len, text.splitlines())) <= 80
    assert absent.explain() is absent
    assert capsys.readouterr().out == f"{text}\n"
    html = absent._repr_html_()
    assert 'alt="throughput, peak memory and policies by batch size"' in html
    assert absent.is_searched
    assert html.count("<tr>") == len(absent.rows) + 1
    assert html.count('src="data:image/png;base64,') == 1
    assert repr(absent) == f"<Fit of {len(absent.rows)} batch sizes: largest batch {absent.largest.batch_size} in 65.0 MiB on h200 (simulated)>"  # fmt: skip  # noqa: E501
    plain = json.loads(json.dumps(absent.to_dict()))
    assert plain["largest"] == absent.largest.batch_size
    assert [row["batch_size"] for row in plain["rows"]] == [row.batch_size for row in absent.rows]
    assert plain["global_batch"]["accumulation"] == absent.at_global_batch(96).accumulation
    first = absent.plot(tmp_path / "fit.svg").read_bytes()
    assert absent.plot(tmp_path / "other.svg").read_bytes() == first
    assert b"micro-batch size" in first


def test_each_batch_size_may_have_a_model_of_its_own() -> None:
    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        return Case(gpt2()).make_step(batch_size)

    one_model = Case(gpt2())
    plain = graphckpt.plan(*one_model.make_step(4), memory_budget="max", candidates=["full"]).plain_peak_bytes
    found = graphckpt.fit(make_step, batch_sizes=[4, 8], memory_budget=plain, candidates=["full"])
    assert (found.largest.batch_size, found.largest_without_recompute.batch_size) == (8, 4)
    with found.largest.plan.apply(one_model.model):
        assert one_model.peak(8) == found.largest.peak_bytes <= plain


def test_a_list_of_sizes_is_kept() -> None:
    found = graphckpt.fit(simple, batch_sizes=[64, 8, 8, 100000], memory_budget="256KiB", device="cpu")
    assert [row.batch_size for row in found.rows] == [8, 64, 100000]
    assert [row.fits for row in found.rows] == [True, True, False]
    assert found.largest.batch_size == 64
    assert "does not fit" in str(found)
    assert not found.is_searched
    assert "largest of the given sizes: 64 (" in str(found), "100 may fit as well"
    assert "largest of the given sizes 64 in" in repr(found)


def test_a_range_bounds_the_search() -> None:
    found = graphckpt.fit(simple, batch_sizes=range(3, 21), memory_budget="1GiB", device="cpu")
    assert found.largest.batch_size == 20
    assert found.rows[0].batch_size == 3
    assert "largest of the given sizes: 20 (" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sizes": range(8)}, r"batch_sizes: expected a range from 1 or more"),
        *(
            (
                {"memory_budget": budget},
                rf"memory_budget: expected a budget independent of the batch size, got {got} · fix",
            )
            for budget, got in (("min", "'min'"), (0.6, "0.6"), ("0.6", "0.6"))
        ),
        ({"memory_budget": "1 fortnight"}, r"unknown unit"),
        ({"batch_sizes": 8}, r"ints of 1 or more, got 8 · fix: batch_sizes=\[1, "),
        ({"global_batch": 0}, r"global_batch: expected an int of 1 or more, got 0"),
        ({"global_batch": "64"}, r"global_batch: expected an int of 1 or more, got '64'"),
        ({"device": torch.device("cuda")}, r"device: expected the name of a profile, got .* leave `device` out"),
        ({"device": "cuda:0"}, r"device: unknown profile 'cuda:0' .* leave `device` out for a device that is present"),
        ({"device": "h2000"}, r"did you mean 'h200'"),
        ({"ofload": "cpu"}, r"find_batch_size: unknown option 'ofload'"),
    ],
)
def test_faults_are_one_clear_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphckpt.fit(simple, **{"device": "cpu", **arguments})


@pytest.mark.parametrize(
    ("make_step", "message"),
    [
        (lambda batch_size: nn.Sequential(), "expected a model and a step function, got Sequential"),
        (lambda batch_size: (1, 2), "expected a model and a step function, got int and int"),
        (nn.Linear(1, 1), "expected a function, got Linear"),
    ],
)
def test_a_function_that_makes_no_step_is_an_error(make_step: Callable[[int], object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"make_step: {message}"):
        graphckpt.fit(make_step)


def test_a_budget_that_no_batch_fits_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"no batch fits · the lowest possible peak is .* at batch size 1 · fix: a la"):
        graphckpt.fit(simple, memory_budget="1KiB", device="cpu")
    with pytest.raises(PlanError, match=r"at batch size 4 · fix: smaller batch sizes, or a larger memory_budget"):
        graphckpt.fit(simple, batch_sizes=[4], memory_budget="1KiB", device="cpu")


def test_a_percentage_is_a_share_of_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    half = graphckpt.fit(simple, batch_sizes=[2], memory_budget="50%", device="h200")
    assert half.budget_bytes == load_profile("h200").memory_bytes // 2
    assert half.headroom_bytes == 0
    pages = {"SC_PHYS_PAGES": 1 << 20, "SC_AVPHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(options.os, "sysconf", pages.__getitem__)
    here = graphckpt.fit(simple, batch_sizes=[2], memory_budget="50%")
    assert here.budget_bytes == 2 << 30, "half of what there is, not of what is free"
    assert here.budget_bytes == graphckpt.plan(*simple(2), memory_budget="50%").budget_bytes


def test_max_leaves_headroom_on_a_device_that_is_absent() -> None:
    found = graphckpt.fit(simple, batch_sizes=[2], device="h200")
    total = load_profile("h200").memory_bytes
    assert found.headroom_bytes == load_profile("h200").context_bytes
    assert found.budget_bytes == total - found.headroom_bytes
    assert f"memory budget {format_bytes(found.budget_bytes)} on h200 (simulated); headroom 512 MiB" in str(found)


def test_a_simulated_fit_never_says_that_it_has_run() -> None:
    found = graphckpt.fit(simple, batch_sizes=[2, 4], device="h200", global_batch=8)
    for word in ("measured", "checked", "it ran"):
        assert word not in str(found)
    assert found.is_simulated
    assert found.to_dict()["is_simulated"]
    assert all(line.endswith("simulated") for line in str(found).splitlines()[2:4])
    assert "; simulated: peak" in str(found)
    assert "on h200 (simulated)" in repr(found)
    assert not graphckpt.fit(simple, batch_sizes=[2], memory_budget="1MiB").is_simulated


def test_a_global_batch_that_nothing_fits_is_a_value_of_the_object() -> None:
    found = graphckpt.fit(simple, batch_sizes=[2, 4], device="h200", memory_budget="65MiB", global_batch=8)
    assert found.to_dict()["global_batch"]["fits"]
    none = replace(found, rows=tuple(replace(row, plan=None, accumulating_plan=None) for row in found.rows))
    values = json.loads(json.dumps(none.to_dict()))["global_batch"]
    assert (values["size"], values["fits"]) == (8, False)
    assert "none of the batch sizes 2, 4 fits" in values["fault"]


def wide(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
    model = mlp_layers(3, 128)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.zeros(batch_size * 1024, 128)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_max_finds_the_largest_batch_that_keeps_everything_by_its_reserved_bytes() -> None:
    card = load_profile("rtx3060").with_memory("1GiB")
    found = graphckpt.fit(wide, device=card, candidates=["full"])
    plain = found.largest_without_recompute.batch_size
    assert graphckpt.plan(lambda: wide(plain), memory_budget="max", device=card, candidates=["full"]).keeps_everything
    assert not graphckpt.plan(
        lambda: wide(plain + 1), memory_budget="max", device=card, candidates=["full"]
    ).keeps_everything
    assert found.largest.batch_size > plain
    assert all(row.plan.predicted_reserved_bytes <= found.budget_bytes for row in found.rows if row.fits)
