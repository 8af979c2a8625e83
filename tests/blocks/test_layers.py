"""Which modules of a model are its layers, where nobody has marked them."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import transformers
from helpers.layer_stacks import stack_of
from torch import nn

from graphckpt.blocks.select import layers


def lines(*widths: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))}), [f"blocks.{n}" for n in range(4)]),
        (nn.Sequential(nn.Linear(2, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 2)), ["1.0", "1.1"]),
        (nn.Sequential(*lines(8, 8, 8, 8), nn.ReLU()), ["0", "1", "2"]),
        (nn.Linear(2, 2), []),
        (nn.ModuleDict({"layers": nn.ModuleDict({"2": Block(), "5": Block()})}), ["layers.2", "layers.5"]),
        (nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)}), []),
        (
            nn.ModuleList(stack_of(partial(Block, w), n) for w, n in ((4, 2), (8, 3), (16, 2))),
            ["0.0", "0.1", "1.0", "1.1", "1.2", "2.0", "2.1"],
        ),
    ],
    ids=[
        "blocks with stacks in them", "between a first and a last", "plain", "none", "numbers as keys", "names as keys",
        "stages",
    ],
)  # fmt: skip
def test_layers_are_found(model: nn.Module, expected: list[str]) -> None:
    assert layers(model) == expected


def test_a_resnet_is_cut_at_its_bottlenecks() -> None:
    config = transformers.ResNetConfig(depths=[3, 4, 6, 3], hidden_sizes=[8, 16, 32, 64], embedding_size=8)
    found = layers(transformers.ResNetForImageClassification(config))
    assert len(found) == 16
    assert found[0] == "resnet.encoder.stages.0.layers.0"
