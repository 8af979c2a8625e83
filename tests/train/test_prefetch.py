"""Batches ahead of their steps: in order, without a wait, and unchanged where there is no CUDA device."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from graphckpt.train.data.samples import Prefetcher

CUDA = torch.device("cuda", 0)


def full_of(iteration: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1000,), float(iteration))}


@pytest.mark.gpu
def test_the_next_batch_is_copied_while_a_step_runs(request: pytest.FixtureRequest) -> None:
    batches = Prefetcher(full_of, CUDA, 10)
    total = torch.zeros(1000, device=CUDA)
    for iteration in range(10):
        total = 2 * total + batches.get(iteration)["x"]  # whose memory is let go before the step has run
        batches.prefetch(iteration + 1)
    if request.config.getoption("--schedule", None) == "lazy":
        assert not torch.cuda.current_stream().query(), "the host has waited"
    assert total.tolist() == [float(sum(n * 2 ** (9 - n) for n in range(10)))] * 1000


@pytest.mark.gpu
def test_another_iteration_than_the_next_is_read_anew() -> None:
    iterations: list[int] = []

    def read(iteration: int) -> dict[str, torch.Tensor]:
        iterations.append(iteration)
        return full_of(iteration)

    batches = Prefetcher(read, CUDA, 10)
    batches.prefetch(4)
    assert batches.get(7)["x"][0].item() == 7
    assert batches.get(4)["x"][0].item() == 4
    assert iterations == [4, 7, 4]


@pytest.mark.gpu
def test_an_error_of_the_data_comes_with_its_own_iteration() -> None:
    def read(iteration: int) -> NoReturn:
        raise ValueError(f"no sample {iteration}")

    batches = Prefetcher(read, CUDA, 10)
    batches.prefetch(3)
    with pytest.raises(ValueError, match="no sample 3"):
        batches.get(3)


def test_without_cuda_a_batch_is_read_when_it_is_asked_for() -> None:
    read: list[int] = []

    def batch(iteration: int) -> dict[str, torch.Tensor]:
        read.append(iteration)
        return {"x": torch.full((2,), iteration)}

    batches = Prefetcher(batch, torch.device("cpu"), 10)
    batches.prefetch(0)
    assert read == []
    assert batches.get(0)["x"].tolist() == [0, 0]
    assert read == [0]
