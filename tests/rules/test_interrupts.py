"""After Ctrl-C in a step, the next step is right and nothing of the interrupted one is left."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.hard_modules import B, BatchNorm, Counts, D, Mlp
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import graphckpt
from graphckpt import Segments, Selective
from graphckpt._compat import active_saved_tensor_hooks
from graphckpt.rules import running

ON = {"activation_checkpointing": True, "min_elements": 1}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[123]": ON},
    "selective": {"[123]": Selective("matmul")},
    "joined": {"1": ON, "[23]": "joined"},
    "excluded child": {"[123]": ON, "re:[123]\\.(drop|linear)": False},
    "segments": {"": Segments("log")},
    "disk": {"[123]": {**ON, "offload": "disk"}},
    "slab": {"[123]": {**ON, "contiguous": True}},
}


class Interrupts(nn.Module):
    """Sends SIGINT to the process, as Ctrl-C does, in the execution of its forward that is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(D, D), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        Interrupts.remaining -= 1
        if Interrupts.remaining == 0:
            signal.raise_signal(signal.SIGINT)
        return self.act(h)

    remaining = -1


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Python's own handler, which pytest's workers replace."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def step(model: nn.Module, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    y = model(torch.randn(B, D))
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("execution", [1, 2], ids=["original forward", "recomputation"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("default_sigint")
def test_the_step_after_an_interrupt_is_right(policy: str, execution: int, is_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Mlp(), BatchNorm(), nn.Sequential(Interrupts(), Counts()), nn.Linear(D, D))
    with graphckpt.apply(model, POLICIES[policy]) as handle:
        if not is_first:
            step(model, 1)
        Interrupts.remaining = execution
        with pytest.raises(KeyboardInterrupt):
            step(model, 2)
        assert torch.is_grad_enabled()
        assert _get_current_dispatch_mode_stack() == []
        assert running.get() is None
        state = {name: value.clone() for name, value in model.state_dict().items()}
        names = ("count", "last", "seen", "table")
        counts = [copy.deepcopy({n: vars(m)[n] for n in names}) for m in model.modules() if isinstance(m, Counts)]
        ours = step(model, 3)
        stores = [wrapper.context.store for wrapper in handle._wrappers]
        assert all(getattr(store, "num_alive", 0) == 0 for store in stores)
    assert active_saved_tensor_hooks() is None
    model.load_state_dict(state)
    for module, values in zip((m for m in model.modules() if isinstance(m, Counts)), counts, strict=True):
        vars(module).update(values)
    assert all(map(torch.equal, ours, step(model, 3)))
