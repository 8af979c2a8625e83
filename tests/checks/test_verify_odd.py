"""`graphckpt.verify` with unusual loops: types of tensors, optimizers and modules that it must compare and restore."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from torch import nn

import graphckpt
from graphckpt import ConfigError
from graphckpt.blocks.apply import Policies
from graphckpt.checks.comparison import Verification, _difference_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def net(*first: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*first, *stack_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)), 3))


def step_of(model: nn.Module, *optimizers: torch.optim.Optimizer, x: torch.Tensor = X) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def verify(model: nn.Module, step: Callable[[], object], policies: Policies = True) -> Verification:
    return graphckpt.verify(model, step, policies, show=False)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("own", "plain", "text"),
    [
        ([0.0, 1.0], [-0.0, 1.0], "differs from the plain step's in 1 of 2 elements, by the sign of zero"),
        ([float("inf")], [torch.finfo().max], "differs from the plain step's in 1 of 1 elements, by up to inf"),
        ([1 + 1j, 2], [1 + 3j, 2], "differs from the plain step's in 1 of 2 elements, by up to 2"),
        ([complex(1, float("nan"))], [complex(2, float("nan"))], "differs from .* in 1 of 1 elements, by up to 1"),
        ([2**53], [2**53 + 1], "differs from the plain step's in 1 of 1 elements, by up to 0"),
    ],
)
def test_each_bit_counts(own: list[complex], plain: list[complex], text: str) -> None:
    assert _difference_of(torch.tensor(own), torch.tensor(own)) is None
    assert re.fullmatch(text, _difference_of(torch.tensor(own), torch.tensor(plain)))


def test_all_nans_are_equal() -> None:
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert _difference_of(other, torch.tensor([float("nan")])) is None
    assert _difference_of(other, torch.tensor([1.0])) is not None


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.complex128]
)
def test_buffers_of_any_type(dtype: torch.dtype) -> None:
    model = net()
    model[0].register_buffer("odd", torch.ones(3).to(dtype))
    assert "1 buffer" in verify(model, step_of(model)).contents
    assert _difference_of(torch.ones(3).to(dtype), torch.zeros(3).to(dtype)) is not None


def test_sparse_gradients_are_compared_and_restored() -> None:
    model = net(nn.Embedding(10, 8, sparse=True))
    step = step_of(model, x=torch.tensor([1, 1, 2]))
    step()
    before = model[0].weight.grad
    content = before.to_dense().clone()
    assert "7 gradients" in verify(model, step, {"*": True}).contents
    assert model[0].weight.grad is before
    assert_same(before.to_dense(), content)


def test_lists_in_optimizer_states_are_restored() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step() -> object:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            torch.manual_seed(0)
            loss = model(X).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure)

    for _ in range(2):
        step()
    before = copy.deepcopy(optimizer.state_dict())
    (state,) = optimizer.state.values()
    directions = state["old_dirs"]
    verify(model, step)
    (state,) = optimizer.state.values()
    assert state["old_dirs"] is directions
    assert_same(optimizer.state_dict()["state"][0], before["state"][0])


def test_groups_that_the_step_adds_are_removed() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters())
    plain = step_of(model, optimizer)

    def step() -> object:
        loss = plain()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        return loss

    verify(model, step)
    assert len(optimizer.param_groups) == 1


def test_layers_that_the_step_freezes_are_trainable_again() -> None:
    model = net()
    plain = step_of(model)

    def step() -> object:
        loss = plain()
        model[0].requires_grad_(requires_grad=False)
        return loss

    verify(model, step)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_parameters_outside_of_the_model_are_restored() -> None:
    model, head = net(), nn.Linear(8, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    before = copy.deepcopy(head.state_dict())
    verify(model, step_of(nn.Sequential(model, head), optimizer))
    assert_same(head.state_dict(), before)


def without_gradients(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X).sum()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda _: None,
            "verify: expected a step_fn that calls blocks with a policy, .* · fix: call this",
        ),
        (without_gradients, "verify: expected a step_fn that calls blocks with a policy, with gradients on; it called"),
        (lambda _: net()(X).sum().backward(), "verify: expected a step_fn that calls blocks with a policy, "),
        (lambda model: model[3](X).sum().backward(), "verify: expected a step_fn that calls blocks with a policy, "),
        (lambda model: model(X).sum(), r"verify: expected a step_fn that runs a backward, .* · fix: loss.backward\(\)"),
    ],
    ids=["nothing", "no_grad", "another model", "other blocks", "no backward"],
)
def test_step_that_shows_nothing_is_refused(step: Callable[[nn.Module], object], message: str) -> None:
    model = net(nn.Identity())
    with pytest.raises(ConfigError, match=message):
        verify(model, lambda: step(model), ["1", "2"])


def test_gradients_of_a_functional_step_count_as_a_backward() -> None:
    model = net()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(X).sum(), list(model.parameters()))

    assert verify(model, step).contents == "6 outputs, 6 parameters, RNG"


def test_model_whose_inputs_alone_are_trained() -> None:
    model, x = net().requires_grad_(requires_grad=False), X.clone().requires_grad_()

    def step() -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), x)[0]

    assert verify(model, step).contents == "1 output, 6 parameters, RNG"


def test_compiled_model() -> None:
    torch.compiler.reset()
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    contents = "loss, 6 gradients, 6 parameters, 18 optimizer states, RNG"
    assert verify(compiled, step_of(compiled, optimizer)).contents == contents


@pytest.mark.parametrize("wrap", [lambda y: y.detach().numpy(), lambda _: object(), lambda y: (each for each in y)])
def test_outputs_that_cannot_be_compared_are_refused(wrap: Callable[[torch.Tensor], object]) -> None:
    model = net()

    def step() -> object:
        y = model(X)
        y.sum().backward()
        return wrap(y)

    with pytest.raises(
        ConfigError, match=r"verify: expected tensors and numbers as outputs of the step, got .* · fix: "
    ):
        verify(model, step)


def test_outputs_that_are_not_tensors_are_compared() -> None:
    model = net()

    def step() -> dict[str, Any]:
        y = model(X)
        y.sum().backward()
        return {"argmax": y.argmax(-1), "seen": {1, 2}, "model": model, "mean": y.detach().numpy().mean(), "none": None}

    assert "4 outputs" in verify(model, step).contents


@pytest.mark.parametrize(
    ("build", "fix"),
    [(lambda: nn.LazyLinear(8), "run one forward before"), (lambda: nn.Linear(8, 8, device="meta"), "model.to_empty")],
)
def test_model_without_values_is_refused(build: Callable[..., Any], fix: str) -> None:
    model = nn.Sequential(build())
    with pytest.raises(ConfigError, match=f"verify: expected values in all .*, `0.weight` has none · fix: {fix}"):
        verify(model, step_of(model), {"0": True})


@pytest.mark.parametrize("stateful", [3, [3], torch.optim.SGD(net().parameters()), net()])
def test_stateful_is_checked(stateful: Any) -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"verify\.stateful: expected a list of objects with state_dict"):
        graphckpt.verify(model, step_of(model), True, stateful=stateful)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("static_graph", [False, True])
def test_model_in_ddp_that_has_not_run_yet(static_graph: bool) -> None:
    model = net()
    ddp = nn.parallel.DistributedDataParallel(model, static_graph=static_graph)
    optimizer = torch.optim.AdamW(ddp.parameters())
    verify(ddp, step_of(ddp, optimizer), {"module.*": True})
    verify(ddp, step_of(ddp, optimizer), {"module.*": True})


@pytest.mark.parametrize("replace", [True, False])
def test_gradients_of_parameters_that_the_step_makes_are_compared(replace: bool) -> None:
    model = net()
    weight = model[0][0].weight

    def step() -> object:
        if replace:
            model[0][0].weight = nn.Parameter(model[0][0].weight.detach() * 0.9)
        elif len(model) == 3:
            model.append(nn.Linear(8, 8))
        loss = model(X).sum()
        loss.backward()
        return loss

    assert verify(model, step).contents.startswith("loss, 6 gradients, 6 " if replace else "loss, 8 gradients, 8 ")
    assert model[0][0].weight is weight
    assert len(model) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_scripted_modules_are_refused() -> None:
    model = net(torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(ConfigError, match=r"verify: expected modules of Python, .* `0` is a ScriptModule · fix: leave"):
        verify(model, step_of(model), {"1": True})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_policy_that_only_compiles_is_verified() -> None:
    torch.compiler.reset()
    model = net()
    assert "6 gradients" in verify(model, step_of(model), {"*": {"compile": {"backend": "aot_eager"}}}).contents
