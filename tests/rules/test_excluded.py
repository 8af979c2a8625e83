"""Excluded children whose outputs alone do not stand for what they did: the recomputation runs them again."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz.layers import D
from helpers.contract import assert_same_steps
from helpers.modules import as_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import graphckpt


@as_module(lambda: {"linear": nn.Linear(D, D), "child": nn.ELU(inplace=True)})
def EditsItsArgument(self: Any, x: Tensor) -> Tensor:
    """The child is an activation that edits its argument, of which the parent goes on to use the edited values."""
    h = self.linear(x)
    y = self.child(h)
    return y.sin() + h.cos()


@as_module(lambda: {"linear": nn.Linear(D, D)})
def AppendsToCache(self: Any, x: Tensor, cache: list[Tensor]) -> Tensor:
    cache.append(self.linear(x).sin())
    return x.cos()


@as_module(lambda: {"child": AppendsToCache()})
def FillsCache(self: Any, x: Tensor) -> Tensor:
    """The child appends to a list of the parent's."""
    cache: list[Tensor] = []
    return self.child(x * 2, cache) * torch.stack(cache).sum(0).exp()


@as_module(lambda: {"linear": nn.Linear(D, D), "loss": None})
def SetsLoss(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.loss = y.square().mean()
    return y.sin()


@as_module(lambda: {"child": SetsLoss()})
def ReadsAttribute(self: Any, x: Tensor) -> Tensor:
    """The parent reads what the child sets on itself, as the loss of a router."""
    return self.child(x).exp() * self.child.loss.exp()


class RaisesError(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise ValueError
        return x


@as_module(lambda: {"linear": nn.Linear(D, D), "child": RaisesError()})
def CatchesError(self: Any, x: Tensor) -> Tensor:
    """The child raises, and the parent goes on without it."""
    try:
        return self.child(self.linear(x))
    except ValueError:
        return self.linear(x).sin()


@as_module(lambda: {"child": nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5)), "drop": nn.Dropout(0.5)})
def DrawsNumbers(self: Any, x: Tensor) -> Tensor:
    """The child draws random numbers, and the parent does so after it."""
    return self.drop(self.child(x).exp()).sin()


@as_module(lambda: {"linear": nn.Linear(D, D), "average": nn.Buffer(torch.zeros(D))})
def Averages(self: Any, x: Tensor) -> Tensor:
    self.average.mul_(0.5).add_(x.detach().mean(0))
    return (self.linear(x) + self.average).sin()


@as_module(lambda: {"child": Averages()})
def MovesBuffer(self: Any, x: Tensor) -> Tensor:
    """The child is called twice and modifies its buffer each time; the parent modifies the second output in place."""
    y = self.child(x)
    return self.child(y.sin()).mul_(0.5).sin() * y


@pytest.mark.parametrize("around", [{"0": True}, {"": True, "0": "selective"}], ids=["full", "selective in full"])
@pytest.mark.parametrize(
    "kind", [EditsItsArgument, FillsCache, ReadsAttribute, CatchesError, DrawsNumbers, MovesBuffer]
)
def test_an_excluded_child_that_does_more_than_return(kind: type[nn.Module], around: dict[str, Any]) -> None:
    assert_same_steps(lambda: nn.Sequential(kind(), nn.Linear(D, D)), around | {"0.child": False})


