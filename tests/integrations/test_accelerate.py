"""A loop of one's own under accelerate: policies before or after ``prepare``, with mixed precision and accumulation."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from helpers.layer_stacks import tiny_gpt2
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import graphckpt

POLICIES = {"transformer.h.*": True, "transformer.h.1": "selective"}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(when: str | None) -> tuple[dict[str, Tensor], int]:
    """Trains under accelerate, and counts the runs of a block."""
    torch.manual_seed(0)
    model = tiny_gpt2(n_layer=3, n_embd=32, vocab_size=64, loss_type="ForCausalLM")
    tokens = torch.randint(0, 64, (16, 32))
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runs = []
    model.transformer.h[0].mlp.c_fc.register_forward_pre_hook(lambda *_: runs.append(1))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    if when == "before prepare":
        graphckpt.apply(model, POLICIES)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if when == "after prepare":
        graphckpt.apply(prepared, POLICIES)
    for (batch,) in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(prepared) is model
    return {name: value.clone() for name, value in model.state_dict().items()}, len(runs)


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_policies_under_accelerate_change_no_bit(when: str) -> None:
    plain, plain_runs = train(None)
    AcceleratorState._reset_state(reset_partial_state=True)
    ours, runs = train(when)
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []
    assert (plain_runs, runs) == (4, 8)
