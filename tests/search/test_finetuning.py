"""``graphckpt estimate`` for fine-tuning: optimizers by name, quantized weights and LoRA."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    T5Config,
)

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.planning.steps import RealStep, peak_of
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.estimate_result import Estimate

peft = pytest.importorskip("peft")

LAYERS = 2
LLAMA = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
    max_position_embeddings=512,
)
LINEAR = LAYERS * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)  # weights of the linear layers but the head
NORMS = (2 * LAYERS + 1) * 256
NUM_TENSORS = 9 * LAYERS + 4
ROUNDING = 512


@cache
def estimated(device: str = "h100", **options: Any) -> Estimate:
    settings = {"batch": 2, "seq": 128, "dtype": "bfloat16", "policy": "keep", **options}
    return graphckpt.estimate(LLAMA, device=device, progress=False, **settings)


def adapter_bytes(rank: int) -> int:
    """Adapters in float32 on all linear layers: a matrix on each side."""
    sizes = 2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512)
    return 4 * rank * LAYERS * sizes


class TestOptimizers:
    @pytest.mark.parametrize(
        ("optimizer", "device", "host"),
        [
            # Bytes of a weight in bfloat16, beside what small tensors and rounding add.
            ("adamw", 4, 0),
            ("adamw-8bit", 2 * (1 + 4 / 256), 0),
            ("paged-adamw-8bit", 2 * 4 / 256, 2),
            ("paged-adamw-32bit", 0, 8),
            ("torchao-adamw-8bit", 2 * (1 + 4 / 256), 0),
            ("torchao-adamw-4bit", 2 * (0.5 + 4 / 128), 0),
            ("adamw-bf16", 4, 0),
            ("adamw-master", 12, 0),
            ("adamw-offload", 0, 8),
        ],
    )
    def test_states_are_those_of_the_library(self, optimizer: str, device: float, host: float) -> None:
        estimate = estimated(optimizer=optimizer)
        number, tolerance = estimate.num_parameters, NUM_TENSORS * 6 * (ROUNDING + 2 * 1024)
        moved = estimate.host_bytes - host * number
        if optimizer.startswith("paged"):  # tensors of fewer than 100 000 elements are on the device
            assert -0.5 * host * number <= moved <= 0
            moved = 0
            assert estimate.host_bytes + estimate.optimizer_bytes == pytest.approx(
                (device + host) * number, abs=tolerance
            )
        else:
            assert estimate.optimizer_bytes == pytest.approx(device * number, abs=tolerance)
        assert abs(moved) <= tolerance
        assert estimate.policies["keep"].parts.optimizer_states <= estimate.optimizer_bytes + tolerance

    def test_eight_bits_take_a_quarter_of_the_states(self) -> None:
        eight, full = estimated(optimizer="adamw-8bit"), estimated(optimizer="adamw", dtype="float32")
        assert eight.optimizer_bytes < full.optimizer_bytes / 3.5
        assert "AdamW8bit of bitsandbytes" in " ".join(str(eight).split())

    def test_muon_has_one_state_for_matrices_and_adamw_two_for_the_rest(self) -> None:
        others = 2 * 1024 * 256 + NORMS  # embedding, head and norms
        expected = 2 * (LINEAR + 2 * others)
        assert estimated(optimizer="muon").optimizer_bytes == pytest.approx(expected, abs=NUM_TENSORS * 3 * ROUNDING)
        assert "Muon" in str(estimated(optimizer="muon"))

    @pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "muon"])
    def test_a_fused_backward_has_no_gradients_at_the_peak(self, optimizer: str) -> None:
        plain = estimated(optimizer=optimizer, policy="full", batch=1, seq=16)
        fused = estimated(optimizer=optimizer, policy="full", batch=1, seq=16, fused_backward=True)
        assert plain.policies["full"].parts.gradients > 0.9 * plain.gradient_bytes
        assert fused.policies["full"].parts.gradients < 0.3 * plain.gradient_bytes
        assert fused.policies["full"].allocated_bytes < plain.policies["full"].allocated_bytes
        assert fused.optimizer_bytes == pytest.approx(plain.optimizer_bytes, rel=0.02)
        assert "each weight updated in backward" in " ".join(str(fused).split())

    def test_a_master_copy_is_that_of_mixed_precision(self) -> None:
        """16 bytes a parameter: weights and gradients of 2 and 12 of the optimizer, as with float32 and autocast."""
        master, mixed = estimated(optimizer="adamw-master"), estimated(optimizer="adamw", dtype="float32")
        of_master, of_mixed = (one.weight_bytes + one.gradient_bytes + one.optimizer_bytes for one in (master, mixed))
        assert of_master == pytest.approx(of_mixed, rel=0.02)

    @pytest.mark.parametrize(
        ("name", "option"),
        [
            ("adamw_bnb_8bit", "adamw-8bit"),
            ("adamw_8bit", "adamw-8bit"),
            ("paged_adamw_32bit", "paged-adamw-32bit"),
            ("adamw_torch_fused", "adamw-fused"),
            ("adamw_torch_4bit", "torchao-adamw-4bit"),
        ],
    )
    def test_names_of_training_arguments(self, name: str, option: str) -> None:
        assert EstimateOptions(optimizer=name).optimizer == option


class TestQuantization:
    @pytest.mark.parametrize(
        ("kind", "weight"), [("nf4", 0.5 + 4 / 64), ("nf4-double", 0.5 + 1 / 64 + 4 / 64 / 256), ("int8", 1.0)]
    )
    def test_weights_are_those_of_the_library(self, kind: str, weight: float) -> None:
        estimate = estimated(quantization=kind, lora=8, lora_targets="all-linear")
        others = 2 * (2 * 1024 * 256 + NORMS)  # in bfloat16
        scales = 4 * LAYERS * (4 * 256 + 2 * 128 + 2 * 512 + 256) if kind == "int8" else 0  # of rows, at most
        expected = weight * LINEAR + others + adapter_bytes(8)
        assert 0 <= estimate.weight_bytes - expected <= scales + (7 * LAYERS * 6 + 20) * ROUNDING
        assert estimate.num_parameters == estimated().num_parameters + estimate.num_trainable
        assert estimate.num_trainable == adapter_bytes(8) // 4
        text = " ".join(str(estimate).split())
        assert f"{7 * LAYERS} linear layers in" in text
        assert "the other 1.00 MiB not quantized" in text

    def test_each_forward_and_backward_has_a_copy_of_one_weight(self) -> None:
        """The largest layer sets the temporaries of a step with few tokens."""
        sizes = {"batch": 1, "seq": 8, "lora": 1, "policy": "full"}
        peaks = {kind: estimated(quantization=kind, **sizes).policies["full"] for kind in (None, "nf4")}
        copy = 2 * 512 * 256
        weights = (
            estimated(quantization=None, **sizes).weight_bytes - estimated(quantization="nf4", **sizes).weight_bytes
        )
        fewer = peaks[None].allocated_bytes - peaks["nf4"].allocated_bytes
        assert 0.9 * copy <= weights - fewer <= 1.5 * copy

    @pytest.mark.parametrize(
        ("kind", "more"),
        [
            *((kind, {}) for kind in ("nf4", "nf4-double", "int8")),
            *((kind, {"autocast": "bfloat16"}) for kind in ("nf4", "int8")),
            *((kind, {"dora": True}) for kind in ("nf4", "nf4-double")),
            ("nf4", {"dora": True, "autocast": "bfloat16"}),
        ],
    )
    def test_the_peak_is_that_of_the_library_on_a_cpu(
        self, kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step with bitsandbytes' layers, PEFT's adapters for them and its optimizer, measured on a CPU."""
        is_enabled = torch.is_autocast_enabled
        # PEFT asks for CUDA, which is the default.
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": is_enabled(kind))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("bitsandbytes", exc_type=ImportError)
            model, step = real_step(kind, **more)
            step()
            measured = graphckpt.plan(model, step, memory_budget=0.99).plain_peak_bytes
        options = {"seq": 256, "quantization": kind, "lora": 8, "lora_targets": "all-linear", "optimizer": "adamw-8bit"}
        predicted = estimated("cpu", **options, **more).policies["keep"].allocated_bytes
        assert predicted == pytest.approx(measured, rel=0.001)


