"""ResNet-101 in a plain loop with SGD: a rule and a plan. The buffers of BatchNorm are updated once in a step.

python examples/recipes/resnet101.py                               # at an eighth of the width on a CPU
python examples/recipes/resnet101.py --size full                   # 256 images in bfloat16 on a GPU
python examples/recipes/resnet101.py --size full --predict h100    # predicted for a GPU that may be absent
"""

import argparse

import torch
from comparison import make_parser, parse, predict, show, train
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageClassification, ResNetConfig

import graphckpt

DEPTHS = [3, 4, 23, 3]
SIZES = {
    "small": ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=DEPTHS, num_labels=1000),
    "full": ResNetConfig(embedding_size=64, hidden_sizes=[256, 512, 1024, 2048], depths=DEPTHS, num_labels=1000),
}
IMAGE_SIZE = {"small": 64, "full": 224}
BATCH_SIZE = {"small": 16, "full": 256}


class Training:
    """A ResNet, SGD and a batch of random images; a call is one training step."""

    def __init__(self, args: argparse.Namespace, batch_size: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(args.model) if args.model else SIZES[args.size]
        if args.model and not args.predict:
            self.model = AutoModelForImageClassification.from_pretrained(args.model)
        else:
            self.model = AutoModelForImageClassification.from_config(config)
        self.model.to(args.device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        side = IMAGE_SIZE[args.size]
        self.images = torch.randn(batch_size, 3, side, side).to(args.device)
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
    parser = make_parser(__doc__, small_budget="21.2MiB")
    parser.add_argument("--batch-size", type=int, help="images in a step: 16, or 256 with --size full")
    args = parse(parser)
    if args.predict:
        predict(lambda batch_size: Training(args, batch_size), args).explain()
        return
    batch_size = args.batch_size or BATCH_SIZE[args.size]

    def planned(training: Training) -> graphckpt.Handle:
        return graphckpt.plan(training.model, training, memory_budget=args.memory_budget).explain().apply()

    variants = {
        "everything kept": None,
        "full": lambda training: graphckpt.apply(training.model, "full"),
        f"plan for {args.memory_budget}": planned,
    }
    results = [
        train(name, lambda: Training(args, batch_size), args.steps, policies) for name, policies in variants.items()
    ]
    show(results, batch_size)


if __name__ == "__main__":
    main()
