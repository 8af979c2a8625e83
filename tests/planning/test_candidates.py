"""The levels of a block: cheapest for their price by brute force, apart from each other, and what they say they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_stacks import gpt2_step, stack_of
from helpers.peaks import tracked_peak
from helpers.plans import fields_of, measured_step
from torch import nn

import graphckpt
from graphckpt.planning import candidates, op_levels
from graphckpt.planning.candidates import NEAR, options
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.op_levels import OpTimes, selective_levels, with_levels
from graphckpt.rules import Selective
from graphckpt.rules.ops import OpCall, OpGraph


def drawn(seed: int) -> tuple[OpGraph, list[int]]:
    """Returns a log of some ops at random, and what they take."""
    rng = random.Random(seed)
    log = OpGraph()
    for number in range(8):
        inputs = frozenset(rng.sample(range(number), min(number, rng.choice((1, 1, 2)))))
        call = OpCall("op", number, inputs, (), None, num_bytes=rng.choice((0, 40, 100, 400)), is_read=True)
        call.is_random = rng.random() < 0.1
        call.is_mutated = rng.random() < 0.1
        log.calls.append(call)
    log.num_saving = 8
    log.saved = set(rng.sample(range(8), 4)) | {7}
    log.saved_bytes = sum(log.calls[number].num_bytes for number in log.saved)
    return log, [rng.randrange(1, 50) for _ in range(8)]


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_is_the_cheapest_choice_for_its_price(seed: int) -> None:
    log, ticks = drawn(seed)
    able = [number for number, call in enumerate(log.calls) if call.can_be_kept]
    for price in (0.01, 0.1, 0.5, 3.0):

        def cost(kept: frozenset[int], price: float = price) -> int:
            again = log.needed(lambda call: call.number in kept) - kept
            num_bytes = sum(round(price * log.calls[number].num_bytes) for number in kept)
            return num_bytes + sum(ticks[number] for number in again)

        chosen = op_levels._cheapest_at(log, ticks, price)
        subsets = itertools.chain.from_iterable(itertools.combinations(able, n) for n in range(len(able) + 1))
        assert cost(chosen.results) == min(cost(frozenset(subset)) for subset in subsets)
        again = log.needed(lambda call, kept=chosen.results: call.number in kept) - chosen.results
        assert chosen.ticks == sum(ticks[number] for number in again)


def test_a_storage_with_the_id_of_one_that_is_freed_has_no_producer() -> None:
    log, add, x = OpGraph(), torch.ops.aten.add.Tensor, torch.ones(2)
    for number in range(100):
        log.add(add, number, (torch.ones(2), x), {}, x + x)  # each new tensor takes the place of one before
    assert all(not call.inputs for call in log.calls)


@pytest.mark.parametrize("seed", range(20))
def test_the_front_falls_in_bytes_and_rises_ever_steeper_in_time(seed: int) -> None:
    front = op_levels._cheapest(*drawn(seed))[:-1]
    assert all(one.num_bytes > other.num_bytes for one, other in itertools.pairwise(front[1:]))
    assert all(one.ticks < other.ticks for one, other in itertools.pairwise(front[1:]))
    slopes = [(b.ticks - a.ticks) / (a.num_bytes - b.num_bytes) for a, b in itertools.pairwise(front[1:])]
    assert slopes == sorted(slopes)


def gpt2() -> tuple[nn.Module, Callable[[], None]]:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return gpt2_step(num_tokens=64, n_layer=6, n_embd=64, n_head=4, vocab_size=64, n_positions=64, **none)


@pytest.fixture(scope="module")
def known() -> MeasuredStep:
    return measured_step(*gpt2())


def test_equal_layers_have_equal_levels_between_keep_and_full(known: MeasuredStep) -> None:
    assert all(own == known.options_of[0] for own in known.options_of)
    names = [option.name for option in known.options_of[0]]
    count = len(names) - 2
    assert 2 <= count <= candidates.MOST
    assert names == ["keep", "full", *(f"selective(level {n + 1} of {count})" for n in range(count))]
    peaks = [known.model.peak([option] * 6) for option in (0, *range(2, len(names)), 1)]
    assert peaks == sorted(set(peaks), reverse=True), "each level takes less than the one before"


def test_a_level_keeps_what_it_says(known: MeasuredStep) -> None:
    model, step = gpt2()
    step()
    for option in range(len(known.options)):
        with graphckpt.apply(model, fields_of(known, [option] * 6)):
            assert tracked_peak(model, step) == known.model.peak([option] * 6)


def test_attention_is_named_in_a_way_that_holds_on_other_devices(known: MeasuredStep) -> None:
    saves = [name for option in known.options_of[0][2:] for name in option.fields["activation_checkpointing"]["save"]]
    assert "attention[0]" in saves
    assert not any("scaled_dot_product" in name for name in saves)
    for option in known.options_of[0][2:]:
        assert Selective(option.fields["activation_checkpointing"]["save"])


def test_a_block_whose_ops_cannot_be_seen_has_the_presets() -> None:
    assert selective_levels([]) == []
    blind = OpTimes()
    blind.log.is_complete = False
    assert selective_levels([blind]) == []
    some, own = with_levels(NEAR, [0], lambda: [[blind]])
    assert len(some) == 2 + 3
    assert [option.rule.save for option in own[0][2:]] == ["matmul+attention", "matmul", "attention"]


def test_an_op_that_two_processes_time_unlike_is_decided_by_one() -> None:
    log, ticks = drawn(3)
    seen = [[OpTimes(log, [(0.0, tick / op_levels._TICKS) for tick in ticks])]]
    told = []

    def tell(value: object) -> list[list[list[Any]]]:
        told.append(value)
        return [[[["aten.addmm.default[0]"], 0.1], [[], 0.5]]]

    _, own = with_levels(NEAR, [0], lambda: seen, tell)
    assert len(told) == 1
    value = {"rule": "selective", "save": ["aten.addmm.default[0]"], "label": "level 1 of 1"}
    assert own[0][2].fields["activation_checkpointing"] == value


def test_a_class_without_levels_has_full_in_their_place_near_and_far() -> None:
    found = [[[["aten.addmm.default[0]"], 0.1], [[], 0.5]], [[[], 0.5]]]
    some, own = with_levels(options("disk"), [0, 1], lambda: [[], []], lambda _: found)
    near = len(some) // 2
    names = ["keep", *["full"] * (near - 1)]
    assert [option.name for option in own[1]] == [*names, *(f"{name} + disk" for name in names)]
    assert all(option.recompute_seconds is None for option in (*own[0][near:], *own[1][near:]))
    assert all(option.fields["offload"] == "disk" for option in own[1][near:])


def test_a_layer_of_one_linear_has_nothing_between() -> None:
    torch.manual_seed(0)
    model = stack_of(lambda: nn.Linear(8, 8), 4)
    x = torch.randn(16, 8, requires_grad=True)
    found = measured_step(model, lambda: model(x).sum().backward(), "*")
    assert found.num_runs >= 2
    assert not found.notes
