"""Sequence classification with BERT: peak and samples/s over batch sizes, with everything kept and with plans.

python examples/recipes/bert_classification.py                               # 4 layers of width 128 on a CPU
python examples/recipes/bert_classification.py --size full                   # BERT-large in bfloat16 on a GPU
python examples/recipes/bert_classification.py --size full --predict h100    # predicted for a GPU that may be absent
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from comparison import Result, make_parser, parse, predict, show_equality, train
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig

import graphckpt
from graphckpt.units import format_bytes

SIZES = {
    "small": BertConfig(
        num_hidden_layers=4, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=1000
    ),
    "full": BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
}
LENGTH = {"small": 128, "full": 512}
BATCH_SIZES = {"small": [4, 8, 16, 32], "full": [8, 16, 32, 64, 128, 256]}


class Training:
    """A BERT, AdamW and a batch of random tokens; a call is one training step."""

    def __init__(self, args: argparse.Namespace, batch_size: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(args.model) if args.model else SIZES[args.size]
        if args.model and not args.predict:
            self.model = AutoModelForSequenceClassification.from_pretrained(args.model)
        else:
            self.model = AutoModelForSequenceClassification.from_config(config)
        self.model.to(args.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5)
        self.autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.size == "full")
        self.length = LENGTH[args.size]
        self.load(batch_size)

    def load(self, batch_size: int) -> None:
        """Makes a batch of another size."""
        config, device = self.model.config, self.model.device
        self.tokens = torch.randint(0, config.vocab_size, (batch_size, self.length)).to(device)
        self.labels = torch.randint(0, config.num_labels, (batch_size,)).to(device)

    def __call__(self) -> Tensor:
        with self.autocast:
            loss = self.model(input_ids=self.tokens, labels=self.labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def fit_sizes(args: argparse.Namespace, batch_sizes: list[int]) -> graphckpt.Fit:
    """Finds the plan of each batch size, with one model for all."""
    training = Training(args, batch_sizes[0])

    def make_step(batch_size: int) -> tuple[nn.Module, Training]:
        training.load(batch_size)
        return training.model, training

    return graphckpt.find_batch_size(make_step, batch_sizes=batch_sizes, memory_budget=args.memory_budget)


def under(policies: Mapping[str, Any], training: Training) -> graphckpt.Handle:
    return graphckpt.apply(training.model, policies)


def cells(result: Result | None, batch_size: int) -> str:
    if result is None:
        return f"{'does not fit':>20}"
    return f"{format_bytes(result.peak_bytes):>9}  {batch_size / result.step_seconds:9.3g}"


def compare(
    args: argparse.Namespace, batch_size: int, policies: Mapping[str, Any] | None, *, keeps_all: bool
) -> tuple[Result | None, Result | None]:
    """Trains with one batch size: with everything kept and with policies, if each fits. Prints a row."""
    make = partial(Training, args, batch_size)
    plain = planned = None
    if keeps_all:
        plain = train(f"everything kept, batch {batch_size}", make, args.steps)
    if policies is not None:
        planned = train(f"plan, batch {batch_size}", make, args.steps, partial(under, policies))
    print(f"{batch_size:5}  {cells(plain, batch_size)}  {cells(planned, batch_size)}", flush=True)
    return plain, planned


def main() -> None:
    parser = make_parser(__doc__, small_budget="60MiB", full_budget="90%")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="sizes to compare: 4 to 32, or 8 to 256 with full")
    args = parse(parser)
    batch_sizes = args.batch_sizes or BATCH_SIZES[args.size]
    if args.predict:
        predict(partial(Training, args), args, batch_sizes=batch_sizes).explain()
        return
    fit = fit_sizes(args, batch_sizes).explain()
    # On a CPU everything is kept beyond the budget too, to compare. Of a plan its policies are needed, not its model.
    rows = [
        (
            row.batch_size,
            row.plan and row.plan.policies,
            args.device == "cpu" or row.plain_peak_bytes <= fit.budget_bytes,
        )
        for row in fit.rows
    ]
    del fit
    print(f"\nmeasured{'everything kept':>20}{'with a plan':>22}")
    print(f"batch  {'peak':>9}  {'samples/s':>9}  {'peak':>9}  {'samples/s':>9}")
    print("-" * 49)
    pairs = [compare(args, size, policies, keeps_all=keeps_all) for size, policies, keeps_all in rows]
    show_equality((plain, planned) for plain, planned in pairs if plain is not None and planned is not None)


if __name__ == "__main__":
    main()
