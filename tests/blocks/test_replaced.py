"""Modules with a policy that the program replaces or drops after `apply`: its step runs on, and `explain()` says so."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphckpt
from graphckpt import errors

# Legend: N rows, C channels, T steps
N, C, T = 4, 6, 9
NO_POLICY = "it was replaced after its policy was set, and the new module has none · fix: set policies after"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(C, C, 3, padding=1), nn.BatchNorm1d(C)

    def forward(self, x_NCT: Tensor) -> Tensor:
        return x_NCT + self.norm(self.conv(x_NCT)).relu()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, x_NCT: Tensor) -> Tensor:
        return self.layers(x_NCT)


class Adapted(nn.Module):
    """Stands in place of a layer, and calls it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.more = base, nn.Conv1d(C, C, 1)

    def forward(self, x_NCT: Tensor) -> Tensor:
        return self.base(x_NCT) + self.more(x_NCT)


def replace(model: Network) -> None:
    model.layers[1] = Layer()


def replace_all(model: Network) -> None:
    for number in range(3):
        model.layers[number] = Layer()


def replace_and_keep(model: Network) -> None:
    KEPT.append(model.layers[1])
    model.layers[1] = Layer()


KEPT: list[nn.Module] = []


def convert(model: Network) -> None:
    nn.SyncBatchNorm.convert_sync_batchnorm(model)


def drop(model: Network) -> None:
    del model.layers[2]


def drop_first(model: Network) -> None:
    del model.layers[0]  # the others have other names then


def prune(model: Network) -> None:
    model.layers[1] = nn.Identity()


def copy_one(model: Network) -> None:
    model.layers[1] = copy.deepcopy(model.layers[1])


def adapt(model: Network) -> None:
    model.layers[1] = Adapted(model.layers[1])


CHANGES: dict[str, tuple[Callable[[Network], None], str, dict[str, str]]] = {
    "replaced": (replace, "layers.*", {"layers.1": NO_POLICY}),
    "all replaced": (replace_all, "layers.*", {"layers.0 and 2 more": NO_POLICY}),
    "replaced, and kept elsewhere": (replace_and_keep, "layers.*", {"layers.1": NO_POLICY}),
    "norms converted": (convert, "layers.*.norm", {"layers.0.norm and 2 more": NO_POLICY}),
    "dropped": (drop, "layers.*", {"layers.2": "it was removed from the model after its policy was set"}),
    "first dropped": (drop_first, "layers.*", {"layers.0": "it was replaced by a module that has a policy"}),
    "pruned": (prune, "layers.*", {"layers.1": NO_POLICY}),
    "copied": (copy_one, "layers.*", {"layers.1": "it was replaced by a module that has a policy"}),
    "adapted": (adapt, "layers.*", {}),
}
RULES: dict[str, Any] = {
    "full": True,
    "selective": "selective",
    "disk": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
}


def step(model: Network, x_NCT: Tensor) -> None:
    model.zero_grad()
    model(x_NCT).square().mean().backward()


