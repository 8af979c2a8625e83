"""A recomputation that differs from the original forward is one error, which names block, op and argument."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.contract import assert_same_steps
from helpers.hard_modules import D
from helpers.modules import as_module
from torch import Tensor, nn
from torch.testing import assert_close

import graphckpt
from graphckpt import RecomputeError, Selective


class Outside:
    """An object that is callable, whose state is that of a closure, which the call state does not reach."""

    def __init__(self) -> None:
        calls = [0]
        self.read = lambda: calls[0]
        self.write = lambda number: calls.__setitem__(0, number)

    @property
    def calls(self) -> int:
        return self.read()

    @calls.setter
    def calls(self, number: int) -> None:
        self.write(number)


@as_module()
def Takes(self: Any, x: Tensor, states: list[Tensor | None] | None = None, *, mask: Tensor | None = None) -> Tensor:
    for extra in (mask, *(states or ())):
        x = x * extra if isinstance(extra, Tensor) else x
    return x.sin()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda block, x, extra: block(extra), "x"),
        (lambda block, x, extra: block(x, mask=extra), "mask"),
        (lambda block, x, extra: block(x, states=[None, extra]), r"states\[1\]"),
    ],
    ids=["positional", "keyword", "nested"],
)
def test_editing_an_input_between_forward_and_backward(
    call: Callable[[nn.Module, Tensor, Tensor], Tensor], name: str
) -> None:
    block, x = Takes(), torch.randn(3, requires_grad=True)
    with graphckpt.apply(nn.Sequential(block), {"0": True}):
        extra = x * 2
        out = call(block, x, extra)
        extra.data.add_(1)  # unseen by autograd too
        extra.detach().add_(1)
        with pytest.raises(RecomputeError, match=f"^0: its argument `{name}` was modified in place between forward an"):
            out.sum().backward()


def test_the_root_has_a_name_in_messages() -> None:
    model = nn.Linear(4, 4)
    with graphckpt.apply(model, {"": True}):
        loss = model(torch.randn(2, 4)).sum()
        model.weight.detach().add_(1)
        with pytest.raises(RecomputeError, match=r"^\(model\): `weight` of its Linear was modified in place"):
            loss.backward()
    with pytest.raises(graphckpt.ConfigError, match=r"^\(model\): segments: expected an nn.Sequential, got Linear"):
        graphckpt.apply(model, {"": {"activation_checkpointing": "segments"}})


def test_a_forward_that_begins_to_edit_its_argument() -> None:
    @as_module(lambda: {"edits": False})
    def Begins(self: Any, x: Tensor) -> Tensor:
        return (x.mul_(2) if self.edits else x * 2).sin()

    block = Begins()
    with graphckpt.apply(nn.Sequential(block), {"0": True}):
        block(torch.randn(3, requires_grad=True) * 1).sum().backward()
        block.edits = True
        with pytest.raises(RecomputeError, match="0: forward modified its argument `x` in place, and the"):
            block(torch.randn(3, requires_grad=True) * 1)


def test_an_iterator_as_argument() -> None:
    model = nn.Sequential(Takes())
    with (
        graphckpt.apply(model, {"0": True}),
        pytest.raises(RecomputeError, match=r"0: argument `states` is an iterator, .* fix: pass a list"),
    ):
        model[0](torch.ones(2, requires_grad=True), iter([1, 2]))


def test_children_called_in_another_order() -> None:
    @as_module(lambda: {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "outside": Outside()})
    def Swaps(self: Any, x: Tensor) -> Tensor:
        self.outside.calls += 1
        first, second = (self.a, self.b) if self.outside.calls % 2 else (self.b, self.a)
        return torch.sin(second(torch.sin(first(x))))

    model = nn.Sequential(Swaps())
    with graphckpt.apply(model, {"0": True, "0.a": False, "0.b": False}):
        loss = model(torch.randn(2, 4)).sum()
        with pytest.raises(RecomputeError, match=r"0: expected a call of 0\.a, got one of 0\.b in the recomputation"):
            loss.backward()


def test_an_argument_object_that_changes_is_seen_as_it_was() -> None:
    """A non-tensor argument that the caller changes between forward and backward does not change the gradient."""

    class Settings:
        def __init__(self) -> None:
            self.scale = 2.0
            self.path = [1]

    @as_module()
    def Reads(self: Any, x: Tensor, settings: Settings) -> Tensor:
        settings.path.append(2)
        return (x * settings.scale * len(settings.path)).sin()

    block, settings, x = Reads(), Settings(), torch.randn(3, requires_grad=True)
    with graphckpt.apply(nn.Sequential(block), {"0": True}):
        out = block(x, settings)
        settings.scale = 3.0
        out.sum().backward()
    torch.testing.assert_close(x.grad, 4.0 * torch.cos(4.0 * x.detach()), rtol=0, atol=0)
    assert (settings.scale, settings.path) == (3.0, [1, 2])


def test_a_failed_recomputation_leaves_the_module_as_it_was() -> None:
    @as_module(lambda: {"norm": nn.BatchNorm1d(4), "outside": Outside()})
    def Raises(self: Any, x: Tensor) -> Tensor:
        self.outside.calls += 1
        if self.outside.calls == 2:
            self.norm(x)
            raise ValueError("recomputation")
        return self.norm(x).sin()

    model = nn.Sequential(Raises())
    with graphckpt.apply(model, {"0": True}):
        loss = model(torch.randn(8, 4, requires_grad=True)).sum()
        stats, random = model[0].norm.running_mean.clone(), torch.get_rng_state()
        with pytest.raises(ValueError, match="recomputation"):
            loss.backward()
    assert torch.equal(model[0].norm.running_mean, stats)
    assert model[0].norm.num_batches_tracked == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert not graphckpt.blocks.is_recomputing()


@as_module(lambda: {"linear": nn.Linear(D, D)})
def ReturnsResultOfChild(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.linear(x)
    return y, (y * 2).sin()


@as_module(lambda: {"block": ReturnsResultOfChild()})
def EditsResultOfBlock(self: Any, x: Tensor) -> Tensor:
    y, z = self.block(x)
    return y.add_(1).sin() * z


@pytest.mark.parametrize("policies", [{"block": Selective("matmul")}, {"block": True, "block.linear": False}], ids=str)
def test_a_kept_result_that_later_code_edits_is_made_again(policies: dict[str, Any]) -> None:
    """An edit of a kept op result after its block is legal in the plain step, and stays so."""
    assert_same_steps(EditsResultOfBlock, policies)


@as_module(lambda: {"child": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
def _EditsChildsResult(self: Any, x: Tensor) -> Tensor:
    y = self.child(x)
    y += x
    return y


def test_a_kept_result_that_the_recomputed_block_around_edits_is_recomputed() -> None:
    """The plain step is legal under hooks that copy what is saved."""
    grads = []
    for policies in ({}, {"0": True, "0.child": Selective(lambda *_, **__: True)}):
        torch.manual_seed(0)
        model = nn.Sequential(_EditsChildsResult())
        x = torch.randn(2, 4, requires_grad=True)
        with graphckpt.apply(model, policies):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied):
                loss = model(x).pow(2).sum()
            loss.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_large_buffer_that_begins_to_move_is_refused_once() -> None:
    @as_module(lambda: {"steps": nn.Buffer(torch.zeros(20_000)), "begun": False})
    def Late(self: Any, x: Tensor) -> Tensor:
        if self.begun:
            self.steps.add_(1)
        return x.sin() * self.steps[0].cos()

    model = nn.Sequential(Late())
    with graphckpt.apply(model, {"0": True}):
        model(torch.randn(3, requires_grad=True)).sum().backward()
        model[0].begun = True
        with pytest.raises(RecomputeError, match=r"0: forward modified `steps` of its Late in place"):
            model(torch.randn(3, requires_grad=True))
        model(torch.randn(3, requires_grad=True)).sum().backward()
        assert model[0].steps[0] == 2


def test_a_parameter_that_forward_edits_is_refused() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x).sin()

    model = nn.Sequential(Clamps(4, 4))
    with graphckpt.apply(model, {"0": True}), pytest.raises(RecomputeError, match=r"0: forward modified `weight`"):
        model(torch.ones(3, 4))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renormalizes_its_weight_is_refused_but_where_it_is_excluded(kind: type[nn.Module]) -> None:
    grads = []
    for rules in ({}, {"": True, "0": False}):
        torch.manual_seed(0)
        model = nn.Sequential(kind(5, 3, max_norm=0.5), nn.Linear(3, 3), nn.Tanh())
        with graphckpt.apply(model, rules):
            for _ in range(3):
                model(torch.tensor([[0, 1], [3, 1]])).square().sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(3 * parameter.grad)
        grads.append([tensor.clone() for p in model.parameters() for tensor in (p, p.grad)])
    assert all(map(torch.equal, *grads))
    with graphckpt.apply(model, {"": True}), pytest.raises(RecomputeError, match="modified `weight` of its Embedding"):
        model(torch.tensor([[0, 1], [3, 1]]))


def test_an_attribute_that_a_hook_sets_before_each_call_is_that_of_its_call() -> None:
    @as_module()
    def Scaled(self: Any, x: Tensor) -> Tensor:
        return (x * self.scale).sin()

    grads = []
    for rule in (False, True):
        model = nn.Sequential(Scaled())
        scales = iter(torch.arange(8.0))
        model[0].register_forward_pre_hook(lambda module, _, scales=scales: setattr(module, "scale", next(scales)))
        with graphckpt.apply(model, {"0": rule}):
            for _ in range(2):
                x = torch.ones(3, requires_grad=True)
                (model(x) + model(x)).sum().backward()
                grads.append(x.grad)
        assert model[0].scale == 3
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])


@as_module(lambda change: {"linear": nn.Linear(4, 4), "outside": Outside(), "change": change})
def Fickle(self: Any, x: Tensor) -> Tensor:
    """Does something else on every call; ``outside`` is no state of the module."""
    self.outside.calls += 1
    return self.change(self.outside.calls, self.linear(x)).exp()


DIFFERENCES: dict[str, tuple[Callable[[int, Tensor], Tensor], str]] = {
    "shape": (
        lambda call, h: torch.sigmoid(h[: 2 * call]),
        (
            r"^1: saved tensor 2, saved by torch\.sigmoid at test_mismatch\.py:.*"
            r"expected float32\[2, 4\], got float32\[4, 4\] in the recomputation.*fix: make forward depend on"
        ),
    ),
    "dtype": (
        lambda call, h: torch.sigmoid(h.double() if call > 1 else h),
        r"saved by torch\.sigmoid at \S+\.py:\d+: expected float32\[8, 4\], got float64\[8, 4\] in the recomputation",
    ),
    "fewer": (
        lambda call, h: h if call > 1 else torch.sigmoid(torch.tanh(h)),
        "the original forward saved 5 tensors, the recomputation 3",
    ),
    "more": (
        lambda call, h: torch.sigmoid(torch.tanh(h)) if call > 1 else h,
        "the original forward saved 3 tensors, the recomputation 5",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_another_number_or_kind_of_saved_tensors(case: str) -> None:
    change, message = DIFFERENCES[case]
    model = nn.Sequential(nn.Linear(4, 4), Fickle(change))
    with graphckpt.apply(model, {"1": True}):
        loss = model(torch.randn(8, 4)).sum()
        with pytest.raises(RecomputeError, match=f"(?s){message}"):
            loss.backward()


class Around:
    """What the block below reads from outside of it."""

    change: Callable[[Tensor], Tensor] = torch.tanh


@as_module(lambda: {"layer": nn.Linear(4, 4)})
def Reads(self: Any, x: Tensor) -> Tensor:
    return Around.change(torch.sigmoid(self.layer(x))).exp()


def fails(h: Tensor) -> Tensor:
    message = "of the user's own"
    raise ValueError(message)


REPEATED: dict[str, tuple[Callable[[Tensor], Tensor], type[Exception]]] = {
    "other values": (lambda h: torch.tanh(2 * h.detach()) + h - h.detach(), RecomputeError),
    "another shape": (lambda h: torch.tanh(h[:2]), RecomputeError),
    "fewer tensors": (lambda h: h, RecomputeError),
    "an exception of the block": (fails, ValueError),
}


@pytest.mark.parametrize("rule", ["full", "selective"])
@pytest.mark.parametrize("case", REPEATED)
def test_a_backward_that_is_repeated_after_an_error_raises_it_again(
    case: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, error = REPEATED[case]
    model = nn.Sequential(Reads())
    x = torch.randn(8, 4, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    with graphckpt.apply(model, {"0": rule}, determinism_check="values"):
        loss = model(x).sum()
        with monkeypatch.context() as patch:
            patch.setattr(Around, "change", change)
            for _ in range(3):
                with pytest.raises(error):
                    loss.backward(retain_graph=True)
        assert x.grad is None
        loss.backward()  # what forward reads is as it was
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


class ActNorm(nn.Module):
    """Sets its parameters from the first batch."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.replaces = replaces
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                if self.replaces:
                    self.scale = nn.Parameter(1 / x.std(0))
                else:
                    self.scale.copy_(1 / x.std(0))
            self.is_set = True
        return torch.tanh(x * self.scale)


