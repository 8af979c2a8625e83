"""A Graph with a memory budget plans from its own first updates: nothing runs twice, and no bit changes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from weakref import ref

import pytest
import torch
from helpers.layer_stacks import D, ListModel, ResidualLayer, stack_of
from helpers.tally import Tally
from helpers.train_graphs import Predict, SquareGraph
from torch import nn

import graphckpt
from graphckpt import Graph, PlanError
from graphckpt.blocks.forward import policy_of
from graphckpt.budget import Budget
from graphckpt.graph import auto_plan
from graphckpt.graph.auto_plan import AutoPlan
from graphckpt.graph.step import StepCall
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.live_plan import MOST_UPDATES, LivePlan
from graphckpt.planning.update_watch import covers

# the compiler reads `.grad` of what it is given, and says so
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

NUM_LAYERS = 6
ROWS = 256
QUIET = {"progress": False}
DTYPES = torch.float16, torch.float64


class Case:
    """A Graph of a few layers with dropout, and the bytes of each of its calls.

    Args:
        budget: That of the Graph; ``None`` is a Graph without one.
        device: Where it runs.
        rows: The number of rows of a batch.
        layers: The number of layers.
        how: Options of the planner.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        device: str = "cpu",
        *,
        rows: int = ROWS,
        layers: int = NUM_LAYERS,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = ListModel(layers, norm=nn.LayerNorm).to(device)
        is_fused = device == "cuda"
        rate: float | torch.Tensor = torch.tensor(1e-2, device=device) if is_fused else 1e-2
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=is_fused, capturable=is_fused)
        self.graph = SquareGraph(self.model, {}, self.optimizer, self.scheduler())
        if budget is not None:
            self.graph.config.memory_budget = budget
            self.graph.config.plan_options = {**QUIET, **how}
        self.x = torch.randn(rows, D, generator=torch.Generator().manual_seed(2)).to(device)
        self.forwards = Tally()
        self.model.register_forward_pre_hook(self.count)
        self.losses: list[torch.Tensor] = []
        self.peaks: list[int] = []
        self.random = self.rng_states()

    def scheduler(self) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def count(self, *_: object) -> None:
        self.forwards.add()

    @property
    def num_forwards(self) -> int:
        return len(self.forwards)

    def rng_states(self) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        return [torch.get_rng_state(), torch.cuda.get_rng_state() if self.device == "cuda" else None]

    def call(self, x: torch.Tensor | None = None) -> None:
        """Runs a step with random numbers of its own, and reads its peak."""
        on_host, on_device = self.random
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
        x = self.x if x is None else x
        with self.metered() as peak:
            self.losses.append(self.graph(x))
        self.peaks.append(peak())
        self.random = [torch.get_rng_state(), torch.cuda.get_rng_state() if on_device is not None else None]

    @contextmanager
    def metered(self) -> Iterator[Callable[[], int]]:
        """Yields a function that returns the peak of live bytes since, of what this case has on the device."""
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        live = LiveBytes(self.device, record_timeline=False)
        live.track([*self.model.parameters(), *states])
        with live:
            yield lambda: live.peak_bytes

    def peak_of_call(self) -> int:
        """Runs a step, and returns the most bytes that are alive in it: on CUDA those of the allocator."""
        if self.device == "cpu":
            self.call()
            return self.peaks[-1]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def run(self, calls: int = 12) -> Self:
        for _ in range(calls):
            self.call()
        return self

    @property
    def planner(self) -> AutoPlan:
        planner = self.graph._auto_plan
        assert planner is not None
        return planner

    @property
    def live(self) -> LivePlan | None:
        return self.planner._live

    @property
    def is_planning(self) -> bool:
        return self.live is not None and not self.live.is_settled

    def flags(self) -> list[object]:
        return [layer.config.activation_checkpointing for layer in self.graph.model.layers]

    def state_bytes(self) -> int:
        """Returns the bytes of the weights and of the optimizer's states."""
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *states])


def is_same(one: Case, other: Case) -> bool:
    pairs = [(one.losses, other.losses), (one.model.parameters(), other.model.parameters())]
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def plain() -> Case:
    return Case().run()


def sizes_of(budget: Budget, plain: Case) -> int | str:
    return int(budget * max(plain.peaks)) if isinstance(budget, float) else budget


