"""Runs whose layers are cut into stages: the numbers of one process, and with policies the bits of none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_on_ranks
from helpers.small_run import CONFIG, STILL, StopAfter, near, rows_of, run, same_weights, trainer_of
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from graphckpt.errors import ConfigError
from graphckpt.train.build_model import _pipeline
from graphckpt.train.parallel.pipeline import check_split, keep_stage, split_layers, tied_weights
from graphckpt.train.settings import TrainConfig
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.tasks.causal_lm import CausalLM
from graphckpt.train.tasks.masked_lm import MaskedLM

UNTIED = "model.config.tie_word_embeddings=False"
LAYERS = ["model.config.n_layer=3"]
TWENTY = [
    *("train.train_iter=20", "train.num_accumulation_steps=4", "train.train_micro_batch_size=1", "train.log_period=1"),
    *("train.checkpointer.period=99", "train.evaluation.eval_period=99"),
]
SIX = [*TWENTY, *LAYERS, "train.train_iter=6"]
THREE = [*SIX, "train.train_iter=3"]
ALL_HELD_OUT = ["train.evaluation.eval_iter=null"]
SHORT_FLOATS = ["train.amp.enabled=True", "train.amp.dtype=bfloat16", "train.num_accumulation_steps=2"]
STAGES = "train.dist.pipeline_parallel_size=2"
RECOMPUTED = [
    "train.activation_checkpoint.enabled=True",
    "train.activation_checkpoint.rule=True",
    "train.activation_checkpoint.policies={transformer.h.0: selective, transformer.h.2: {offload: disk}}",
]
SIZES = "num_hidden_layers=3, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32"
LLAMA = CONFIG.replace("gpt2.py", "llama.py").replace("n_layer=2, n_head=2, n_embd=16", SIZES)


def two_stages(rank: int, folder: Path) -> None:
    losses = {
        "tied": run("tied", *SIX, *STILL, STAGES).losses,
        "llama": run("llama", *TWENTY, *SHORT_FLOATS, STAGES, config="llama.py").losses,
    }
    (folder / f"losses of {rank}").write_text(json.dumps(losses))
    uneven = [*TWENTY, *LAYERS, STAGES, "train.dist.custom_pipeline_stage_id=[0,1,1]"]
    plain = run("plain", *uneven).losses
    begun = run("recomputed", *uneven, *RECOMPUTED, hooks=(StopAfter(5),))
    ended = run("recomputed", *uneven, *RECOMPUTED, "train.checkpointer.async_save=True", resume=True)
    assert begun.losses + ended.losses == plain
    for held in (begun, ended):
        rows = held.state.graph.explain(show=False).rows
        assert {row.block.rpartition(".")[2] for row in rows if row.reruns} == ({"0"} if rank == 0 else {"1", "2"})
    run("moved", *SIX, *STILL, UNTIED, STAGES, *ALL_HELD_OUT, hooks=(StopAfter(4),), resume=True)
    metrics = trainer_of("tied", *SIX, *STILL, STAGES, eval_only=True).evaluate()
    assert metrics["eval_loss"] == rows_of(folder / "tied")[-1]["eval_loss"]


@pytest.mark.slow
@pytest.mark.multi_process
def test_two_stages_learn_what_one_process_does(place: Path) -> None:
    (place / "llama.py").write_text(LLAMA)
    run("moved", *SIX, *STILL, UNTIED, *ALL_HELD_OUT, hooks=(StopAfter(2),))
    run_on_ranks(two_stages, place)
    alone = {
        "tied": run("tied alone", *SIX, *STILL).losses,
        "llama": run("llama alone", *TWENTY, *SHORT_FLOATS, config="llama.py").losses,
    }
    first, last = (json.loads((place / f"losses of {rank}").read_text()) for rank in range(2))
    assert first == last
    assert first["llama"] == alone["llama"]
    assert same_weights(place / "llama", place / "llama alone")
    assert rows_of(place / "llama") == rows_of(place / "llama alone")
    assert first["tied"] == pytest.approx(alone["tied"], rel=1e-5)  # a sum over two stages is another than over one
    assert near(place / "tied", place / "tied alone")
    plain = AutoModelForCausalLM.from_pretrained(place / "tied" / "model_final")
    weights = load_file(place / "tied" / "model_final" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items() if name in weights)

    assert same_weights(place / "plain", place / "recomputed")
    assert rows_of(place / "plain") == rows_of(place / "recomputed")
    each = snapshot.read_state(place / "plain" / "model_final", "trainer")["random_of_each"]
    assert not torch.equal(each[0]["cpu"], each[1]["cpu"])  # or two layers would have one mask

    held = {path.name for path in (place / "moved" / "model_0000003" / "shares").iterdir()}
    assert held == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    run("moved", *SIX, *STILL, UNTIED, *ALL_HELD_OUT, resume=True)
    run("stayed", *SIX, *STILL, UNTIED, *ALL_HELD_OUT)
    assert same_weights(place / "stayed", place / "moved")
    assert rows_of(place / "stayed") == rows_of(place / "moved")


SQUARE = ["train.dist.pipeline_parallel_size=2", "train.dist.data_parallel_size=2", "train.num_accumulation_steps=2"]
LINE = ["train.dist.pipeline_parallel_size=4", "model.config.n_layer=4"]


def four_ranks(rank: int, folder: Path) -> None:
    losses = {
        "square": run("square", *THREE, *STILL, *SQUARE).losses,
        "line": run("line", *THREE, *STILL, *LINE).losses,
    }
    (folder / f"losses of {rank}").write_text(json.dumps(losses))
    begun = run("stopped", *THREE, *STILL, *SQUARE, *RECOMPUTED, hooks=(StopAfter(2),)).losses
    assert begun + run("stopped", *THREE, *STILL, *SQUARE, *RECOMPUTED, resume=True).losses == losses["square"]


@pytest.mark.multi_process
@pytest.mark.slow
def test_four_ranks_in_a_square_and_in_a_line(place: Path) -> None:
    run_on_ranks(four_ranks, place, num_ranks=4)
    alone = {
        "square": run("square alone", *THREE, *STILL).losses,
        "line": run("line alone", *THREE, *STILL, LINE[1]).losses,
    }
    seen = [json.loads((place / f"losses of {rank}").read_text()) for rank in range(4)]
    for name, losses in alone.items():
        assert all(of_rank[name] == seen[0][name] for of_rank in seen)
        assert seen[0][name] == pytest.approx(losses, rel=1e-5), name
        assert near(place / name, place / f"{name} alone"), name
    assert same_weights(place / "square", place / "stopped")


# ---- the cut, in one process


SMALL: Any = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(**sizes: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**{"n_layer": 4, "n_embd": 16, "n_head": 2, **TOKENS, **sizes}))


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(vocab_size=20, **SMALL))


def test_layers_are_cut_equally_or_as_is_said() -> None:
    model = gpt2()
    first, last = split_layers(model, {}, num_stages=2)
    assert first == tuple(f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.0", "h.1"))
    assert last == ("transformer.h.2", "transformer.h.3", "transformer.ln_f", "lm_head")
    for how in ({"layer_stages": [0, 1, 1, 1]}, {"fields": {"transformer.h.1": {"stage_id": 1}}}):
        assert split_layers(model, **{"fields": {}, **how}, num_stages=2)[0][-1] == "transformer.h.0"
    assert tied_weights(model, (first, last)) == ["transformer.wte.weight"]
    assert not tied_weights(gpt2(tie_word_embeddings=False), (first, last))


def test_a_stage_holds_its_own_weights_and_names_of_the_rest() -> None:
    model = gpt2()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    keep_stage(model, split_layers(model, {}, num_stages=2), 1, torch.device("cpu"))
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    held = {name for name, weight in model.named_parameters() if not weight.is_meta}
    assert {name.rpartition(".")[0].partition(".")[2][:3] for name in held} == {"wte", "h.2", "h.3", "ln_"}
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    ("make", "how", "fault"),
    [
        (bert, {}, "train.dist.pipeline_parallel_size: no pipeline plan is known for BertForMaskedLM · fix: use"),
        (lambda: nn.Linear(2, 2), {}, "no pipeline plan is known for Linear"),
        (lambda: gpt2(n_layer=1), {}, "pipeline_parallel_size: 2, and the model has 1 layers · fix: use 1 or less"),
        (gpt2, {"layer_stages": [0, 1]}, "custom_pipeline_stage_id: 2 stages, and the model has 4 layers · fix: name"),
        (gpt2, {"layer_stages": [0] * 4}, "stage_id: expected one stage for each of 2 ranks, got 1 · fix: config.set"),
    ],
)
def test_a_model_that_cannot_be_split_is_an_error(
    make: Callable[[], nn.Module], how: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        split_layers(make(), {}, num_stages=2, **how)
    assert fault in str(raised.value)


def test_another_task_needs_one_process() -> None:
    nobody: Any = None
    message = r"pipeline_parallel_size: MaskedLM is not supported with a pipeline · fix: task=CausalLM"
    with pytest.raises(ConfigError, match=message):
        _pipeline(gpt2(), MaskedLM(), TrainConfig(), nobody, torch.device("cpu"))


class Scaled(LlamaForCausalLM):
    """Does more than pass hidden states on."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=embeds * 8, **others)


def test_a_model_that_does_more_than_its_parts_is_refused() -> None:
    config = LlamaConfig(vocab_size=20, **SMALL)
    torch.manual_seed(0)
    for model in (gpt2(), LlamaForCausalLM(config)):
        check_split(model, split_layers(model, {}, num_stages=2), CausalLM().losses)
        assert model.training
    scaled = Scaled(config)
    with pytest.raises(ConfigError, match=r"the stages of Scaled, run in sequence, differ from the whole model"):
        check_split(scaled, split_layers(scaled, {}, num_stages=2), CausalLM().losses)
