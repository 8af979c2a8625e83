"""A head that computes the loss may run in slices, where the layers alone do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import mlp_layers
from helpers.modules import as_module
from helpers.peaks import tracked_peak
from helpers.plans import planner_of
from helpers.train_graphs import SquareGraph
from torch import nn

import graphckpt
from graphckpt import ConfigError, Plan, PlanError, Tiles
from graphckpt.blocks.forward import policy_of
from graphckpt.planning import plan_step
from graphckpt.planning.live_plan import MOST_UPDATES, LivePlan
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.sweep import measure


@as_module(lambda width, num_words: {"words": nn.Linear(width, num_words)})
def Head(self: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(self.words(x), labels, reduction="sum")


@as_module(lambda: {"layers": nn.ModuleList(mlp_layers(4)), "head": Head(16, 2000)})
def Language(self: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Layers whose results are small beside the logits."""
    for layer in self.layers:
        x = layer(x)
    return self.head(x, labels)


def made() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model, x, labels = Language(), torch.randn(256, 16), torch.randint(0, 2000, (256,))
    return model, lambda: model(x, labels).backward()


SLICED = {"head": [Tiles(4, reduce="sum"), Tiles(16, reduce="sum")]}


def test_the_head_is_sliced_where_nothing_else_fits() -> None:
    model, step = made()
    sizes = []
    for coarser in (None, {"head": Tiles(4, reduce="sum")}):
        least = graphckpt.plan(model, step, memory_budget="min", head=coarser).predicted_peak_bytes
        with pytest.raises(PlanError, match="reached in the head and the loss"):
            graphckpt.plan(model, step, memory_budget=least - 1, head=coarser)
        found = graphckpt.plan(model, step, memory_budget=least - 1, head=SLICED)
        assert found.rows[-1].block == "head"
        with found.apply():
            assert tracked_peak(model, step) <= found.predicted_peak_bytes <= found.budget_bytes
        sizes.append(found.rows[-1].fields["activation_checkpointing"]["num_tiles"])
    assert sizes[1] == 16


def test_the_error_names_the_head() -> None:
    model, step = made()
    text = str(planner_of(model, step).infeasible(1000, 2000))
    assert "reached in the head and the loss" in text
    assert "set `head`" in text


@pytest.mark.parametrize(("seconds", "block"), [((1.0, 2.0, 3.0), None), ((3.0, 1.0, 2.0), "head")])
def test_the_head_is_not_sliced_where_there_is_room_unless_slices_are_faster(
    seconds: tuple[float, ...], block: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``seconds`` are those of the step with its loss computed at once, in 4 slices, and in 16."""
    took = iter(seconds)
    monkeypatch.setattr(plan_step, "measure", lambda *args: replace(measure(*args), step_seconds=next(took)))
    model, step = made()
    found = graphckpt.plan(model, step, memory_budget=1.0, head=SLICED)
    assert [row.block for row in found.rows] == [f"layers.{n}" for n in range(4)] + [block] * (block is not None)


def test_the_least_is_that_of_the_finest_slices(tmp_path: Path) -> None:
    model, step = made()
    found = graphckpt.plan(model, step, memory_budget="min", head=SLICED)
    assert found.rows[-1].option == "tiles(16, reduce=sum)"
    found.save(tmp_path / "plan.yaml")
    again = Plan.load(tmp_path / "plan.yaml")
    assert again.policies == found.policies
    with again.apply(model):
        assert tracked_peak(model, step) <= found.predicted_peak_bytes


def test_a_graph_takes_it_and_lets_it_go_again() -> None:
    graph = SquareGraph(Language())
    x, labels = torch.randn(256, 16), torch.randint(0, 2000, (256,))
    cut = graph.plan(x, labels, memory_budget="min", head={"model.head": Tiles(16, reduce="sum")})
    with cut.apply():
        assert graph.model.head.config.activation_checkpointing is not None
    assert graph.model.head.config.activation_checkpointing is None
    cut.apply()
    graph.plan(x, labels, memory_budget="min").apply()
    assert graph.model.head.config.activation_checkpointing is None
    assert cut.predicted_peak_bytes < graph.plan(x, labels, memory_budget="min").predicted_peak_bytes


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"haed": Tiles(4)}, "head: unknown block 'haed' · did you mean 'head'|unknown block 'haed'"),
        ({"": Tiles(4)}, "head: '' contains the layer 'layers.0'"),
        ({"layers": Tiles(4)}, "head: 'layers' contains the layer 'layers.0'"),
        ({"head": None}, "head: expected a rule, got None"),
        ({"head": "tlies"}, "expected a rule, got 'tlies'"),
        (True, "head: expected a mapping, got True"),
    ],
)
def test_a_policy_that_is_not_of_a_head_is_an_error(head: object, message: str) -> None:
    model, step = made()
    with pytest.raises(ConfigError, match=message):
        graphckpt.plan(model, step, memory_budget=0.5, head=head)


@pytest.mark.parametrize(("budget", "option"), [("between", "tiles(4, reduce=sum)"), ("min", "tiles(16, reduce=sum)")])
def test_a_training_takes_it_where_nothing_else_fits(budget: str, option: str) -> None:
    model, step = made()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def update() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()

    update()
    least = {
        tiles: graphckpt.plan(model, update, memory_budget="min", head=tiles and {"head": Tiles(tiles, reduce="sum")})
        for tiles in (None, 4)
    }
    peaks = [least[tiles].predicted_peak_bytes for tiles in (None, 4)]
    lines = []
    size = sum(peaks) // 2 if budget == "between" else budget
    live = LivePlan(model, size, PlanOptions(head=SLICED, progress=False), lines.append)
    try:
        for _ in range(2 * MOST_UPDATES + 2):
            live.begin_step()
            update()
            live.end_step()
        assert live.is_settled
        assert live.plan.rows[-1] == PlanRow(block="head", option=option, fields=live.plan.rows[-1].fields)
        assert tracked_peak(model, update) <= live.plan.budget_bytes
        assert any(line.startswith("no plan fits; plans with tiles(4, reduce=sum) on head") for line in lines) == (
            budget == "between"
        )
    finally:
        live.close()
    assert policy_of(model.head) is None
