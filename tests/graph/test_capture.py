"""N calls of a captured Graph equal N plain steps, in every bit; changes between calls take effect in the next one."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.captured_steps import (
    MakeOptimizer,
    Train,
    adamw,
    batches,
    both,
    captured,
    model_of,
    num_alive,
    plain_sgd,
    rate,
    run,
    same,
    scaler,
)
from helpers.hard_modules import ZOO
from helpers.policies import HOLES, NESTED, ON_CHAIN
from helpers.tally import Tally
from helpers.thinning import is_chosen, slow_unless
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphckpt.blocks.select
from graphckpt import Graph, GraphError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),
]


def set_rules(rules: dict[Any, Any]) -> Callable[[Train], None]:
    def set_up(graph: Train) -> None:
        for selector, value in rules.items():
            pattern = graphckpt.blocks.select._pattern(selector)
            for name, module in list(graph._roots["model"].named_modules()):
                if pattern.fullmatch(name) and (name or not selector):
                    graph._tree.config(module, f"model.{name}").activation_checkpointing = value

    return set_up


@functools.cache
def plain_steps(kind: str) -> list[Any]:
    """What six steps without policies leave."""
    return run("eager", build_model=lambda: model_of(kind), inputs=batches(6))[0]


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
    set_up = set_rules({"none": {}, **ON_CHAIN, **HOLES}[policy])
    both(3, plain_steps(kind), build_model=lambda: model_of(kind), inputs=batches(6), set_up=set_up)


@pytest.mark.parametrize("policy", NESTED)
def test_nested_rules_in_a_recording(policy: str) -> None:
    both(set_up=set_rules(NESTED[policy]))


def test_an_optimizer_that_cannot_be_recorded_steps_after_the_replay() -> None:
    both(make=plain_sgd)


@pytest.mark.parametrize(
    ("make", "outside"),
    [
        (plain_sgd, "SGD steps after it (fix: fused=True)"),
        (
            lambda model: torch.optim.AdamW(model.parameters(), fused=True),
            "AdamW steps after it (fix: capturable=True)",
        ),
    ],
)
def test_explain_says_how_the_step_runs(make: MakeOptimizer, outside: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, graph = run("cuda_graph", make=make)
    text = graph.explain().capture
    assert text.startswith("cuda_graph, 1 capture, 7 replays, ")
    assert text.endswith(f"; {outside}")
    assert f" capture: {text} " in " ".join(capsys.readouterr().out.split()) + " "


def test_two_optimizers_one_of_them_inside() -> None:
    class Two(Train):
        def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, *, capture: Any) -> None:
            super().__init__(
                model,
                torch.optim.AdamW(model[:2].parameters(), lr=rate(), fused=True, capturable=True),
                None,
                capture=capture,
            )
            self.add_optimizer(optimizer, lr_sch=scheduler)

    both(make=lambda model: torch.optim.SGD(model[2:].parameters(), lr=0.05), graph_class=Two)


def with_scaler(graph: Train) -> None:
    graph.set_grad_scaler(scaler())


def with_two_captures(graph: Train) -> None:
    graph.config.max_captures = 2


def clipped(make: MakeOptimizer) -> MakeOptimizer:
    def with_clip(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        optimizer.param_groups[0]["clip_grad_max_norm"] = 0.01
        return optimizer

    return with_clip


@pytest.mark.parametrize("make", [adamw, plain_sgd, clipped(adamw)], ids=["inside", "outside", "clipped"])
def test_a_scaler_skips_a_step_that_overflows(make: MakeOptimizer) -> None:
    inputs = batches(10)
    inputs[5] = torch.full((6, 16), float("inf"), device="cuda")
    graph = both(make=make, set_up=with_scaler, inputs=inputs)
    assert graph._update.num_steps == 9


def test_accumulation_and_clipping_are_inside() -> None:
    both(make=clipped(plain_sgd), set_up=lambda graph: graph.config.set_gradient_accumulation_steps(3))


class HostReads(TorchDispatchMode):
    """Counts how often a value of the device is read, for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("schedule", "most"), [(False, 0), (True, 1)])
def test_a_replay_with_a_scaler_does_not_hold_up_the_host(schedule: bool, most: int) -> None:
    """A schedule asks whether the step was skipped; without one the count of steps is made exact when it is read."""

    inputs = batches(10)
    inputs[5] = inputs[7] = torch.full((6, 16), float("inf"), device="cuda")
    graph = both(set_up=with_scaler, inputs=inputs, schedule=schedule)
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