def budget_of(share: Budget, make_case: Callable[[], Case]) -> Budget:
    """Returns a share of what a case takes, beside what else the process has on a device: there the allocator counts
    workspaces of cuBLAS too, which are larger than such a model."""
    case = make_case()
    if case.device == "cpu" or not isinstance(share, float):
        return share
    case.call()
    gc.collect()  # of other tests
    peak = case.peak_of_call()
    others = torch.cuda.memory_allocated() - case.state_bytes()
    return others + int(share * (peak - others))


@pytest.mark.parametrize("candidates", [["full"], None], ids=["full", "all"])
@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_first_updates_train_and_never_exceed_the_budget(
    share: float, candidates: list[str] | None, plain: Case
) -> None:
    budget = sizes_of(share, plain)
    case = Case(budget, candidates=candidates)
    num_updates = 0
    while num_updates == 0 or case.is_planning:
        case.call()
        num_updates += 1
        assert case.num_forwards == num_updates, "nothing runs twice"
    assert num_updates <= MOST_UPDATES
    case.run(12 - num_updates)
    assert is_same(case, plain)
    assert case.num_forwards == 12
    plan = case.live.plan
    assert max(case.peaks) <= budget == plan.budget_bytes
    assert case.peaks[-1] == plan.predicted_peak_bytes == case.graph.explain(show=False).peak_bytes
    assert case.flags() == [row.fields["activation_checkpointing"] or None for row in plan.rows]


def test_planning_copies_neither_weights_nor_states() -> None:
    """Runs of the step take the plain peak and a second copy of both; updates never exceed the budget."""
    budget = 950_000
    case = Case(budget, rows=32, layers=24, candidates=["full"])
    while not case.peaks or case.is_planning:
        case.call()
    plan = case.live.plan
    assert max(case.peaks) <= budget < plan.plain_peak_bytes
    by_runs = Case(rows=32, layers=24)
    by_runs.call()
    with by_runs.metered() as peak:
        by_runs.graph.plan(by_runs.x, memory_budget=budget, candidates=["full"], progress=False)
    # Beside them, copies of what `build` reaches by a hook: this case, with its batch, losses and random states.
    num_bytes = plan.plain_peak_bytes + case.state_bytes()
    assert 1.7 * max(case.peaks) < num_bytes <= peak() <= num_bytes + 2**14


