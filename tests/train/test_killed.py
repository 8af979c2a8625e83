"""A run that is killed at any moment leaves the old files or the new ones, and ends at the same bits once resumed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import killed
from helpers.small_run import rows_of
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import Snapshots

pytestmark = pytest.mark.slow

LONG = [
    *("train.train_iter=16", "train.checkpointer.period=3", "train.evaluation.eval_period=5"),
    "train.activation_checkpoint.enabled=True",
]
NUM_KILLS = 10
MOMENTS = (  # files whose appearance starts the clock: a run under way, and those that a snapshot is written through
    "last_checkpoint",
    ".model_0000008.tmp",
    "model_0000005",
    ".model_0000011.tmp/snapshot.json",
    "metrics.json",
    ".model_best.tmp/graph.pt",
    "model_0000008",
    ".model_final.tmp",
    ".last_checkpoint.tmp",
    ".*.trash",
)


def final(folder: str) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    state = torch.load(f"{folder}/model_final/graph.pt", weights_only=True)
    return load_file(f"{folder}/model_final/model.safetensors"), state["System-Train-Optimizer-0"]["state"]


def lines_of(folder: Path) -> list[str]:
    return (folder / "metrics.json").read_text().splitlines()


def test_killed_at_random_moments_and_resumed_it_ends_at_the_same_bits(place: Path, child: Callable[..., int]) -> None:
    assert child("whole", *LONG) == 0
    weights, moments = final("whole")
    generator = random.Random(1)
    ends = []
    for number in range(NUM_KILLS):
        folder, when = f"killed{number}", MOMENTS[number % len(MOMENTS)]
        after = generator.uniform(0, 0.03 if when.startswith(".") else 0.4)
        ends.append(child(folder, *LONG, when=when, after=after))
        if number % 5 == 1:  # and once more, on the way back
            after = generator.uniform(0.1, 0.4)
            ends.append(child(folder, *LONG, "--resume", when="last_checkpoint", after=after))
        code = child(folder, *LONG, "--resume")
        if code == 2:  # killed before the first snapshot
            assert "holds no last_checkpoint" in Path(f"{folder}.txt").read_text()
            assert child(folder, *LONG, "train.overwrite=True") == 0
        last, last_moments = final(folder)
        assert last.keys() == weights.keys()
        assert all(torch.equal(last[name], weights[name]) for name in weights)
        for key, state in moments.items():
            assert all(torch.equal(last_moments[key][name], state[name]) for name in state)
        assert rows_of(place / folder) == rows_of(place / "whole")
        left = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        assert left == ["model_0000011", "model_0000014", "model_best", "model_final"]
    assert ends.count(-9) >= NUM_KILLS * 3 // 4  # the rest ended before they were killed


@pytest.mark.parametrize("mode", ["--resume", "train.overwrite=True"])
def test_dead_at_any_call_the_folder_holds_the_old_or_the_new(child: Callable[..., int], mode: str) -> None:
    words = ["train.checkpointer.period=2"]
    assert child("old", *words, "train.train_iter=4", draws=True) == 0
    old = Path("old")
    out = Path("out")
    seed = random.Random(2)
    moments = sorted(seed.sample(range(120), NUM_KILLS))
    ends = []
    for count, number in enumerate(moments):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(old, out)
        ends.append(child("out", *words, "train.train_iter=7", "optim.lr=1e-3", mode, dies_at=number, draws=True))
        snapshot.recover(out)
        left = {path.name for path in out.iterdir()}
        assert not [name for name in left if name.startswith(".")]
        for name in Snapshots(out).names():
            snapshot.check(out / name)
        for name in {"config.yaml", "step.png"} & left:
            assert (out / name).stat().st_size > 0
        if "config.yaml" in left:
            assert OmegaConf.load(out / "config.yaml").optim.lr in {5e-3, 1e-3}
        if mode == "--resume":
            assert {"model_best", "model_final", "config.yaml", "metrics.json", "last_checkpoint", "log.txt"} <= left
            assert lines_of(out)[: len(lines_of(old))] == lines_of(old)
            assert Snapshots(out).last()[1]["done"] >= 4
        elif "last_checkpoint" in left:
            assert Snapshots(out).last()[0].is_dir()
        assert [json.loads(line) for line in lines_of(out)] if "metrics.json" in left else True
        if count % 4 == 0:
            assert child("out", *words, "train.train_iter=7", mode, draws=True) == 0
    assert ends.count(killed.DIED) >= NUM_KILLS // 2