@as_module(lambda: {"child": Averages()})
def CallsTwice(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.child(self.child(x))
    return y, (y * 2).sin()


@as_module(lambda: {"block": CallsTwice()})
def ModifiesOutput(self: Any, x: Tensor) -> Tensor:
    """A repeated second call would find the buffer as the first call, which is not repeated, has found it."""
    y, z = self.block(x)
    return y.mul_(2).sin() * z


def test_an_output_that_is_modified_after_the_block_of_a_child_with_a_buffer() -> None:
    assert_same_steps(ModifiesOutput, {"block": True, "block.child": False})


@pytest.mark.parametrize("child", [nn.Dropout(0.5).eval(), nn.Identity(), nn.Sequential(nn.Identity())])
def test_a_child_that_returns_its_argument_returns_it_again(child: nn.Module) -> None:
    @as_module(lambda: {"inner": child, "linear": nn.Linear(4, 4)})
    def AsksForIdentity(self: Any, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y is x:
            return self.linear(y + x)
        y += x
        return self.linear(y)

    x = torch.ones(2, 4, requires_grad=True)
    model = nn.Sequential(AsksForIdentity())
    model(x).square().sum().backward()
    plain, x.grad = x.grad, None
    with graphckpt.apply(model, {"0": True, "0.inner": False}):
        for _ in range(3):
            x.grad = None
            model(x).square().sum().backward()
            assert torch.equal(x.grad, plain)


def test_statistics_that_the_first_call_leaves_as_they_are_move_once() -> None:
    """A cumulative average over equal batches is the same before and after the call that is learnt from.

    Buffers as large as these are copied of norms alone.
    """
    found = []
    for rule in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(20_000, momentum=None), nn.Tanh())
        with graphckpt.apply(model, {"0": rule}):
            for number in range(3):
                x = torch.linspace(-1, 1, 60_000).view(3, 20_000) * (number + 1)
                with torch.no_grad():
                    model(x)
                model(x.requires_grad_()).sum().backward()
        found.append([buffer.clone() for buffer in model.buffers()])
    assert all(map(torch.equal, *found))


def test_a_forward_that_fails_after_an_edit_of_its_argument_leaves_nothing() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(str(x.mul_(2).sin().sum().item()))

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    disk = {"activation_checkpointing": False, "offload": "disk", "min_elements": 1}
    with graphckpt.apply(model, {"0": disk, "1": True}) as handle:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"\d"):
                model(torch.ones(300, 4))
            gc.collect()
            assert [wrapper.context.store.num_alive for wrapper in handle._wrappers if wrapper.name == "0"] == [0]


class HalvesItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5).sin()


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Transposes(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns a copy through a view that does not share its version counter."""
    y = self.linear(x).sigmoid()
    return y.view(-1, 2, D // 2).transpose(0, 1).reshape(-1, D)


@as_module(lambda: {"calls": nn.Buffer(torch.zeros(()))})
def Counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds the number of its call, a buffer, to its input."""
    self.calls.add_(1)
    return torch.sigmoid(x + self.calls)


@as_module(lambda: {"counts": Counts(), "linear": nn.Linear(D, D)})
def Targets(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls a child with and without gradients, in turns."""
    for _ in range(2):
        with torch.no_grad():
            target = self.counts(x)
        x = self.linear(self.counts(x) * target)
    return x


def test_calls_without_gradients_find_the_buffers_that_the_others_leave() -> None:
    assert_same_steps(lambda: nn.Sequential(nn.Linear(D, D), Targets()), {"1": True, "1.counts": False})


class EditsAndRaises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        raise ValueError("after an edit")


@as_module(lambda: {"inner": EditsAndRaises()})
def Catches(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Goes on with what its child has left behind."""
    with contextlib.suppress(ValueError):
        self.inner(x)
    return x.sin()


@pytest.mark.parametrize(("child", "name"), [(HalvesItsInput, "1.1"), (Catches, "1.1.inner")], ids=["edits", "raises"])
def test_an_excluded_child_that_edits_a_kept_result(child: Callable[[], nn.Module], name: str) -> None:
    assert_same_steps(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Sequential(Transposes(), child(), nn.Linear(D, D))),
        {"1": graphckpt.Selective(lambda *_, **__: True), name: False},
    )


def test_hooks_of_the_caller_may_pack_a_tuple() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    policies = {"": {"activation_checkpointing": True}, "1": {"activation_checkpointing": False}}
    with graphckpt.apply(model, policies):
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().sum()
        assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), expected))


@as_module(lambda: {"child": nn.Sequential(nn.Linear(D, D), nn.ReLU())})
def EditsWhatTheChildSaves(self: Any, x: Tensor) -> Tensor:
    return self.child(x).add_(1)


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("policies", [{}, {"0": False}, {"0": True, "0.child": False}])
def test_a_saved_tensor_that_is_edited_is_an_error_as_in_the_plain_step(
    policies: dict[str, Any], is_measured: bool
) -> None:
    model = nn.Sequential(EditsWhatTheChildSaves(), nn.Linear(D, D))
    with (
        graphckpt.apply(model, policies) as handle,
        handle.measure() if is_measured else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match=r"modified in place|modified by an inplace"),
    ):
        model(torch.ones(3, D)).sum().backward()