@pytest.mark.parametrize("budget", [0.6, "1GiB"])
def test_training_is_captured_after_it_is_planned(budget: Budget, device: str) -> None:
    plain = Case(device=device).run()
    expected = [tensor.cpu() for tensor in (*plain.losses, *plain.model.parameters())]
    del plain
    gc.collect()  # the allocator counts what is alive in this process
    wanted = budget_of(budget, lambda: Case(device=device))
    gc.collect()
    case = Case(wanted, device)
    num_updates = 0
    while num_updates == 0 or case.is_planning:
        case.call()
        num_updates += 1
        captured = case.graph._step.captured
        assert captured is None or captured.num_captured == 0, "policies change with each update"
    assert num_updates <= MOST_UPDATES
    plan = case.live.plan
    assert case.peak_of_call() == plan.predicted_peak_bytes <= plan.budget_bytes
    case.run(11 - num_updates)
    own = [tensor.cpu() for tensor in (*case.losses, *case.model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    assert plan.keeps_everything == (budget == "1GiB")
    if device == "cuda":
        captured = case.graph._step.captured
        assert captured.num_captured == 1
        # Three calls are recorded, or two if that which checked the plan was a warm-up too; the next one is captured.
        assert captured.num_replays == 12 - num_updates - 3
        assert case.num_forwards == 12 - captured.num_replays + 1


@pytest.mark.parametrize("parts", [1, 2])
def test_smaller_and_larger_batches_are_captured_under_one_plan(parts: int, device: str) -> None:
    """Micro-batches, a scaler, and a batch that is larger than planned for after the capture."""

    def case_of(budget: Budget | None = None) -> Case:
        case = Case(budget, device, candidates=["full"])
        case.graph.config.set_gradient_accumulation_steps(parts)
        case.graph.set_grad_scaler(torch.amp.GradScaler(device, init_scale=16.0))
        return case

    def trained(budget: Budget | None = None) -> tuple[Case, list[torch.Tensor]]:
        case = case_of(budget)
        larger = torch.cat([case.x, case.x[:64]])
        for x in [case.x] * 9 + [larger, case.x] * 8:
            case.call(x)
        return case, [tensor.cpu() for tensor in (*case.losses, *case.model.parameters())]

    expected = trained()[1]
    gc.collect()
    budget = budget_of(0.75, case_of)
    gc.collect()
    case, own = trained(budget)
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    assert case.live._num_replans == 1
    assert not case.is_planning
    assert set(case.flags()) == {None, "full"}
    if device == "cuda":
        captured = case.graph._step.captured
        assert captured.num_captured == 2, "one for each shape, since the plan for the larger one"
        assert captured.num_replays > 4


def test_two_updates_are_enough_where_everything_fits(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("1GiB", progress=True)
    case.run(4)
    name = case.graph.name
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"graphckpt: {name}: plans from at most 8 updates"
    assert re.fullmatch(rf"graphckpt: {name}: 1\.00 GiB holds everything \(.*\): nothing is recomputed", lines[1])
    assert len(lines) == 2
    assert case.live._num_measured == 2
    assert case.flags() == [None] * NUM_LAYERS


def test_larger_batches_are_recomputed_and_planned_for_at_once(plain: Case) -> None:
    case = Case(sizes_of(0.8, plain)).run(8)
    small = case.flags()
    larger = torch.cat([case.x, case.x[:64]])
    assert not case.is_planning
    case.call(larger)
    assert case.peaks[-1] <= sizes_of(0.8, plain), "every block was recomputed"
    assert case.flags().count(None) < small.count(None), "a plan was made at once"
    for _ in range(4):  # which shows what only smaller batches have shown, before the fastest one is applied
        case.call(larger)
        assert case.peaks[-1] <= sizes_of(0.8, plain)
    large = case.flags()
    assert None in large
    assert large.count(None) < small.count(None)
    forwards = case.num_forwards
    for x in (larger, case.x, larger, case.x, case.x[:17]):
        case.call(x)
        assert case.flags() == large, "a plan holds for smaller batches too"
        assert case.peaks[-1] <= sizes_of(0.8, plain)
    assert case.num_forwards == forwards + 5
    assert not case.is_planning


def test_batches_that_grow_with_each_update_are_planned_for_ever_less_often(plain: Case) -> None:
    case = Case(sizes_of(0.9, plain), candidates=["full"]).run(5)
    plans = [case.live.plan]
    for rows in range(16):
        case.call(torch.randn(ROWS + rows, D))
        if case.live.plan is not plans[-1]:
            plans.append(case.live.plan)
    assert case.live._num_replans <= 4
    assert max(case.peaks) <= sizes_of(0.9, plain)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(D, 3 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inside(x).chunk(3, dim=-1)
        return x + (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_half_as_many_texts_of_twice_the_length_are_another_size() -> None:
    """They have as many elements, and attention takes twice as much for them."""
    model = stack_of(Attention, 4)
    graph = SquareGraph(model)
    graph.config.memory_budget = 0.8
    graph.config.plan_options = {**QUIET, "candidates": ["full"]}
    for shape in [(8, 64)] * 5 + [(4, 128), (8, 64)] * 5:
        graph(torch.ones(*shape, D))
    assert graph._auto_plan is not None
    live = graph._auto_plan._live
    assert live is not None
    assert live.is_settled
    assert live._num_replans == 1
    assert dict(live._table.largest[0])["0.1"] == 128


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_are_one_update(count: int) -> None:
    def case_of(budget: Budget | None = None) -> Case:
        case = Case(budget)
        case.graph.config.set_gradient_accumulation_steps(count)
        return case

    plain = case_of().run()
    case = case_of(sizes_of(0.85, plain)).run()
    assert is_same(case, plain)
    assert case.num_forwards == 12 * count
    assert max(case.peaks) <= case.live.plan.budget_bytes
    assert case.peaks[-1] == case.live.plan.predicted_peak_bytes
    case.graph.config.set_gradient_accumulation_steps(1)  # longer micro-batches are planned for anew
    case.call()
    assert case.is_planning


def test_steps_that_the_scaler_skips_show_nothing() -> None:
    """The first ones overflow, and states of the optimizer do not exist until one does not."""

    def case_of(budget: Budget | None = None) -> Case:
        case = Case(budget)
        case.graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=16.0))
        case.model.head.weight.register_hook(lambda grad: grad * torch.inf if len(case.losses) < 4 else grad)
        return case

    plain = case_of().run(14)
    assert plain.graph._update.num_steps == 10
    case = case_of(sizes_of(0.8, plain))
    for _ in range(4):
        case.call()
        assert case.live._num_measured == 0
    case.run(10)
    assert is_same(case, plain)
    assert case.peaks[-1] == case.live.plan.predicted_peak_bytes <= case.live.plan.budget_bytes


def test_an_error_leaves_nothing_behind_and_the_next_call_goes_on(plain: Case) -> None:
    case = Case(sizes_of(0.6, plain))

    def check_is_bare() -> None:
        modules = list(case.model.modules())
        assert all(policy_of(module) is None for module in modules)
        assert sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules) == 1, "its own"
        step = case.graph._step
        assert step.metering is None
        assert not step._must_run, "the next one may be captured"

    for number in range(12):
        if number % 3 == 1:
            is_planning = case.is_planning
            hook = case.model.layers[3].register_forward_pre_hook(_fail)
            with pytest.raises(ValueError, match="no luck"):
                case.graph(case.x)
            hook.remove()
            check_is_bare()
            assert case.is_planning == is_planning
        case.call()
        check_is_bare()
    assert is_same(case, plain)
    assert case.peaks[-1] == case.live.plan.predicted_peak_bytes <= case.live.plan.budget_bytes


def _fail(*_: object) -> None:
    raise ValueError("no luck")


def test_a_graph_that_is_planning_dies_with_its_last_reference() -> None:
    model = ListModel(norm=nn.LayerNorm)
    graph: Any = SquareGraph(model)
    graph.config.memory_budget = 0.6
    graph(torch.ones(8, D))
    live = graph._auto_plan._live
    assert not live.is_settled
    alive = [ref(each) for each in (model, graph._step, live)]
    gc.collect()
    gc.disable()
    try:
        del model, graph, live
        assert [each() for each in alive] == [None, None, None]
    finally:
        gc.enable()


def test_graphs_that_share_modules_do_not_see_each_other(plain: Case) -> None:
    case = Case(sizes_of(0.6, plain))
    evaluation = Predict(case.model)
    teacher = SquareGraph(case.model, {"layers.0": True}, torch.optim.SGD(case.model.parameters(), lr=0.0))
    for number in range(12):
        state = torch.get_rng_state()
        evaluation(case.x)
        teacher(case.x)
        torch.set_rng_state(state)
        case.call()
        assert teacher.model.layers[0].config.activation_checkpointing is True
        assert teacher.model.layers[1].config.activation_checkpointing is None
        if number == 2:
            reruns = {row.block: row.reruns for row in teacher.explain(show=False).rows}
            assert reruns["model.layers.0"] == 1
            assert not reruns.get("model.layers.1")
    assert is_same(case, plain)


def test_two_graphs_of_one_model_plan_each_for_itself(plain: Case) -> None:
    budget = sizes_of(0.6, plain)
    case = Case(budget)
    other = SquareGraph(case.model, {}, torch.optim.SGD(case.model.parameters(), lr=0.0))
    other.config.memory_budget = "1GiB"
    other.config.plan_options = QUIET
    for _ in range(12):
        state = torch.get_rng_state()
        other(case.x)
        torch.set_rng_state(state)
        case.call()
    assert is_same(case, plain)
    assert any(case.flags())
    assert [layer.config.activation_checkpointing for layer in other.model.layers] == [None] * NUM_LAYERS


def test_a_measured_call_is_explained_while_it_plans(plain: Case) -> None:
    case = Case(sizes_of(0.6, plain))
    with case.graph.measure():
        case.call()
    explained = case.graph.explain(show=False)
    assert {row.reruns for row in explained.rows if row.block.startswith("model.layers.")} == {1}
    assert case.graph.verify(case.x).num_steps == 3
    assert case.is_planning
    case.run(11)
    assert is_same(case, plain)
    assert case.peaks[-1] == case.live.plan.predicted_peak_bytes


def test_debug_and_strict_inputs_work_while_it_plans(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(0.6)
    case.graph.config.strict_static = True
    case.graph.debug(1)
    case.call()
    assert "layers.3" in capsys.readouterr().out + capsys.readouterr().err
    with pytest.raises(graphckpt.GraphError, match="keep inputs as they are"):
        case.graph(case.x[:100])
    case.run(8)
    assert not case.is_planning


def test_policies_that_the_user_set_on_the_layers_are_replaced_and_others_stay() -> None:
    case = Case("1GiB")
    case.graph.model.layers[5].config.activation_checkpointing = True
    case.graph.model.layers[5].up.config.offload = "disk"
    case.graph.model.head.config.activation_checkpointing = True
    case.run(4)
    assert case.flags() == [None] * NUM_LAYERS
    assert case.graph.model.layers[5].up.config.fields() == {}
    assert case.graph.model.head.config.fields() == {"activation_checkpointing": True}
    assert case.peaks[-1] == case.live.plan.predicted_peak_bytes


def test_a_plan_that_is_applied_ends_the_planning_until_it_is_removed() -> None:
    case = Case(0.6)
    case.call()
    active = case.graph.plan(case.x, memory_budget="min", progress=False, candidates=["full"]).apply()
    lowest = case.flags()
    case.run(3)
    assert case.flags() == lowest
    assert case.live is None
    active.remove()
    assert case.flags() == [None] * NUM_LAYERS
    case.call()
    assert case.is_planning


def test_without_a_budget_again_the_flags_are_those_of_before() -> None:
    case = Case(0.6)
    case.graph.model.layers[0].config.activation_checkpointing = True
    case.call()
    assert all(case.flags())
    case.graph.config.memory_budget = None
    case.call()
    assert case.flags() == [True, *[None] * (NUM_LAYERS - 1)]


def test_a_budget_below_what_updates_reach_is_planned_by_runs() -> None:
    """Joined layers retain less than any policy of a single one."""
    least = Case("min", layers=24)
    least.call()
    assert least.live is None, "for the lowest peak the step runs"
    own = Case("min", layers=24, candidates=["full"]).run(3)
    assert own.live.plan.predicted_peak_bytes == own.peaks[-1] > max(least.run(2).peaks[1:])
    budget = own.peaks[-1] - 1
    case = Case(budget, layers=24)
    num_updates = 0
    while num_updates == 0 or case.live is not None:
        case.call()
        num_updates += 1
    assert num_updates <= MOST_UPDATES
    forwards = case.num_forwards
    case.run(2)
    assert case.num_forwards == forwards + 2
    assert "joined" in case.flags()
    assert max(case.peaks[-2:]) <= budget
    with pytest.raises(PlanError, match="no plan fits"):
        Case(700_000, layers=24).run(8)


@pytest.mark.parametrize(
    "how", [{"candidates": ["full", "joined"]}, {"container": {"activation_checkpointing": True}}], ids=str
)
def test_options_that_updates_cannot_show_are_planned_by_runs(how: dict[str, Any]) -> None:
    container = how.pop("container", {})
    case = Case(0.9, **how)
    case.graph.model.config.update(container)
    case.call()
    assert case.num_forwards > 1
    assert case.live is None


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"contiguous": True}, {"contiguous": True}),
        ({"determinism_check": "none"}, {"determinism_check": "none"}),
        ({"compile": {"backend": "eager"}, "candidates": ["full"]}, {"compile": {"backend": "eager"}}),
        ({"offload": "disk"}, {}),
        ({"select": "model.layers.[01]"}, {}),
    ],
    ids=lambda value: next(iter(value), ""),
)
def test_options_hold_in_the_updates_and_in_the_plan(how: dict[str, Any], field: dict[str, Any], plain: Case) -> None:
    case = Case(sizes_of(0.95, plain), **how)
    case.call()
    assert case.is_planning
    fields = case.graph.model.layers[0].config.fields()
    assert fields.pop("activation_checkpointing") in (True, "full")
    assert fields == field
    while case.is_planning:
        case.call()
    case.run(2)
    plan = case.live.plan
    assert max(case.peaks[-2:]) <= plan.predicted_peak_bytes <= plan.budget_bytes


