"""A loss head: logits and loss as one block, with the loss of the model's own forward, and less memory in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import tiny_gpt2
from helpers.small_run import CONFIG, rows_of, train
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import graphckpt
from graphckpt import ConfigError, Tiles
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.plan import Plan
from graphckpt.train.build_model import build_model
from graphckpt.train.settings import DistConfig, TrainConfig
from graphckpt.train.tasks import CausalLM
from graphckpt.train.tasks.causal_lm import add_loss_head, differences

pytestmark = pytest.mark.usefixtures("place")

HEAD = "train.activation_checkpoint.head"
BUDGET = "train.activation_checkpoint.memory_budget"
SLICED = f'{HEAD}={{"loss_head": {{"rule": "tiles", "num_tiles": 4, "reduce": "sum"}}}}'
NUM_WORDS, NUM_TILES = 211, 8


def gpt2() -> PreTrainedModel:
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return tiny_gpt2(n_layer=2, vocab_size=NUM_WORDS, **drop)


def llama(
    kind: type[PreTrainedModel] = LlamaForCausalLM, config: type[LlamaConfig] = LlamaConfig, **more: Any
) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return kind(config(**sizes, **ids, num_key_value_heads=2, vocab_size=NUM_WORDS, max_position_embeddings=32, **more))


MODELS = {"tied": gpt2, "free": llama, "tied llama": lambda: llama(tie_word_embeddings=True)}


def made(make: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = make().train()
    tokens = torch.randint(0, NUM_WORDS, (4, 32))
    labels = tokens.clone()
    labels[0, 3:] = -100  # the slices have unlike numbers of labels
    labels[2, ::3] = -100
    return model, {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: Any) -> None:
    model, batch = made(MODELS[name])
    names = list(model.state_dict())
    plain = CausalLM()
    wanted = plain.losses(model, batch)["lm_loss"]
    wanted.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    task = CausalLM(loss_head=True)
    assert task.prepare(model) is model
    assert list(model.state_dict()) == names
    assert list(differences(model)) == []
    with graphckpt.apply(model, {"loss_head": Tiles(NUM_TILES, reduce="sum")}):
        loss = task.losses(model, batch)["lm_loss"]
        loss.backward()
    torch.testing.assert_close(loss, wanted)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    with torch.no_grad():
        torch.testing.assert_close(task.tally(model.eval(), batch), plain.tally(model, batch))


class Products(TorchDispatchMode):
    """Counts the matrix products that make logits."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[-1] == NUM_WORDS and args[0].shape[-1] == 16:
            self.rows.append(len(result))
        return result


def test_logits_of_one_slice_are_alive_at_a_time() -> None:
    model, batch = made(gpt2)
    task = CausalLM(loss_head=True)
    task.prepare(model)
    peaks, rows = [], []
    for policy in (False, Tiles(NUM_TILES, reduce="sum")):
        live = LiveBytes(record_timeline=False)
        live.track(model.parameters())
        with graphckpt.apply(model, {"loss_head": policy}):
            with Products() as training, live:
                task.losses(model.train(), batch)["lm_loss"].backward()
            model.zero_grad()
            with torch.no_grad(), Products() as evaluation:
                task.tally(model.eval(), batch)
        peaks.append(live.peak_bytes)
        rows.append((training.rows, evaluation.rows))
    num_tokens = batch["labels"].numel()
    tiles = [num_tokens // NUM_TILES] * NUM_TILES
    assert rows == [([num_tokens], [num_tokens]), (2 * tiles, tiles)]  # in training once forward, and once again
    logits = 4 * num_tokens * NUM_WORDS
    assert peaks[0] - peaks[1] > logits


def test_a_model_that_caps_its_logits_is_refused() -> None:
    model, _ = made(lambda: llama(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=30.0))
    add_loss_head(model)
    assert "Gemma2ForCausalLM does more than its output layer" in next(differences(model))
    assert model.training


def test_a_model_without_an_output_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.loss_head: Linear has no output layer behind a base model"):
        add_loss_head(torch.nn.Linear(2, 2))


WIDE = """
from graphckpt.config import LazyCall
from graphckpt.train.tasks import CausalLM

task = LazyCall(CausalLM)(loss_head=True)
data.seq_length = 64
model.config.update(n_embd=16, n_positions=64, vocab_size=2048)
train.update(train_iter=3, train_micro_batch_size=8)
train.evaluation.update(eval_period=3, eval_iter=1)
"""


@pytest.mark.slow
def test_a_run_in_slices_has_a_lower_floor_and_the_same_losses(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "tiny.py").write_text(CONFIG + WIDE, encoding="utf-8")
    assert train("train.output_dir=plain", "task.loss_head=False") == 0
    assert train("train.output_dir=whole", f"{BUDGET}=min") == 0
    assert train("train.output_dir=sliced", f"{BUDGET}=min", SLICED) == 0
    whole, sliced = (Plan.load(place / name / "plan.yaml") for name in ("whole", "sliced"))
    assert sliced.predicted_peak_bytes < 0.8 * whole.predicted_peak_bytes
    assert sliced.policies["loss_head"]["activation_checkpointing"]["num_tiles"] == 4
    losses = [last_loss(place / name) for name in ("plain", "whole", "sliced")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert "loss_head" not in (place / "sliced" / "model_final" / "model.safetensors").read_bytes()[:4096].decode(
        "latin1"
    )


def test_the_loss_head_is_sliced_by_name_without_a_budget(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "tiny.py").write_text(CONFIG + WIDE, encoding="utf-8")
    cut = 'train.activation_checkpoint.policies={"loss_head": "tiles:4:sum"}'
    assert train("train.activation_checkpoint.enabled=True", "train.activation_checkpoint.rule=null", cut) == 0
    assert "tiles(4, reduce=sum)" in capsys.readouterr().out


def test_several_processes_are_refused() -> None:
    settings = TrainConfig(dist=DistConfig(data_parallel_size=2))
    with pytest.raises(ConfigError, match=r"task\.loss_head: expected one process"):
        build_model(gpt2, CausalLM(loss_head=True), settings, ranks=None, device=torch.device("cpu"))


def last_loss(folder: Path) -> Any:
    return [row["eval_loss"] for row in rows_of(folder) if "eval_loss" in row][-1]
