"""``graphckpt estimate``: the memory and the time of a model's training step, from its config alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    ResNetConfig,
    T5Config,
    ViTConfig,
)

import graphckpt
from graphckpt.blocks.forward import policy_of
from graphckpt.cli import main
from graphckpt.errors import ConfigError
from graphckpt.extras import MissingPackageError
from graphckpt.planning.steps import FakeStep
from graphckpt.search import estimate as module
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.estimate_result import Estimate
from graphckpt.search.pretrained import PretrainedModel
from graphckpt.units import format_bytes

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ROUNDING = 512
GIB = 2**30


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=256, max_position_embeddings=512, **more)


CONFIGS: dict[str, PreTrainedConfig] = {
    "causal-lm": llama(architectures=["LlamaForCausalLM"]),
    "seq2seq-lm": T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "masked-lm": BertConfig(**SIZES, vocab_size=256, max_position_embeddings=128, architectures=["BertForMaskedLM"]),
    "sequence-classification": GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=256, architectures=["GPT2ForSequenceClassification"]
    ),
    "token-classification": BertConfig(**SIZES, vocab_size=256, architectures=["BertForTokenClassification"]),
    "question-answering": BertConfig(**SIZES, vocab_size=256, architectures=["BertForQuestionAnswering"]),
    "image-classification": ViTConfig(**SIZES, image_size=32, patch_size=8),
}


@cache
def estimated(task: str = "causal-lm", **options: Any) -> Estimate:
    return graphckpt.estimate(CONFIGS[task], device="h100", batch=2, progress=False, **options)


def folder_of(config: PreTrainedConfig, path: Path, **more: Any) -> str:
    config.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return str(path)


def near(num_bytes: int, num_elements: int, size: int, num_tensors: int) -> bool:
    """Whether bytes are those of the elements, each tensor rounded up by the allocator."""
    return 0 <= num_bytes - num_elements * size <= ROUNDING * num_tensors


class TestFigures:
    @pytest.mark.parametrize("task", CONFIGS)
    def test_each_task_is_that_of_the_architecture_and_its_parts_sum_to_the_peak(self, task: str) -> None:
        estimate = estimated(task)
        assert estimate.task == task
        assert list(estimate.policies) == ["keep", "full", "plan"]
        for policy in estimate.policies.values():
            listed = policy.parts.to_dict().values()
            assert sum(listed) == policy.allocated_bytes
            assert min(listed) >= 0
            assert policy.allocated_bytes <= policy.reserved_bytes < policy.nvidia_smi_bytes
            assert policy.samples_per_second == pytest.approx(2 / policy.seconds)
        keep, full = estimate.policies["keep"], estimate.policies["full"]
        assert sum(full.parts.saved_by_layers.values()) < sum(keep.parts.saved_by_layers.values()) / 2
        assert full.seconds > keep.seconds
        assert (keep.tokens_per_second is None) is (task == "image-classification")

    @pytest.mark.parametrize(
        ("optimizer", "states"), [("adamw", 2), ("adamw-fused", 2), ("adam", 2), ("sgd", 0), ("sgd-momentum", 1)]
    )
    def test_weights_gradients_and_states_are_those_of_the_parameters(self, optimizer: str, states: int) -> None:
        estimate = estimated(optimizer=optimizer, policy="keep", dtype="bfloat16")
        model = AutoModelForCausalLM.from_config(CONFIGS["causal-lm"])
        tensors = list(model.parameters())
        number = sum(tensor.numel() for tensor in tensors)
        assert estimate.num_parameters == estimate.num_trainable == number
        assert near(estimate.weight_bytes, number, 2, len(tensors) + 2)
        assert near(estimate.gradient_bytes, number, 2, len(tensors))
        assert near(estimate.optimizer_bytes, states * number, 2, 3 * len(tensors))

    def test_adafactor_keeps_rows_and_columns(self) -> None:
        adafactor = estimated(optimizer="adafactor", policy="keep")
        assert 0 < adafactor.optimizer_bytes < estimated().optimizer_bytes / 5

    def test_figures_are_those_of_a_plan_of_the_same_step(self) -> None:
        def make_model() -> tuple[torch.nn.Module, Callable[[], None]]:
            model = AutoModelForCausalLM.from_config(CONFIGS["causal-lm"], dtype=torch.float32).train()
            optimizer = torch.optim.AdamW(model.parameters())
            tokens = torch.zeros(2, 512, dtype=torch.long)

            def step() -> None:
                model(input_ids=tokens, labels=tokens.clone(), use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return model, step

        plan = graphckpt.plan(make_model, device="h100", memory_budget="max")
        keep, best = estimated().policies["keep"], estimated().policies["plan"]
        assert abs(keep.allocated_bytes - plan.plain_peak_bytes) < 0.001 * keep.allocated_bytes
        assert keep.seconds == pytest.approx(plan.plain_step_seconds, rel=0.02)
        assert keep.reserved_bytes == pytest.approx(plan.predicted_reserved_bytes, rel=0.05)
        assert best.policies == plan.policies == {}

    def test_a_budget_chooses_policies_and_the_line_of_python_sets_them(self) -> None:
        estimate = estimated(memory_budget=0.92)
        keep, best = estimate.policies["keep"], estimate.policies["plan"]
        assert best.allocated_bytes <= 0.92 * keep.allocated_bytes
        assert keep.seconds < best.seconds
        model = AutoModelForCausalLM.from_config(CONFIGS["causal-lm"])
        handle = eval(estimate.apply_line, {"graphckpt": graphckpt, "model": model})
        policies = {name for name, block in model.named_modules() if policy_of(block) is not None}
        handle.remove()
        assert policies == set(best.policies) != set()
        assert estimate.plan is not None
        assert estimate.plan.policies == best.policies

    def test_nothing_is_recomputed_where_everything_fits(self) -> None:
        assert estimated().policies["plan"].policies == {}
        assert estimated().policies["plan"].seconds == estimated().policies["keep"].seconds
        assert estimated().apply_line.startswith("# ")

    def test_a_device_that_is_too_small_gets_the_lowest_peak_and_says_so(self) -> None:
        estimate = estimated(memory="600MiB")
        assert [policy.fits for policy in estimate.policies.values()] == [False, False, False]
        assert estimate.policies["plan"].title == "lowest peak"
        assert estimate.policies["plan"].allocated_bytes <= estimate.policies["full"].allocated_bytes
        assert "no plan fits" in str(estimate)
        assert "600 MiB" in str(estimate)
        (note,) = (note for note in estimate.notes if "no plan fits" in note)
        fixes = "a smaller batch, a shorter seq, dtype='bfloat16', lora=16, or a device with more memory"
        assert note.endswith(f" · fix: {fixes}")

    def test_only_what_helps_is_advised(self) -> None:
        def note_of(**options: Any) -> str:
            small = {"memory": "520MiB", "lora": 2, "seq": 64} | options
            estimate = graphckpt.estimate(llama(), device="h100", progress=False, **small)
            return next(note for note in estimate.notes if " fit" in note)

        pytest.importorskip("peft")
        assert note_of().endswith(" · fix: a shorter seq, dtype='bfloat16', or a device with more memory")
        assert note_of(batch=2, dtype="bf16").endswith(
            "fix: a smaller batch, a shorter seq, or a device with more memory"
        )
        budget = note_of(memory_budget="1MiB", memory=None)
        assert budget.endswith("or a larger memory_budget")
        # Weights alone are more than the memory: no batch and no sequence helps.
        assert "seq" not in note_of(memory="513MiB", lora=None)

    def test_only_more_memory_helps_adapters_of_a_large_model(self) -> None:
        pytest.importorskip("peft")
        options = {"memory": "600MiB", "dtype": "bf16", "lora": 2, "seq": 16}
        large = LlamaConfig(**{**SIZES, "hidden_size": 2048}, vocab_size=160_000)
        estimate = graphckpt.estimate(large, device="h100", progress=False, **options)
        (note,) = (note for note in estimate.notes if "no plan fits" in note)
        assert note.endswith(" · fix: a device with more memory")

    def test_temporaries_of_the_update_are_fixed_before_anything_else(self) -> None:
        config = LlamaConfig(**{**SIZES, "hidden_size": 512}, vocab_size=32000)

        def first_fix(optimizer: str) -> tuple[bool, str]:
            estimate = graphckpt.estimate(config, device="h100", seq=8, memory=memory, optimizer=optimizer)
            note = next((note for note in estimate.notes if "no plan fits" in note), "")
            return estimate.policies["plan"].fits, note.partition(" · fix: ")[2]

        memory: str | None = None
        sizes = [
            graphckpt.estimate(config, device="h100", seq=8, policy="keep", optimizer=name)
            .policies["keep"]
            .nvidia_smi_bytes
            for name in ("adamw", "adamw-fused")
        ]
        assert sizes[0] > sizes[1]
        memory = f"{sum(sizes) // 2}"
        fits, fix = first_fix("adamw")
        assert not fits
        assert fix.startswith("optimizer='adamw-fused', whose update has no temporaries")
        assert first_fix("adamw-fused") == (True, "")

    def test_a_budget_below_the_weights_gets_the_lowest_peak(self) -> None:
        estimate = estimated(memory_budget="10KiB", optimizer="sgd")
        assert estimate.policies["plan"].title == "lowest peak"
        assert "the parameters alone take" in estimate.notes[0]

    def test_an_estimate_lists_the_devices_with_enough_memory(self) -> None:
        assert {"h100", "t4"} <= set(estimated().devices), "attention in float32 has the same kernel on both"
        assert not estimated().other_devices
        total = min(policy.nvidia_smi_bytes for policy in estimated().policies.values())
        assert f"the least of these, {format_bytes(total)}, fits on: " in str(estimated())

    def test_devices_with_other_kernels_of_attention_are_apart(self) -> None:
        estimate = graphckpt.estimate(llama(), device="h100", seq=64, dtype="bf16", policy="keep")
        assert {"h100", "b200"} <= set(estimate.devices)  # cuDNN's
        assert {"a100-40g", "t4"} <= set(estimate.other_devices)
        assert "enough memory, but other kernels of attention: rtx3080" in str(estimate)
        assert estimate.to_dict()["other_devices"] == list(estimate.other_devices)
        flash = graphckpt.estimate(llama(), device="h100", seq=64, dtype="bf16", policy="keep", attention="flash")
        assert {"h100", "a100-40g"} <= set(flash.devices)
        assert "t4" not in (*flash.devices, *flash.other_devices), "FlashAttention-2 does not run there"

    def test_lora_trains_adapters_alone(self) -> None:
        estimate, every = estimated(lora=4, policy="keep"), estimated()
        assert 0 < estimate.num_trainable < every.num_parameters / 10
        assert near(estimate.gradient_bytes, estimate.num_trainable, 4, 64)
        assert near(estimate.optimizer_bytes, 2 * estimate.num_trainable, 4, 3 * 64)
        assert "LoRA of rank 4" in str(estimate)
        assert estimate.policies["keep"].parts.layers < every.policies["keep"].parts.layers

    def test_one_policy_stands_beside_everything_kept(self) -> None:
        estimate = estimated(policy="selective")
        assert list(estimate.policies) == ["keep", "selective"]
        assert estimate.plan is None
        assert estimate.policies["keep"].allocated_bytes == estimated().policies["keep"].allocated_bytes
        assert "{'model.layers.*': {'activation_checkpointing': 'selective'}}" in estimate.apply_line
        assert list(estimated(policy="keep").policies) == ["keep"]

    def test_autocast_attention_and_sequences_change_the_figures(self) -> None:
        base = estimated(policy="keep").policies["keep"].parts
        half = estimated(policy="keep", autocast="bfloat16").policies["keep"].parts
        assert half.layers < base.layers
        assert half.weights == base.weights
        eager = estimated(policy="keep", attention="eager", autocast="bfloat16").policies["keep"].parts
        assert eager.layers > half.layers + 2 * 2 * 4 * 512 * 512 * 2  # layers x batch x heads x pairs x bytes
        short = estimated(policy="keep", seq=128, autocast="bfloat16").policies["keep"].parts
        assert short.layers == pytest.approx(half.layers / 4, rel=0.1)

    def test_an_estimate_states_its_assumptions(self) -> None:
        text = " ".join(str(estimated()).split())
        for words in (
            "weights in float32",
            "autocast off",
            "attention math",
            "AdamW foreach",
            "512 tokens (the default)",
        ):
            assert words in text
        assert estimated(seq=64, dtype=torch.bfloat16, policy="keep").assumptions[0] == "weights in bfloat16"
        assert "experts" not in text

    @pytest.mark.parametrize("options", [{}, {"autocast": "bfloat16"}, {"dtype": "bfloat16"}])
    def test_mixtures_of_experts(self, options: dict[str, str]) -> None:
        config = MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=256, num_local_experts=4)
        estimate = graphckpt.estimate(config, device="h100", seq=64, policy="keep", **options)
        assert "routing of experts is assumed balanced" in estimate.assumptions

    def test_the_config_of_the_caller_stays_as_it_is(self) -> None:
        config = llama()
        before = config.to_dict()
        graphckpt.estimate(config, device="h100", seq=64, policy="keep", task="sequence-classification")
        assert config.to_dict() == before

    def test_no_step_runs_more_often_than_it_must(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each run simulates two steps, and a sample one: imports aside, these are the seconds of an estimate."""
        runs: list[str] = []
        for name in ("run", "sample"):
            original = getattr(FakeStep, name)
            monkeypatch.setattr(
                FakeStep,
                name,
                lambda *args, _run=original, _name=name, **kw: (runs.append(_name), _run(*args, **kw))[1],
            )
        config = LlamaConfig(**{**SIZES, "num_hidden_layers": 7})
        graphckpt.estimate(config, device="h100", seq=64)
        # All layers kept and recomputed, a few recomputed and under the other policies, and each policy.
        assert runs == [*["sample"] * 4, "run", "run"]
        runs.clear()
        graphckpt.estimate(config, device="h100", seq=64, memory_budget=0.9)
        assert runs.count("run") <= 3


