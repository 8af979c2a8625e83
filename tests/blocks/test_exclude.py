"""`apply(..., exclude=...)`: all blocks but these, and what `explain()` advises in the words of the call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from torch import Tensor, nn

import graphckpt
from graphckpt import ConfigError
from graphckpt.blocks.apply import Policies
from graphckpt.blocks.presets import every_k
from graphckpt.blocks.select import Selector
from graphckpt.ledger.explanation import Explanation


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 8))


@as_module(lambda: {"layers": nn.ModuleList(layer() for _ in range(4)), "head": nn.Linear(8, 2)})
def Model(self: Any, x: Tensor) -> Tensor:
    for each in self.layers:
        x = each(x)
    return self.head(x)


def recomputed(model: nn.Module, policies: Policies, **options: Any) -> list[str]:
    """Returns the blocks that a step recomputes, and checks that its gradients are those of the plain step."""
    x = torch.ones(4, 8)
    model.zero_grad()
    model(x).sum().backward()
    plain = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    with graphckpt.apply(model, policies, **options) as handle:
        model(x).sum().backward()
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(model.parameters(), plain, strict=True))
    return [row.block for row in handle.explain(show=False).rows if row.reruns]


LAYERS = [f"layers.{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("policies", "exclude", "blocks"),
    [
        (True, ["layers.2", "layers.3"], LAYERS[:2]),
        (True, "layers.[23]", LAYERS[:2]),
        ("selective", ["layers.0"], LAYERS[1:]),
        ({"layers.*": True}, ["layers.3"], LAYERS[:3]),
        ({"layers.*": {"activation_checkpointing": True, "offload": "disk"}}, ["layers.3"], LAYERS[:3]),
        ({"layers.*": True, "layers.3": "selective"}, ["layers.3"], LAYERS[:3]),  # an excluded policy is no fault
        (["head", "layers.*"], ["head"], LAYERS),
        ({"layers.0": True, "layers.1.0": True, "layers.1.3": True}, ["layers.1"], ["layers.0"]),
        (True, [LAYERS[0], nn.LayerNorm], LAYERS[1:]),
    ],
)
def test_excluded_blocks_keep_everything(policies: Policies, exclude: str | list[Selector], blocks: list[str]) -> None:
    assert recomputed(Model(), policies, exclude=exclude) == blocks


def test_policies_of_presets_and_files_take_exclude_too(tmp_path: Path) -> None:
    model = Model()
    assert recomputed(model, every_k(model, 1), exclude=["layers.0"]) == LAYERS[1:]
    path = tmp_path / "policies.yaml"
    path.write_text("layers.0: true\nlayers.1: true\n")
    assert recomputed(model, path, exclude=["layers.1"]) == LAYERS[:1]


def test_an_excluded_block_is_neither_offloaded_nor_in_the_slab() -> None:
    policies = {"": {"offload": "disk", "contiguous": True, "min_elements": 1}, "layers.*": True}
    handle = graphckpt.apply(Model(), policies, exclude=["layers.3"])
    with handle, handle.measure():
        handle._watcher._roots[0][1](torch.ones(4, 8)).sum().backward()
    rows = {row.block: row for row in handle.explain(show=False).rows}
    assert rows["layers.0"].bytes_disk > 0
    assert (rows["layers.3"].bytes_disk, rows["layers.3"].place, rows["layers.3"].reruns) == (0, "device", 0)


def test_a_module_inside_of_a_recomputed_block_is_an_excluded_child() -> None:
    model = Model()
    with graphckpt.apply(model, True, exclude=["layers.0.2"]) as handle:
        model(torch.ones(4, 8)).sum().backward()
    rows = {row.block: row for row in handle.explain(show=False).rows}
    assert (rows["layers.0"].reruns, rows["layers.0.2"].reruns) == (1, 0)
    assert rows["layers.0.2"].bytes_after > 0


def test_exclude_and_replace() -> None:
    model = Model()
    graphckpt.apply(model, True)
    with pytest.raises(ConfigError, match="it already has a policy"):
        graphckpt.apply(model, True, exclude=["layers.0"])
    assert recomputed_of(graphckpt.apply(model, True, exclude=["layers.0"], replace=True), model) == LAYERS[1:]
    assert recomputed_of(graphckpt.apply(model, True, replace=True), model) == LAYERS


def recomputed_of(handle: graphckpt.Handle, model: nn.Module) -> list[str]:
    model(torch.ones(4, 8)).sum().backward()
    return [row.block for row in handle.explain(show=False).rows if row.reruns]


@pytest.mark.parametrize(
    ("exclude", "text"),
    [
        (["layer.3"], "exclude: 'layer.3' matches no module of Model"),
        (["layers.3", "head"], "exclude: 'head': no policy acts on what it selects, so it has no effect · fix: leave"),
        ("layers.*", "exclude: expected to leave a block with a policy, got none · fix: exclude fewer, or"),
        (3, "apply.exclude: expected selectors of blocks, got 3 · fix: exclude=['layers.0']"),
        ({"layers.3": True}, "apply.exclude: expected selectors of blocks, got {'layers.3': True}"),
    ],
)
def test_an_exclude_without_effect_is_an_error_and_nothing_is_set(exclude: object, text: str) -> None:
    model = Model()
    with pytest.raises(ConfigError) as error:
        graphckpt.apply(model, True, exclude=exclude)
    assert str(error.value).startswith(text)
    assert "forward" not in model.layers[0].__dict__


def test_a_container_without_a_forward_cannot_be_an_excluded_child() -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"exclude: 'layers': ModuleList has no forward, .* · fix: use 'layers\.\*'"):
        graphckpt.apply(model, {"": True}, exclude="layers")
    assert recomputed(model, ["layers.*", "head"], exclude="layers") == ["head"]


def advice_of(model: nn.Module, policies: Policies, **options: Any) -> str:
    with graphckpt.apply(model, policies, **options) as handle, handle.measure():
        model(torch.ones(64, 8)).sum().backward()
    model.zero_grad()
    (advice,) = [text for text in handle.explain(show=False).warnings if "does not lower the peak" in text]
    return advice.partition(" · fix: ")[2]


def test_the_advice_is_in_the_words_of_the_call() -> None:
    model = nn.ModuleDict({"layers": stack_of(layer, 4)})
    model = model["layers"]
    assert advice_of(model, True) == 'graphckpt.apply(model, True, exclude=["3"])'
    assert advice_of(model, {"*": True}) == "graphckpt.apply(model, {'*': True}, exclude=[\"3\"])"
    assert advice_of(model, "full", exclude=["2"]) == 'graphckpt.apply(model, \'full\', exclude=["2", "3"])'
    text = advice_of(model, True, exclude=re.compile("[12]"))
    assert text == "graphckpt.apply(model, True, exclude=[re.compile('[12]'), \"3\"])"
    long = {f"{number}": {"activation_checkpointing": "full"} for number in range(4)}
    assert advice_of(model, long) == 'graphckpt.apply(model, policies, exclude=["3"])'


def test_the_advice_of_a_graph_is_a_line_of_its_constructor() -> None:
    class Step(graphckpt.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = stack_of(layer, 4)
            for each in self.model:
                each.config.activation_checkpointing = True
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: Tensor) -> Tensor:
            loss = self.model(x).sum()
            loss.backward()
            return loss

    step = Step()
    step(torch.ones(64, 8))
    (advice,) = [text for text in step.explain(show=False).warnings if "does not lower the peak" in text]
    assert advice.endswith(" · fix: self.model[3].config.activation_checkpointing = False")


@as_module(lambda: {"stages": nn.ModuleList(stack_of(layer, 3) for _ in range(3))})
def Stages(self: Any, x: Tensor) -> Tensor:
    for stage in self.stages:
        x = stage(x)
    return x


def test_blocks_that_are_containers_of_layers_are_advised_to_be_smaller() -> None:
    model = Stages()

    def measured(policies: Policies) -> Explanation:
        with graphckpt.apply(model, policies) as handle, handle.measure():
            model(torch.ones(256, 8)).sum().backward()
            model.zero_grad()
        return handle.explain(show=False)

    first = measured({"stages.*": True})
    (advice,) = [text for text in first.warnings if "all of its layers are recomputed at once" in text]
    patterns = [f"stages.{number}.*" for number in range(3)]
    assert advice.endswith(f" · fix: select the layers as blocks: {', '.join(map(repr, patterns))}")
    second = measured(patterns)
    assert second.peak_bytes < first.peak_bytes
    assert not [text for text in second.warnings if "recomputed at once" in text]


def test_a_misspelt_argument_has_a_similar_name() -> None:
    model = Model()
    with pytest.raises(
        ConfigError, match=r"^apply: unknown argument 'excludes' · did you mean 'exclude'\? · fix: use "
    ):
        graphckpt.apply(model, True, excludes=["layers.3"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^verify: unknown argument 'step' · did you mean 'steps'"):
        graphckpt.verify(model, print, True, step=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^estimate: unknown argument 'batch_size' · did you mean 'batch'"):
        graphckpt.estimate("gpt2", device="h100", batch_size=3)  # type: ignore[arg-type]
    assert recomputed(model, True) == [f"layers.{number}" for number in range(4)], "nothing was set"
