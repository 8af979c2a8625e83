"""Pages of host memory and where they are pinned, with a CUDA runtime that only counts; and the settings of `Host`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphckpt.errors import ConfigError
from graphckpt.stores import Host
from graphckpt.stores.pinned import HostBuffer, pin


def fail(*_: object) -> None:
    raise AssertionError


class Runtime:
    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == 0
        assert flags == 1
        if self.code == 0:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered is pinned, as CUDA then says."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)


def test_exactly_the_bytes_are_registered_and_unregistered_once(pins: None) -> None:
    runtime = Runtime()
    buffer = HostBuffer(*pin(5 * 2**20 + 3, runtime, fail, fail))
    assert list(runtime.pinned.values()) == [5 * 2**20 + 3]
    buffer.flat.fill_(7)
    buffer.release()
    buffer.release()
    assert runtime.pinned == {}
    buffer = HostBuffer(*pin(100, runtime, fail, fail))
    assert list(runtime.pinned.values()) == [100]
    del buffer
    assert runtime.pinned == {}, "garbage is unregistered"


@pytest.mark.parametrize(("code", "what"), [(2, "CUDA error 2"), (0, "CUDA error 0, and it is not pinned")])
def test_memory_that_cannot_be_registered_falls_back(monkeypatch: pytest.MonkeyPatch, code: int, what: str) -> None:
    """A sandbox may accept the call and pin nothing."""
    notes: list[str] = []
    cleared: list[bool] = []
    asked: list[Any] = []
    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    runtime = Runtime(code)
    flat, release = pin(100, runtime, lambda: cleared.append(True), notes.append)
    release()
    assert runtime.pinned == {}
    assert flat.numel() == 100
    assert asked == [True]
    assert cleared == [True]
    assert notes == [
        f"offload: registering host memory failed ({what}): PyTorch's pinned memory is used, which is larger"
    ]


def test_pages_that_the_system_does_not_have() -> None:
    with pytest.raises(MemoryError):
        pin(2**62, Runtime(), fail, fail)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1GiB"])
def test_a_bound_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Host\.in_flight_bytes: expected a non-negative int or None, got .* · fix"):
        Host(in_flight_bytes=value)


@pytest.mark.parametrize(
    ("device", "note"),
    [
        ("cpu", "offload to 'cpu' has no effect: the tensors are in host memory already"),
        ("mps", "offload to 'cpu' has no effect: expected CUDA tensors, got tensors on mps"),
    ],
)
def test_host_says_that_it_has_no_effect_where_there_is_nothing_to_move(device: str, note: str) -> None:
    notes: list[str] = []
    assert Host().byte_store_for(torch.device(device), notes.append) is None
    assert notes == [note]
