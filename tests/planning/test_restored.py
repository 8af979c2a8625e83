"""After `plan`, `fit` and `verify` a training goes on as if they had never run, whatever its step changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from helpers.layer_stacks import stack_of
from helpers.tally import Tally
from torch import nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader

import graphckpt
from graphckpt import ConfigError, Graph, errors, reached
from graphckpt.planning.options import PlanOptions

Step = Callable[[], torch.Tensor]
Make = Callable[[], tuple[nn.Module, Step]]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def net() -> nn.Module:
    torch.manual_seed(0)
    return stack_of(layer, 3)


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def plain_step(model: nn.Module, *optimizers: torch.optim.Optimizer, x: torch.Tensor = X) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


# ---- optimizers


class Counting(torch.optim.Optimizer):
    """Counts its steps in one of the places in which optimizers do, and begins with larger ones."""

    def __init__(self, parameters: Any, count: Callable[[Counting, dict[str, Any]], int]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = count
        self.attribute = 0
        self.tensor = torch.zeros(())
        self.box = SimpleNamespace(number=0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            number = self.count(self, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / (1 - 0.9**number))


def in_group(_: Counting, group: dict[str, Any]) -> int:
    group["step"] = group.get("step", 0) + 1
    return group["step"]


def in_list_of_group(_: Counting, group: dict[str, Any]) -> int:
    group.setdefault("history", []).append(1)
    return len(group["history"])


def in_attribute(optimizer: Counting, _: dict[str, Any]) -> int:
    optimizer.attribute += 1
    return optimizer.attribute


def in_new_attribute(optimizer: Counting, _: dict[str, Any]) -> int:
    optimizer.added = getattr(optimizer, "added", 0) + 1
    return optimizer.added


def in_tensor(optimizer: Counting, _: dict[str, Any]) -> int:
    optimizer.tensor += 1
    return int(optimizer.tensor)


def in_object(optimizer: Counting, _: dict[str, Any]) -> int:
    optimizer.box.number += 1
    return optimizer.box.number


def in_defaults(optimizer: Counting, _: dict[str, Any]) -> int:
    optimizer.defaults["count"] = optimizer.defaults.get("count", 0) + 1
    return optimizer.defaults["count"]


def in_state(optimizer: Counting, _: dict[str, Any]) -> int:
    optimizer.state["all"] = {"step": optimizer.state.get("all", {}).get("step", 0) + 1}
    return optimizer.state["all"]["step"]


NUMBER = 0


def in_global(_: Counting, __: dict[str, Any]) -> int:
    global NUMBER  # noqa: PLW0603  # what users write
    NUMBER += 1
    return NUMBER


def in_closure() -> Callable[..., int]:
    number = 0

    def count(_: Counting, __: dict[str, Any]) -> int:
        nonlocal number
        number += 1
        return number

    return count


PLACES = [
    *(in_group, in_list_of_group, in_attribute, in_new_attribute, in_tensor, in_object, in_defaults, in_state),
    *(in_global, in_closure),
]


def counting(place: Callable[..., Any]) -> Make:
    def make() -> tuple[nn.Module, Step]:
        global NUMBER  # noqa: PLW0603
        NUMBER = 0
        model = net()
        optimizer = Counting(model.parameters(), in_closure() if place is in_closure else place)
        return model, lambda: plain_step(model, optimizer)

    return make


def unfreezing() -> tuple[nn.Module, Step]:
    """Adds a layer to the optimizer, and lets it require gradients, after the second step."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.1)
    done = []

    def step() -> torch.Tensor:
        done.append(1)
        if len(done) == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
        return plain_step(model, optimizer)

    return model, step


# ---- schedules and scalers


def scheduled(schedule: Callable[[torch.optim.Optimizer], Any], **keywords: Any) -> Make:
    def make() -> tuple[nn.Module, Step]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = schedule(optimizer)

        def step() -> torch.Tensor:
            loss = plain_step(model, optimizer)
            scheduler.step(**keywords)
            return torch.stack([loss, torch.tensor(optimizer.param_groups[0]["lr"])])

        return model, step

    return make


def one_after_the_other(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], milestones=[2])


def of_own_counter(optimizer: torch.optim.Optimizer) -> LambdaLR:
    calls = []

    def factor(_: int) -> float:
        calls.append(1)
        return 1 / len(calls)

    return LambdaLR(optimizer, factor)


