"""Plans keep their budget, are never slower than they must be, and leave nothing behind."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from fuzz.bench import same
from helpers.layer_stacks import D, ListModel, ResidualLayer, SequentialModel, linear_layers, stack_of, tiny_gpt2
from helpers.peaks import tracked_peak
from helpers.plans import change_levels, planner_of, stepped_once
from torch import nn

import graphckpt
from graphckpt import plan
from graphckpt.blocks.forward import BlockForward
from graphckpt.budget import Budget
from graphckpt.errors import ConfigError
from graphckpt.ledger.table import time_of
from graphckpt.planning import PlanError
from graphckpt.planning.options import DeviceMemory, budget_bytes
from graphckpt.planning.planner import Planner
from graphckpt.planning.search import PolicySearch
from graphckpt.units import format_bytes, parse_bytes


class Case:
    """A model with its step, and what such a step really takes."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        self.model = model
        self.step, (self.optimizer,) = stepped_once(model, loss)

    def peak(self) -> int:
        return tracked_peak(self.model, self.step, [self.optimizer])

    def planner(self) -> Planner:
        return planner_of(self.model, self.step)

    def check_plans(self, planner: Planner, count: int) -> list[graphckpt.Plan]:
        """Runs the plans of some budgets, and returns them."""
        plans = []
        for budget in budgets(planner, count):
            plans.append(found := planner.plan(budget))
            with found.apply():
                assert self.peak() == found.predicted_peak_bytes <= budget
        return plans


def stack(num_layers: int = 5, rows: int = 256) -> Case:
    torch.manual_seed(0)
    x = torch.randn(rows, D)
    return Case(SequentialModel(num_layers), lambda model: model(x).square().mean())


def gpt2(*, use_cache: bool = False, vocabulary: int = 32, num_layers: int = 4) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (4, 24))
    model = tiny_gpt2(n_layer=num_layers, vocab_size=vocabulary, use_cache=use_cache)
    return Case(model, lambda model: model(input_ids=ids, labels=ids).loss)


@pytest.fixture(scope="module", params=[gpt2, stack], ids=["gpt2", "sequential"])
def known(request: pytest.FixtureRequest) -> tuple[Case, Planner]:
    case = request.param()
    return case, case.planner()


@pytest.fixture(scope="module")
def planned() -> tuple[Case, Planner]:
    case = stack()
    return case, case.planner()