# --- buffers that a child updates, and its parent reads later


class Updates(nn.Module):
    """Updates its buffer in each forward: in place, or by another tensor."""

    def __init__(self, how: str, num: int = D) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(D, D), how
        self.register_buffer("buffer", torch.ones(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.buffer.mul_(1.25)
        elif self.how == "without a version":
            self.buffer.data.mul_(1.25)
        else:
            self.buffer = self.buffer * 1.25
        return self.linear(x) * 1

    def read(self) -> torch.Tensor:
        return self.buffer[:D] * 1.5


class Norm(nn.BatchNorm1d):
    def read(self) -> torch.Tensor:
        return self.running_var * 1.5


@as_module(lambda child: {"first": nn.Linear(D, D), "child": child, "last": nn.Linear(D, D)})
def ReadsBuffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(self.child(self.first(x)) * self.child.read())
    return self.last(self.child(y) * self.child.read())


CHILDREN: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Norm(D),
    **{how: partial(Updates, how) for how in ("in place", "without a version", "replaced")},
    "large": partial(Updates, "in place", 20_000),
    "large, replaced": partial(Updates, "replaced", 20_000),
}


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("rule", [True, "selective"])
@pytest.mark.parametrize("more", [{}, {"offload": "disk", "min_elements": 1}], ids=["device", "disk"])
def test_a_parent_reads_the_buffers_as_an_excluded_child_has_left_them(
    child: str, rule: bool | str, more: dict[str, int | str]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(ReadsBuffer(CHILDREN[child]()), ReadsBuffer(CHILDREN[child]()))
    model = copy.deepcopy(plain)
    handle = graphckpt.apply(
        model,
        {"*": {"activation_checkpointing": rule, **more}, "*.child": False},
        determinism_check="values",
    )
    results = []
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(3):
            losses = [each(torch.randn(6, D)).square().sum() for _ in range(2)]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            losses[0].backward()
        results.append([*(p.grad for p in each.parameters()), *each.buffers()])
    handle.remove()
    assert all(map(torch.equal, *results))


def test_buffers_of_an_excluded_child_are_saved_in_one_order_by_first_calls_and_recomputations() -> None:
    """Beside six parameters, its buffers have the numbers 6 to 8: a set of these has another order."""
    torch.manual_seed(0)
    plain = nn.Sequential(ReadsBuffer(Norm(D)))
    model = copy.deepcopy(plain)
    handle = graphckpt.apply(model, {"": True, "0": "selective", "0.child": False}, determinism_check="values")
    results = []
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(2):
            each(torch.randn(6, D)).square().sum().backward()
        results.append([*(p.grad for p in each.parameters()), *each.buffers()])
    handle.remove()
    assert all(map(torch.equal, *results))


def blocks_and_children(runs: list[str]) -> nn.Module:
    """Returns a block with a block within it, of which each has a child that draws random numbers."""

    def child(name: str) -> nn.Module:
        @as_module(lambda: {"inner": nn.Sequential(nn.Linear(D, D), as_module()(inner)())})
        def Child(self: Any, x: Tensor) -> Tensor:
            runs.append(name)
            return torch.dropout(self.inner(x), 0.5, train=True).sin()

        def inner(self: Any, x: Tensor) -> Tensor:
            runs.append(f"{name}.inner")
            return x.tanh()

        return Child()

    @as_module(lambda: {"child": child("child"), "linear": nn.Linear(D, D)})
    def Block(self: Any, x: Tensor) -> Tensor:
        return self.child(self.linear(x)).exp()

    @as_module(lambda: {"block": Block(), "child": child("second child")})
    def Outer(self: Any, x: Tensor) -> Tensor:
        return self.child(self.block(x)).tanh()

    torch.manual_seed(0)
    return nn.Sequential(Outer(), nn.Linear(D, D))


@pytest.mark.parametrize(
    ("policies", "recomputed"),
    [
        ({"0": True, "0.child": False, "0.block.child": False}, set()),
        ({"0": True, "0.block": "selective", "0.child": False, "0.block.child": False}, set()),
        ({"0": True, "0.child": False, "0.child.inner": True, "0.block.child": False}, {"second child.inner"}),
    ],
    ids=["in one block", "in a block within a block", "with a block within it"],
)
def test_an_excluded_child_runs_once_and_blocks_within_it_are_recomputed(policies: Any, recomputed: set[str]) -> None:
    steps = []
    for each in ({}, policies):
        runs: list[str] = []
        model = blocks_and_children(runs)
        with graphckpt.apply(model, each):
            for _ in range(2):
                torch.manual_seed(1)
                runs.clear()
                model(torch.ones(2, D)).sum().backward()
        assert {name for name in runs if runs.count(name) > 1} == (recomputed if each else set())
        steps.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *steps))


