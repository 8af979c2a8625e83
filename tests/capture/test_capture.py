"""N calls of a captured Graph equal N plain steps, in every bit; changes between calls take effect in the next one."""

from __future__ import annotations

import copy
import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_capture import TapeRunner
from helpers.hard_modules import ZOO, chain
from helpers.policies import HOLES, NESTED, ON_CHAIN
from helpers.thinning import is_chosen, slow_unless
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphckpt.blocks.select
from graphckpt import ConfigError, Graph, GraphError
from graphckpt.capture.diagnose import ModuleAttributes, capture_failure
from graphckpt.capture.host_random import HostRandom
from graphckpt.capture.inputs import is_on

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Train(Graph):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, *, capture: Any = "eager"
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)
        self.config.capture = capture

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).float().pow(2).mean()
        loss.backward()
        return loss


def captured(graph: Graph) -> Any:
    return graph._step.captured.captures


def batches(count: int, rows: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 16, generator=generator) for _ in range(count)]


Between = Callable[[int, Graph], None]


def run(
    capture: Any,
    *,
    kind: str = "mlp",
    make: Make = adamw,
    set_up: Callable[[Train], None] = lambda graph: None,
    inputs: list[Tensor] | None = None,
    between: Between = lambda number, graph: None,
    schedule: bool = True,
    graph_class: type[Train] = Train,
) -> tuple[list[Any], Train]:
    """Runs ten steps, and returns all that they left: outputs, parameters, buffers, rates, RNG state."""
    model = chain(kind)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    graph = graph_class(model, optimizer, scheduler, capture=capture)
    set_up(graph)
    torch.manual_seed(5)
    seen: list[Any] = []
    for number, x in enumerate(inputs or batches(10)):
        between(number, graph)
        seen.append(graph(x))
        seen.append(float(optimizer.param_groups[0]["lr"]))
    seen += [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return [*seen, torch.get_rng_state()], graph


def same(one: list[Any], other: list[Any]) -> bool:
    assert len(one) == len(other)
    return all(equal(a, b) for a, b in zip(one, other, strict=True))


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@functools.cache
def plain_steps(kind: str) -> list[Any]:
    """What six steps without policies leave."""
    return run("eager", kind=kind, inputs=batches(6))[0]


def both(num_replays: int | None = 7, plain: list[Any] | None = None, **settings: Any) -> tuple[Train, TapeRunner]:
    plain = plain or run("eager", **settings)[0]
    runner = TapeRunner()
    ours, graph = run(runner, **settings)
    assert same(ours, plain)
    assert captured(graph).reason is None
    if num_replays is not None:
        assert captured(graph).num_replays == num_replays
    return graph, runner


def test_the_first_three_calls_are_real_steps() -> None:
    graph, runner = both()
    assert runner.num_warm == 3
    assert captured(graph).num_captured == 1


CAPTURED_KINDS = [kind for kind in ZOO if kind not in ("counts", "codebook", "lstm")]
POLICY_NAMES = ["none", *ON_CHAIN, *HOLES]


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        pytest.param(p, k, marks=slow_unless(is_chosen((p, k, 0), POLICY_NAMES, CAPTURED_KINDS, range(3))))
        for p in POLICY_NAMES
        for k in CAPTURED_KINDS
    ],
)
def test_every_rule_in_a_recording(policy: str, kind: str) -> None:
    """Not of modules that replace what they read next time, nor of the CPU's LSTM, whose state has no address."""
    rules = {"none": {}, **ON_CHAIN, **HOLES}[policy]

    def set_up(graph: Train) -> None:
        for selector, value in rules.items():
            pattern = graphckpt.blocks.select._pattern(selector)
            for name, module in list(graph._roots["model"].named_modules()):
                if pattern.fullmatch(name) and (name or not selector):
                    graph._tree.config(module, f"model.{name}").activation_checkpointing = value

    both(3, plain_steps(kind), kind=kind, inputs=batches(6), set_up=set_up)


@pytest.mark.parametrize("policy", NESTED)
def test_nested_rules_in_a_recording(policy: str) -> None:
    def set_up(graph: Train) -> None:
        for selector, value in NESTED[policy].items():
            pattern = graphckpt.blocks.select._pattern(selector)
            for name, module in list(graph._roots["model"].named_modules()):
                if pattern.fullmatch(name) and (name or not selector):
                    graph._tree.config(module, f"model.{name}").activation_checkpointing = value

    both(set_up=set_up)