def budgets(planner: Planner, count: int) -> list[int]:
    low, high = planner.floor.peak, planner.plain.peak
    return [low + (high - low) * n // (count - 1) for n in range(count)]


# ---- the promise


def test_a_plan_takes_what_it_says_and_never_more_than_the_budget(known: tuple[Case, Planner]) -> None:
    case, planner = known
    policies = {tuple(row.option for row in found.rows) for found in case.check_plans(planner, 6)}
    assert len(policies) > 2, "budgets lead to plans that differ"


def test_a_larger_budget_is_never_slower(known: tuple[Case, Planner]) -> None:
    _, planner = known
    seconds = [planner.plan(budget).predicted_step_seconds for budget in budgets(planner, 40)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(seconds))


def test_no_uniform_policy_that_fits_is_faster(known: tuple[Case, Planner]) -> None:
    _, planner = known
    uniform = planner.search.uniform()
    assert len(uniform) == len(planner.measured.options)
    for budget in budgets(planner, 20):
        chosen = planner.search.fastest(budget)
        for choice in uniform:
            assert choice.peak > budget or chosen.seconds <= choice.seconds + 1e-12


def test_the_front_holds_plans_of_which_none_is_better_in_both(known: tuple[Case, Planner]) -> None:
    _, planner = known
    front = planner.search.pareto()
    assert front[0].peak == planner.floor.peak
    assert all(a.peak < b.peak and a.seconds > b.seconds for a, b in itertools.pairwise(front))
    for choice in front:
        assert planner.search.fastest(choice.peak).seconds <= choice.seconds + 1e-12


def test_below_the_floor_the_message_says_how_low_it_can_be_and_why(known: tuple[Case, Planner]) -> None:
    case, planner = known
    floor = planner.floor.peak
    least = planner.plan(floor)
    with pytest.raises(PlanError) as error:
        planner.plan(floor - 1)
    text = str(error.value)
    assert text.startswith(
        f"memory_budget {floor - 1} B: no plan fits · the lowest possible peak is {floor} B, reached "
    )
    assert f"{floor} B, reached {time_of(least.binding)}; " in text
    with pytest.raises(
        PlanError, match=f"^memory_budget {format_bytes(floor // 2)}: .* is {format_bytes(floor)}, reached"
    ):
        planner.plan(floor // 2)
    _, _, size = text.partition("a smaller batch, or a larger budget: ")
    assert floor <= parse_bytes(size.split("'")[1]) <= 1.02 * floor
    assert size.endswith(", or 'min'")
    with least.apply():
        assert case.peak() == floor == least.floor_bytes


def test_a_floor_that_the_head_sets_is_mended_there() -> None:
    planner = gpt2(vocabulary=2000, num_layers=2).planner()
    with pytest.raises(PlanError, match=r"reached in the head and the loss, after transformer\.h\.1; .* and `Tiles`"):
        planner.plan(planner.floor.peak - 1)


def test_one_measurement_gives_the_same_plan_each_time(planned: tuple[Case, Planner]) -> None:
    case, planner = planned
    again = Planner(PolicySearch(planner.measured), model=case.model)
    for budget in budgets(planner, 5):
        assert planner.plan(budget) == planner.plan(budget) == again.plan(budget)


def test_a_plan_next_to_the_plain_one_is_tried_though_it_seems_a_little_too_large(known: tuple[Case, Planner]) -> None:
    _, planner = known
    search, plain = PolicySearch(planner.measured), planner.plain.plan
    one = [(*plain[:b], o, *plain[b + 1 :]) for b in range(len(plain)) for o in range(1, len(planner.measured.options))]
    fastest = min(map(search.evaluate, one), key=lambda choice: (choice.seconds, choice.peak))
    proposed = search.hopeful(int(0.998 * fastest.peak))
    assert proposed is not None
    assert proposed.seconds <= fastest.seconds
    assert proposed.key not in search._ran
    far = search.hopeful(int(0.99 * fastest.peak))
    assert far is None or far.peak <= 1.003 * 0.99 * fastest.peak


def test_a_check_above_the_budget_counts_however_little(
    planned: tuple[Case, Planner], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, planner = planned
    change_levels(monkeypatch, lambda num_bytes: num_bytes + 64)
    budget = budgets(planner, 3)[1]
    for limit in (budget, plan(case.model, case.step, memory_budget=budget, check=False).predicted_peak_bytes):
        found = plan(case.model, case.step, memory_budget=limit)
        assert found.correction_bytes in (0, 64)
        assert found.predicted_peak_bytes + 64 - found.correction_bytes <= limit
        assert found.plain_peak_bytes == planner.plain.peak, "which has run, and is not what the plan was off by"
    least = plan(case.model, case.step, memory_budget="min")
    assert least.correction_bytes == 64
    assert least.predicted_peak_bytes == least.floor_bytes == least.budget_bytes


def deep_sequence(num_layers: int) -> Case:
    torch.manual_seed(0)
    layers = linear_layers(num_layers)
    x = torch.randn(512, D)
    return Case(nn.Sequential(nn.Linear(D, D), layers), lambda model: model(x).square().mean())


def test_below_the_floor_of_a_sequence_the_message_names_what_takes_less() -> None:
    case = deep_sequence(64)
    floor = plan(case.model, case.step, memory_budget="min").predicted_peak_bytes
    with pytest.raises(PlanError, match=r"no plan fits .* · fix: segments='log' on '1' \(less memory, more time\)"):
        plan(case.model, case.step, memory_budget=int(0.9 * floor))
    with graphckpt.apply(case.model, {"1": {"segments": "log"}}):
        assert case.peak() <= int(0.9 * floor)
    num_bytes = sum(parameter.nbytes for parameter in case.model.parameters())
    with pytest.raises(
        PlanError, match=r"no plan fits .* · fix: a smaller batch, or a larger budget: '[\d.]+\w+', or 'min'$"
    ):
        plan(case.model, case.step, memory_budget=num_bytes)


def test_optimizer_states_that_the_next_update_creates_are_named() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    x = torch.ones(8, 64)

    def notes(optimizer: torch.optim.Optimizer, num_updates: int) -> list[str]:
        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(num_updates):
            step()
        found = plan(model, step, memory_budget="10MiB", candidates=["full"]).notes
        return [note for note in found if "optimizer states" in note]

    (note,) = notes(torch.optim.AdamW(model.parameters()), 0)
    size = sum(2 * weight.nbytes + 4 for weight in model.parameters())  # two moments, and the number of the step
    assert note.startswith(f"{format_bytes(size)} of the peak are optimizer states, which the next update creates")
    assert notes(torch.optim.AdamW(model.parameters()), 1) == []
    assert notes(torch.optim.SGD(model.parameters(), lr=0.1), 0) == []


def test_a_budget_below_the_parameters_is_refused_before_the_step_runs() -> None:
    model = nn.Sequential(ResidualLayer(), ResidualLayer())
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(PlanError, match=r"no plan fits · the parameters alone take .* · fix: a larger budget$"):
        plan(model, lambda: pytest.fail("runs"), memory_budget=num_bytes - 1, select=ResidualLayer)


@pytest.mark.parametrize("share", [lambda weight: weight.data, lambda weight: weight.data[:1].expand(512, 512)])
def test_parameters_that_share_memory_count_once_in_a_budget(share: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = stack_of(lambda: nn.Linear(512, 512, bias=False), 2).requires_grad_(requires_grad=False)
    model[1].weight = nn.Parameter(share(model[0].weight), requires_grad=False)
    x = torch.ones(4, 512, requires_grad=True)
    budget = int(1.05 * tracked_peak(model, lambda: model(x).sum().backward()))
    assert budget < 2 * model[0].weight.nbytes
    found = plan(model, lambda: model(x).sum().backward(), memory_budget=budget, select="*")
    assert found.predicted_peak_bytes <= budget


def test_layers_are_joined_where_the_rules_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = deep_sequence(24)
    alone = plan(case.model, case.step, memory_budget="min", candidates=["full"])
    joined = plan(case.model, case.step, memory_budget="min", candidates=["full", "joined"])
    assert joined.predicted_peak_bytes < 0.7 * alone.predicted_peak_bytes
    assert {row.option for row in alone.rows} <= {"keep", "full"}
    assert "joined" in {row.option for row in joined.rows}
    monkeypatch.setattr(graphckpt.Joined, "check", lambda *_: "units of FSDP2 cannot")
    without = plan(case.model, case.step, memory_budget="min")
    assert without.predicted_peak_bytes == alone.predicted_peak_bytes


# ---- budgets


def test_budgets_of_every_kind(planned: tuple[Case, Planner]) -> None:
    _, planner = planned
    static, plain = planner.measured.model.static_bytes, planner.plain.peak
    memory = DeviceMemory(total=1000, available=99, headroom=9)
    for budget, num_bytes in {
        12 << 20: 12 << 20,
        "12MiB": 12 << 20,
        "max": 90,
        "25%": 250,
        "100%": 1000,
        0.25: int(0.25 * plain),
        1.0: plain,
    }.items():
        assert budget_bytes(budget, memory, plain) == num_bytes, budget
    assert 0 < static < planner.floor.peak < plain


@pytest.mark.parametrize("budget", ["min", "max", "70%", 0.9, "0.9", "1GiB", 1 << 30])
def test_plan_takes_budgets_of_every_kind(budget: Budget) -> None:
    case = stack(num_layers=2, rows=64)
    told = []
    found = plan(case.model, case.step, memory_budget=budget, progress=lambda done, all_runs: told.append(done))
    assert found.predicted_peak_bytes <= found.budget_bytes
    assert told == list(range(1, len(told) + 1))
    assert 1 <= len(told) <= 5, "two equal layers take turns with full, and with up to four levels, found by time"
    assert found.policies or budget not in ("min", 0.9, "0.9")
    with found.apply():
        assert case.peak() == found.predicted_peak_bytes


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("0%", r"memory_budget: expected more than 0% and at most 100% of the device's memory, got '0%' · fix: "),
        ("150%", r"memory_budget: expected more than 0% and at most 100% of the device's memory, got '150%'"),
        (1.5, r"memory_budget: expected a float greater than 0 and at most 1, a share of the plain step's peak, got"),
        ("24.0", r"expected a float greater than 0 and at most 1, .*, got 24\.0 · did you mean '24GiB' or 0.24"),
        (0.0, r"memory_budget: expected a float greater than 0"),
        (float("nan"), r"memory_budget: expected a float greater than 0"),
        *((text, rf"memory_budget: '{text}' is not a memory size") for text in ("", "nan", "inf", "most")),
        ("a%", r"memory_budget: expected a percentage, got 'a%' · fix: '12GiB', '50%' of the device's memory, or 0\.6"),
        (True, r"expected a number of bytes, a size such as '12GiB', '50%', 0\.6, 'max' or 'min', got True"),
        (None, r"memory_budget: expected a number of bytes, .* got None"),
        ("12 G", r"memory_budget: .*unknown unit 'G' · fix: use 'GiB'.*; or '12GiB', '50%' of"),
        (-1, r"memory_budget: expected 0 or more bytes, got -1 · fix: '12GiB'"),
        (60, r"memory_budget: expected at least 1 KiB, got 60 B · did you mean '60GiB' or 0\.6\?"),
        ("12", r"memory_budget: expected at least 1 KiB, got 12 B · did you mean '12GiB' or 0\.12\?"),
        (12e9, r"expected a float .*, got 12000000000\.0 · did you mean the int 12000000000, in bytes\?"),
    ],
)
def test_a_budget_that_cannot_be_read(budget: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(nn.Sequential(ResidualLayer(), ResidualLayer()), lambda: pytest.fail("runs nothing"), memory_budget=budget)


# ---- what is planned


def test_blocks_may_be_named(planned: tuple[Case, Planner]) -> None:
    case, _ = planned
    found = plan(case.model, case.step, memory_budget="min", select=["body.[01]", "body.4"], check=False)
    assert [row.block for row in found.rows] == ["body.0", "body.1", "body.4"]
    by_class = plan(case.model, case.step, memory_budget="min", select=ResidualLayer, check=False)
    assert [row.block for row in by_class.rows] == [f"body.{n}" for n in range(5)]
    assert by_class.predicted_peak_bytes < found.predicted_peak_bytes
    outer = plan(case.model, case.step, memory_budget="min", select=["body.*.up", "body"], check=False)
    assert [row.block for row in outer.rows] == ["body"], "what is in another block is none"
    with pytest.raises(ConfigError, match=r"'layers\.\*' matches no module"):
        plan(case.model, case.step, memory_budget="min", select="layers.*")
    with pytest.raises(ConfigError, match="Linear: no list of layers was found · fix: select="):
        plan(nn.Linear(2, 2), case.step, memory_budget="min")


def test_rules_may_be_named(planned: tuple[Case, Planner]) -> None:
    case, _ = planned
    found = plan(case.model, case.step, memory_budget="min", candidates=["full"], check=False)
    assert {row.option for row in found.rows} <= {"keep", "full"}
    with pytest.raises(ConfigError, match="candidates: expected a rule other than keep, got False · fix: leave it out"):
        plan(case.model, case.step, memory_budget="min", candidates=[False])


def test_a_layer_that_runs_several_times_is_one_block() -> None:
    torch.manual_seed(0)
    layer, first, last, x = ResidualLayer(), nn.Linear(D, D), nn.Linear(D, 2), torch.randn(64, D)
    model = nn.ModuleDict(
        {"first": first, "layers": nn.ModuleList([layer, layer, ResidualLayer(), layer]), "last": last}
    )

    def loss(model: nn.Module) -> torch.Tensor:
        y = model["first"](x)
        for each in (layer, layer, model["layers"][2], layer):
            y = each(y)
        return model["last"](y).square().mean()

    case = Case(model, loss)
    planner = planner_of(model, case.step, "layers.*")
    assert [row.block for row in planner.plan(planner.plain.peak).rows] == ["layers.0", "layers.2"]
    case.check_plans(planner, 4)


def test_a_model_that_runs_twice_before_backward() -> None:
    torch.manual_seed(0)
    model, x = ListModel(), torch.randn(2, 64, D)
    case = Case(model, lambda model: (model(x[0]) * model(x[1])).square().mean())
    planner = case.planner()
    seconds = [found.predicted_step_seconds for found in case.check_plans(planner, 5)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(seconds))
    assert any(len(set(choice.plan)) > 1 for choice in planner.search.baselines), "not only uniform"


@pytest.mark.parametrize("keeps_output", [False, True])
def test_a_cache_of_keys_lives_as_long_as_any_block_that_is_recomputed_with_it(keeps_output: bool) -> None:
    case, ids = gpt2(use_cache=True, num_layers=6), torch.randint(0, 32, (4, 24))

    def step() -> None:
        torch.manual_seed(5)
        output = case.model(input_ids=ids, labels=ids)
        loss = output.loss
        if not keeps_output:
            del output
        loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()

    case.step = step
    planner = case.planner()
    assert not planner.measured.notes
    case.check_plans(planner, 12)


def test_a_step_without_its_blocks_cannot_be_planned(planned: tuple[Case, Planner]) -> None:
    case, _ = planned
    with pytest.raises(PlanError, match="no block ran with gradients enabled · fix: run"):
        plan(case.model, lambda: None, memory_budget="min")
    with pytest.raises(ConfigError, match=r"^plan\.step_fn: expected a function without arguments .* type Tensor · "):
        plan(case.model, torch.ones(99, 99), memory_budget="min")


def test_a_step_that_takes_another_path_each_time_cannot_be_planned() -> None:
    model, x, calls = ListModel(), torch.randn(8, D), []

    def step() -> None:
        calls.append(1)
        y = x
        for layer in model.layers if len(calls) < 4 else reversed(model.layers):
            y = layer(y)
        y.sum().backward()

    with pytest.raises(PlanError, match="calls its blocks in another order each time · fix: plan with one batch"):
        plan(model, step, memory_budget="min")


class Dropped(ListModel):
    """Leaves out some layers at random, as LayerDrop does."""

    def __init__(self, rate: float, draw: Callable[[], float]) -> None:
        super().__init__(num_layers=6)
        self.rate, self.draw = rate, draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            if self.draw() >= self.rate:
                x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), np.random.rand, random.random])