class TestSources:
    def test_a_folder_a_file_and_a_config_give_the_same(self, tmp_path: Path) -> None:
        folder = folder_of(llama(), tmp_path / "small-llama")
        by_folder = graphckpt.estimate(folder, device="h100", batch=2, policy="keep")
        assert (by_folder.model, by_folder.architecture) == ("small-llama", "LlamaForCausalLM")
        file = Path(folder, "config.json").rename(tmp_path / "other.json")
        by_file = graphckpt.estimate(file, device="h100", batch=2, policy="keep")
        assert by_file.model == "other"
        assert by_file.policies["keep"] == by_folder.policies["keep"] == estimated(policy="keep").policies["keep"]

    def test_the_dtype_of_the_config_is_that_of_the_weights(self, tmp_path: Path) -> None:
        number = estimated().num_parameters
        for key in ("dtype", "torch_dtype"):  # the name of today, and that of Transformers 4
            folder = folder_of(llama(), tmp_path, **{"dtype": None, key: "bfloat16"})
            estimate = graphckpt.estimate(folder, device="h100", seq=64, policy="keep")
            assert near(estimate.weight_bytes, number, 2, 200)

    def test_a_name_in_the_cache_needs_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = folder_of(llama(), tmp_path)

        def download(name: str, file: str, *, local_files_only: bool = False) -> str:
            assert (name, local_files_only) == ("someone/llama", True)
            return str(Path(folder, file))

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert graphckpt.estimate("someone/llama", device="h100", seq=64, policy="keep").model == "someone/llama"