def test_a_layer_that_is_replaced_has_the_policy_of_its_place() -> None:
    case = Case("min", candidates=["full"]).run(4)
    assert not case.is_planning
    case.graph.model.layers[2] = ResidualLayer()
    assert case.flags()[2] is None
    case.call()
    assert case.flags() == ["full"] * NUM_LAYERS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_compared_by_their_elements() -> None:
    values, ends = torch.ones(24, D), torch.tensor([0, 10, 24])
    for nested in (
        torch.nested.nested_tensor_from_jagged(values, ends),
        torch.nested.nested_tensor([values[:10], values[10:]]),
    ):
        assert auto_plan._sizes_of(StepCall({}, len, (nested,), {}))["0"] >= values.numel()


@pytest.mark.parametrize("calls", [1, 2, 6])
def test_a_layer_that_is_removed_has_no_policy(calls: int, plain: Case) -> None:
    def case_of(budget: Budget | None = None) -> Case:
        case = Case(budget).run(calls)
        del case.model.layers[-1]
        return case.run(8)

    case = case_of(sizes_of(0.6, plain))
    assert is_same(case, case_of())
    assert not case.is_planning
    assert len(case.flags()) == NUM_LAYERS - 1


class SeveralInputs(SquareGraph):
    def build(self, *inputs: torch.Tensor) -> torch.Tensor:
        loss = torch.stack([self.model(x.float()).square().mean() for x in inputs]).sum()
        loss.backward()
        return loss


