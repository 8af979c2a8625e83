"""The options of ``graphckpt estimate``, and their check before anything is imported or built. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, final

from graphckpt.budget import check_budget
from graphckpt.errors import ConfigError, bullets, did_you_mean, nearest
from graphckpt.search.finetune_options import (
    OPTIMIZER_ALIASES,
    OPTIMIZERS,
    QUANTIZATIONS,
    SHARDED_OPTIMIZERS,
    FineTuneOptions,
)
from graphckpt.search.loop_options import LOSSES, LoopOptions
from graphckpt.units import parse_bytes

DTYPES = ("float32", "bfloat16", "float16")
AUTOCAST = ("bfloat16", "float16")
ATTENTION = ("sdpa", "eager", "flash", "flex")
ATTENTION_ALIASES = {"flash_attention_2": "flash", "flash_attention": "flash", "flex_attention": "flex"}
TASKS = (
    "causal-lm", "seq2seq-lm", "masked-lm", "sequence-classification", "token-classification", "question-answering",
    "image-classification",
)  # fmt: skip
_CHOICES = {
    "dtype": DTYPES, "autocast": AUTOCAST, "attention": ATTENTION, "optimizer": OPTIMIZERS, "task": TASKS,
    "quantization": QUANTIZATIONS, "lora_dtype": DTYPES, "loss": LOSSES,
}  # fmt: skip
_COUNTS = {
    "batch": 8, "seq": 4096, "packed": 512, "lora": 16, "world_size": 8, "nodes": 2, "accumulation": 4,
}  # fmt: skip
"""Each with an example."""
_ENDLESS = 2**40  # samples or tokens: more than memory of any kind holds
_OFF = ("off", "none", "")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@final
@dataclass(frozen=True, kw_only=True)
class EstimateOptions(FineTuneOptions, LoopOptions):
    """The training step to estimate: the keyword arguments of :func:`graphckpt.estimate`, and the command's flags.

    >>> EstimateOptions(batch=4, dtype="bfloat16").batch
    4
    >>> EstimateOptions(dtype="bf61")
    Traceback (most recent call last):
    graphckpt.errors.ConfigError: dtype: expected float32, bfloat16 or float16, got 'bf61' · fix: use one of these
    """

    batch: int = 1
    """Samples of one step, of each rank."""
    seq: int | None = None
    """Tokens of each sample. ``None`` is 2048, or all positions of a model that has fewer."""
    packed: int | None = None
    """Tokens of each of the samples that are packed into a row of ``seq`` tokens, whose attention FlashAttention
    computes for each sample alone. ``None`` is one sample in a row."""
    dtype: str | None = None
    """The type of the weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``None`` is that of the config."""
    autocast: str | None = None
    """The type of ``torch.autocast``: ``"bfloat16"`` or ``"float16"``. ``None`` is without autocast."""
    attention: str | None = None
    """``"sdpa"``, ``"eager"``, ``"flash"`` or ``"flex"``, as ``attn_implementation`` of Transformers. ``None`` is its
    default for the model."""
    policy: str | None = None
    """One policy for all layers, such as ``"full"`` or ``"selective"``, in place of the best plan."""
    memory_budget: int | float | str = "max"
    """The budget of the best plan: ``max`` (all that a process can have on the device), ``"24GiB"``, ``"50%"``,
    ``0.6`` of the step with everything kept, or ``min``."""
    memory: int | str | None = None
    """The memory of the device in place of its profile's, such as ``"24GiB"``."""
    world_size: int | None = None
    """The number of ranks, on such a device each, over which FSDP2 shards the model. ``None`` is one process without
    it. With ``autocast``, FSDP2 gathers the weights in that type, and reduces gradients in float32."""
    nodes: int | None = None
    """With ``world_size``: the nodes that the ranks are on, equally many on each. ``None`` is as many as the cluster
    profile needs."""
    cluster: str | None = None
    """With ``world_size``: the name of a cluster profile such as ``"dgx-h100"``, or a file, for the time of
    collectives. ``None`` is the one of the device."""
    task: str | None = None
    """The task to train for, such as ``"causal-lm"``. ``None`` is the task of the config's architecture."""
    spelling: Literal["python", "command"] = field(default="python", repr=False, compare=False)
    """How messages name options: as keyword arguments, or as flags."""

    def __post_init__(self) -> None:
        for name in ("dtype", "autocast", "lora_dtype"):  # `torch.bfloat16` too
            value = getattr(self, name)
            if value is not None:
                name_of_type = str(value).removeprefix("torch.")
                object.__setattr__(self, name, _SHORT.get(name_of_type, name_of_type))
        if self.autocast is not None and self.autocast.lower() in _OFF:
            object.__setattr__(self, "autocast", None)
        if self.attention in ATTENTION_ALIASES:
            object.__setattr__(self, "attention", ATTENTION_ALIASES[self.attention])
        optimizer = str(self.optimizer).lower().replace("_", "-")
        object.__setattr__(self, "optimizer", OPTIMIZER_ALIASES.get(optimizer, optimizer))
        faults = list(self._faults())
        if faults:
            raise ConfigError(faults[0] if len(faults) == 1 else bullets("estimate", faults))

    @classmethod
    def of_text(cls, values: Mapping[str, Any]) -> Self:
        """Returns options from flags, whose values are text; ``None`` is a flag that was not given."""
        names = {option.name for option in fields(cls)}
        texts = {name: value for name, value in values.items() if name in names and value is not None}
        for name in _COUNTS:
            if (text := texts.get(name, "")).isdecimal() and text.isascii():
                texts[name] = int(texts[name])
        if "lora_dropout" in texts:
            with suppress(ValueError):
                texts["lora_dropout"] = float(texts["lora_dropout"])
        return cls(**texts, spelling="command")

    def scales_gradients(self, dtype: str) -> bool:
        """Whether a gradient scaler belongs to the step: it refuses gradients in float16, and an update in backward.

        Args:
            dtype: The type of the weights.
        """
        trained = dtype if self.lora is None else self.lora_dtype or "float32"
        return self.autocast == "float16" and trained != "float16" and not self.fused_backward

    def named(self, option: str) -> str:
        """Returns an option as the caller writes it.

        >>> EstimateOptions().named("world_size"), EstimateOptions(spelling="command").named("world_size")
        ('world_size', '--world-size')
        """
        return option if self.spelling == "python" else f"--{option.replace('_', '-')}"

    def setting(self, option: str, value: object) -> str:
        """Returns an option with a value as the caller writes it.

        >>> EstimateOptions().setting("dtype", "bfloat16"), EstimateOptions(spelling="command").setting("batch", 8)
        ("dtype='bfloat16'", '--batch 8')
        """
        if self.spelling == "python":
            return f"{option}={value!r}"
        if value is False:
            return f"leave {self.named(option)} out"
        return self.named(option) if value is True else f"{self.named(option)} {value}"

    def _faults(self) -> Iterator[str]:
        for name, example in _COUNTS.items():
            value = getattr(self, name)
            is_default = value is None and name not in ("batch", "accumulation")
            is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < _ENDLESS
            if not is_default and not is_count:
                fix = self.setting(name, example)
                yield f"{self.named(name)}: expected a positive int, got {value!r} · fix: {fix}"
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
                guesses = nearest(str(value), choices)
                fix = self.setting(name, guesses[0]) if guesses else "use one of these"
                guess = did_you_mean(str(value), choices)
                yield f"{self.named(name)}: expected {expected}, got {value!r}{guess} · fix: {fix}"
        faults = (*self._finetune_faults(), *self._loop_faults(fused_backward=self.fused_backward))
        for name, what, other, example in faults:
            yield f"{self.named(name)}: {what} · fix: {self.setting(other, example)}"
        yield from self._faults_of_pairs()
        try:
            check_budget(self.memory_budget)
        except ConfigError as error:
            yield str(error).replace("memory_budget", self.named("memory_budget"), 1)
        if self.memory is not None:
            try:
                parse_bytes(self.memory)
            except ValueError as error:
                yield f"{self.named('memory')}: {str(error).removeprefix('memory size ')}"

    def _faults_of_pairs(self) -> Iterator[str]:
        """Yields options that do not suit each other."""
        if self.quantization is not None and self.world_size is not None:
            size = self.named("world_size")
            what = f"expected one process, got {size} {self.world_size}: FSDP2 of quantized weights is not simulated"
            yield f"{self.named('quantization')}: {what} · fix: leave {size} out"
        if self.world_size is not None and self.optimizer in set(OPTIMIZERS).difference(SHARDED_OPTIMIZERS):
            what = f"expected one of {', '.join(SHARDED_OPTIMIZERS)} with {self.named('world_size')}"
            fix = self.setting("optimizer", "adamw-fused")
            yield f"{self.named('optimizer')}: {what}, got {self.optimizer!r} · fix: {fix}"
        if self.packed is not None and self.attention != "flash":
            attention = self.setting("attention", "flash")
            yield f"{self.named('packed')}: expected {attention} with it, got {self.attention!r} · fix: {attention}"
        if self.policy is not None and self.memory_budget != "max":
            policy = self.named("policy")
            what = f"expected no {policy} with it, got {policy} {self.policy!r}: it is the budget of the best plan"
            yield f"{self.named('memory_budget')}: {what} · fix: leave {policy} out"
        for name in ("cluster", "nodes"):
            if (value := getattr(self, name)) is not None and self.world_size is None:
                what = f"expected {self.named('world_size')} with it, got {value!r} alone"
                yield f"{self.named(name)}: {what} · fix: {self.setting('world_size', 8)}"
        counts = self.nodes, self.world_size
        if all(isinstance(count, int) and count > 0 for count in counts) and counts[1] % counts[0]:  # type: ignore[operator]
            what = f"expected a number that divides {self.named('world_size')} {self.world_size}, got {self.nodes}"
            yield f"{self.named('nodes')}: {what} · fix: {self.setting('nodes', 1)}"
