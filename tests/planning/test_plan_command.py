"""``graphckpt plan --json`` prints one object to stdout, with the bytes that a step takes and what they belong to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graphckpt import Plan, progress
from graphckpt.cli import main
from graphckpt.config import get_config
from graphckpt.simulation.allocations import AllocationLog

SMALL = ["model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=4", "data.seq_length=64"]
KEYS = {
    "device", "is_simulated", "world_size", "rank", "device_memory_bytes", "memory_budget", "budget_bytes",
    "headroom_bytes", "allocated_bytes", "reserved_bytes", "expandable_reserved_bytes", "nvidia_smi_bytes", "seconds",
    "parts", "binding",
    "plain_peak_bytes", "plain_seconds", "floor_bytes", "policies", "rows", "assumptions", "notes",
    "communication_seconds", "exposed_seconds", "bubble_seconds",
}  # fmt: skip


def planned(
    *words: str, capsys: pytest.CaptureFixture[str], config: str = "configs/quickstart.py", device: str = "h200"
) -> tuple[Any, ...]:
    assert main(["plan", "--config-file", str(config), "--device", device, "--json", *SMALL, *words]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_the_numbers_of_the_command_are_those_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    saved, picture, front = tmp_path / "plan.yaml", tmp_path / "plan.svg", tmp_path / "front.svg"
    flags = ["--memory-budget", "0.98", "--save", str(saved), "--plot", str(picture), "--sweep", str(front)]
    found, err = planned(*flags, capsys=capsys)
    plan = Plan.load(saved)
    assert found.keys() == KEYS
    assert (found["device"], found["memory_budget"], found["is_simulated"]) == ("h200", 0.98, True)
    assert found["allocated_bytes"] == plan.predicted_peak_bytes <= found["budget_bytes"] == plan.budget_bytes
    assert found["reserved_bytes"] == plan.predicted_reserved_bytes >= found["allocated_bytes"]
    assert found["nvidia_smi_bytes"] == found["reserved_bytes"] + found["assumptions"]["context_bytes"]
    assert found["seconds"] == plan.predicted_step_seconds > found["plain_seconds"]
    assert found["policies"] == plan.policies != {}
    assert [row["block"] for row in found["rows"]] == [row.block for row in plan.rows]
    assert found["assumptions"]["step"] == list(plan.assumptions) != []
    assert found["assumptions"]["optimizer"] == "torch.optim.adamw.AdamW"
    for line in ("planning, ", f"written: {saved}", f"drawn: {picture}", f"drawn: {front}", "step  policies"):
        assert line in err


def test_the_parts_are_those_of_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = planned("train.train_micro_batch_size=64", capsys=capsys)
    parts = found["parts"]
    assert sum(parts.values()) == found["allocated_bytes"]
    assert parts["activations_bytes"] > 0.5 * found["allocated_bytes"]
    found, _ = planned("train.train_micro_batch_size=1", "data.seq_length=8", capsys=capsys)
    parts = found["parts"]
    assert sum(parts.values()) == found["allocated_bytes"]
    assert found["binding"] == "after the backward of transformer.h.0"
    assert parts["gradients_bytes"] == pytest.approx(parts["weights_bytes"], rel=0.01), "most are there at the end"
    assert parts["optimizer_states_bytes"] == pytest.approx(2 * parts["weights_bytes"], rel=0.02)
    assert parts["workspaces_bytes"] == 2 * 32 * 2**20


def test_unknown_bytes_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = planned(device="cpu", capsys=capsys)
    assert (found["reserved_bytes"], found["nvidia_smi_bytes"]) == (None, None)
    assert sum(found["parts"].values()) == found["allocated_bytes"]
    unchecked, _ = planned("train.activation_checkpoint.check=False", capsys=capsys)
    assert (unchecked["reserved_bytes"], unchecked["parts"]) == (None, None)


def test_every_key_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = planned(capsys=capsys)
    page = Path("docs/reference/planning.md").read_text(encoding="utf-8")
    section = page.partition("## All numbers as JSON")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    keys = {key for names, _ in rows for key in re.findall(r"`(\w+)`", names)}
    assert keys == found.keys() == KEYS
    meanings = {names.strip("| `"): set(re.findall(r"`(\w+)`", text)) for names, text in rows}
    assert found["parts"].keys() <= meanings["parts"]
    assert found["rows"][0].keys() <= meanings["rows"]
    assert found["assumptions"].keys() == meanings["assumptions"] - {"assumed"}


def test_only_the_object_is_printed_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "noisy.py"
    names = ", ".join(get_config("quickstart.py"))
    text = "from graphckpt.config import get_config\nbase = get_config('quickstart.py')\nprint('loading')\n"
    config.write_text(text + f"{names} = (base[name] for name in {names.split(', ')!r})\ndel base\n")
    found, err = planned(config=config, capsys=capsys)
    assert found["allocated_bytes"] > 0
    assert "loading" in err
    assert main(["plan", "--config-file", "configs/quickstart.py", "--json", "--memory-budget", "2MiB", *SMALL]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no plan fits" in printed.err


def test_parts_count_rounded_storages_of_the_last_step() -> None:
    steps = [[0], [1, ~1], [2, 3, ~2, 4, ~3, ~4]]
    log = AllocationLog(steps, [10, 1000, 30, 5, 7], kinds={0: "weights", 3: "gradients"})
    parts = log.parts_at_peak(lambda num_bytes: -(-num_bytes // 8) * 8)
    assert {kind: size for kind, size in parts.items() if size} == {"weights": 16, "gradients": 8, "activations": 32}
    assert sum(log.parts_at_peak(step=1).values()) == 1010


def test_estimates_are_printed_to_stdout_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["estimate", str(tmp_path), "--device", "h100", "--seq", "16", "--policy", "full", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["policies"]["full"]["allocated_bytes"] > 0
    assert "allocated" not in printed.err
