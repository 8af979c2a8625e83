"""Plans: the table, the picture, saved and loaded files."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.layer_stacks import gpt2_step, linear_layers, mlp_step
from helpers.peaks import tracked_peak
from helpers.plans import planner_of
from torch import nn

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.planning import Plan
from graphckpt.planning.plot import draw_sweep
from graphckpt.planning.rows import PlanRow, Stage
from graphckpt.units import format_bytes


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, Callable[[], None], graphckpt.Plan]:
    """Returns a model, its step, and the plan with the lowest peak."""
    model, step = mlp_step(num_layers=5)
    return model, step, graphckpt.plan(model, step, memory_budget="min")


def test_save_and_load(planned: tuple[nn.Module, Callable[[], None], graphckpt.Plan], tmp_path: Path) -> None:
    model, step, found = planned
    path = tmp_path / "plan.yaml"
    found.save(path)
    with pytest.raises(ConfigError, match=r"nodir/plan\.yaml: cannot be written: No such file .* existing folder"):
        found.save(tmp_path / "nodir/plan.yaml")
    assert "&" not in path.read_text(encoding="utf-8"), "any line may be copied"
    loaded = Plan.load(path)
    assert loaded.policies == found.policies != {}
    assert loaded.explain(show=False).rows == found.rows
    assert loaded == dataclasses.replace(found, stages=(), notes=())
    with pytest.raises(
        ConfigError, match=r"Plan\.apply: expected a model, since the plan is from a file · fix: plan\.apply\(model\)"
    ):
        loaded.apply()
    with pytest.raises(ConfigError, match=r"a plan from a file has no levels to draw · fix: plan again"):
        loaded.plot(str(tmp_path / "plan.png"))
    with loaded.apply(model):
        assert tracked_peak(model, step) == found.predicted_peak_bytes
    for text in ("", "blocks: {}", "[1, 2]", "plan: {rows: [{block: a}]}", "a: b: c"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"(?s)plan\.yaml: .* · fix: name a file that Plan\.save wrote"):
            Plan.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "none.yaml")


FIXED = Plan(
    rows=(
        *(PlanRow(block=f"h.{n}", option="full", fields={"activation_checkpointing": True}, extra_seconds=0.002)
          for n in range(3)),
        PlanRow(block="h.3", option="full + host", fields={"activation_checkpointing": True, "offload": True},
                extra_seconds=0.001, moved_bytes=3 << 20),
        *(PlanRow(block=f"h.{n}", option="keep", fields={"activation_checkpointing": False}) for n in (4, 5)),
    ),
    predicted_peak_bytes=11 << 20, predicted_step_seconds=0.11, binding="backward of h.3", floor_bytes=5 << 20,
    budget_bytes=12 << 20, plain_peak_bytes=20 << 20, plain_step_seconds=0.1, correction_bytes=1 << 10, device="h200",
    notes=("something to [know]",),
    stages=tuple(
        Stage(name=name, start_bytes=start << 20, peak_bytes=peak << 20)
        for name, start, peak in (
            ("before the first block", 2, 3), ("forward of h.0", 3, 4), ("after the forward of h.0", 4, 4),
            ("forward of h.3", 4, 8), ("forward of h.5", 7, 8), ("the head and the loss, after h.5", 7, 9),
            ("backward of h.5", 8, 9), ("backward of h.3", 7, 11), ("backward of h.0", 5, 6), ("optimizer", 4, 5),
        )
    ),
)  # fmt: skip


CORRECTED = "(corrected by 1.00 KiB after a measured step)"
PEAK_OF_FIXED = f"predicted peak 11.0 MiB, 91.7 % of the budget; reached during the backward of h.3 {CORRECTED}"


def test_explain_prints_policies_costs_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert FIXED.explain(show=False) is FIXED
    assert capsys.readouterr().out == ""
    FIXED.explain()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        "block  policy       blocks    costs  offloaded",
        "----------------------------------------------",
        "h.0-2  full              3  6.00 ms          -",
        "h.3    full + host       1  1.00 ms   3.00 MiB",
        "h.4-5  keep              2        -          -",
        "memory budget 12.0 MiB on h200",
        *textwrap.wrap(PEAK_OF_FIXED, 80),
        "step 110 ms, +10.0 % over keeping everything",
        "everything kept: 20.0 MiB; lowest possible: 5.00 MiB",
        "* something to [know]",
    ]
    assert str(FIXED).splitlines() == printed
    assert "h.0-2" in FIXED._repr_html_()
    assert repr(FIXED) == "<Plan of 6 blocks: peak 11.0 MiB of a budget of 12.0 MiB>"
    simulated = dataclasses.replace(FIXED, is_simulated=True, memory_budget=0.6)
    text = "budget of 12.0 MiB (0.6 of the plain step's peak), simulated on h200"
    assert repr(simulated) == f"<Plan of 6 blocks: peak 11.0 MiB of a {text}>"
    assert "memory budget 12.0 MiB (50% of the device's memory) on h200" in str(
        dataclasses.replace(FIXED, memory_budget="50%")
    )
    assert json.loads(json.dumps(FIXED.to_dict()))["plan"]["rows"][3]["option"] == "full + host"


def test_levels_have_one_name_in_all_tables_and_their_ops_stand_below(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, step = gpt2_step()
    uniform = planner_of(model, step).uniform()
    found = next(choice for choice in uniform.values() if choice.rows[0].option.startswith("selective(level"))
    found.save(tmp_path / "plan.yaml")
    for each in (found, Plan.load(tmp_path / "plan.yaml")):
        each.explain()
        with each.apply(model) as handle:
            with handle.measure():
                step()
            seen = handle.explain()
        rules = {row.block: row.rule for row in seen.rows}
        assert {row.block: rules[row.block] for row in found.rows} == {row.block: row.option for row in found.rows}
        printed = capsys.readouterr().out.splitlines()
        assert max(map(len, printed)) <= 80
        assert sum("keeps the results of" in line for line in printed) == 2 * len(seen.legend) > 0
        assert not any("aten." in line for line in printed if line.startswith(found.rows[0].block[:2]))


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_the_picture_of_a_plan(tmp_path: Path, name: str) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        FIXED.plot(str(tmp_path / folder / name))
    one, other = ((tmp_path / folder / name).read_bytes() for folder in "ab")
    assert one == other
    assert b"\x89PNG" in one[:100] if name.endswith("png") else b"<svg" in one[:2000]


def words_of(path: Path) -> list[str]:
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_the_picture_names_what_counts(
    planned: tuple[nn.Module, Callable[[], None], graphckpt.Plan], tmp_path: Path
) -> None:
    found = planned[2]
    path = tmp_path / "plan.svg"
    found.plot(str(path))
    words = words_of(path)
    assert {row.option for row in found.rows} | {"outside of blocks", "memory budget"} <= set(words)
    assert {f"peak {format_bytes(found.predicted_peak_bytes)}", found.binding} <= set(words)
    assert f"memory budget {format_bytes(found.budget_bytes)}" in words
    dataclasses.replace(found, budget_bytes=1 << 50).plot(str(path))
    assert "memory budget" not in words_of(path), "it would press the levels flat"
    with pytest.raises(ConfigError, match=r"got '\.jpg'"):
        found.plot(str(tmp_path / "plan.jpg"))


def test_the_picture_of_a_sweep(tmp_path: Path) -> None:
    def plan_of(gib: int, seconds: float) -> graphckpt.Plan:
        return dataclasses.replace(FIXED, predicted_peak_bytes=gib << 30, predicted_step_seconds=seconds)

    front = [plan_of(3, 0.3), plan_of(2, 0.4), plan_of(5, 0.2)]
    uniform = {"full": plan_of(2, 0.5), "keep": plan_of(5, 0.2)}
    for name in ("front.png", "front.svg"):
        assert draw_sweep(front, uniform, tmp_path / name).stat().st_size > 1000
    words = words_of(tmp_path / "front.svg")
    assert {"chosen by the planner", "full", "keep", "peak memory (GiB)", "step time (ms)"} <= set(words)
    draw_sweep([], uniform, tmp_path / "front.svg")
    draw_sweep(front, {}, tmp_path / "front.svg")
    with pytest.raises(ConfigError, match="expected a plan to draw, got none"):
        draw_sweep([], {}, tmp_path / "front.svg")
    with pytest.raises(ConfigError, match="expected an existing folder"):
        draw_sweep(front, {}, tmp_path / "none" / "front.svg")


def test_the_plain_peak_of_an_absent_device_is_that_of_the_plan_that_keeps_everything() -> None:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = linear_layers(4, 64, nn.GELU)
        average, x = [parameter.detach().clone() for parameter in model.parameters()], torch.ones(8, 64)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)  # it is used late in the step

        return model, step

    plan = graphckpt.plan(make, memory_budget="max", device="h100")
    assert plan.keeps_everything
    assert plan.plain_peak_bytes == plan.predicted_peak_bytes
