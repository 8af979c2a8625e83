"""Keys that libai has and this version does not act on: good at their neutral value, and else an error that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

_FIX = "leave the key out"


@final
@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """Over how many processes a run spreads: ``train.dist``. They share matrices, and nothing else."""

    data_parallel_size: int = 1
    """Processes that share a batch."""
    tensor_parallel_size: int = 1
    """Processes that share each matrix, as many as ``torchrun`` starts."""
    pipeline_parallel_size: int = 1
    """Processes that share the layers."""
    pipeline_num_layers: int | None = None
    """Layers that the pipeline cuts."""
    custom_pipeline_stage_id: list[int] | None = None
    """The stage of each layer."""
    timeout_seconds: int = 600
    """How long a process waits for another before the run ends with an error."""

    def faults(self) -> Iterator[str]:
        """Yields what is not supported."""
        others = ("data_parallel_size", "pipeline_parallel_size", "pipeline_num_layers", "custom_pipeline_stage_id")
        yield from not_neutral(self, "processes share matrices alone", *others)
        for name in ("tensor_parallel_size", "timeout_seconds"):
            if getattr(self, name) < 1:
                yield f"{name}: {getattr(self, name)} · fix: use 1 or more"


@final
@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Optimizer state over processes: ``train.zero_optimization``. This version keeps it in one."""

    enabled: bool = False
    """Whether it is cut."""
    stage: int = 1
    """What is cut."""

    def faults(self) -> Iterator[str]:
        """Yields what is not supported."""
        if self.enabled:
            yield f"enabled: True is not supported, one process trains · fix: {_FIX}"


def not_neutral(config: Any, why: str, *names: str) -> Iterator[str]:
    """Yields a fault for each field, of those named or of all, that has another value than its default."""
    for field in fields(config):
        value = getattr(config, field.name)
        if (not names or field.name in names) and value != field.default:
            yield f"{field.name}: {value!r} is not supported, {why} · fix: {_FIX}"


WITHOUT_MEANING: Mapping[str, str] = {
    "nccl_fusion_threshold_mb": "NCCL fuses for OneFlow",
    "nccl_fusion_max_ops": "NCCL fuses for OneFlow",
    "rdma_enabled": "PyTorch picks the transport",
    "input_placement_device": "train.device places the input too",
}
"""Keys of libai's ``train`` that say nothing on PyTorch, and why."""

EVALUATION_WITHOUT_MEANING: Mapping[str, str] = {
    "evaluator": "the task says what is measured",
}
"""Keys of libai's ``train.evaluation`` that say nothing here, and why."""

CHECKPOINT_WITHOUT_MEANING: Mapping[str, str] = {
    "number_checkpoints": "the first step shows how big the slab has to be",
    "synchronize_checkpoint_boundary": "nothing needs the device to stand still",
    "profile": "explain() shows bytes and seconds of every block",
}
"""Keys of DeepSpeed's ``activation_checkpointing`` that say nothing here, and why."""
