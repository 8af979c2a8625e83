"""The config files that come with graphckpt: whole, without fault, and the models that their names say."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from graphckpt.config import LazyConfig, get_config
from graphckpt.config.files import packaged_folder
from graphckpt.config.schema import check
from graphckpt.train.build_model import _advice
from graphckpt.train.settings import TrainConfig

_FILES = sorted(path for path in packaged_folder().iterdir() if path.suffix in {".py", ".yaml"})


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_each_packaged_config_is_without_fault(path: Any) -> None:
    run, faults = check(LazyConfig.load(path))
    assert faults == []
    assert run is not None


def test_common_train_holds_every_key_with_its_default() -> None:
    written = OmegaConf.to_container(get_config("common/train.py").train)
    known = asdict(TrainConfig(warmup_ratio=0.01))
    for config in (written, known):
        config.pop("scheduler")
        config["dist"] = {key: value for key, value in config["dist"].items() if value is not None}
    assert written == known


@pytest.mark.parametrize(
    ("name", "num_parameters", "layers", "width", "heads"),
    [
        ("bert_large_pretrain.py", 336_226_108, 24, 1024, 16),
        ("gpt2_pretrain.py", 124_439_808, 12, 768, 12),
        ("llama_pretrain.py", 134_105_856, 12, 768, 12),
    ],
)
def test_models_are_the_real_ones(name: str, num_parameters: int, layers: int, width: int, heads: int) -> None:
    run, _ = check(get_config(name))
    with torch.device("meta"):
        model = run.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (layers, width, heads)


def test_the_advice_of_a_run_can_be_pasted_into_a_shell() -> None:
    [override] = shlex.split(_advice(["model.layers.0", "model.layers.1"]))
    run, faults = check(LazyConfig.apply_overrides(get_config("bert_large_pretrain.py"), [override]))
    assert faults == []
    assert run.train.activation_checkpoint.policies == {"layers.0": False, "layers.1": False}


def test_overrides_of_every_type_reach_the_settings() -> None:
    config = get_config("bert_large_pretrain.py")
    words = [
        "train.train_iter=1e2",
        "train.warmup_ratio=.25",
        "train.amp.enabled=false",
        "train.device=null",
        "train.output_dir='with = and space'",
        "train.activation_checkpoint.rule={rule: selective}",
        "train.activation_checkpoint.select=[BertLayer, bert.pooler]",
        'train.activation_checkpoint.policies={"bert.encoder.layer.0": false}',
        "train.scheduler.alpha=0",
        "train.global_batch_size=64",
        "data.paths=[a, b]",
        "task.mask_fraction=0.2",
        "optim.betas=[0.8, 0.9]",
        "optim.params.weight_decay_bias=null",
        "model.config.hidden_act=relu",
    ]
    run, faults = check(LazyConfig.apply_overrides(config, words))
    assert faults == []
    train, ckpt = run.train, run.train.activation_checkpoint
    assert (train.train_iter, train.warmup_ratio, train.amp.enabled, train.device) == (100, 0.25, False, None)
    assert train.output_dir == "with = and space"
    assert (ckpt.rule, ckpt.select) == ({"rule": "selective"}, ["BertLayer", "bert.pooler"])
    assert ckpt.policies == {"bert.encoder.layer.0": False}
    assert train.sizes.accumulation == 4
    assert (run.data().paths, run.task().mask_fraction) == (["a", "b"], 0.2)
    assert tuple(run.optim.arguments["betas"]) == (0.8, 0.9)


@pytest.mark.parametrize("params", [{"clip_grad_norm": 1.0}, [{"clip_grad_max_norm": 1.0}], 5])
def test_parameters_of_the_optimizer_that_are_no_call_are_an_error(params: Any) -> None:
    config = OmegaConf.create({**get_config("quickstart.py"), "optim": {"_target_": "torch.optim.SGD"}})
    config.optim.params = params
    (fault,) = check(config)[1]
    assert fault.startswith("optim.params")
    assert "expect" in fault


def test_a_misspelt_key_of_the_clipping_of_a_config_is_named() -> None:
    config = get_config("quickstart.py")
    config.optim.params.clip_grad_norm = 1.0
    (fault,) = check(config)[1]
    assert fault.startswith("optim.params.clip_grad_norm: no such key of get_default_optimizer_params · did you mean")
