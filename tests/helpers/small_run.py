"""A run of seconds, to stop, resume, kill and break: the one training config of the tests. Not a test itself."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.bench import same as equal  # noqa: F401 - of two states, for tests
from safetensors.torch import load_file
from torch import Tensor

from graphckpt.cli import main
from graphckpt.config.trainer import trainer_from
from graphckpt.train.hooks.snapshot import SnapshotHook, SnapshotWriter
from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.snapshot.saved_run import TrainResult
from graphckpt.train.trainer import Trainer

CONFIG = """
from graphckpt.config import get_config

data = get_config("common/data.py").data
model = get_config("common/models/gpt2.py").model
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

data.update(paths="texts", cache_dir="cache", vocab_size=300, seq_length=16, eval_fraction=0.2)
model.config.update(n_layer=2, n_head=2, n_embd=16)
optim.lr = 5e-3
train.update(output_dir="out", train_micro_batch_size=2, num_accumulation_steps=2, test_micro_batch_size=4)
train.update(train_iter=10, log_period=3, warmup_ratio=0.2, device="cpu")
train.checkpointer.update(period=4, max_to_keep=2)
train.evaluation.update(eval_period=3, eval_iter=2)
"""
STILL = [f"model.config.{name}=0" for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")]
"""Without dropout."""
TIMES = {"time", "data_time", "total_throughput", "tokens_per_second", "rss_bytes", "peak_rss_bytes"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts and a config, to be in."""
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    (tmp_path / "texts").mkdir()
    for index in range(20):
        text = " ".join(generator.choices([f"w{n}" for n in range(30)], k=300))
        (tmp_path / "texts" / f"{index}.txt").write_text(f"text {index}: {text}\n", encoding="utf-8")
    (tmp_path / "tiny.py").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def child(place: Path) -> Iterator[Callable[..., int]]:
    """Runs the command line in a child of a process that has imported everything; returns the exit code."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, Path(__file__).with_name("killed.py")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def run(folder: str, *more: str, **order: Any) -> int:
            train_words = ["train", "--config-file", "tiny.py", f"train.output_dir={folder}", *more]
            order = {"words": train_words, "folder": folder, "output": f"{folder}.txt", **order}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def train(*words: str) -> int:
    return main(["train", "--config-file", "tiny.py", *words])


def train_in(folder: str | Path, *words: str) -> int:
    return train(f"train.output_dir={folder}", *words)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def same_weights(one: Path, other: Path, is_equal: Callable[[Tensor, Tensor], bool] = torch.equal) -> bool:
    first, second = (load_file(folder / "model_final" / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(is_equal(first[name], second[name]) for name in first)


def near(one: Path, other: Path) -> bool:
    """Whether the final weights of two runs agree up to rounding."""
    return same_weights(one, other, functools.partial(torch.allclose, rtol=1e-3, atol=1e-4))


def near_rows(one: Path, other: Path) -> bool:
    pairs = list(zip(rows_of(one), rows_of(other), strict=True))
    return all(a.keys() == b.keys() and all(b[k] == pytest.approx(a[k], rel=1e-4) for k in a) for a, b in pairs)


class Calls(HookBase):
    """Calls functions with the loop, at the moments that their names say."""

    def __init__(self, **functions: Any) -> None:
        vars(self).update(functions)


class StopAfter(HookBase):
    def __init__(self, done: int, number: signal.Signals = signal.SIGINT) -> None:
        self.done, self.number = done, number

    def after_step(self, loop: Loop) -> None:
        if loop.done == self.done:
            os.kill(os.getpid(), self.number)


def trainer_of(
    folder: str | Path, *words: str, config: str = "tiny.py", hooks: Sequence[HookBase] = (), **how: Any
) -> Trainer:
    trainer = trainer_from(config, [f"train.output_dir={folder}", *words], **how)
    trainer._more_hooks = hooks
    return trainer


def stopped(
    folder: str | Path, done: int, *words: str, number: signal.Signals = signal.SIGINT, **how: Any
) -> TrainResult:
    return trainer_of(folder, *words, hooks=(StopAfter(done, number),), **how).train()


def writer_of(loop: Loop) -> SnapshotWriter:
    (hook,) = (hook for hook in loop._hooks if isinstance(hook, SnapshotHook))
    return hook._writer


class Losses(HookBase):
    """Notes the losses of a run, and what its snapshots are taken of."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def before_train(self, loop: Loop) -> None:
        self.state = writer_of(loop)._state

    def after_step(self, loop: Loop) -> None:
        self.losses.append(float(loop.losses["total_loss"]))


def run(folder: str | Path, *words: str, hooks: Sequence[HookBase] = (), **how: Any) -> Losses:
    noted = Losses()
    trainer_of(folder, *words, hooks=(noted, *hooks), **how).train()
    return noted
