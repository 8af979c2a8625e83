"""A measured step as a chain of few states; test_predicted_peaks.py holds its peaks against the table of levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.layer_stacks import stack_of, tiny_gpt2
from helpers.modules import as_module
from helpers.plans import measured_step
from torch import nn

import graphckpt
from graphckpt.planning.candidates import options
from graphckpt.planning.frontier import peak
from graphckpt.planning.search import PolicySearch
from graphckpt.planning.step_chain import StepChain


@as_module(lambda: {"up": nn.Linear(32, 128, bias=False), "down": nn.Linear(128, 32, bias=False)})
def Layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.down(torch.relu(self.up(x)))


@as_module(lambda: {"layers": nn.ModuleList(Layer() for _ in range(8))})
def Stack(self: Any, x: torch.Tensor) -> torch.Tensor:
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


def test_tensors_that_other_code_holds_do_not_multiply_the_states() -> None:
    model, x = Stack(), torch.randn(64, 32)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):  # keeps a copy of each weight until its end
            loss = model(x)
        loss.backward()

    some = options("cpu", ["full", {"rule": "selective", "save": "matmul"}])
    assert_few_states(StepChain(measured_step(model, step, options=some)))


@pytest.mark.parametrize("use_cache", [False, True])
def test_tensors_that_blocks_may_offload_do_not_multiply_the_states(
    use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the norms of a layer save its input, which the code around it holds until its backward.

    A cache of keys and values is an argument of all layers, and holds tensors that each of them may offload.
    """
    chains: list[StepChain] = []
    make = StepChain.__init__
    monkeypatch.setattr(StepChain, "__init__", lambda self, *a, **k: (make(self, *a, **k), chains.append(self))[0])

    def make_model() -> tuple[nn.Module, Callable[[], None]]:
        model = tiny_gpt2(n_layer=6, n_embd=64, n_positions=64, vocab_size=100)
        tokens = torch.randint(0, 100, (4, 64), device="cuda")

        def step() -> None:
            model(tokens, labels=tokens, use_cache=use_cache).loss.backward()

        return model, step

    graphckpt.plan(make_model, memory_budget="max", device="h200", offload="cpu", progress=False)
    for chain in chains:
        assert_few_states(chain)
    assert chains


def two_losses() -> tuple[nn.ModuleList, Callable[[], None]]:
    """Returns two stacks of layers, and a step that runs the backward of the first before the forward of the other."""
    model, x = nn.ModuleList(stack_of(Layer, 4) for _ in range(2)), torch.randn(256, 32)

    def step() -> None:
        for stack in model:
            stack(x).sum().backward()

    return model, step


def test_each_pass_of_a_step_has_a_chain_of_its_own() -> None:
    search = PolicySearch(measured_step(*two_losses(), ["0.*", "1.*"], options(False, ["full"])))
    plain, low = search.evaluate([0] * 8), search.floor.peak
    choice = search.fastest((low + plain.peak) // 2)
    assert choice.peak <= (low + plain.peak) // 2
    for stack in (choice.plan[:4], choice.plan[4:]):
        assert set(stack) == {0, 1}
    assert {low, plain.peak} < {one.peak for one in search.pareto()}


def test_blocks_have_no_banned_options_and_those_that_were_not_called_follow_equal_ones() -> None:
    known = measured_step(*two_losses(), ["0.*", "1.*"], options(False, ["full"]))
    partial = replace(known, banned=frozenset({(0, 0)}), uncalled={6: 2, 7: None})
    assert partial.completed([0, 0, 0, 1, 1, 1, 1, 1]) == (1, 0, 0, 1, 1, 1, 0, 1)
    assert replace(known, uncalled={6: 2, 7: None}).completed([0] * 6 + [1, 1]) == (0,) * 8
    search = PolicySearch(partial)
    assert all(choice.plan[0] == 1 for choice in search.pareto())
    assert search.fastest(10**9).plan[0] == 1


def test_what_is_late_counts_from_the_forward_on_in_a_chain() -> None:
    model, x = Stack(), torch.randn(64, 32)
    known = measured_step(model, lambda: model(x).backward(), options=options(False, ["full"]))
    table = known.model
    for call in range(8):
        table.late.add(call, 0, 4 ** (call + 1), 2)
    for plan in ([0, 1] * 4, [0] * 4 + [1] * 4, [1] * 4 + [0] * 4):
        beyond = dict(zip(table.calls.base, table.beyond(plan).tolist(), strict=True))
        assert min(beyond.values()) < 0, "in forward"
        assert peak(StepChain(known, rest=beyond), plan) == table.peak(plan) <= peak(StepChain(known), plan)
