"""Tasks on text: batches, losses, metrics."""

from __future__ import annotations

import hashlib
import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.modules import as_module
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn
from transformers import BertConfig, BertForPreTraining, BertForSequenceClassification

from graphckpt.config.lazy import read_calls
from graphckpt.config.schema import call_faults
from graphckpt.errors import ConfigError
from graphckpt.train.data.text_data import TextData
from graphckpt.train.output import Report
from graphckpt.train.tasks import CausalLM, MaskedLM, OwnLoss, SequenceClassification

_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty documents of two classes, each of lines of words that no other document has."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    generator = random.Random(0)
    for index in range(20):
        file = folder / ("odd" if index % 2 else "even") / f"{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        words = [f"{index:02}{letter}" for letter in "abcdef"]
        lines = [" ".join(generator.choices(words, k=6)) for _ in range(60)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def data(texts: Path) -> TextData:
    fields = {"paths": str(texts), "vocab_size": 400, "seq_length": 48, "eval_fraction": 0.3}
    return TextData(**fields, cache_dir=str(texts.parent / "cache"))


def _open(data: TextData, task: Any, seed: int = 1) -> Any:
    return data.open(task, seed=seed, report=Report(Console(file=io.StringIO())))


def _all(samples: Any) -> Any:
    return samples.batch(np.arange(len(samples)))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (CausalLM(), ("f825674d19092dc4", "a8c961354c9f75b9")),
        (MaskedLM(), ("5b6f886dbbe7b3ae", "17c88db02d3d67ba")),
        (MaskedLM(mask_fraction=0.4, random_fraction=0.0), ("cdcedea77619911b", "154873f8992a33cf")),
        (SequenceClassification(), ("5d7410013e126d9a", "8e37fb558f1d1f31")),
    ],
)
def test_samples_are_those_of_earlier_versions(data: TextData, task: Any, expected: tuple[Any, ...]) -> None:
    """The hashes are those of 0.1, which wrote its own token files: a run that is resumed sees the same samples."""
    opened, hashes = _open(data, task), []
    for samples in (opened.train, opened.heldout):
        digest = hashlib.sha256()
        for name, values in sorted(_all(samples).items()):
            digest.update(name.encode() + values.numpy().tobytes() + str(values.dtype).encode())
        hashes.append(digest.hexdigest()[:16])
    assert tuple(hashes) == expected


