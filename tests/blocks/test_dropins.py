"""The functions that people know: checkpoint, checkpoint_sequential, checkpoint_wrapper, is_recomputing."""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.hard_modules import Mlp
from helpers.layer_stacks import linear_layers
from helpers.modules import as_module
from helpers.train_graphs import Predict
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.checkpoint import checkpoint_sequential as torchs_sequential

import graphckpt
from graphckpt import ConfigError, RecomputeError, checkpoint, checkpoint_sequential, checkpoint_wrapper
from graphckpt.blocks import disable_checkpointing, is_recomputing


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 4)).train()


def result(call: Callable[[nn.Sequential, Tensor], Tensor], *, steps: int = 3) -> list[Tensor]:
    """Runs ``call(model, x)`` in some steps; returns losses, gradients, buffers and the RNG state."""
    model, seen = module(), []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(6, 4, requires_grad=True)
        loss = call(model, x).pow(2).sum()
        loss.backward()
        seen += [loss.detach(), x.grad]
    seen += [p.grad for p in model.parameters() if p.grad is not None] + [b.clone() for b in model.buffers()]
    return [*seen, torch.get_rng_state()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plus(model: nn.Module, x: Tensor, other: object = None, *, scale: float = 1.0) -> Tensor:
    return model(x) * scale


current = None


def by_name(x: Tensor) -> Tensor:
    return current(x)


def through_a_helper(x: Tensor) -> Tensor:
    return by_name(x)


def by_name_within(x: Tensor) -> Tensor:
    return next(current(y) for y in [x])


class Owner:
    """Holds a module, or what one is in, and calls it in a method."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def method(self, x: Tensor) -> Tensor:
        return self.model(x)


Call = Callable[[nn.Sequential, Tensor, Callable[..., Tensor]], Tensor]
"""Runs a model on an input through what it is given, such as `checkpoint`."""
CALLS: dict[str, Call] = {
    "a module": lambda m, x, run: run(m, x),
    "a bound method": lambda m, x, run: run(m.forward, x),
    "a closure": lambda m, x, run: run(lambda x: m(x) * 1.0, x),
    "a partial": lambda m, x, run: run(partial(plus, m), x),
    "a partial with keywords": lambda m, x, run: run(partial(plus, model=m, scale=1.0), x=x),
    "keyword arguments": lambda m, x, run: run(partial(plus, m), x=x, scale=1.0),
    "containers": lambda m, x, run: run(lambda d, *, k: m(d["x"][0]) + k[0] * 0.0, {"x": [x]}, k=(x, None)),
}


def set_current(model: nn.Module) -> None:
    globals()["current"] = model


@dataclass
class Pair:
    left: Any
    right: Any = None


class Hostile:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Inventive(Hostile):
    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


def run_first(value: Any, x: Tensor) -> Tensor:
    """Runs the module within a container, a dataclass or an object."""
    while not isinstance(value, nn.Module):
        value = next(iter(vars(value).values() if hasattr(value, "__dict__") else value))
    return value(x)


def in_a_ring(model: nn.Module) -> Pair:
    pair = Pair(model)
    pair.right = pair
    return pair


REACHED: dict[str, Call] = {
    "a set": lambda m, x, run: run(run_first, {m}, x),
    "a deque of tuples": lambda m, x, run: run(run_first, deque([(m,)]), x),
    "a key of a dict": lambda m, x, run: run(run_first, {m: 1}, x),
    "a dataclass": lambda m, x, run: run(run_first, Pair(m), x),
    "a dataclass in a list in a dataclass": lambda m, x, run: run(run_first, Pair([[Pair(m)]]), x),
    "an attribute of an object": lambda m, x, run: run(run_first, Owner([m]), x),
    "an object that refers to itself": lambda m, x, run: run(run_first, in_a_ring(m), x),
    "an object in a closure": lambda m, x, run: run(lambda x, owner=Owner(m): owner.model(x), x),
    "an object's method": lambda m, x, run: run(Owner(m).method, x),
    "a global": lambda m, x, run: (set_current(m), run(by_name, x))[1],
    "a global of a helper": lambda m, x, run: (set_current(m), run(through_a_helper, x))[1],
    "a default": lambda m, x, run: run(lambda x, model=m: model(x), x),
    "a list": lambda m, x, run: run(lambda x, layers=list(m): apply_all(layers, x), x),
    "an argument": lambda m, x, run: run(lambda model, x: model(x), m, x),
    "a list among the arguments": lambda m, x, run: run(apply_all, x=x, layers=list(m)),
    "a function in a closure": lambda m, x, run: run(twice_removed(partial(plus, m)), x),
    "a list, beside a thousand numbers": lambda m, x, run: run(
        lambda x, _, layers=[m]: layers[0](x), x, {str(n): n for n in range(1024)}
    ),
    "a global of a function within": lambda m, x, run: (set_current(m), run(by_name_within, x))[1],
    "an object that has no other attributes": lambda m, x, run: run(run_first, Hostile(m), x),
    "an object that has any attribute": lambda m, x, run: run(run_first, Inventive(m), x),
    "a function that has any attribute": lambda m, x, run: run(Inventive(m), x),
    "a weak proxy of an object": lambda m, x, run: run(run_first, weakref.proxy(keep_alive(Owner([m]))), x),
    "an object that another one leads to first": lambda m, x, run: in_two_ways(Owner(Owner(m)), x, run),
}


def keep_alive(value: Owner, alive: list[Owner] = []) -> Owner:
    alive.append(value)
    return value


def in_two_ways(far: Owner, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
    other, near = partial(print, far), [[far]]
    return run(lambda x: near[0][0].model.model(x) if other else x, x)


def twice_removed(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) * 1.0


def apply_all(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("case", CALLS | REACHED)
def test_checkpoint_changes_no_bit_and_runs_twice(case: str) -> None:
    runs = []

    def counted(run: Callable[..., Tensor]) -> Callable[[nn.Sequential, Tensor], Tensor]:
        def call(model: nn.Sequential, x: Tensor) -> Tensor:
            hook = model[4].register_forward_pre_hook(lambda *_: runs.append(is_recomputing()))
            x.register_hook(lambda _: hook.remove())
            return (CALLS | REACHED)[case](model, x, run)

        return call

    plain = result(counted(lambda function, *args, **kwargs: function(*args, **kwargs)))
    assert runs == [False] * 3
    runs.clear()
    ours = result(counted(checkpoint))
    assert runs == [False, True] * 3
    assert equal(ours, plain)


class Counter:
    count = 0


class Counting(nn.Linear):
    def part(self, x: Tensor, counter: Counter) -> Tensor:
        counter.count += 1
        return self(x).exp() * counter.count


def test_the_referent_of_a_weak_proxy_is_an_argument() -> None:
    model, counter, x = Counting(4, 4), Counter(), torch.randn(2, 4)
    grads = []
    for run in (lambda f, *args: f(*args), checkpoint):
        counter.count = 0
        run(model.part, x, weakref.proxy(counter)).sum().backward()
        assert counter.count == 1
        grads.append(model.weight.grad.clone())
        model.zero_grad()
    assert torch.equal(*grads)


def test_a_method_is_named_with_its_class() -> None:
    with pytest.raises(RecomputeError, match=r"^Counting\.part: argument `counter` is an iterator"):
        checkpoint(Counting(4, 4).part, torch.randn(2, 4), iter([1]))


def test_the_signature_is_torchs() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (checkpoint, torchs))
    newer = {"preserve_rng_state", "respect_saved_tensors_hooks"}  # of torch 2.14
    assert {*ours} - newer == {*theirs} - newer
    for name in theirs:
        assert ours[name].kind is theirs[name].kind, name
    for setting in ({"use_reentrant": True}, {"use_reentrant": False}, {"preserve_rng_state": False}, {"debug": True}):
        assert equal(result(lambda m, x, s=setting: checkpoint(m, x, **s)), result(lambda m, x: m(x)))


def test_without_a_function_it_is_a_decorator() -> None:
    calls = 0

    @checkpoint(use_reentrant=False)
    def run(model: nn.Module, x: Tensor, *, twice: bool = False) -> Tensor:
        """Runs a model."""
        nonlocal calls
        calls += 1
        return model(x) * (2 if twice else 1)

    assert run.__name__ == "run"
    assert run.__doc__ == "Runs a model."
    assert equal(result(lambda m, x: run(m, x, twice=True)), result(lambda m, x: m(x) * 2))
    calls = 0
    run(nn.Tanh(), torch.ones(2, requires_grad=True)).sum().backward()
    assert calls == 2, "it must be recomputed once"
    with pytest.raises(ConfigError, match="expected a function first, got only"):
        checkpoint(None, torch.ones(2))


def test_checkpoint_is_a_decorator_without_parentheses_for_functions_that_need_arguments() -> None:
    @checkpoint
    def run(model: nn.Module, x: Tensor) -> Tensor:
        """Runs a model."""
        return model(x)

    class Runs:
        @checkpoint
        def method(self, model: nn.Module, x: Tensor) -> Tensor:
            return model(x)

    @wraps(run)
    def bound() -> Tensor:
        return run(nn.Identity(), torch.ones(2))

    assert torch.equal(checkpoint(bound), torch.ones(2)), "it needs none, whatever it wraps"
    assert run.__doc__ == "Runs a model."
    for each in (run, Runs().method):
        assert equal(result(each), result(lambda m, x: m(x)))
    assert checkpoint(lambda: 3) == 3
    assert checkpoint(wraps(bound)(lambda *args: bound(*args) * 1)).equal(torch.ones(2))
    assert checkpoint(wraps(run)(lambda *args: run(*args) * 2))(nn.Tanh(), torch.zeros(2)).equal(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"arguments for <lambda>\(\*xs\), got none · fix: @checkpoint\(\)"):
        checkpoint(lambda *xs: sum(xs))


def test_results_that_pass_through_hooks_are_an_error() -> None:
    contexts = partial(create_selective_checkpoint_contexts, matmuls)
    with pytest.raises(ConfigError, match="expected respect_saved_tensors_hooks=False with a context_fn, got True"):
        checkpoint(torch.sin, torch.ones(2), context_fn=contexts, respect_saved_tensors_hooks=True)
    assert torch.equal(checkpoint(torch.sin, torch.ones(2), respect_saved_tensors_hooks=True), torch.ones(2).sin())


def matmuls(context: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def test_context_fn_of_torchs_selective_checkpointing() -> None:
    def block(model: nn.Module, x: Tensor) -> Tensor:  # without BatchNorm, whose buffers torch moves twice
        return model[4](model[3](model[2](model[0](x))))

    context_fn = partial(create_selective_checkpoint_contexts, matmuls)
    plain = result(block)
    ours = result(lambda m, x: checkpoint(partial(block, m), x, context_fn=context_fn))
    theirs = result(lambda m, x: torchs(partial(block, m), x, use_reentrant=False, context_fn=context_fn))
    assert equal(ours, plain)
    assert equal(theirs, plain)


def test_context_fn_wraps_each_run_once() -> None:
    log: list[str] = []

    class Logs:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append(f"enter {self.name}")

        def __exit__(self, *exc: object) -> None:
            log.append(f"exit {self.name}")

    loss = checkpoint(module(), torch.ones(6, 4), context_fn=lambda: (Logs("first"), Logs("second"))).sum()
    assert log == ["enter first", "exit first"]
    loss.backward()
    assert log == ["enter first", "exit first", "enter second", "exit second"]


class Changes(nn.Module):
    """Saves tensors of another shape in the second run."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().sum() + (x.cos()[: 2 if is_recomputing() else 3]).exp().sum()


def test_determinism_check() -> None:
    x = torch.ones(4, requires_grad=True)
    loss = checkpoint(Changes(), x)
    with pytest.raises(RecomputeError, match="Changes"):
        loss.backward()
    with pytest.raises(ConfigError, match=r"^determinism_check: expected 'none', .*, got 'strict' · fix: "):
        checkpoint(Changes(), x, determinism_check="strict")


def late(reached: list[bool]) -> nn.Module:
    @as_module()
    def Late(self: Any, x: Tensor) -> Tensor:
        y = x.sin().cos() + 1
        reached.append(is_recomputing())
        return y

    return Late()


@pytest.mark.parametrize("rule", [None, True, "selective"])
def test_early_stop_as_torchs_context_manager_sets_it(rule: bool | str | None) -> None:
    module = late(reached := [])

    def run(early_stop: bool) -> list[bool]:
        reached.clear()
        x = torch.ones(2, requires_grad=True)
        output = checkpoint(module, x, early_stop=early_stop) if rule is None else module(x)
        with set_checkpoint_early_stop(not early_stop):  # what counts is what is active in forward
            output.sum().backward()
        return list(reached)

    with graphckpt.apply(module, {} if rule is None else {"": {"activation_checkpointing": rule}}):
        run(True)  # a first call is always run to its end
        with set_checkpoint_early_stop(False):
            assert run(True) == [False, True]
        with set_checkpoint_early_stop(True):
            assert run(False) == [False]
        assert run(True) == [False]
        assert rule is not None or run(False) == [False, True]


class Called:
    """An object that can be called, with a module in it."""

    def __init__(self) -> None:
        self.module = module()

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)