def test_a_slab_in_a_recording() -> None:
    def set_up(graph: Train) -> None:
        for number in (1, 2, 3):
            graph.model[number].config.update({"activation_checkpointing": True, "contiguous": True, "min_elements": 1})

    both(set_up=set_up)


def test_an_optimizer_that_cannot_be_recorded_steps_after_the_replay() -> None:
    both(make=plain_sgd)


def test_explain_says_how_the_step_runs(capsys: pytest.CaptureFixture[str]) -> None:
    _, graph = run(TapeRunner(), make=plain_sgd)
    text = "tape, 1 capture, 7 replays; SGD steps after it (fix: fused=True)"
    assert graph.explain().capture == text
    assert f" capture: {text} " in " ".join(capsys.readouterr().out.split()) + " "


def test_two_optimizers_one_of_them_inside() -> None:
    class Two(Train):
        def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, *, capture: Any) -> None:
            super().__init__(
                model,
                torch.optim.AdamW(model[:2].parameters(), lr=torch.tensor(0.01), fused=True),
                None,
                capture=capture,
            )
            self.add_optimizer(optimizer, lr_sch=scheduler)

    both(make=lambda model: torch.optim.SGD(model[2:].parameters(), lr=0.05), graph_class=Two)


@pytest.mark.parametrize("make", [adamw, plain_sgd])
def test_clipping_is_inside(make: Make) -> None:
    def with_clip(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        optimizer.param_groups[0]["clip_grad_max_norm"] = 0.01
        return optimizer

    both(make=with_clip)


def test_accumulation_is_inside() -> None:
    both(set_up=lambda graph: graph.config.set_gradient_accumulation_steps(3))


@pytest.mark.parametrize("make", [adamw, plain_sgd])
def test_a_scaler_skips_a_step_that_overflows(make: Make) -> None:
    def set_up(graph: Train) -> None:
        graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))

    inputs = batches(10)
    inputs[5] = torch.full((6, 16), float("inf"))
    graph, _ = both(make=make, set_up=set_up, inputs=inputs)
    assert graph._update.num_steps == 9