def test_masked_lm_masks_80_10_10_of_the_asked(data: TextData) -> None:
    opened = _open(data, MaskedLM())
    batch, ids = _all(opened.train), opened.text.special_ids
    assert ids == {"[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    asked = batch["labels"] != -100
    is_special = torch.isin(torch.where(asked, batch["labels"], 0), torch.tensor([1, 2, 3, 4]))
    assert not is_special.any()
    text = batch["attention_mask"].bool().sum() - 3 * len(asked)
    assert asked.sum().item() == pytest.approx(0.15 * text.item(), rel=0.05)  # whole tokens of each sample
    assert (asked.sum(1) > 0).all()
    seen, wanted = batch["input_ids"][asked], batch["labels"][asked]
    masked, same = (seen == ids["[MASK]"]), (seen == wanted)
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert same.float().mean().item() == pytest.approx(0.1, abs=0.03)
    assert (seen[~masked & ~same] > 4).all()


def test_masked_lm_pairs_texts_of_one_document_or_of_two(data: TextData) -> None:
    opened = _open(data, MaskedLM(mask_fraction=0.0))
    tokenizer = Tokenizer.from_file(str(opened.text.tokenizer_file))
    batch = _all(opened.train)
    whole = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    ends_in_line = 0
    for row, types, mask, follows in zip(
        whole, batch["token_type_ids"], batch["attention_mask"], batch["next_sentence_label"], strict=True
    ):
        ids = row[mask.bool()].tolist()
        seps = [place for place, token in enumerate(ids) if token == 3]
        assert ids[0] == 2
        assert len(seps) == 2
        assert seps[1] == len(ids) - 1
        assert types.tolist() == [0] * (seps[0] + 1) + [1] * (seps[1] - seps[0]) + [0] * (len(row) - len(ids))
        first, second = (tokenizer.decode(part) for part in (ids[1 : seps[0]], ids[seps[0] + 1 : seps[1]]))
        assert first
        assert second
        documents = [{word[:2] for word in text.split() if len(word) == 3} for text in (first, second)]
        ends_in_line += first.endswith("\n")
        if documents[0] and documents[1]:
            assert len(documents[0]) == len(documents[1]) == 1  # no text reaches over the end of its document
            assert (documents[0] == documents[1]) == (follows == 0)
    assert ends_in_line > 0.9 * len(whole)
    assert batch["next_sentence_label"].float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_masked_lm_draws_the_same_for_a_sample_and_a_seed(data: TextData) -> None:
    samples = _open(data, MaskedLM()).train
    again, other = _open(data, MaskedLM()).train, _open(data, MaskedLM(), seed=2).train
    batch = samples.batch(np.array([5, 3, 9]))
    single = again.batch(np.array([3]))
    assert all(batch[name][1].equal(single[name][0]) for name in batch)
    assert not other.batch(np.array([5, 3, 9]))["input_ids"].equal(batch["input_ids"])


def test_masked_lm_has_the_loss_of_the_model(data: TextData) -> None:
    torch.manual_seed(0)
    opened = _open(data, MaskedLM())
    model = BertForPreTraining(BertConfig(vocab_size=400, **_SMALL)).eval()
    batch = opened.train.batch(np.arange(8))
    losses = MaskedLM().losses(model, batch)
    torch.testing.assert_close(losses["lm_loss"] + losses["nsp_loss"], model(**batch).loss)
    means = {name: (total / count).item() for name, (total, count) in MaskedLM().tally(model, batch).items()}
    metrics = MaskedLM().metrics(means)
    assert metrics["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert metrics["eval_ppl"] == pytest.approx(losses["lm_loss"].exp().item(), rel=1e-5)
    assert 0 <= metrics["eval_nsp_acc"] <= 1


def test_classification_labels_with_the_folder(data: TextData) -> None:
    opened = _open(data, SequenceClassification())
    tokenizer = Tokenizer.from_file(str(opened.text.tokenizer_file))
    batch = _all(opened.train)
    assert opened.text.groups == ("even", "odd")
    for row, label in zip(batch["input_ids"], batch["labels"], strict=True):
        document = next(word for word in tokenizer.decode(row.tolist()).split() if len(word) == 3)[:2]
        assert int(document) % 2 == label
    model = BertForSequenceClassification(BertConfig(vocab_size=400, num_labels=2, **_SMALL)).eval()
    some = opened.train.batch(np.arange(6))
    losses = SequenceClassification().losses(model, some)
    torch.testing.assert_close(losses["cls_loss"], model(**some).loss)
    right, count = SequenceClassification().tally(model, some)["acc"].tolist()
    logits = model(input_ids=some["input_ids"], attention_mask=some["attention_mask"]).logits
    assert (right, count) == ((logits.argmax(-1) == some["labels"]).sum().item(), 6)


def _returning(returned: Any) -> Any:
    model = nn.Module()
    model.forward = returned
    return model


def test_own_loss_takes_what_the_model_returns_with_counts_and_masks_and_asks_for_a_loss() -> None:
    batch = {"x": torch.tensor([1.0, 2.0, 3.0])}
    for model, names in (
        (_returning(lambda x: x.sum()), ["loss"]),
        (_returning(lambda x: {"a_loss": x.sum(), "size": x.sum()}), ["a_loss", "size"]),
    ):
        assert list(OwnLoss().losses(model, batch)) == names
        assert OwnLoss().tally(model, batch)["loss"].tolist() == [18.0, 3.0]
    counted = _returning(lambda x: {"loss": x.sum(), "tokens": torch.tensor(5), "correct": x > 1.5})
    values = OwnLoss().losses(counted, {"x": batch["x"][:2]})
    assert {name: value.item() for name, value in values.items()} == {"loss": 3, "tokens": 5, "correct": 0.5}
    with pytest.raises(ConfigError, match=r"returned the names 'logits', and no loss · fix: return the loss"):
        OwnLoss().losses(_returning(lambda x: {"logits": x}), batch)


def test_own_loss_reports_values_that_the_update_changes_as_they_were() -> None:
    @as_module(lambda: {"scale": nn.Parameter(torch.tensor(1.0)), "calls": nn.Buffer(torch.zeros(()))})
    def Scaled(self: Any, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        return {"loss": (x * self.scale).sum(), "scale": self.scale, "calls": self.calls, "sizes": x}

    model = Scaled()
    values = OwnLoss().losses(model, {"x": torch.ones(3)})
    with torch.no_grad():
        model.scale += 1
        model.calls += 1
    assert {name: value.item() for name, value in values.items()} == {"loss": 3, "scale": 1, "calls": 1, "sizes": 1}


def test_model_that_does_not_fit_the_text_is_told_all(data: TextData) -> None:
    opened = _open(data, SequenceClassification())
    model = BertForSequenceClassification(
        BertConfig(vocab_size=100, max_position_embeddings=16, num_labels=1, **_SMALL)
    )
    vocabulary, positions, labels = SequenceClassification().check(model, opened.text)
    known = f"model: expected a vocabulary of at least the tokenizer's {opened.text.vocab_size} tokens, got 100"
    assert vocabulary == f"{known} · fix: set its vocab_size to ${{data.vocab_size}}"
    assert positions.startswith("model: expected at least data.seq_length=48 positions, got 16 · fix:")
    assert labels == "model: expected at least 2 classes, got 1 · fix: set its num_labels to 2"


def test_one_document_has_no_second_text_from_another(texts: Path, data: TextData) -> None:
    one = replace(data, paths=str(next(texts.rglob("*.txt"))))
    opened, model = _open(one, MaskedLM()), nn.Module()
    (fault,) = MaskedLM().check(model, opened.text)
    assert fault.startswith(
        "data: expected several documents, of which the second text of a pair is drawn, got one · fix: name several"
    )
    assert list(MaskedLM(random_fraction=0.0).check(model, opened.text)) == []
    assert _all(opened.train)["next_sentence_label"].tolist() == [0] * len(opened.train)


def test_task_that_is_not_for_text_says_so(data: TextData) -> None:
    with pytest.raises(ConfigError, match="task: OwnLoss does not support text · fix: use graphckpt"):
        _open(data, OwnLoss())


def test_faults_of_a_task_are_those_of_the_config() -> None:
    described = {"_target_": "graphckpt.train.tasks.MaskedLM", "mask_fraction": 1.5, "random_fractoin": 0.5}
    assert list(call_faults(read_calls(described, "task", []))) == [
        "task.random_fractoin: no such key of MaskedLM · did you mean 'random_fraction' or 'mask_fraction'?",
        "task.mask_fraction: expected a share from 0 to 1, got 1.5",
    ]
