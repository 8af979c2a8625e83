"""The package ``datasets`` itself, on a folder of this machine."""

from __future__ import annotations

import io
import json
import random

import datasets
import numpy as np
import pytest
from rich.console import Console

from graphckpt.train.data.documents import DataError
from graphckpt.train.data.text_data import TextData
from graphckpt.train.output import Report
from graphckpt.train.tasks import CausalLM, SequenceClassification


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of JSON lines, and nothing of the user's in the cache of data sets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    datasets.disable_progress_bars()
    generator = random.Random(0)
    rows = [
        {"text": f"review {n}: " + " ".join(generator.choices(["fine", "poor", "long"], k=30)), "label": n % 2}
        for n in range(30)
    ]
    rows += [rows[0], {"text": "  ", "label": 0}, {"text": None, "label": 1}]
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def _data(folder, **fields):
    sizes = {"vocab_size": 280, "seq_length": 16, "eval_fraction": 0.3, "cache_dir": str(folder / "cache")}
    return TextData(**{"dataset": str(folder / "reviews"), **sizes, **fields})


def test_its_rows_are_text_with_classes(folder):
    report = Report(Console(file=io.StringIO()))
    opened = _data(folder, label_column="label").open(SequenceClassification(), seed=1, report=report)
    assert opened.text.groups == ("0", "1")
    assert opened.text.train.num_documents + opened.text.heldout.num_documents == 30  # without repeated and empty rows
    batch = opened.train.batch(np.arange(len(opened.train)))
    assert set(batch["labels"].tolist()) == {0, 1}
    assert opened.tokenizer_file.exists()
    continued = _data(folder).open(CausalLM(), seed=1, report=report)
    assert len(continued.train) > 1


def test_files_of_a_format_are_the_rows_of_their_data_set(folder):
    report = Report(Console(file=io.StringIO()))
    file = str(folder / "reviews" / "train.jsonl")
    named, listed = (_data(folder, **fields).prepare(report) for fields in ({}, {"dataset": "json", "paths": [file]}))
    assert listed.tokenizer_file == named.tokenizer_file  # the folder of its name is a hash of the text
    lines = _data(folder, dataset="text", paths=file).prepare(report)
    assert lines.train.num_documents + lines.heldout.num_documents == 32  # lines of JSON, without the repeated one


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_split": "tset"}, r"data\.dataset: '.*reviews': ValueError: .*tset.* · fix: check data\.dataset"),
        ({"dataset": "nowhere/at-all"}, r"data\.dataset: 'nowhere/at-all': \w+: .* · fix: check data\.dataset"),
        (
            {"text_column": "txt"},
            r"data\.text_column: expected a column of the data set, got 'txt' · did you mean 'text'",
        ),
    ],
)
def test_its_errors_are_one_clear_message(folder, monkeypatch, fields, message):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=message) as caught:
        _data(folder, **fields).prepare(Report(Console(file=io.StringIO())))
    assert len(str(caught.value).splitlines()) == 1
