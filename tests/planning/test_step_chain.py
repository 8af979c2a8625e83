"""A measured step as a chain: few states, and the peaks of the memory model."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.modules import as_module
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from graphckpt.planning.candidates import options
from graphckpt.planning.frontier import peak
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.step_chain import StepChain
from graphckpt.planning.steps import RealStep
from graphckpt.planning.sweep import measure
from graphckpt.planning.trace import Blocks

NUM_BLOCKS = 8


@as_module(
    lambda width: {"up": nn.Linear(width, 4 * width, bias=False), "down": nn.Linear(4 * width, width, bias=False)}
)
def Layer(self, x):
    return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Returns a loss; a list holds what the layers return until it is computed."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return torch.stack(seen[::3]).exp().sum()


@pytest.fixture
def measured():
    """Returns a step and its measurements, near and offloaded."""
    model, x = Stack([32] * NUM_BLOCKS), torch.randn(64, 32)

    def step():
        with torch.autocast("cpu", torch.bfloat16):  # keeps a copy of each weight until its end
            loss = model(x)
        loss.backward()

    some = options("cpu", ["full", {"rule": "selective", "save": "matmul"}])
    step, blocks = RealStep(model, step), Blocks(find_blocks(model, None))
    return step, blocks, measure(step, blocks, some)


def assert_few_states(chain: StepChain) -> None:
    states = {chain.start}
    for block in range(chain.num_blocks):
        moves = (chain.move(block, option, held) for held in states for option in range(len(chain.options(block))))
        states = {move.state for move in moves if move is not None}
        assert len(states) <= 4 * (block + 2)


def test_tensors_that_other_code_holds_do_not_multiply_the_states(measured):
    assert_few_states(StepChain(measured[2]))


@pytest.mark.parametrize("use_cache", [False, True])
def test_tensors_that_blocks_may_offload_do_not_multiply_the_states(use_cache, monkeypatch):
    """On a GPU, the norms of a layer save its input, which the code around it holds until its backward.

    A cache of keys and values is an argument of all layers, and holds tensors that each of them may offload.
    """
    chains: list[StepChain] = []
    make = StepChain.__init__
    monkeypatch.setattr(StepChain, "__init__", lambda self, *a, **k: (make(self, *a, **k), chains.append(self))[0])

    def make_model():
        sizes = {"n_layer": 6, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 100}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        tokens = torch.randint(0, 100, (4, 64), device="cuda")

        def step():
            model(tokens, labels=tokens, use_cache=use_cache).loss.backward()

        return model, step

    graphckpt.plan(make_model, memory_budget="max", device="h200", offload="cpu", progress=False)
    for chain in chains:
        assert_few_states(chain)
    assert chains


def test_the_peak_of_a_plan_is_that_of_the_memory_model(measured):
    known = measured[2]
    chain, rng = StepChain(known), random.Random(1)
    for _ in range(50):
        choices = [rng.randrange(6) for _ in range(NUM_BLOCKS)]
        assert peak(chain, choices) == known.model.highest(choices).peak, choices


def test_the_peak_of_a_plan_is_that_of_the_step(measured):
    step, blocks, known = measured
    for plan in ([3] * NUM_BLOCKS, [0, 1, 2, 3, 4, 5, 0, 3], [3, 0, 5, 1, 4, 2, 3, 1]):
        chosen = [own[option] for own, option in zip(known.options_of, plan, strict=True)]
        assert known.model.highest(plan).peak == step.sample(blocks, chosen).peak_bytes, plan
