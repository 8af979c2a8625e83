"""The page of a plan: a slider over budgets changes peak, time and policies, in a browser without a network."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.browser import needs_chromium, opened
from helpers.layer_stacks import mlp_step

import graphckpt
from graphckpt.planning.plan import Plan
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.units import format_bytes

MOST_BYTES = 6_000_000


@pytest.fixture(scope="module")
def plan() -> Plan:
    return graphckpt.plan(*mlp_step(rows=1024), memory_budget=0.6)


def test_the_front_of_a_plan_holds_the_plans_for_all_budgets(plan: Plan) -> None:
    assert plan.front is not None
    front = plan.front()
    assert len(front) > 2
    peaks = [found.predicted_peak_bytes for found in front]
    seconds = [found.predicted_step_seconds for found in front]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert peaks[0] == plan.floor_bytes
    assert {found.correction_bytes for found in front} == {plan.correction_bytes}


def test_the_front_below_a_child_has_the_names_below_it(plan: Plan) -> None:
    named = replace(plan, rows=tuple(replace(row, block=f"model.{row.block}") for row in plan.rows))
    named = replace(named, front=lambda: [named])
    relative = named.relative_to("model")
    assert relative.front is not None
    assert [row.block for row in relative.front()[0].rows] == [row.block for row in plan.rows]


def test_a_plan_can_be_pickled_without_its_front(plan: Plan) -> None:
    read = pickle.loads(pickle.dumps(plan.relative_to("model")))
    assert read == plan.relative_to("model")
    assert read.front is None


def test_a_plan_of_a_thousand_blocks_is_a_small_page(plan: Plan, tmp_path: Path) -> None:
    names = [f"model.decoder.layers.{number}" for number in range(1000)]
    rows = tuple(PlanRow(block=n, option=f"option {at % 9}", fields={}) for at, n in enumerate(names))
    intervals = [(at, f"{phase} of {name}") for phase in ("forward", "backward") for at, name in enumerate(names)]
    stages = tuple(Stage(name=name, start_bytes=1, peak_bytes=2**33 + at) for at, name in intervals)
    shown = replace(plan, rows=rows, stages=stages)
    plans = [replace(shown, predicted_peak_bytes=2**30 + number) for number in range(40)]
    path = replace(plans[7], front=lambda: plans).plot(tmp_path / "plan.html")
    assert path.stat().st_size < MOST_BYTES
    text = path.read_text("utf-8")
    assert "<title>Activation checkpointing plan</title>" in text
    assert " of 40 plans are shown." in text


SLIDER = """(() => {
  const box = document.querySelector("#plans .slider-rail-touch-rect").getBoundingClientRect();
  return [box.x, box.y, box.width, box.height];
})()"""
STATE = """(() => {
  const plot = document.querySelector("#plans"), bars = plot.data.filter(trace => trace.type === "bar");
  return {
    title: document.querySelector("#plans .gtitle").textContent,
    policies: bars[0].x.map((_, at) => bars.find(trace => trace.y[at] === 1).name),
    peak: plot.data[1].x[0],
    label: plot.layout.annotations[0].text,
    ticks: plot.layout.xaxis3.ticktext,
  };
})()"""


@pytest.mark.slow
@needs_chromium
def test_the_slider_changes_the_plan_without_a_network(plan: Plan, tmp_path: Path) -> None:
    assert plan.front is not None
    highest = plan.front()[-1]
    plan.plot(tmp_path / "plan.html")
    with opened(tmp_path / "plan.html") as page:
        before = page.evaluate(STATE)
        assert before["policies"] == [row.option for row in plan.rows]
        assert plan.binding in before["label"], "the chart names the interval of the peak"
        assert before["ticks"] == [row.block.rpartition(".")[2] for row in plan.rows]
        x, y, width, height = page.evaluate(SLIDER)
        page.click(x + width - 10, y + height / 2)
        after = page.evaluate(STATE)
        assert after["policies"] == [row.option for row in highest.rows] != before["policies"]
        assert after["title"] != before["title"]
        assert format_bytes(highest.predicted_peak_bytes) in after["label"] != before["label"]
        assert after["peak"] > before["peak"]
        assert page.faults == []
        assert page.requests == []
