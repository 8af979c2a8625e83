"""Stand-ins for optimizers of other libraries: their states beside those of the libraries, on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.simulation import optimizers
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

SHAPES = [(64, 128), (100, 300), (7, 11), (4095,), (4096,), (5000,), (513, 1031)]
"""Multiples of all blocks, of one of them, of none, and sizes beside the threshold of both libraries."""


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields a tensor, or those that a tensor subclass consists of."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors_of(getattr(value, name))
    elif isinstance(value, torch.Tensor) and value.dim():  # the number of steps is on the host
        yield value


def state_bytes(optimizer: Optimizer, params: list[nn.Parameter]) -> list[int]:
    """Returns the bytes of the states of each parameter, without maps, which some libraries share."""
    return [
        sum(
            tensor.nbytes
            for name, value in optimizer.state[parameter].items()
            if not name.startswith("qmap")
            for tensor in tensors_of(value)
        )
        for parameter in params
    ]


def stepped(make: Callable[[Any], Optimizer], params: list[nn.Parameter]) -> Optimizer:
    optimizer = make(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestBesideTheLibraries:
    @pytest.mark.parametrize(("name", "bits"), [("AdamW8bit", 8), ("PagedAdamW8bit", 8), ("PagedAdamW32bit", 32)])
    def test_bitsandbytes(self, name: str, bits: int, dtype: torch.dtype) -> None:
        bitsandbytes = library("bitsandbytes")
        params, others = parameters(dtype), parameters(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a CPU has no managed memory
            real = stepped(getattr(bitsandbytes.optim, name), params)
        simulated = stepped(getattr(optimizers, name), others)
        assert state_bytes(simulated, others) == state_bytes(real, params)
        if bits == 8:
            maps = {key: value.nbytes for key, value in real.state[params[0]].items() if key.startswith("qmap")}
            assert maps == {key: simulated.state[others[0]][key].nbytes for key in maps}

    @pytest.mark.parametrize("bits", [8, 4])
    def test_torchao(self, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        torchao = library("torchao.optim")
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        params, others = parameters(dtype), parameters(dtype)
        real = stepped(getattr(torchao, f"AdamW{bits}bit"), params)
        simulated = stepped(getattr(optimizers, f"TorchaoAdamW{bits}bit"), others)
        number = 2 * 4 * 2**bits  # two maps in float32 for each quantized parameter
        is_quantized = [real.state[one]["exp_avg"].__class__ is not torch.Tensor for one in params]
        assert any(is_quantized)
        assert not all(is_quantized)
        expected = [
            num - number * quantized for num, quantized in zip(state_bytes(real, params), is_quantized, strict=True)
        ]
        assert [
            sum(value.nbytes for key, value in simulated.state[one].items() if not key.endswith("qmap"))
            for one in others
        ] == expected
        maps = [sum(v.nbytes for k, v in simulated.state[one].items() if k.endswith("qmap")) for one in others]
        assert maps == [number * quantized for quantized in is_quantized]


class TestOnASimulatedGpu:
    @pytest.mark.parametrize(
        ("name", "on_device", "on_host"),
        [
            # By weight of 1024 x 1024: bytes of a state, and a scale of 4 bytes for each block.
            ("AdamW8bit", 2 * (1 + 4 / 256), 0),
            ("PagedAdamW8bit", 2 * 4 / 256, 2),
            ("PagedAdamW32bit", 0, 8),
            ("TorchaoAdamW8bit", 2 * (1 + 4 / 256), 0),
            ("TorchaoAdamW4bit", 2 * (0.5 + 4 / 128), 0),
            ("AdamWBfloat16", 4, 0),
            ("AdamWMaster", 12, 0),
            ("AdamWOffloaded", 0, 8),  # weight, gradient and two states in bfloat16
        ],
    )
    def test_states_by_weight(self, name: str, on_device: float, on_host: float) -> None:
        with FakeDevice(load_profile("h100")):
            weight = nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16))
            optimizer = stepped(getattr(optimizers, name), [weight])
        is_map = {key: "qmap" in key for key in optimizer.state[weight]}
        states = [value for key, value in optimizer.state[weight].items() if not is_map[key]]
        host = sum(state.nbytes for state in states if state.device == torch.device("cpu"))
        assert (sum(state.nbytes for state in states) - host, host) == (on_device * 2**20, on_host * 2**20)
