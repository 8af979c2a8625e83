"""Where samples come from beside text files: a data set of Hugging Face, a user's tokenizer, a user's data sets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from graphckpt import extras
from graphckpt.train.data.documents import DataError
from graphckpt.train.data.samples import OwnData
from graphckpt.train.data.text_data import TextData
from graphckpt.train.output import Report
from graphckpt.train.tasks import CausalLM, MaskedLM, OwnLoss, SequenceClassification

_CARD = """---
configs:
- {config_name: plain, data_files: train.jsonl}
dataset_info:
- config_name: plain
  features:
  - {name: text, dtype: string}
  - {name: label, dtype: {class_label: {names: {'0': bad, '1': good}}}}
---
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of JSON lines, and nothing of the user's in the cache of data sets."""
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


def _data(folder: Path, **fields: Any) -> TextData:
    sizes = {"vocab_size": 280, "seq_length": 16, "eval_fraction": 0.3, "cache_dir": str(folder / "cache")}
    return TextData(**{"dataset": str(folder / "reviews"), **sizes, **fields})


@pytest.mark.parametrize(("config", "groups"), [(None, ("0", "1")), ("plain", ("bad", "good"))])
def test_rows_of_a_data_set_are_text_with_classes(
    folder: Path, quiet: Report, config: str | None, groups: tuple[Any, ...]
) -> None:
    if config:
        (folder / "reviews" / "README.md").write_text(_CARD)
    data = _data(folder, dataset_config=config, label_column="label")
    opened = data.open(SequenceClassification(), seed=1, report=quiet)
    assert opened.text.groups == groups
    assert opened.text.train.num_documents + opened.text.heldout.num_documents == 30  # without repeated and empty rows
    batch = opened.train.batch(np.arange(len(opened.train)))
    assert set(batch["labels"].tolist()) == {0, 1}
    assert opened.tokenizer_file.exists()
    assert len(_data(folder).open(CausalLM(), seed=1, report=quiet).train) > 1


def test_files_of_a_format_are_the_rows_of_their_data_set(folder: Path, quiet: Report) -> None:
    file = str(folder / "reviews" / "train.jsonl")
    named, listed = (_data(folder, **fields).prepare(quiet) for fields in ({}, {"dataset": "json", "paths": [file]}))
    assert listed.tokenizer_file == named.tokenizer_file  # the folder of its name is a hash of the text
    lines = _data(folder, dataset="text", paths=file).prepare(quiet)
    assert lines.train.num_documents + lines.heldout.num_documents == 32  # lines of JSON, without the repeated one


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_split": "tset"}, r"data\.dataset: '.*reviews': ValueError: .*tset.* · fix: check data\.dataset"),
        ({"dataset_config": "plian"}, r"data\.dataset: '.*reviews': ValueError: .*plian.* · fix: check data\.dataset"),
        ({"dataset": "nowhere/at-all"}, r"data\.dataset: 'nowhere/at-all': \w+: .* · fix: check data\.dataset"),
        (
            {"text_column": "txt"},
            r"data\.text_column: expected a column of the data set, got 'txt' · did you mean 'text'",
        ),
        ({"label_column": "lable"}, r"data\.label_column: expected a column of the data set, got 'lable' · did"),
        ({"dataset": "json"}, r"data\.dataset: 'json' is the format of files · fix: name them in data\.paths"),
        ({"paths": "x"}, r"data\.dataset: '.*reviews', and data\.paths is set too · fix: set one of them to null"),
    ],
)
def test_faults_of_a_data_set_are_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quiet: Report, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=message) as caught:
        _data(folder, **fields).prepare(quiet)
    assert len(str(caught.value).splitlines()) == 1


def test_a_data_set_by_name_needs_a_package_that_files_do_not_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quiet: Report
) -> None:
    monkeypatch.setattr(extras, "find_spec", {}.get)
    with pytest.raises(extras.MissingPackageError, match=r"datasets is not installed · fix: pip install datasets, or"):
        _data(folder).prepare(quiet)


