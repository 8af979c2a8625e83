"""The callbacks on two ranks, under DDP and FSDP2: the same bits as without them, and bytes that fall, on each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from helpers.ranks import run_on_ranks
from lightning.pytorch.strategies import DDPStrategy
from packaging.version import Version
from torch.distributed.tensor import DTensor
from transformers import Trainer

from graphckpt.integrations import lightning, transformers
from graphckpt.ledger.explanation import Explanation
from tests.integrations.test_lightning_callback import differences, fit
from tests.integrations.test_trainer_callback import RandomTokens, arguments, gpt2

# accelerate before 1.15 shards tied weights in two groups, which torch 2.13 refuses
TIED = Version(accelerate.__version__) >= Version("1.15") or Version(torch.__version__) < Version("2.13")
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def shard_on_cpus() -> None:
    """Has accelerate shard over CPUs just as over devices; by itself it takes DDP where there is no device."""
    set_up = AcceleratorState.__init__

    def set_up_and_shard(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        set_up(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP

    AcceleratorState.__init__ = set_up_and_shard


def by_transformers(
    folder: Path, wrapped: str, tied: bool = True, budget: str | None = None, **more: Any
) -> tuple[list[str], Explanation | None]:
    """Returns the names of weights that differ, and what the callback saw."""
    seen = []
    callback = transformers.GraphckptCallback(memory_budget=budget)
    for callbacks in ([], [callback]):
        two = arguments(folder, ddp_backend="gloo", per_device_train_batch_size=2, max_steps=4, **more)
        trainer = Trainer(gpt2(tie_word_embeddings=tied), two, None, RandomTokens(classify=False), callbacks=callbacks)
        trainer.train()
        assert wrapped in type(trainer.model_wrapped).__name__
        weights = trainer.accelerator.unwrap_model(trainer.model_wrapped).state_dict()
        seen.append({n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()})
    plain, ours = seen
    return [name for name in plain if not torch.equal(plain[name], ours[name])], callback.explanation


def by_lightning(folder: Path) -> tuple[list[str], Explanation | None]:
    """The same in Lightning's Trainer."""
    callback = lightning.GraphckptCallback()
    plain, ours = (
        fit(folder, *callbacks, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
        for callbacks in ([], [callback])
    )
    return differences(ours, plain), callback.explanation


def train(rank: int, folder: Path) -> None:
    """Runs on each rank."""
    del rank
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # by which Lightning knows that torchrun has started the ranks
    shard_on_cpus()
    runs = {
        "Lightning, DDP": by_lightning(folder),
        "Trainer, DDP": by_transformers(folder, "DistributedDataParallel"),
        "Trainer, DDP, budget": by_transformers(folder, "DistributedDataParallel", budget="min"),
        "Trainer, FSDP2": by_transformers(
            folder, "FSDP", tied=TIED, **FSDP2
        ),  # after all others: it writes into the environment
        "Trainer, FSDP2, budget": by_transformers(folder, "FSDP", tied=TIED, budget="min", **FSDP2),
    }
    for name, (differ, seen) in runs.items():
        assert differ == [], name
        assert seen is not None, name
        assert 3 * seen.bytes_after < seen.bytes_before, name


@pytest.mark.multi_process
@pytest.mark.slow
def test_callbacks_on_two_ranks_change_no_bit(tmp_path: Path) -> None:
    run_on_ranks(train, tmp_path, joins=False)
