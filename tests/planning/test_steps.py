"""A step on a device that is not there takes the bytes that it takes here, and equal layers are run once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.layer_stacks import linear_layers
from helpers.modules import as_module
from helpers.plans import measured_step
from torch import nn

import graphckpt
from graphckpt import ConfigError, progress
from graphckpt.cli import main
from graphckpt.planning import sweep
from graphckpt.planning.candidates import NEAR, options
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_step import find_blocks
from graphckpt.planning.planner import Planner
from graphckpt.planning.search import CopyRates, PolicySearch
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import FakeStep, RealStep, made_step
from graphckpt.planning.sweep import measure
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

StepParts = tuple[nn.Module, torch.optim.Optimizer | None, Callable[[], None]]


def made(num_layers: int = 7, vocab_size: int = 64) -> StepParts:
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocab_size, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(2, 16, dtype=torch.long)

    def step() -> None:
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def simulate(build: Callable[[], StepParts] = made, profile: str = "cpu") -> tuple[FakeStep, nn.Module, list[int]]:
    """Returns a simulated step, its model, and the number of blocks of each sample that is taken of it."""
    device, runs = FakeDevice(load_profile(profile)), []
    with device:
        model, optimizer, step = build()
    fake = FakeStep(device, model, step, optimizer)
    sample = fake.sample
    fake.sample = lambda blocks, chosen: runs.append(len(blocks.names)) or sample(blocks, chosen)
    return fake, model, runs


def test_equal_layers_are_run_in_a_shorter_stack() -> None:
    fake, model, runs = simulate()
    known = measure(fake, Blocks(find_blocks(model, None)), NEAR)
    few = len(NEAR)
    assert runs == [7, 7, few, few], "all layers kept and recomputed, and as many as there are options, twice"
    assert len(model.model.layers) == 7
    assert not known.notes


def test_a_step_that_needs_all_of_its_layers_is_measured_with_all_of_them() -> None:
    @as_module(lambda: {"layers": nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(7))})
    def Counts(self: Any, x: torch.Tensor) -> torch.Tensor:
        for number in range(7):
            x = self.layers[number](x)
        return x.sum()

    def build() -> StepParts:
        model, x = Counts(), torch.ones(2, 8)
        return model, None, lambda: model(x).backward()

    fake, model, runs = simulate(build)
    known = measure(fake, Blocks(find_blocks(model, None)), options(False, ["full"]))
    assert runs[0] == runs[-1] == 7
    assert len(model.layers) == len(known.names) == 7


def test_the_ops_of_a_few_equal_layers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_TIMED", 2)
    model, _, step = made()
    real, timed = RealStep(model, step), []
    ops = real.ops
    real.ops = lambda blocks: timed.append(blocks.names) or ops(blocks)
    measure(real, Blocks(find_blocks(model, None)), NEAR)
    assert [len(names) for names in timed] == [2], "of seven"


def test_a_shorter_stack_shows_where_autocast_frees_its_copies_of_weights() -> None:
    def build() -> StepParts:
        model, optimizer, _ = made(vocab_size=4096)  # so that the loss sets the peak
        x = torch.ones(2, 64, dtype=torch.long)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    fake, model, _ = simulate(build, "h200")
    blocks = Blocks(find_blocks(model, None))
    known = measure(fake, blocks, options(False, ["full"]))
    for plan in ([1] * 7, [0, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]):
        chosen = [own[option] for own, option in zip(known.options_of, plan, strict=True)]
        really = fake.sample(blocks, chosen).peak_bytes
        assert abs(known.model.peak(plan) - really) <= 0.001 * really, plan


def test_a_fake_step_predicts_the_bytes_of_the_real_one() -> None:
    by_hand = options(False, ["full", *({"rule": "selective", "save": save} for save in ("attention", "matmul"))])
    by_hand += options(False, [{"rule": "selective", "save": "matmul+attention"}])[1:]  # levels depend on times
    fake, model, _ = simulate()
    known = measure(fake, Blocks(find_blocks(model, None)), by_hand)
    model, _, step = made()
    really = measured_step(model, step, options=by_hand)
    for plan in ([0] * 7, [1] * 7, [0, 1, 2, 3, 4, 1, 0], [4, 4, 0, 0, 1, 1, 3]):
        assert known.model.peak(plan) == really.model.peak(plan)


def measured_with_offload() -> tuple[MeasuredStep, CopyRates]:
    target = load_profile("h200")
    step, model, _ = simulate(profile="h200")
    known = measure(step, Blocks(find_blocks(model, None)), options("cpu", ["full"]))
    return known, CopyRates(target.copy_out, target.copy_in)


def test_moving_bytes_beside_the_computation_costs_less_than_running_again() -> None:
    known, rates = measured_with_offload()
    near = Planner(PolicySearch(known), device="h200")
    far = Planner(PolicySearch(known, rates), device="h200")
    for share in (0.9, 0.7, 0.5):
        budget = int(share * near.plain.peak)
        if budget < near.floor.peak:
            continue
        one, other = near.plan(budget), far.plan(budget)
        assert other.predicted_step_seconds <= one.predicted_step_seconds
        assert other.predicted_peak_bytes <= budget


def test_no_more_is_offloaded_than_the_budget_of_host_memory() -> None:
    known, rates = measured_with_offload()

    def moved_bytes(host_budget: int | None) -> int:
        planner = Planner(PolicySearch(known, rates, host_budget))
        static = known.model.static_bytes
        plan = planner.plan(static + 7 * (planner.plain.peak - static) // 10)
        assert plan.predicted_peak_bytes <= plan.budget_bytes
        return sum(row.moved_bytes for row in plan.rows)

    unlimited = moved_bytes(None)
    assert 0 < moved_bytes(unlimited - 1) < unlimited
    assert moved_bytes(0) == 0


def test_plan_simulates_an_absent_device() -> None:
    def build(_: object = None) -> tuple[nn.Module, Callable[[], None]]:
        return made(num_layers=3)[::2]

    few = {"candidates": ["full"]}
    plan = graphckpt.plan(build, memory_budget="min", device="h200", **few)
    assert plan.is_simulated
    assert plan.policies
    assert plan.predicted_peak_bytes == plan.budget_bytes < plan.plain_peak_bytes
    whole = graphckpt.plan(build, memory_budget=1.0, device="h200", **few)
    assert whole.budget_bytes == plan.plain_peak_bytes
    assert "on h200 (simulated)" in str(plan)
    fit = graphckpt.fit(build, batch_sizes=[4], memory_budget="1GiB", device="h200", **few)
    assert fit.rows[0].plain_peak_bytes == plan.plain_peak_bytes, "no second way to simulate a step"
    with pytest.raises(ConfigError, match="expected a model, since the plan is simulated on h200"):
        plan.apply()
    model, step = build()
    with plan.apply(model):
        step()
    half = graphckpt.plan(build, memory_budget="50%", device="h100", **few)
    assert half.budget_bytes == 40_000_000_000
    least = graphckpt.plan(build, memory_budget="max", device="rtx4090", **few)
    assert least.budget_bytes + least.headroom_bytes == 24_000_000_000


def test_a_function_may_build_the_model_of_a_real_step_too() -> None:
    plan = graphckpt.plan(lambda: made()[::2], memory_budget="1GiB")
    assert not plan.is_simulated
    assert plan.model is not None


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (lambda: made()[::2], {}, r"plan.model: expected a function that builds it, for device='h200', got an object"),
        (
            lambda: (lambda: 1,),
            {},
            r"plan.model: expected a model and a step function, got int · fix: end the function",
        ),
        (lambda: (lambda: made()[::2],), {"compile": True}, r"compile: its effect is not known on an absent device"),
        (lambda: (lambda: made()[::2],), {"device": "h2000"}, r"did you mean 'h200'"),
        (lambda: (made()[0],), {"device": None}, r"plan.step_fn: expected a function without arguments"),
    ],
)
def test_faults_of_a_simulated_plan_are_one_clear_error(
    arguments: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        graphckpt.plan(*arguments(), memory_budget="max", **{"device": "h200"} | options)


def test_the_command_plans_a_config_for_another_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.config.n_layer=4", "train.train_micro_batch_size=4", f"train.output_dir={tmp_path / 'none'}"]
    saved, drawn = tmp_path / "plan.yaml", tmp_path / "front.svg"
    flags = ["--device", "h200", "--memory-budget", "0.9", "--save", str(saved), "--sweep", str(drawn)]
    words.append("train.activation_checkpoint.compile=True")
    code = main(["plan", "--config-file", "configs/quickstart.py", *flags, *words])
    printed, err = capsys.readouterr()
    assert code == 0, printed
    assert "--memory-budget" not in err, "it is given"
    assert "on h200 (simulated)" in printed
    assert "compile: its effect is not known without the device; planned without" in " ".join(printed.split())
    assert "all full" in printed
    assert drawn.stat().st_size > 0
    assert not (tmp_path / "none").exists(), "nothing is trained, so nothing is written"
    plan = Plan.load(saved)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert set(plan.policies) <= {f"transformer.h.{n}" for n in range(4)}


@pytest.mark.parametrize("patience", [0.0, 1e6])
def test_the_command_says_what_takes_long(
    patience: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", patience)
    words = ["model.config.n_layer=2", "train.train_micro_batch_size=2"]
    assert main(["plan", "--config-file", "configs/quickstart.py", "--device", "h200", *words]) == 0
    err = capsys.readouterr().err
    said = [line.partition(" s: ")[2] for line in err.splitlines() if line.startswith("planning, ")]
    assert (said[-1:] == ["choosing the policies of 2 blocks"]) is (patience == 0.0)
    assert any(line.startswith("simulated run ") for line in said) is (patience == 0.0)


@pytest.mark.slow
def test_the_command_cuts_the_head_in_slices(tmp_path: Path) -> None:
    words = ["model.config.n_layer=2", "train.train_micro_batch_size=16", "task.loss_head=True"]
    saved = tmp_path / "plan.yaml"
    flags = ["--device", "h200", "--memory-budget", "min", "--save", str(saved)]
    floors = []
    for head in ([], ["--head", "loss_head=tiles:4:sum"], ["--head", "loss_head=tiles:16:sum"]):
        assert main(["plan", "--config-file", "configs/quickstart.py", *flags, *head, *words]) == 0
        floors.append(Plan.load(saved).predicted_peak_bytes)
    assert floors[0] > 1.2 * floors[1] >= 1.2 * floors[2]
    assert Plan.load(saved).policies["loss_head"]["activation_checkpointing"]["num_tiles"] == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "loss_head"], "--head: expected NAME=RULE, got 'loss_head' · fix: --head loss_head=tiles:8:sum"),
        (["--head", "loss_head=tiles:8:avg"], "reduce: expected 'sum', 'mean' or None, got 'avg'"),
        (["--head", "loss_head=full:8"], "rule 'full': expected no setting, got 'full:8' · fix: use 'full'"),
        (["--head", "loss_head=tiles:8:sum"], "no block is called 'loss_head'"),
        (["--memory-budget", "1MiB", "model.config.n_layer=2"], "no plan fits"),
        (
            ["--device", "h200", "--memory-budget", "0.001", "model.config.n_layer=2"],
            "before the first block: weights, optimizer state, inputs, workspaces and what runs before it · fix: ",
        ),
        (["--memory-budget", "24.0"], "memory_budget: expected a float greater than 0 and at most 1, a share of the"),
        (["model.config.n_layers=2"], "n_layers"),
    ],
)
def test_faults_are_one_clear_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config-file", "configs/quickstart.py", "train.train_micro_batch_size=2", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_tensor_that_a_step_uses_late_is_alive_before() -> None:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = linear_layers(4, 256, nn.ReLU)
        optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.zeros(4096, 256)
        average = [parameter.detach().clone() for parameter in model.parameters()]

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)

        return model, step

    plan = graphckpt.plan(make, device="rtx3060", memory_budget=1.0, candidates=["full"])
    run = made_step(make, FakeDevice(load_profile("rtx3060")), "make")[0].run()
    assert plan.plain_peak_bytes == plan.predicted_peak_bytes == run.peak_bytes
    assert plan.correction_bytes == 0
