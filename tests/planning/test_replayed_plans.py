"""Plans for an absent CUDA device have the bytes of an independent run of the step under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphckpt
from graphckpt.planning.plan import Plan
from graphckpt.planning.steps import FakeStep, StepRun
from graphckpt.simulation.allocations import replay
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

DEVICE = "h100"


def llama() -> tuple[nn.Module, Callable[[], None]]:
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(8, 512, dtype=torch.long)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def new_step() -> tuple[FakeStep, nn.Module]:
    device = FakeDevice(load_profile(DEVICE))
    with device:
        model, step_fn = llama()
    (optimizer,) = [c.cell_contents for c in step_fn.__closure__ if isinstance(c.cell_contents, torch.optim.Optimizer)]
    return FakeStep(device, model, step_fn, optimizer), model


def run_under(plan: Plan) -> tuple[StepRun, FakeStep]:
    """Runs the first steps of another process under a plan."""
    step, model = new_step()
    with plan.apply(model):
        return step.run(), step


def check_bytes(plan: Plan) -> None:
    run, step = run_under(plan)
    assert plan.predicted_peak_bytes == run.peak_bytes
    replayed = step.replay(run.allocations)
    assert plan.predicted_reserved_bytes == replayed.reserved_bytes
    assert plan.predicted_nvidia_smi_bytes == replayed.reserved_bytes + step.machine.context_bytes
    assert plan.expandable_reserved_bytes == step.reserved_if_expandable(run.allocations)
    assert sum(plan.peak_parts.values()) == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes <= replayed.reserved_bytes


@pytest.mark.parametrize("budget", [0.8, 0.7])
def test_a_plan_with_selective_beside_full_predicts_the_bytes_of_a_run(budget: float) -> None:
    candidates = ["full", {"rule": "selective", "save": "matmul"}]
    plan = graphckpt.plan(llama, memory_budget=budget, device=DEVICE, candidates=candidates)
    assert {row.option for row in plan.rows} >= {"full", "selective(matmul)"}
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    check_bytes(plan)


def test_an_offloaded_plan_predicts_the_bytes_of_a_run() -> None:
    plan = graphckpt.plan(llama, memory_budget=0.8, device=DEVICE, candidates=["full"], offload="cpu")
    assert any(row.moved_bytes for row in plan.rows)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    check_bytes(plan)


@pytest.mark.parametrize("policy", [{"offload": True}, {"activation_checkpointing": True, "offload": True}])
def test_a_run_frees_what_is_offloaded(policy: dict[str, object]) -> None:
    """Before, tensors of an absent device stayed on it, so that an offloaded plan had the peak of one without."""
    step, model = new_step()
    with graphckpt.apply(model, {"model.layers.*": policy | {"offload": None}}):
        without = step.run()
    with graphckpt.apply(model, {"model.layers.*": policy}):
        run = step.run()
    assert run.peak_bytes < without.peak_bytes
    assert level_after(run) == level_after(without), "all that is reloaded is freed"


def level_after(run: StepRun) -> int:
    log = run.allocations
    return sum(log.sizes[entry] if entry >= 0 else -log.sizes[~entry] for step in log.steps for entry in step)


def test_settings_that_are_not_simulated_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "garbage_collection_threshold:0.8,max_split_size_mb:512,roundup_power2_divisions:4"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    plan = graphckpt.plan(llama, memory_budget="max", device=DEVICE, candidates=["full"])
    ignored = "garbage_collection_threshold, roundup_power2_divisions"
    assert plan.notes == (f"PYTORCH_ALLOC_CONF: the simulated allocator ignores {ignored}",)


def test_the_least_memory_is_not_searched_where_there_is_more_than_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = new_step()
    allocations = step.run().allocations
    least, reserved = step.least_capacity(allocations), step.replay(allocations).reserved_bytes
    replays: list[None] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        replays.append(None)
        return replay(*arguments, **options)

    monkeypatch.setattr("graphckpt.planning.steps.replay", counting)
    monkeypatch.setattr("graphckpt.simulation.allocations.replay", counting)
    assert step.least_capacity(allocations, 2 * reserved) == reserved
    assert len(replays) == 1
    assert step.least_capacity(allocations, reserved) == least  # near the limit it matters
    assert len(replays) > 2
