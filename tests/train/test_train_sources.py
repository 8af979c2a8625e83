"""Where samples come from beside text files: a Hugging Face data set, a user's tokenizer, a user's data sets."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import graphckpt.train
from graphckpt.train.data.documents import DataError
from graphckpt.train.data.samples import OwnData
from graphckpt.train.data.text_data import TextData
from graphckpt.train.output import Report
from graphckpt.train.tasks import MaskedLM, OwnLoss, SequenceClassification


def test_the_package_names_what_is_public():
    for name in ("HookBase", "Loop", "OwnData", "OwnLoss", "Task", "TextData", "TrainConfig", "Trainer"):
        assert getattr(graphckpt.train, name).__name__ == name


@pytest.fixture
def quiet():
    return Report(Console(file=io.StringIO()))


class Rows(list):
    """As a data set of the package ``datasets``: dicts by number, with named columns."""

    column_names = ("text", "label")
    features = {"label": SimpleNamespace(names=["bad", "good"]), "text": None}  # noqa: RUF012


@pytest.fixture
def hub(monkeypatch):
    """A package ``datasets`` that knows one data set."""
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if name != "reviews":
            raise FileNotFoundError(f"no data set {name}\nand more")
        rows = [{"text": f"review {n}: " + "word " * (20 + n), "label": n % 2} for n in range(30)]
        return Rows([*rows, rows[0], {"text": "  ", "label": 0}])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def _data(tmp_path, **fields):
    whole = {"dataset": "reviews", "vocab_size": 280, "seq_length": 16, "eval_fraction": 0.3, **fields}
    return TextData(**whole, cache_dir=str(tmp_path / "cache"))


def test_data_set_of_the_hub_is_text_with_classes(hub, tmp_path, quiet):
    data = _data(tmp_path, dataset_config="plain", label_column="label")
    opened = data.open(SequenceClassification(), seed=1, report=quiet)
    assert hub == [("reviews", "plain", "train")]
    assert opened.text.groups == ("bad", "good")
    assert opened.text.train.num_documents + opened.text.heldout.num_documents == 30  # one repeats, one is empty
    batch = opened.train.batch(np.arange(len(opened.train)))
    assert set(batch["labels"].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "reviws"}, r"data\.dataset: 'reviws': FileNotFoundError: no data set reviws · fix: check"),
        (
            {"text_column": "txt"},
            r"data\.text_column: expected a column of the data set, got 'txt' · did you mean 'text'\? · fix: use one",
        ),
        (
            {"label_column": "lable"},
            r"data\.label_column: expected a column of the data set, got 'lable' · did you mean 'label'",
        ),
        ({"dataset": "json"}, r"data\.dataset: 'json' is the format of files · fix: name them in data\.paths"),
        ({"paths": "x"}, r"data\.dataset: 'reviews', and data\.paths is set too · fix: set one of them to null"),
    ],
)
def test_faults_of_a_data_set(hub, tmp_path, quiet, fields, message):
    with pytest.raises(DataError, match=message):
        _data(tmp_path, **fields).prepare(quiet)


def _tokenizer(path, *special):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["review word"], trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_tokenizer_of_the_user_is_used(hub, tmp_path, quiet):
    special = ["[MASK]", "[SEP]", "[CLS]", "[PAD]", "<|endoftext|>"]
    own = _tokenizer(tmp_path / "tokenizer.json", *special)
    text = _data(tmp_path, tokenizer_file=str(tmp_path / "tokenizer.json")).prepare(quiet, MaskedLM.special_tokens)
    assert text.vocab_size == own.get_vocab_size()
    assert text.special_ids == {"[PAD]": 3, "[CLS]": 2, "[SEP]": 1, "[MASK]": 0}


def test_faults_of_a_tokenizer(hub, tmp_path, quiet):
    with pytest.raises(DataError, match=r"data\.tokenizer_file: none\.json: no such file"):
        _data(tmp_path, tokenizer_file="none.json").prepare(quiet)
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"broken\.json: .* · fix: name a tokenizer\.json of the tokenizers library"):
        _data(tmp_path, tokenizer_file=str(tmp_path / "broken.json")).prepare(quiet)
    _tokenizer(tmp_path / "plain.json", "<|endoftext|>", "[PAD]")
    with pytest.raises(DataError, match=r"plain\.json has no \[CLS\], \[SEP\], \[MASK\] · fix: add them"):
        _data(tmp_path, tokenizer_file=str(tmp_path / "plain.json")).prepare(quiet, MaskedLM.special_tokens)
    with pytest.raises(
        DataError, match=r"data\.vocab_size: expected 261 or more, with one for \[PAD\], \[CLS\].* each, got 260"
    ):
        _data(tmp_path, vocab_size=260).prepare(quiet, MaskedLM.special_tokens)


def test_own_data_sets_are_collated(quiet):
    items = [{"x": torch.full((2,), float(n)), "y": n} for n in range(5)]
    opened = OwnData(train=items, heldout=items[:2]).open(OwnLoss(), seed=0, report=quiet)
    batch = opened.train.batch(np.array([3, 1]))
    assert batch["x"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert batch["y"].tolist() == [3, 1]
    assert (len(opened.train), len(opened.heldout), opened.tokenizer_file, opened.tokens_each) == (5, 2, None, 1)
    assert OwnData(train=items).open(OwnLoss(), seed=0, report=quiet).heldout is None


def test_faults_of_own_data_sets(quiet):
    with pytest.raises(
        DataError, match=r"data\.train: expected a map-style data set, got generator · fix: give it __len__"
    ):
        OwnData(train=(n for n in range(3))).open(OwnLoss(), seed=0, report=quiet)
    with pytest.raises(DataError, match=r"data\.heldout: list holds no sample · fix: fill it"):
        OwnData(train=[{}], heldout=[]).open(OwnLoss(), seed=0, report=quiet)
    opened = OwnData(train=[torch.ones(2)]).open(OwnLoss(), seed=0, report=quiet)
    with pytest.raises(DataError, match=r"data\.train: a sample is a Tensor · fix: return a dict"):
        opened.train.batch(np.array([0]))
