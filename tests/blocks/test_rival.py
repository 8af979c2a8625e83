"""A model whose own gradient checkpointing is on as well: one of the two acts, and it says which."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.layer_stacks import stack_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import graphckpt

GPT2 = next(a for a in ARCHITECTURES if a.name == "gpt2")
ACTS = "the model's own gradient checkpointing is on as well: this policy replaces it"


def enable(model: PreTrainedModel) -> None:
    switch = getattr(model, "activation_checkpointing_enable", None)  # its name since Transformers 5.2x
    if switch is not None:
        switch(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def disable(model: PreTrainedModel) -> None:
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def train(architecture: Architecture, model: nn.Module, steps: int = 2) -> tuple[dict[str, Tensor], list[int]]:
    """Runs steps, and counts how often each layer's first linear ran."""
    layers = architecture.layer_modules(model).values()
    runs = [0] * len(layers)
    hooks = []
    for number, layer in enumerate(layers):
        inner = next(m for m in layer.modules() if m is not layer and not list(m.children()))
        hooks.append(inner.register_forward_pre_hook(lambda *_, n=number: runs.__setitem__(n, runs[n] + 1)))
    torch.manual_seed(3)
    seen = {}
    for number in range(steps):
        loss = architecture.loss(model(**architecture.inputs(), use_cache=False))
        loss.backward()
        seen[f"loss {number}"] = loss.detach()
    seen |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return seen, [count // steps for count in runs]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


checkpoints_in_forward = pytest.mark.skipif(
    GradientCheckpointingLayer.__call__ is not nn.Module.__call__,
    reason="this Transformers checkpoints in __call__, around the policy: its own acts, as a test below has it",
)


@checkpoints_in_forward
@pytest.mark.parametrize("when", ["before apply", "after apply", "after a step"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_policy_on_transformers_layers_acts_alone(when: str, policy: str) -> None:
    plain, plain_runs = train(GPT2, GPT2.build())
    model = GPT2.build()
    if when == "before apply":
        enable(model)
    with graphckpt.apply(model, {GPT2.layers: policy}) as handle:
        if when == "after a step":
            train(GPT2, model, steps=1)
        enable(model)
        ours, runs = train(GPT2, model)
        assert equal(ours, plain)
        assert runs == [2, 2, 2]
        with handle.measure():
            GPT2.loss(model(**GPT2.inputs(), use_cache=False)).backward()
        rows = [row for row in handle.explain(show=False).rows if row.rule != "keep"]
        assert [row.reruns for row in rows] == [1, 1, 1]
        assert [row.note for row in rows] == [ACTS] * 3
        assert all(row.bytes_after < row.bytes_before for row in rows)
    assert plain_runs == [1, 1, 1]
    model.zero_grad()
    theirs, runs = train(GPT2, model)
    assert equal(theirs, plain)
    assert runs == [2, 2, 2], "the model's own checkpointing must be active again"
    disable(model)
    assert train(GPT2, model)[1] == [1, 1, 1]


@pytest.mark.parametrize(
    ("holes", "runs"), [({}, [2, 2, 2]), ({"transformer.h.0": False}, [1, 2, 2])], ids=["around", "with a hole"]
)
def test_a_policy_around_layers_that_checkpoint_themselves_acts_alone(holes: dict[str, Any], runs: list[int]) -> None:
    plain, _ = train(GPT2, GPT2.build())
    model = GPT2.build()
    enable(model)
    with graphckpt.apply(model, {"transformer": True, **holes}) as handle:
        ours, ran = train(GPT2, model)
        assert handle.explain(show=False).rows[0].note == ACTS
    assert equal(ours, plain)
    assert ran == runs


def test_evaluation_and_layers_that_are_not_flagged_are_left_alone() -> None:
    model = GPT2.build()
    enable(model)
    with graphckpt.apply(model, {"transformer.h.1": True}) as handle:
        _, runs = train(GPT2, model)
        assert runs == [2, 2, 2]
        flags = [layer.gradient_checkpointing for layer in model.transformer.h]
        assert flags == [True] * 3
        disable(model)
        _, runs = train(GPT2, model)
        assert runs == [1, 2, 1]
        handle.remove()
    assert train(GPT2, model)[1] == [1, 1, 1]


def test_an_exception_in_forward_leaves_the_models_flag_as_it_was() -> None:
    model = GPT2.build()
    enable(model)
    model.transformer.h[0].mlp.forward = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with graphckpt.apply(model, {GPT2.layers: True}), pytest.raises(KeyboardInterrupt):
        train(GPT2, model)
    assert model.transformer.h[0].gradient_checkpointing is True


class OldLayer(nn.Module):
    """A layer that checkpoints itself around ``forward``, in ``__call__``, as those of earlier Transformers do."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_that_is_under_way_around_the_block_acts_alone(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), OldLayer(), nn.Linear(4, 1))
    runs: list[int] = []
    model[1].linear.register_forward_pre_hook(lambda *_: runs.append(1))
    model(torch.ones(2, 4)).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with graphckpt.apply(model, {"1": True}) as handle:
        model[1]._gradient_checkpointing_func = partial(torchs_checkpoint, use_reentrant=use_reentrant)
        model[1].gradient_checkpointing = True
        runs.clear()
        model(torch.ones(2, 4)).sum().backward()
        assert len(runs) == 2
        assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
        (note,) = [row.note for row in handle.explain(show=False).rows if row.block == "1"]
        assert note == "its own gradient checkpointing replaces this policy: disable it on the model"
        model[1].gradient_checkpointing = False
        runs.clear()
        model(torch.ones(2, 4)).sum().backward()
        assert len(runs) == 2


def test_a_model_with_rivals_is_freed_at_once() -> None:
    model = GPT2.build()
    enable(model)
    handle = graphckpt.apply(model, {GPT2.layers: True})
    train(GPT2, model, steps=2)
    layer = weakref.ref(model.transformer.h[0])
    del model, handle
    assert layer() is None


@pytest.mark.parametrize("runs", [2, "sqrt", "log"])
def test_segments_over_layers_that_checkpoint_themselves_act_alone(runs: int | str) -> None:
    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.num_runs = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_runs[0] += 1
            return torch.tanh(self.linear(x))

    def runs_of_layers(own: bool) -> list[int]:
        torch.manual_seed(0)
        model = stack_of(Layer, 8).train()
        for layer in model:
            layer.gradient_checkpointing = own
            layer._gradient_checkpointing_func = partial(torchs_checkpoint, use_reentrant=False)
        with graphckpt.apply(model, {"": graphckpt.Segments(runs)}) as handle:
            model(torch.ones(2, 8)).sum().backward()
            for layer in model:
                layer.num_runs[0] = 0
            model(torch.ones(2, 8)).sum().backward()
            if own:
                assert "this policy replaces it" in handle.explain(show=False).rows[0].note
        assert all(layer.gradient_checkpointing is own for layer in model)
        return [layer.num_runs[0] for layer in model]

    assert runs_of_layers(True) == runs_of_layers(False)
