"""The value check on CUDA: nothing waits for the device in the step, and a difference is a warning in a later one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphckpt
from graphckpt import Graph, Selective
from graphckpt.engine import values

pytestmark = pytest.mark.gpu

D = 32


class Reader(nn.Module):
    """A block that reads an attribute of a class beside its arguments."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * Reader.factor))


@pytest.fixture(autouse=True)
def factor() -> Iterator[None]:
    yield
    Reader.factor = 1.0
    values.report_differences()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Reader(), Reader()).cuda()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has waited for the device, by name."""
    names: list[str] = []

    def note(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: names.append(name) or function(*args, **more))

    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (torch.Tensor, "item"),
        (torch.cuda.Stream, "synchronize"),
        (torch, "equal"),
    ):
        note(owner, name)
    return names


def step(model: nn.Module, factor: float = 1.0) -> None:
    """A step; ``factor`` is what the blocks read from the end of the forward on."""
    Reader.factor = 1.0
    loss = model(torch.randn(8, D, device="cuda")).square().sum()
    Reader.factor = factor
    loss.backward()
    Reader.factor = 1.0


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("rule", [True, Selective("matmul")])
def test_a_difference_is_one_warning_for_each_block(
    rule: Any, model: nn.Module, waits: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with graphckpt.apply(model, {"*": rule}) as handle:
        step(model)
        waits.clear()
        step(model, 2.0)
        assert not waits, "the step waits for nothing"
        torch.cuda.synchronize()
        step(model, 2.0)  # its forward reads what has been copied
        torch.cuda.synchronize()
        step(model)
        texts = warnings_in(caplog)
        assert len(texts) == 2, "one for each block, in two steps that differ"
        assert texts[0].startswith("graphckpt: 1: saved tensor ")
        assert "saved at test_values.py:" in texts[0]
        assert "float32[8, 32]" in texts[0]
        assert "the update that followed it was made" in texts[0]
        notes = [row.note for row in handle.explain(show=False).rows]
        assert all("the value check has found a difference" in note for note in notes)


def test_remove_reads_what_is_left(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    handle = graphckpt.apply(model, {"*": True})
    step(model, 2.0)
    handle.remove()
    assert len(warnings_in(caplog)) == 2


def test_values_reads_at_the_end_of_backward(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with graphckpt.apply(model, {"*": True}, determinism_check="values"):
        for _ in range(5):
            step(model)
        assert not warnings_in(caplog)
        step(model, 1.001)
        assert len(warnings_in(caplog)) == 2, "before the update"


@pytest.mark.parametrize("check", ["default", "values"])
def test_no_alarm_and_the_same_bits(check: str, model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    def bits(policies: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        blocks = nn.Sequential(*model, nn.Dropout(0.2))
        with graphckpt.apply(blocks, policies, determinism_check=check) if policies else torch.enable_grad():
            for _ in range(5):
                step(blocks)
        return [parameter.grad.clone().cpu() for parameter in model.parameters()]

    plain = bits({})
    for rule in (True, Selective("matmul")):
        assert all(torch.equal(a, b) for a, b in zip(bits({"[01]": rule}), plain, strict=True))
    assert not warnings_in(caplog)


class Train(Graph):
    def __init__(self, model: nn.Module, check: str) -> None:
        super().__init__()
        self.model = model
        self.config.capture = "cuda_graph"
        self.config.determinism_check = check
        for block in self.model:
            block.config.activation_checkpointing = True
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, fused=True))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("check", ["default", "values"])
def test_of_a_captured_step_the_warm_up_is_checked(
    check: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    begin = values.ValueCheck.__init__
    monkeypatch.setattr(
        values.ValueCheck, "__init__", lambda self, *a, **k: calls.append(graph._step.num_calls) or begin(self, *a, **k)
    )
    graph = Train(model, check)
    for _ in range(6):
        graph(torch.randn(8, D, device="cuda"))
    assert graph._step.captured is not None
    assert graph._step.captured.num_replays == 3
    assert set(calls) == {2}, "the only call before the capture that is not measured op by op"
    values.report_differences()
    texts = warnings_in(caplog)
    if check == "values":
        assert [text for text in texts if "has no effect in replays of a CUDA graph" in text]
    else:
        assert not texts


def test_the_state_of_a_graph_comes_after_the_reports(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    graph = Train(model, "default")
    graph.config.capture, graph.config.measure = "eager", False
    build = type(graph).build

    def moved(self: Train, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        Reader.factor = 2.0
        loss.backward()
        Reader.factor = 1.0
        return loss

    type(graph).build = moved  # type: ignore[method-assign]
    try:
        graph(torch.randn(8, D, device="cuda"))
        assert not warnings_in(caplog)
        graph.state_dict()
        assert len(warnings_in(caplog)) == 2
    finally:
        type(graph).build = build  # type: ignore[method-assign]
