"""Trains with and without the callbacks on each rank, by torchrun: see test_integrations_two_ranks.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy
from test_lightning_callback import differences, fit
from test_trainer_callback import RandomTokens, arguments, gpt2, weights
from transformers import Trainer

from graphckpt.integrations import lightning, transformers


def trained_by_transformers(folder: Path, *callbacks: transformers.GraphckptCallback) -> dict[str, torch.Tensor]:
    model = gpt2()
    two = arguments(folder, ddp_backend="gloo", per_device_train_batch_size=2, max_steps=2)
    Trainer(model=model, args=two, train_dataset=RandomTokens(classify=False), callbacks=list(callbacks)).train()
    return weights(model)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    first = transformers.GraphckptCallback()
    plain, ours = trained_by_transformers(folder), trained_by_transformers(folder, first)
    differ = [name for name in plain if not torch.equal(plain[name], ours[name])]
    second = lightning.GraphckptCallback()
    modules = [
        fit(folder, *callbacks, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
        for callbacks in ([], [second])
    ]
    differ += differences(modules[1], modules[0])
    fell = [3 * seen.bytes_after < seen.bytes_before for seen in (first.explanation, second.explanation) if seen]
    (folder / f"rank {os.environ['RANK']}").write_text(f"differ: {differ}, fell: {fell}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