def test_a_step_that_drops_layers_is_planned_as_one_that_calls_all(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, D)
    case = Case(Dropped(0.2, draw), lambda model: model(x).square().mean())

    def step() -> None:
        case.model(x).square().mean().backward()
        case.optimizer.step()
        case.optimizer.zero_grad()

    case.step = step
    for budget in ("min", 0.8, "1GiB"):
        found = plan(case.model, step, memory_budget=budget)
        assert any("it is planned for a step that calls all of them" in note for note in found.notes)
        with found.apply():
            case.model.rate = 0
            assert case.peak() == found.predicted_peak_bytes
            case.model.rate = 0.2
            assert all(case.peak() <= found.predicted_peak_bytes for _ in range(6))
    case.model.rate = 0
    assert not plan(case.model, step, memory_budget="1GiB").notes

    layers_in_turn = itertools.cycle([1, 1, 0, 1, 1])
    case.model.rate, case.model.draw = 0.5, lambda: next(layers_in_turn)
    with pytest.raises(PlanError, match=r"calls its blocks in another order each time · fix: .*layerdrop=0"):
        plan(case.model, step, memory_budget="min")


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("num_tasks", [1, 2])
def test_steps_whose_weights_are_results_of_inner_steps_are_planned(order: int, num_tasks: int) -> None:
    """As in MAML, whose inner steps leave weights with a graph in the place of parameters."""
    torch.manual_seed(0)
    model, x = stack_of(lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), 4), torch.randn(256, 16)

    def adapted_loss(model: nn.Module) -> torch.Tensor:
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(inner, [*weights.values()], create_graph=order == 2)
        pairs = zip(weights.items(), gradients, strict=True)
        weights = {name: weight - 0.05 * gradient for (name, weight), gradient in pairs}
        return torch.func.functional_call(model, weights, (x.flip(0),)).sin().square().mean()

    case = Case(model, lambda model: sum(adapted_loss(model) for _ in range(num_tasks)))
    found = plan(model, case.step, memory_budget="min")
    assert found.predicted_peak_bytes < found.plain_peak_bytes
    with found.apply():
        assert case.peak() == found.predicted_peak_bytes


