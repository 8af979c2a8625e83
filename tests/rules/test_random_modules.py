"""Random modules under random policies keep every bit: trees of blocks with dropout, norms, holes and segments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.hard_modules import differing, run_steps
from helpers.modules import as_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphckpt
from graphckpt import Disk, Host, Segments, Selective, Tiles
from graphckpt.stores.tensor_store import TensorStore

D = 16


class Leaf(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.layer: nn.Module = nn.Linear(D, D)
        elif kind == "norm":
            self.layer = nn.BatchNorm1d(D)
        elif kind == "layer_norm":
            self.layer = nn.LayerNorm(D)
        elif kind == "dropout":
            self.layer = nn.Dropout(0.3)
        else:
            self.layer = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.kind == "in_place":
            return F.gelu(x).mul_(1.5)
        return F.dropout(x.sin(), 0.1) if self.kind == "functional" else x


@as_module(lambda children, in_place: {"inner": nn.Sequential(*children), "in_place": in_place})
def Residual(self, x: Tensor) -> Tensor:
    y = self.inner(x)
    if self.in_place and y is not x:
        y = y * 1
        y += x
        return y
    return y + x


kinds = st.sampled_from(["linear", "norm", "layer_norm", "dropout", "functional", "in_place", "identity"])
trees = st.recursive(
    kinds,
    lambda inner: st.tuples(
        st.sampled_from(["sequence", "residual", "residual in place"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)
values = st.sampled_from(
    [
        True,
        True,
        False,
        False,
        "selective",
        Selective("matmul"),
        Selective(["aten.native_dropout.default", "aten.sin.default"]),
        Tiles(1),
    ]
)
segments = st.sampled_from([Segments("sqrt"), Segments("log"), Segments(1)])


def build(tree: Any) -> nn.Module:
    if isinstance(tree, str):
        return Leaf(tree)
    kind, below = tree
    children = [build(child) for child in below]
    return nn.Sequential(*children) if kind == "sequence" else Residual(children, kind.endswith("place"))


def model_of(tree: Any) -> nn.Sequential:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, D), build(tree), nn.Linear(D, 4)).train()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, data=st.data())
def test_random_modules_under_random_policies(tree: Any, data: st.DataObject) -> None:
    model = model_of(tree)
    names = [name for name, _ in model.named_modules() if name]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=6), label="blocks")
    rules: dict[Any, Any] = {}
    for name in chosen:
        chain = type(model.get_submodule(name)) is nn.Sequential
        rules[name] = data.draw(values | segments if chain else values, label=name)
    plain = run_steps(model_of(tree), steps=2)
    with graphckpt.apply(model, rules):
        assert differing(run_steps(model, steps=2), plain) == []


placements = st.fixed_dictionaries(
    {},
    optional={
        "offload": st.sampled_from([False, Disk(in_flight_bytes=700), Host(), Host(in_flight_bytes=400)]),
        "contiguous": st.booleans(),
        "min_elements": st.sampled_from([1, 60]),
    },
)


@settings(
    max_examples=40 if torch.cuda.is_available() else 150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(tree=trees, data=st.data())
def test_random_modules_under_random_policies_in_random_places(device: str, tree: Any, data: st.DataObject) -> None:
    model = model_of(tree).to(device)
    names = [name for name, _ in model.named_modules()]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=6), label="blocks")
    rules: dict[Any, Any] = {}
    for name in chosen:
        chain = type(model.get_submodule(name)) is nn.Sequential
        rule = data.draw(st.none() | (values | segments if chain else values), label=name)
        rules[name] = {"activation_checkpointing": rule, **data.draw(placements, label=f"{name} in")}
    plain = run_steps(model_of(tree).to(device), steps=3, device=device)
    with graphckpt.apply(model, rules) as handle:
        assert differing(run_steps(model, steps=3, device=device), plain) == []
        stores = [w.context.store for w in handle._wrappers if isinstance(w.context.store, TensorStore)]
        assert [store.num_alive for store in stores] == [0] * len(stores)
