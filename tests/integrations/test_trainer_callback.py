"""One callback in Transformers' Trainer: same bits, bytes that fall, off again at the end; PEFT; the command line."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.layer_stacks import linear_layers, stack_of, tiny_gpt2
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import ModelOutput

import graphckpt
from graphckpt import ConfigError, PlanError, progress
from graphckpt._compat import is_watched
from graphckpt.blocks.forward import BlockForward
from graphckpt.blocks.select import layers
from graphckpt.integrations.policy_callback import saved_line
from graphckpt.integrations.transformers import GraphckptArguments, GraphckptCallback
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.update_watch import LATER
from graphckpt.units import format_bytes

LAYERS = 4
NAMES = {field.name for field in fields(TrainingArguments)}
OWN = "activation_checkpointing" if "activation_checkpointing" in NAMES else "gradient_checkpointing"


class RandomTokens(Dataset[dict[str, Tensor]]):
    def __init__(self, *, classify: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 64, (16, 48), generator=generator)
        self.labels = torch.randint(0, 2, (16,), generator=generator) if classify else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes))


def gpt2(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_positions": 64, "vocab_size": 64, "loss_type": "ForCausalLM"}
    return tiny_gpt2(n_layer=LAYERS, use_cache=True, **sizes, **more)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    fixed = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    sizes = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, "seed": 1}
    return TrainingArguments(output_dir=str(folder), dataloader_pin_memory=False, **{**fixed, **sizes, **more})


def train(model: nn.Module, folder: Path, *callbacks: GraphckptCallback, **more: Any) -> tuple[Trainer, dict[str, int]]:
    """Trains with dropout, and counts the runs of each layer's first linear."""
    runs: dict[str, int] = {}
    hooks = []
    for name in layers(model):
        linear = next(m for m in model.get_submodule(name).modules() if hasattr(m, "weight") and m.weight.dim() == 2)

        def count(*_: object, name: str = name) -> None:
            runs[name] = runs.get(name, 0) + 1

        hooks.append(linear.register_forward_pre_hook(count))
    classify = isinstance(model, BertForSequenceClassification)
    data = RandomTokens(classify=classify)
    trainer = Trainer(model=model, args=arguments(folder, **more), train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    for hook in hooks:
        hook.remove()
    return trainer, runs


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []


def train_twice(
    build: Callable[[], PreTrainedModel], folder: Path, callback: GraphckptCallback, own: Any = None, **more: Any
) -> tuple[Trainer, dict[str, int]]:
    """Trains without the callback, and with it and the arguments ``own``: the weights are equal."""
    plain, _ = train(build(), folder, **more)
    trainer, runs = train(build(), folder, callback, **more, **(own or {}))
    assert_equal(weights(trainer.model), weights(plain.model))
    assert not has_policies(trainer.model)
    return trainer, runs


def has_policies(model: nn.Module) -> bool:
    return any(isinstance(vars(module).get("forward"), BlockForward) for module in model.modules())


@pytest.mark.parametrize("build", [bert, gpt2])
def test_one_line_in_trainer_saves_bytes_and_changes_no_bit(
    build: Callable[[], PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = GraphckptCallback(rule="full")
    trainer, runs = train_twice(build, tmp_path, callback)
    assert set(runs.values()) == {6}, "twice in each of three steps"
    seen = callback.explanation
    assert seen.bytes_after < seen.bytes_before / 3
    assert [row.rule for row in seen.rows].count("full") == LAYERS
    (entry,) = [e for e in trainer.state.log_history if "graphckpt/kept_bytes" in e]
    assert (entry["graphckpt/kept_bytes"], entry["step"]) == (seen.bytes_after, 1)
    assert entry["graphckpt/kept_bytes_plain"] == seen.bytes_before
    assert f"policies act on {LAYERS} blocks; kept for backward: " in capsys.readouterr().out
    assert callback.handle.explain(show=False) == callback.explanation


def test_a_memory_budget_is_planned_for_in_the_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (keys,) = HfArgumentParser(GraphckptArguments).parse_args_into_dataclasses(["--graphckpt_memory_budget", "0.6"])
    callback = GraphckptCallback(**keys.keys(), report="table", plot=str(tmp_path / "step.png"))
    train_twice(gpt2, tmp_path, callback, max_steps=9)
    plan, seen = callback.plan, callback.explanation
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert seen.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.03)
    assert {row.block for row in seen.rows if row.rule != "keep"} >= plan.policies.keys()
    printed = capsys.readouterr().out
    assert "graphckpt: plan\n" in printed
    assert "kept for backward: " in printed
    assert (tmp_path / "step.png").stat().st_size > 1000


class Prefers(Trainer):
    """Compares two batches, as trainers on preferences do; their model call has no such arguments."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **more: Any) -> Any:
        return model(inputs["chosen"]).logits.mean() - model(inputs["rejected"]).logits.mean()


class Samples(Trainer):
    """Is given plain rows, and makes its batches itself."""

    def training_step(self, model: nn.Module, inputs: list[dict[str, Tensor]], *args: Any) -> Tensor:
        tokens = torch.stack([row["input_ids"] for row in inputs])
        return super().training_step(model, {"input_ids": tokens, "labels": tokens}, *args)


class Adds(Trainer):
    """Adds to the loss of the model."""

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*args, **more)


class Pairs(RandomTokens):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict.fromkeys(("chosen", "rejected"), self.tokens[index])


def half_loss(outputs: ModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    return outputs.logits.float().logsumexp(-1).mean() / 2


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, rows: Dataset[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows[number] for number in range(len(self.rows)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Prefers, {"train_dataset": Pairs(classify=False)}),
        (Samples, {"data_collator": list}),
        (Adds, {"train_dataset": Stream(RandomTokens(classify=False))}),
        (Trainer, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
        (Trainer, {"compute_loss_func": half_loss, "bf16": True}),
        (Trainer, {OWN: True}),
        (Seq2SeqTrainer, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else ",".join(value),
)
def test_a_budget_in_a_trainer_with_its_own_loss(tmp_path: Path, kind: type[Trainer], more: dict[str, Any]) -> None:
    """Its own steps are planned on, each of which runs once; the weights are those of the same training without."""
    runs: list[tuple[dict[str, Tensor], int, list[dict[str, float]]]] = []
    for callbacks in ([], [GraphckptCallback(memory_budget="min", report="table")]):
        given = {"train_dataset": RandomTokens(classify=False), **more}
        own = {key: given.pop(key) for key in list(given) if key in NAMES}
        args = arguments(tmp_path, remove_unused_columns=False, max_steps=4, **own)
        if kind is Seq2SeqTrainer:
            args = Seq2SeqTrainingArguments(**args.to_dict())
        trainer = kind(model=gpt2(), args=args, callbacks=callbacks, **given)
        with patch.object(trainer, "training_step", wraps=trainer.training_step) as training_step:
            trainer.train()
        losses = [entry for entry in trainer.state.log_history if "loss" in entry]
        runs.append((weights(trainer.model), training_step.call_count, losses))
    (plain, *others), (ours, *same) = runs
    assert_equal(ours, plain)
    assert same == others
    (callback,) = callbacks
    assert callback.explanation.peak_bytes <= callback.plan.predicted_peak_bytes < callback.plan.plain_peak_bytes
    rules = {row.block: row.rule for row in callback.explanation.rows}
    assert {name for name in rules if rules[name] != "keep"} >= callback.plan.policies.keys()
    assert all(module.gradient_checkpointing == (OWN in more) for module in trainer.model.transformer.h)
    assert not has_policies(trainer.model)


class Lengths(Dataset[dict[str, Tensor]]):
    """Rows of one length for each batch of four."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 4 * len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(self.lengths[index // 4]) % 64
        return {"input_ids": tokens, "labels": tokens}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(Lengths(*self.train_dataset.lengths))

    def training_step(self, *args: Any, **more: Any) -> Tensor:
        live = LiveBytes("cpu", record_timeline=False)
        states = (value for state in self.optimizer.optimizer.state.values() for value in state.values())
        live.track([*self.model.parameters(), *states])
        with live:
            loss = super().training_step(*args, **more)
        self.peaks = [*getattr(self, "peaks", []), live.peak_bytes]
        return loss


def in_order(folder: Path, lengths: tuple[int, ...], *callbacks: GraphckptCallback) -> InOrder:
    args = arguments(folder, max_steps=len(lengths))
    trainer = InOrder(gpt2(), args, train_dataset=Lengths(*lengths), callbacks=list(callbacks))
    trainer.train()
    return trainer


def test_a_longer_batch_keeps_the_budget_and_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = (8, 16, 16, 16, 64, 8, 64, 64, 64, 32, 64)  # planned after the 2nd and, with the 5th, after the 8th
    plain = in_order(tmp_path, lengths)
    full = in_order(tmp_path, lengths, GraphckptCallback(report=False))
    budget = (2 * max(full.peaks) + max(plain.peaks)) // 3
    assert plain.peaks[1] < budget, "the first plan keeps all"
    callback = GraphckptCallback(memory_budget=budget)
    ours = in_order(tmp_path, lengths, callback)
    assert_equal(weights(ours.model), weights(plain.model))
    assert max(ours.peaks) <= budget < max(plain.peaks)
    assert max(full.peaks) < max(ours.peaks[8:]), "the second plan keeps more than full"
    assert ours.peaks[4] == full.peaks[4], "the first long batch recomputes all"
    assert 0 < len(callback.plan.policies) <= LAYERS
    printed = capsys.readouterr().out
    assert "planned again, for the largest batch so far" in printed
    assert f"graphckpt: {format_bytes(budget)} holds everything (predicted peak " in printed, "of the first plan"
    assert repr(callback) == f"GraphckptCallback(memory_budget={budget})"


def test_a_budget_that_a_longer_batch_exceeds_is_one_warning(tmp_path: Path) -> None:
    small, large = (in_order(tmp_path, (length,) * 2, GraphckptCallback(report=False)).peaks[1] for length in (16, 64))
    assert small < large
    callback = GraphckptCallback(memory_budget=(small + large) // 2, report=False)
    with pytest.warns(UserWarning, match="no plan fits · the lowest possible peak is .* the plan with the lowest"):
        trainer = in_order(tmp_path, (16, 16, 16, 64, 16), callback)
    assert callback.plan.budget_bytes == (small + large) // 2 < callback.plan.predicted_peak_bytes
    assert_equal(weights(trainer.model), weights(in_order(tmp_path, (16, 16, 16, 64, 16)).model))


def test_a_budget_that_nothing_fits_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    model = gpt2()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for budget, message in {
        num_bytes: "no plan fits · the lowest possible peak is .* · fix: .*, or a larger budget: '.*iB', or 'min'$",
        num_bytes - 1: "no plan fits · the parameters alone take",
    }.items():
        with pytest.raises(PlanError, match=message):
            train(model, tmp_path, GraphckptCallback(memory_budget=budget))
        assert not has_policies(model)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_error_in_a_step_removes_all_and_the_next_training_is_right(
    tmp_path: Path, error: type[BaseException], when: int
) -> None:
    callback, model = GraphckptCallback(memory_budget="min", report=False), gpt2()
    calls = []

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == when:
            raise error

    hook = model.lm_head.register_full_backward_hook(fail)
    with pytest.raises(error):
        train(model, tmp_path, callback, max_steps=4)
    hook.remove()
    assert not has_policies(model)
    assert not is_watched()
    train_twice(gpt2, tmp_path, callback, max_steps=4)
    assert callback.plan is not None


def test_planning_says_how_far_it_is_as_its_option_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    calls: list[int] = []
    for option in (False, True, lambda done, _: calls.append(done)):
        train(gpt2(), tmp_path, GraphckptCallback(memory_budget="min", report=False, progress=option))
        printed = re.findall(r"planning, \d+ s: update (\d) of at most 8 is measured\n", capsys.readouterr().err)
        assert printed == (["1", "2"] if option is True else [])
    assert calls == [1, 2]


class Interrupts(TrainerCallback):
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_remove_ends_a_plan_whose_training_was_interrupted(tmp_path: Path) -> None:
    """Trainers do not tell callbacks about errors outside of their steps."""
    model, callback = gpt2(), GraphckptCallback(memory_budget="min", report=False)
    trainer = Trainer(
        model, arguments(tmp_path, max_steps=4), train_dataset=RandomTokens(classify=False), callbacks=[callback]
    )
    trainer.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    graphckpt.remove(model)
    assert not has_policies(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    train(copy.deepcopy(model), tmp_path, GraphckptCallback(memory_budget="min", report=False), max_steps=3)


@pytest.mark.parametrize("keys", [{}, {"memory_budget": "min"}], ids=["rule", "budget"])
def test_evaluation_accumulation_and_resuming_change_no_bit(tmp_path: Path, keys: dict[str, Any]) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 3}
    data, seen = RandomTokens(classify=False), []
    for number, callbacks in enumerate(([], [GraphckptCallback(**keys, report=False)])):
        for steps, resume in ((3, None), (6, True)):
            args = arguments(tmp_path / str(number), max_steps=steps, gradient_accumulation_steps=2, **more)
            trainer = Trainer(gpt2(), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
            trainer.train(resume_from_checkpoint=resume)
        seen.append(weights(trainer.model))
    assert (callbacks[0].plan is not None) == ("memory_budget" in keys)
    assert_equal(seen[1], seen[0])


def test_later_micro_batches_are_told_from_the_first(tmp_path: Path) -> None:
    """In them gradients are alive, so that a batch which fits as the first one may exceed the budget."""
    sizes: list[dict[str, int]] = []
    callback = GraphckptCallback(memory_budget=0.7, report=False)
    end_step = callback._end_step

    def ending(*args: Any, **kwargs: Any) -> None:
        assert callback._live is not None
        sizes.append(dict(callback._live._updates.sizes or {}))
        end_step(*args, **kwargs)

    callback._end_step = ending  # type: ignore[method-assign]
    args = arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    Trainer(gpt2(), args, train_dataset=RandomTokens(classify=False), callbacks=[callback]).train()
    assert len(sizes) == 4
    for each in sizes:
        first, later = ({name for name in each if name.startswith(LATER) == is_later} for is_later in (False, True))
        assert first == {name.removeprefix(LATER) for name in later} != set()


@pytest.mark.parametrize(("steps", "before"), [(1, "there was a plan"), (2, "a step ran under the plan"), (3, None)])
def test_a_plan_that_comes_too_late_is_reported_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, before: str | None
) -> None:
    callback = GraphckptCallback(memory_budget="min")
    train(gpt2(), tmp_path, callback, max_steps=steps)
    assert (callback.plan is None) == (steps == 1)
    printed = capsys.readouterr().out
    assert ("training ended before" in printed) == (before is not None)
    assert before is None or f"graphckpt: training ended before {before}; every planned block was recomputed" in printed


@pytest.mark.parametrize(("num_steps", "states"), [(2, "and optimizer states"), (1, "as optimizer states did not")])
def test_a_table_and_a_picture_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int, states: str
) -> None:
    callback = GraphckptCallback("selective", report="table", plot=str(tmp_path / "step.svg"))
    trainer, _ = train(gpt2(), tmp_path, callback, max_steps=num_steps)
    assert callback.explanation.peak_bytes is not None
    assert callback.explanation.has_optimizer_states == (num_steps == 2)
    assert sum("graphckpt/peak_bytes" in entry for entry in trainer.state.log_history) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("transformer.h.0-3 (4x)") == 1
    assert states in printed
    assert "<svg" in (tmp_path / "step.svg").read_text()


SELECTIVE = "selective(matmul+attention)"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {
                "rule": "selective",
                "select": "GPT2Block",
                "policies": {"transformer.h.0": False, "*.h.1": {"offload": "disk"}},
            },
            [("keep", "device"), (SELECTIVE, "disk"), (SELECTIVE, "device"), (SELECTIVE, "device")],
        ),
        ({"policies": {"*.h.[13]": False}}, [("full", "device"), ("keep", "device")] * 2),
    ],
)
def test_blocks_replace_fields_of_their_units(tmp_path: Path, keys: dict[str, Any], expected: Any) -> None:
    callback = GraphckptCallback(**keys, report=False)
    train(gpt2(), tmp_path, callback)
    rows = {row.block: (row.rule, row.place) for row in callback.explanation.rows}
    assert [rows[f"transformer.h.{number}"] for number in range(LAYERS)] == expected