def test_a_budget_in_which_the_measured_step_stayed_has_a_plan() -> None:
    """Weights that autocast casts are freed at other times under each mix of policies, which no sum of levels shows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, num_hidden_layers=4, **sizes)).train()
    ids = torch.randint(3, 64, (2, 12))

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    case = Case(model, loss)
    with graphckpt.apply(model, {"bert.encoder.layer.*": True}):
        recomputed = case.peak()
    for budget in (recomputed, "min"):
        found = plan(model, case.step, memory_budget=budget)
        assert found.predicted_peak_bytes <= recomputed
        with found.apply():
            assert case.peak() <= recomputed
    unchecked = plan(model, case.step, memory_budget=recomputed, check=False)
    assert unchecked.predicted_peak_bytes <= recomputed
    with pytest.raises(PlanError, match="the lowest possible peak is"):
        plan(model, case.step, memory_budget=int(0.95 * recomputed))


# ---- nothing is left behind


def everything(case: Case) -> dict[str, Any]:
    optimizer = case.optimizer
    return copy.deepcopy(
        {
            "state": case.model.state_dict(),
            "grads": {name: p.grad for name, p in case.model.named_parameters()},
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "training": [m.training for m in case.model.modules()],
        }
    )


def is_clean(model: nn.Module) -> bool:
    return not any(
        isinstance(m.forward, BlockForward) or "forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks
        for m in model.modules()
    )


@pytest.mark.parametrize("fails_at", [None, 1, 2, 5], ids=lambda n: "" if n is None else f"fails_at_{n}")
@pytest.mark.parametrize("is_first", [True, False], ids=["before_any_step", "later"])
def test_planning_changes_nothing(is_first: bool, fails_at: int | None) -> None:
    torch.manual_seed(0)
    x, calls = torch.randn(64, D), []
    case = Case(ListModel(num_layers=2), lambda model: model(x).square().mean())
    if not is_first:
        case.step()
        case.model(x).sum().backward()
        case.model.embed.weight.grad = None  # gradients of both kinds
    grads = {name: p.grad for name, p in case.model.named_parameters()}
    torch.manual_seed(7)
    before = everything(case)

    def step() -> None:
        calls.append(1)
        if fails_at == 1 == len(calls):
            raise RuntimeError("out of data")
        F.dropout(case.model(x)).square().mean().backward()
        case.optimizer.step()
        if len(calls) == fails_at:
            raise RuntimeError("out of data")
        case.optimizer.zero_grad(set_to_none=len(calls) % 2 == 0)

    if fails_at is None:
        plan(case.model, step, memory_budget="min")
    else:
        with pytest.raises(RuntimeError, match="out of data"):
            plan(case.model, step, memory_budget="min")
    assert same(before, everything(case))
    assert all(p.grad is grads[name] for name, p in case.model.named_parameters()), "the same tensors, not only bits"
    assert is_clean(case.model)


def test_apply_leaves_the_model_clean(planned: tuple[Case, Planner]) -> None:
    case, planner = planned
    found = planner.plan(planner.floor.peak)
    with found.apply():
        assert not is_clean(case.model)
    assert is_clean(case.model)
    handle = found.apply()
    with pytest.raises(ConfigError, match="already has a policy"):
        found.apply()
    handle.remove()
    handle.remove()
    assert is_clean(case.model)
    other = copy.deepcopy(case.model)
    with found.apply(other):
        assert is_clean(case.model)
        assert not is_clean(other)
    with pytest.raises(ConfigError, match="matches no module"):
        found.apply(nn.Linear(2, 2))