def test_more_tensors_than_before_are_a_larger_input() -> None:
    """Each of them is as large as the one that was planned for."""
    model = ListModel(NUM_LAYERS, norm=nn.LayerNorm)
    graph = SeveralInputs(model)
    x = torch.ones(ROWS, D)
    graph.config.memory_budget = 1_200_000
    graph.config.plan_options = {**QUIET, "candidates": ["full"]}
    for inputs in [(x,)] * 4 + [(x, x)] * 3:
        live_bytes = LiveBytes("cpu", record_timeline=False)
        live_bytes.track(model.parameters())
        with live_bytes:
            graph(*inputs)
        assert live_bytes.peak_bytes <= 1_200_000
    assert graph._auto_plan is not None
    live = graph._auto_plan._live
    assert live is not None
    assert live._num_replans == 1


def test_a_wider_dtype_is_a_larger_input() -> None:
    narrow, wide = (auto_plan._sizes_of(StepCall({}, len, (torch.ones(4, dtype=each),), {})) for each in DTYPES)
    assert covers(wide, narrow)
    assert not covers(narrow, wide)


def test_a_plan_that_was_applied_before_the_first_call_stays() -> None:
    case = Case(0.6)
    case.graph.plan(case.x, memory_budget="1GiB", progress=False, candidates=["full"]).apply()
    case.run(2)
    assert case.flags() == [None] * NUM_LAYERS
    assert case.live is None