def real_step(kind: str, *, autocast: str | None = None, dora: bool = False) -> Any:
    import bitsandbytes  # noqa: PLC0415

    layers = bitsandbytes.nn
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16)
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or name == "lm_head":
            continue
        sizes = linear.in_features, linear.out_features
        layer: Any
        if kind == "int8":
            layer = layers.Linear8bitLt(*sizes, False, has_fp16_weights=False, threshold=6.0)
            layer.weight = layers.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            settings = {"compress_statistics": kind == "nf4-double", "quant_type": "nf4"}
            layer = layers.Linear4bit(*sizes, False, torch.bfloat16, **settings)
            layer.weight = layers.Params4bit(linear.weight.data, requires_grad=False, module=layer, **settings)
        model.set_submodule(name, layer.to("cpu"))
    model.is_loaded_in_8bit = kind == "int8"
    model.is_loaded_in_4bit = not model.is_loaded_in_8bit
    model.config.use_cache = False
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", use_dora=dora)).train()
    optimizer = bitsandbytes.optim.AdamW8bit([one for one in adapted.parameters() if one.requires_grad])
    tokens = torch.zeros(2, 256, dtype=torch.long)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            loss = adapted(input_ids=tokens, labels=tokens.clone()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return adapted, step


class TestAdapters:
    @pytest.mark.parametrize(
        ("targets", "names", "number"),
        [
            (None, "q_proj, v_proj, which PEFT chooses by default", 2 * LAYERS),
            ("all-linear", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj", 7 * LAYERS),
            ("up_proj,down_proj", "up_proj, down_proj", 2 * LAYERS),
            (r".*self_attn\.k_proj", "k_proj", LAYERS),
        ],
    )
    def test_layers_by_name_are_printed(self, targets: str | None, names: str, number: int) -> None:
        text = " ".join(str(estimated(lora=4, lora_targets=targets)).split())
        assert f"LoRA of rank 4 on {number} layers ({names}), in float32" in text

    @pytest.mark.parametrize("policy", ["keep", "full"])
    @pytest.mark.parametrize(
        ("options", "settings"),
        [
            ({}, {}),
            ({"dora": True}, {"use_dora": True}),
            ({"dora": True, "lora_dropout": 0.1}, {"use_dora": True, "lora_dropout": 0.1}),
            ({"dora": True, "rslora": True}, {"use_dora": True, "use_rslora": True}),
        ],
        ids=["lora", "dora", "dora and dropout", "dora and rslora"],
    )
    def test_the_peak_is_that_of_peft_on_a_cpu(
        self, options: dict[str, Any], settings: dict[str, Any], policy: str
    ) -> None:
        """A step with PEFT's modules, measured on a CPU to the byte."""
        model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16)
        model.config.use_cache = False
        config = peft.LoraConfig(r=8, target_modules="all-linear", **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reads a name that Transformers has deprecated
            adapted: nn.Module = peft.get_peft_model(model, config).train()
        optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad])
        tokens, labels = (torch.zeros(2, 256, dtype=torch.long) for _ in range(2))

        def step() -> None:
            adapted(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        with graphckpt.apply(adapted, True) if policy == "full" else nullcontext():
            step()
            real = RealStep(adapted, step)
            with real.restoring():
                measured = peak_of(real.levels())
        # `full` is estimated beside `keep`.
        common = {"seq": 256, "lora": 8, "lora_targets": "all-linear", "optimizer": "adamw", "policy": "full"}
        predicted = estimated("cpu", **common, **options)
        assert predicted.policies[policy].allocated_bytes == measured

    def test_experts_and_every_architecture_of_the_table(self) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        mixtral = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=256, num_local_experts=4)
        t5 = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
        for config, layers, number in (
            (mixtral, "q_proj, v_proj", 4),
            (t5, "q, v", 12),
            (GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256), "c_attn", 2),
        ):
            estimate = graphckpt.estimate(config, device="h100", seq=64, lora=4, policy="keep", progress=False)
            assert f"on {number} layers ({layers}, which PEFT" in " ".join(str(estimate).split())
            assert 0 < estimate.num_trainable < 20_000

    def test_types_and_kinds(self) -> None:
        plain, half = estimated(lora=8), estimated(lora=8, lora_dtype="bf16")
        assert half.gradient_bytes == plain.gradient_bytes / 2
        assert half.policies["keep"].parts.layers < plain.policies["keep"].parts.layers
        dora = estimated(lora=8, dora=True)
        assert dora.num_trainable == plain.num_trainable + LAYERS * (256 + 128)  # a magnitude for each output
        assert dora.policies["keep"].parts.layers > plain.policies["keep"].parts.layers
        dropped = estimated(lora=8, lora_dropout=0.1)
        assert dropped.policies["keep"].parts.layers > plain.policies["keep"].parts.layers
        ranked = estimated(lora=8, rslora=True)
        assert ranked.policies["keep"].allocated_bytes == plain.policies["keep"].allocated_bytes
        for estimate, words in (
            (dora, "DoRA"),
            (dropped, "dropout 0.1"),
            (ranked, "rank-stabilized"),
            (half, "bfloat16"),
        ):
            assert words in " ".join(str(estimate).split())