class HostReads(TorchDispatchMode):
    """Counts how often a value of the device is read, for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("schedule", "most"), [(False, 0), (True, 1)])
def test_a_replay_with_a_scaler_does_not_hold_up_the_host(schedule: bool, most: int) -> None:
    """A schedule asks whether the step was skipped; without one the count of steps is made exact when it is read."""

    def set_up(graph: Train) -> None:
        graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))

    inputs = batches(10)
    inputs[5] = inputs[7] = torch.full((6, 16), float("inf"))
    graph, _ = both(set_up=set_up, inputs=inputs, schedule=schedule)
    with HostReads() as reads:
        graph(inputs[0])
        graph(inputs[5])
    assert reads.count == 2 * most
    assert graph.state_dict()["System-Train-TrainStep"] == 9
    graph(inputs[5])
    assert copy.deepcopy(graph)._update.num_steps == 9
    graph(inputs[0])
    graph(inputs[5])
    graph.verify(inputs[0])
    graph(inputs[5])
    graph.load_state_dict(graph.state_dict())
    assert graph._update.num_steps == 10


def test_a_rate_that_the_user_sets_is_active_at_once() -> None:
    def between(number: int, graph: Graph) -> None:
        if number in (2, 6):
            graph._update.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.123 / number)

    graph, _ = both(between=between, schedule=False)
    assert captured(graph).num_captured == 1


def test_another_setting_of_a_group_records_again() -> None:
    def between(number: int, graph: Graph) -> None:
        if number == 6:
            graph._update.optimizers[0].param_groups[0]["weight_decay"] = 0.3

    graph, _ = both(between=between)
    assert captured(graph).num_captured == 2


def test_shapes_change() -> None:
    inputs = [batch for rows in (6, 6, 6, 4, 6, 4, 6, 4, 4, 6, 4) for batch in batches(1, rows)]
    graph, runner = both(None, inputs=inputs)
    assert captured(graph).num_captured == 2
    assert runner.num_warm == 6
    assert captured(graph).num_replays == 5


def test_recordings_are_bounded() -> None:
    inputs = [batch for rows in (2, 3, 4) * 4 for batch in batches(1, rows)]

    def set_up(graph: Train) -> None:
        graph.config.max_captures = 2

    graph, runner = both(None, inputs=inputs, set_up=set_up)
    assert len(captured(graph)._entries) == 2
    assert runner.released == captured(graph).num_captured - 2


def cycled_betas(number: int, graph: Graph) -> None:
    """As OneCycleLR and CyclicLR do."""
    graph._update.optimizers[0].param_groups[0]["betas"] = 0.9 - number / 100, 0.999


def test_a_step_that_is_captured_in_every_call_goes_on_without() -> None:
    plain, _ = run("eager", between=cycled_betas)
    with pytest.warns(UserWarning, match=r"captured 3 times in a row for .* betas or momentum.*cycle_momentum=False"):
        ours, graph = run(TapeRunner(), between=cycled_betas)
    assert same(ours, plain)
    assert captured(graph).num_captured == captured(graph).num_replays == 3
    assert captured(graph).num_held == 0
    assert "1 of 1 kinds of calls run without capture" in graph.explain(show=False).capture


def test_settings_that_change_now_and_then_are_captured_each_time() -> None:
    graph, _ = both(
        None, inputs=batches(24), between=lambda number, graph: cycled_betas(number, graph) if number % 4 == 0 else None
    )
    assert captured(graph).num_captured == 6
    assert captured(graph).num_replays == 21


def test_shapes_that_push_each_other_out_leave_one_without_capture() -> None:
    """The others then find room, and are replayed."""
    inputs = [batch for rows in (2, 3, 4) * 12 for batch in batches(1, rows)]

    def set_up(graph: Train) -> None:
        graph.config.max_captures = 2

    plain, _ = run("eager", inputs=inputs, set_up=set_up)
    with pytest.warns(UserWarning, match=r"more than max_captures=2 kinds of inputs alternate.* larger") as caught:
        ours, graph = run(TapeRunner(), inputs=inputs, set_up=set_up)
    assert len(caught) == 1
    assert same(ours, plain)
    assert "1 of 3 kinds of calls run without capture" in graph.explain(show=False).capture
    assert captured(graph).num_captured < 14
    assert captured(graph).num_replays > 20


def test_modes_of_modules_are_a_part_of_what_is_recorded() -> None:
    def between(number: int, graph: Graph) -> None:
        graph._roots["model"].train(number % 2 == 0)

    graph, _ = both(None, between=between, kind="batch_norm")
    assert captured(graph).num_captured == 2


def test_a_parameter_with_other_memory_records_again() -> None:
    def between(number: int, graph: Graph) -> None:
        if number == 6:
            model = graph._roots["model"]
            model[1].up.weight.data = model[1].up.weight.data * 2

    graph, _ = both(between=between)
    assert captured(graph).num_captured == 2


def test_replays_do_not_walk_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = run(TapeRunner())
    walks = []
    walk = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda *args, **more: walks.append(1) or walk(*args, **more))
    graph(batches(1)[0])
    assert captured(graph).num_replays == 8
    assert not walks


def test_a_module_that_takes_the_place_of_another_records_again() -> None:
    def between(number: int, graph: Graph) -> None:
        model = graph._roots["model"]
        if number == 6:
            model[1].up = copy.deepcopy(model[1].up).requires_grad_(False)
        if number == 8:
            model[2].extra = nn.Linear(2, 2)

    graph, runner = both(None, between=between)
    assert captured(graph).num_captured == 2
    assert runner.num_warm == 3 + 2, "a module more has a mode more"


def test_a_loaded_state_is_active() -> None:
    saved: dict[str, Any] = {}

    def between(number: int, graph: Graph) -> None:
        if number == 4:
            saved["model"] = {k: v.clone() for k, v in graph._roots["model"].state_dict().items()}
            saved["optimizer"] = copy.deepcopy(graph._update.optimizers[0].state_dict())
        if number == 7:
            graph._roots["model"].load_state_dict(saved["model"])
            graph._update.optimizers[0].load_state_dict(saved["optimizer"])

    both(between=between, schedule=False)


def test_a_flag_set_later_is_active() -> None:
    def between(number: int, graph: Graph) -> None:
        if number == 5:
            graph.model[1].config.activation_checkpointing = True

    both(None, between=between)


def test_gradients_of_others_are_left_alone() -> None:
    def between(number: int, graph: Graph) -> None:
        graph._roots["model"][0].weight.grad = torch.ones(16, 16)

    both(between=between)


def test_planning_gives_the_memory_of_captures_back_first() -> None:
    """They are of the policies before, and a budget would count what they hold as taken."""

    class Layered(Train):
        def build(self, x: Tensor) -> Tensor:
            releases.append(runner.released)
            return super().build(x)

    releases: list[int] = []
    runner = TapeRunner()
    model = nn.Sequential(chain("mlp"))
    graph = Layered(model, adamw(model), capture=runner)
    x = batches(1)[0]
    for _ in range(5):
        graph(x)
    assert captured(graph).num_held == 1
    releases.clear()
    graph.plan(x, memory_budget="min", blocks="model.0.*").apply()
    assert set(releases) == {1}


def test_an_evaluation_graph_is_captured_and_reads_the_weights_as_they_are() -> None:
    class Evaluate(Graph):
        def __init__(self, model: nn.Module, capture: Any) -> None:
            super().__init__()
            self.model = model
            self.config.capture = capture

        def build(self, x: Tensor) -> dict[str, Any]:
            return {"logits": self.model(x), "name": "eval"}

    results = []
    for capture in ("eager", TapeRunner()):
        model = chain("mlp")
        train = Train(model, adamw(model), capture=TapeRunner() if capture != "eager" else capture)
        evaluate = Evaluate(model, capture)
        torch.manual_seed(2)
        for x in batches(8):
            train(x)
            results.append(evaluate(x)["logits"])
    assert all(torch.equal(a, b) for a, b in zip(results[:8], results[8:], strict=True))
    assert captured(evaluate).num_replays == 5


def test_outputs_are_fresh_and_inputs_are_the_callers() -> None:
    runner = TapeRunner()
    model = chain("mlp")
    graph = Train(model, adamw(model), capture=runner)
    x = batches(1)[0]
    losses = [graph(x) for _ in range(8)]
    assert len({loss.data_ptr() for loss in losses[4:]}) == 4
    assert len({float(loss) for loss in losses}) == 8
    assert torch.equal(x, batches(1)[0])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda model, loss: loss.item(),
            r"test_capture.py:\d+ in <lambda>: it reads a device value on the host",
        ),
        (lambda model, loss: bool(loss > 1e9), r"test_capture.py:\d+ in <lambda>: it reads a device value"),
    ],
)
def test_what_cannot_be_recorded_says_where(write: Any, message: str) -> None:
    class Reads(Train):
        def build(self, x: Tensor) -> Tensor:
            loss = super().build(x)
            write(self.model, loss)
            return loss

    with pytest.raises(GraphError, match=message):
        run(TapeRunner(), graph_class=Reads)


class Peeks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 1e9 else x


def test_what_cannot_be_recorded_names_the_block_and_auto_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_up(graph: Train) -> None:
        graph._roots["model"].insert(2, Peeks())

    with pytest.raises(
        GraphError, match=r"model\.2 · test_capture\.py:\d+ in forward: .* · fix: keep it on the device"
    ):
        run(TapeRunner(), set_up=set_up)
    plain, _ = run("eager", set_up=set_up)
    monkeypatch.setattr("graphckpt.graph.captured_step.backend_for", lambda *_: TapeRunner())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, graph = run("auto", set_up=set_up)
    assert same(ours, plain)
    assert "cannot be captured: model.2" in captured(graph).reason or "model.2" in captured(graph).reason
    assert sum("cannot be captured" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize(("kind", "what"), [("counts", r"model\.1\.count"), ("codebook", r"model\.1\._buffers")])
def test_what_python_changes_in_forward_is_an_error(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphError, match=rf"cannot be captured: {what}: forward changes it, which a replay would not"):
        run(TapeRunner(), kind=kind)
    plain, _ = run("eager", kind=kind)
    monkeypatch.setattr("graphckpt.graph.captured_step.backend_for", lambda *_: TapeRunner())
    with pytest.warns(UserWarning, match="runs without capture"):
        ours, _ = run("auto", kind=kind)
    assert same(ours, plain)


def test_inputs_that_cannot_be_static() -> None:
    class Given(Train):
        def build(self, x: Tensor, more: Any = None) -> Tensor:
            return super().build(x)

    model = chain("mlp")
    with pytest.raises(GraphError, match="input 0 requires a gradient"):
        Given(model, adamw(model), capture=TapeRunner())(batches(1)[0].requires_grad_())
    with pytest.raises(GraphError, match="input 1 is a object"):
        Given(model, adamw(model), capture=TapeRunner())(batches(1)[0], object())


def test_values_that_are_no_tensors_are_a_part_of_what_is_recorded() -> None:
    class Scaled(Train):
        def build(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().build(x * scale)

    results = []
    for capture in ("eager", TapeRunner()):
        model = chain("mlp")
        graph = Scaled(model, adamw(model), capture=capture)
        torch.manual_seed(3)
        results.append([graph(x, scale=1.0 + number % 2) for number, x in enumerate(batches(12))])
    assert same(*results)
    assert captured(graph).num_captured == 2


def test_verify_passes_and_puts_everything_back() -> None:
    runner = TapeRunner()
    _, graph = run(runner)
    model = graph._roots["model"]
    before = [t.clone() for t in model.parameters()]
    state, rng_state = str(graph._update.optimizers[0].state_dict()), torch.get_rng_state()
    report = graph.verify(batches(1)[0], steps=2)
    assert report.is_captured
    assert report.num_steps == 2
    assert report.num_bytes > 2 * sum(p.nbytes for p in before)
    assert same(before, list(model.parameters()))
    assert str(graph._update.optimizers[0].state_dict()) == state
    assert torch.equal(torch.get_rng_state(), rng_state)


@pytest.mark.parametrize("capture", ["eager", "tape"])
def test_verify_before_the_first_call_changes_nothing_of_what_follows(capture: str) -> None:
    plain, _ = run("eager")

    def set_up(graph: Train) -> None:
        graph.verify(batches(1)[0])

    ours, _ = run(TapeRunner() if capture == "tape" else "eager", set_up=set_up)
    assert same(ours, plain)


class Flips(nn.Module):
    """Another result in its first run, unseen by all but a comparison."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        Flips.runs += 1
        return self.linear(x) * (1 + 1e-3 * (Flips.runs == 1))


