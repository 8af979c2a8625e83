"""Stand-ins for the quantized layers of bitsandbytes: their tensors beside the library's, on a CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile
from graphckpt.simulation.quantized import KINDS, QuantizedLinear, num_parameters, quantize

SIZES = [(256, 512), (64, 48), (100, 37)]
"""Inputs and outputs: several blocks of scales, one, and a last block that is not full."""


def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("bitsandbytes", exc_type=ImportError)


def stand_in(kind: str, inputs: int, outputs: int, **options: Any) -> QuantizedLinear:
    return KINDS[kind](nn.Linear(inputs, outputs, dtype=torch.bfloat16, **options), inputs, outputs)


def state_bytes(state: Any) -> dict[str, int]:
    """Returns the bytes of the tensors of a ``QuantState``, and of the one of its scales."""
    tensors = {"absmax": state.absmax, "code": state.code}
    if state.nested:
        tensors |= {"absmax_of_absmax": state.state2.absmax, "offset": state.offset}
    return {name: tensor.nbytes for name, tensor in tensors.items()}


class TestBesideBitsandbytes:
    @pytest.mark.parametrize(("inputs", "outputs"), SIZES)
    @pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
    def test_tensors_of_4_bits(self, kind: str, inputs: int, outputs: int) -> None:
        functional = library().functional
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        packed, state = functional.quantize_4bit(weight, compress_statistics=kind == "nf4-double", quant_type="nf4")
        ours = {
            name: parameter.nbytes for name, parameter in stand_in(kind, inputs, outputs, bias=False).named_parameters()
        }
        assert ours == {"weight": packed.nbytes, **state_bytes(state)}

    @pytest.mark.parametrize(("inputs", "outputs"), SIZES)
    def test_tensors_of_8_bits(self, inputs: int, outputs: int) -> None:
        functional = library().functional
        codes, scale, _ = functional.int8_vectorwise_quant(torch.randn(outputs, inputs, dtype=torch.float16))
        ours = {
            name: parameter.nbytes
            for name, parameter in stand_in("int8", inputs, outputs, bias=False).named_parameters()
        }
        assert ours == {"weight": codes.nbytes, "scale": scale.nbytes}

    @pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
    def test_what_a_product_saves(self, kind: str) -> None:
        """Neither saves its input or the dequantized weight: what is saved is the packed weight, or nothing."""
        nn_ = library().nn
        real = nn_.Linear4bit(64, 48, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(torch.bfloat16)
        real = real.to("cpu")
        saved: list[torch.Tensor] = []
        for layer in (real, stand_in(kind, 64, 48, bias=False)):
            inputs = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
                result = layer(inputs)
            assert result.dtype is torch.bfloat16
            assert saved == []


class TestOnASimulatedGpu:
    @pytest.mark.parametrize("kind", KINDS)
    def test_shapes_and_types_are_those_of_the_layer(self, kind: str) -> None:
        with FakeDevice(load_profile("h100")):
            layer = stand_in(kind, 256, 512)
            inputs = torch.zeros(2, 3, 256, dtype=torch.bfloat16, requires_grad=True)
            result = layer(inputs)
            result.sum().backward()
        assert (result.shape, result.dtype) == ((2, 3, 512), torch.bfloat16)
        assert inputs.grad is not None
        assert inputs.grad.shape == inputs.shape
        assert not any(parameter.requires_grad for parameter in layer.parameters())

    def test_the_head_and_the_norms_stay(self) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig  # noqa: PLC0415

        for config, number in (
            (LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4), 14),
            (GPT2Config(n_layer=2, n_embd=64, n_head=4), 8),  # whose layers are `Conv1D`
        ):
            model = AutoModelForCausalLM.from_config(config)
            before = sum(parameter.numel() for parameter in model.parameters())
            quantize(model, "nf4")
            layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
            assert len(layers) == number
            assert type(model.get_output_embeddings()) is nn.Linear
            assert num_parameters(model) == before
