"""GPT-2 on one sequence that is as long as possible: the longest with everything kept, and the longest with a plan.

python examples/recipes/long_gpt2.py                               # 6 layers of width 128 on a CPU
python examples/recipes/long_gpt2.py --tiles 8                     # the loss in slices too: its logits are the peak
python examples/recipes/long_gpt2.py --size full --tiles 64        # GPT-2 XL in bfloat16 on a GPU
python examples/recipes/long_gpt2.py --size full --tiles 64 --predict h100    # predicted for a GPU that may be absent
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from comparison import make_parser, parse, show_equality, train
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

import graphckpt
from graphckpt.train.tasks.causal_lm import add_loss_head, loss_of
from graphckpt.units import format_bytes, format_seconds

# Without dropout in attention, whose kernel for it on a CPU keeps a matrix of all pairs of tokens.
SIZES = {
    "small": GPT2Config(
        n_layer=6,
        n_embd=128,
        n_head=4,
        vocab_size=2000,
        n_positions=4096,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "full": GPT2Config(n_layer=48, n_embd=1600, n_head=25, n_positions=2**20, attn_pdrop=0.0),
}
PIECE = {"small": 64, "full": 1024}
"""Lengths are multiples of this many tokens."""


class Training:
    """A GPT-2, AdamW and one random sequence; a call is one training step."""

    def __init__(self, args: argparse.Namespace, num_pieces: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(args.model) if args.model else SIZES[args.size]
        config.use_cache = False
        if args.model and not args.predict:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, config=config)
        else:
            self.model = AutoModelForCausalLM.from_config(config)
        self.model.to(args.device).train()
        add_loss_head(self.model)  # a block for the logits and the loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.size == "full")
        self.piece = PIECE[args.size]
        self.load(num_pieces)

    def load(self, num_pieces: int) -> None:
        """Makes a sequence of another length."""
        shape = (1, num_pieces * self.piece)
        self.tokens = torch.randint(0, self.model.config.vocab_size, shape).to(self.model.device)

    def __call__(self) -> Tensor:
        with self.autocast:
            loss = loss_of(self.model, {"input_ids": self.tokens, "labels": self.tokens})
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def fit_lengths(args: argparse.Namespace) -> graphckpt.Fit:
    """Finds the lengths that fit: the size that `graphckpt.find_batch_size` passes is the length here."""
    longest = AutoConfig.from_pretrained(args.model).n_positions if args.model else SIZES[args.size].n_positions
    training = None if args.predict else Training(args, 1)

    def make_step(num_pieces: int) -> tuple[nn.Module, Training]:
        made = training or Training(args, num_pieces)
        made.load(num_pieces)
        return made.model, made

    head = {"loss_head": graphckpt.Tiles(args.tiles, reduce="sum")} if args.tiles else None
    sizes = range(1, longest // PIECE[args.size] + 1)
    return graphckpt.find_batch_size(
        make_step, batch_sizes=sizes, memory_budget=args.memory_budget, device=args.predict, head=head
    )


def under(policies: Mapping[str, Any] | str, training: Training) -> graphckpt.Handle:
    return graphckpt.apply(training.model, policies)


def show_lengths(fit: graphckpt.Fit, piece: int) -> None:
    plain = fit.largest_without_recompute
    print(f"in {format_bytes(fit.budget_bytes)} on {fit.device}, predicted:")
    for name, row in (("everything kept", plain), ("with a plan", fit.largest)):
        if row is not None:
            step, peak = format_seconds(row.seconds), format_bytes(row.peak_bytes)
            print(f"longest sequence {name}: {row.batch_size * piece} tokens, peak {peak}, step {step}")
    policies = Counter(row.option.partition("(")[0] for row in fit.largest.plan.rows)
    print(f"policies of the plan: {', '.join(f'{count} {name}' for name, count in policies.items())}")


def main() -> None:
    parser = make_parser(__doc__, small_budget="64MiB", full_budget="90%")
    parser.add_argument("--tiles", type=int, help="slices of the logits and the loss; equal up to rounding then")
    args = parse(parser)
    fit, piece = fit_lengths(args), PIECE[args.size]
    show_lengths(fit, piece)
    if args.predict:
        return
    plain, longest = fit.largest_without_recompute, fit.largest
    runs = [("with a plan", longest.batch_size, longest.plan.policies)]
    if plain is not None:
        runs = [("everything kept", plain.batch_size, None), ("full", plain.batch_size, "full"), *runs]
    has_plain = plain is not None
    del fit, plain, longest  # their plans hold a model
    print(f"\n{'measured':15}  {'tokens':>6}  {'peak':>8}  {'step':>8}  last loss")
    print("-" * 53)
    results = []
    for name, size, policies in runs:
        applied = None if policies is None else partial(under, policies)
        result = train(name, partial(Training, args, size), args.steps, applied)
        peak, step = format_bytes(result.peak_bytes), format_seconds(result.step_seconds)
        print(f"{name:15}  {size * piece:6}  {peak:>8}  {step:>8}  {result.losses[-1]:9.6f}", flush=True)
        results.append(result)
    if has_plain:
        show_equality([(results[0], results[1])])


if __name__ == "__main__":
    main()
