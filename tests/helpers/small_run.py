"""A run of seconds, to stop, resume, kill and break: the one training config of the tests. Not a test itself."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.bench import same as equal  # noqa: F401 - of two states, for tests
from safetensors.torch import load_file

from graphckpt.cli import main
from graphckpt.config.trainer import trainer_from
from graphckpt.train.hooks.snapshot import SnapshotHook
from graphckpt.train.loop import HookBase

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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
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
def child(place: Any) -> Iterator[Any]:
    """Runs the command line in a child of a process that has imported everything; returns the exit code."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, Path(__file__).with_name("killed.py")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def run(folder: Path, *more: Any, **order: Any) -> Any:
            train_words = ["train", "--config-file", "tiny.py", f"train.output_dir={folder}", *more]
            order = {"words": train_words, "folder": folder, "output": f"{folder}.txt", **order}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def train(*words: Any) -> Any:
    return main(["train", "--config-file", "tiny.py", *words])


def train_in(folder: Path, *words: Any) -> Any:
    return train(f"train.output_dir={folder}", *words)


def rows_of(folder: Path) -> list[Any]:
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def same_weights(one: Any, other: Any, is_equal: Any = torch.equal) -> Any:
    first, second = (load_file(folder / "model_final" / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(is_equal(first[name], second[name]) for name in first)


def near(one: Any, other: Any) -> Any:
    """Whether the final weights of two runs agree up to rounding."""
    return same_weights(one, other, functools.partial(torch.allclose, rtol=1e-3, atol=1e-4))


def near_rows(one: Any, other: Any) -> Any:
    pairs = list(zip(rows_of(one), rows_of(other), strict=True))
    return all(a.keys() == b.keys() and all(b[k] == pytest.approx(a[k], rel=1e-4) for k in a) for a, b in pairs)


class Calls(HookBase):
    """Calls functions with the loop, at the moments that their names say."""

    def __init__(self, **functions: Any) -> None:
        vars(self).update(functions)


class StopAfter(HookBase):
    def __init__(self, done: Any, number: Any = signal.SIGINT) -> None:
        self.done, self.number = done, number

    def after_step(self, loop: Any) -> None:
        if loop.done == self.done:
            os.kill(os.getpid(), self.number)


def trainer_of(folder: Path, *words: Any, config: str = "tiny.py", hooks: tuple[Any, ...] = (), **how: Any) -> Any:
    trainer = trainer_from(config, [f"train.output_dir={folder}", *words], **how)
    trainer._more_hooks = hooks
    return trainer


def stopped(folder: Path, done: Any, *words: Any, number: Any = signal.SIGINT, **how: Any) -> Any:
    return trainer_of(folder, *words, hooks=(StopAfter(done, number),), **how).train()


def writer_of(loop: Any) -> Any:
    (hook,) = (hook for hook in loop._hooks if isinstance(hook, SnapshotHook))
    return hook._writer


class Losses(HookBase):
    """Notes the losses of a run, and what its snapshots are taken of."""

    def __init__(self) -> None:
        self.losses = []

    def before_train(self, loop: Any) -> None:
        self.state = writer_of(loop)._state

    def after_step(self, loop: Any) -> None:
        self.losses.append(float(loop.losses["total_loss"]))


def run(folder: Path, *words: Any, hooks: tuple[Any, ...] = (), **how: Any) -> Any:
    noted = Losses()
    trainer_of(folder, *words, hooks=(noted, *hooks), **how).train()
    return noted
