"""A recomputation ends with the last tensor that backward needs, unless code of the block could see that."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from helpers.train_graphs import SquareGraph
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import set_checkpoint_early_stop

import graphckpt
from graphckpt.blocks import is_recomputing
from graphckpt.errors import ConfigError
from graphckpt.ledger.live_memory import LiveBytes

D = 8

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"*": True},
    "selective": {"*": "selective"},
    "segments": {"": {"segments": 2}},
    "log": {"": {"segments": "log"}},
    "tiles": {"*": {"tiles": 1}},
    "joined": {"0": True, "[1-9]": "joined"},
    "disk": {"*": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}},
    "slab": {"*": {"activation_checkpointing": "selective", "contiguous": True, "min_elements": 1}},
    "nested": {"": True, "*": "selective"},
}


def gradients(make: Callable[[], nn.Module], policies: dict[str, Any], *, num_steps: int = 5) -> list[Tensor]:
    """Trains two blocks in a row: a first call runs to its end, so that the next ones show how it ends."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with graphckpt.apply(model, policies):
        for _ in range(num_steps):
            x = torch.randn(4, D, requires_grad=True)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            found += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
    return found


def assert_equal_steps(make: Callable[[], nn.Module], policies: dict[str, Any]) -> None:
    gradients(make, {})  # TorchScript fuses a function after its first runs, which rounds otherwise
    for ours, plain in zip(gradients(make, policies), gradients(make, {}), strict=True):
        assert torch.equal(ours, plain)


@as_module(lambda: {"first": nn.Linear(D, D), "last": nn.Linear(D, D)})
def TwoLinears(self: Any, x: Tensor) -> Tensor:
    return x + self.last(torch.tanh(self.first(x)))


events: Counter[str] = Counter()


def begin(*_: object) -> None:
    events["open"] += 1


def end(*_: object) -> None:
    events["open"] -= 1
    events["ends"] += 1


@pytest.fixture(autouse=True)
def _no_events() -> Iterator[None]:
    events.clear()
    yield
    parametrize._cache_enabled = 0
    parametrize._cache.clear()


# Hooks


def with_hooks(*, always_call: bool = True, child: str = "last") -> nn.Module:
    block = TwoLinears()
    module = block.get_submodule(child)
    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=always_call)
    return block


@pytest.mark.parametrize("policy", POLICIES)
def test_hooks_that_are_always_called_are_called_once_in_each_execution(policy: str) -> None:
    assert_equal_steps(with_hooks, POLICIES[policy])
    assert events["open"] == 0


def test_a_hook_of_all_modules_that_is_always_called() -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(nn.modules.module.register_module_forward_pre_hook(begin).remove)
        stack.callback(register_module_forward_hook(end, always_call=True).remove)
        assert_equal_steps(TwoLinears, POLICIES["full"])
    assert events["open"] == 0


def test_a_hook_of_a_module_that_the_block_does_not_own() -> None:
    shared = with_hooks()

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return shared(self.own(x))

    assert_equal_steps(Borrows, POLICIES["full"])
    assert events["open"] == 0


def test_a_hook_around_what_is_over_by_then_stops_nothing() -> None:
    gradients(partial(with_hooks, child="first"), POLICIES["full"], num_steps=1)
    reached = []
    model = nn.Sequential(with_hooks(child="first"))
    model[0].last.register_forward_hook(lambda *_: reached.append(is_recomputing()))
    with graphckpt.apply(model, {"0": True}):
        for _ in range(2):
            model(torch.ones(4, D)).sum().backward()
    assert reached == [False, True, False]


