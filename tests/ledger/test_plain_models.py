"""The plain models of ``helpers/architectures.py``: they drop at random, and are counted as the allocator counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.thinning import slow_unless
from torch import Tensor, nn

from graphckpt.ledger.live_memory import LiveBytes

pytestmark = pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, id=a.name, marks=slow_unless(number % 4 == 0)) for number, a in enumerate(ARCHITECTURES)],
)


def test_dropout_acts_where_the_architecture_has_it(architecture: Architecture) -> None:
    losses = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        losses.append(architecture.loss(architecture.build()(**architecture.inputs())).item())
    assert (losses[0] != losses[1]) == architecture.has_dropout


def test_live_bytes_after_forward_are_those_of_the_allocator(
    architecture: Architecture, allocator_bytes: Callable[[Callable[[], object]], int]
) -> None:
    def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
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
