"""A measured step as a chain of few states; test_predicted_peaks.py holds its peaks against the table of levels."""

from __future__ import annotations

import pytest
import torch
from helpers.modules import as_module
from helpers.plans import measured_step, tiny_gpt2
from torch import nn

import graphckpt
from graphckpt.planning.candidates import options
from graphckpt.planning.step_chain import StepChain


@as_module(lambda: {"up": nn.Linear(32, 128, bias=False), "down": nn.Linear(128, 32, bias=False)})
def Layer(self, x):
    return x + self.down(torch.relu(self.up(x)))


@as_module(lambda: {"layers": nn.ModuleList(Layer() for _ in range(8))})
def Stack(self, x):
    """Returns a loss; a list holds what the layers return until it is computed."""
    seen = []
    for layer in self.layers:
        x = layer(x)
        seen.append(x)
    return torch.stack(seen[::3]).exp().sum()


def assert_few_states(chain: StepChain) -> None:
    states = {chain.start}
    for block in range(chain.num_blocks):
        moves = (chain.move(block, option, held) for held in states for option in range(len(chain.options(block))))
        states = {move.state for move in moves if move is not None}
        assert len(states) <= 4 * (block + 2)


def test_tensors_that_other_code_holds_do_not_multiply_the_states():
    model, x = Stack(), torch.randn(64, 32)

    def step():
        with torch.autocast("cpu", torch.bfloat16):  # keeps a copy of each weight until its end
            loss = model(x)
        loss.backward()

    some = options("cpu", ["full", {"rule": "selective", "save": "matmul"}])
    assert_few_states(StepChain(measured_step(model, step, options=some)))


@pytest.mark.parametrize("use_cache", [False, True])
def test_tensors_that_blocks_may_offload_do_not_multiply_the_states(use_cache, monkeypatch):
    """On a GPU, the norms of a layer save its input, which the code around it holds until its backward.

    A cache of keys and values is an argument of all layers, and holds tensors that each of them may offload.
    """
    chains: list[StepChain] = []
    make = StepChain.__init__
    monkeypatch.setattr(StepChain, "__init__", lambda self, *a, **k: (make(self, *a, **k), chains.append(self))[0])

    def make_model():
        model = tiny_gpt2(n_layer=6, n_embd=64, n_positions=64, vocab_size=100)
        tokens = torch.randint(0, 100, (4, 64), device="cuda")

        def step():
            model(tokens, labels=tokens, use_cache=use_cache).loss.backward()

        return model, step

    graphckpt.plan(make_model, memory_budget="max", device="h200", offload="cpu", progress=False)
    for chain in chains:
        assert_few_states(chain)
    assert chains
