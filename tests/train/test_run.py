"""Whole runs of the command line, on a model and a text of a minute's reading."""

from __future__ import annotations

import io
import math
import re
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_run import CONFIG, STILL, Calls, rows_of, train, trainer_of
from helpers.subprocess_runner import run_script
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from graphckpt.cli import main
from graphckpt.config.files import existing
from graphckpt.config.trainer import trainer_from
from graphckpt.train.build_model import TrainGraph
from graphckpt.train.loop import Loop
from graphckpt.train.output import Report

LARGER = """
data.seq_length = 32
model.config.update(n_layer=3, n_embd=32)
train.update(train_micro_batch_size=8, num_accumulation_steps=None, train_iter=12, log_period=1, warmup_ratio=0.1)
train.checkpointer.update(period=5000, max_to_keep=100)
train.evaluation.update(eval_period=6, eval_iter=3)
train.activation_checkpoint.enabled = True
"""


@pytest.fixture(autouse=True)
def larger(place: Path) -> None:
    (place / "tiny.py").write_text(CONFIG + LARGER, encoding="utf-8")


def _losses(folder: Path) -> list[float]:
    return [row["total_loss"] for row in rows_of(folder) if "total_loss" in row]


def test_a_run_learns_and_writes_all(place: Path, pictures: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("train.train_iter=40", "train.log_period=5") == 0
    out = place / "out"
    rows = rows_of(out)
    losses = _losses(out)
    assert losses[0] == pytest.approx(math.log(300), rel=0.1)
    assert losses[-1] < losses[0] - 1
    evaluated = [row for row in rows if "eval_ppl" in row]
    assert [row["iteration"] for row in evaluated] == [5, 11, 17, 23, 29, 35, 39]
    assert all(row["eval_ppl"] == math.exp(row["eval_loss"]) for row in evaluated)
    assert (out / "step.png").read_bytes().startswith(b"\x89PNG")

    printed, log = capsys.readouterr().out, (out / "log.txt").read_text()
    for text in (printed, log):
        assert re.search(r"model\.transformer\.h\.0-2 \(3x\) +full", text)
        assert "kept for backward" in text
        assert re.search(
            r"eta: 0:00:00  iteration: 40/40  consumed_samples: 320"
            r"  total_loss: \d\.\d+  lm_loss: \d\.\d+  time: \S+ s/iter"
            r"  data_time: \S+ s/iter  total_throughput: \S+ samples/s  lr: \S+"
            r"  process_memory: \S+ [MG]iB  peak_process_memory: \S+ [MG]iB",
            text,
        )
        assert re.search(r"Overall training speed: 40 iterations in 0:00:\d\d \(\S+ s / it\)", text)
    assert "model_final" in printed


def test_the_saved_model_is_that_of_transformers_and_the_saved_config_runs_the_same_again(place: Path) -> None:
    assert train("train.seed=7") == 0
    model = AutoModelForCausalLM.from_pretrained(place / "out" / "model_final")
    tokenizer = AutoTokenizer.from_pretrained(place / "out" / "model_final")
    assert tokenizer.decode(tokenizer("w1 w2 text")["input_ids"]) == "w1 w2 text"
    trainer = trainer_from("tiny.py", ["train.output_dir=data"])
    heldout = trainer._data.prepare(trainer.report).heldout
    losses = []
    with torch.no_grad():
        for first in (0, 4, 8):  # the three batches of four that the run evaluated
            rows = heldout.batch([n * len(heldout) // 12 for n in range(first, first + 4)])
            losses.append(model(input_ids=rows, labels=rows).loss.item())
    assert sum(losses) / 3 == pytest.approx(rows_of(place / "out")[-1]["eval_loss"], rel=1e-5)

    first = _losses(place / "out")
    assert main(["train", "--config-file", "out/config.yaml", "train.output_dir=again"]) == 0
    assert _losses(place / "again") == first
    assert train("train.seed=8", "train.overwrite=True") == 0
    assert _losses(place / "out") != first


def test_policies_change_no_bit_and_amp_little(place: Path) -> None:
    assert train("train.output_dir=plain", "train.activation_checkpoint.enabled=False") == 0
    plain, weights = _losses(place / "plain"), (place / "plain" / "model_final" / "model.safetensors").read_bytes()
    for policy in (
        "rule=selective",
        "rule=True",
        'policies={"transformer.h.*.mlp": {"activation_checkpointing": true}}',
    ):
        assert train("train.output_dir=policy", "train.overwrite=True", f"train.activation_checkpoint.{policy}") == 0
        assert _losses(place / "policy") == plain
        assert (place / "policy" / "model_final" / "model.safetensors").read_bytes() == weights
    assert train("train.output_dir=short", "train.amp.enabled=True") == 0
    assert _losses(place / "short") != plain
    assert _losses(place / "short") == pytest.approx(plain, rel=0.05)


def test_accumulation_comes_near_one_large_batch(place: Path) -> None:
    assert train("train.output_dir=one", *STILL) == 0
    steps = ["train.num_accumulation_steps=4", "train.train_micro_batch_size=2"]
    assert train("train.output_dir=four", *STILL, *steps) == 0
    assert _losses(place / "four") == pytest.approx(_losses(place / "one"), rel=1e-3)
    assert [row["consumed_samples"] for row in rows_of(place / "four")] == [8 * n for n in range(1, 13)]


def test_fast_dev_run_and_overrides_between_flags(place: Path) -> None:
    first = ["train.evaluation.eval_iter=1", "train.output_dir=out"]
    assert main(["train", *first, "--fast-dev-run", "optim.lr=1e-3", "--config-file", "tiny.py"]) == 0
    rows = rows_of(place / "out")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert [row["consumed_samples"] for row in rows] == [2, 4, 6]
    assert [row["iteration"] for row in rows if "eval_ppl" in row] == [1, 2]
    log = (place / "out" / "log.txt").read_text()
    assert "--fast-dev-run made the run smaller; key=value on the command line wins over these:" in log
    assert "  train.train_micro_batch_size=2  (else 8)" in log
    assert "eval_iter" not in log  # which the command line said


@pytest.mark.parametrize(
    ("error", "words", "fix"),
    [
        (MemoryError("no room"), [], "no room · fix: a train.train_micro_batch_size below 8, with more"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
            ["train.activation_checkpoint.enabled=False"],
            "you tried · fix: train.activation_checkpoint.enabled=True, or a train.train_micro_batch_size below 8",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            ["train.train_micro_batch_size=1"],
            "CUDA out of memory · fix: use a smaller model, shorter samples, or a device with more memory",
        ),
    ],
)
def test_memory_that_runs_out_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    words: list[str],
    fix: str,
) -> None:
    def full(self: Any, **batch: Any) -> None:
        raise error

    monkeypatch.setattr(TrainGraph, "build", full)
    assert train(*words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: memory ran out: ")
    assert fix in printed
    assert len(printed.splitlines()) == 1


def test_an_output_folder_that_is_removed_costs_what_was_in_it_and_not_the_run(place: Path) -> None:
    def remove(loop: Loop) -> None:
        if loop.done == 4:
            shutil.rmtree(place / "out")

    trainer = trainer_of("out", "train.checkpointer.period=3", hooks=[Calls(after_step=remove)])
    assert trainer.train().iterations == 12
    assert AutoModelForCausalLM.from_pretrained(place / "out" / "model_final") is not None
    assert train("--resume") == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--version"], 0, r"graphckpt \d+\.\d+\.\d+"),
        (["train", "--help"], 0, r"graphckpt train --config-file configs/quickstart\.py --fast-dev-run"),
        (["train", "--config-file", "tiny.py", "--fast-dev-rnu"], 2, "--fast-dev-rnu · did you mean '--fast"),
        (["plan", "--memory-budgt", "10GiB"], 2, r"plan: .* --memory-budgt · did you mean '--memory-budget'"),
        (["train", "--config-file", "tiny.py", "--resum"], 2, "unknown option --resum"),
        (["fit", "--config-file", "tiny.py", "--batch-size", "1,2"], 2, "unknown option --batch-size"),
        (["train"], 2, "required: --config-file"),
        ([], 2, "required: command"),
    ],
)
def test_words_of_the_command_line(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert re.search(message, captured.out + captured.err)


def test_known_options_are_those_of_the_parser_and_not_of_its_coloured_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = ArgumentParser.format_usage
    monkeypatch.setattr(ArgumentParser, "format_usage", lambda self: usage(self).replace("--", "\x1b[36m--"))
    assert main(["train", "--config-file", "nowhere.py"]) == 2
    assert "nowhere.py: no such config file" in capsys.readouterr().err


def test_a_packaged_config_has_several_names_and_a_missing_one_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert existing(Path("quickstart")) == existing(Path("configs/quickstart.py"))
    assert main(["train", "--config-file", "configs/quickstrat.py"]) == 2
    assert "did you mean 'quickstart.py'" in capsys.readouterr().err


def test_exit_code_reaches_the_shell(place: Path) -> None:
    ran = run_script("graphckpt", "train", "--config-file", "nowhere.py", folder=place)
    assert ran.code == 2
    assert ran.stderr.startswith("error: nowhere.py: no such config file")
    assert len(ran.stderr.splitlines()) == 1


def test_terminal_shows_a_bar_with_the_time_left(place: Path) -> None:
    screen = io.StringIO()
    trainer = trainer_from("tiny.py", ["train.train_iter=3"])
    trainer.report = Report(Console(file=screen, force_terminal=True, width=100))
    trainer.train()
    shown = screen.getvalue()
    for label in ("training the tokenizer", "tokenizing", "training", "eta"):
        assert label in shown
