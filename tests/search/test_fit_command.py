"""``graphckpt fit`` finds batch sizes for a config and a device that is not there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import graphckpt
from graphckpt import Plan, progress
from graphckpt.blocks.apply import policies_from_file
from graphckpt.cli import main
from graphckpt.config.run import fake_steps_from
from graphckpt.simulation.profile import load_profile
from graphckpt.units import format_bytes

CONFIG = ["--config-file", "configs/quickstart.py", "--device", "h200"]
SMALL = ["model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=4", "data.seq_length=64"]
FULL = "train.activation_checkpoint.candidates=[full]"  # one policy where a test is not about what is chosen


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    code = main(["fit", *CONFIG, *words, *SMALL])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed


def test_the_command_finds_the_largest_and_the_fastest_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    drawn = tmp_path / "fit.png"
    flags = ["--memory-budget", "200MiB", "--global-batch-size", "1024", "--plot", str(drawn)]
    printed = run(*flags, FULL, capsys=capsys)
    assert "largest batch: " in printed.out
    assert "with everything kept" in printed.out
    assert "fastest: " in printed.out
    assert "global batch 1024: " in printed.out
    assert f"drawn: {drawn}" in printed.out
    assert drawn.stat().st_size > 0
    assert "simulating the step at batch size" in printed.err


def test_json_is_one_object_with_the_bytes_of_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("--memory-budget", "1GiB", "--json", "--batch-sizes", "16,4096", capsys=capsys)
    fits, does_not = json.loads(printed.out)["rows"]
    assert fits["allocated_bytes"] == fits["peak_bytes"] <= 2**30 < does_not["peak_bytes"]
    assert fits["seconds"] > 0
    assert fits["policies"] == fits["blocks"]
    assert sum(fits["parts"].values()) == fits["allocated_bytes"] <= fits["reserved_bytes"] < fits["nvidia_smi_bytes"]
    assert fits.keys() == does_not.keys()
    unknown = ("allocated_bytes", "reserved_bytes", "expandable_reserved_bytes", "nvidia_smi_bytes", "parts", "seconds")
    assert [does_not[name] for name in (*unknown, "policies")] == [None] * 7


@pytest.mark.slow
def test_the_numbers_of_fit_are_those_of_the_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("--memory-budget", "2GiB", "--json", "--batch-sizes", "16,64,128,300", capsys=capsys)
    found = json.loads(printed.out)
    assert [row["batch_size"] for row in found["rows"]] == [16, 64, 128, 300]
    assert all(row["is_measured"] for row in found["rows"])
    for row in found["rows"]:
        words = [f"train.train_micro_batch_size={row['batch_size']}", *SMALL]
        with fake_steps_from("configs/quickstart.py", words, device="h200") as steps:
            plan = steps.plan("min")
        assert row["plain_peak_bytes"] == plan.plain_peak_bytes
        assert row["floor_bytes"] == plan.predicted_peak_bytes


@pytest.mark.slow
def test_accumulating_steps_take_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-budget", "1GiB", "--global-batch-size", "4096"]
    printed = run(*flags, "--json", capsys=capsys)
    found = json.loads(printed.out)["global_batch"]
    assert found["batch_size"] * found["accumulation"] == found["size"] == 4096
    assert found["accumulation"] > 1
    assert found["checked_peak_bytes"] <= found["peak_bytes"] <= 2**30


def test_the_allocator_of_an_absent_device_has_room_for_the_steps_that_accumulate() -> None:
    machine = load_profile("h200").with_memory("692MiB")
    with fake_steps_from("configs/quickstart.py", [*SMALL, FULL], device=machine) as steps:
        found = steps.fit("max", [32], 64)
        row = found.at_global_batch(64)
        step, model, _ = steps.step(32, 2)
        with row.plan.apply(model):
            took = step.run()
    assert row.accumulation == 2
    assert step.replay(took.allocations).is_steady
    assert row.checked_peak_bytes == row.peak_bytes == took.peak_bytes
    assert row.plan.predicted_reserved_bytes == step.replay(took.allocations).reserved_bytes
    assert row.seconds == pytest.approx(took.seconds)


@pytest.mark.slow
def test_sequence_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "fit.svg"
    flags = ["--memory-budget", "1GiB", "--sequence-lengths", "32,128", "--plot", str(drawn)]
    printed = run(*flags, "--json", capsys=capsys)
    short, long = json.loads(printed.out)
    assert (short["sequence_length"], long["sequence_length"]) == (32, 128)
    assert short["largest"] > 3 * long["largest"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit_128.svg", "fit_32.svg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-sizes", "1,a"], "--batch-sizes: expected whole numbers, got '1,a' · fix: --batch-sizes 8,16,32, or"),
        (["--batch-sizes", "1:2:3"], "--batch-sizes: expected whole numbers, got '2:3'"),
        (["--sequence-lengths", "long"], "--sequence-lengths: expected whole numbers, got 'long'"),
        (["--global-batch-size", "0"], "global_batch: expected an int of 1 or more, got 0"),
        (["--memory-budget", "min"], "memory_budget: expected a budget independent of the batch size, got 'min'"),
        (["--memory-budget", "1MiB", FULL], "no batch fits"),
        (["--plot", "fit.txt"], "fit.txt: expected a file ending in '.png' or '.svg'"),
    ],
)
def test_faults_are_one_clear_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *CONFIG, *words, *SMALL]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "v100"], "device: expected one of v100-16g, v100-32g, got 'v100'"),
        (["--device", "h100", "--memory", "24"], "memory: expected at least 1 MiB, got 24 B"),
        (["--device", "h100", "--memory-budget", "60"], "memory_budget: expected at least 1 KiB, got 60 B"),
        (["--device", "h100", "--host-budget", "60 G"], "host_budget: '60 G': unknown unit 'G'"),
        (["--device", "h100", "--offload", "gpu"], "--offload: expected an offload target, got 'gpu'"),
        (["--cluster", "dgx-h10"], "cluster: unknown profile 'dgx-h10' · did you mean 'dgx-h100'"),
        (["--cluster", "absent.yaml"], "cluster: the file absent.yaml does not exist · fix: use one of dgx-a100"),
    ],
)
def test_flags_are_checked_before_the_config_is_imported(
    command: str, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.py"
    config.write_text("raise SystemExit('imported')\n")
    assert main([command, "--config-file", str(config), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_memory_replaces_that_of_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "h100", "--memory", "3GiB"]
    assert main(["plan", "--config-file", "configs/quickstart.py", *flags, *SMALL]) == 0
    line = (
        f"memory budget {format_bytes(3 * 2**30 - load_profile('h100').context_bytes)} on h100 of 3.00 GiB (simulated)"
    )
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_cluster_is_for_several_processes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *CONFIG, "--cluster", "pcie", *SMALL]) == 2
    message = "cluster: expected a config of several processes with it, got 'pcie' and one process · fix: leave it out"
    assert message in capsys.readouterr().err


def test_a_cluster_sets_the_time_of_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "slow.yaml"
    link = "{bandwidth: 1.0e+8, latency: 0}"
    file.write_text(f"name: slow\nranks_per_node: 2\nwithin_node: {link}\nbetween_nodes: {link}\n")
    values = []
    for flags in ([], ["--cluster", "dgx-h200"], ["--cluster", str(file)]):
        words = ["--json", *flags, "train.dist.tensor_parallel_size=2", FULL, *SMALL]
        assert main(["plan", *CONFIG, *words]) == 0
        values.append(json.loads(capsys.readouterr().out))
    default, named, slow = values
    assert default == named
    assert default["communication_seconds"] == pytest.approx(default["exposed_seconds"])
    assert slow["communication_seconds"] > 10 * default["communication_seconds"] > 0
    assert any("the slow profile: 2 ranks in a node, 0.1 GB/s" in note for note in slow["notes"])
    assert any("the dgx-h200 profile" in note for note in default["notes"])


def test_micro_batches_that_do_not_run_communicate_too() -> None:
    """DDP reduces gradients in the last micro-batch only; with ZeRO 3 each gathers weights."""

    def plan_of(way: str, accumulation: int) -> Plan:
        more = [] if accumulation == 1 else [f"train.num_accumulation_steps={accumulation}"]  # 1 is the default
        return planned(*SPREAD[way], *more).plan

    one, three = (plan_of("ddp", accumulation).communication_seconds for accumulation in (1, 3))
    assert one == pytest.approx(three)
    one, two, three = (plan_of("train.zero_optimization.stage 3", accumulation) for accumulation in (1, 2, 3))
    each = two.communication_seconds - one.communication_seconds
    assert each > 0.4 * one.communication_seconds
    assert three.communication_seconds == pytest.approx(one.communication_seconds + 2 * each, rel=0.1)
    assert three.exposed_seconds > 1.2 * two.exposed_seconds


SPREAD = {
    "train.dist.tensor_parallel_size": ["train.dist.tensor_parallel_size=2"],
    **{
        f"train.zero_optimization.stage {stage}": [
            "train.dist.data_parallel_size=2",
            "train.zero_optimization.enabled=True",
            f"train.zero_optimization.stage={stage}",
        ]
        for stage in (1, 2, 3)
    },
    "ddp": ["train.dist.data_parallel_size=2"],
    "dp x tp": ["train.dist.data_parallel_size=2", "train.dist.tensor_parallel_size=2"],
}


class Planned(NamedTuple):
    plan: Plan
    values: dict[str, Any]
    fused: list[bool | None]
    """Of the groups of the optimizer."""


@cache
def planned(*words: str) -> Planned:
    with fake_steps_from("configs/quickstart.py", [*SMALL, FULL, *words], device="h200") as steps:
        fused = [group["fused"] for group in steps.optimizer.param_groups]
        plan = steps.plan("4GiB")
        return Planned(plan, steps.to_dict(plan), fused)


@pytest.mark.parametrize("name", SPREAD)
def test_settings_that_spread_the_step_change_the_plan(name: str) -> None:
    alone, (plan, values, _) = planned().plan, planned(*SPREAD[name])
    assert plan.plain_peak_bytes != alone.plain_peak_bytes
    assert plan.plain_step_seconds != alone.plain_step_seconds
    size = 4 if name == "dp x tp" else 2
    assert (plan.world_size, plan.rank) == (values["world_size"], values["rank"]) == (size, 0)
    assert f"rank 0 of {size}, data_parallel_size" in plan.notes[0]


def test_the_batch_of_a_fit_is_that_of_a_rank() -> None:
    words = [*SMALL, FULL, *SPREAD["dp x tp"], "train.train_micro_batch_size=null", "train.global_batch_size=64"]
    with fake_steps_from("configs/quickstart.py", words, device="h200") as steps:
        found = steps.fit("1GiB", [8, 16])
    row = found.at_global_batch(32)
    assert row.batch_size * row.accumulation == 32
    assert any("rank 0 of 4" in note and "batch sizes are those of one rank" in note for note in found.notes)


def test_fused_optimizers_are_for_weights_that_are_sharded_alike() -> None:
    """PyTorch refuses one that gets DTensors and plain tensors, as tensor parallelism leaves them."""
    tensor, zero = SPREAD["train.dist.tensor_parallel_size"], SPREAD["train.zero_optimization.stage 3"]
    for words, kinds in (([], [True, True]), (tensor, [None, None]), ([*tensor, *zero], [True, True])):
        assert planned(*words).fused == kinds


PIPELINE = ["model.config.n_layer=3", "train.dist.pipeline_parallel_size=2", "train.num_accumulation_steps=4"]


def test_each_stage_of_a_pipeline_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer reads the policies of all of them from one file."""
    words = ["plan", *CONFIG, *SMALL, *PIPELINE, "train.dist.data_parallel_size=3", "--memory-budget", "0.97"]
    words += ["--candidates", "full"]
    drawn = tmp_path / "plan.png"
    assert main([*words, "--plot", str(drawn), "--save", str(tmp_path / "all.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("stage ")] == ["stage 0", "stage 1"]
    (last,) = (line for line in lines if line.startswith("highest peak: stage "))
    assert {path.name for path in tmp_path.iterdir()} == {"plan_0.png", "plan_1.png", "all.yaml"}
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    peaks = [stage["allocated_bytes"] for stage in found["stages"]]
    assert [stage["rank"] for stage in found["stages"]] == [0, 3], "the first of each stage"
    assert max(peaks) == peaks[found["highest_stage"]]
    assert last == f"highest peak: stage {found['highest_stage']}, {format_bytes(max(peaks))}"
    assert [[row["block"] for row in stage["rows"]] for stage in found["stages"]] == [
        ["transformer.h.0", "transformer.h.1"],
        ["transformer.h.2"],
    ]
    assert found["policies"] == policies_from_file(tmp_path / "all.yaml") != {}
    saved = Plan.load(tmp_path / "all.yaml")
    assert (saved.policies, saved.predicted_peak_bytes) == (found["policies"], max(peaks))
    assert [row.block for row in saved.rows] == [row["block"] for stage in found["stages"] for row in stage["rows"]]
    saved.save(tmp_path / "again.yaml")
    assert Plan.load(tmp_path / "again.yaml") == saved
    assert [stage["notes"][0].partition(",")[0] for stage in found["stages"]] == ["stage 0 of 2", "stage 1 of 2"]
    assert all(stage["bubble_seconds"] > 0 for stage in found["stages"])


def test_the_policies_of_stages_in_a_file_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """It has a section `stages` in the place of `plan`."""
    policies = {"h.0": {"activation_checkpointing": True}}
    (tmp_path / "old.yaml").write_text(json.dumps({"policies": policies, "stages": [{"rows": []}]}))
    assert policies_from_file(tmp_path / "old.yaml") == policies


def test_layers_are_in_the_stages_that_the_config_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CONFIG, *SMALL, *PIPELINE, "train.dist.custom_pipeline_stage_id=[0,1,1]", "--candidates", "full"]
    assert main(["plan", *words, "--memory-budget", "4GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(stage["rows"]) for stage in found["stages"]] == [1, 2]


def test_a_stage_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CONFIG, *SMALL, *PIPELINE, "--candidates", "full", "--memory-budget", "73MiB"]
    assert main(["plan", *words]) == 2
    assert "stage 0: memory_budget 73.0 MiB: no plan fits" in capsys.readouterr().err


def test_a_fit_of_a_pipeline_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *CONFIG, *SMALL, *PIPELINE]) == 2
    assert "train.dist.pipeline_parallel_size: expected 1 to fit a batch size, got 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*PIPELINE, "train.dist.tensor_parallel_size=2"], "tensor_parallel_size: 2 is not supported with a pipeline"),
        ([*PIPELINE, *SPREAD["train.zero_optimization.stage 3"]], "zero_optimization.enabled: True is not supported"),
        (["train.zero_optimization.enabled=True"], "one process would hold all of it"),
        (["train.dist.custom_pipeline_stage_id=[0,0,0]"], "custom_pipeline_stage_id: there is one stage"),
        (["train.dist.pipeline_num_layers=3"], "pipeline_num_layers: 3 is not supported"),
        (["train.dist.tensor_parallel_size=3"], "cannot be sharded over 3 processes"),
        (["train.dist.data_parallel_size=2", "task.loss_head=True"], "task.loss_head: expected one process, got 2"),
        (["train.dist.pipeline_parallel_size=5", "train.num_accumulation_steps=5"], "the model has 3 layers"),
    ],
)
def test_settings_that_the_trainer_refuses_are_refused_in_its_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *CONFIG, *SMALL, "model.config.n_layer=3", *words]) == 2
    assert message in capsys.readouterr().err


def test_unused_parameters_are_found_at_a_cost() -> None:
    peaks = []
    for may_be_unused in (False, True):
        words = [*SMALL, FULL, "train.dist.data_parallel_size=2", f"train.dist.find_unused_parameters={may_be_unused}"]
        with fake_steps_from("configs/quickstart.py", words, device="cpu") as steps:
            peaks.append(steps.plan("4GiB").plain_peak_bytes)
    assert peaks[1] > peaks[0]


def test_the_command_has_a_second_name(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for name in ("find-batch-size", "fit"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "usage: graphckpt find-batch-size" in texts[0]
    assert graphckpt.fit is graphckpt.find_batch_size
