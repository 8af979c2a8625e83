"""Steps at the edges: captures with blocks outside of the loss, settings, errors and streams; random numbers; casts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers.captured_steps import captured
from helpers.layer_stacks import ResidualLayer, residual_layers
from helpers.modules import as_module
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphckpt
from graphckpt import Graph, GraphError
from graphckpt.stores import Host
from graphckpt.stores.pinned import streams_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

D = 64


def layers() -> nn.Sequential:
    return residual_layers(2, D, 2 * D, dropout=None)


@as_module(lambda: {"layers": layers(), "head": ResidualLayer(D, 2 * D, dropout=None)})
def WithAuxiliaryHead(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a result that the loss leaves out, as a model that returns its hidden states."""
    x = self.layers(x)
    return x, self.head(x)


class Train(Graph):
    def __init__(self, model: nn.Module, capture: str = "cuda_graph") -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True))
        self.config.capture = capture

    def build(self, x: Tensor) -> Tensor:
        out = self.model(x)
        loss = (out[0] if isinstance(out, tuple) else out).float().square().mean()
        loss.backward()
        return loss


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().cuda()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(16, D, generator=torch.Generator().manual_seed(seed)).cuda()


# --- a block outside of the loss


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("where", ["cpu", "cpu, nothing in flight"])
def test_an_offloaded_block_outside_of_the_loss(where: str, measures: bool) -> None:
    """Its copies end in no backward: they must neither be timed in the capture nor left open at its end."""

    def losses(capture: str) -> list[Tensor]:
        graph = Train(model_of(WithAuxiliaryHead), capture)
        graph.config.measure = measures
        graph.model.head.config.offload = Host() if where == "cpu" else Host(in_flight_bytes=0)
        graph.model.head.config.min_elements = 1
        results = [graph(batch(seed)) for seed in range(8)]
        if capture != "eager":
            assert captured(graph).num_replays == 5
        return results

    for ours, plain in zip(losses("cuda_graph"), losses("eager"), strict=True):
        assert torch.equal(ours, plain)


# --- settings around a step


@as_module(lambda: {"project": nn.Linear(D, 3 * D)})
def Attends(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.project(x).reshape(1, 16, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextmanager
def precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


BFLOAT16 = partial(torch.autocast, "cuda", torch.bfloat16)
SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]]] = {
    "dtype of autocast": (BFLOAT16, partial(torch.autocast, "cuda", torch.float16)),
    "autocast without its cache": (BFLOAT16, partial(BFLOAT16, cache_enabled=False)),
    "kernel of attention": (partial(sdpa_kernel, SDPBackend.MATH), nullcontext),
    "precision of products": (nullcontext, partial(precision, "high")),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_changes_needs_a_capture_of_its_own(setting: str) -> None:
    """Eager steps obey it, so a replay of ops that were chosen under another one would be silently different."""

    def run(capture: str) -> tuple[list[Tensor], Train]:
        graph = Train(model_of(Attends), capture)
        results = []
        for around in SETTINGS[setting]:
            for seed in range(5):
                with around():
                    results.append(graph(batch(seed)))
        return results, graph

    ours, graph = run("cuda_graph")
    plain, _ = run("eager")
    assert captured(graph).num_captured == 2
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


# --- errors


@pytest.mark.parametrize("name", ["synchronize", "empty_cache"])
def test_an_error_before_the_capture_leaves_the_garbage_collector_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of an earlier kernel comes with the synchronization before the capture."""
    graph = Train(model_of(layers))
    for seed in range(3):
        graph(batch(seed))

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, name, fails)
    with pytest.raises(GraphError, match="device-side assert"):
        graph(batch())
    assert gc.isenabled()


# --- several streams


def trained_plain() -> tuple[list[Tensor], nn.Module, nn.Module]:
    """Returns five batches, a model, and another one that has trained on them, not captured."""
    x, model, plain = [batch(seed) for seed in range(5)], model_of(layers), model_of(layers)
    eager = Train(plain, "eager")
    for each in x:
        eager(each)
    torch.cuda.synchronize()
    return x, model, plain


def test_states_of_a_deleted_graph_are_not_reused_during_its_last_replay() -> None:
    """The warm-up has allocated them on the stream of the capture; the replay runs on another."""
    own, x, model, plain = torch.cuda.Stream(), *trained_plain()
    with torch.cuda.stream(own):
        graph = Train(model)
        for each in x:
            graph(each)
        assert captured(graph).num_replays == 2
        captured(graph).release()
        del graph
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
    with torch.cuda.stream(streams_of(torch.device("cuda", 0)).capture):
        junk = [torch.full_like(p, float("nan")) for p in model.parameters() for _ in range(4)]
        torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(own):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    del junk


def test_host_memory_of_a_deleted_graph_stays_pinned_during_its_last_replay() -> None:
    """The copies of a replay run on the stream that replays it, and not on those that a store has for copies."""
    x, model, plain = trained_plain()
    handle = graphckpt.apply(model, {"0": {"offload": True}})
    graph = Train(model)
    torch.cuda.synchronize()
    for each in x:
        graph(each)
    assert captured(graph).num_replays == 2
    handle.remove()
    del graph
    gc.collect()
    torch.cuda.synchronize()  # raises if a copy has found no pinned memory
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# --- the engine without a capture


def test_rng_state_of_every_device_in_use_is_restored() -> None:
    """A block whose tensors come as keywords and in containers, which PyTorch's own checkpoint does not look into."""

    @as_module()
    def Drops(self: Any, *, states: dict[str, Tensor]) -> Tensor:
        return nn.functional.dropout(states["h"].sin(), 0.5) * torch.rand((), device="cuda")

    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    grads = []
    for rules in ({}, {"0": True}):
        torch.manual_seed(1)
        model = nn.Sequential(Drops())
        with graphckpt.apply(model, rules):
            (grad,) = torch.autograd.grad(model[0](states={"h": x * 1}).sum(), x)
        grads.append((grad, torch.cuda.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Region(nn.Sequential):
    """Its layers under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x).float()


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def Slope(self: Any, x: Tensor) -> Tensor:
    """Runs backward in its forward, through the layers before it too, and uses its weight before and after that."""
    energy = self.linear(x).tanh().pow(2).sum()
    (slope,) = torch.autograd.grad(energy, self.linear.weight, create_graph=True)
    return x + slope.mean() * self.linear(x)


def test_a_backward_within_a_forward_leaves_its_casts_in_the_cache() -> None:
    """The cache is the process's; backward recomputes in a thread of the device, which is in no region of its own."""
    grads = []
    for policy in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Region(Slope()), nn.Linear(8, 8)).cuda()
        graphckpt.apply(model, {"1": {"activation_checkpointing": policy}})
        x = torch.randn(4, 8).cuda().requires_grad_()
        model(model(x).sin()).sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *grads))