class TestLines:
    """The lines of Python that train like the estimate."""

    def test_lines_name_the_quantization_the_adapters_and_the_optimizer(self, tmp_path: Path) -> None:
        LLAMA.save_pretrained(tmp_path)
        options = {"quantization": "nf4-double", "lora": 8, "lora_targets": "q_proj,v_proj", "dora": False}
        settings = {"rslora": True, "optimizer": "paged-adamw-8bit", "policy": "full", "seq": 64, "dtype": "bfloat16"}
        estimate = graphckpt.estimate(str(tmp_path), device="h100", progress=False, **options, **settings)
        for trainer in ("torch", "transformers", "trl", "lightning"):
            lines = estimate.lines(trainer)
            compile(lines, trainer, "exec")
            assert "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in lines
            assert "bnb_4bit_use_double_quant=True), device_map={'': 0}" in lines
            assert "LoraConfig(r=8, target_modules=['q_proj', 'v_proj'], use_rslora=True)" in lines
            assert "bitsandbytes.optim.PagedAdamW8bit" in lines
            assert "import bitsandbytes.optim\n" in lines

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"optimizer": "muon"}, "optimizer='muon' has no lines of a trainer · fix: optimizer='adamw-8bit'"),
            ({"fused_backward": True}, "fused_backward has no lines of a trainer · fix: leave fused_backward out"),
            ({"quantization": "int8", "lora": 8}, "quantized weights are those of a model · fix: name the model"),
        ],
    )
    def test_what_has_no_lines(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as error:
            estimated(**options).lines("torch")
        assert text in str(error.value)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            (
                {"quantization": "nf4"},
                "quantization: expected lora with it, got 'nf4' alone: quantized weights are frozen",
            ),
            ({"quantization": "nf5", "lora": 8}, "quantization: expected nf4, nf4-double or int8, got 'nf5'"),
            ({"lora_targets": "q_proj"}, "lora_targets: expected lora with it, got 'q_proj' alone"),
            ({"lora": 8, "lora_dropout": 1.5}, "lora_dropout: expected a number from 0 to below 1, got 1.5"),
            ({"lora": 8, "dora": True, "quantization": "int8"}, "dora: expected 4 bits, got quantization 'int8'"),
            (
                {"lora": 8, "world_size": 2, "quantization": "nf4"},
                "quantization: expected one process, got world_size 2",
            ),
            (
                {"optimizer": "adamw-offload", "fused_backward": True},
                "fused_backward: expected an optimizer on the device",
            ),
            ({"optimizer": "adamw-9bit"}, "got 'adamw-9bit' · did you mean 'adamw-8bit'"),
            (
                {"optimizer": "adamw-8bit", "world_size": 8},
                "optimizer: expected one of adamw, adamw-fused",
            ),
            ({"policy": "full", "memory_budget": "2GiB"}, "memory_budget: expected no policy with it"),
            (
                {"fused_backward": True, "clip": True, "spelling": "command"},
                "· fix: leave --clip out",
            ),
            (
                {"rslora": True, "spelling": "command"},
                "got it alone · fix: --lora 16",
            ),
        ],
    )
    def test_options_that_do_not_suit_each_other(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as error:
            EstimateOptions(**options)
        assert text in str(error.value)
        assert " · fix: " in str(error.value)

    def test_flash_attention_on_a_device_without_its_kernels(self) -> None:
        with pytest.raises(ConfigError, match=r"attention: expected a device of compute capability 8.0 or above"):
            estimated(device="t4", attention="flash", dtype="float16")

    @pytest.mark.parametrize(
        ("targets", "missing"),
        [("query,value", "query,value"), ("q_proj,foo", "foo"), ("self_attn.q_proj,proj", "proj")],
    )
    def test_layers_that_the_model_does_not_have(self, targets: str, missing: str) -> None:
        with pytest.raises(ConfigError) as error:
            estimated(lora=8, lora_targets=targets)
        assert f"has no layers named {missing!r}; " in str(error.value)
        assert "its linear layers are named down_proj, gate_proj, k_proj" in str(error.value)
        assert str(error.value).endswith("fix: lora_targets='all-linear'")

    @pytest.mark.parametrize("kind", [MixtralConfig, Qwen3MoeConfig])
    @pytest.mark.parametrize("options", [{"lora_targets": "all-linear"}, {"lora_targets": "gate", "lora_dropout": 0.1}])
    def test_adapters_of_experts_and_routers(self, kind: Any, options: dict[str, Any]) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = kind(**sizes, num_key_value_heads=2, vocab_size=256)
        settings = {"device": "h100", "seq": 16, "lora": 4, "policy": "keep", "progress": False}
        with pytest.raises(ConfigError) as error:
            graphckpt.estimate(config, **settings, **options)
        assert str(error.value).startswith(f"lora_targets: {options['lora_targets']!r} has adapters on parameters")
        assert str(error.value).endswith(" · fix: lora_targets='q_proj,k_proj,v_proj,o_proj'")
        fixed = graphckpt.estimate(config, **settings, **{**options, "lora_targets": "q_proj,k_proj,v_proj,o_proj"})
        assert "on 4 layers (q_proj, k_proj, v_proj, o_proj)" in " ".join(str(fixed).split())
