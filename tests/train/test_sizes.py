"""Batch arithmetic, and the keys that act only in other versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from graphckpt.config.schema import read
from graphckpt.train.settings import BatchSizes, DistConfig, TrainConfig


def _faults(*words: str) -> list[str]:
    train = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    return read(TrainConfig, {"train": train}, "train")[1]


def _sizes(micro: int | None, total: int | None, accumulation: int | None, parallel: int = 1) -> BatchSizes:
    sizes = {"train_micro_batch_size": micro, "global_batch_size": total, "num_accumulation_steps": accumulation}
    return TrainConfig(**sizes, dist=DistConfig(data_parallel_size=parallel)).sizes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((8, None, None), (8, 1)), ((8, None, 4), (8, 4)), ((None, 32, None), (32, 1)), ((8, 32, 4), (8, 4))],
)
def test_missing_sizes_are_derived(sizes: tuple[int | None, ...], expected: tuple[int, int]) -> None:
    assert _sizes(*sizes)[:2] == expected


@given(micro=st.integers(1, 64), accumulation=st.integers(1, 64), parallel=st.integers(1, 8))
def test_each_size_follows_from_the_others(micro: int, accumulation: int, parallel: int) -> None:
    expected = _sizes(micro, None, accumulation, parallel)
    total = expected.global_batch
    assert total == micro * accumulation * parallel
    assert _sizes(None, total, accumulation, parallel) == _sizes(micro, total, None, parallel) == expected


@pytest.mark.parametrize(
    ("train", "expected"), [({}, 5), ({"train_epoch": 2}, 13), ({"train_epoch": 0.1}, 5), ({"train_samples": 9}, 3)]
)
def test_length_of_a_run(train: dict[str, Any], expected: int) -> None:
    assert TrainConfig(train_iter=5, train_micro_batch_size=4, **train).iterations(num_samples=25) == expected


MICRO, TOTAL, ACCUMULATION = "train_micro_batch_size", "global_batch_size", "num_accumulation_steps"
STAGES, RANKS = "dist.pipeline_parallel_size=2", "dist.data_parallel_size=2"
PIPELINE = f"{STAGES} num_accumulation_steps=4"
PARTITION = "activation_checkpoint.enabled=True activation_checkpoint.partition=True"
UNLIKE = "processes that do not share matrices keep different tensors · fix: raise"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (f"{MICRO}=8 {TOTAL}=30", "expected a multiple of micro batch 8 x data_parallel_size 1, got 30 ·"),
        (f"{MICRO}=null {ACCUMULATION}=4 {TOTAL}=30", "expected a multiple of data_parallel_size 1 x accumulation 4"),
        (f"{MICRO}=8 {ACCUMULATION}=4 {TOTAL}=64", "64, but micro batch 8 x data_parallel_size 1 x accumulation 4 is"),
        (f"{TOTAL}=null {MICRO}=null", "is null, and so is global_batch_size · fix: set one of train.train_micro"),
        (STAGES, "2 stages need as many micro-batches, and an update has 1 · fix: num_accum"),
        (f"{STAGES} dist.tensor_parallel_size=2", "2 is not supported with a pipeline · fix: use 1"),
        (f"{PIPELINE} {RANKS} zero_optimization.enabled=True", "True is not supported with dist.pipeline"),
        (f"{PIPELINE} capture=cuda_graph", "'cuda_graph' is not supported with dist.pipeline_parallel_size above 1"),
        (f"{PIPELINE} {PARTITION}", UNLIKE),
        (f"{PIPELINE} amp.enabled=True amp.dtype=float16", "'float16' is not supported with dist.pipeline"),
        ("dist.custom_pipeline_stage_id=[0,1]", "there is one stage · fix: raise"),
        ("dist.pipeline_num_layers=24", "24 is not supported"),
        ("dist.tensor_parallel_size=0", "expected 1 or more, got 0"),
        ("dist.timeout_seconds=0", "expected 1 or more, got 0"),
        ("dist.data_parallel_size=0", "expected 1 or more, got 0"),
        ("zero_optimization.stage=4", "expected 1, 2 or 3, got 4"),
        ("zero_optimization.enabled=True", "True, and dist.data_parallel_size is 1: one process would hold all"),
        (f"{RANKS} capture=cuda_graph", "'cuda_graph' is not supported with dist.data_parallel_size"),
        (f"{RANKS} {PARTITION}", UNLIKE),
        ("activation_checkpoint.offload=gpu", "expected an offload target, got 'gpu' · did you mean 'cpu'? · fix: use"),
        ("activation_checkpoint.number_checkpoints=3", "has no meaning here, the first step shows how big the slab"),
        (
            "activation_checkpoint.offload=disk activation_checkpoint.cpu_checkpointing=True",
            "True, and offload is 'disk' · fix: leave cpu_checkpointing out",
        ),
        ("start_iter=3", "expected 0, got 3 (int)"),
        ("train_epoch=-1", "expected 0 or more, got -1"),
        ("train_epoch=1 train_samples=8", "8, and train_epoch is 1.0 · fix: set one of them"),
        ("rdma_enabled=True", "has no meaning here, PyTorch picks the transport · fix: leave the key"),
        ("evaluation.evaluator=1", "has no meaning here, the task says"),
        ("warmup_ratio=1.0", "expected less than 1, got 1.0"),
    ],
)
def test_keys_without_effect_or_in_contradiction_say_so(words: str, fault: str) -> None:
    (found,) = _faults(*words.split())
    assert found.startswith(f"train.{words.rsplit(maxsplit=1)[-1].partition('=')[0]}: {fault}")


def test_neutral_values_are_good() -> None:
    neutral = [
        *("dist.data_parallel_size=4", "dist.tensor_parallel_size=2", "dist.custom_pipeline_stage_id=null"),
        *("zero_optimization.enabled=False", "zero_optimization.stage=2", "start_iter=0", "consumed_valid_samples=0"),
        *("activation_checkpoint.offload=False", "activation_checkpoint.contiguous=True"),
    ]
    assert _faults(*neutral, "activation_checkpoint.partition=null") == []