FACTOR = torch.arange(24.0).reshape(6, 4)
CALLABLES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "torch": lambda: torch.sin,
    "Tensor": lambda: Tensor.sin,
    "torch.ops packet": lambda: torch.ops.aten.sin,
    "torch.ops overload": lambda: torch.ops.aten.sin.default,
    "method-wrapper": lambda: FACTOR.__mul__,
    "method of a tensor": lambda: FACTOR.mul,
    "operator": lambda: operator.neg,
    "methodcaller": lambda: operator.methodcaller("sin"),
    "built-in": lambda: abs,
    "partial of built-in": lambda: partial(torch.add, alpha=2, other=FACTOR),
    "object": Called,
    "bound __call__": lambda: Called().__call__,
    "mock": lambda: Mock(side_effect=torch.sin),
    "mock around a module": lambda: Mock(wraps=module()),
    "vmap": lambda: torch.vmap(torch.sin),
    "module.__call__": lambda: module().__call__,
}


@pytest.mark.parametrize("name", CALLABLES)
def test_whatever_can_be_called_can_be_checkpointed(name: str) -> None:
    def run(through: Callable[..., Tensor]) -> list[Tensor]:
        function, seen = CALLABLES[name](), []
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(6, 4, requires_grad=True)
            output = through(function, x)
            output.square().sum().backward()
            assert x.grad is not None
            seen += [output.detach(), x.grad]
        inner = getattr(function, "module", None)
        return seen + ([b.clone() for b in inner.buffers()] if isinstance(inner, nn.Module) else [])

    assert equal(run(checkpoint), run(lambda function, x: function(x)))