def test_several_optimizers_are_planned_for() -> None:
    def case_of(budget: Budget | None = None) -> Case:
        case = Case(budget)
        own = list(case.model.head.parameters())
        body = [p for p in case.model.parameters() if not any(p is each for each in own)]
        graph = SquareGraph(case.model, {}, torch.optim.AdamW(body, lr=1e-2))
        graph.add_optimizer(torch.optim.SGD(own, lr=1e-2, momentum=0.9))
        graph.config.plan_options = case.graph.config.plan_options
        graph.config.memory_budget = budget
        case.graph, case.optimizer = graph, graph._update.optimizers[0]
        return case

    plain = case_of().run()
    case = case_of(0.7).run()
    assert is_same(case, plain)
    momentum = sum(p.nbytes for p in case.model.head.parameters())
    assert case.peaks[-1] + momentum == case.live.plan.predicted_peak_bytes <= case.live.plan.budget_bytes


class TwoRoots(Graph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = ResidualLayer(), ResidualLayer()
        self.add_optimizer(torch.optim.SGD([*self.first.origin.parameters(), *self.second.origin.parameters()], lr=0.1))
        self.config.memory_budget = "1GiB"
        self.config.plan_options = {**QUIET, "select": ["first", "second"]}

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.second(self.first(x)).square().mean()
        loss.backward()
        return loss


def test_roots_can_be_the_blocks() -> None:
    graph = TwoRoots()
    for rows in (64, 64, 64, 64, 128, 64, 64, 64, 64):
        graph(torch.ones(rows, D))
    assert graph._auto_plan is not None
    live = graph._auto_plan._live
    assert live is not None
    assert live.is_settled
    assert live._num_replans == 1, "the larger batch was noticed"