def with_act_norms(*, replaces: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), ActNorm(replaces=replaces), nn.Linear(8, 8), ActNorm(replaces=replaces))


@pytest.mark.parametrize("rule", ["full", "selective"])
def test_parameters_set_from_the_first_batch_need_one_forward_before(rule: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def gradients(model: nn.Module) -> list[Tensor | None]:
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, model = with_act_norms(replaces=False), with_act_norms(replaces=False)
    gradients(plain)  # sets the parameters
    policies, unset = {"1": rule, "3": rule}, with_act_norms(replaces=False)
    advice = "if the first forward sets parameters from its batch, run one forward before training"
    with graphckpt.apply(unset, policies), pytest.raises(RecomputeError, match=advice):
        gradients(unset)
    with graphckpt.apply(model, policies):
        with torch.no_grad():
            model(x)
        assert_close(gradients(model), gradients(plain), rtol=0, atol=0)


@pytest.mark.parametrize("rule", ["full", "selective"])
def test_parameters_replaced_in_the_first_forward_are_those_that_it_computes(rule: str) -> None:
    seen = []
    for policies in ({}, {"1": rule, "3": rule}):
        model = with_act_norms(replaces=True)
        with graphckpt.apply(model, policies):
            for _ in range(3):
                model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).sum().backward()
        seen.append([tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)])
    assert_close(*seen, rtol=0, atol=0)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16()


