"""Batches ahead of their steps: in order, without a wait, and unchanged where there is no CUDA device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphckpt.train.data.prefetch import Prefetcher

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def wait_stream(self, other: Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


class HostTensor:
    """A tensor of the host that notes how it is copied."""

    def __init__(self, cuda: FakeCuda, value: int) -> None:
        self.cuda, self.value, self.is_pinned = cuda, value, False

    def pin_memory(self) -> HostTensor:
        pinned = HostTensor(self.cuda, self.value)
        pinned.is_pinned = True
        return pinned

    def to(self, device: torch.device, *, non_blocking: bool = False) -> HostTensor:
        waits = "" if non_blocking and self.is_pinned else ", and the host waits"
        self.cuda.events.append(f"copy {self.value} on {self.cuda.current.name}{waits}")
        return self

    def record_stream(self, stream: Stream) -> None:
        self.cuda.events.append(f"{self.value} is used by {stream.name}")


class FakeCuda:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = Stream(self.events, "compute")

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def read(self, iteration: int) -> dict[str, Any]:
        self.events.append(f"read {iteration}")
        return {"x": HostTensor(self, iteration)}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made.events, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    return made


def test_the_next_batch_is_copied_while_a_step_runs(cuda: FakeCuda) -> None:
    batches = Prefetcher(cuda.read, CUDA, 2)
    for iteration in range(2):
        assert batches.get(iteration)["x"].value == iteration  # type: ignore[attr-defined]
        cuda.events.append(f"step {iteration}")
        batches.prefetch(iteration + 1)
    assert cuda.events == [
        "read 0", "copy 0 on compute", "step 0",
        "read 1", "copy 1 on copies", "compute waits for copies", "1 is used by compute", "step 1",
    ]  # fmt: skip


def test_another_iteration_than_the_next_is_read_anew(cuda: FakeCuda) -> None:
    batches = Prefetcher(cuda.read, CUDA, 10)
    batches.prefetch(4)
    assert batches.get(7)["x"].value == 7  # type: ignore[attr-defined]
    assert batches.get(4)["x"].value == 4  # type: ignore[attr-defined]
    assert cuda.events.count("read 4") == 2


def test_an_error_of_the_data_comes_with_its_own_iteration(cuda: FakeCuda) -> None:
    def read(iteration: int) -> Any:
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
