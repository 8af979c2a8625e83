"""``determinism_check`` is one setting: of a model, a block, a function, a Graph, a plan, a callback and a config."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import residual_layers
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt import BlockConfig, ConfigError, Graph, Plan
from graphckpt.blocks.forward import policy_of
from graphckpt.graph import GraphConfig
from graphckpt.integrations.policy_callback import PolicyCallback
from graphckpt.planning.options import PlanOptions
from graphckpt.train.policies import block_policies
from graphckpt.train.settings import ActivationCheckpointConfig

D = 8


def blocks(num_blocks: int) -> nn.Sequential:
    return residual_layers(num_blocks, D, D, torch.tanh, dropout=None)


@as_module(lambda: {"layers": nn.ModuleList(blocks(3)), "last": blocks(2)})
def Model(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return self.last(x)


def checks(model: nn.Module) -> dict[str, str]:
    """The setting of each block with a policy, by name."""
    policies = {name: policy_of(module) for name, module in model.named_modules()}
    return {name: policy.context.determinism_check for name, policy in policies.items() if policy is not None}


INHERITED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"layers.*": True}, "default", ["default"] * 3),
    ({"layers.*": True}, "values", ["values"] * 3),
    ({"layers.*": True, "layers.1": {"determinism_check": "none"}}, "default", ["default", "none", "default"]),
    ({"layers": {"determinism_check": "values"}, "layers.*": True}, "none", ["values"] * 3),
    ({"": {"determinism_check": "none"}, "layers.*": True}, "default", ["none"] * 3),
    ({"layers.*": True, "layers.2": {"determinism_check": None}}, "none", ["none"] * 3),
]


@pytest.mark.parametrize(("policies", "of_model", "expected"), INHERITED)
def test_a_block_inherits_determinism_check_from_the_block_around_it(
    policies: dict[str, Any], of_model: str, expected: list[str]
) -> None:
    model = Model()
    with graphckpt.apply(model, policies, determinism_check=of_model):
        model(torch.ones(2, D)).sum().backward()
        assert list(checks(model).values()) == expected


def test_parts_of_a_block_inherit_determinism_check() -> None:
    model = blocks(4)
    with graphckpt.apply(model, {"": {"segments": 2, "determinism_check": "none"}}):
        model(torch.ones(2, D)).sum().backward()
        (part,) = policy_of(model).context._parts.values()  # type: ignore[union-attr]
        assert part.determinism_check == "none"


@pytest.mark.parametrize("bad", ["value", "None", True, None, 3, ["values"]])
def test_another_value_is_one_error(bad: object) -> None:
    pattern = r"determinism_check: expected 'none', 'default' or 'values', got .* · fix: use 'values' to .*$"
    with pytest.raises(ConfigError, match=f"^apply.{pattern}"):
        graphckpt.apply(Model(), {"layers.*": True}, determinism_check=bad)
    with pytest.raises(ConfigError, match=f"^Graph.config.{pattern}"):
        GraphConfig(determinism_check=bad)
    for call in (
        lambda: graphckpt.checkpoint(torch.sin, torch.ones(1), determinism_check=bad),
        lambda: graphckpt.checkpoint_sequential(nn.Sequential(nn.Tanh()), 1, torch.ones(1), determinism_check=bad),
        lambda: graphckpt.checkpoint_wrapper(nn.Tanh(), determinism_check=bad),
    ):
        with pytest.raises(ConfigError, match=f"^{pattern}"):
            call()
    if bad is not None:  # which inherits
        with pytest.raises(ConfigError, match=f"^layers.0.{pattern}"):
            BlockConfig("layers.0").determinism_check = bad
        with pytest.raises(ConfigError, match=pattern):
            PlanOptions(determinism_check=bad)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'values'\?"):
        BlockConfig("layers.0").determinism_check = "value"


@pytest.mark.parametrize(
    "policies",
    [
        {"layers.0.up": {"determinism_check": "values"}, "layers.*": True},
        {"last": {"determinism_check": "none"}},
    ],
    ids=["in a recomputed block", "in none"],
)
def test_determinism_check_has_no_effect_where_nothing_is_recomputed(policies: dict[str, Any]) -> None:
    model = Model()
    with graphckpt.apply(model, policies) as handle:
        model(torch.ones(2, D)).sum().backward()
        warnings = handle.explain(show=False).warnings
    assert [text for text in warnings if "determinism_check has no effect here: it is not recomputed" in text]


def test_copies_and_pickles_keep_determinism_check() -> None:
    model = Model()
    graphckpt.apply(model, {"layers.*": True}, determinism_check="values")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        twin(torch.ones(2, D)).sum().backward()
        assert set(checks(twin).values()) == {"values"}


class Train(Graph):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model = Model()
        for layer in self.model.layers:
            layer.config.activation_checkpointing = True
        for name, value in settings.items():
            setattr(self.config, name, value)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss


def test_a_graph_has_determinism_check_in_its_config() -> None:
    graph = Train(determinism_check="values")
    graph.model.layers[1].config.determinism_check = "none"
    graph(torch.ones(2, D))
    assert [wrapper.determinism_check for wrapper in graph._step._wrappers] == ["values", "none", "values"]
    assert "determinism_check='values'" in repr(graph.config)
    graph.config.determinism_check = "none"
    graph(torch.ones(2, D))
    assert {wrapper.determinism_check for wrapper in graph._step._wrappers} == {"none"}


def test_a_plan_saves_determinism_check(tmp_path: Path) -> None:
    model = blocks(6)
    plan = graphckpt.plan(
        model, lambda: model(torch.ones(64, D)).sum().backward(), memory_budget="min", determinism_check="values"
    )
    fields = list(plan.policies.values())
    assert fields
    assert all(each["determinism_check"] == "values" for each in fields)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml").policies == plan.policies
    with graphckpt.apply(model, str(tmp_path / "plan.yaml")):
        model(torch.ones(2, D)).sum().backward()
        assert set(checks(model).values()) == {"values"}


def test_a_callback_sets_determinism_check_on_every_unit() -> None:
    callback = PolicyCallback(select="layers.*", determinism_check="values")
    model = Model()
    callback._begin(model, print)
    assert set(checks(model).values()) == {"values"}
    callback._remove()
    PolicyCallback(memory_budget=0.6, determinism_check="none")
    with pytest.raises(ConfigError, match="determinism_check: expected 'none'"):
        PolicyCallback(determinism_check="all")


def test_a_config_sets_determinism_check_on_every_unit() -> None:
    config = ActivationCheckpointConfig(enabled=True, select="layers.*", determinism_check="values")
    assert {fields["determinism_check"] for fields in block_policies(Model(), config).values()} == {"values"}
    assert config.plan_options().determinism_check == "values"
    assert not list(config.faults())
    wrong: Any = "all"
    faults = list(ActivationCheckpointConfig(determinism_check=wrong).faults())
    assert [fault for fault in faults if "expected 'none'" in fault]


def test_wrapped_modules_have_determinism_check() -> None:
    module = graphckpt.checkpoint_wrapper(blocks(1)[0], determinism_check="none")
    module(torch.ones(2, D)).sum().backward()
    assert checks(module) == {"": "none"}


def test_determinism_check_cannot_act_in_a_graph_of_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with graphckpt.apply(model, {"layers.*": True}, determinism_check="values") as handle:
        torch.compile(model, backend="eager")(torch.ones(2, D)).sum().backward()
        notes = [note for wrapper in handle._wrappers for note in wrapper.context.notes]
    assert [note for note in notes if "has no effect here: torch.compile recomputes it" in note]
    assert [record for record in caplog.records if record.levelno == logging.WARNING]