class RoundsSaved:
    """Saved-tensor hooks of a program that keeps what it saves in bfloat16."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor.float())

    def _pack(self, tensor: Tensor) -> Tensor:
        self.shapes.append(tuple(tensor.shape))
        return tensor.bfloat16()


@as_module(lambda: {"linear": nn.Linear(D, 2 * D)})
def Child(self: Any, x: Tensor) -> Tensor:
    return self.linear(x).sin()


@as_module(lambda hooks: {"hooks": hooks, "child": Child(), "down": nn.Linear(2 * D, D)})
def EntersHooks(self: Any, x: Tensor) -> Tensor:
    with self.hooks():
        h = self.child(x.cos()).tanh()
    return x + self.down(h)


@as_module(lambda hooks: {"hooks": hooks, "child": Child(), "down": nn.Linear(2 * D, D)})
def EntersHooksTwice(self: Any, x: Tensor) -> Tensor:
    """Of two pairs of hooks, the inner one alone acts in PyTorch."""
    with saved_tensors_hooks(lambda tensor: tensor * 0, lambda tensor: tensor), self.hooks():
        h = self.child(x.cos()).tanh()
    return x + self.down(h)


@as_module(lambda hooks: {"hooks": hooks, "child": EntersHooks(hooks)})
def EntersHooksInChild(self: Any, x: Tensor) -> Tensor:
    return self.child(x.cos()).tanh()


@as_module(lambda hooks: {"inner": EntersHooks(hooks), "down": nn.Linear(D, D)})
def HasBlock(self: Any, x: Tensor) -> Tensor:
    return self.down(self.inner(x).sin())


_DISK = {"activation_checkpointing": False, "offload": "disk", "min_elements": 1}


@pytest.mark.parametrize(
    ("kind", "policies"),
    [
        (EntersHooks, {"0": True, "0.child": False}),
        (EntersHooks, {"0": "selective", "0.child": _DISK}),
        (EntersHooks, {"": True, "0": "selective", "0.child": _DISK}),
        (EntersHooks, {"0": _DISK | {"activation_checkpointing": True}, "0.child": False}),
        (EntersHooksTwice, {"0": True, "0.child": False}),
        (EntersHooksInChild, {"0": True, "0.child": False}),
        (HasBlock, {"0": True, "0.inner": "selective", "0.inner.child": False}),
    ],
)
def test_hooks_that_a_block_enters_get_what_an_excluded_child_saves(kind: Any, policies: dict[str, Any]) -> None:
    """Hooks that round what they keep show in every gradient whether all saved tensors have passed through them."""
    steps, packed = [], []
    for each in ({}, policies):
        hooks = RoundsSaved()
        torch.manual_seed(0)
        model = nn.Sequential(kind(hooks), nn.Linear(D, D))
        with graphckpt.apply(model, each):
            for _ in range(2):
                hooks.shapes.clear()
                loss = model(torch.ones(6, D)).square().sum()
                packed.append([*hooks.shapes])
                loss.backward()
        steps.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *steps))
    assert packed[:2] == packed[2:]


@as_module(lambda: {"linear": nn.Linear(D, D), "least": nn.Buffer(torch.empty(0))})
def Observes(self: Any, x: Tensor) -> Tensor:
    """As an observer of quantization for each channel, whose buffers have no channels before its first call."""
    if not self.least.numel():
        self.least.resize_(D).fill_(0.0)
    self.least.copy_(torch.minimum(self.least, x.detach().amin(0)))
    return self.linear(x - self.least)


@as_module(lambda: {"child": Observes(), "linear": nn.Linear(D, D)})
def ReadsObserver(self: Any, x: Tensor) -> Tensor:
    return (self.linear(self.child(x).tanh()) * self.child.least.sum()).sin()


@pytest.mark.parametrize("policies", [{"0": True, "0.child": False}, {"0": "selective", "0.child": _DISK}])
def test_a_buffer_that_the_first_call_of_an_excluded_child_resizes(policies: dict[str, Any]) -> None:
    assert_same_steps(lambda: nn.Sequential(ReadsObserver(), nn.Linear(D, D)), policies)


@as_module(lambda act, around: {"linear": nn.Linear(D, D), "child": Acts(act), "around": around})
def Around(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(self.around(self.child, self.linear(x)))


@as_module(lambda act: {"linear": nn.Linear(D, D), "act": act})
def Acts(self: Any, x: Tensor) -> Tensor:
    return self.act(self, x)


def fails(child: Any, x: Tensor) -> Tensor:
    raise ValueError("no")


def tries(child: Any, x: Tensor) -> Tensor:
    try:
        return child(x)
    except ValueError:
        return x


WHY: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "it modifies its arguments": (lambda child, x: child.linear(x.mul_(2)), lambda child, x: child(x * 1)),
    "it raises an error": (fails, tries),
    "it returns a parameter": (lambda child, x: child.linear.weight, lambda child, x: x @ child(x)),
    "its parent modifies its output in place": (lambda child, x: child.linear(x), lambda child, x: child(x).mul_(2)),
}


@pytest.mark.parametrize("why", WHY)
def test_explain_says_why_an_excluded_child_is_recomputed(why: str) -> None:
    model = nn.Sequential(Around(*WHY[why]))
    with graphckpt.apply(model, {"0": True, "0.child": False}) as handle:
        model(torch.ones(2, D)).sum().backward()
        assert f"it is recomputed: {why}" in str(handle.explain())


@pytest.mark.parametrize("edit", [lambda y: y.mul_(2), lambda y: nn.functional.elu(y, inplace=True)])
def test_an_output_that_the_parent_modifies_where_hooks_save_copies(edit: Callable[[Tensor], Tensor]) -> None:
    """A copy has another version than the output, and does not show that it was modified."""
    torch.manual_seed(0)
    model = nn.Sequential(Around(lambda child, x: child.linear(x), lambda child, x: edit(child(x)).sin()))
    x, steps = torch.randn(2, D), []
    for policies in ({}, {"0": True, "0.child": False}):
        model.zero_grad()
        with graphckpt.apply(model, policies), saved_tensors_hooks(torch.clone, lambda saved: saved):
            model(x).square().sum().backward()
        steps.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(steps[0]) == 4
    assert all(map(torch.equal, *steps))


@as_module(lambda: {"linear": nn.Linear(D, D), "count": 0, "past": [], "notes": SimpleNamespace(last=None)})
def SetsAttributes(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    y = self.linear(x)
    self.past.append(self.count)
    self.notes.last, self.scale = y.sum(), y.detach().mean(0)
    calls.append(self.count)
    return y


@as_module(lambda: {"child": SetsAttributes(), "linear": nn.Linear(D, D), "edits": False})
def ReadsAttributes(self: Any, x: Tensor) -> Tensor:
    """Reads, after each call, what the child has set; it may modify the output of the first one, which is repeated."""
    for number in range(2):
        x = self.child(x)
        x = x.mul_(2) if self.edits and not number else x
        x = self.linear(x * self.child.scale).sin() * (len(self.child.past) + self.child.count) + self.child.notes.last
    return x


calls: list[int] = []


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("rule", [True, "selective"])
def test_a_parent_reads_the_attributes_that_an_excluded_child_has_set(rule: bool | str, edits: bool) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(ReadsAttributes(), nn.Linear(D, D))
        model[0].edits = edits
        return model

    assert_same_steps(make, {"0": rule, "0.child": False})
    calls.clear()
    model = make()
    with graphckpt.apply(model, {"0": rule, "0.child": False}):
        model(torch.ones(2, D)).sum().backward()
    assert calls == [1, 2, 1] if edits else calls == [1, 2]