def fault_of(model: object, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        graphckpt.estimate(model, device="h100", **options)
    text = str(error.value)
    assert " · fix: " in text
    return text


class TestErrors:
    def test_no_network_and_an_unknown_name_are_one_text_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "nobody/nothing: not a folder, not in the cache, and the hub cannot be reached"
        start = time.monotonic()
        assert fault_of("nobody/nothing").startswith(text)  # HF_HUB_OFFLINE

        def no_network(*_: object, **__: object) -> None:
            raise OSError("no route")

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
        assert fault_of("nobody/nothing").startswith(text)
        assert time.monotonic() - start < 10

    @pytest.mark.parametrize(
        ("kind", "text"),
        [
            ("GatedRepoError", "someone/model: gated · fix: accept its terms on https://huggingface.co/someone/model"),
            ("RepositoryNotFoundError", "someone/model: not a folder, and not a public model on the hub"),
            ("RemoteEntryNotFoundError", "someone/model: expected a config.json on the hub, found none"),
            ("LocalEntryNotFoundError", "someone/model: not a folder, not in the cache"),
            ("HfHubHTTPError", "someone/model: the hub answered"),
        ],
    )
    def test_an_error_of_the_hub_has_a_fix(self, kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        error_class = getattr(huggingface_hub.errors, kind)

        def download(*_: object, local_files_only: bool = False, **__: object) -> str:
            if local_files_only:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
            raise error_class.__new__(error_class)

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)  # the hub is there
        assert fault_of("someone/model").startswith(text)

    def test_code_of_the_model_is_not_run(self, tmp_path: Path) -> None:
        folder = folder_of(llama(), tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Own"})
        (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')")
        assert "custom code (auto_map), which is never run" in fault_of(folder)

    def test_quantized_weights(self, tmp_path: Path) -> None:
        folder = folder_of(llama(), tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
        assert "quantized weights (gptq) cannot be estimated" in fault_of(folder)

    def test_values_of_the_wrong_type(self, tmp_path: Path) -> None:
        folder = folder_of(llama(), tmp_path / "small", quantization_config="int8")
        assert "quantized weights (int8) cannot be estimated" in fault_of(folder)
        (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
        assert "expected a string as model_type, got ['llama']" in fault_of(tmp_path)

    def test_a_policy_for_runs_of_layers(self) -> None:
        text = fault_of(llama(), policy="joined")
        assert text.startswith("policy: expected a policy that each layer can have alone, got 'joined'")

    def test_a_task_that_the_architecture_does_not_have(self, tmp_path: Path) -> None:
        text = fault_of(folder_of(llama(), tmp_path / "small"), task="masked-lm")
        assert text.startswith("task: small (llama) has no masked-lm · fix: use causal-lm, sequence-classification")

    def test_a_missing_key(self, tmp_path: Path) -> None:
        config = T5Config(d_model=64, num_layers=2, num_heads=4)
        folder = folder_of(config, tmp_path / "t5", decoder_start_token_id=None)
        assert "t5: expected decoder_start_token_id in its config, got nothing" in fault_of(folder)
        (tmp_path / "config.json").write_text('{"hidden_size": 8}')
        assert "expected model_type in its config, got nothing" in fault_of(tmp_path)

    def test_a_config_that_is_not_one(self, tmp_path: Path) -> None:
        assert "expected a folder with a config.json, found none" in fault_of(tmp_path)
        assert "expected a folder or a config.json, found neither" in fault_of(str(tmp_path / "missing"))
        file = tmp_path / "config.json"
        for content, text in (
            ("{", "expected JSON in config.json"),
            ("[]", "expected a mapping in config.json, got a list"),
            ('{"model_type": "lama"}', "unknown model_type 'lama' · did you mean"),
            ('{"model_type": "llama", "hidden_size": "wide"}', "expected a config of llama, got"),
            ('{"model_type": "sam"}', "no task of graphckpt estimate suits 'sam'"),
        ):
            file.write_text(content)
            assert text in fault_of(tmp_path)
        assert "expected a name, a path or a config of Transformers, got 7" in fault_of(7)
        assert "model: expected a name or a path, got ''" in fault_of("")

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"batch": 0}, "batch: expected a positive int, got 0"),
            ({"batch": 10**20}, "batch: expected a positive int, got 1"),
            ({"batch": True}, "batch: expected a positive int, got True"),
            ({"seq": "abc"}, "seq: expected a positive int, got 'abc'"),
            ({"lora": -1}, "lora: expected a positive int, got -1"),
            ({"memory": "24XB"}, "memory: '24XB': unknown unit 'XB' · fix: use 'GiB'"),
            (
                {"optimizer": "adamw-9bit"},
                "optimizer: expected adamw, adamw-fused, adam, sgd, sgd-momentum, adafactor, muon, adamw-8bit",
            ),
            ({"dtype": "bf8"}, "dtype: expected float32, bfloat16 or float16, got 'bf8'"),
            ({"autocast": torch.float64}, "autocast: expected bfloat16 or float16, got 'float64'"),
            ({"attention": "flash_attention_9"}, "attention: expected sdpa, eager, flash or flex"),
            ({"task": "poetry"}, "task: expected causal-lm, seq2seq-lm"),
            ({"policy": "fulll"}, "policy: expected a rule, got 'fulll' · did you mean 'full'?"),
            ({"memory_budget": "24XB"}, "memory_budget: '24XB': unknown unit"),
        ],
    )
    def test_options_are_checked_before_the_model_is_read(self, options: dict[str, Any], text: str) -> None:
        assert text in fault_of("nobody/nothing", **options)

    def test_several_faults_are_told_at_once(self) -> None:
        text = fault_of("nobody/nothing", batch=0, seq=0, optimizer="adm")
        assert text.count("  • ") == 3
        assert "did you mean 'adam'" in text
        assert text.endswith("fix: optimizer='adam'")

    def test_a_sequence_that_is_too_long_and_one_for_images(self) -> None:
        assert "seq: expected at most the 512 positions of llama, got 513 · fix: seq=512" in fault_of(llama(), seq=513)
        text = fault_of(CONFIGS["image-classification"], seq=128)
        assert "seq: expected nothing for image-classification, got 128" in text
        assert "images of the config are 32 x 32" in text

    def test_lora_without_layers_for_it_or_without_peft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic")
        assert "PEFT has no default layers for 'resnet'" in fault_of(config, lora=4)
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(
            MissingPackageError, match=r"peft is not installed · fix: pip install peft, or, .*'\.\[estimate\]'"
        ):
            graphckpt.estimate(llama(), device="h100", lora=4)

    def test_the_error_of_a_step_that_cannot_be_simulated_names_the_model(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("no kernel\nand more")

        monkeypatch.setattr(module.FakeStep, "sample", fail)
        text = fault_of(llama(), seq=64)
        assert "the step of LlamaForCausalLM cannot be simulated: RuntimeError: no kernel · fix:" in text


class TestCommand:
    def test_the_command_prints_the_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = folder_of(llama(), tmp_path / "small")
        assert main(["estimate", folder, "--device", "h100", "--batch", "2", "--memory-budget", "0.9"]) == 0
        printed = capsys.readouterr().out
        for row in ("weights", "gradients (of", "optimizer states", "allocated", "reserved", "nvidia-smi", "tokens/s"):
            assert f"\n{row} " in printed
        assert "no checkpointing  recompute all layers  best plan" in printed
        assert "graphckpt.apply(model, {" in printed

    def test_json_is_what_the_function_returns(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = folder_of(llama(), tmp_path / "small")
        flags = ["--device", "h100", "--batch", "2", "--seq", "64", "--autocast", "bfloat16", "--optimizer", "sgd"]
        assert main(["estimate", folder, *flags, "--memory", "24GiB", "--policy", "full", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        options = {"seq": 64, "autocast": "bfloat16", "optimizer": "sgd", "memory": "24GiB", "policy": "full"}
        result = graphckpt.estimate(folder, device="h100", batch=2, **options)  # type: ignore[arg-type]
        assert printed == json.loads(json.dumps(result.to_dict()))
        for values, names in ((printed, ["keep", "full"]), (estimated().to_dict(), ["keep", "full", "plan"])):
            assert list(values["policies"]) == names
            for policy in values["policies"].values():
                assert {"allocated_bytes", "reserved_bytes", "nvidia_smi_bytes", "seconds", "parts"} <= set(policy)
        assert printed["memory_bytes"] == 24 * GIB

    @pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
    def test_short_names_of_types(self, dtype: object) -> None:
        options = EstimateOptions(dtype=dtype, autocast=dtype)
        assert (options.dtype, options.autocast) == ("bfloat16", "bfloat16")

    @pytest.mark.parametrize(
        ("words", "texts"),
        [
            (
                ["--batch", "0", "--seq", "abc", "--memory", "24XB", "--dtype", "bf8"],
                ["--batch: expected a positive int, got 0 · fix: --batch 8", "got 'abc'", "unknown unit 'XB'", "'bf8'"],
            ),
            (["--device", "h1000"], ["device: unknown profile 'h1000' · did you mean 'h100'"]),
            (["--memory-budget", "24XB"], ["--memory-budget: '24XB': unknown unit 'XB' · fix: use 'GiB'"]),
            (["--cluster", "dgx", "--world-size", "8"], ["cluster: unknown profile 'dgx' · "]),
            (["--for", "trll"], ["--for: expected torch", "did you mean 'trl'? · fix: --for transformers"]),
            (["--for", "torch", "--optimizer", "muon"], ["--for torch: --optimizer muon has no lines", "adamw-8bit"]),
            (["--for", "trl", "--fused-backward"], ["--for trl: --fused-backward has no lines", "leave --fused-b"]),
            (["--for", "torch", "--loss", "trl"], ["--for torch: --loss trl has no lines of torch · fix: --for trl"]),
            (["--for", "lightning", "--world-size", "2"], ["--for lightning: expected one process", "--for torch"]),
            (["--save", "x.txt"], ["save: expected a file that ends in .yaml, got x.txt · fix: x.yaml"]),
            (["--save", "plans/x"], ["got plans/x · fix: plans/x.yaml"]),
            (["--save", "nowhere/x.yaml"], ["nowhere/x.yaml: cannot be written: nowhere is not a folder · fix: "]),
        ],
    )
    def test_flags_are_checked_before_anything_is_imported(self, words: list[str], texts: list[str]) -> None:
        words = ["estimate", "x", *([] if "--device" in words else ["--device", "h100"]), *words]
        code = f"import sys; from graphckpt.cli import main; print(main({words}), 'torch' in sys.modules)"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.split() == ["2", "False"]
        for text in texts:
            assert text in ran.stderr

    def test_a_fix_of_a_note_is_a_flag(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = folder_of(llama(), tmp_path / "small")
        flags = ["--device", "h100", "--batch", "2", "--memory", "600MiB"]
        assert main(["estimate", folder, *flags]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "fix: a smaller --batch, a shorter --seq, --dtype bfloat16, --lora 16, or a device" in printed
        assert main(["estimate", folder, *flags, "--seq", "1000"]) == 2
        assert "got 1000 · fix: --seq 512" in capsys.readouterr().err

    def test_a_trainer_that_cannot_train_the_model_is_an_error_before_it_is_built(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PretrainedModel, "make", None)
        folder = folder_of(CONFIGS["masked-lm"], tmp_path / "small")
        assert main(["estimate", folder, "--device", "h100", "--for", "trl"]) == 2
        assert "--for trl: expected a causal-lm, got masked-lm · fix: --for transformers" in capsys.readouterr().err

    def test_an_error_ends_the_command_with_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["estimate", "nobody/nothing", "--device", "h100"]) == 2
        assert capsys.readouterr().err.startswith("error: nobody/nothing: not a folder")
        assert main(["estimate", "nobody/nothing", "--device", "h1000"]) == 2
        assert "did you mean 'h100'" in capsys.readouterr().err


class TestRanks:
    """``world_size``: one rank of several, over which FSDP2 shards the model."""

    @pytest.mark.parametrize("autocast", [None, "bfloat16"])
    def test_the_figures_are_those_of_a_sharded_step(self, autocast: str | None) -> None:
        sharded = estimated(world_size=8, autocast=autocast, policy="keep")
        assert sharded.world_size == 8
        assert sharded.num_parameters == estimated(policy="keep").num_parameters
        num_tensors = 2 * 9 + 3
        assert near(sharded.gradient_bytes, sharded.num_parameters // 8, 4, num_tensors)
        assert near(sharded.optimizer_bytes, 2 * sharded.num_parameters // 8, 4, 4 * num_tensors)
        assert not dist.is_initialized()

        def make() -> tuple[nn.Module, Callable[[], None]]:
            mesh = init_device_mesh("cuda", (8,))
            dtype = torch.float32 if autocast is None else torch.bfloat16
            policy = MixedPrecisionPolicy(dtype, torch.float32)
            config = CONFIGS["causal-lm"]
            config.use_cache = False
            model: Any = AutoModelForCausalLM.from_config(config).train()
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters())
            tokens = torch.zeros(2, 512, dtype=torch.long)
            labels = tokens.clone()

            def step() -> None:
                model(input_ids=tokens, labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return model, step

        options: dict[str, Any] = {"candidates": ["full"], "check": False, "progress": False}
        plan = graphckpt.plan(make, device="h100", world_size=8, memory_budget="1GiB", **options)
        assert sharded.policies["keep"].allocated_bytes == plan.plain_peak_bytes

    def test_one_rank_with_adapters(self) -> None:
        sharded, alone = (estimated(world_size=size, lora=4, policy="keep") for size in (4, 1))
        assert sharded.num_trainable == alone.num_trainable
        assert sharded.weight_bytes < 0.5 * alone.weight_bytes

    @pytest.mark.parametrize("world_size", [0, -1, 2.0, "8"])
    def test_world_size_is_a_positive_int(self, world_size: object) -> None:
        with pytest.raises(ConfigError, match=r"world_size: expected a positive int, got .* · fix: world_size=8"):
            graphckpt.estimate(CONFIGS["causal-lm"], device="h100", world_size=world_size)

    def test_the_command_has_world_size(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = folder_of(CONFIGS["causal-lm"], tmp_path)
        words = ["estimate", folder, "--device", "h100", "--batch", "2", "--world-size", "8", "--policy", "keep"]
        assert main([*words, "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["world_size"] == 8
        sharded = estimated(world_size=8, autocast=None, policy="keep")
        assert values["policies"]["keep"]["allocated_bytes"] == sharded.policies["keep"].allocated_bytes
        shown = str(sharded)
        assert "(simulated, one rank of 8)" in shown
        assert "tokens/s of a rank" in shown
        assert "FSDP2 over 8 ranks" in " ".join(shown.split())


class TestLayouts:
    """``--world-size`` on the command line: also the layouts over the ranks."""

    WORDS = ("--device", "h100", "--batch", "2", "--policy", "keep")

    def values_of(self, folder: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
        assert main(["estimate", folder, *self.WORDS, *words, "--json"]) == 0
        values: dict[str, Any] = json.loads(capsys.readouterr().out)
        return values

    def test_layouts_are_ranked_beside_what_was_simulated(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = folder_of(CONFIGS["causal-lm"], tmp_path)
        values = self.values_of(folder, capsys, "--world-size", "4")
        layouts = values["layouts"]
        rows = {row["layout"]: row for row in layouts["rows"]}
        assert layouts["samples"] == 8
        # 2 layers, 4 heads, and 2 of keys and values.
        assert set(rows) == {
            "dp=4", "dp=4 zero=2", "dp=4 zero=3", "dp=2 tp=2", "dp=2 tp=2 zero=2", "dp=2 tp=2 zero=3", "dp=2 pp=2",
        }  # fmt: skip
        assert rows["dp=4 zero=3"]["seconds"] == pytest.approx(values["policies"]["keep"]["seconds"])
        seconds = [float(f"{row['seconds']:.3g}") for row in layouts["rows"]]
        assert seconds == sorted(seconds)
        states = 4 * values["num_parameters"] * 4
        assert rows["dp=4"]["states_bytes"] == pytest.approx(states, rel=0.01)
        assert rows["dp=4 zero=3"]["states_bytes"] == pytest.approx(states / 4, rel=0.01)
        parts = values["weight_bytes"] + values["gradient_bytes"] + values["optimizer_bytes"]
        assert parts == pytest.approx(states / 4, rel=0.1)  # the simulated one, with what the allocator rounds up
        reasons = {each["layout"]: each["reason"] for each in layouts["ruled_out"]}
        assert "the model has 2 layers" in reasons["pp=4"]
        assert main(["estimate", folder, *self.WORDS, "--world-size", "4"]) == 0
        printed = capsys.readouterr().out
        assert "layouts of 4 ranks on one node, by arithmetic, 8 samples in an update:" in printed
        assert max(map(len, printed.splitlines())) <= 80

    def test_more_nodes_take_more_time_and_rule_tensor_parallelism_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = folder_of(CONFIGS["causal-lm"], tmp_path)
        one, two = (self.values_of(folder, capsys, "--world-size", "2", "--nodes", nodes) for nodes in ("1", "2"))
        assert one["policies"]["keep"]["seconds"] < two["policies"]["keep"]["seconds"]
        assert one["policies"]["keep"]["allocated_bytes"] == two["policies"]["keep"]["allocated_bytes"]
        assert {row["layout"] for row in one["layouts"]["rows"]} - {
            row["layout"] for row in two["layouts"]["rows"]
        } == {"tp=2"}
        assert any("1 ranks in a node" in note for note in two["notes"])

    def test_micro_batches_are_those_of_the_step(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = folder_of(CONFIGS["causal-lm"], tmp_path)
        values = self.values_of(folder, capsys, "--world-size", "2", "--accumulation", "3")
        rows = {row["layout"]: row for row in values["layouts"]["rows"]}
        assert values["layouts"]["samples"] == 2 * 2 * 3
        sizes = {name: (row["micro_batch"], row["accumulation"]) for name, row in rows.items()}
        assert sizes["dp=2"] == sizes["dp=2 zero=3"] == (2, 3)
        assert (sizes["tp=2"], sizes["pp=2"]) == ((4, 3), (2, 6))
        assert rows["dp=2 zero=3"]["seconds"] == pytest.approx(values["policies"]["keep"]["seconds"])

    def test_images_have_no_pipeline(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        values = self.values_of(folder_of(CONFIGS["image-classification"], tmp_path), capsys, "--world-size", "2")
        assert {"layout": "pp=2", "reason": "a pipeline of image-classification is not known"}.items() <= next(
            each for each in values["layouts"]["ruled_out"] if each["layout"] == "pp=2"
        ).items()

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"nodes": 2}, "nodes: expected world_size with it, got 2 alone · fix: world_size=8"),
            ({"nodes": 3, "world_size": 8}, "nodes: expected a number that divides world_size 8, got 3 · fix: nodes=1"),
            ({"nodes": 0, "world_size": 8}, "nodes: expected a positive int, got 0"),
        ],
    )
    def test_nodes(self, options: dict[str, Any], text: str) -> None:
        assert text in fault_of("nobody/nothing", **options)

    def test_a_note_says_where_the_weights_of_a_rank_are_more_than_its_share(self) -> None:
        config = MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=256, num_local_experts=4)
        one, other = (
            graphckpt.estimate(config, device="h100", seq=64, policy="keep", world_size=size) for size in (4, 8)
        )
        assert not any("of the weights" in note for note in one.notes)
        (note,) = (note for note in other.notes if "of the weights" in note)
        assert other.weight_bytes > 1.3 * one.weight_bytes / 2
        assert "not 1/8: FSDP2 shards by rows, and model.layers.0.mlp.experts.gate_up_proj has 4" in note
        assert "which 4 of 8 ranks have · fix: fully_shard(..., shard_placement_fn=" in note


def test_an_estimate_shows_as_html_and_in_one_line() -> None:
    assert "<table" in estimated()._repr_html_()
    assert "<table" in estimated(policy="selective")._repr_html_()
    assert repr(estimated()).startswith("<Estimate of llama on h100: keep ")