def test_shapes_change() -> None:
    inputs = [batch for rows in (6, 6, 6, 4, 6, 4, 6, 4, 4, 6, 4) for batch in batches(1, rows)]
    graph = both(None, inputs=inputs)
    assert captured(graph).num_captured == 2
    assert captured(graph).num_replays == 5


def cycled_betas(number: int, graph: Graph) -> None:
    """As OneCycleLR and CyclicLR do."""
    graph._update.optimizers[0].param_groups[0]["betas"] = 0.9 - number / 100, 0.999


def test_a_step_that_is_captured_in_every_call_goes_on_without() -> None:
    plain, _ = run("eager", between=cycled_betas)
    with pytest.warns(UserWarning, match=r"captured 3 times in a row for .* betas or momentum.*cycle_momentum=False"):
        ours, graph = run("cuda_graph", between=cycled_betas)
    assert same(ours, plain)
    assert captured(graph).num_captured == captured(graph).num_replays == 3
    assert captured(graph).num_cached == 0
    assert "1 of 1 kinds of calls run without capture" in graph.explain(show=False).capture


def test_settings_that_change_now_and_then_are_captured_each_time() -> None:
    graph = both(
        None, inputs=batches(24), between=lambda number, graph: cycled_betas(number, graph) if number % 4 == 0 else None
    )
    assert captured(graph).num_captured == 6
    assert captured(graph).num_replays == 21


def test_shapes_that_push_each_other_out_leave_one_without_capture() -> None:
    """The others then find room, and are replayed."""
    inputs = [batch for rows in (2, 3, 4) * 12 for batch in batches(1, rows)]

    plain, _ = run("eager", inputs=inputs, set_up=with_two_captures)
    with pytest.warns(UserWarning, match=r"more than max_captures=2 kinds of inputs alternate.* larger") as caught:
        ours, graph = run("cuda_graph", inputs=inputs, set_up=with_two_captures)
    assert len(caught) == 1
    assert same(ours, plain)
    assert "1 of 3 kinds of calls run without capture" in graph.explain(show=False).capture
    assert captured(graph).num_captured < 14
    assert len(captured(graph)._entries) == num_alive(captured(graph)) == 2
    assert captured(graph).num_replays > 20


def test_replays_do_not_walk_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = run("cuda_graph")
    walks = []
    walk = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda *args, **more: walks.append(1) or walk(*args, **more))
    graph(batches(1)[0])
    assert captured(graph).num_replays == 8
    assert not walks


def test_planning_gives_the_memory_of_captures_back_first() -> None:
    """They are of the policies before, and a budget would count what they hold as taken."""

    class Layered(Train):
        def build(self, x: Tensor) -> Tensor:
            for manager in managers:
                alive.add(num_alive(manager))
            return super().build(x)

    alive = Tally()
    managers: list[Any] = []
    model = nn.Sequential(model_of())
    graph = Layered(model, adamw(model), capture="cuda_graph")
    x = batches(1)[0]
    for _ in range(5):
        graph(x)
    assert captured(graph).num_cached == 1
    managers.append(captured(graph))
    graph.plan(x, memory_budget="min", select="model.0.*").apply()
    assert set(alive) == {0}


def test_an_evaluation_graph_is_captured_and_reads_the_weights_as_they_are() -> None:
    class Evaluate(Graph):
        def __init__(self, model: nn.Module, capture: Any) -> None:
            super().__init__()
            self.model = model
            self.config.capture = capture

        def build(self, x: Tensor) -> dict[str, Any]:
            return {"logits": self.model(x), "name": "eval"}

    results = []
    for capture in ("eager", "cuda_graph"):
        model = model_of()
        train = Train(model, adamw(model), capture=capture)
        evaluate = Evaluate(model, capture)
        torch.manual_seed(2)
        for x in batches(8):
            train(x)
            results.append(evaluate(x)["logits"])
    assert all(torch.equal(a, b) for a, b in zip(results[:8], results[8:], strict=True))
    assert captured(evaluate).num_replays == 5


def test_outputs_are_fresh_and_inputs_are_the_callers() -> None:
    model = model_of()
    graph = Train(model, adamw(model), capture="cuda_graph")
    x = batches(1)[0]
    losses = [graph(x) for _ in range(8)]
    assert len({loss.data_ptr() for loss in losses[4:]}) == 4
    assert len({float(loss) for loss in losses}) == 8
    assert torch.equal(x, batches(1)[0])


