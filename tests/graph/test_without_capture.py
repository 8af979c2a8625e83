"""Capture without a CUDA device: settings, messages, random numbers of the host, `verify` of eager steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.captured_steps import Train, batches, plain_sgd, run, same
from helpers.hard_modules import chain
from helpers.modules import as_module
from torch import Tensor, nn

from graphckpt import ConfigError, GraphError
from graphckpt.graph.capture import ModuleAttributes, capture_failure, check_not_drawn, is_on
from graphckpt.thread_state import get_rng_state, set_rng_state


def test_verify_before_the_first_call_changes_nothing_of_what_follows(device: str) -> None:
    ours, _ = run("eager", set_up=lambda graph: graph.verify(batches(1)[0]))
    assert same(ours, run("eager")[0])


RUNS: Counter[str] = Counter()


@as_module(lambda: {"linear": nn.Linear(16, 16)})
def Flips(self: Any, x: Tensor) -> Tensor:
    """Another result in its first run, unseen by all but a comparison."""
    RUNS["flips"] += 1
    return self.linear(x) * (1 + 1e-3 * (RUNS["flips"] == 1))


@as_module(lambda: {"last": nn.Buffer(torch.ones(3))})
def Spoils(self: Any, x: Tensor) -> Tensor:
    """Leaves NaN in a buffer in its first run, and 0 in later ones."""
    RUNS["spoils"] += 1
    self.last.fill_(float("nan") if RUNS["spoils"] == 1 else 0.0)
    return x


class Varies(nn.Module):
    """Another result in every run, as a kernel with atomics."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS["varies"] += 1
        return x * (1 + 1e-3 * RUNS["varies"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Flips, r"`loss` differs .* in 1 of 1 elements, by up to"),
        (Spoils, r"`model.1.last` differs .* in 3 of 3 elements"),
        (Varies, r"two plain steps differ already: `loss` differs .* fix: torch.use_deterministic"),
    ],
)
def test_verify_names_what_differs(kind: type[nn.Module], message: str, device: str) -> None:
    RUNS.clear()

    def set_up(graph: Train) -> None:
        graph._roots["model"].insert(1, kind().to(device))
        graph.verify(batches(1)[0])

    with pytest.raises(GraphError, match=f"verify: step 1: {message}"):
        run("eager", set_up=set_up)


def test_capture_takes_known_words_only() -> None:
    graph = Train(chain("mlp"), plain_sgd(chain("mlp")))
    with pytest.raises(ConfigError, match=r"capture: there is no 'cudagraph' · did you mean 'cuda_graph'"):
        graph.config.capture = "cudagraph"
    with pytest.raises(ConfigError, match=r"max_captures: expected a positive int, got 0"):
        graph.config.max_captures = 0
    graph.config.capture = "cuda_graph"
    with pytest.raises(ConfigError, match=r"'cuda_graph' expected modules on one CUDA device, got cpu"):
        graph(batches(1)[0])


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda: torch.rand(()), "torch on the CPU"),
        (random.random, "Python's random"),
        (np.random.rand, "NumPy"),
    ],
)
def test_draws_of_the_host_are_seen(draw: Callable[[], Any], what: str) -> None:
    def twice() -> list[Any]:
        return [draw(), draw()]

    state = get_rng_state((), host=True)
    check_not_drawn(state)
    first = twice()
    with pytest.raises(GraphError, match=f"draws random numbers with {what}, which every replay would repeat"):
        check_not_drawn(state)
    set_rng_state(state)
    assert twice() == first


def test_edits_of_what_lies_elsewhere_are_seen_and_undone() -> None:
    model = nn.BatchNorm1d(4)
    model.count = torch.zeros(())
    held = ModuleAttributes([("model", model)], torch.device("cuda"))
    assert held.changed() is None
    model.count += 1
    model.num_batches_tracked.add_(1)
    assert held.changed() == "model.count"
    held.restore()
    assert float(model.count) == float(model.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("CUDA error: operation not permitted when stream is capturing\nSearch for `cudaError", "avoid .item()"),
        ("aten._local_scalar_dense: operation not permitted when stream is capturing", "keep it on the device"),
        ("CUDA error: operation would make the legacy stream depend on a capturing", "drop losses"),
        ("CUDA error: dependency created on uncaptured work in another stream\ncudaErrorStreamCapture", "drop losses"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture", "pass tensors on the device"),
    ],
)
def test_an_error_of_the_device_has_a_fix(said: str, message: str) -> None:
    assert f" · fix: {message}" in capture_failure(RuntimeError(said), [])


@pytest.mark.parametrize(("place", "is_there"), [("cuda:0", True), ("cuda:1", False), ("cpu", False)])
def test_an_input_on_another_device_of_the_type_is_elsewhere(place: str, is_there: bool) -> None:
    assert is_on(torch.device(place), torch.device("cuda", 0)) is is_there
    assert is_on(torch.device(place), torch.device("cuda")) is place.startswith("cuda")
