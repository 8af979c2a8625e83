"""What a step on a simulated GPU puts on the host is on the host, and its copies take the time of the link."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.planning import Plan
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

MIB = 2**20
WIDTH = 512
CPU = torch.device("cpu")
Step = Callable[[], object]


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).to("cuda")


def planned(make: Callable[[], tuple[nn.Module, Step]], budget: str = "max") -> Plan:
    return graphckpt.plan(make, device="h100", memory_budget=budget, candidates=["full"])


def step_of(model: nn.Module, x: Callable[[], torch.Tensor], more: Step = lambda: None, context: Any = None) -> Step:
    def step() -> None:
        with (context or contextlib.nullcontext)():
            loss = model(x()).sum()
        loss.backward()
        more()
        model.zero_grad()

    return step


def plain() -> tuple[nn.Module, Step]:
    model, x = layers(), torch.zeros(1024, WIDTH, device="cuda")
    return model, step_of(model, lambda: x)


def beside(new: Callable[[], torch.Tensor]) -> Callable[[], tuple[nn.Module, Step]]:
    def make() -> tuple[nn.Module, Step]:
        model, x, other = layers(), torch.zeros(1024, WIDTH, device="cuda"), new()
        return model, step_of(model, lambda: x, lambda: other.add_(1))

    return make


@pytest.mark.parametrize(
    "new",
    [
        lambda: torch.zeros(64 * MIB, device="cpu"),
        lambda: torch.zeros(64 * MIB, device=CPU),
        lambda: torch.zeros(64 * MIB, device="cpu:0"),
        lambda: torch.zeros(64 * MIB, device=torch.device("cpu")),
        lambda: torch.zeros(64 * MIB, device="cpu", pin_memory=True),
        lambda: torch.zeros(64 * MIB, pin_memory=True),
        lambda: torch.zeros(64 * MIB).pin_memory(),
        lambda: torch.zeros(64 * MIB, device="cuda").cpu(),
        lambda: torch.zeros_like(torch.zeros(64 * MIB, device="cuda"), device="cpu"),
        lambda: torch.zeros(1, device="cuda").new_zeros(64 * MIB, device="cpu"),
        lambda: torch.zeros(64 * MIB, device="cuda").to(torch.zeros(1, device="cpu")),
    ],
)
def test_tensors_on_the_host_are_not_memory_of_the_gpu(new: Callable[[], torch.Tensor]) -> None:
    plan = planned(beside(new))
    assert plan.predicted_peak_bytes == planned(plain).predicted_peak_bytes
    assert plan.assumptions[-1].startswith("tensors on the host")


@pytest.mark.parametrize("new", [lambda: torch.zeros(64 * MIB), lambda: torch.zeros(64 * MIB, device="cuda:0")])
def test_tensors_on_no_device_that_is_named_are_memory_of_the_gpu(new: Callable[[], torch.Tensor]) -> None:
    assert planned(beside(new)).predicted_peak_bytes == planned(plain).predicted_peak_bytes + 256 * MIB


@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu_moves_saved_tensors(pin_memory: bool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model, x = layers(), torch.zeros(16384, WIDTH, device="cuda")
        return model, step_of(model, lambda: x, context=lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin_memory))

    def kept() -> tuple[nn.Module, Step]:
        model, x = layers(), torch.zeros(16384, WIDTH, device="cuda")
        return model, step_of(model, lambda: x)

    moved, plan = planned(make), planned(kept)
    saved = 4 * 16384 * WIDTH * 4  # the results of tanh; all inputs but the first are results
    assert moved.predicted_peak_bytes < plan.predicted_peak_bytes - saved // 3
    # each is copied out and in: the input and the weight of each product, and the result of each tanh
    machine = load_profile("h100")
    link = 2 * (2 * saved + 4 * WIDTH * WIDTH * 4) / (machine.copy_out * machine.efficiency["copy"])
    assert moved.plain_step_seconds == pytest.approx(plan.plain_step_seconds + link, rel=0.02)


@pytest.mark.parametrize("move", [lambda x: x.to("cuda"), lambda x: x.cuda(non_blocking=True)])
@pytest.mark.parametrize(
    "data", [lambda: torch.zeros(65536, WIDTH), lambda: torch.cat([torch.zeros(1024, WIDTH)] * 64)]
)
def test_data_that_a_step_copies_to_the_gpu_are_on_the_host(data: Any, move: Any) -> None:
    def make() -> tuple[nn.Module, Step]:
        model, rows = layers(), data()
        return model, step_of(model, lambda: move(rows[:1024]))

    plan, resident = planned(make), planned(plain)
    assert plan.predicted_peak_bytes <= resident.predicted_peak_bytes
    machine = load_profile("h100")
    seconds = 1024 * WIDTH * 4 / (machine.copy_in * machine.efficiency["copy"])
    assert plan.plain_step_seconds == pytest.approx(resident.plain_step_seconds + seconds, rel=1e-6)


def test_data_of_a_script_that_names_no_device_are_on_the_gpu() -> None:
    def make() -> tuple[nn.Module, Step]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        rows = torch.zeros(65536, WIDTH)
        return model, step_of(model, lambda: rows[:1024].to(next(model.parameters()).device))

    assert planned(make).predicted_peak_bytes > 65536 * WIDTH * 4


@pytest.mark.parametrize(
    "average",
    [
        lambda model: {name: value.detach().cpu() for name, value in model.state_dict().items()},
        lambda model: dict(copy.deepcopy(model).cpu().state_dict()),
        lambda model: dict(AveragedModel(model, device="cpu").module.state_dict()),
    ],
)
def test_averages_of_weights_on_the_host(average: Any) -> None:
    def make() -> tuple[nn.Module, Step]:
        model, x = layers(), torch.zeros(1024, WIDTH, device="cuda")
        averages = average(model)

        def update() -> None:
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    averages[name].lerp_(value.to("cpu"), 0.1)

        return model, step_of(model, lambda: x, update)

    assert planned(make).predicted_peak_bytes == planned(plain).predicted_peak_bytes


def test_an_optimizer_on_the_host_has_its_states_there() -> None:
    def make() -> tuple[nn.Module, Step]:
        model, x = layers(), torch.zeros(1024, WIDTH, device="cuda")
        weights = [parameter.detach().cpu().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(weights)

        def update() -> None:
            for weight, parameter in zip(weights, model.parameters(), strict=True):
                weight.grad = parameter.grad.to("cpu", non_blocking=True)
            optimizer.step()
            with torch.no_grad():
                for weight, parameter in zip(weights, model.parameters(), strict=True):
                    parameter.copy_(weight)

        return model, step_of(model, lambda: x, update)

    assert planned(make).predicted_peak_bytes == pytest.approx(planned(plain).predicted_peak_bytes, abs=2**13)


def test_an_op_of_both_devices_is_refused_as_on_a_gpu() -> None:
    def make() -> tuple[nn.Module, Step]:
        model, x, bias = layers(), torch.zeros(8, WIDTH, device="cuda"), torch.zeros(WIDTH, device="cpu")
        return model, lambda: (model(x) + bias).sum().backward()

    with pytest.raises(ConfigError, match=r"test_host.py, line \d+\) gives aten.add.Tensor a tensor on the host"):
        planned(make)


@pytest.mark.parametrize("is_model_moved", [False, True])
def test_a_model_on_no_device_that_is_named_takes_inputs_of_the_gpu(is_model_moved: bool) -> None:
    def make() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        x = torch.zeros(4, 8, device="cuda")
        return model.to("cuda") if is_model_moved else model, step_of(model, lambda: x, optimizer.step)

    assert planned(make).predicted_peak_bytes > 0


def test_a_simulated_cpu_has_one_memory() -> None:
    with FakeDevice(load_profile("cpu")):
        assert torch.zeros(1).device == torch.zeros(1, device="cuda").device == torch.zeros(1, device="cpu").device
