"""Times `graphckpt train`'s trainer beside a bare loop, Transformers' Trainer and Lightning: tokens a second.

All train the same GPT-2 from the same weights by the same AdamW with gradients clipped to norm 1, on the same number of
random tokens, and log as each does by default, to files and a terminal that nobody reads. They run in turns within one
process, in a new random order each turn. A run's time is that from the end of its tenth step to the end of its last.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--turns 7] [--steps 60]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import lightning
import torch
from report import header, spread, table, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers import Trainer as TransformersTrainer
from transformers.utils import logging as transformers_logging

from graphckpt.train import HookBase, OwnData, OwnLoss, TrainConfig, Trainer
from graphckpt.train.settings import EvaluationConfig

B, T, VOCABULARY = 4, 64, 256
WARM_UP = 10  # steps
SIZES = {"GPT-2, 2 layers of 64": (2, 64), "GPT-2, 6 layers of 192": (6, 192)}
GOAL = 0.99  # of the bare loop's tokens a second


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, as a causal language model takes them."""

    def __init__(self, num_samples: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (num_samples, T), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


@dataclass
class Clock:
    """Reads the time at the end of the tenth step, and of the last."""

    last: int
    done: int = 0
    marks: list[tuple[float, float]] = field(default_factory=list)

    def step(self) -> None:
        self.done += 1
        if self.done in (WARM_UP, self.last):
            self.marks.append((perf_counter(), process_time()))

    def seconds(self) -> tuple[float, float]:
        """Returns seconds of wall time and of the CPU, per step."""
        assert self.done == self.last, f"{self.done} steps of {self.last}"
        (wall, cpu), (wall_end, cpu_end) = self.marks
        return (wall_end - wall) / (self.last - WARM_UP), (cpu_end - cpu) / (self.last - WARM_UP)


def build(layers: int, width: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": T, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


def bare(model: nn.Module, data: Tokens, clock: Clock, folder: str) -> None:
    optimizer = optimizer_of(model)
    for number, batch in enumerate(DataLoader(data, batch_size=B, shuffle=True), start=1):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 0:
            print(number, loss.item())
        clock.step()


def transformers(model: nn.Module, data: Tokens, clock: Clock, folder: str) -> None:
    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=B, num_train_epochs=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    optimizers = (optimizer_of(model), None)
    TransformersTrainer(
        model=model, args=arguments, train_dataset=data, callbacks=[Steps()], optimizers=optimizers
    ).train()


def with_lightning(model: nn.Module, data: Tokens, clock: Clock, folder: str) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    class Steps(lightning.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=1.0, callbacks=[Steps()], default_root_dir=folder,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, batch_size=B, shuffle=True))


def ours(model: nn.Module, data: Tokens, clock: Clock, folder: str) -> None:
    class Steps(HookBase):
        def after_step(self, loop: Any) -> None:
            clock.step()

    def clipped(model: nn.Module) -> torch.optim.Optimizer:
        group = {"params": list(model.parameters()), "clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}
        return torch.optim.AdamW([group], lr=1e-3, weight_decay=0.0)

    settings = TrainConfig(
        output_dir=folder,
        overwrite=True,
        train_micro_batch_size=B,
        train_iter=len(data) // B,
        evaluation=EvaluationConfig(enabled=False),
    )
    Trainer(
        settings, make_model=lambda: model, make_optimizer=clipped, data=OwnData(train=data), task=OwnLoss(),
        hooks=(Steps(),),
    ).train()  # fmt: skip


RUNS: dict[str, Callable[[nn.Module, Tokens, Clock, str], None]] = {
    "bare loop": bare,
    "graphckpt train": ours,
    "Transformers Trainer": transformers,
    "Lightning Trainer": with_lightning,
}


def timed(name: str, sizes: tuple[int, int], steps: int) -> tuple[float, float]:
    """Returns wall and CPU seconds a step of one run."""
    model, clock = build(*sizes), Clock(steps)
    gc.collect()
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        RUNS[name](model, Tokens(B * steps), clock, folder)
    return clock.seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    head = header(n=f"{arguments.turns} turns of {arguments.steps} steps, {WARM_UP} of them to warm up")
    rows, texts = [], []
    for subject, sizes in SIZES.items():
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for _ in range(arguments.turns):
            for name in random.sample(list(RUNS), len(RUNS)):
                found[name].append(timed(name, sizes, arguments.steps))
        for name, times in found.items():
            ratios = [[plain[k] / own[k] for own, plain in zip(times, found["bare loop"], strict=True)] for k in (0, 1)]
            row = {"model": subject, "trainer": name, "tokens_per_second": B * T / median(wall for wall, _ in times)}
            row |= {"wall": spread(ratios[0]), "cpu": spread(ratios[1])}
            rows.append(row)
            print(json.dumps(row), flush=True)
        own = sorted((row for row in rows if row["model"] == subject), key=lambda row: list(RUNS).index(row["trainer"]))
        columns = ["trainer", "tokens/s", "tokens/s, to the bare loop", "per CPU second"]
        lines = [
            [row["trainer"], f"{row['tokens_per_second']:,.0f}", *map(_shown, (row["wall"], row["cpu"]))] for row in own
        ]
        texts.append(f"## {subject}, batch {B} x {T}\n\n{table(columns, lines)}")
    write("trainer", head, rows, "\n\n".join([*texts, f"Goal: {GOAL} of the bare loop, ahead of both trainers."]))


def _shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


if __name__ == "__main__":
    main()