def test_a_hook_around_the_backward_stops_nothing() -> None:
    class Steps(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:  # a whole step
            loss = super().forward(x).sum()
            loss.backward()
            return loss.detach()

    model, reached = Steps(TwoLinears()), []
    model[0].last.register_forward_hook(lambda *_: reached.append(is_recomputing()))
    model.register_forward_hook(lambda *_: None, always_call=True)
    with graphckpt.apply(model, {"0": True}):
        for _ in range(2):
            model(torch.ones(4, D))
    assert reached == [False, True, False]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("always_call", [True, False])
@pytest.mark.parametrize("policy", ["full", "selective", "disk"])
def test_hooks_that_switch_the_cache_of_parametrizations(policy: str, *, always_call: bool) -> None:
    def on(*_: object) -> None:
        parametrize._cache_enabled += 1

    def off(*_: object) -> None:
        parametrize._cache_enabled -= 1
        if not parametrize._cache_enabled:
            parametrize._cache.clear()

    def make() -> nn.Module:
        block = TwoLinears()
        parametrize.register_parametrization(block.last, "weight", Doubled())
        block.last.register_forward_pre_hook(on)
        block.last.register_forward_hook(off, always_call=always_call)
        return block

    assert_equal_steps(make, POLICIES[policy])
    assert (parametrize._cache_enabled, len(parametrize._cache)) == (0, 0)


# Handlers in the block


@as_module(lambda: {"linear": nn.Linear(D, D)})
def CatchesException(self: Any, x: Tensor) -> Tensor:
    try:
        return self.linear(x)
    except Exception:
        events["caught"] += 1
        return x


@as_module(lambda: {"linear": nn.Linear(D, D)})
def CatchesAll(self: Any, x: Tensor) -> Tensor:
    try:
        y = self.linear(torch.tanh(x))
    except:  # noqa: E722
        y = torch.zeros_like(x)
    return y * 2


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Suppresses(self: Any, x: Tensor) -> Tensor:
    y = x
    with contextlib.suppress(BaseException):
        y = self.linear(torch.tanh(x))
    return y


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Retries(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        try:
            return self.linear(torch.nn.functional.dropout(torch.tanh(x)))
        except BaseException:
            continue
    return x


@as_module(lambda: {"linear": nn.Linear(D, D)})
def RaisesAnother(self: Any, x: Tensor) -> Tensor:
    try:
        return self.linear(torch.tanh(x))
    except BaseException as error:
        raise ValueError("it has failed") from error


@as_module(lambda: {"linear": nn.Linear(D, D)})
def CleansUp(self: Any, x: Tensor) -> Tensor:
    begin()
    try:
        return self.linear(torch.tanh(x))
    finally:
        end()


@contextlib.contextmanager
def scope() -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Scoped(self: Any, x: Tensor) -> Tensor:
    with scope():
        return self.linear(torch.tanh(x))


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Generates(self: Any, x: Tensor) -> Tensor:
    def parts() -> Iterator[Tensor]:
        begin()
        try:
            for part in x.chunk(2):
                yield self.linear(torch.tanh(part))
        finally:
            end()

    return torch.cat(list(parts()))


HANDLERS = [CatchesException, CatchesAll, Suppresses, Retries, RaisesAnother, CleansUp, Scoped, Generates]


@pytest.mark.parametrize("policy", ["full", "selective", "joined", "disk", "nested"])
@pytest.mark.parametrize("make", HANDLERS)
def test_handlers_in_forward(make: Callable[[], nn.Module], policy: str) -> None:
    assert_equal_steps(make, POLICIES[policy])
    assert (events["open"], events["caught"]) == (0, 0)


def test_an_error_before_the_stop_is_raised() -> None:
    @as_module(lambda: {"linear": nn.Linear(D, D)})
    def Fails(self: Any, x: Tensor) -> Tensor:
        if is_recomputing():
            raise ValueError("it has failed")
        return self.linear(torch.tanh(x))

    with pytest.raises(ValueError, match="it has failed"):
        gradients(Fails, POLICIES["full"])


def test_a_handler_does_not_hide_that_no_op_may_be_skipped() -> None:
    @as_module(lambda: {"first": nn.Linear(D, D), "last": nn.Linear(D, D)})
    def Differs(self: Any, x: Tensor) -> Tensor:
        try:
            if is_recomputing():
                x.detach().sign()
            return self.last(torch.tanh(self.first(x).sin()))
        except:  # noqa: E722
            return x

    assert_equal_steps(Differs, POLICIES["selective"])


@pytest.mark.parametrize("catches", [False, True])
def test_a_second_try_frees_what_the_first_has_held(*, catches: bool) -> None:
    """The collector does not: between the error and its traceback are nodes of autograd, which it does not see."""

    @as_module()
    def Indexes(self: Any, x: Tensor) -> Tensor:
        try:
            values, order = x.sort(dim=1)
            y = torch.zeros_like(x).scatter(1, order, values * 2)
            y = torch.where(x > 0, y, x.exp())
            y[:, 0] = x[:, 1]
            return y.masked_fill(x.abs() > 2, 0.0) * 2
        except BaseException:
            if catches:
                return x
            raise

    model = nn.Sequential(Indexes(), nn.Linear(D, D))
    x = torch.randn(4, D, requires_grad=True)
    handle = graphckpt.apply(
        model, {"0": {"activation_checkpointing": "selective", "contiguous": True, "min_elements": 1}}
    )
    model(x).square().sum().backward()
    gc.collect()
    assert handle._wrappers[0].context.store.num_alive == 0


# TorchScript, which raises a RuntimeError in place of any exception


def _add(x: Tensor, bias: Tensor, p: float, training: bool) -> Tensor:
    return x + torch.nn.functional.dropout(x + bias, p, training)


def _multiply(x: Tensor, bias: Tensor, p: float, training: bool) -> Tensor:
    return x * torch.nn.functional.dropout(torch.tanh(x + bias), p, training)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")  # a FutureWarning since torch 2.14
    add = torch.jit.script(_add)  # the interpreter runs it op by op
    multiply = torch.jit.script(_multiply)  # which has a graph and a backward of its own after its first runs


@as_module(lambda function: {"linear": nn.Linear(D, D), "bias": nn.Parameter(torch.zeros(D)), "function": function})
def EndsScripted(self: Any, x: Tensor) -> Tensor:
    return self.function(self.linear(x), self.bias, 0.5, self.training)


@as_module(lambda function: {"linear": nn.Linear(D, D), "bias": nn.Parameter(torch.zeros(D)), "function": function})
def BeginsScripted(self: Any, x: Tensor) -> Tensor:
    return self.linear(self.function(x, self.bias, 0.5, self.training))


@as_module(lambda function: {"linear": nn.Linear(D, D), "bias": nn.Parameter(torch.zeros(D)), "function": function})
def CatchesScripted(self: Any, x: Tensor) -> Tensor:
    try:
        return self.function(self.linear(x), self.bias, 0.5, self.training)
    except RuntimeError:
        return self.linear(x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [EndsScripted, BeginsScripted, CatchesScripted])
@pytest.mark.parametrize("function", [add, multiply])
def test_scripted_functions(function: Any, make: Callable[..., nn.Module], policy: str) -> None:
    assert_equal_steps(partial(make, function), POLICIES[policy])


def test_a_scripted_function_that_is_stopped_leaves_nothing_behind() -> None:
    model = nn.Sequential(EndsScripted(add), EndsScripted(add))
    for _ in range(3):  # until TorchScript has optimized the function for this shape
        model(torch.ones(64, D)).sum().backward()
    sizes = []
    with graphckpt.apply(model, {"*": True}), LiveBytes() as live:
        for _ in range(6):
            model(torch.ones(64, D)).sum().backward()
            gc.collect()
            sizes.append(live.live_bytes)
    assert len(set(sizes[3:])) == 1


# The setting


def reached_by(model: nn.Module, policies: dict[str, Any], *, num_calls: int = 2) -> list[bool]:
    """Returns whether the last recomputation has come to the end of each block."""
    reached: list[bool] = []
    for block in model:
        block.last.register_forward_hook(lambda *_: reached.append(is_recomputing()))
    with graphckpt.apply(model, policies):
        for _ in range(num_calls):
            reached.clear()
            model(torch.ones(4, D)).sum().backward()
    return reached[len(list(model)) :]


@pytest.mark.parametrize(
    ("policies", "num_ends"),
    [
        ({"*": True}, 0),
        ({"*": {"activation_checkpointing": True, "early_stop": False}}, 2),
        ({"*": {"activation_checkpointing": "selective", "early_stop": False}}, 2),
        ({"": {"early_stop": False}, "*": True}, 2),
        ({"": {"early_stop": False}, "*": True, "0": {"early_stop": True}}, 1),
        ({"*": True, "0": {"early_stop": None}, "1": {"early_stop": False}}, 1),
        ({"": {"segments": 2, "early_stop": False}}, 1),  # the last segment is kept
    ],
)
def test_early_stop_is_a_field_that_blocks_inherit(policies: dict[str, Any], num_ends: int) -> None:
    model = nn.Sequential(TwoLinears(), TwoLinears())
    assert reached_by(model, policies) == [True] * num_ends


def test_torchs_context_manager_replaces_it() -> None:
    model = nn.Sequential(TwoLinears(), TwoLinears())
    policy = {"activation_checkpointing": True, "early_stop": False}
    with set_checkpoint_early_stop(True):
        assert reached_by(model, {"*": policy}) == []


def test_a_graph_uses_a_changed_field_in_its_next_call() -> None:
    reached: list[bool] = []
    step = SquareGraph(nn.Sequential(TwoLinears()), {"0": True})
    step.model[0].last.to(nn.Module).register_forward_hook(lambda *_: reached.append(is_recomputing()))
    for _ in range(2):
        step(torch.ones(4, D))
    reached.clear()
    step.model[0].config.early_stop = False
    for _ in range(3):
        step(torch.ones(4, D))
    assert reached == [False, True] * 3


def test_a_value_that_is_not_a_bool() -> None:
    with pytest.raises(ConfigError, match=r"early_stop: expected a bool or None, got 'no' · fix: use "):
        graphckpt.apply(nn.Sequential(TwoLinears()), {"0": {"activation_checkpointing": True, "early_stop": "no"}})
