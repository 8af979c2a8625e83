"""Transformers' Trainer with the batch size and the accumulation that fit a memory budget."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import tiny_gpt2
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from graphckpt import ConfigError
from graphckpt.integrations.transformers import GraphckptCallback, fit_training_arguments
from graphckpt.planning import PlanError

MIB = 2**20


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.full((48,), index)
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny_gpt2(n_embd=32, n_positions=48, vocab_size=64)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), gradient_accumulation_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="no", **{"max_steps": 3, "per_device_train_batch_size": 16, **more},
    )  # fmt: skip


@pytest.mark.slow
def test_the_samples_of_an_update_stay_the_same(tmp_path: Path) -> None:
    model, given = gpt2(), arguments(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    sizes = {}
    for goal in ("throughput", "batch"):
        fitted = fit_training_arguments(model, given, Tokens(), memory_budget=8 * MIB, goal=goal)  # type: ignore[arg-type]
        assert fitted.per_device_train_batch_size * fitted.gradient_accumulation_steps == 32
        sizes[goal] = fitted.per_device_train_batch_size
    assert sizes["throughput"] <= sizes["batch"] < 32
    assert given.per_device_train_batch_size == 16, "the arguments that were given stay as they are"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())

    callback = GraphckptCallback(memory_budget=8 * MIB, report=False)
    fitted.max_steps = 8
    Trainer(model=model, args=fitted, train_dataset=Tokens(), callbacks=[callback]).train()
    assert callback.plan.predicted_peak_bytes <= 8 * MIB < callback.plan.plain_peak_bytes


def test_all_memory_of_the_device(tmp_path: Path) -> None:
    given = arguments(tmp_path, per_device_train_batch_size=4)
    fitted = fit_training_arguments(gpt2(), given, Tokens(), memory_budget="max", goal="batch")
    assert (fitted.per_device_train_batch_size, fitted.gradient_accumulation_steps) == (8, 1)
    callback = GraphckptCallback(memory_budget="max", report=False)
    Trainer(model=gpt2(), args=fitted, train_dataset=Tokens(), callbacks=[callback]).train()
    assert callback.plan.policies == {}, "all fits"


def test_a_callback_predicts_the_peak_of_the_trainer_which_releases_the_logits_before_backward(tmp_path: Path) -> None:
    model = tiny_gpt2(n_layer=2, n_positions=48, vocab_size=2048)
    callback = GraphckptCallback(memory_budget="max", report="table")  # a table has the peak of a step
    args = arguments(tmp_path, max_steps=4)
    Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[callback]).train()
    assert callback.explanation.peak_bytes == pytest.approx(callback.plan.predicted_peak_bytes, rel=0.01)


def test_a_callback_plans_for_the_gradients_that_are_accumulated(tmp_path: Path) -> None:
    plans = []
    for accumulation in (1, 4):
        args = arguments(tmp_path)
        args.gradient_accumulation_steps = accumulation
        callback = GraphckptCallback(memory_budget="max", report=False)
        model = gpt2()
        Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[callback]).train()
        plans.append(callback.plan.plain_peak_bytes)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 < plans[1] - plans[0] <= gradients


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter([Tokens()[0]])


def test_faults_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fit_training_arguments: expected a map-style data set to fit on"):
        fit_training_arguments(gpt2(), arguments(tmp_path), Stream())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = pytest.importorskip("trl").DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(ConfigError, match=r"arguments of Transformers' Trainer, got DPOConfig · fix: "):
        fit_training_arguments(gpt2(), config, Tokens())
    with pytest.raises(ConfigError, match="independent of the batch size, got 'min'"):
        fit_training_arguments(gpt2(), arguments(tmp_path), Tokens(), memory_budget="min")
    with pytest.raises(PlanError, match="no batch fits"):
        fit_training_arguments(gpt2(), arguments(tmp_path), Tokens(), memory_budget=2000)
