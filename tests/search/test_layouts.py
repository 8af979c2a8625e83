"""``graphckpt fit --world-size`` compares layouts of a config over the ranks of a cluster that is not there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.thinning import slow_unless

from graphckpt.cli import main
from graphckpt.config import layouts as layouts_module
from graphckpt.config.layout_checks import LayoutChecks
from graphckpt.config.layouts import compare_layouts
from graphckpt.config.source import ConfigSource
from graphckpt.errors import ConfigError, PlanError
from graphckpt.search.layout_result import LayoutComparison
from graphckpt.search.layouts import Layout, StateBytes, layouts_of, parse_layout
from graphckpt.simulation.cluster_profile import load_cluster
from graphckpt.simulation.profile import load_profile
from graphckpt.units import parse_bytes

GPT2 = "configs/quickstart.py"
LLAMA = "configs/llama_pretrain.py"
DATA = ["data.seq_length=16", "data.vocab_size=8192"]
SMALL = {
    GPT2: ["model.config.n_layer=2", "model.config.n_embd=32", "model.config.n_head=4", *DATA],
    LLAMA: [
        *("model.config.num_hidden_layers=8", "model.config.hidden_size=32", "model.config.intermediate_size=64"),
        *("model.config.num_attention_heads=8", "model.config.num_key_value_heads=2", *DATA),
    ],
}
SIZES = ["train.train_micro_batch_size=4", "train.global_batch_size=32"]
H100 = load_profile("h100")


def checks_of(
    config: str = LLAMA, words: Sequence[str] = (), memory: str = "80GiB", cluster: str = "dgx-h100"
) -> LayoutChecks:
    with ConfigSource(config, [*SMALL[config], *SIZES, *words]).checked() as run:
        return LayoutChecks.of(run, H100, load_cluster(cluster), parse_bytes(memory))


def test_all_layouts_have_the_world_size() -> None:
    layouts = layouts_of(12)
    assert len(set(layouts)) == len(layouts) == 18 * 4
    assert {layout.num_ranks for layout in layouts} == {12}
    assert all(parse_layout(str(layout), 12) == layout for layout in layouts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=8 ep=8", "layout 'dp=8 ep=8': expected sizes of dp, tp, pp and zero, got 'ep=8'"),
        ("", "expected sizes of dp, tp, pp and zero, got ''"),
        ("dp=8 zero=4", "zero: expected an int from 0 to 3, got '4'"),
        ("dp=0", "dp: expected an int from 1 to 8, got '0'"),
        ("dp=-8", "dp: expected an int from 1 to 8, got '-8'"),
        ("dp=8 dp=8", "expected dp once, got it twice"),
        ("dp=4", "expected sizes whose product is the world size 8, got 4"),
    ],
)
def test_a_layout_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r" · fix: ") as error:
        parse_layout(text, 8)
    assert message in str(error.value)


@pytest.fixture(scope="module")
def llama() -> LayoutChecks:
    return checks_of()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(8, zero_stage=3), None),
        (Layout(4, 2, zero_stage=1), None),
        (Layout(2, 1, 4), None),
        (Layout(1, 8), "cannot be sharded over 8 processes: num_key_value_heads is 2 · fix: use 8"),
        (Layout(1, 3), "num_attention_heads is 8 · fix: use 9"),
        (Layout(1, 16), "tp=16: tensor parallelism across nodes; a node of dgx-h100 has 8 ranks"),
        (Layout(1, 1, 8), None),
        (Layout(1, 1, 16), "dist.pipeline_parallel_size: 16, and the model has 8 layers · fix: use 8 or less"),
        (Layout(4, 1, 16), "train.dist.pipeline_parallel_size: 16 stages need as many micro-batches"),
        (Layout(2, 2, 2), "train.dist.tensor_parallel_size: 2 is not supported with a pipeline"),
        (Layout(4, 1, 2, 3), "True is not supported with dist.pipeline_parallel_size above 1"),
        (Layout(1, 2, zero_stage=1), "train.zero_optimization.enabled: True, and dist.data_parallel_size is 1"),
        (Layout(64), "train.global_batch_size: expected a multiple of micro batch 4 x data_parallel_size 64, got 32"),
        (Layout(5), "train.global_batch_size: expected a multiple of micro batch 4 x data_parallel_size 5"),
    ],
    ids=str,
)
def test_arithmetic_rules_out_layouts(llama: LayoutChecks, layout: Layout, reason: str | None) -> None:
    given = llama.reason_against(layout)
    assert given is None if reason is None else reason in str(given)


def test_a_vocabulary_that_does_not_divide() -> None:
    checks = checks_of(GPT2, ["model.config.vocab_size=8191"])
    assert "vocab_size is 8191 · fix: use 8192" in str(checks.reason_against(Layout(1, 2)))


def test_micro_batches_divide_and_fill_the_pipeline(llama: LayoutChecks) -> None:
    sizes = {
        layout: llama.train_of(layout).sizes for layout in (Layout(8), Layout(16), Layout(1, 1, 8), Layout(4, 1, 8))
    }
    assert {(size.micro_batch, size.accumulation) for size in sizes.values()} == {(4, 1), (2, 1), (4, 8), (1, 8)}
    assert {size.global_batch for size in sizes.values()} == {32}


def test_states_are_those_of_the_optimizer_and_sharded() -> None:
    """AdamW: 4 bytes of weight, 4 of gradient, 8 of moments and a few for the number of its steps."""
    checks = checks_of(memory="3MiB")
    with ConfigSource(LLAMA, [*SMALL[LLAMA]]).checked() as run, torch.device("meta"):
        model: Any = run.model()
        num_weights = sum(weight.numel() for weight in model.parameters())
        # Transformers 5.17 has no plan for the embedding of a model whose head is its own, which is replicated then.
        replicated = 0 if "model.embed_tokens" in model._tp_plan else model.get_input_embeddings().weight.numel()
    plain, halved = 16 * num_weights, 16 * (num_weights - replicated)
    whole = str(checks.reason_against(Layout(8)))
    assert "states of" in whole
    states = checks._states_of_rank(Layout(8))
    assert (states.weights, states.gradients) == (4 * num_weights, 4 * num_weights)
    assert plain <= sum(states) < 1.01 * plain
    by_tensors = sum(checks._states_of_rank(Layout(4, 2)))
    assert 0.5 * halved < by_tensors - 16 * replicated < 0.52 * halved  # the norms are replicated
    assert sum(checks._states_of_rank(Layout(4, 1, 2))) < 0.6 * plain
    assert checks.reason_against(Layout(8, zero_stage=3)) is None
    assert whole.endswith(f"gradients {4 * num_weights / 2**20:.2f} MiB, optimizer {8 * num_weights / 2**20:.2f} MiB")


def test_states_by_the_stage_of_zero() -> None:
    states = StateBytes(weights=80, gradients=80, optimizer=160)
    once = [states.least_of_rank(stage, 8, accumulation=1) for stage in range(4)]
    several = [states.least_of_rank(stage, 8, accumulation=2) for stage in range(4)]
    assert once == [320, 110, 110, 40]
    assert several == [320, 190, 120, 40]


def test_a_pipeline_is_estimated_by_its_largest_stage() -> None:
    """Its last stage has the head, beside which a layer is small: 8 stages of one layer wait for it."""
    checks = checks_of(LLAMA, ["model.config.hidden_size=1024", "data.seq_length=1024"])
    plain, long = (checks.estimated_seconds(layout) for layout in (Layout(8), Layout(1, 1, 8)))
    assert long > 2.4 * plain  # 2.0 if all stages had equal weights


def test_equal_stages_are_simulated_once(llama: LayoutChecks) -> None:
    assert llama.equal_stages(Layout(1, 1, 4)) == [(0, 1, 2), (3,)]
    assert llama.equal_stages(Layout(4, 2)) == [(0,)]


def compared(world_size: int, *layouts: str, config: str = GPT2, **options: Any) -> LayoutComparison:
    words = [*SMALL[config], *SIZES]
    values = {"device": H100, "world_size": world_size, "layouts": layouts or None, **options}
    return compare_layouts(config, words, **values)


@pytest.fixture(scope="module")
def four() -> LayoutComparison:
    return compared(4, "dp=4 zero=3", "dp=2 pp=2", "tp=2 pp=2", options={"candidates": ["full"]})


def test_layouts_are_compared(four: LayoutComparison) -> None:
    assert [str(row.layout) for row in four.rows] == ["dp=4 zero=3", "dp=2 pp=2"]
    best, pipeline = four.rows
    assert four.best is best
    assert best.seconds < pipeline.seconds
    assert best.samples_per_second == pytest.approx(32 / best.seconds)
    assert [row.micro_batch * row.accumulation * row.layout.data_parallel_size for row in four.rows] == [32, 32]
    assert [stage.stages for stage in pipeline.stages] == [(0,), (1,)]
    assert pipeline.slowest.bubble_seconds > 0 == best.slowest.bubble_seconds
    assert pipeline.peak_bytes == max(stage.plan.predicted_peak_bytes for stage in pipeline.stages)
    assert pipeline.policies == best.policies == "2 keep"
    (skipped,) = four.ruled_out
    assert skipped.layout == Layout(1, 2, 2)


def test_a_row_is_the_plan_of_its_layout(four: LayoutComparison, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--config-file", GPT2, "--device", "h100", "--candidates", "full", "--json", *SMALL[GPT2], *SIZES]
    assert main(["plan", *flags, *Layout(4, zero_stage=3).overrides()]) == 0
    plan = json.loads(capsys.readouterr().out)
    row = four.rows[0].to_dict()
    (stage,) = row["stages"]
    assert plan["seconds"] == row["seconds"]
    assert plan["exposed_seconds"] == row["exposed_seconds"] > 0
    assert [plan[name] for name in ("allocated_bytes", "reserved_bytes", "parts", "policies")] == [
        stage[name] for name in ("allocated_bytes", "reserved_bytes", "parts", "policies")
    ]


def test_states_by_arithmetic_are_a_lower_bound(four: LayoutComparison) -> None:
    checks = checks_of(GPT2)
    for row in four.rows:
        least = checks._least_bytes(row.layout, checks._states_of_rank(row.layout))
        assert 0 < least <= max(stage.plan.floor_bytes for stage in row.stages)


def test_the_command_trains_with_the_layout(four: LayoutComparison) -> None:
    words = four.command(four.best)
    assert words[:7] == ["torchrun", "--nproc-per-node", "4", "-m", "graphckpt", "train", "--config-file"]
    with ConfigSource(words[7], words[8:]).checked() as run:
        train = run.train
    assert (train.dist.data_parallel_size, train.zero_optimization.active_stage) == (4, 3)
    assert (train.sizes.micro_batch, train.sizes.global_batch) == (4, 32)
    section = train.activation_checkpoint
    assert (section.memory_budget, section.candidates) == ("max", ["full"])
    on_nodes = replace(four, cluster=replace(four.cluster, ranks_per_node=3))
    assert on_nodes.command(four.best)[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]


def test_pareto_optimal_rows(four: LayoutComparison) -> None:
    best, pipeline = four.rows
    assert best in four.front
    assert (pipeline in four.front) == (pipeline.peak_bytes < best.peak_bytes)
    slower = replace(four, rows=(best, replace(best, stages=pipeline.stages)))
    assert len(slower.front) == 1 + (pipeline.peak_bytes < best.peak_bytes)


def test_the_table_has_the_reasons_and_the_command(four: LayoutComparison) -> None:
    text = str(four)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("dp=4 zero=3 *", "4 x 2", "32 samples in an update", "ruled out: 1", "tp=2 pp=2: train.dist", "\\\n"):
        assert part in text


@pytest.mark.parametrize("world_size", [pytest.param(8, marks=slow_unless(False))])
def test_all_layouts_of_a_llama(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(layouts_module, "MOST_SIMULATED", 6)
    comparison = compared(world_size, config=LLAMA, progress=lines.append, options={"candidates": ["full"]})
    seconds = [row.seconds for row in comparison.rows]
    assert seconds == sorted(seconds)
    assert len(comparison.rows) == 6
    skipped = len(comparison.ruled_out) + len(comparison.left_out)
    assert len(comparison.rows) + skipped == len(layouts_of(world_size))
    assert all("slower than the 6 that were simulated" in each.reason for each in comparison.left_out)
    assert any(line.startswith("layout 6 of 6, ") for line in lines)


def test_a_layout_that_does_not_fit_is_ruled_out_by_its_plan() -> None:
    with pytest.raises(PlanError) as error:
        compared(4, "dp=4", memory_budget="5MiB", options={"candidates": ["full"]})
    assert "world_size 4: no layout fits into 5.00 MiB on h100" in str(error.value)
    assert "dp=4: " in str(error.value)


def test_policies_are_measured_where_not_everything_fits() -> None:
    lines: list[str] = []
    options = {"progress": lines.append, "options": {"candidates": ["full"]}}
    (row,) = compared(2, "dp=2", **options).rows
    num_runs = sum("simulated run" in line for line in lines)
    lines.clear()
    budget = row.peak_bytes - 1
    (tight,) = compared(2, "dp=2", memory_budget=budget, **options).rows
    assert row.policies == "2 keep"
    assert "full" in tight.policies
    assert tight.peak_bytes <= budget
    assert tight.seconds > row.seconds
    assert sum("simulated run" in line for line in lines) > num_runs > 0


@pytest.mark.parametrize("world_size", [1, 0, True, 2.0])
def test_a_world_size_that_is_not_one(world_size: object) -> None:
    with pytest.raises(ConfigError, match="world_size: expected an int of 2 or more, got"):
        compared(world_size)


COMMAND = ["fit", "--config-file", GPT2, "--device", "h100", *SMALL[GPT2], *SIZES]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layout", "dp=4"], "--layout: expected --world-size with it, got none · fix: --world-size 64"),
        (["--world-size", "1"], "world_size: expected an int of 2 or more, got 1"),
        (["--world-size", "4", "--layout", "dp=3"], "layout 'dp=3': expected sizes whose product is the world size 4"),
        (["--world-size", "4", "--batch-sizes", "1,2"], "--batch-sizes: not supported with --world-size"),
        (["--world-size", "4", "--plot", "a.png"], "--plot: not supported with --world-size · fix: leave it out"),
        (
            ["--world-size", "4", "--global-batch-size", "64"],
            "--global-batch-size: not supported with --world-size · fix: train.global_batch_size=64",
        ),
        (["--world-size", "4", "--sequence-lengths", "64"], "fix: data.seq_length=64"),
        (["--world-size", "4", "--memory-budget", "min"], "memory_budget: expected a budget independent of"),
        (["--world-size", "4", "--cluster", "dgx"], "cluster: unknown profile 'dgx'"),
        (["--world-size", "4", "task.loss_head=True"], "dp=2: task.loss_head: expected one process, got 2"),
    ],
)
def test_the_command_refuses(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "task.loss_head=True" in flags:
        flags = ["--world-size", "2", "--layout", "dp=2", "task.loss_head=True"]
    assert main([*COMMAND, *flags]) == 2
    assert message in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "2", "--layout", "dp=2", "--layout", "tp=2 zero=1", "--candidates", "full", "--json"]
    assert main([*COMMAND, *words]) == 0
    values = json.loads(capsys.readouterr().out)
    (row,), (skipped,) = values["rows"], values["ruled_out"]
    assert values["best"] == row["layout"] == "dp=2"
    assert row["is_pareto_optimal"] is True
    assert row["samples_per_second"] == 2 * row["samples_per_second_of_rank"] > 0
    assert (row["micro_batch_size"], row["accumulation_steps"], values["global_batch_size"]) == (4, 4, 32)
    assert (skipped["tensor_parallel_size"], skipped["zero_stage"]) == (2, 1)
    assert "one process would hold all of it" in skipped["reason"]
    assert "train.dist.data_parallel_size=2" in values["command"]


def test_help_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = capsys.readouterr().out
    assert "--world-size N" in text
    assert "--layout SIZES" in text
