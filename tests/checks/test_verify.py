"""`graphckpt.verify`: a loop's step under policies against the plain one; faults in each part of it are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tally import Tally
from torch import nn

import graphckpt
from graphckpt import ConfigError, GraphError
from graphckpt.blocks.forward import policy_of
from graphckpt.engine.sampling import forced_check

Fault = Callable[[torch.Tensor], torch.Tensor]
FORWARDS: list[Layer] = []


class Layer(nn.Module):
    """A layer with dropout and statistics. ``fault`` acts on it in a forward under a policy."""

    fault = None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        FORWARDS.append(self)
        y = x + self.drop(self.norm(self.linear(x)).relu())
        if self.fault is not None and policy_of(self) is not None and torch.is_grad_enabled():
            return self.fault(y)
        return y


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(Layer() for _ in range(3)))


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, zeroes: bool = True
) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss = model(X).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
        return loss

    return step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    gradients = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), gradients, torch.get_rng_state()])


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_says_what_is_equal_and_restores_everything(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = step_of(model, optimizer, zeroes=False)
    step()
    before, num_forwards = state_of(model, optimizer), model[0].num_forwards
    result = graphckpt.verify(model, step, True)
    print(result)
    assert capsys.readouterr().out == f"{result}\n", "printed once"
    assert repr(result) == str(result), "in a notebook"
    graphckpt.verify(model, step, True, show=True)
    assert capsys.readouterr().out == f"{result}\n"
    contents = "loss, 12 gradients, 12 parameters, 9 buffers, 36 optimizer states, RNG"
    assert str(result).startswith(f"bitwise equal to the plain step: {contents} (3 steps, ")
    assert result.num_steps == 3
    assert_same(state_of(model, optimizer), before)
    assert model[0].num_forwards == num_forwards
    assert policy_of(model[0]) is None


def test_optimizer_states_of_the_first_step_are_removed() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    graphckpt.verify(model, step_of(model, optimizer), True, show=False)
    assert not optimizer.state


def test_policies_of_the_model_are_verified_and_stay() -> None:
    model = Net()
    with graphckpt.apply(model, {"0": True, "1": "selective"}):
        assert (
            graphckpt.verify(model, step_of(model), show=False).contents
            == "loss, 12 gradients, 12 parameters, 9 buffers, RNG"
        )
        assert policy_of(model[0]) is not None
        assert policy_of(model[2]) is None


def test_plain_step_runs_without_recomputation() -> None:
    model, num_forwards = Net(), Tally()
    step = step_of(model)

    def counted() -> torch.Tensor:
        del FORWARDS[:]
        loss = step()
        num_forwards.add(len(FORWARDS))
        return loss

    graphckpt.verify(model, counted, True, steps=1, show=False)
    assert list(num_forwards) == [6, 3]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.25


def edit_buffer(layer: nn.Module) -> Fault:
    def fault(y: torch.Tensor) -> torch.Tensor:
        layer.norm.num_batches_tracked.add_(1)
        return y

    return fault


def draw(y: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return y


def count(layer: nn.Module) -> Fault:
    def fault(y: torch.Tensor) -> torch.Tensor:
        layer.num_forwards += 1
        return y

    return fault


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda _: lambda y: y + 1e-3, r"step 1: `loss` differs from the plain step's in 1 of 1 elements, by up to \d"),
        (lambda _: _Scaled.apply, r"step 1: `gradient of 0.linear.weight` differs .* in \d+ of 64 elements, by up to "),
        (edit_buffer, r"step 1: `1.norm.num_batches_tracked` differs .* in 1 of 1 elements, by up to 1 "),
        (lambda _: draw, r"step 1: `RNG state 0` differs|step 1: `loss` differs"),
        (count, r"step 1: `1.num_forwards` is 2 and in the plain step 1 "),
    ],
    ids=["loss", "gradient", "buffer", "RNG", "attribute"],
)
def test_each_fault_is_named_and_the_state_restored(fault: Callable[[nn.Module], Fault], message: str) -> None:
    model = Net()
    model[1].fault = fault(model[1])
    model[2].drop.p = 0.0  # so that a draw in the block before it shows in the RNG state alone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model, optimizer)
    with pytest.raises(GraphError, match="verify: " + message):
        graphckpt.verify(model, step_of(model, optimizer), {"1": "keep", "0": True} | {"1": True})
    assert_same(state_of(model, optimizer), before)


SCALE = [1.0]


class ReadsAGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * SCALE[0]) * x


def changes_the_global(loss: torch.Tensor) -> torch.Tensor:
    SCALE[0] = 2.0
    loss.backward()
    SCALE[0] = 1.0
    return loss


CAUSE = r"step 1: `(gradient of )?0\.weight` differs .* · 2: saved tensor 2, saved by torch.tanh at test_verify.py:"


@pytest.mark.parametrize("check", ["none", "default", "values"])
@pytest.mark.parametrize("rule", ["full", "selective"])
def test_block_and_line_whose_recomputation_differs_are_named(check: str, rule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), ReadsAGlobal(), ReadsAGlobal(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model, optimizer)
    with (
        graphckpt.apply(model, {"[12]": rule}, determinism_check=check),
        pytest.raises(GraphError, match="verify: " + CAUSE),
    ):
        graphckpt.verify(model, lambda: changes_the_global(model(X).sum()))
    assert_same(state_of(model, optimizer), before)
    assert policy_of(model[1]) is None


def test_function_whose_recomputation_differs_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), ReadsAGlobal(), nn.Tanh())

    def step() -> torch.Tensor:
        value = graphckpt.checkpoint(model[1], model[0](X))
        return changes_the_global(model[2](value).sum())

    with pytest.raises(GraphError, match=r"differs .* · .*: saved tensor 2, saved by torch.tanh at test_verify.py:"):
        graphckpt.verify(model, step, {"2": True})


def test_block_and_line_are_named_in_a_graph() -> None:
    class Training(graphckpt.Graph):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 8), ReadsAGlobal(), ReadsAGlobal(), nn.Linear(8, 1))
            for layer in self.model[1:3]:
                layer.config.activation_checkpointing = True
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return changes_the_global(self.model(x).sum())

    message = (
        r"step 1: `model\.0\.weight` differs .* · model\.2: saved tensor 2, saved by torch.tanh at test_verify.py:"
    )
    with pytest.raises(GraphError, match=message):
        Training().verify(X)


def test_an_error_in_the_further_step_does_not_hide_the_difference() -> None:
    model = nn.Sequential(nn.Linear(8, 8), ReadsAGlobal())

    def step() -> torch.Tensor:
        forced = forced_check.get()
        if forced is not None and forced.determinism_check == "values":
            raise torch.OutOfMemoryError
        return changes_the_global(model(X).sum())

    with pytest.raises(GraphError, match=r"step 1: `gradient of 0\.weight` differs .* · fix: "):
        graphckpt.verify(model, step, {"1": True})


def test_a_draw_in_the_last_block_shows_in_the_random_state() -> None:
    model = Net()
    model[2].fault = draw
    with pytest.raises(GraphError, match="verify: step 1: `RNG state 0` differs from the plain step's in"):
        graphckpt.verify(model, step_of(model), {"2": True})


def test_step_that_differs_from_itself_is_told_apart() -> None:
    model, batches = Net(), iter(torch.randn(20, 16, 8))

    def step() -> torch.Tensor:
        loss = model(next(batches)).mean()
        loss.backward()
        return loss

    message = "two plain steps differ already: `loss` differs .* let step_fn compute on the same batch in every call"
    with pytest.raises(GraphError, match=message):
        graphckpt.verify(model, step, True)


def test_schedulers_are_restored() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plain = step_of(model, optimizer)

    def step() -> torch.Tensor:
        loss = plain()
        scheduler.step()
        return loss

    graphckpt.verify(model, step, True, stateful=[scheduler], show=False)
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_error_of_the_step_leaves_nothing_behind() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before, plain = state_of(model, optimizer), step_of(model, optimizer)

    def step() -> None:
        plain()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        graphckpt.verify(model, step, True)
    assert_same(state_of(model, optimizer), before)
    assert policy_of(model[0]) is None


def test_arguments_are_checked() -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"verify: expected a model with policies, got one without · fix: verify\("):
        graphckpt.verify(model, step_of(model))
    with pytest.raises(ConfigError, match=r"verify: expected an nn.Module, got 3"):
        graphckpt.verify(3, step_of(model), True)
    with pytest.raises(ConfigError, match="verify: expected a function that runs a training step, got 3"):
        graphckpt.verify(model, 3, True)
    with pytest.raises(ConfigError, match=r"verify.steps: expected an integer of at least 1, got 0"):
        graphckpt.verify(model, step_of(model), True, steps=0)
