"""Which blocks a run checkpoints: what the model marks, what the user names, what is set on top."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.architectures import ARCHITECTURES, Architecture
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.train.policies import block_policies, head_policies
from graphckpt.train.settings import ActivationCheckpointConfig


class Block(nn.Linear):
    pass


class Older(nn.Module):
    """As Transformers marked layers before: a flag on the module that holds their list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.encoder = nn.Module()
        self.encoder.gradient_checkpointing = False
        self.encoder.layer = nn.ModuleList(Block(2, 2) for _ in range(3))


class Whole(nn.Module):
    """As it names layers that no device boundary may cut."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(2, 2), nn.Tanh(), Block(2, 2))


def _blocks(model: nn.Module, **fields: Any) -> dict[str, dict[str, Any]]:
    return block_policies(model, ActivationCheckpointConfig(enabled=True, **fields))


@pytest.mark.parametrize(
    ("make", "names"), [(Older, [f"encoder.layer.{number}" for number in range(3)]), (Whole, ["body.0", "body.2"])]
)
def test_layers_are_found_by_other_marks(make: Callable[[], nn.Module], names: list[str]) -> None:
    assert _blocks(make(), rule="selective") == {name: {"activation_checkpointing": "selective"} for name in names}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_layers_of_every_architecture_are_found(architecture: Architecture) -> None:
    model = architecture.build()
    found, layers = set(_blocks(model)), set(architecture.layer_modules(model))
    if architecture.name == "resnet":  # marks its convolutions alone, as what no device boundary may cut
        assert all(any(name.startswith(layer) for name in found) for layer in layers)
    else:
        assert {name for name in found if ".conv_layers." not in name} == layers
    assert not any(name.startswith(f"{other}.") for name in found for other in found)


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("Block", ["body.0", "body.2"]),
        ("Tanh", ["body.1"]),
        ("torch.nn.modules.activation.Tanh", ["body.1"]),
        ("body.*", ["body.0", "body.1", "body.2"]),
        ("body", ["body"]),
        (["Tanh", "body.0"], ["body.1", "body.0"]),
    ],
)
def test_selected_blocks_are_named_by_class_or_pattern(select: list[str] | str, names: list[str]) -> None:
    assert list(_blocks(Whole(), select=select)) == names


def test_blocks_come_on_top_of_the_rule() -> None:
    rule = {"rule": "selective"}
    blocks = {"body.0": False, "body.*": {"stage_id": 1}, "body.2": rule}
    assert _blocks(Whole(), select="Block", policies=blocks) == {
        "body.0": {"activation_checkpointing": False, "stage_id": 1},
        "body.2": {"activation_checkpointing": rule, "stage_id": 1},
        "body.1": {"stage_id": 1},
    }
    assert _blocks(Whole(), rule=None, policies={"body.1": True}) == {"body.1": {"activation_checkpointing": True}}
    assert _blocks(nn.Sequential(nn.Tanh()), policies={"0": True}) == {"0": {"activation_checkpointing": True}}
    as_in_the_log = _blocks(Whole(), select="model.body.0", policies={"model.body.[12]": False})
    assert as_in_the_log == _blocks(Whole(), select="body.0", policies={"body.[12]": False})
    assert head_policies(Whole(), {"model.body": "full"}) == {"body": "full"}
    assert block_policies(Whole(), ActivationCheckpointConfig(policies={"zzz": True})) == {}


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"select": "Blok"}, [r"select: 'Blok' matches no module of \w+ · did you mean 'Block'\?"]),
        ({"rule": "ful"}, [r"body\.0\.activation_checkpointing: expected a rule, got 'ful' · did you mean 'full'\?"]),
        ({"policies": {"x": True, "y": 1}}, ["policies: 'x' matches no module", "policies: 'y' matches no module"]),
        ({"policies": {"model.x": True}}, ["policies: 'model.x' matches no module"]),
        ({"rule": {"rule": "selective", "kep": 1}}, ["rule 'selective': expected one of its settings, got 'kep'"]),
        ({"policies": {"body.*": {"tilse": 2}}}, ["unknown field · did you mean 'tiles'"]),
    ],
)
def test_faults_name_key_and_fix(fields: dict[str, Any], messages: list[str]) -> None:
    for message in messages:
        with pytest.raises(ConfigError, match=message):
            _blocks(Whole(), **fields)


def test_model_without_marks_asks_for_a_selection() -> None:
    with pytest.raises(
        ConfigError, match="expected a model that marks its layers, got Sequential · fix: name its class or its blocks"
    ):
        _blocks(nn.Sequential(nn.Tanh()))


def test_a_saved_plan_replaces_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("blocks:\n  body.0: {activation_checkpointing: selective, offload: cpu}\nplan: {}\n")
    fields = {"activation_checkpointing": "selective", "offload": "cpu"}
    assert _blocks(Whole(), plan=str(path)) == {"body.0": fields}
    for beside in ({"policies": {"body.0": True}}, {"memory_budget": 0.5}):
        (name,) = beside
        config = ActivationCheckpointConfig(plan=str(path), **beside)
        assert list(config.faults()) == [f"plan: expected no {name} with a saved plan · fix: unset one of them"]
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.plan: .*none\.yaml: cannot be read"):
        _blocks(Whole(), plan=str(tmp_path / "none.yaml"))
    path.write_text("blocks: {body.9: true}")
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.plan: 'body\.9' matches no module"):
        _blocks(Whole(), plan=str(path))