def scaled() -> tuple[nn.Module, Step]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step() -> torch.Tensor:
        loss = model(X).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return torch.stack([loss.detach(), torch.tensor(scaler.get_scale())])

    return model, step


# ---- generators, and attributes of modules


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.body = layer()
        self.draw = draw
        self.num_calls = 0
        self.log: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.log.append(self.num_calls)
        return self.body(x) + 0.1 * self.draw() + 0.01 * len(self.log) + 0.01 * self.num_calls


class OfGenerator:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> torch.Tensor:
        if isinstance(self.generator, torch.Generator):
            return torch.rand(16, 8, generator=self.generator)
        return torch.from_numpy(self.generator.random((16, 8))).float()


def noisy(generator: Callable[[], Any]) -> Make:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = nn.ModuleList([Noisy(OfGenerator(generator())) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, lambda: plain_step(lambda x: model[1](model[0](x)), optimizer)

    return make


def of_loop() -> tuple[nn.Module, Step]:
    """Draws with a generator of its own, beside the model."""
    model = net()
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda: plain_step(model, optimizer, x=torch.randn(16, 8, generator=generator))


# ---- averages of weights


class Average:
    """A user's average, in a dictionary of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.num_updates = 0

    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        decay = self.num_updates / (self.num_updates + 3)
        for name, parameter in model.named_parameters():
            self.shadow[name] = decay * self.shadow[name] + (1 - decay) * parameter.detach()

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from self.shadow.values()


class Copied(nn.Module):
    """A deep copy of the model whose values are set by `.data`, which counts no version."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.copy = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        for own, parameter in zip(self.copy.parameters(), model.parameters(), strict=True):
            own.data.mul_(0.9).add_(parameter.data, alpha=0.1)


class Torch(swa_utils.AveragedModel):
    def update(self, model: nn.Module) -> None:
        self.update_parameters(model)


def averaged(average: Callable[[nn.Module], Any]) -> Make:
    def make() -> tuple[nn.Module, Step]:
        model = net()
        ema, optimizer = average(model), torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            loss = plain_step(model, optimizer)
            ema.update(model)
            return torch.cat([loss.view(1), *(tensor.detach().flatten() for tensor in ema.parameters())])

        return model, step

    return make


def by_hook() -> tuple[nn.Module, Step]:
    model = net()
    ema, optimizer = Average(model), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: ema.update(model))
    tensors = ema.shadow

    def step() -> torch.Tensor:
        plain_step(model, optimizer)
        return torch.cat([tensor.flatten() for tensor in tensors.values()])

    return model, step


# ---- other ways to hold them


class Trainer:
    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ema = Average(self.model)
        self.num_steps = 0
        self.losses: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        self.num_steps += 1
        self.losses.append(plain_step(self.model, self.optimizer, x=X / self.num_steps))
        self.ema.update(self.model)
        return torch.stack([self.losses[0], self.losses[-1], torch.tensor(float(self.ema.num_updates))])


def method() -> tuple[nn.Module, Step]:
    trainer = Trainer()
    return trainer.model, trainer.step


def bound() -> tuple[nn.Module, Step]:
    def step(state: dict[str, Any], *, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        state["number"] += 1
        return plain_step(model, optimizer, x=X / state["number"])

    model = net()
    return model, partial(step, {"number": 0}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def decorated() -> tuple[nn.Module, Step]:
    model, number = net(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.enable_grad()
    def step() -> torch.Tensor:
        nonlocal number
        number += 1
        step.calls = getattr(step, "calls", 0) + 1
        return plain_step(model, optimizer, x=X / number / step.calls)

    return model, step


def head_beside() -> tuple[nn.Module, Step]:
    """A head that is no part of the model, with gradients that accumulate over two steps."""
    model, head = net(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    number = 0

    def step() -> torch.Tensor:
        nonlocal number
        number += 1
        loss = head(model(X)).square().mean()
        loss.backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, step


KINDS: dict[str, Make] = {
    **{place.__name__: counting(place) for place in PLACES},
    "unfreezing": unfreezing,
    "StepLR": scheduled(partial(StepLR, step_size=2)),
    "SequentialLR": scheduled(one_after_the_other),
    "LambdaLR": scheduled(of_own_counter),
    "ReduceLROnPlateau": scheduled(partial(ReduceLROnPlateau, patience=1), metrics=1.0),
    "GradScaler": scaled,
    "generator_of_modules": noisy(lambda: torch.Generator().manual_seed(3)),
    "numpy_generator_of_modules": noisy(lambda: np.random.default_rng(3)),
    "generator_of_the_loop": of_loop,
    "AveragedModel": averaged(Torch),
    "deep_copy": averaged(Copied),
    "dictionary_of_averages": averaged(Average),
    "average_by_hook": by_hook,
    "method": method,
    "partial": bound,
    "decorated": decorated,
    "head_beside_the_model": head_beside,
}


def run_plan(model: nn.Module, step: Step) -> None:
    graphckpt.plan(model, step, memory_budget="1GiB", candidates=["full"])


def run_fit(model: nn.Module, step: Step) -> None:
    graphckpt.fit(lambda _: (model, step), batch_sizes=[2], memory_budget="1GiB", candidates=["full"])


def run_verify(model: nn.Module, step: Step) -> None:
    graphckpt.verify(model, step, {"*": True}, show=False)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter")
@pytest.mark.parametrize("num_before", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("run", [run_plan, run_fit, run_verify])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_as_if_nothing_had_run(
    kind: str, run: Callable[[nn.Module, Step], None], num_before: int
) -> None:
    _, step = KINDS[kind]()
    expected = [step() for _ in range(num_before + 4)]
    model, step = KINDS[kind]()
    for _ in range(num_before):
        step()
    run(model, step)
    assert all(torch.equal(step(), value) for value in expected[num_before:])


# ---- a Graph


class Train(Graph):
    def __init__(self, model: nn.Module, *, by_attribute: bool) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(Counting(model.parameters(), in_group))
        self.ema = Average(model) if by_attribute else None

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        if self.ema is not None:
            self.ema.update(self.model)
            return torch.stack([loss.detach(), self.ema.shadow["0.0.weight"].sum()])
        return loss


@pytest.mark.parametrize("by_attribute", [True, False])
@pytest.mark.parametrize("what", ["plan", "verify"])
def test_a_graph_goes_on_as_if_nothing_had_run(what: str, by_attribute: bool) -> None:
    graph = Train(net(), by_attribute=by_attribute)
    expected = [graph(X) for _ in range(4)]
    graph = Train(net(), by_attribute=by_attribute)
    if what == "plan":
        graph.plan(X, memory_budget="1GiB", candidates=["full"]).apply().remove()
    else:
        graph.model[0].config.activation_checkpointing = True
        graph.verify(X)
    assert all(torch.equal(graph(X), value) for value in expected)


# ---- `restore`


class OfLibrary:
    """An object of an installed package, whose attributes are not looked into."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def draw(self) -> torch.Tensor:
        self.values = self.values * 2 + 1
        return self.values[0]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[OfLibrary]:
    monkeypatch.setattr(reached, "_is_installed", lambda module: module == "library")
    monkeypatch.setattr(OfLibrary, "__module__", "library")
    return OfLibrary


@pytest.mark.parametrize("run", [graphckpt.plan, graphckpt.fit, graphckpt.verify])
def test_objects_of_packages_are_restored_if_they_are_passed(library: type[OfLibrary], run: Callable[..., Any]) -> None:
    def make() -> tuple[nn.Module, Step, OfLibrary]:
        model, values = net(), library(torch.ones(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, lambda: plain_step(model, optimizer, x=X / values.draw()), values

    _, step, _ = make()
    expected = [step() for _ in range(3)]
    for is_passed in (True, False):
        model, step, values = make()
        how = {"restore": [values] if is_passed else None, "memory_budget": "1GiB", "candidates": ["full"]}
        if run is graphckpt.plan:
            run(model, step, **how)
        elif run is graphckpt.fit:
            run(lambda _: (model, step), batch_sizes=[2], **how)
        elif is_passed:
            run(model, step, True, restore=[values], show=False)
        assert is_passed == all(torch.equal(step(), value) for value in expected) or run is graphckpt.verify


@pytest.mark.parametrize("is_passed", [True, False])
def test_what_is_too_large_is_named_once_unless_it_is_passed(
    is_passed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reached, "LEAST_LIMIT", 2**10)
    monkeypatch.setattr(errors, "_WARNED", set())
    model, number = net(), 0
    own = sum(parameter.nbytes for parameter in model.parameters())
    average = torch.zeros(2 * own // 4 + 1)

    def step() -> torch.Tensor:
        nonlocal number
        number += 1
        average.add_(number)
        return plain_step(model)

    for _ in range(2):
        run_plan(model, step) if not is_passed else graphckpt.plan(
            model, step, memory_budget="1GiB", candidates=["full"], restore=[average]
        )
    assert number == 0, "what is small is restored all the same"
    assert bool(average.any()) is not is_passed
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (not is_passed)
    if messages:
        assert messages[0].startswith("graphckpt: plan: `average`, which the step reaches, is not restored: its ")
        assert messages[0].endswith("fix: restore=[average] if the step changes it, or restore=[]")
    graphckpt.plan(model, step, memory_budget="1GiB", candidates=["full"], restore=[])
    assert len(caplog.records) == len(messages), "an empty list says that it does not change"


@pytest.mark.parametrize(
    ("restore", "message"),
    [
        (nn.Linear(1, 1), r"restore: expected a list of objects, got Linear\(.* · fix: restore=\[ema, generator\]"),
        (torch.ones(1), "restore: expected a list of objects"),
        ({"ema": nn.Linear(1, 1)}, "restore: expected a list of objects"),
        ([3], "restore: expected objects whose state can be copied, .*, got 3 · fix"),
        ([None], "restore: expected objects whose state can be copied, .*, got None"),
        (["ema"], "restore: expected objects .*, got 'ema'"),
        ([nn.Linear], "restore: expected objects .*, got <class"),
        ([(each for each in ())], "restore: expected objects .*, got <generator"),
        ([iter(DataLoader([1, 2]))], "restore: expected objects .*, got <torch.utils.data"),
    ],
    ids=["module", "tensor", "dict", "number", "None", "name", "class", "generator", "loader"],
)
def test_what_cannot_be_restored_is_one_error(restore: Any, message: str) -> None:
    model = net()

    def step() -> torch.Tensor:
        pytest.fail("nothing runs")

    with pytest.raises(ConfigError, match=f"^plan.{message}"):
        graphckpt.plan(model, step, memory_budget="1GiB", restore=restore)
    with pytest.raises(ConfigError, match=f"^find_batch_size.{message}"):
        graphckpt.fit(lambda _: (model, step), restore=restore)
    with pytest.raises(ConfigError, match=f"^verify.{message}"):
        graphckpt.verify(model, step, True, restore=restore)
    with pytest.raises(ConfigError, match=rf"^Train_\d+.plan.{message}"):
        Train(model, by_attribute=False).plan(X, memory_budget="1GiB", restore=restore)


def test_it_is_for_steps_that_run() -> None:
    def make() -> tuple[nn.Module, Step]:
        model = net()
        return model, lambda: plain_step(model)

    message = r"\.restore: expected None with a device that is absent, .*, got \[\] · fix: leave it out"
    with pytest.raises(ConfigError, match=f"plan{message}"):
        graphckpt.plan(make, memory_budget="1GiB", device="h100", restore=[])
    with pytest.raises(ConfigError, match=f"find_batch_size{message}"):
        graphckpt.fit(lambda _: make(), device="h100", restore=[])
    with pytest.raises(ConfigError, match=f"plan{message}"):
        Train(net(), by_attribute=False).plan(X, memory_budget="1GiB", device="h100", restore=[])
    assert "restore" not in PlanOptions.names()


@pytest.mark.parametrize("frees", [True, False])
def test_gradients_that_a_step_frees_are_not_held_and_are_restored(frees: bool) -> None:
    """Held until the end, they would be alive beside those of the steps that are measured."""
    model = net()
    plain_step(model)
    tensors = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    refs, values = [ref(tensor) for tensor in tensors], [tensor.clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    del tensors
    num_alive = Tally()

    def step() -> None:
        if frees:
            model.zero_grad()
        num_alive.add(sum(each() is not None for each in refs))
        plain_step(model)

    graphckpt.plan(model, step, memory_budget=1.0, candidates=["full"], progress=False)
    assert set(num_alive) == {0 if frees else len(refs)}
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(grad, value) for grad, value in zip(grads, values, strict=True) if grad is not None)
    assert frees or [grad.data_ptr() for grad in grads if grad is not None] == places
    assert None not in grads


def test_results_and_inputs_keep_their_versions() -> None:
    """A tensor that the step only reads may be in a graph whose backward is still to run."""
    model, weight = net(), torch.ones(8, requires_grad=True)
    waits = (weight * 2) * X
    result = waits.square()

    def step() -> torch.Tensor:
        return plain_step(model, x=X + 0 * waits.detach() + 0 * result.detach())

    run_plan(model, step)
    result.sum().backward()
    assert weight.grad is not None
