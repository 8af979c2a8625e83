"""Files of earlier versions are read; ``old_files/README.md`` says what has written them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzz.bench import same
from helpers.layer_stacks import mlp_layers
from torch import Tensor, nn

from graphckpt import ConfigError, Graph, GraphError, Plan
from graphckpt.simulation.profile import DeviceProfile, load_profile

OLD_FILES = Path(__file__).with_name("old_files")


def changed(name: str, folder: Path, *keys: Any, value: Any) -> Path:
    """Copies a YAML file with another value at a path of keys; ``...`` removes it."""
    content = place = yaml.safe_load((OLD_FILES / name).read_text(encoding="utf-8"))
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    (folder / name).write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / name


def test_a_plan_is_applied() -> None:
    plan = Plan.load(OLD_FILES / "plan.yaml")
    content = yaml.safe_load((OLD_FILES / "plan.yaml").read_text(encoding="utf-8"))
    assert plan.to_dict()["policies"] == content["blocks"] != {}
    assert content["plan"].items() <= plan.to_dict()["plan"].items()
    assert not plan.is_simulated
    assert str(plan)
    model = mlp_layers(4, 8, activation=nn.ReLU)
    data = torch.randn(64, 8)
    with plan.apply(model) as handle:
        for _ in range(2):
            model(data).sum().backward()
        rows = handle.explain(show=False).rows
    assert [row.block for row in rows if row.reruns] == [*plan.policies]


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("plan", "levels"), [1], "plan.levels: unknown field"),
        (("plan", "rows", 1, "level"), 1, "plan.rows[1].level: unknown field"),
        (("plan", "binding"), ..., "plan.binding: expected a value, got nothing"),
        (("plan", "rows", 0, "fields"), ..., "plan.rows[0].fields: expected a value, got nothing"),
        (("plan", "rows", 0, "fields"), 3, "plan.rows[0].fields: expected Mapping[str, Any], got 3"),
        (("plan", "rows", 2), "x", "plan.rows[2]: expected a mapping, got 'x'"),
        (("plan", "predicted_peak_bytes"), "1 GiB", "plan.predicted_peak_bytes: expected int, got '1 GiB'"),
        (("plan", "plain_step_seconds"), None, "plan.plain_step_seconds: expected float, got None"),
        (("plan", "rows"), 3, "expected a section 'plan' with its 'rows', found none"),
        (("plan",), 3, "expected a section 'plan' with its 'rows', found none"),
    ],
)
def test_a_plan_of_other_fields_is_one_error(tmp_path: Path, keys: Any, value: Any, message: str) -> None:
    path = changed("plan.yaml", tmp_path, *keys, value=value)
    with pytest.raises(ConfigError) as raised:
        Plan.load(path)
    assert str(raised.value).startswith(f"{path}: {message} · fix: name a file that Plan.save wrote")


def test_all_fields_of_a_plan_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = changed("plan.yaml", tmp_path, "plan", "rows", value=[{"block": "0", "option": "full"}] * 3)
    with pytest.raises(ConfigError) as raised:
        Plan.load(path)
    assert "plan.rows[0].fields: expected a value, got nothing (and 2 more like it)" in str(raised.value)


def test_a_device_profile_is_that_of_today() -> None:
    old, today = load_profile(OLD_FILES / "profile.yaml"), load_profile("h200")
    assert today.efficiency["flash"] != old.efficiency["attention"]  # of all kernels, before
    assert today.efficiency["matmul"] < old.efficiency["matmul"]  # that of an A100, before
    before = {name: rate for name, rate in today.efficiency.items() if name != "flash"} | {"matmul": 0.7}
    assert old == replace(today, efficiency=before)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kernels", ["flash"], "kernels: unknown field"),
        ("flops", ..., "flops: is missing"),
        ("flops", {"float32": "fast"}, "flops: expected numbers above 0 by name"),
        ("rounding", "x", "rounding: expected a number above 0, got 'x'"),
        ("attention", 3, "attention: expected"),
        ("attention", None, "attention: expected"),
        ("capability", "9.0", "capability: expected"),
        ("capability", 9, "capability: expected"),
        ("capability", [9, "0"], "capability: expected"),
        ("name", 3, "name: expected"),
    ],
)
def test_a_device_profile_of_other_fields_is_one_error(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^device profile .*:\n  • {message}"):
        load_profile(changed("profile.yaml", tmp_path, key, value=value))


def test_a_device_profile_without_fields_that_have_defaults_is_read(tmp_path: Path) -> None:
    profile = load_profile(changed("profile.yaml", tmp_path, "launch_seconds", value=...))
    assert isinstance(profile, DeviceProfile)
    assert profile.launch_seconds == 0


class Train(Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.loss = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 2))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.model(x), y)
        loss.backward()
        return loss


def test_the_state_of_a_graph_is_loaded_bit_by_bit() -> None:
    state = torch.load(OLD_FILES / "graph.pt", weights_only=True)
    graph = Train()
    graph.load_state_dict(state)
    assert state["System-Train-TrainStep"] == 3
    assert same(dict(graph.state_dict()), dict(state))
    graph(torch.randn(8, 2), torch.randint(2, (8,)))
    assert graph.state_dict()["System-Train-TrainStep"] == 4


def test_the_state_of_a_graph_with_an_entry_of_another_version_is_refused() -> None:
    """Without a number: its entries by name are the format."""
    state = torch.load(OLD_FILES / "graph.pt", weights_only=True)
    with pytest.raises(GraphError, match="nothing is loaded:\n  • unexpected System-Train-Levels"):
        Train().load_state_dict({**state, "System-Train-Levels": 1})
    del state["System-Train-TrainStep"]
    with pytest.raises(GraphError, match="nothing is loaded:\n  • missing System-Train-TrainStep"):
        Train().load_state_dict(state)
