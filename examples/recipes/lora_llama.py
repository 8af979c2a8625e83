"""LoRA fine-tuning of a Llama with PEFT and Transformers' Trainer, with policies planned for a memory budget.

python examples/recipes/lora_llama.py                               # 4 layers of width 128 on a CPU
python examples/recipes/lora_llama.py --size full                   # sizes of Llama 3.1 8B in bfloat16, on a GPU
python examples/recipes/lora_llama.py --size full --predict h100    # predicted for a GPU that may be absent
"""

import argparse
import tempfile
import warnings
from typing import Any

import torch
from comparison import Result, StepPeak, digest, make_parser, parse, predict, seconds, show
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import StackDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from graphckpt.integrations.transformers import GraphckptCallback

SIZES = {
    "small": LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        use_cache=False,
    ),
    "full": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    ),
}
LENGTH = {"small": 128, "full": 2048}
BATCH_SIZE = {"small": 4, "full": 8}


def make_model(args: argparse.Namespace) -> PeftModel:
    """Returns a frozen Llama with LoRA adapters. There is no `enable_input_require_grads()`."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.size == "full" else torch.float32
    if args.model and not args.predict:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, use_cache=False)
    else:
        config = AutoConfig.from_pretrained(args.model) if args.model else SIZES[args.size]
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, lora)


PLANNING = 9  # steps, at most: eight from which a budget is planned for, and one that is reported


class StepMeter(TrainerCallback):
    """Measures the peak of the first step that no budget is planned from, and times those after it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = seconds()
        if state.global_step == PLANNING:
            self.peak = StepPeak(kwargs["model"], kwargs["optimizer"])
            self.peak.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > PLANNING + 1:
            self.seconds.append(seconds() - self.started)
        elif state.global_step == PLANNING + 1:
            self.peak.__exit__(None, None, None)
            self.peak_bytes = self.peak.num_bytes


def train(name: str, args: argparse.Namespace, callback: GraphckptCallback | None, **arguments: Any) -> Result:
    """Trains with one callback, and returns what it took."""
    model = make_model(args)
    generator = torch.Generator().manual_seed(1)
    steps = PLANNING - 1 + args.steps
    shape = (steps * args.batch_size, LENGTH[args.size])
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    meter = StepMeter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=args.batch_size,
                learning_rate=1e-3,
                bf16=args.size == "full",
                use_cpu=args.device == "cpu",
                dataloader_pin_memory=args.device == "cuda",
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                **arguments,
            ),
            train_dataset=StackDataset(input_ids=tokens, labels=tokens),
            callbacks=[meter, *([callback] if callback else [])],
        )
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    return Result(name, meter.peak_bytes, min(meter.seconds), (loss,), digest(model))


class Training:
    """The same step in a plain loop, for predictions; a call is one training step."""

    def __init__(self, args: argparse.Namespace, batch_size: int) -> None:
        self.model = make_model(args).to(args.device).train()
        adapters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(adapters, lr=1e-3)
        self.tokens = torch.randint(0, self.model.config.vocab_size, (batch_size, LENGTH[args.size])).to(args.device)
        self.autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.size == "full")

    def __call__(self) -> Tensor:
        with self.autocast:
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    parser = make_parser(__doc__, small_budget="16.3MiB")
    parser.add_argument("--batch-size", type=int, help="sequences in a step: 4, or 8 with --size full")
    args = parse(parser)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT reads it
    if args.predict:
        predict(lambda batch_size: Training(args, batch_size), args).explain()
        return
    args.batch_size = args.batch_size or BATCH_SIZE[args.size]
    plan = GraphckptCallback(memory_budget=args.memory_budget)
    results = [
        train("everything kept", args, None),
        train("Transformers' own", args, None, activation_checkpointing=True),
        train("GraphckptCallback('full')", args, GraphckptCallback("full", report=False)),
        train(f"GraphckptCallback(memory_budget={args.memory_budget!r})", args, plan),
    ]
    show(results, args.batch_size)


if __name__ == "__main__":
    main()