def states(model: Network) -> dict[str, Tensor]:
    return model.state_dict() | {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:offload to 'disk' saves")
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("change", CHANGES)
def test_the_step_is_that_of_the_model_as_it_is(
    change: str,
    rule: bool | str | dict[str, object],
    steps_before: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "_WARNED", set())
    act, blocks, notes = CHANGES[change]

    def run(*, under_policies: bool) -> tuple[list[dict[str, Tensor]], graphckpt.Handle | None]:
        torch.manual_seed(0)
        model, x_NCT = Network(), torch.randn(N, C, T)
        handle = graphckpt.apply(model, {blocks: rule}) if under_policies else None
        for _ in range(steps_before):
            step(model, x_NCT)
        if handle is not None and steps_before:
            handle.explain(show=False)
        act(model)
        gc.collect()
        found = []
        for _ in range(2):
            step(model, x_NCT)
            found.append(states(model))
        if handle is not None:
            assert "Handle(Network; " in repr(handle)
            explanation = handle.explain(show=False)
            with handle.measure():
                step(model, x_NCT)
            rows = {row.block: row for row in handle.explain(show=False).rows}
            for each in (explanation, handle.explain(show=False)):
                said = dict(warning.split(": ", 1) for warning in each.warnings if "after its policy" in warning)
                said |= dict(warning.split(": ", 1) for warning in each.warnings if "that has a policy" in warning)
                assert said.keys() == notes.keys()
                assert all(said[name].startswith(text) for name, text in notes.items())
            if change == "replaced":
                assert (rows["layers.1"].rule, rows["layers.1"].reruns) == ("keep", 0)
                assert rows["layers.1"].bytes_before > 0
                assert rows["layers.1"].note.startswith(NO_POLICY)
            row = rows[{"norms converted": "layers.0.norm", "first dropped": "layers.1"}.get(change, "layers.0")]
            assert row.reruns == (change not in ("all replaced", "norms converted"))
            handle.remove()
            graphckpt.remove(model)  # the copy's own
            assert not any("forward" in vars(module) for module in model.modules())
        else:
            step(model, x_NCT)
        step(model, x_NCT)
        return [*found, states(model)], handle

    plain, _ = run(under_policies=False)
    with caplog.at_level(logging.WARNING, "graphckpt"):
        ours, _ = run(under_policies=True)
    for one, other in zip(plain, ours, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    lines = [record.getMessage() for record in caplog.records if "policy" in record.getMessage()]
    assert len(lines) == len(notes), "one for all blocks alike"
    KEPT.clear()


def test_between_forward_and_backward() -> None:
    def run(*, under_policies: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, x_NCT = Network(), torch.randn(N, C, T)
        weights = list(model.parameters())
        if under_policies:
            handle = graphckpt.apply(model, {"layers.*": True})
        loss = model(x_NCT).square().mean()
        KEPT.append(model.layers[1])  # else backward itself needs a module that is gone
        model.layers[1] = Layer()
        loss.backward()
        if under_policies:
            handle.explain(show=False)
            handle.remove()
        return [weight.grad for weight in weights]

    plain, ours = run(under_policies=False), run(under_policies=True)
    KEPT.clear()
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))  # type: ignore[arg-type]


def test_a_module_of_checkpoint_wrapper() -> None:
    torch.manual_seed(0)
    model, x_NCT = Network(), torch.randn(N, C, T)
    for layer in model.layers:
        graphckpt.checkpoint_wrapper(layer)
    replace(model)
    plain = copy.deepcopy(model)
    graphckpt.remove(plain)
    step(model, x_NCT)
    step(plain, x_NCT)
    one, other = states(model), states(plain)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class Step(graphckpt.Graph):
    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model
        for layer in self.model.layers:
            layer.config.activation_checkpointing = True
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, x_NCT: Tensor) -> Tensor:
        loss = self.model(x_NCT).square().mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("num_calls", [0, 3])
@pytest.mark.parametrize("change", ["replaced", "dropped", "pruned"])
def test_a_graph(change: str, num_calls: int) -> None:
    act, _, notes = CHANGES[change]
    torch.manual_seed(0)
    model, x_NCT = Network(), torch.randn(N, C, T)
    graph = Step(model)
    for _ in range(num_calls):
        graph(x_NCT)
    act(model)
    for _ in range(3):
        graph(x_NCT)
    with graph.measure():
        graph(x_NCT)
    warnings = graph.explain(show=False).warnings
    for name, text in notes.items() if num_calls else ():
        assert any(warning.startswith(f"model.{name}: {text}") for warning in warnings)
    assert graph.verify(x_NCT)


def test_a_plan() -> None:
    torch.manual_seed(0)
    model, x_NCT = Network(), torch.randn(N, C, T)
    plan = graphckpt.plan(
        model, lambda: step(model, x_NCT), memory_budget="min", select="layers.*", candidates=["full"], progress=False
    )
    replace(model)
    plain = copy.deepcopy(model)
    with plan.apply() as handle:
        step(model, x_NCT)
        step(plain, x_NCT)
        assert all(row.rule == "full" for row in handle.explain(show=False).rows)  # type: ignore[union-attr]
        replace(model)
        step(model, x_NCT)
        assert NO_POLICY in "".join(handle.explain(show=False).warnings)  # type: ignore[union-attr]
