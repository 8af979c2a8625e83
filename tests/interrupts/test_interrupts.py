"""After KeyboardInterrupt at any moment of a step, the next step is right and nothing is left."""

from __future__ import annotations

import pytest
import torch

from interrupts.harness import POLICIES, Trial, left_active

COUNT = 12


@pytest.mark.parametrize("policy", POLICIES)
def test_the_step_after_an_interrupt_is_right(policy: str, device: str) -> None:
    trial = Trial(policy, seed=1, autocast="selective" in policy)
    faults = [trial.interrupt() for _ in range(COUNT)]
    trial.close()
    assert [str(fault) for fault in faults if fault is not None] == []
    assert trial.outside < COUNT


def test_an_interrupted_context_does_nothing_later() -> None:
    """What an interrupt leaves of a context must not pop the mode or the hooks that are innermost later."""
    trial, file = Trial("selective", seed=1), "/rules/engine/frame.py"
    numbers = range(1, 1 + trial.num_contexts(file))
    faults = [trial.interrupt(number=number, is_fresh=False, contexts_of=file) for number in numbers]
    trial.close()
    assert len(numbers) >= 40
    assert [str(fault) for fault in faults if fault is not None] == []


def test_a_timer_interrupts_too() -> None:
    trial = Trial("full", seed=2)
    faults = [trial.interrupt(by_timer=True) for _ in range(COUNT)]
    trial.close()
    assert [str(fault) for fault in faults if fault is not None] == []


def test_leftovers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: an engine that leaves gradients off, or RNG state behind, is found."""
    trial = Trial("full", seed=1)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert left_active() == ["gradients are off", "saved-tensor hooks"]
    assert left_active() == []
    monkeypatch.setattr("graphckpt.rules.engine.frame.set_rng_state", lambda state: None)
    faults = [trial.interrupt() for _ in range(4)]
    trial.close()
    assert any("next step differs: gradient" in str(fault) for fault in faults)