def test_a_function_that_returns_a_cached_result_is_refused() -> None:
    """The recomputation is called with the same object, for which the function does not run again."""
    y = checkpoint(functools.lru_cache(nn.Linear(4, 4)), torch.ones(2, 4, requires_grad=True) * 2)
    with pytest.raises(RecomputeError, match="the recomputation 0"):
        y.square().sum().backward()


def test_a_function_that_edits_its_argument_is_told_what_is_true() -> None:
    h = torch.ones(4, requires_grad=True) * 2
    with pytest.raises(RecomputeError, match=r"modified its argument `argument 0` in place, and the") as caught:
        checkpoint(torch.relu_, h)
    assert "did not do on its first call" not in str(caught.value)


def test_without_gradients_and_when_disabled_it_is_a_plain_call() -> None:
    seen: list[bool] = []
    model, x = module().eval(), torch.ones(6, 4, requires_grad=True)
    model[4].register_forward_pre_hook(lambda *_: seen.append(True))
    with torch.no_grad():
        assert not checkpoint(model, x).requires_grad
    with disable_checkpointing():
        checkpoint(model, x).sum().backward()
        checkpoint_sequential(model, 2, x).sum().backward()
    assert len(seen) == 3


def test_nothing_is_kept_but_the_inputs() -> None:
    model = module()
    checkpoint(model, torch.ones(6, 4)).sum().backward()
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    model[4].register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0].untyped_storage())))
    loss = checkpoint(model, torch.ones(6, 4)).sum()
    assert [ref() for ref in alive] == [None]
    loss.backward()
    assert [ref() for ref in alive] == [None, None]


