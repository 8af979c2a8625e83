"""State that a forward changes besides its outputs: the recomputation sees what the original forward saw."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from torch import nn

import graphckpt
from graphckpt._compat import FakeTensorMode
from graphckpt.engine.call_state import CallState, ModuleState, has_changed
from graphckpt.engine.objects import copy_objects, fill, items_of, swap, with_stand_ins
from graphckpt.undo import Undo, put_back


class Strict(list[int]):
    """A list that grows by ``append`` alone."""

    def extend(self, values: Iterable[int]) -> None:
        raise TypeError(f"expected append, got extend({values})")


class Holder(nn.Module):
    """Every kind of place that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.count = 0
        self.tensor = torch.zeros(2)
        self.list: list[Any] = [1]
        self.dict: dict[str, Any] = {"a": 1, "b": 2}
        self.set = {1}
        self.deque = deque([1])
        self.counter = Counter("a")
        self.ordered = OrderedDict({"a": 1, "b": 2})
        self.strict = Strict([1])
        self.text: str | None = "a"


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "a buffer in place": lambda m: m.average.add_(1),
    "a buffer through data, unseen by version counters": lambda m: m.average.data.add_(1),
    "a buffer replaced": lambda m: setattr(m, "average", m.average + 1),
    "a number": lambda m: setattr(m, "count", m.count + 1),
    "a text": lambda m: setattr(m, "text", m.text + "b"),
    "a tensor attribute in place": lambda m: m.tensor.add_(1),
    "a tensor attribute replaced": lambda m: setattr(m, "tensor", m.tensor + 1),
    "a list": lambda m: m.list.append(len(m.list)),
    "a dict": lambda m: m.dict.update({str(len(m.dict)): 1}),
    "a set": lambda m: m.set.add(len(m.set) + 5),
    "a deque": lambda m: m.deque.append(len(m.deque)),
    "a counter": lambda m: m.counter.update("ab"),
    "the order of an ordered dict": lambda m: m.ordered.move_to_end(next(iter(m.ordered))),
    "the order of a dict": lambda m: m.dict.update({(key := next(iter(m.dict))): m.dict.pop(key)}),
    "a list that refuses extend": lambda m: m.strict.append(len(m.strict)),
    "several": lambda m: (m.average.add_(1), m.list.append(2), setattr(m, "count", m.count + 2)),
}


def contents(module: nn.Module) -> dict[str, Any]:
    """Returns all that a module holds, safe from later edits."""
    fields = {k: v for k, v in module.__dict__.items() if not k.startswith("_")}
    fields |= {k: [*v.items()] for k, v in fields.items() if isinstance(v, dict)}  # dicts in another order are equal
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else copy.copy(v) for k, v in fields.items()} | {
        k: v.detach().clone() for k, v in module.state_dict().items()
    }


def call(state: ModuleState, forward: Callable[[], object]) -> CallState:
    """Runs a forward, and returns the state before it."""
    before = state.take()
    forward()
    state.finish(before, learning=before.is_first)
    state.remember(before)
    return before


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


@contextmanager
def in_place(state: ModuleState, call_state: CallState) -> Iterator[None]:
    """Puts a state in place, as for a recomputation, and then what was there before."""
    undo: Undo = []
    state.put_in_place(call_state, refuse, undo)
    yield
    put_back(undo)


def refuse(tensor: torch.Tensor) -> None:
    raise AssertionError(f"{tensor} is as it was")


@pytest.mark.parametrize("case", CHANGES)
def test_a_recomputation_sees_what_the_first_saw_and_moves_nothing(case: str) -> None:
    change, module = CHANGES[case], Holder()
    change(module)  # attributes that go from unset to set are one-time set-up
    state = ModuleState([module])
    for _ in range(3):
        before = contents(module)
        call_state = call(state, lambda: change(module))
        after = contents(module)
        assert not same(before, after)
        for _ in range(2):  # a recomputation may come twice, with retain_graph
            with in_place(state, call_state):
                assert same(contents(module), before)
                change(module)
                assert same(contents(module), after)
                change(module)
            assert same(contents(module), after)


def test_a_large_buffer_that_does_not_move_is_not_copied() -> None:
    module = Holder()
    module.register_buffer("large", torch.zeros(1 << 16))
    state = ModuleState([module])
    for _ in range(2):
        assert [copied.numel() for copied in call(state, lambda: None).copies.values()] == [3, 2]
    after = call(state, lambda: None)
    assert not any(has_changed(after, index) for index in after.copies)
    assert state.mutated(call(state, lambda: module.large.add_(1))) == "`large` of its Holder"


def test_a_large_buffer_that_the_first_call_modifies_is_copied_from_then_on() -> None:
    module = Holder()
    module.register_buffer("large", torch.zeros(1 << 16))
    state = ModuleState([module])
    for count in range(3):
        call_state = call(state, lambda: module.large.add_(1))
        assert state.mutated(call_state) is None
        with in_place(state, call_state):
            assert module.large[0] == count
        assert module.large[0] == count + 1


def test_a_later_call_that_edits_its_argument_compares_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would wait for an accelerator in each call, and end a capture."""

    @as_module(lambda: {"scale": nn.Buffer(torch.ones(3))})
    def Edits(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (x.mul_(2) * self.scale).sin()

    model, x = nn.Sequential(Edits()), torch.ones(3, requires_grad=True)
    with graphckpt.apply(model, {"0": True}, determinism_check="none"):
        model(x * 1).sum().backward()
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compares a buffer"))
        model(x * 1).sum().backward()


def test_an_attribute_that_is_changed_after_the_forward_is_what_it_was() -> None:
    module = Holder()
    state = ModuleState([module])
    for count in range(3):
        call_state = call(state, lambda: None)
        module.count += 1
        with in_place(state, call_state):
            assert module.count == count
        assert module.count == count + 1


def test_an_attribute_may_be_an_inference_tensor() -> None:
    module = Holder()
    state = ModuleState([module])
    for _ in range(3):
        with torch.inference_mode():
            module.tensor = module.tensor + 1
        count = module.tensor.sum().item()
        call_state = call(state, lambda: setattr(module, "tensor", module.tensor.clone()))
        with in_place(state, call_state):
            assert module.tensor.sum().item() == count


def test_an_attribute_may_become_an_inference_tensor_between_two_calls() -> None:
    """As a result that a module keeps, of an evaluation in between."""
    module = Holder()
    state = ModuleState([module])
    for number in range(6):
        with torch.inference_mode(number % 2 == 1):
            module.tensor = torch.full((2,), float(number))
        call_state = call(state, lambda: None)
        module.tensor = torch.zeros(2)
        with in_place(state, call_state):
            assert module.tensor.tolist() == [number, number]
        assert module.tensor.tolist() == [0, 0]


def test_modes_are_those_of_the_original_forward() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    state = ModuleState(model.modules())
    call_state = call(state, lambda: None)
    model.eval()
    with in_place(state, call_state):
        assert [m.training for m in model.modules()] == [True] * 3
    assert [m.training for m in model.modules()] == [False] * 3


def test_parameters_are_those_of_the_original_forward() -> None:
    module = Holder()
    state = ModuleState([module])
    own, other = module.weight, nn.Parameter(torch.zeros(3))
    module._parameters["weight"] = other
    call_state = call(state, lambda: None)
    module._parameters["weight"] = own
    with in_place(state, call_state):
        assert module.weight is other
    assert module.weight is own


def test_what_a_recomputation_sets_up_is_gone_with_it() -> None:
    """As Transformers installs hooks in the first call, and notes that in a flag: a recomputation does so again."""
    module = Holder()
    module.is_ready, module.handle = False, None
    state = ModuleState([module])

    def set_up() -> None:
        assert not module.is_ready
        module.is_ready, module.handle = True, module.register_forward_hook(print)

    call_state = call(state, set_up)
    hooks, handle = dict(module._forward_hooks), module.handle
    for _ in range(2):
        with in_place(state, call_state):
            assert not module._forward_hooks
            set_up()
        assert (dict(module._forward_hooks), module.handle) == (hooks, handle)


def test_notes_about_hooks_go_with_those_that_a_recomputation_registers_alone() -> None:
    module = Holder()
    state = ModuleState([module])
    call_state = call(state, lambda: None)
    module.register_forward_hook(lambda *_: None, with_kwargs=True)
    hooks, notes = dict(module._forward_hooks), dict(module._forward_hooks_with_kwargs)
    with in_place(state, call_state):
        assert not module._forward_hooks
        module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        module.register_buffer("late", torch.ones(1))
    assert (module._forward_hooks, module._forward_hooks_with_kwargs) == (hooks, notes)
    assert not module._forward_pre_hooks
    assert not module._forward_pre_hooks_with_kwargs
    assert "late" not in module._buffers


class Argument:
    """Stands for a key-value cache: an object that passes by reference."""

    def __init__(self) -> None:
        self.layers: list[Any] = [torch.zeros(1)]
        self.mask = torch.ones(2)
        self.count = 0
        self.names: dict[str, Any] = {"a": 1}


OBJECT_CHANGES: dict[str, Callable[[Argument], Any]] = {
    "an attribute": lambda o: setattr(o, "count", o.count + 1),
    "a list grows": lambda o: o.layers.append(torch.ones(1)),
    "a list's item": lambda o: o.layers.__setitem__(0, o.layers[0] + 1),
    "a dict's item": lambda o: o.names.update(a=o.names["a"] + 1),
    "an attribute replaced": lambda o: setattr(o, "layers", [torch.ones(1)]),
}


def seen(o: Argument) -> str:
    return repr((o.layers, o.count, o.names))


@pytest.mark.parametrize("case", OBJECT_CHANGES)
def test_objects_among_the_arguments_are_put_back_too(case: str) -> None:
    change, argument = OBJECT_CHANGES[case], Argument()
    before = seen(argument)
    objects = copy_objects([argument, 1, torch.ones(1), None])
    change(argument)
    after = seen(argument)
    assert after != before
    undo: Undo = []
    swap(objects, undo)
    assert seen(argument) == before
    change(argument)
    put_back(undo)
    assert seen(argument) == after


def test_tensors_of_objects_that_were_modified_since_have_stand_ins_in_the_recomputation() -> None:
    argument = Argument()
    tensors = [owner for owner, _ in copy_objects([argument]) if isinstance(owner, torch.Tensor)]
    objects = copy_objects([argument])
    tensors[0].add_(1)
    stand_in = torch.zeros(7)
    exchanged = with_stand_ins(objects, lambda tensor: stand_in)
    held = [value for owner, then in exchanged for value in items_of(owner, then)]
    assert any(value is stand_in for value in held)
    assert not any(value is tensors[0] for value in held)
    assert len(tensors) > 1
    assert all(any(value is tensor for value in held) for tensor in tensors[1:])


@pytest.mark.parametrize("value", [nn.Linear(1, 1), Argument, print, lambda: None, 3, "text", None, torch.ones(1)])
def test_modules_functions_and_atoms_are_not_taken(value: Any) -> None:
    assert copy_objects([value]) == []


@pytest.mark.parametrize("mode", [FakeTensorMode, nullcontext])
def test_the_running_statistics_of_batch_norm_are_copied_in_training_alone(mode: Callable[[], Any]) -> None:
    with mode():
        norm, image = nn.BatchNorm2d(1 << 15), torch.randn(2, 1 << 15, 1, 1)
        state = ModuleState([norm])
        large = {0: "weight", 1: "bias", 2: "running_mean", 3: "running_var"}
        for _ in range(2):
            copies = call(state, lambda: norm(image)).copies
            assert [large[index] for index in copies if index in large] == ["running_mean", "running_var"]
        norm.eval()
        assert call(state, lambda: norm(image)).copies.keys().isdisjoint(large)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_is_put_in_order_without_being_emptied(kind: type[dict[str, int]]) -> None:
    """It may be the ``__dict__`` of a module, which another thread reads."""
    owner, then = kind(a=1, b=2, c=3), kind(c=3, a=1, b=2)
    sizes: list[int] = []
    sys.setprofile(lambda *_: sizes.append(len(owner)))
    try:
        fill(owner, then)
    finally:
        sys.setprofile(None)
    assert [*owner.items()] == [*then.items()]
    assert min(sizes) >= 2


def test_an_interrupt_between_two_objects_leaves_none_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = [1], [2]
    objects = copy_objects([first, second])
    first.append(3)
    second.append(4)
    calls = []

    def fill_once(owner: Any, value: Any, *, fill: Callable[..., None] = graphckpt.engine.objects.fill) -> None:
        calls.append(owner)
        if len(calls) == 2:
            raise KeyboardInterrupt
        fill(owner, value)

    undo: Undo = []
    with monkeypatch.context() as patch:
        patch.setattr("graphckpt.engine.objects.fill", fill_once)
        with pytest.raises(KeyboardInterrupt):
            swap(objects, undo)
    put_back(undo)
    assert (first, second) == ([1, 3], [2, 4])
