"""The sections ``train.dist`` and ``train.zero_optimization``: process groups, and what is sharded over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

_STAGES = (1, 2, 3)
_LONGEST_SECONDS = 10**9  # a timeout of PyTorch counts microseconds, of which 64 bits do not hold much more


@final
@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """The process groups of a run: ``train.dist``. ``torchrun`` starts the product of the sizes."""

    data_parallel_size: int = 1
    """Number of data-parallel groups; each trains on its part of every batch."""
    tensor_parallel_size: int = 1
    """Processes over which each matrix is sharded; their ranks are consecutive, so that they are on one machine."""
    pipeline_parallel_size: int = 1
    """Pipeline stages of the layers; ``num_accumulation_steps`` micro-batches run through them, by 1F1B."""
    pipeline_num_layers: int | None = None
    """For compatibility with libai; a pipeline always splits all layers."""
    custom_pipeline_stage_id: list[int] | None = None
    """The stage of each layer; ``None`` uses the blocks' ``stage_id``, or stages of equal size."""
    find_unused_parameters: bool = False
    """Whether a step may leave parameters without a gradient, under DDP."""
    timeout_seconds: int = 600
    """How long a process waits for another before the run ends with an error."""

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    def describe(self) -> str:
        """Returns the sizes as text.

        >>> DistConfig(data_parallel_size=2).describe()
        'data_parallel_size 2 x tensor_parallel_size 1'
        """
        stages = f"pipeline_parallel_size {self.pipeline_parallel_size} x " if self.pipeline_parallel_size > 1 else ""
        sizes = f"data_parallel_size {self.data_parallel_size} x tensor_parallel_size {self.tensor_parallel_size}"
        return stages + sizes

    def faults(self) -> Iterator[str]:
        """Yields what is not supported."""
        if self.pipeline_num_layers is not None:
            why = "a pipeline splits all layers of the model"
            yield f"pipeline_num_layers: {self.pipeline_num_layers} is not supported, {why} · fix: leave the key out"
        for name in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "timeout_seconds"):
            if getattr(self, name) < 1:
                yield f"{name}: expected 1 or more, got {getattr(self, name)}"
        if self.timeout_seconds > _LONGEST_SECONDS:
            yield f"timeout_seconds: expected {_LONGEST_SECONDS} or less, got {self.timeout_seconds}"
        if self.pipeline_parallel_size > 1 and self.tensor_parallel_size > 1:
            fix = "use 1, and data_parallel_size for the other processes"
            yield f"tensor_parallel_size: {self.tensor_parallel_size} is not supported with a pipeline · fix: {fix}"
        if self.custom_pipeline_stage_id is not None and self.pipeline_parallel_size == 1:
            fix = "raise pipeline_parallel_size, or leave the key out"
            yield f"custom_pipeline_stage_id: there is one stage · fix: {fix}"


@final
@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is sharded over data-parallel processes: ``train.zero_optimization``."""

    enabled: bool = False
    """Whether anything is sharded."""
    stage: int = 1
    """1: optimizer states; 2: gradients too; 3: weights too, which are gathered layer by layer."""

    @property
    def active_stage(self) -> int:
        """The stage, or 0 if it is switched off."""
        return self.stage if self.enabled else 0

    def faults(self) -> Iterator[str]:
        """Yields invalid values."""
        if self.stage not in _STAGES:
            yield f"stage: expected one of {', '.join(map(str, _STAGES))}, got {self.stage}"
