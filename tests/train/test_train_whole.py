"""Nothing in an output folder is replaced before its successor is whole, whatever call a process dies at."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import killed
from helpers.small_run import CONFIG
from omegaconf import OmegaConf

from graphckpt.train import output as files
from graphckpt.train.output import cut_metrics, replacing, write_text
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import Snapshots

_NUM_MOMENTS = 10


class _Killed(BaseException):
    """Ends the writer where it is."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), _Killed()])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch, error, call):
    path = tmp_path / "config.yaml"
    path.write_text("old: 1\n")

    def fails(*args, **kwargs):
        raise error

    if call == "write":
        monkeypatch.setattr(Path, "write_text", fails)
    else:
        monkeypatch.setattr(os, call, fails)
    with pytest.raises(type(error)):
        write_text(path, "new: 2\n")
    monkeypatch.undo()
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"config.yaml": "old: 1\n"}


def test_what_is_half_written_by_another_library_is_not_put_in_place(tmp_path):
    path = tmp_path / "step.png"
    path.write_bytes(b"old")

    def draw():
        with replacing(path) as fresh:
            assert fresh.suffix == ".png"
            fresh.write_bytes(b"half")
            raise ValueError("draw")

    with pytest.raises(ValueError, match="draw"):
        draw()
    assert [found.name for found in tmp_path.iterdir()] == ["step.png"]
    assert path.read_bytes() == b"old"


def test_a_cut_history_is_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1}\n{"iteration": 9}\n')

    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        cut_metrics(path, 1)
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 9}\n'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command line in a child of a process that has imported everything; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    (tmp_path / "texts").mkdir()
    for index in range(20):
        text = " ".join(generator.choices([f"w{n}" for n in range(30)], k=300))
        (tmp_path / "texts" / f"{index}.txt").write_text(f"text {index}: {text}\n", encoding="utf-8")
    (tmp_path / "tiny.py").write_text(CONFIG, encoding="utf-8")
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, killed.__file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def run(*more, dies_at=None):
            order = {
                "words": ["train", "--config-file", "tiny.py", "train.checkpointer.period=2", *more],
                "folder": "out",
                "output": "output.txt",
                "dies_at": dies_at,
                "draws": True,
            }
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def _rows(folder):
    return (folder / "metrics.json").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["--resume", "train.overwrite=True"])
def test_dead_at_any_call_the_folder_holds_the_old_or_the_new(run, mode):
    assert run("train.train_iter=4", "train.output_dir=old") == 0
    old = Path("old")
    out = Path("out")
    seed = random.Random(2)
    moments = sorted(seed.sample(range(120), _NUM_MOMENTS))
    ends = []
    for count, number in enumerate(moments):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(old, out)
        ends.append(run("train.train_iter=7", "optim.lr=1e-3", mode, dies_at=number))
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
            assert _rows(out)[: len(_rows(old))] == _rows(old)
            assert Snapshots(out).last()[1]["done"] >= 4
        elif "last_checkpoint" in left:
            assert Snapshots(out).last()[0].is_dir()
        assert [json.loads(line) for line in _rows(out)] if "metrics.json" in left else True
        if count % 4 == 0:
            assert run("train.train_iter=7", mode) == 0
    assert ends.count(killed.DIED) >= _NUM_MOMENTS // 2