def test_modules_that_come_and_go_under_one_function() -> None:
    """What is learnt about a module must not be used for one that took its address."""
    shared = nn.Linear(4, 4)
    for _ in range(30):
        inner = nn.BatchNorm1d(4)
        checkpoint(lambda x, norm=inner: norm(shared(x)), torch.randn(6, 4)).sum().backward()
        assert inner.num_batches_tracked == 1
        del inner
        gc.collect(0)


def test_nested_checkpoints() -> None:
    def block(m: nn.Module, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        return run(lambda x: m[4](m[3](run(lambda y: m[2](m[1](m[0](y))), x))), x)

    plain = result(lambda m, x: block(m, x, lambda f, x: f(x)))
    assert equal(result(lambda m, x: block(m, x, checkpoint)), plain)


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("as_list", [False, True])
def test_checkpoint_sequential(segments: int, as_list: bool) -> None:
    plain = result(lambda m, x: m(x))
    ours = result(lambda m, x: checkpoint_sequential(list(m) if as_list else m, segments, x, use_reentrant=False))
    assert equal(ours, plain)


def test_checkpoint_sequential_runs_all_but_the_last_run_again() -> None:
    runs = [0] * 6
    model = linear_layers(6, 4)
    for number, block in enumerate(model):
        block[0].register_forward_pre_hook(lambda *_, n=number: runs.__setitem__(n, runs[n] + 1))
    checkpoint_sequential(model, 3, torch.ones(2, 4, requires_grad=True)).sum().backward()
    ours = list(runs)
    runs[:] = [0] * 6
    torchs_sequential(model, 3, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert ours == runs == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("segments", [0, 6, True, 2.0, "2"])
def test_segments_out_of_range(segments: object) -> None:
    with pytest.raises(ConfigError) as error:
        checkpoint_sequential(module(), segments, torch.ones(6, 4))
    fault = f"segments: expected an int from 1 to 5, the number of functions, got {segments!r}"
    assert str(error.value) == f"{fault} · fix: use fewer segments"


def test_unknown_keywords_of_checkpoint_sequential() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_sequential has no argument 'early' · fix: remove it"):
        checkpoint_sequential(module(), 2, torch.ones(6, 4), early=True)
    checkpoint_sequential(module(), 2, torch.ones(6, 4), preserve_rng_state=True)


def test_checkpoint_wrapper() -> None:
    model = module()
    keys = list(model.state_dict())
    block = checkpoint_wrapper(model[4])
    assert block is model[4]
    assert type(block) is nn.Linear
    assert list(model.state_dict()) == keys
    plain = result(lambda m, x: m(x))

    def wrapped(m: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(m, "seen"):
            m.seen = checkpoint_wrapper(m[2]) is m[2]
        return m(x)

    assert equal(result(wrapped), plain)
    with pytest.raises(ConfigError, match=r"checkpoint_wrapper: this Linear is wrapped already · fix: wrap it once"):
        checkpoint_wrapper(model[4])


def test_checkpoint_wrapper_says_that_host_memory_is_where_its_tensors_are() -> None:
    model = nn.Sequential(nn.Linear(16, 16), checkpoint_wrapper(Mlp(), offload_to_cpu=True))
    model(torch.ones(200, 16)).sum().backward()
    (note,) = model[1].forward.context.notes
    assert note == "offload to 'cpu' has no effect: the tensors are in host memory already"


def test_is_recomputing_in_every_kind_of_second_run() -> None:
    assert not is_recomputing()
    seen: list[bool] = []
    model = nn.Sequential(nn.Linear(16, 16), Mlp(), Mlp())
    model[1].up.register_forward_pre_hook(lambda *_: seen.append(is_recomputing()))
    for policy in (True, "selective", {"tiles": 1}):
        seen.clear()
        with graphckpt.apply(model, {"1": policy}):
            model(torch.ones(2, 16)).sum().backward()
        assert seen[0] is False
        assert seen[1:] in ([True], []), policy
    assert not is_recomputing()
    seen.clear()
    checkpoint_wrapper(model[1])
    model(torch.ones(2, 16)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert seen == [False, True, False]


def test_blocks_of_a_graph_can_be_given() -> None:
    block = Predict(module()).model
    checkpoint(block, torch.ones(6, 4)).sum().backward()
    checkpoint(lambda x: block(x) * 1, torch.ones(6, 4)).sum().backward()
    assert block[1].num_batches_tracked == 2
    assert checkpoint_wrapper(block[4]) is block[4].origin


def test_closures_that_run_one_of_several_norms_move_its_statistics_once() -> None:
    """All of them reach the same modules, so that the first call shows nothing of what the next one moves."""

    def buffers(run: Callable[..., Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = tuple(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        for _ in range(2):
            x = torch.randn(6, 8)
            for number in range(3):
                x = run(lambda y, at=number: layers[at](y), x)
            x.square().sum().backward()
        return {f"{at}.{name}": b for at, layer in enumerate(layers) for name, b in layer.named_buffers()}

    plain, ours = buffers(lambda function, x: function(x)), buffers(checkpoint)
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []
