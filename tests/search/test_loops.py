"""``graphckpt estimate`` for losses, micro-batches, clipping and kernels of attention by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, PhiConfig, T5Config

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.planning.steps import RealStep, peak_of
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.estimate_result import Estimate
from graphckpt.train.tasks.causal_lm import add_loss_head, loss_of

WIDTH, VOCABULARY, TOKENS = 128, 32768, 2 * 512
LLAMA = LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
)


@cache
def estimated(**options: Any) -> Estimate:
    settings = {"batch": 2, "seq": 512, "dtype": "bfloat16", "policy": "keep", "optimizer": "sgd", **options}
    return graphckpt.estimate(LLAMA, device="h100", progress=False, **settings)


def text_of(estimate: Estimate) -> str:
    return " ".join(str(estimate).split())


class TestLosses:
    def test_a_loss_in_chunks_has_no_logits_of_all_tokens(self) -> None:
        """The model's loss has them in bfloat16, and twice in float32."""
        logits = TOKENS * VOCABULARY
        plain = estimated().policies["keep"].allocated_bytes
        liger = estimated(loss="liger").policies["keep"].allocated_bytes
        trl = estimated(loss="trl").policies["keep"].allocated_bytes
        weight_grad = VOCABULARY * WIDTH
        # Liger's chunk is as large as the inputs, TRL's one tile of all tokens here, with gradients in float32.
        assert plain - liger > 9 * logits
        assert 2 * logits < trl - liger < 2 * logits + 5 * weight_grad
        assert plain - trl > 7 * logits

    def test_weights_and_trained_parameters_stay_the_same(self) -> None:
        for loss in ("trl", "liger"):
            estimate = estimated(loss=loss)
            assert (estimate.num_parameters, estimate.weight_bytes, estimate.gradient_bytes) == (
                estimated().num_parameters,
                estimated().weight_bytes,
                estimated().gradient_bytes,
            )
            assert loss in text_of(estimate).lower()

    @pytest.mark.parametrize("loss", ["trl", "liger"])
    def test_a_frozen_head_has_no_gradient(self, loss: str) -> None:
        pytest.importorskip("peft")
        frozen, trained = estimated(loss=loss, lora=2), estimated(loss=loss)
        fewer = trained.policies["keep"].allocated_bytes - frozen.policies["keep"].allocated_bytes
        assert fewer > 2 * VOCABULARY * WIDTH

    @pytest.mark.parametrize("policy", ["keep", "full"])
    def test_tiles_take_what_the_loss_head_of_the_trainer_does(self, policy: str) -> None:
        """A step of the trainer's model on a CPU, with its loss head in eight slices."""
        model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32).train()
        add_loss_head(model)
        tokens = torch.zeros(2, 256, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        policies = {"loss_head": graphckpt.Tiles(8, reduce="sum"), "model.layers.*": policy}
        with graphckpt.apply(model, policies):
            step()
            real = RealStep(model, step)
            with real.restoring():
                measured = peak_of(real.levels())
        options = {"device": "cpu", "seq": 256, "dtype": "float32", "loss": "tiles", "policy": policy}
        predicted = graphckpt.estimate(LLAMA, batch=2, optimizer="sgd", progress=False, **options)
        assert predicted.policies[policy].allocated_bytes == pytest.approx(measured, rel=0.001)
        assert "eight slices" in text_of(predicted)

    def test_tiles_take_a_head_with_a_bias(self) -> None:
        phi = PhiConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=4096
        )
        options = {"device": "h100", "batch": 8, "seq": 128, "policy": "keep", "progress": False}
        peaks = [
            graphckpt.estimate(phi, loss=loss, **options).policies["keep"].allocated_bytes
            for loss in ("model", "tiles")
        ]
        logits = 8 * 128 * 4096
        assert peaks[0] - peaks[1] > 8 * logits

    @pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
    def test_tiles_on_ranks_and_without_lines(self) -> None:
        sharded = estimated(loss="tiles", world_size=2)
        assert sharded.policies["keep"].allocated_bytes < estimated(world_size=2).policies["keep"].allocated_bytes
        with pytest.raises(
            ConfigError, match=r"--for torch: loss='tiles' has no lines of a trainer · fix: .*loss_head"
        ):
            estimated(loss="tiles").lines("torch")

    def test_models_that_it_does_not_suit(self) -> None:
        t5 = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
        gemma = Gemma2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256)
        for config, text in (
            (t5, "loss: expected 'model' for seq2seq-lm, got 'liger' · fix: loss='model'"),
            (gemma, "loss: gemma2: expected a head without a bias, whose logits the loss gets as they are"),
        ):
            with pytest.raises(ConfigError) as error:
                graphckpt.estimate(config, device="h100", seq=64, loss="liger", policy="keep")
            assert text in str(error.value)
        with pytest.raises(ConfigError, match="loss: gemma2: expected a head, whose logits the loss gets as they are"):
            graphckpt.estimate(gemma, device="h100", seq=64, loss="tiles", policy="keep")


class TestMicroBatches:
    def test_gradients_are_alive_in_the_next_forward(self) -> None:
        one, two, eight = (estimated(accumulation=n, optimizer="adamw-fused") for n in (1, 2, 8))
        assert one.policies["keep"].parts.gradients < 0.1 * one.gradient_bytes
        assert two.policies["keep"].parts.gradients == pytest.approx(two.gradient_bytes, rel=0.01)
        assert eight.policies["keep"].allocated_bytes == two.policies["keep"].allocated_bytes
        update = 2 * one.policies["keep"].seconds - two.policies["keep"].seconds
        expected = 8 * (one.policies["keep"].seconds - update) + update
        assert eight.policies["keep"].seconds == pytest.approx(expected, rel=0.05)
        rate = eight.policies["keep"].tokens_per_second
        assert rate == pytest.approx(8 * TOKENS / eight.policies["keep"].seconds)
        assert "8 micro-batches of 2 a step" in text_of(eight)

    @pytest.mark.parametrize("accumulation", [2, 4])
    def test_layers_keep_what_they_do_in_one_micro_batch(self, accumulation: int) -> None:
        for policy in ("keep", "full"):
            one, several = (estimated(accumulation=n, policy="full").policies[policy] for n in (1, accumulation))
            assert set(one.parts.saved_by_layers) == {"model.layers.* (2)"}
            assert several.parts.saved_by_layers == one.parts.saved_by_layers

    def test_clipping_takes_time_and_no_memory(self) -> None:
        plain, clipped = estimated(), estimated(clip=True)
        assert clipped.policies["keep"].seconds > plain.policies["keep"].seconds
        assert clipped.policies["keep"].allocated_bytes == plain.policies["keep"].allocated_bytes
        assert "gradients clipped by their norm" in text_of(clipped)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"accumulation": 0}, "accumulation: expected a positive int, got 0 · fix: accumulation=4"),
            ({"accumulation": 4, "fused_backward": True}, "accumulation: expected 1 with fused_backward"),
            ({"clip": True, "fused_backward": True}, "clip: expected gradients of all weights at once"),
            ({"loss": "ligre"}, "loss: expected model, tiles, trl or liger, got 'ligre' · did you mean 'liger'?"),
        ],
    )
    def test_options_that_cannot_be_used(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as error:
            EstimateOptions(**options)
        assert text in str(error.value)


class TestAttention:
    def test_kernels_by_name(self) -> None:
        flash, flex, eager = (estimated(attention=name).policies["keep"] for name in ("flash", "flex", "eager"))
        assert flash.allocated_bytes == flex.allocated_bytes
        weights = 2 * 2 * 4 * 512 * 512 * 2  # layers x batch x heads x pairs x bytes
        assert eager.parts.layers - flash.parts.layers > weights
        assert "attention flash" in text_of(estimated(attention="flash"))
        assert EstimateOptions(attention="flash_attention_2") == EstimateOptions(attention="flash")

    def test_a_type_that_flash_attention_does_not_take(self) -> None:
        with pytest.raises(ConfigError, match=r"FlashAttention takes float16 or bfloat16 .*, got float32"):
            estimated(attention="flash", dtype="float32")
        assert estimated(attention="flex", dtype="float32").policies["keep"].allocated_bytes > 0
        assert estimated(attention="flash", dtype="float32", autocast="bfloat16").policies["keep"].fits

    @pytest.mark.parametrize("options", [{"packed": 128}, {"window": 128}])
    def test_samples_in_a_row_and_windows_take_less_time_and_the_same_bytes(self, options: dict[str, int]) -> None:
        sizes = {**LLAMA.to_dict(), "max_position_embeddings": 8192, "architectures": None}
        config = MistralConfig(**sizes | {"sliding_window": options.get("window"), "model_type": "mistral"})
        settings: dict[str, Any] = {"seq": 8192, "dtype": "bfloat16", "policy": "keep", "attention": "flash"}
        plain = graphckpt.estimate(MistralConfig(**sizes | {"sliding_window": None}), device="h100", **settings)
        other = graphckpt.estimate(config, device="h100", packed=options.get("packed"), **settings)
        assert other.policies["keep"].allocated_bytes == plain.policies["keep"].allocated_bytes
        assert other.policies["keep"].seconds < 0.96 * plain.policies["keep"].seconds

    def test_packed_rows_are_named(self) -> None:
        text = text_of(estimated(attention="flash", packed=64))
        assert "sequences of 512 tokens without padding, 8 samples packed into each" in text

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"packed": 64}, "packed: expected attention='flash' with it, got None · fix: attention='flash'"),
            ({"packed": 0, "attention": "flash"}, "packed: expected a positive int, got 0 · fix: packed=512"),
            (
                {"packed": 100, "attention": "flash"},
                "packed: expected a number that divides the 512 tokens of a row, got 100 · fix: packed=64",
            ),
            (
                {"packed": 64, "attention": "flash", "task": "sequence-classification"},
                "packed: expected nothing for sequence-classification, got 64 · fix: leave it out",
            ),
        ],
    )
    def test_samples_that_cannot_be_packed(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as error:
            estimated(**options)
        assert text in str(error.value)

    def test_a_model_with_a_bias_of_positions(self) -> None:
        t5 = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
        for name in ("flash", "flex"):
            with pytest.raises(ConfigError, match="fix: attention='sdpa'"):
                graphckpt.estimate(t5, device="h100", seq=64, attention=name, dtype="bfloat16", policy="keep")


@pytest.mark.parametrize(
    ("trainer", "options", "lines"),
    [
        (
            "torch",
            {"accumulation": 4, "clip": True},
            ["(loss / 4).backward()", "clip_grad_norm_(model.parameters(), 1.0)"],
        ),
        ("transformers", {"accumulation": 4, "clip": True}, ["gradient_accumulation_steps=4,", "max_grad_norm=1.0,"]),
        ("transformers", {"loss": "liger"}, ["use_liger_kernel=True,"]),
        ("trl", {"loss": "trl", "attention": "flash"}, ["attn_implementation='flash_attention_2'"]),
        ("trl", {"packed": 64, "attention": "flash"}, ["max_length=512,", "packing=True,"]),
        ("lightning", {"accumulation": 4, "clip": True}, ["accumulate_grad_batches=4, gradient_clip_val=1.0"]),
    ],
)
def test_lines_of_a_trainer(trainer: str, options: dict[str, Any], lines: list[str]) -> None:
    text = estimated(**options).lines(trainer)
    compile(text, trainer, "exec")
    for line in lines:
        assert line in text


def test_a_loss_without_lines_of_a_trainer() -> None:
    with pytest.raises(ConfigError, match="has no lines of torch · fix: --for transformers"):
        estimated(loss="liger").lines("torch")
    with pytest.raises(ConfigError, match="packed has no lines of torch · fix: --for trl"):
        estimated(packed=64, attention="flash").lines("torch")
