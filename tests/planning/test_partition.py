"""Plans with slabs, and what is said about parts and groups where there is one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.layer_stacks import mlp_step
from helpers.peaks import tracked_peak

import graphckpt
from graphckpt import ConfigError
from graphckpt.planning import Plan
from graphckpt.planning.candidates import options
from graphckpt.planning.plan_group import planning_group


def test_slabs_hold_what_is_kept_within_the_budget() -> None:
    model, step = mlp_step()
    found = graphckpt.plan(model, step, memory_budget=0.6, candidates=["full"], contiguous=True)
    assert {row.option for row in found.rows} == {"keep + slab", "full + slab"}
    assert all(row.fields["contiguous"] for row in found.rows)
    with found.apply() as handle:
        step()
        assert tracked_peak(model, step) <= found.budget_bytes
        (store,) = {id(w.placement.store): w.placement.store for w in handle._wrappers}.values()
        (place,) = store._open_stores()
        assert place.slab_bytes > 0


def test_layers_joined_to_others_keep_nothing_and_get_no_slab() -> None:
    model, step = mlp_step(num_layers=16, inner=2)
    wanted = {"memory_budget": "min", "candidates": ["full", "joined"], "check": False}
    found = graphckpt.plan(model, step, contiguous=True, **wanted)
    joined = [row for row in found.rows if row.option == "joined"]
    assert joined
    assert all("contiguous" not in row.fields for row in joined)


def test_parts_of_one_process_are_left_out_with_a_note() -> None:
    model, step = mlp_step(num_layers=2)
    found = graphckpt.plan(model, step, memory_budget="min", candidates=["full"], partition=True)
    assert "partition has no effect: there is one process" in found.notes
    assert not any("part" in row.option for row in found.rows)


def test_parts_are_options_of_their_own() -> None:
    assert [option.name for option in options("disk", ["full"], partition=True)] == [
        "keep", "full", "keep + disk", "full + disk", "keep + part", "full + part",
    ]  # fmt: skip


@pytest.mark.parametrize("group", [True, "all", 3])
def test_a_value_that_is_not_a_process_group_is_an_error(group: object) -> None:
    with pytest.raises(ConfigError, match=r"group: expected a ProcessGroup, got .* · fix: use None .* or False"):
        planning_group(group)


def test_a_plan_that_no_file_can_hold_is_an_error(tmp_path: Path) -> None:
    row = graphckpt.planning.rows.PlanRow(block="0", option="full", fields={"partition": object()})
    numbers = {"predicted_peak_bytes": 0, "floor_bytes": 0, "budget_bytes": 0, "plain_peak_bytes": 0}
    plan = Plan(rows=(row,), predicted_step_seconds=0.0, plain_step_seconds=0.0, binding="", **numbers)
    with pytest.raises(ConfigError, match=r"Plan\.save: .* · fix: partition=True"):
        plan.save(tmp_path / "plan.yaml")
    assert not (tmp_path / "plan.yaml").exists()
