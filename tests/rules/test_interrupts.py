"""After Ctrl-C in a step, the next step is right and nothing of the interrupted one is left."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers.hard_modules import B, BatchNorm, Counts, D, Mlp
from helpers.interrupts import POLICIES, Place, Subject, is_interrupted, name_of, places
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import graphckpt
from graphckpt._compat import active_saved_tensor_hooks
from graphckpt.rules import running


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
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "tiles"])  # which adds in another order
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


@pytest.fixture
def interrupts_in_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what Python prints: an interrupt in the callback of a weak reference is lost, and the step goes on."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's holds the frames


# Where a thread's state is set and reset, of PyTorch too: a `with` calls the last two.
ENTRY_AND_EXIT = {
    "Frame.run", "Frame._original_forward", "Frame._recompute", "Frame._run_again", "enter_modes", "_run_with_hooks",
    "surroundings", "put_surroundings_back", "set_active_modes", "put_back", "enter_ambient", "_set_autocast",
    "_ModesPaused.__enter__", "_ModesPaused.__exit__", "TorchDispatchMode.__enter__", "TorchDispatchMode.__exit__",
}  # fmt: skip


def faults_at(subject: Subject, chosen: list[Place]) -> dict[str, list[str]]:
    """Interrupts a step at each of ``chosen``; returns what is wrong after it."""
    faults: dict[str, list[str]] = {}
    for number, place in enumerate(chosen):
        is_last = number in (0, len(chosen) - 1)  # of bytes that remain, the sum shows at the end
        found = subject.faults(lambda place=place: is_interrupted(lambda: subject.step(5), place), checks_bytes=is_last)
        if found:
            faults[name_of(place)] = found
    subject.close()
    return faults


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("interrupts_in_callbacks")
def test_an_interrupt_at_any_instruction_leaves_nothing(policy: str) -> None:
    subject = Subject(POLICIES[policy])
    everywhere = places(lambda: subject.step(5))
    assert len(everywhere) > 1000
    assert faults_at(subject, everywhere[::97]) == {}


@pytest.mark.usefixtures("interrupts_in_callbacks")
def test_a_range_of_a_slab_whose_callback_was_interrupted_is_used_again() -> None:
    subject = Subject(POLICIES["slab"])
    callback = "SlabStore.put.<locals>.<lambda>"
    chosen = [place for place in places(lambda: subject.step(5)) if place[0].co_qualname == callback]
    num_bytes = subject.slab_bytes()
    assert chosen
    for place in 3 * chosen:
        is_interrupted(lambda place=place: subject.step(5), place)
        for seed in (6, 7, 8):
            subject.step(seed)
    assert subject.slab_bytes() == num_bytes > 0
    subject.close()


@pytest.mark.usefixtures("interrupts_in_callbacks")
@pytest.mark.parametrize(("policy", "autocast"), [("full", False), ("selective", True), ("excluded child", False)])
def test_an_interrupt_where_the_state_of_a_thread_is_set_leaves_nothing(policy: str, autocast: bool) -> None:
    subject = Subject(POLICIES[policy], autocast=autocast)
    chosen = [place for place in places(lambda: subject.step(5)) if place[0].co_qualname in ENTRY_AND_EXIT]
    chosen = chosen[:: 1 if policy == "full" else 3]  # 20 ms each
    assert len(chosen) > (90 if sys.version_info >= (3, 12) else 100)  # 3.12 joins instructions
    assert faults_at(subject, chosen) == {}
