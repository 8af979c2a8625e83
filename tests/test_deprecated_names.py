"""Old names of arguments and keys: each works, with one warning, at the caller's line, that says what to write."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import mlp_layers
from helpers.train_graphs import SquareGraph
from torch import nn

import graphckpt
from graphckpt import ConfigError
from graphckpt.blocks.apply import policies_of
from graphckpt.config.source import ConfigSource
from graphckpt.integrations.policy_callback import PolicyCallback
from graphckpt.integrations.transformers import GraphckptArguments, GraphckptCallback
from graphckpt.planning import PlanOptions
from graphckpt.simulation.profile import load_profile
from graphckpt.train.settings import ActivationCheckpointConfig

X = torch.ones(64, 8)
CHECKPOINT = "train.activation_checkpoint"


def model_of_layers() -> nn.Sequential:
    return mlp_layers(3, 8)


def plan(**options: Any) -> graphckpt.Plan:
    model = model_of_layers()
    return graphckpt.plan(model, lambda: model(X).sum().backward(), memory_budget="min", check=False, **options)


def fit(**options: Any) -> graphckpt.Plan:
    model = model_of_layers()
    make_step = lambda size: (model, lambda: model(X[:size]).sum().backward())  # noqa: E731
    return graphckpt.fit(make_step, batch_sizes=[8], memory_budget="1GiB", **options).largest.plan


def graph_plan(**options: Any) -> graphckpt.Plan:
    options = {name: "model.[01]" if value == "[01]" else value for name, value in options.items()}
    return SquareGraph(model_of_layers()).plan(X, memory_budget="min", check=False, **options)


def graph_options(**options: Any) -> PlanOptions:
    graph = SquareGraph(model_of_layers())
    graph.config.plan_options = options
    return graph.config.plan_options


def callback(**options: Any) -> PolicyCallback:
    return PolicyCallback(**options)


def arguments(**options: Any) -> GraphckptCallback:
    return GraphckptCallback.from_arguments(GraphckptArguments(**{f"graphckpt_{k}": v for k, v in options.items()}))


BLOCKS_AS_SELECT = [plan, fit, graph_plan, graph_options, PlanOptions]
CASES = [
    *((call, "blocks", "select", "[01]") for call in BLOCKS_AS_SELECT),
    *((call, "rules", "candidates", ["full"]) for call in (plan, fit, graph_plan, graph_options)),
    *((call, "unit", "select", "0") for call in (callback, arguments, ActivationCheckpointConfig)),
    *((call, "blocks", "policies", {"0": False}) for call in (callback, ActivationCheckpointConfig)),
    (arguments, "blocks", "policies", '{"0": false}'),
]


def shown(result: object) -> str:
    return str([row.option for row in result.rows] if isinstance(result, graphckpt.Plan) else result)


@pytest.mark.parametrize(("call", "old", "new", "value"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_an_old_name_is_the_new_one_with_one_warning(
    call: Callable[..., object], old: str, new: str, value: object
) -> None:
    expected = call(**{new: value})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(**{old: value})
    assert shown(result) == shown(expected)
    (warning,) = (each for each in caught if "deprecated" in str(each.message))
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__, "the line that uses the old name"
    given = "'model.[01]'" if call is graph_plan and value == "[01]" else repr(value)
    assert re.search(rf"{old}' is deprecated · fix: \w*{new}={re.escape(given)}$", str(warning.message))
    with pytest.raises(
        ConfigError, match=rf"expected '\w*{new}' alone, got '\w*{old}' too, .* · fix: leave '\w*{old}'"
    ):
        call(**{old: value, new: value})


def test_attributes_have_their_old_names_too() -> None:
    planned = plan(select="[01]")
    for owner, old, value in (
        (planned, "blocks", planned.policies),
        (PlanOptions(select="0"), "blocks", "0"),
        (ActivationCheckpointConfig(select="0"), "unit", "0"),
        (ActivationCheckpointConfig(policies={"0": True}), "blocks", {"0": True}),
    ):
        with pytest.warns(DeprecationWarning, match="is deprecated · fix: ") as caught:
            assert getattr(owner, old) == value
        assert [each.filename for each in caught] == [__file__]


def test_a_module_has_its_old_path_too() -> None:
    with pytest.warns(
        DeprecationWarning, match="is deprecated · fix: from graphckpt.simulation.profile import load"
    ) as caught:
        from graphckpt.planning.profile import load_profile as old  # noqa: PLC0415
    assert [each.filename for each in caught] == [__file__]
    assert old is load_profile


def test_old_keys_of_configs_are_read(tmp_path: Path) -> None:
    old = [f"{CHECKPOINT}.unit=GPT2Block", f'{CHECKPOINT}.blocks={{"*.h.0": false}}']
    new = [f"{CHECKPOINT}.select=GPT2Block", f'{CHECKPOINT}.policies={{"*.h.0": false}}']
    expected = ConfigSource("quickstart.py", new)
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        source = ConfigSource("quickstart.py", old)
    assert [str(each.message) for each in caught] == [
        f"{CHECKPOINT}: 'unit' is deprecated · fix: select='GPT2Block'",
        f"{CHECKPOINT}: 'blocks' is deprecated · fix: policies={{'*.h.0': False}}",
    ]
    assert source.config == expected.config
    assert source.describe() == expected.describe(), "and where each is set"
    file = tmp_path / "config.py"
    section = "{'enabled': True, 'unit': 'GPT2Block', 'blocks': {'*.h.0': False}}"
    text = f"from graphckpt.config import get_config\nbase = get_config('quickstart.py')\n_new = {section}\n"
    text += "train, model, optim, data = base.train, base.model, base.optim, base.data\n"
    file.write_text(f"{text}train.activation_checkpoint.update(_new)\ndel base\n")
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught, ConfigSource(file).checked() as run:
        section = run.train.activation_checkpoint
    assert (section.select, section.policies, len(caught)) == ("GPT2Block", {"*.h.0": False}, 2)


def test_a_config_with_both_names_is_an_error() -> None:
    words = [f"{CHECKPOINT}.unit=GPT2Block", f"{CHECKPOINT}.select=GPT2Block"]
    source = ConfigSource("quickstart.py", words)
    with pytest.raises(ConfigError, match=r"1 error:\n.*checkpoint: expected 'select' alone, got 'unit' too"):
        source.checked().__enter__()


def test_plans_of_earlier_versions_are_policies(tmp_path: Path) -> None:
    for name in ("blocks", "policies"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({name: {"0": True}, "plan": {}}))
        assert policies_of(nn.Sequential(), path) == {"0": True}
