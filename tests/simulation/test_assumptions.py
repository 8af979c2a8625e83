"""A plan for an absent device says which kernels, autocast and optimizer implementation its step ran with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import linear_layers, stack_of
from torch import Tensor, nn
from torch.nn import functional as F

import graphckpt
from graphckpt import ConfigError, Plan
from graphckpt.planning.candidates import KEEP
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import made_step
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Layer(nn.Module):
    """Attention of four heads, fused or with its own softmax."""

    def __init__(self, is_eager: bool) -> None:
        super().__init__()
        self.project, self.is_eager = nn.Linear(64, 64), is_eager

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        if self.is_eager:
            weights = (q @ q.transpose(-1, -2)).softmax(-1)
            mixed = F.dropout(weights, 0.1) @ q
        else:
            mixed = F.scaled_dot_product_attention(q, q, q)
        return x + mixed.transpose(1, 2).flatten(2)


def maker(
    optimizer: MakeOptimizer | None,
    *,
    is_eager: bool = False,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[], tuple[nn.Module, Callable[[], None]]]:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = stack_of(lambda: Layer(is_eager), 4).to("cuda", dtype)
        updates = optimizer(model.parameters()) if optimizer is not None else None
        x = torch.randn(2, 32, 64, device="cuda", dtype=dtype)

        def step() -> None:
            with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
                loss = model(x).square().mean()
            loss.backward()
            if updates is not None:
                updates.step()
                updates.zero_grad()

        return model, step

    return make


def adam(**options: Any) -> MakeOptimizer:
    return lambda parameters: torch.optim.AdamW(parameters, **options)


@pytest.mark.parametrize(
    ("device", "make", "assumptions"),
    [
        ("a100-40g", maker(adam()), ("attention efficient", "autocast off", "AdamW foreach")),
        ("a100-40g", maker(adam(fused=True), dtype=torch.bfloat16), ("attention flash", "autocast off", "AdamW fused")),
        (
            "h100",
            maker(adam(foreach=False), autocast=torch.bfloat16),
            ("attention cudnn", "autocast bfloat16", "AdamW in a loop"),
        ),
        ("t4", maker(adam(), autocast=torch.float16), ("attention efficient", "autocast float16", "AdamW foreach")),
        ("t4", maker(adam(), autocast=torch.bfloat16), ("attention math", "autocast bfloat16", "AdamW foreach")),
        (
            "v100-16g",
            maker(lambda parameters: torch.optim.SGD(parameters, lr=0.1), is_eager=True),
            ("attention eager (softmax in the model)", "autocast off", "SGD foreach"),
        ),
        (
            "h100",
            maker(None, is_eager=True, autocast=torch.bfloat16),
            ("attention eager (softmax in the model)", "autocast bfloat16", "no optimizer"),
        ),
    ],
)
def test_a_plan_states_what_its_step_ran(
    device: str, make: Callable[[], tuple[nn.Module, Callable[[], None]]], assumptions: tuple[str, ...], tmp_path: Path
) -> None:
    plan = graphckpt.plan(make, memory_budget="min", device=device)
    assert plan.assumptions == assumptions
    assert f"assumed: {', '.join(assumptions)}\n" in f"{plan}\n"
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml").assumptions == assumptions
    assert f"# assumed: {assumptions[0]}" in (tmp_path / "plan.yaml").read_text()
    plan.plot(tmp_path / "plan.html")
    assert assumptions[0] in (tmp_path / "plan.html").read_text()


def test_a_model_without_attention_and_a_softmax_elsewhere_assume_none() -> None:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = linear_layers(3, 8, lambda: nn.Softmax(-1))
        return model, lambda: model(torch.randn(2, 4, 8)).sum().backward()

    assert graphckpt.plan(make, memory_budget="min", device="h100").assumptions == ("autocast off", "no optimizer")


def test_a_step_that_runs_on_its_device_assumes_nothing() -> None:
    model = stack_of(lambda: nn.Linear(8, 8), 3)
    plan = graphckpt.plan(model, lambda: model(torch.randn(2, 8)).sum().backward(), memory_budget="min", select="*")
    assert plan.assumptions == ()
    assert "assumed" not in str(plan)


def test_to_observe_a_step_does_not_change_its_peak() -> None:
    device = FakeDevice(load_profile("v100-16g"))
    step, model = made_step(maker(adam(), is_eager=True, autocast=torch.float16), device, "plan.model")
    blocks = Blocks([(name, module) for name, module in model.named_children()])
    kept = [KEEP] * len(blocks.names)
    sample = step.sample(blocks, kept)
    assert step.assumptions
    assert sample.peak_bytes == step.run().peak_bytes == step.sample(blocks, kept).peak_bytes


def test_a_fit_states_them_too() -> None:
    def sized(size: int) -> tuple[nn.Module, Callable[[], None]]:
        model = stack_of(lambda: Layer(is_eager=False), 3)
        return model, lambda: model(torch.randn(size, 32, 64)).sum().backward()

    fit = graphckpt.fit(sized, batch_sizes=[1, 2], memory_budget="1GiB", device="h100")
    assert "assumed: attention efficient, autocast off, no optimizer" in str(fit)


def test_assumptions_of_another_type_are_an_error(tmp_path: Path) -> None:
    plan = graphckpt.plan(maker(None), memory_budget="min", device="h100")
    plan.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    head, _, rest = text.partition("  assumptions:\n")
    _, _, rest = rest.partition("  rows:")
    (tmp_path / "plan.yaml").write_text(f"{head}  assumptions: 3\n  rows:{rest}")
    with pytest.raises(ConfigError, match=r"plan\.assumptions: expected tuple\[str, \.\.\.\], got 3"):
        Plan.load(tmp_path / "plan.yaml")


def test_cuda_moves_nothing_on_a_simulated_device() -> None:
    with FakeDevice(load_profile("h100")):
        layer = nn.Linear(2, 2).cuda()
        assert layer(torch.ones(2).cuda()).cuda(0).shape == (2,)