def test_the_advice_names_the_argument_of_the_callback(tmp_path: Path) -> None:
    callback = GraphckptCallback(select="transformer.h.*", policies={"transformer.h.0": "selective"}, report=False)
    callback.on_train_begin(arguments(tmp_path), TrainerState(), TrainerControl(), model=gpt2())
    text = callback.handle._watcher.advice(["transformer.h.3"])
    assert text == "GraphckptCallback(..., policies={'transformer.h.0': 'selective', 'transformer.h.3': False})"
    callback.on_train_end(arguments(tmp_path), TrainerState(), TrainerControl())


def test_transformers_own_checkpointing_is_noticed_and_set_aside(tmp_path: Path) -> None:
    callback = GraphckptCallback(policies={"transformer.h.3": False})
    with pytest.warns(UserWarning, match=f"fix: set {OWN}=False in the trainer's arguments"):
        _, runs = train_twice(gpt2, tmp_path, callback, {OWN: True})
    assert set(runs.values()) == {6}  # the last one by Transformers' own, and none of them twice again
    rows = [row for row in callback.explanation.rows if ".h." in row.block]
    assert [(row.rule, row.reruns) for row in rows[:3]] == [("full", 1)] * 3
    assert rows[3].rule == "own checkpointing"
    assert rows[3].reruns <= 1, "hooks see it where the layer does it in __call__, as in Transformers 5.17"


