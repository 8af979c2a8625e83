"""A vision transformer in a plain loop: everything kept, two rules, and a plan for a memory budget.

python examples/recipes/vit.py                               # 4 layers of width 128 on a CPU
python examples/recipes/vit.py --size full                   # ViT-Large in bfloat16 on a GPU
python examples/recipes/vit.py --size full --predict h100    # predicted for a GPU that may be absent
"""

import argparse

import torch
from comparison import make_parser, parse, predict, show, train
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig

import graphckpt

BATCH_SIZE = {"small": 16, "full": 128}
SIZES = {
    "small": ViTConfig(
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=1000,
        hidden_dropout_prob=0.1,
    ),
    "full": ViTConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    ),
}


class Training:
    """A vision transformer, AdamW and a batch of random images; a call is one training step."""

    def __init__(self, args: argparse.Namespace, batch_size: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(args.model) if args.model else SIZES[args.size]
        if args.model and not args.predict:
            self.model = AutoModelForImageClassification.from_pretrained(args.model)
        else:
            self.model = AutoModelForImageClassification.from_config(config)
        self.model.to(args.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.images = torch.randn(batch_size, 3, config.image_size, config.image_size).to(args.device)
        self.labels = torch.randint(0, config.num_labels, (batch_size,)).to(args.device)
        self.autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.size == "full")

    def __call__(self) -> Tensor:
        with self.autocast:
            loss = self.model(pixel_values=self.images, labels=self.labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    parser = make_parser(__doc__, small_budget="32.4MiB")
    parser.add_argument("--batch-size", type=int, help="images in a step: 16, or 128 with --size full")
    args = parse(parser)
    if args.predict:
        predict(lambda batch_size: Training(args, batch_size), args).explain()
        return
    batch_size = args.batch_size or BATCH_SIZE[args.size]

    def planned(training: Training) -> graphckpt.Handle:
        return graphckpt.plan(training.model, training, memory_budget=args.memory_budget).explain().apply()

    variants = {
        "everything kept": None,
        "selective": lambda training: graphckpt.apply(training.model, "selective"),
        "full": lambda training: graphckpt.apply(training.model, "full"),
        f"plan for {args.memory_budget}": planned,
    }
    results = [
        train(name, lambda: Training(args, batch_size), args.steps, policies) for name, policies in variants.items()
    ]
    show(results, batch_size)


if __name__ == "__main__":
    main()