class Weight(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 8), *blocks)


X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.mark.parametrize("rule", ["full", "selective"])
def test_hooks_around_a_block_that_round_are_named(rule: str) -> None:
    model = two_blocks()
    with graphckpt.apply(model, {"[12]": rule}):
        with torch.autograd.graph.saved_tensors_hooks(rounded, lambda tensor: tensor.float()):
            loss = model(X).sum()
        with pytest.raises(RecomputeError, match=r"saved-tensor hooks around the block \(`[\w.]*rounded`\)"):
            loss.backward()
        with torch.autograd.graph.save_on_cpu():
            model(X).sum().backward()


def test_hooks_of_pytorch_and_of_blocks_around_are_not_named() -> None:
    model, factor = two_blocks(), [1.0]
    model[1][1].register_forward_hook(lambda module, args, output: output * factor[0])
    with graphckpt.apply(model, {"1": "full"}), torch.autograd.graph.save_on_cpu():
        loss = model(X).sum()
        factor[0] = 2.0
        with pytest.raises(RecomputeError, match="expected the values of the original") as raised:
            loss.backward()
    assert "hooks around" not in str(raised.value)
    assert "cached()" not in str(raised.value)


@pytest.mark.parametrize("covers_backward", [False, True])
def test_a_cache_of_parametrizations_is_named(covers_backward: bool) -> None:
    model = two_blocks()
    for block in model[1:]:
        nn.utils.parametrize.register_parametrization(block[0], "weight", Weight())
    with graphckpt.apply(model, {"[12]": True}):
        with nn.utils.parametrize.cached(), ExitStack() as stack:
            loss = model(X).sum() + model(2 * X).sum()
            if covers_backward:
                stack.enter_context(pytest.raises(RecomputeError, match=r"parametrize.cached\(\): if it is active"))
                loss.backward()
        if not covers_backward:
            with pytest.raises(RecomputeError, match=r"parametrize.cached\(\): if it is active"):
                loss.backward()


def test_clones_of_saved_tensors_are_named_where_something_is_modified() -> None:
    model = two_blocks()
    with graphckpt.apply(model, {"[12]": True}), torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = model(X).sum()
        with torch.no_grad():
            model[2][0].weight.mul_(2)
        with pytest.raises(RecomputeError, match=r"allow_mutation_on_saved_tensors\(\) is active"):
            loss.backward()
