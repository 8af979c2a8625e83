"""Keys of libai that are not supported: accepted at their neutral value, otherwise an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

_FIX = "leave the key out"


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
"""Keys of libai's ``train`` that have no meaning in PyTorch, and why."""

EVALUATION_WITHOUT_MEANING: Mapping[str, str] = {"evaluator": "the task says what is measured"}
"""Keys of libai's ``train.evaluation`` that have no meaning here, and why."""

CHECKPOINT_WITHOUT_MEANING: Mapping[str, str] = {
    "number_checkpoints": "the first step shows how big the slab has to be",
    "synchronize_checkpoint_boundary": "nothing needs the device to stand still",
    "profile": "explain() shows bytes and seconds of every block",
}
"""Keys of DeepSpeed's ``activation_checkpointing`` that have no meaning here, and why."""
