"""The section ``train`` of a config: frozen, and each fault in it has a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch.optim.lr_scheduler import LRScheduler

from graphckpt.train.optim import warmup_cosine_lr


@final
@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    """Automatic mixed precision: ``train.amp``."""

    enabled: bool = False
    """Run forward in a shorter type where that is safe."""
    dtype: Literal["bfloat16"] = "bfloat16"
    """The shorter type."""


@final
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Which blocks of the model save less, and how: ``train.activation_checkpoint``."""

    enabled: bool = False
    """Whether any block does."""
    rule: bool | str | dict[str, Any] = True
    """For every layer: ``True``, ``"selective"``, or a mapping such as ``{"rule": "selective"}``."""
    blocks: dict[str, dict[str, Any]] | None = None
    """By block name, instead of ``rule``: ``{"transformer.h.*": {"activation_checkpointing": True}}``."""


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Perplexity on held-out text: ``train.evaluation``."""

    enabled: bool = True
    """Whether to evaluate at all."""
    eval_period: int = 1000
    """Iterations between two evaluations; one more comes at the end."""
    eval_iter: int | None = None
    """If set, evaluates at most this many batches."""

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the fields."""
        yield from _below_one(self, "eval_period", "eval_iter")


@final
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a run goes: ``train``. The names are libai's."""

    output_dir: str = "output"
    """Folder for all that the run writes."""
    train_micro_batch_size: int = 32
    """Sequences in one forward."""
    test_micro_batch_size: int = 32
    """Sequences in one forward of an evaluation."""
    num_accumulation_steps: int = 1
    """Forwards, each with its backward, before one update of the weights."""
    train_iter: int = 10000
    """Updates of the weights."""
    warmup_ratio: float = 0.0
    """Share of ``train_iter`` in which the learning rate rises to its top."""
    scheduler: Callable[..., LRScheduler] = field(default=warmup_cosine_lr)
    """Called with ``optimizer``, ``max_iter`` and ``warmup_iter``."""
    log_period: int = 20
    """Iterations between two lines of the log."""
    seed: int = 1234
    """Fixes the weights at the start, the order of the data and dropout."""
    device: str | None = None
    """Where to train, such as ``"cuda:0"``; ``None`` is CUDA where there is one, or else the CPU."""
    amp: AmpConfig = field(default_factory=AmpConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the fields."""
        counts = (
            "train_micro_batch_size",
            "test_micro_batch_size",
            "num_accumulation_steps",
            "train_iter",
            "log_period",
        )
        yield from _below_one(self, *counts)
        if not 0 <= self.warmup_ratio < 1:
            yield f"warmup_ratio: {self.warmup_ratio} · fix: use a share from 0 to below 1"
        if self.seed < 0:
            yield f"seed: {self.seed} · fix: use 0 or more"
        if not self.output_dir:
            yield "output_dir: is empty · fix: name a folder"


def _below_one(config: object, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            yield f"{name}: {value} · fix: use 1 or more"
