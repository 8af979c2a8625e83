"""The callback in TRL's trainers: the same bits under a rule and under a budget, which holds, and no extra steps.

``pytest -s`` prints one row for each trainer, those of the table in docs/howto/trl.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from graphckpt.blocks.forward import BlockForward
from graphckpt.integrations.transformers import GraphckptCallback
from graphckpt.ledger.live_memory import LiveBytes

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore:GraphckptCallback. the model's own checkpointing is on as well:UserWarning"),
    pytest.mark.filterwarnings("default:::trl"),
    pytest.mark.filterwarnings("default:::transformers"),
    pytest.mark.filterwarnings("default:::torch"),
]
LAYERS, STEPS = 4, 4
NAMES = {each.name for each in fields(TrainingArguments)}
OWN = "activation_checkpointing" if "activation_checkpointing" in NAMES else "gradient_checkpointing"


def words() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{n}": n + 3 for n in range(61)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def llama(kind: type = LlamaForCausalLM, width: int = 32) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    more = {"num_labels": 1} if kind is LlamaForSequenceClassification else {}
    return kind(
        LlamaConfig(
            vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=1, attention_dropout=0.1, **sizes, **more
        )
    )


def sentence(number: int, length: int) -> str:
    return " ".join(f"w{(7 * number + 3 * place) % 61}" for place in range(length))


def rows(kind: str, lengths: list[int]) -> list[dict[str, Any]]:
    made: Callable[[int, int], dict[str, Any]] = {
        "SFT": lambda n, t: {"text": sentence(n, t)},
        "DPO": lambda n, t: {"prompt": sentence(n, 4), "chosen": sentence(n + 1, t), "rejected": sentence(n + 2, t)},
        "GRPO": lambda n, t: {"prompt": sentence(n, t)},
        "KTO": lambda n, t: {"prompt": sentence(n, 4), "completion": sentence(n + 1, t), "label": n % 2 == 0},
        "Reward": lambda n, t: {"prompt": sentence(n, 4), "chosen": sentence(n + 1, t), "rejected": sentence(n + 2, t)},
    }[kind]
    return [made(number, length) for number, length in enumerate(lengths)]


OPTIONS: dict[str, dict[str, Any]] = {
    "SFT": {},
    "DPO": {},
    "GRPO": {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2},
    "KTO": {},
    "Reward": {},
}
KINDS = tuple(OPTIONS)


def build(kind: str, folder: Path, data: Any, callback: GraphckptCallback | None, width: int = 32, **more: Any) -> Any:
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2,
        "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_strategy": "no", "dataloader_pin_memory": False, "seed": 1, OWN: False,
    }  # fmt: skip
    model = llama(LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM, width)
    peft = {"peft_config": more.pop("peft_config")} if "peft_config" in more else {}
    args = getattr(trl, f"{kind}Config")(**{**settings, **OPTIONS[kind], **more})
    reference = {"ref_model": llama(width=width)} if kind in ("DPO", "KTO") and not peft else {}  # else it asks the hub
    rewards = {"reward_funcs": lambda completions, **_: [float(len(set(c.split()))) for c in completions]}
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=data,
        processing_class=words(),
        callbacks=[] if callback is None else [callback],
        **(rewards if kind == "GRPO" else {}),
        **reference,
        **peft,
    )


@dataclass
class Run:
    weights: dict[str, Tensor]
    peaks: list[int]
    """Of each step, in bytes."""
    num_steps: int
    """How often ``training_step`` ran."""
    metrics: list[Any] = field(default_factory=list)


def train(
    kind: str, folder: Path, callback: GraphckptCallback | None = None, *, lengths: list[int] | None = None, **more: Any
) -> Run:
    """Trains, and measures the peak of every step, from its batch to the optimizer's step."""
    data = more.pop("data", None) or Dataset.from_list(rows(kind, lengths or [24] * 16))
    trainer = build(kind, folder, data, callback, **more)
    run = Run({}, [], 0)
    training_step = trainer.training_step
    live: list[LiveBytes] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        run.num_steps += 1
        trace = LiveBytes("cpu", record_timeline=False)
        optimizer = trainer.optimizer.optimizer
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        trace.track([*trainer.model.parameters(), *trainer.model.buffers(), *states])
        with trace:
            loss: Tensor = training_step(*args, **kwargs)
        live.append(trace)
        run.metrics.append(loss.item())
        return loss

    trainer.training_step = counted
    trainer.train()
    run.peaks = [trace.peak_bytes for trace in live]
    run.weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    assert not any(isinstance(vars(module).get("forward"), BlockForward) for module in trainer.model.modules())
    return run


def assert_equal(ours: Run, plain: Run) -> None:
    assert ours.weights.keys() == plain.weights.keys()
    assert [name for name, value in plain.weights.items() if not torch.equal(ours.weights[name], value)] == []
    assert ours.metrics == plain.metrics
    assert ours.num_steps == plain.num_steps


@pytest.mark.parametrize(("width", "length"), [(32, 24), pytest.param(128, 128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_and_a_budget_change_no_bit_and_hold(kind: str, width: int, length: int, tmp_path: Path) -> None:
    more = {"width": width, "lengths": [length] * 16, "max_steps": 10}
    plain = train(kind, tmp_path, **more)
    full = train(kind, tmp_path, GraphckptCallback("full", report=False), **more)
    ours = [full]
    if kind == "SFT" or length > 24:  # a rule by ops, with one trainer in the short runs
        ours.append(train(kind, tmp_path, GraphckptCallback("selective", report=False), **more))
    budget = (2 * full.peaks[-1] + plain.peaks[-1]) // 3
    callback = GraphckptCallback(memory_budget=budget, report=False)
    planned = train(kind, tmp_path, callback, **more)
    for run in (*ours, planned):
        assert_equal(run, plain)
    peaks = [max(run.peaks[1:]) for run in (*ours, plain)]
    assert peaks == sorted(set(peaks))
    assert 0 < len(callback.plan.policies) <= LAYERS
    assert callback.plan.predicted_peak_bytes <= budget < callback.plan.plain_peak_bytes
    assert max(planned.peaks) <= budget, "also in the updates from which it was planned"
    assert max(planned.peaks[8:]) <= 1.01 * callback.plan.predicted_peak_bytes, "after at most eight updates"
    shown = [f"{max(run.peaks[2:]) / 2**20:.2f}" for run in (plain, *ours, planned)]
    print(f"\n| {kind} | {' | '.join(shown)} | {budget / 2**20:.2f} | yes |")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_adapters_lengths_and_a_stream(kind: str, tmp_path: Path) -> None:
    """LoRA on a frozen base, TRL's default of its own checkpointing, an iterable data set, lengths that vary."""
    lengths = [8, 9, 10, 12, 24, 12, 30, 8, 16, 24, 31, 9] * 2
    runs = []
    callback = GraphckptCallback(memory_budget="min", report="table")
    for each in (None, callback):
        data = Dataset.from_list(rows(kind, lengths)).to_iterable_dataset()
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        runs.append(train(kind, tmp_path, each, data=data, peft_config=lora, max_steps=10, **{OWN: True}))
    assert_equal(runs[1], runs[0])
    assert callback.plan.policies
    # not the predicted peak: TRL's loss takes 128 KiB for each token that is not padding, of equally many elements
    assert callback.explanation.peak_bytes < callback.plan.plain_peak_bytes