def _tokenizer(path: Path, *special: Any) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["review word"], trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_tokenizer_of_the_user_is_used(folder: Path, quiet: Report) -> None:
    special = ["[MASK]", "[SEP]", "[CLS]", "[PAD]", "<|endoftext|>"]
    own = _tokenizer(folder / "tokenizer.json", *special)
    text = _data(folder, tokenizer_file=str(folder / "tokenizer.json")).prepare(quiet, MaskedLM.special_tokens)
    assert text.vocab_size == own.get_vocab_size()
    assert text.special_ids == {"[PAD]": 3, "[CLS]": 2, "[SEP]": 1, "[MASK]": 0}
    assert text.text_ids.tolist() == list(range(5, text.vocab_size))


def test_random_tokens_are_those_of_text_wherever_a_tokenizer_has_its_special_ones(folder: Path, quiet: Report) -> None:
    special = ["[MASK]", "[SEP]", "[CLS]", "[PAD]", "<|endoftext|>"]
    own = _tokenizer(folder / "tokenizer.json")
    own.add_tokens(["between"])
    own.add_special_tokens([*special, "[UNK]"])
    own.save(str(folder / "tokenizer.json"))
    data = _data(folder, tokenizer_file=str(folder / "tokenizer.json"))
    opened = data.open(MaskedLM(mask_fraction=1.0), seed=1, report=quiet)
    last = own.token_to_id("between")
    assert opened.text.text_ids.tolist() == list(range(last + 1))
    batch = opened.train.batch(np.arange(len(opened.train)))
    changed = batch["input_ids"][(batch["labels"] != -100) & (batch["input_ids"] != opened.text.special_ids["[MASK]"])]
    assert len(changed) > 50
    assert changed.max() <= last


def test_faults_of_a_tokenizer(folder: Path, quiet: Report) -> None:
    (folder / "broken.json").write_text("{}", encoding="utf-8")
    _tokenizer(folder / "plain.json", "<|endoftext|>", "[PAD]")
    for fields, message in (
        ({"tokenizer_file": "none.json"}, r"data\.tokenizer_file: none\.json: no such file"),
        ({"tokenizer_file": f"{folder}/broken.json"}, r"broken\.json: .* · fix: name a tokenizer\.json of the token"),
        ({"tokenizer_file": f"{folder}/plain.json"}, r"plain\.json has no \[CLS\], \[SEP\], \[MASK\] · fix: add"),
        ({"vocab_size": 260}, r"data\.vocab_size: expected 261 or more, with one for \[PAD\], \[CLS\].* each, got 260"),
    ):
        with pytest.raises(DataError, match=message):
            _data(folder, **fields).prepare(quiet, MaskedLM.special_tokens)


def test_own_data_sets_are_collated(quiet: Report) -> None:
    items = [{"x": torch.full((2,), float(n)), "y": n} for n in range(5)]
    opened = OwnData(train=items, heldout=items[:2]).open(OwnLoss(), seed=0, report=quiet)
    batch = opened.train.batch(np.array([3, 1]))
    assert batch["x"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert batch["y"].tolist() == [3, 1]
    assert (len(opened.train), len(opened.heldout), opened.tokenizer_file, opened.tokens_each) == (5, 2, None, 1)
    assert OwnData(train=items).open(OwnLoss(), seed=0, report=quiet).heldout is None


def test_faults_of_own_data_sets(quiet: Report) -> None:
    for data, message in (
        (OwnData(train=(n for n in range(3))), r"data\.train: expected a map-style data set, got generator · fix"),
        (OwnData(train=[{}], heldout=[]), r"data\.heldout: list holds no sample · fix: fill it"),
        (OwnData(train=[torch.ones(2)]), r"data\.train: a sample is a Tensor · fix: return a dict"),
    ):
        with pytest.raises(DataError, match=message):
            data.open(OwnLoss(), seed=0, report=quiet).train.batch(np.array([0]))