def test_verify_names_what_differs() -> None:
    def set_up(graph: Train) -> None:
        graph._roots["model"].insert(1, Flips())

    with pytest.raises(GraphError, match=r"verify: step 1: `output 0` differs .* in 1 of 1 elements, by up to"):
        run("eager", set_up=lambda graph: (set_up(graph), graph.verify(batches(1)[0])))


class Varies(nn.Module):
    """Another result in every run, as a kernel with atomics."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Varies.runs += 1
        return x * (1 + 1e-3 * Varies.runs)


def test_verify_says_where_two_plain_steps_differ_already() -> None:
    def set_up(graph: Train) -> None:
        graph._roots["model"].insert(1, Varies())
        graph.verify(batches(1)[0])

    message = r"verify: step 1: two plain steps differ already: `output 0` differs .* fix: torch.use_deterministic"
    with pytest.raises(GraphError, match=message):
        run("eager", set_up=set_up)


def test_a_deleted_graph_gives_its_memory_back() -> None:
    _, graph = run(TapeRunner())
    static = weakref.ref(next(iter(captured(graph)._entries.values())).inputs._buffers[0])
    model = weakref.ref(graph._roots["model"])
    del graph
    gc.collect()
    assert static() is None
    assert model() is None


def test_capture_takes_known_words_only() -> None:
    graph = Train(chain("mlp"), plain_sgd(chain("mlp")))
    with pytest.raises(ConfigError, match=r"capture: there is no 'cudagraph' · did you mean 'cuda_graph'"):
        graph.config.capture = "cudagraph"
    with pytest.raises(ConfigError, match=r"max_captures: expected a positive int, got 0"):
        graph.config.max_captures = 0
    graph.config.capture = "cuda_graph"
    with pytest.raises(ConfigError, match=r"'cuda_graph' expected modules on one CUDA device, got cpu"):
        graph(batches(1)[0])


class Looks(torch.optim.AdamW):
    """Reads its learning rate on the host, which no recording can."""

    def step(self, closure: Any = None) -> None:
        float(self.param_groups[0]["lr"])
        super().step()


def test_an_error_within_the_update_leaves_the_scaler_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Looks(model.parameters(), lr=torch.tensor(0.01), fused=True)

    def set_up(graph: Train) -> None:
        graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))

    plain, _ = run("eager", make=make, set_up=set_up)
    monkeypatch.setattr("graphckpt.graph.captured_step.backend_for", lambda *_: TapeRunner())
    with pytest.warns(UserWarning, match="runs without capture"):
        ours, _ = run("auto", make=make, set_up=set_up)
    assert same(ours, plain)


def test_what_a_recording_returns_is_cut_off_from_autograd() -> None:
    _, graph = run(TapeRunner())
    entry = next(iter(captured(graph)._entries.values()))
    assert entry.capture.output[0].grad_fn is None


def test_another_setting_of_the_scaler_records_again() -> None:
    scalers = []

    def set_up(graph: Train) -> None:
        scalers.append(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))
        graph.set_grad_scaler(scalers[-1])

    def between(number: int, graph: Graph) -> None:
        if number == 6:
            scalers[-1].set_growth_interval(1)

    graph, _ = both(set_up=set_up, between=between)
    assert captured(graph).num_captured == 2


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda: torch.rand(()), "torch on the CPU"),
        (random.random, "Python's random"),
        (np.random.rand, "NumPy"),
    ],
)
def test_draws_of_the_host_are_seen(draw: Callable[[], Any], what: str) -> None:
    def twice() -> list[Any]:
        return [draw(), draw()]

    state = HostRandom()
    state.check()
    first = twice()
    with pytest.raises(GraphError, match=f"draws random numbers with {what}, which every replay would repeat"):
        state.check()
    state.restore()
    assert twice() == first


def test_an_attribute_of_the_graph_that_is_set_later_is_active() -> None:
    class Scaled(Train):
        scale = 1.0

        def build(self, x: Tensor) -> Tensor:
            return super().build(x * self.scale)

    def between(number: int, graph: Graph) -> None:
        if number == 6:
            graph.scale = 3.0

    graph, _ = both(None, between=between, graph_class=Scaled)
    assert captured(graph).num_replays == 1


def test_inputs_that_lie_elsewhere_are_no_part_of_a_recording() -> None:
    """A number on the host would be read once, when the step is recorded."""
    runner = TapeRunner()
    runner.device = torch.device("cuda:0")
    model = chain("mlp")
    with pytest.raises(GraphError, match=r"input 0 is on cpu · fix: pass tensors on cuda:0"):
        Train(model, adamw(model), capture=runner)(batches(1)[0])


def test_edits_of_what_lies_elsewhere_are_seen_and_undone() -> None:
    model = nn.BatchNorm1d(4)
    model.count = torch.zeros(())
    held = ModuleAttributes([("model", model)], torch.device("cuda"))
    assert held.changed() is None
    model.count += 1
    model.num_batches_tracked.add_(1)
    assert held.changed() == "model.count"
    held.restore()
    assert float(model.count) == float(model.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("CUDA error: operation not permitted when stream is capturing\nSearch for `cudaError", "avoid .item()"),
        ("CUDA error: operation would make the legacy stream depend on a capturing", "drop losses"),
        ("CUDA error: dependency created on uncaptured work in another stream\ncudaErrorStreamCapture", "drop losses"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture", "pass tensors on the device"),
    ],
)
def test_what_the_device_says_has_a_fix(said: str, message: str) -> None:
    assert f" · fix: {message}" in capture_failure(RuntimeError(said), [])


@pytest.mark.parametrize(("place", "is_there"), [("cuda:0", True), ("cuda:1", False), ("cpu", False)])
def test_an_input_on_another_device_of_the_type_is_elsewhere(place: str, is_there: bool) -> None:
    assert is_on(torch.device(place), torch.device("cuda", 0)) is is_there
    assert is_on(torch.device(place), torch.device("cuda")) is place.startswith("cuda")
