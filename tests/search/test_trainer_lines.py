"""The lines of Python that ``graphckpt estimate`` prints: they run as they are, and train as the estimate says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
    ViTConfig,
)

import graphckpt
from graphckpt.blocks.forward import policy_of
from graphckpt.cli import main
from graphckpt.errors import ConfigError
from graphckpt.search import trainer_lines as module
from graphckpt.search.estimate_result import Estimate

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SEQ = 32


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small model and its tokenizer, as ``from_pretrained`` reads them."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415

    folder = str(tmp_path_factory.mktemp("llama"))
    config = LlamaConfig(**SIZES, vocab_size=64, max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("vit"))
    config = ViTConfig(**SIZES, image_size=32, patch_size=8)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_foreign_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of trainers about a CPU
        yield


@cache
def estimated(folder: str, **options: Any) -> Estimate:
    seq = {} if "vit" in Path(folder).name else {"seq": SEQ}
    return graphckpt.estimate(folder, device="h100", batch=2, progress=False, **seq, **options)


def samples(folder: str) -> Any:
    if "vit" in Path(folder).name:
        return [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(0)} for _ in range(4)]
    tokens = torch.randint(3, 64, (4, SEQ))
    return [{"input_ids": row, "labels": row} for row in tokens]


def run(estimate: Estimate, trainer: str, folder: str, tmp_path: Path) -> dict[str, Any]:
    """Runs the printed lines on a CPU, for two steps, and returns their variables."""
    data = samples(folder)
    if trainer == "trl":
        from datasets import Dataset  # noqa: PLC0415

        data = Dataset.from_list([{"input_ids": sample["input_ids"].tolist()} for sample in data])
    lines = estimate.lines(trainer)
    here = "use_cpu=True, max_steps=2, report_to='none', save_strategy='no', disable_tqdm=True"
    changes = {
        "'cuda'": "'cpu'",
        "output_dir='output',": f"output_dir={str(tmp_path)!r}, {here},",
        "Trainer(devices=1,": "Trainer(accelerator='cpu', max_epochs=1, logger=False, enable_checkpointing=False, "
        f"enable_progress_bar=False, default_root_dir={str(tmp_path)!r}, devices=1,",
    }
    for one, other in changes.items():
        lines = lines.replace(one, other)
    variables: dict[str, Any] = {"dataset": data}
    exec(compile(lines, "pasted", "exec"), variables)  # what a reader does
    return variables


def callback_of(trainer: Any) -> Any:
    callbacks = trainer.callbacks if hasattr(trainer, "callbacks") else trainer.callback_handler.callbacks
    return next((each for each in callbacks if type(each).__name__ == "GraphckptCallback"), None)


def recomputed(trainer: Any) -> int:
    """Returns the number of blocks that a training has recomputed."""
    explanation = callback_of(trainer).explanation
    return sum(row.reruns > 0 for row in explanation.rows)


TIGHT: dict[str, Any] = {"memory_budget": 0.92}


class TestLinesRun:
    @pytest.mark.parametrize("trainer", module.TRAINERS)
    @pytest.mark.parametrize(
        "options",
        [
            {"policy": "full"},
            {"policy": "selective", "autocast": "bf16", "optimizer": "adamw-fused"},
            {"optimizer": "adafactor", "dtype": "bf16", **TIGHT},
            {"policy": "full", "lora": 4, "attention": "eager", "optimizer": "sgd-momentum"},
        ],
        ids=["full", "autocast", "plan", "lora"],
    )
    def test_lines_of_a_language_model(self, llama: str, trainer: str, options: dict[str, Any], tmp_path: Path) -> None:
        estimate = estimated(llama, **options)
        variables = run(estimate, trainer, llama, tmp_path)
        *_, last = estimate.policies.values()
        model = variables["model"] if trainer in ("torch", "lightning") else variables["trainer"].model
        if trainer == "torch":
            names = {name for name, block in model.named_modules() if policy_of(block) is not None}
            optimizer = variables["optimizer"]
        else:
            assert recomputed(variables["trainer"]) == len(last.policies) > 0
            names = set(last.policies)
            optimizer = variables["trainer"].optimizers[0] if trainer == "lightning" else variables["trainer"].optimizer
            optimizer = getattr(optimizer, "optimizer", optimizer)
        assert names == set(last.policies)
        wanted = module._OPTIMIZERS[estimate.setup.options.optimizer] if estimate.setup else ("", {})
        assert type(optimizer).__name__ == wanted[0].rpartition(".")[2]
        assert {name: optimizer.defaults[name] for name in wanted[1]} == wanted[1]
        assert optimizer.defaults["lr"] == (2e-5 if trainer == "trl" else 5e-5)  # TRL has a default of its own
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert sum(parameter.numel() for parameter in trainable) == estimate.num_trainable
        assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == estimate.num_trainable
        if trainer != "trl" and "lora" not in options:  # TRL changes the type of adapters
            assert str(trainable[0].dtype) == f"torch.{'bfloat16' if 'dtype' in options else 'float32'}"

    @pytest.mark.parametrize("trainer", ["torch", "transformers", "lightning"])
    def test_lines_of_an_image_model(self, vit: str, trainer: str, tmp_path: Path) -> None:
        estimate = estimated(vit, policy="full")
        run(estimate, trainer, vit, tmp_path)
        assert "seq" not in estimate.lines(trainer)

    def test_the_arguments_of_a_trainer_say_what_the_estimate_assumes(self, llama: str, tmp_path: Path) -> None:
        estimate = estimated(llama, autocast="fp16", policy="keep")
        arguments: Any = None

        def take(**values: Any) -> None:
            nonlocal arguments
            arguments = values

        lines = estimate.lines("transformers")
        call = lines[lines.index("TrainingArguments(\n") : lines.index("trainer =")]
        eval(call, {"TrainingArguments": take})
        made = TrainingArguments(**{**arguments, "output_dir": str(tmp_path), "fp16": False})
        assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (2, 1)
        assert (made.optim, made.max_grad_norm) == ("adamw_torch", 0.0)
        assert (arguments["bf16"], arguments["fp16"]) == (False, True)
        assert "GraphckptCallback" not in lines  # nothing is recomputed

    @pytest.mark.parametrize("trainer", ["transformers", "trl"])
    @pytest.mark.parametrize("optimizer", [*sorted(set(module._OPTIMIZERS) - set(module._OPTIM))])
    def test_an_optimizer_of_a_class_has_the_arguments_of_the_trainer(
        self, llama: str, trainer: str, optimizer: str, tmp_path: Path
    ) -> None:
        lines = estimated(llama, policy="keep", optimizer=optimizer).lines(trainer)
        text = lines.partition("optimizer_cls_and_kwargs=")[2].partition("\n    ),")[0] + "\n    )"
        adam = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
        arguments = TrainingArguments(
            str(tmp_path), learning_rate=0.25, weight_decay=0.125, use_cpu=True, report_to="none", **adam
        )
        classes: Any = MagicMock()
        _, values = eval(text, dict.fromkeys(("torch", "bitsandbytes", "torchao"), classes), {"arguments": arguments})
        expected = {"lr": 0.25, "weight_decay": 0.125, "betas": (0.8, 0.9), "eps": 1e-6}
        own = module._OPTIMIZERS[optimizer][1]
        if optimizer in ("adafactor", "sgd-momentum"):
            del expected["betas"], expected["eps"]
        assert values == expected | own

    @pytest.mark.parametrize("trainer", ["torch", "lightning"])
    def test_a_loop_says_its_learning_rate(self, llama: str, trainer: str) -> None:
        lines = estimated(llama, policy="keep", optimizer="adamw-8bit").lines(trainer)
        compile(lines, "pasted", "exec")
        assert " lr=5e-5,  # yours\n" in lines

    def test_the_lines_shard_as_the_estimate_does(self, llama: str) -> None:
        estimate = estimated(llama, world_size=2, autocast="bf16", policy="full")
        torch_lines = estimate.lines("torch")
        compile(torch_lines, "pasted", "exec")
        for text in ("init_device_mesh('cuda', (2,))", "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"):
            assert text in torch_lines
        assert "'transformer_layer_cls_to_wrap': ['LlamaDecoderLayer']" in estimate.lines("transformers")
        with pytest.raises(ConfigError, match=r"--for lightning: expected one process, .* · fix: --for torch"):
            estimate.lines("lightning")

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_each_rank_reads_samples_of_its_own(
        self, llama: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = estimated(llama, world_size=2, policy="full", accumulation=accumulation).lines("torch").splitlines()
        data = "\n".join(line for line in lines if line.startswith(("sampler = ", "loader = ")))
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        read = []
        for rank in range(2):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
            variables: dict[str, Any] = {"torch": torch, "dataset": range(8)}
            exec(data, variables)
            read += [number for batch in variables["loader"] for number in batch.tolist()]
        assert sorted(read) == list(range(8))

    def test_an_unknown_trainer_and_one_that_cannot_train_the_model(self, vit: str) -> None:
        with pytest.raises(ConfigError, match=r"--for: expected torch, .* got 'trll' · did you mean 'trl'"):
            estimated(vit, policy="keep").lines("trll")
        with pytest.raises(ConfigError, match="--for trl: expected a causal-lm, got image-classification"):
            estimated(vit, policy="keep").lines("trl")


class TestLinesAreTheEstimate:
    """The printed program, simulated as any other one, takes the bytes and the time of the estimate."""

    @pytest.mark.parametrize(
        "options",
        [
            {"dtype": "bf16", "optimizer": "adamw-fused"},
            {"autocast": "bf16", "attention": "eager"},
            {"autocast": "fp16", "clip": True},
            {"dtype": "bf16", "lora": 8, "lora_targets": "all-linear", "optimizer": "sgd-momentum"},
        ],
    )
    def test_a_loop(self, llama: str, options: dict[str, Any]) -> None:
        estimate = graphckpt.estimate(llama, device="a10g", batch=8, seq=64, policy="full", progress=False, **options)
        lines = estimate.lines("torch").replace("from_pretrained(", "from_config(config, ").splitlines()
        # Without the loop, and with a model that is made from its config: weights have no values in a simulation.
        text = "\n".join(lines).replace(f"{llama!r}, ", "").replace("graphckpt.apply(model, True)", "")
        begin, _, loop = text.partition("for batch in loader:\n")
        begin = begin[: begin.index("loader = ")]

        def make() -> tuple[Any, Callable[[], None]]:
            variables: dict[str, Any] = {"config": AutoConfig.from_pretrained(llama)}
            exec(begin, variables)
            tokens = torch.zeros(8, 64, dtype=torch.long)
            variables["loader"] = [{"input_ids": tokens, "labels": tokens.clone()}]
            code = compile("for batch in loader:\n" + loop, "pasted", "exec")
            return variables["model"], lambda: exec(code, variables)

        plan = graphckpt.plan(make, device="a10g", memory_budget="max", candidates=["full"], progress=False)
        keep = estimate.policies["keep"]
        assert plan.plain_peak_bytes == pytest.approx(keep.allocated_bytes, rel=0.002)
        assert plan.plain_step_seconds == pytest.approx(keep.seconds, rel=0.02)
        assert ("GradScaler" in text) is ("GradScaler" in str(estimate)) is (options.get("autocast") == "fp16")


class TestApplyLine:
    TIGHT = ("--device", "h100", "--batch", "256", "--seq", "64")

    def test_all_layers_recomputed_are_one_word(self, llama: str) -> None:
        assert estimated(llama, policy="full").apply_line == "graphckpt.apply(model, True)"

    def test_no_line_of_code_is_broken(self, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
        flags = [*self.TIGHT, "--memory-budget", "0.8"]
        assert main(["estimate", llama, *flags]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("graphckpt.apply("))
        assert len(line) > 80
        model = AutoModelForCausalLM.from_pretrained(llama)
        handle = eval(line, {"graphckpt": graphckpt, "model": model})
        assert any(policy_of(block) is not None for block in model.modules())
        handle.remove()

    @pytest.mark.parametrize("more", [["--policy", "selective"], ["--memory-budget", "0.8"]])
    def test_a_saved_file_sets_the_same_policies(
        self, llama: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = str(tmp_path / "plan.yaml")
        flags = [*self.TIGHT, *more, "--save", file]
        assert main(["estimate", llama, *flags]) == 0
        *_, line = capsys.readouterr().out.strip().splitlines()
        assert line == f"graphckpt.apply(model, {file!r})"
        model = AutoModelForCausalLM.from_pretrained(llama)
        handle = eval(line, {"graphckpt": graphckpt, "model": model})
        names = {name for name, block in model.named_modules() if policy_of(block) is not None}
        handle.remove()
        content = yaml.safe_load(Path(file).read_text())
        assert names == set(content.get("policies", content)) != set()

    def test_a_file_that_cannot_be_written(self, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--device", "h100", "--seq", str(SEQ), "--policy", "full", "--save", "/nowhere/plan.yaml"]
        assert main(["estimate", llama, *flags]) == 2
        assert "/nowhere/plan.yaml: cannot be written" in capsys.readouterr().err

    def test_json_has_the_lines(self, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--device", "h100", "--seq", str(SEQ), "--policy", "full", "--for", "torch", "--json"]
        assert main(["estimate", llama, *flags]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["trainer"] == "torch"
        compile(values["lines"], "pasted", "exec")