@pytest.mark.parametrize("write", [lambda loss: loss.item(), lambda loss: bool(loss > 1e9)])
def test_the_error_of_an_op_that_cannot_be_captured_says_where(write: Any) -> None:
    class Reads(Train):
        def build(self, x: Tensor) -> Tensor:
            loss = super().build(x)
            write(loss)
            return loss

    with pytest.raises(GraphError, match=r"test_capture.py:\d+ in <lambda>: it "):
        run("cuda_graph", graph_class=Reads)


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("a bad batch")


class Checked(Train):
    """Raises an error of its own for some batches, before or in backward, or after it."""

    where: str | None = None

    def build(self, x: Tensor) -> Tensor:
        if self.where == "before":
            raise ValueError("a bad batch")
        if self.where == "shape":
            x = x[:, :-1]
        loss = super().build(Bad.apply(x.requires_grad_()) if self.where == "backward" else x)
        if self.where == "after":
            raise ValueError("a bad batch", id(loss))
        return loss


@pytest.mark.parametrize("num_bad", [1, 4])
@pytest.mark.parametrize("where", ["before", "shape", "backward", "after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_an_error_of_the_program_does_not_end_capturing(number: int, where: str, num_bad: int) -> None:
    """Whichever call it is in: of the warm-up, the one that would be captured, or one after it."""
    losses = {}
    for capture in ("eager", "auto"):
        torch.manual_seed(0)
        model = model_of()
        graph = Checked(model, adamw(model), capture=capture)
        losses[capture] = []
        num_errors = 0
        for call, x in enumerate(batches(10), start=1):
            if call == number:
                for _ in range(num_bad):
                    object.__setattr__(graph, "where", where)  # as the program has it elsewhere: no capture is dropped
                    try:
                        graph(x.clone())
                    except (KeyError, ValueError, RuntimeError):
                        num_errors += 1
                    object.__setattr__(graph, "where", None)
                    model.zero_grad()
                torch.manual_seed(call)
            losses[capture].append(graph(x))
        if capture == "eager" or number <= 4:
            assert num_errors == num_bad
        else:
            assert num_errors == 0, "a replay runs nothing of the program"
    if number <= 4:
        assert same(losses["auto"], losses["eager"])
        assert captured(graph).reason is None
    assert captured(graph).num_captured == 1
    assert captured(graph).num_replays >= 7
    assert num_alive(captured(graph)) == 1


@pytest.mark.parametrize(("kind", "what"), [("counts", r"model\.1\.count"), ("codebook", r"model\.1\._buffers")])
def test_an_attribute_that_forward_changes_is_an_error(kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphError, match=rf"cannot be captured: {what}: forward changes it, which a replay would not"):
        run("cuda_graph", build_model=lambda: model_of(kind))
    plain, _ = run("eager", build_model=lambda: model_of(kind))
    with pytest.warns(UserWarning, match="runs without capture"):
        ours, _ = run("auto", build_model=lambda: model_of(kind))
    assert same(ours, plain)


def test_inputs_that_cannot_be_static() -> None:
    class Given(Train):
        def build(self, x: Tensor, more: Any = None) -> Tensor:
            return super().build(x)

    model = model_of()
    with pytest.raises(GraphError, match="input 0 requires a gradient"):
        Given(model, adamw(model), capture="cuda_graph")(batches(1)[0].requires_grad_())
    with pytest.raises(GraphError, match="input 1 is a object"):
        Given(model, adamw(model), capture="cuda_graph")(batches(1)[0], object())


def test_values_that_are_no_tensors_are_a_part_of_what_is_recorded() -> None:
    class Scaled(Train):
        def build(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().build(x * scale)

    results = []
    for capture in ("eager", "cuda_graph"):
        model = model_of()
        graph = Scaled(model, adamw(model), capture=capture)
        torch.manual_seed(3)
        results.append([graph(x, scale=1.0 + number % 2) for number, x in enumerate(batches(12))])
    assert same(*results)
    assert captured(graph).num_captured == 2


def test_verify_before_the_first_call_changes_nothing_of_what_follows() -> None:
    ours, _ = run("cuda_graph", set_up=lambda graph: graph.verify(batches(1)[0]))
    assert same(ours, run("eager")[0])


class Looks(torch.optim.AdamW):
    """Reads its learning rate on the host, which no recording can."""

    def step(self, closure: Any = None) -> None:
        float(self.param_groups[0]["lr"])
        super().step()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_an_error_within_the_update_leaves_the_scaler_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Looks(model.parameters(), lr=rate(), fused=True, capturable=True)

    plain, _ = run("eager", make=make, set_up=with_scaler)
    with pytest.warns(UserWarning, match="runs without capture"):
        ours, _ = run("auto", make=make, set_up=with_scaler)
    assert same(ours, plain)


def test_the_output_of_a_capture_is_detached_from_autograd() -> None:
    _, graph = run("cuda_graph")
    entry = next(iter(captured(graph)._entries.values()))
    assert entry.capture.output[0].grad_fn is None


def test_inputs_that_lie_elsewhere_are_no_part_of_a_recording() -> None:
    """A number on the host would be read once, when the step is recorded."""
    model = model_of()
    with pytest.raises(GraphError, match=r"input 0 is on cpu · fix: pass tensors on cuda:0"):
        Train(model, adamw(model))(batches(1)[0].cpu())


def at_6(act: Callable[[Any], object]) -> Callable[[int, Any], None]:
    def between(number: int, graph: Graph) -> None:
        if number == 6:
            act(graph)

    return between


def group_of(graph: Graph) -> dict[str, Any]:
    return graph._update.optimizers[0].param_groups[0]


def set_rate(number: int, graph: Graph) -> None:
    if number in (2, 6):
        group_of(graph)["lr"] = torch.tensor(0.123 / number, device="cuda")


def put_modules_in_place(number: int, graph: Graph) -> None:
    model = graph._roots["model"]
    if number == 6:
        model[1].up = copy.deepcopy(model[1].up).requires_grad_(False)
    if number == 8:  # a module more has a mode more
        model[2].extra = nn.Linear(2, 2).cuda()


def move_weight(graph: Graph) -> None:
    weight = graph._roots["model"][1].up.weight
    weight.data = weight.data * 2


def set_flag(number: int, graph: Graph) -> None:
    if number == 5:
        graph.model[1].config.activation_checkpointing = True


def set_gradient(number: int, graph: Graph) -> None:
    graph._roots["model"][0].weight.grad = torch.ones(16, 16, device="cuda")


class Scaled(Train):
    scale = 1.0

    def build(self, x: Tensor) -> Tensor:
        return super().build(x * self.scale)


def load_state(number: int, graph: Graph) -> None:
    model, optimizer = graph._roots["model"], graph._update.optimizers[0]
    if number == 4:
        graph.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if number == 7:
        for part, state in zip((model, optimizer), graph.saved, strict=True):
            part.load_state_dict(state)


CHANGES: dict[str, tuple[Callable[[int, Any], None], dict[str, Any], int | None]] = {
    "a rate that the user sets": (set_rate, {"schedule": False}, 1),
    "another setting of a group": (at_6(lambda graph: group_of(graph).update(weight_decay=0.3)), {}, 2),
    "modes of modules": (
        lambda number, graph: graph._roots["model"].train(number % 2 == 0),
        {"num_replays": None, "build_model": lambda: model_of("batch_norm")},
        2,
    ),
    "a parameter with other memory": (at_6(move_weight), {}, 2),
    "a module in the place of another": (put_modules_in_place, {"num_replays": 10 - 5}, 2),
    "a flag": (set_flag, {"num_replays": None}, None),
    "gradients of others": (set_gradient, {}, 1),
    "a state that is loaded": (load_state, {"schedule": False, "num_replays": None}, None),
    "an attribute of the graph": (
        at_6(lambda graph: setattr(graph, "scale", 3.0)),
        {"graph_class": Scaled, "num_replays": 1},
        1,
    ),
    "another setting of the scaler": (
        at_6(lambda graph: graph._update.scaler.set_growth_interval(1)),
        {"set_up": lambda graph: graph.set_grad_scaler(scaler(growth_interval=3))},
        2,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls_is_active_in_the_next_one(change: str) -> None:
    between, settings, num_captured = CHANGES[change]
    graph = both(between=between, **settings)
    assert num_captured in (None, captured(graph).num_captured)


class WithWeight(Train):
    def build(self, x: Tensor) -> Any:
        return super().build(x), next(self.model.parameters())


@pytest.mark.parametrize("make", [adamw, plain_sgd], ids=["inside", "outside"])
def test_a_weight_that_is_returned_is_that_after_the_update(make: MakeOptimizer) -> None:
    both(make=make, graph_class=WithWeight)


def test_a_tensor_among_the_settings_lives_as_long_as_the_recordings_that_hold_it() -> None:
    """Another tensor could get its id otherwise, and the recording would be replayed with the memory of the first."""
    model = model_of()
    optimizer = adamw(model)
    graph = Train(model, optimizer)
    for x in batches(4):
        optimizer.param_groups[0]["note"] = setting = torch.ones((), device="cuda")
        graph(x)
        alive = weakref.ref(setting)
        del setting
        optimizer.param_groups[0]["note"] = None
        assert alive() is not None or not captured(graph)._entries
