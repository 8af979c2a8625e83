"""The options of ``graphckpt estimate`` for fine-tuning: optimizers, quantized weights, and LoRA. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZERS = (
    "adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "adafactor", "muon", "adamw-8bit", "paged-adamw-8bit",
    "paged-adamw-32bit", "torchao-adamw-8bit", "torchao-adamw-4bit", "adamw-bf16", "adamw-master", "adamw-offload",
)  # fmt: skip
OPTIMIZER_ALIASES: Mapping[str, str] = {
    "adamw-torch": "adamw",
    "adamw-torch-fused": "adamw-fused",
    "adamw-bnb-8bit": "adamw-8bit",
    "paged-adamw": "paged-adamw-32bit",
    "adamw-torch-8bit": "torchao-adamw-8bit",
    "adamw-torch-4bit": "torchao-adamw-4bit",
    "adamw-anyprecision": "adamw-bf16",
}
"""The values of ``optim`` in Transformers' ``TrainingArguments``, with hyphens."""
SHARDED_OPTIMIZERS = ("adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "muon")
"""Those whose update is simulated on the shards of FSDP2."""
ALL_LINEAR = "all-linear"
QUANTIZATIONS = ("nf4", "nf4-double", "int8")


@dataclass(frozen=True, kw_only=True)
class FineTuneOptions:
    """Options of :class:`EstimateOptions` on what is trained, and in which types."""

    optimizer: str = "adamw"
    """The optimizer, such as ``adamw-fused``, ``adamw-8bit``, ``paged-adamw-8bit``, ``torchao-adamw-4bit``,
    ``adafactor``, ``muon`` or ``adamw-offload``, or as ``optim`` of Transformers' ``TrainingArguments``."""
    fused_backward: bool = False
    """Update each weight in backward, as soon as its gradient is complete, so that gradients never exist together."""
    quantization: str | None = None
    """The frozen weights under LoRA, by bitsandbytes: ``"nf4"``, ``"nf4-double"`` (as QLoRA: with double quantization)
    or ``"int8"``. ``None`` is without."""
    lora: int | None = None
    """The rank of LoRA adapters (PEFT), which alone are trained. ``None`` trains all weights."""
    lora_targets: str | None = None
    """The layers with adapters: ``"all-linear"``, or names such as ``"q_proj,v_proj"``. ``None`` is the choice of PEFT
    for the model."""
    lora_dtype: str | None = None
    """The type of the adapters, such as ``"bfloat16"``. ``None`` is that of PEFT: ``float32``."""
    lora_dropout: float = 0.0
    """The dropout before the adapters."""
    dora: bool = False
    """Train magnitudes beside the adapters, as in DoRA."""
    rslora: bool = False
    """Scale adapters by the square root of their rank, as in rank-stabilized LoRA."""

    def named(self, option: str) -> str:
        """Returns an option as the caller writes it."""
        return option

    def _finetune_faults(self) -> Iterator[tuple[str, str, str, Any]]:
        """Yields options that do not suit each other: the option, what is wrong, another option, its value."""
        for name in ("quantization", "lora_targets", "lora_dtype", "lora_dropout", "dora", "rslora"):
            value = getattr(self, name)
            if value and self.lora is None:
                why = ": quantized weights are frozen" if name == "quantization" else ""
                got = "it" if value is True else repr(value)
                yield name, f"expected {self.named('lora')} with it, got {got} alone{why}", "lora", 16
        dropout = self.lora_dropout
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            yield "lora_dropout", f"expected a number from 0 to below 1, got {dropout!r}", "lora_dropout", 0.05
        if self.dora and self.quantization == "int8":
            what = f"expected 4 bits, got {self.named('quantization')} 'int8', which is not simulated with DoRA"
            yield "dora", what, "quantization", "nf4"
        if self.fused_backward and self.optimizer == "adamw-offload":
            what = "expected an optimizer on the device, got 'adamw-offload'"
            yield "fused_backward", what, "optimizer", "adamw-8bit"


def target_modules(text: str) -> list[str] | str:
    """Returns ``target_modules`` of PEFT: names, or ``"all-linear"`` or a regular expression as they are.

    >>> target_modules("q_proj, v_proj"), target_modules("all-linear"), target_modules(r".*mlp.*_proj")
    (['q_proj', 'v_proj'], 'all-linear', '.*mlp.*_proj')
    """
    names = [name for name in re.split(r"[,\s]+", text) if name]
    return names if all(re.fullmatch(r"[\w.]+", name) for name in names) else text