def test_checkpointing_in_call_is_switched_off_where_a_policy_recomputes(tmp_path: Path) -> None:
    class ChecksItself(nn.Linear):
        """A layer that checkpoints around its forward, as those of Transformers 5.17 do."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if self.gradient_checkpointing:
                return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)
            return super().__call__(*args, **kwargs)

    model = stack_of(lambda: ChecksItself(4, 4), 3)
    for layer in model:
        layer.gradient_checkpointing = True
    callback = GraphckptCallback(rule=None, policies={"0": True, "1": False})
    with pytest.warns(UserWarning, match="own checkpointing is on as well"):
        callback.on_train_begin(arguments(tmp_path), TrainerState(), TrainerControl(), model=model)
    model(torch.ones(2, 4)).sum().backward()
    assert [layer.gradient_checkpointing for layer in model] == [False, True, True]
    rows = callback.handle.explain(show=False).rows
    assert [(row.rule, row.reruns) for row in rows[:2]] == [("full", 1), ("own checkpointing", 1)]
    assert "policies act on 1 block; kept" in saved_line(callback.handle.explain(show=False))
    rows = [replace(row, reruns=0) for row in rows]
    idle = replace(callback.handle.explain(show=False), rows=tuple(rows), bytes_disk=2048)
    assert "no block is recomputed; kept for backward: " in saved_line(idle)
    assert saved_line(idle).endswith("; offloaded: 2.00 KiB to disk")
    callback.on_train_end(arguments(tmp_path), TrainerState(), TrainerControl())
    assert [layer.gradient_checkpointing for layer in model] == [True] * 3


@pytest.mark.filterwarnings("ignore:offload to 'disk' saves")
@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [
        (True, 3),
        ({"activation_checkpointing": True, "offload": "disk", "min_elements": 1}, 3),
        ({"activation_checkpointing": "selective", "contiguous": True, "min_elements": 1}, 3),
        ({"activation_checkpointing": False, "offload": "disk", "min_elements": 1}, 3),
        ({"activation_checkpointing": False, "contiguous": True, "min_elements": 1}, 3),
        ({"activation_checkpointing": False}, 0),
    ],
)
@pytest.mark.parametrize("is_measured", [False, True])
def test_policies_do_not_act_on_frozen_blocks_that_save_nothing(
    policy: bool | dict[str, object], num_blocks: int, is_measured: bool
) -> None:
    model = linear_layers(6, 8)
    model[:3].requires_grad_(False)
    with graphckpt.apply(model, {"[0-5]": policy}) as handle:
        with handle.measure() if is_measured else nullcontext():
            model(torch.ones(4, 8)).sum().backward()
        line = saved_line(handle.explain(show=False))
    assert (f"policies act on {num_blocks} blocks" if num_blocks else "no block is recomputed") in line


def test_a_training_that_ended_in_an_error_can_be_started_again(tmp_path: Path) -> None:
    model = gpt2()
    callback = GraphckptCallback()
    trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=RandomTokens(classify=False))
    trainer.add_callback(callback)
    hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    hook.remove()
    trainer.train()
    assert not has_policies(model)


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    adapted: nn.Module = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)  # zeros at first: no gradient would reach lora_A
    return adapted


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by PEFT
def test_lora_in_trainer_needs_no_gradient_of_the_inputs(tmp_path: Path) -> None:
    callback = GraphckptCallback()
    _, runs = train_twice(lambda: lora(gpt2()), tmp_path, callback)
    assert set(runs.values()) == {6}
    assert callback.explanation.bytes_after < callback.explanation.bytes_before / 2


def test_keys_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"rule": "selective", "policies": '{"*.h.0": false}', "offload": "cpu"}
    line = [word for name, value in keys.items() for word in (f"--graphckpt_{name}", value)]
    monkeypatch.setattr(sys, "argv", ["x", *line])
    (keys,) = HfArgumentParser(GraphckptArguments).parse_args_into_dataclasses()
    assert keys.keys() == {"rule": "selective", "select": None, "policies": {"*.h.0": False}, "offload": "cpu"}
    shown = "GraphckptCallback(rule='selective', policies={'*.h.0': False}, offload='cpu')"
    assert repr(GraphckptCallback.from_arguments(keys)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": ', "expected a JSON object: "), ("[1]", r"expected a JSON object, got \[1\] · fix: write it as ")],
)
def test_blocks_that_are_no_mapping_are_one_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^graphckpt_policies: {message}"):
        GraphckptArguments(graphckpt_policies=text).keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"offload": "gpu"}, r"^GraphckptCallback\.offload: expected an offload target, got 'gpu' · .*fix: "),
        ({"policies": {"h": {"tiles": 0}}}, r"^GraphckptCallback\.policies\['h'\]\.tiles: "),
        ({"cpu_checkpointing": True}, r"^GraphckptCallback\.cpu_checkpointing: .* · fix: write offload, "),
        ({"rule": "ful"}, r"\.rule: expected a rule, got 'ful' · did you mean 'full'"),
        ({"rule": "12GiB"}, r"\.rule: expected a rule, got '12GiB' · fix: memory_budget='12GiB'"),
        ({"rule": "*.h.0"}, r"\.rule: expected a rule, got '\*\.h\.0' · fix: select='\*\.h\.0'"),
        ({"rule": {"*.h.0": False}}, r"\.rule: expected a rule, .* · fix: policies={'\*\.h\.0': False}"),
        ({"rule": {"rule": "selectiv"}}, r"\.rule: expected a rule, got 'selectiv' · did you mean 'selective'"),
        ({"rule": {"rule": "selective"}, "offload": "gpu"}, r"\.offload: expected an offload target, got 'gpu'"),
        ({"rule": "table"}, r"\.rule: expected a rule, got 'table' · fix: report='table'"),
        ({"rules": "full"}, r": unexpected argument 'rules' · did you mean 'rule' .*use rule, select, policies, mem"),
        ({"plot": "step.jpg"}, r"step\.jpg: expected a file ending in '\.png', '\.svg' or '\.html'"),
        ({"report": "tabel"}, r"\.report: expected True, False or 'table', got 'tabel'"),
        ({"policies": "x"}, r"^GraphckptCallback\.policies: expected a mapping of selectors to policies, got 'x'"),
        ({"report": 1}, r"\.report: expected True, False or 'table', got 1"),
        ({"rule": "selective", "memory_budget": 0.5}, r"rule and memory_budget cannot be combined, .* fix: omit rule"),
        ({"policies": {"h": True}, "memory_budget": 0.5}, r"policies and memory_budget cannot be combined"),
        ({"memory_budget": 0.5, "offlod": True}, r": unknown option 'offlod' · did you mean 'offload'"),
        ({"memory_budget": "150%"}, r"memory_budget: expected more than 0% and at most 100% of the .*, got '150%'"),
    ],
)
def test_errors_are_in_the_words_of_the_callback(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GraphckptCallback(**keys)


def test_a_picture_that_cannot_be_drawn_leaves_no_policies(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    callback = GraphckptCallback(plot=str(folder / "step.png"))
    folder.rmdir()
    model = gpt2()
    with pytest.raises(ConfigError, match="expected an existing folder"):
        train(model, tmp_path, callback)
    assert not has_policies(model)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"select": "GPT2Blok"}, r"'GPT2Blok' matches no module .* did you mean 'GPT2Block'"),
        ({"policies": {"*.g.1": False}}, r"'\*\.g\.1' matches no module"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(gpt2(), tmp_path, GraphckptCallback(**keys))


def test_a_model_without_a_stack_of_layers_says_what_to_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    callback = GraphckptCallback()
    with pytest.raises(ConfigError, match=r"^GraphckptCallback: Sequential has no stack of layers · fix: name its"):
        callback.on_train_begin(None, None, None, model=model)  # type: ignore[arg-type]


def test_trainer_without_accelerate_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graphckpt.integrations.transformers")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^accelerate is not installed · fix: pip install accelerate, or, .*'\.\[transformers-trainer\]'$",
    ):
        __import__("graphckpt.integrations.transformers")
