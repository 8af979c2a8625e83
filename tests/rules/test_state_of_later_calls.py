"""What forward changes in its modules from any call on, changes once, or changes back behind the last saved tensor."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt

Policies = dict[str, Any]

D = 8
NUM_STEPS = 6
POLICIES: dict[str, Policies] = {
    "full": {"*": True},
    "selective": {"*": "selective"},
    "disk": {"*": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    "excluded child": {"*": True, "*.excluded": False},
    "whole": {"": True},
}
policies = pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)


def nothing(block: Any) -> None:
    pass


class Log(list[int]):
    """A container with an attribute of its own."""

    num_calls = 0


def fields() -> dict[str, Any]:
    return {
        "a": nn.Linear(D, D), "b": nn.Linear(D, D), "c": nn.Linear(D, D), "drop": nn.Dropout(0.2),
        "box": nn.ModuleDict(), "excluded": nn.Tanh(), "buffer": nn.Buffer(torch.zeros(1)), "count": 0, "scale": 1,
        "items": [], "named": {}, "names": set(), "space": SimpleNamespace(), "flag": False, "total": None,
        "table": nn.Buffer(torch.ones(2)), "rows": (rows := nn.Buffer(torch.zeros(2, 2))), "views": deque([rows[0]]),
        "handle": None, "log": Log(),
        "shared": nn.Buffer(torch.from_numpy(array := np.zeros(1, np.float32))), "array": array,
        "generator": torch.Generator().manual_seed(3), "before": nothing, "after": nothing,
    }  # fmt: skip


@as_module(fields)
def Block(self: Any, x: Tensor) -> Tensor:
    h = self.excluded(self.a(x))
    self.before(self)
    y = self.b(self.drop(h) * self.scale + self.buffer + self.rows[0, 0] + torch.rand(1, generator=self.generator))
    self.after(self)
    return y


def install(block: Any) -> Any:
    return block.b.register_forward_hook(lambda module, args, output: output * 0.5)


def halved(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: forward(x) * 0.5


def counts_in_a_child(block: Any) -> None:
    block.a.count = getattr(block.a, "count", 0) + 1
    block.scale = block.a.count


def counts_in_an_empty_child(block: Any) -> None:
    block.box.count = getattr(block.box, "count", 0) + 1
    block.scale = block.box.count


def fails(block: Any) -> None:
    try:
        torch.linalg.cholesky(-torch.eye(2))
    except BaseException:
        block.count += 1
    block.scale = 1 + block.count


def counts_in_a_new_attribute(block: Any) -> None:
    block.new = getattr(block, "new", 1) + 1
    block.scale = block.new


def adds_to_a_list_in_a_dict(block: Any) -> None:
    block.named.setdefault("a", []).append(1)
    block.scale = len(block.named["a"])


def counts_in_an_object(block: Any) -> None:
    block.space.count = getattr(block.space, "count", 0) + 1
    block.scale = block.space.count


def counts_in_an_attribute_of_a_list(block: Any) -> None:
    block.log.num_calls += 1
    block.scale = block.log.num_calls


def adds_to_memory_of_an_array(block: Any) -> None:
    block.shared.add_(1)
    block.scale = block.array.item()


def adds_to_an_array_of_a_buffer(block: Any) -> None:
    block.array[0] += 1
    block.scale = block.shared.item()


def sums(block: Any) -> None:
    block.total = torch.ones(1) if block.total is None else block.total.add_(1)
    block.scale = block.total.item()


def swaps(block: Any) -> None:
    block.b, block.c = block.c, block.b


def saves_a_part(block: Any) -> None:
    block.table.mul_(0.9)
    block.scale = block.a.weight[0, 0] * block.table[0]


def removes(block: Any) -> None:
    if block.handle is not None:
        block.handle.remove()
        block.handle = None


def swaps_weights(block: Any) -> None:
    block.a.weight, block.c.weight = block.c.weight, block.a.weight


def once(is_missing: Callable[[Any], bool], note: Callable[[Any], object], act: Callable[[Any], object]) -> Any:
    def change(block: Any) -> None:
        if is_missing(block):
            act(block)
            note(block)

    return change


def unless_counted(act: Callable[[Any], object]) -> Any:
    return once(lambda block: block.count == 0, lambda block: setattr(block, "count", 1), act)


CHANGES: dict[str, Callable[[Any], object]] = {
    "counts in a child": counts_in_a_child,
    "counts in an empty child": counts_in_an_empty_child,
    "a new attribute": counts_in_a_new_attribute,
    "toggles": lambda block: block.__dict__.update(flag=not block.flag, scale=1 if block.flag else 2),
    "a list": lambda block: (block.items.append(1), setattr(block, "scale", len(block.items))),
    "a list in a dict": adds_to_a_list_in_a_dict,
    "an attribute of a list": counts_in_an_attribute_of_a_list,
    "memory of an array": adds_to_memory_of_an_array,
    "an array of a buffer": adds_to_an_array_of_a_buffer,
    "an object": counts_in_an_object,
    "a tensor in place": lambda block: block.buffer.add_(1),
    "a tensor through data": lambda block: block.buffer.data.add_(1),
    "an attribute that was None": sums,
    "a generator": lambda block: setattr(block, "scale", torch.rand(1, generator=block.generator).item()),
    "a bare except": fails,
    "a hook, noted in a number": unless_counted(install),
    "a hook, noted in a list": once(lambda block: not block.items, lambda block: block.items.append(1), install),
    "a hook, noted in a dict": once(lambda block: not block.named, lambda block: block.named.update(a=1), install),
    "a hook, noted in a set": once(lambda block: not block.names, lambda block: block.names.add("a"), install),
    "a hook, noted in a flag": once(lambda block: not block.flag, lambda block: setattr(block, "flag", True), install),
    "a hook, noted in the hooks": once(lambda block: not block.b._forward_hooks, lambda block: None, install),
    "a pre-hook": unless_counted(lambda block: block.b.register_forward_pre_hook(lambda module, args: args[0] * 0.5)),
    "a part of a buffer, which an op saves": saves_a_part,
    "a hook is removed": removes,
    "a view in a list": lambda block: block.views[0].add_(1),
    "a patched forward": unless_counted(lambda block: setattr(block.b, "forward", halved(block.b.forward))),
    "a parameter": unless_counted(lambda block: setattr(block, "scale_", nn.Parameter(torch.ones(1)))),
    "a buffer": unless_counted(lambda block: block.register_buffer("late", torch.ones(1))),
    "a child": lambda block: block.box.update({"late": nn.Linear(D, D)}) if block.count else None,
}  # fmt: skip
BACK: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "training": (lambda block: block.drop.eval(), lambda block: block.drop.train()),
    "what is trained": (lambda block: block.a.requires_grad_(False), lambda block: block.a.requires_grad_(True)),
    "a number": (lambda block: setattr(block, "scale", 2), lambda block: setattr(block, "scale", 1)),
    "a buffer": (lambda block: block.__setattr__("buffer", block.buffer + 1), lambda block: block.buffer.sub_(1)),
    "children": (swaps, swaps),
    "parameters": (swaps_weights, swaps_weights),
    "a rate": (lambda block: setattr(block.drop, "p", 0.7), lambda block: setattr(block.drop, "p", 0.2)),
    "a hook": (lambda block: setattr(block, "total", install(block)), lambda block: block.total.remove()),
    "a list": (lambda block: block.items.append(1), lambda block: block.items.clear()),
}  # fmt: skip


def state_of(model: nn.Module) -> list[Any]:
    seen: list[Any] = [model.training]
    for module in model.modules():
        plain = (bool, int, float, list, dict, set)
        own = {key: value for key, value in module.__dict__.items() if isinstance(value, plain) and key[0] != "_"}
        seen += [
            sorted(own.items(), key=str),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            [*module._modules],
        ]
        seen += [(name, tensor.requires_grad) for name, tensor in module.named_parameters(recurse=False)]
    return seen


def trained(policies: Policies, change: Callable[[Any, int], None]) -> tuple[list[Any], list[Tensor | None]]:
    torch.manual_seed(0)
    model, states, tensors = nn.Sequential(Block(), Block()), [], []
    for block in model:
        block.handle = install(block)
    with graphckpt.apply(model, policies):
        for step in range(NUM_STEPS):
            for block in model:
                change(block, step)
            torch.manual_seed(step)
            model(torch.ones(4, D)).square().mean().backward()
            for block in model:
                block.before = block.after = nothing
            states.append(state_of(model))
            tensors += [
                x for t in model.parameters() for x in (t.detach().clone(), None if t.grad is None else t.grad.clone())
            ]
            tensors += [t.clone() for t in model.buffers()]
    return states, tensors


@cache
def changing(before: Callable[[Any], object], after: Callable[[Any], object], first: int) -> Any:
    """Returns what sets the two on a block from a step on, the same function for the same three."""

    def change(block: Any, step: int) -> None:
        block.before, block.after = (before, after) if step >= first else (nothing, nothing)

    return change


@cache
def trained_plainly(change: Callable[[Any, int], None]) -> tuple[list[Any], list[Tensor | None]]:
    return trained({}, change)


def assert_trains_alike(policies: Policies, change: Callable[[Any, int], None]) -> None:
    (states, tensors), (expected_states, expected) = trained(policies, change), trained_plainly(change)
    assert states == expected_states
    assert len(tensors) == len(expected)
    for one, other in zip(tensors, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@policies
@pytest.mark.parametrize("first", [0, 4], ids=["from the first step on", "from the fifth step on"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_forward_begins_to_change_is_changed_once(policies: Policies, change: Any, first: int) -> None:
    assert_trains_alike(policies, changing(change, nothing, first))


@policies
@pytest.mark.parametrize("pair", BACK.values(), ids=BACK)
def test_what_forward_changes_back_behind_the_last_saved_tensor_is_changed_back(policies: Policies, pair: Any) -> None:
    assert_trains_alike(policies, changing(*pair, first=0))


def test_another_thread_reads_a_module_that_is_recomputed_and_finds_it_as_it_was_afterwards() -> None:
    model = nn.Sequential(Block(), Block())
    expected = {id(module): module.__dict__ for module in model.modules()}
    end, errors = threading.Event(), []

    def read() -> None:
        while not end.is_set():
            try:
                model.state_dict()
                assert len([*model.modules()]) == len(expected)
            except Exception as error:  # an assertion too
                errors.append(error)

    thread = threading.Thread(target=read)
    with graphckpt.apply(model, {"*": True}):
        thread.start()
        try:
            for _ in range(50):
                model(torch.ones(4, D)).sum().backward()
        finally:
            end.set()
            thread.join()
    assert not errors
    assert all(module.__dict__ is expected[id(module)] for module in model.modules())


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


# The compiler reads `.grad` of what it is given, and says so.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("rule", [True, "selective"])
def test_compiled_children_are_not_compiled_again(rule: Any) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Sequential(nn.Linear(D, D), Child(), nn.Dropout(0.1)))
    model[0][1].compile(backend=backend)
    with graphckpt.apply(model, {"0": rule}):
        for step in range(100):
            model(torch.ones(2, D)).sum().backward()
            if step == 3:
                num_compiled = len(compiled)
    assert num_compiled > 0
    assert len(compiled) == num_compiled
