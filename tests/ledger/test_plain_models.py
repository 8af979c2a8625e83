"""The plain models of ``helpers/architectures.py``: deterministic, and counted as the allocator counts them."""

from __future__ import annotations

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.thinning import slow_unless

from graphckpt.ledger.live_memory import LiveBytes

pytestmark = pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, id=a.name, marks=slow_unless(number % 4 == 0)) for number, a in enumerate(ARCHITECTURES)],
)


def loss_and_grads(architecture, seed):
    model, inputs = architecture.build(), architecture.inputs()
    torch.manual_seed(seed)
    loss = architecture.loss(model(**inputs))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_two_runs_with_one_seed_are_equal_to_the_bit(architecture):
    (loss, grads), (again, grads_again) = (loss_and_grads(architecture, seed=3) for _ in range(2))
    assert loss == again
    assert grads.keys() == grads_again.keys()
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_dropout_acts_where_the_architecture_has_it(architecture):
    differs = loss_and_grads(architecture, seed=3)[0] != loss_and_grads(architecture, seed=4)[0]
    assert differs == architecture.has_dropout


def test_the_pattern_names_the_repeated_layers(architecture):
    layers = architecture.layer_modules(architecture.build())
    assert len(layers) >= (1 if architecture.name == "albert" else 2), "albert runs one layer several times"
    assert len({type(layer) for layer in layers.values()}) <= 2


def test_live_bytes_after_forward_are_those_of_the_allocator(architecture, allocator_bytes):
    def forward(model, inputs):
        torch.manual_seed(3)
        return architecture.loss(model(**inputs))

    model, inputs = architecture.build(), architecture.inputs()
    truth = allocator_bytes(lambda: forward(model, inputs))

    model, inputs = architecture.build(), architecture.inputs()
    live = LiveBytes(record_timeline=False)
    live.track([*model.parameters(), *model.buffers(), *inputs.values()])
    before = live.live_bytes
    with live:
        loss = forward(model, inputs)
    counted = live.live_bytes - before
    del loss
    # Autograd keeps the number in `x * 0.5` as 8 bytes that no mode sees, and ctc_loss keeps its lengths as
    # tensors (2 x 16 bytes) instead of lists as soon as any mode is on.
    assert -32 <= truth - counted <= 8 * 16
    assert (truth - counted) % 8 == 0
