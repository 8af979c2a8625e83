"""The section ``train`` of a config: frozen, and each fault in it has a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

from torch.optim.lr_scheduler import LRScheduler

from graphckpt.blocks.config import OTHER_NAMES, BlockConfig
from graphckpt.errors import ConfigError
from graphckpt.planning import budget
from graphckpt.planning.options import PlanOptions
from graphckpt.rules import parse_rule
from graphckpt.train.optim import warmup_cosine_lr
from graphckpt.train.reserved import (
    CHECKPOINT_WITHOUT_MEANING,
    EVALUATION_WITHOUT_MEANING,
    WITHOUT_MEANING,
    not_neutral,
)
from graphckpt.train.sizes import BatchSizes, batch_sizes
from graphckpt.train.spread import DistConfig, ZeroConfig

_SEEDS = 2**63  # what a generator of PyTorch takes, on every device


@final
@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    """Automatic mixed precision: ``train.amp``."""

    enabled: bool = False
    """Run forward in a shorter type where that is safe."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The shorter type; with ``"float16"`` the loss is scaled, and an update that overflows is left out."""


@final
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Which blocks of the model save less, and how: ``train.activation_checkpoint``."""

    ALIASES: ClassVar[Mapping[str, str]] = OTHER_NAMES
    """Keys of OSLO and DeepSpeed that mean the same."""
    FOREIGN: ClassVar[Mapping[str, str]] = CHECKPOINT_WITHOUT_MEANING
    """Keys of DeepSpeed that say nothing here, and why."""

    enabled: bool = False
    """Whether any block does."""
    rule: bool | str | dict[str, Any] | None = True
    """For every unit: ``True``, ``"selective"``, or a mapping such as ``{"rule": "selective"}``; ``None`` for none."""
    unit: str | list[str] | None = None
    """Class names or name patterns of the units; ``None`` is the layers that Transformers recomputes."""
    blocks: dict[str, bool | str | dict[str, Any] | None] | None = None
    """On top of ``rule``, by name pattern: ``{"transformer.h.[01]": False, "transformer.h.2": "selective"}``."""
    offload: bool | str | None = None
    """Where what every unit keeps goes: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``."""
    partition: bool | None = None
    """Whether it is cut over the processes of ``train.dist.tensor_parallel_size``."""
    contiguous: bool | None = None
    """Whether it lies in one slab, as big as the first step needs."""
    compile: bool | dict[str, Any] | None = None
    """Whether each unit is compiled inside of its policy; or what ``torch.compile`` is called with."""

    memory_budget: int | float | str | None = None
    """Bytes of each process, ``"12GiB"``, ``"50%"`` of what the plain step saves, ``"max"`` or ``"min"``: before the
    first update, each unit gets the policy with which the step is fastest within it. Beside it, ``offload`` says where
    tensors may go, ``partition`` that they may be cut, and ``contiguous`` that what is kept lies in one slab. Units
    that ``compile`` are planned as they run then."""
    host_budget: int | str | None = None
    """Beside it, the most bytes that may be offloaded at a time, such as ``"64GiB"``."""
    candidates: list[Any] | None = None
    """Beside it, the rules to consider, such as ``["full", "joined"]``; ``None`` is all."""
    check: bool = True
    """Beside it, run the step under the plan, and plan again if its peak exceeds the budget or differs by over 1 %."""
    head: dict[str, Any] | None = None
    """Beside it, the block that computes the loss, and one way or a list of ways in which it may run:
    ``{"loss_head": {"rule": "tiles", "num_tiles": 8, "reduce": "sum"}}``, with ``task.loss_head=True``."""

    @property
    def beside_rule(self) -> dict[str, Any]:
        """The keys that hold for every unit, whatever its rule, as far as they are set."""
        values = {name: getattr(self, name) for name in ("offload", "partition", "contiguous", "compile")}
        return {name: value for name, value in values.items() if value is not None}

    def plan_options(self, **changes: Any) -> PlanOptions:
        """Returns the options of the planner; ``changes`` replace those of this section."""
        values = {name: getattr(self, name) for name in PlanOptions.names("config")}
        values |= {"offload": self.offload or False, "contiguous": bool(self.contiguous), **changes}
        return PlanOptions(**values)

    def faults(self) -> Iterator[str]:
        """Yields what means nothing."""
        if self.memory_budget is not None:
            try:
                budget.check_budget(self.memory_budget)
                _ = self.plan_options()
            except ConfigError as error:
                yield str(error)
            if self.blocks is not None:
                yield "memory_budget: the plan chooses, and blocks is set as well · fix: unset one of them"
        yield from self._head_faults()
        for name, value in self.beside_rule.items():
            try:
                BlockConfig("").update({name: value})
            except ConfigError as error:
                yield str(error).removeprefix(".")

    def _head_faults(self) -> Iterator[str]:
        if self.head and self.memory_budget is None:
            yield "head: no memory_budget is set to plan it for · fix: set one, or name the block in blocks"
        for name, value in (self.head or {}).items():
            try:
                if any(parse_rule(one) is None for one in (value if isinstance(value, list) else [value])):
                    yield f"head.{name}: None is no rule · fix: {{'rule': 'tiles', 'num_tiles': 8, 'reduce': 'sum'}}"
            except ConfigError as error:
                yield f"head.{name}: {error}"


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Perplexity on held-out text: ``train.evaluation``."""

    FOREIGN: ClassVar[Mapping[str, str]] = EVALUATION_WITHOUT_MEANING
    """Keys of libai that say nothing here, and why."""

    enabled: bool = True
    """Whether to evaluate at all."""
    eval_period: int = 1000
    """Iterations between two evaluations; one more comes at the end."""
    eval_after_n_epoch: int | None = None
    """If set, the period is so many passes over the data."""
    eval_iter: int | None = None
    """If set, evaluates at most this many batches."""
    eval_metric: str | None = None
    """What ``model_best`` is best at, such as ``"eval_ppl"``; ``None`` is what the task says."""
    eval_mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better; ``None`` is what the task says."""

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the fields."""
        yield from _below_one(self, "eval_period", "eval_after_n_epoch", "eval_iter")


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """Snapshots to go on from: ``train.checkpointer``, by libai's name."""

    period: int = 5000
    """Iterations between two snapshots; one more comes at the end."""
    max_to_keep: int = 100
    """Older ones than so many are removed; ``model_best`` and ``model_final`` do not count."""
    save_model_after_n_epoch: int | None = None
    """If set, the period is so many passes over the data."""
    async_save: bool = False
    """Whether a copy is written while training goes on; it takes the memory of one, on the CPU."""

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the fields."""
        yield from _below_one(self, "period", "max_to_keep", "save_model_after_n_epoch")


@final
@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Metrics for Weights & Biases, a package of its own: ``train.wandb``."""

    enabled: bool = False
    """Whether to send them."""
    project: str = "graphckpt"
    """The project of the run."""
    name: str | None = None
    """The run's name; ``None`` is that of the output folder."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``"offline"`` writes to the output folder alone."""


@final
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a run goes: ``train``. The names are libai's."""

    FOREIGN: ClassVar[Mapping[str, str]] = WITHOUT_MEANING
    """Keys of libai that say nothing on PyTorch, and why."""

    output_dir: str = "output"
    """Folder for all that the run writes. One that holds a run already is refused, but for ``--resume``."""
    overwrite: bool = False
    """Whether a run that ``output_dir`` holds is replaced, once the first iteration of this one is done."""
    train_micro_batch_size: int | None = 32
    """Samples in one forward; ``None`` derives it from ``global_batch_size``."""
    global_batch_size: int | None = None
    """Samples of one update: micro batch x data parallel x accumulation; ``None`` derives it."""
    test_micro_batch_size: int = 32
    """Samples in one forward of an evaluation."""
    num_accumulation_steps: int | None = None
    """Forwards, each with its backward, before one update of the weights; ``None`` derives it, or is 1."""
    train_iter: int = 10000
    """Updates of the weights, at least."""
    train_epoch: float = 0
    """Times through the data, if that is more."""
    train_samples: int | None = None
    """If set, the run ends after so many samples, whatever ``train_iter`` is."""
    consumed_train_samples: int = 0
    """Samples of the data's order to leave out at the start."""
    consumed_valid_samples: int = 0
    """Of libai: every evaluation starts with the first held-out sample."""
    start_iter: int = 0
    """Of libai: a snapshot says where ``--resume`` starts."""
    warmup_ratio: float = 0.0
    """Share of the updates in which the learning rate rises to its top."""
    scheduler: Callable[..., LRScheduler] = field(default=warmup_cosine_lr)
    """Called with ``optimizer``, ``max_iter`` and ``warmup_iter``."""
    load_weight: str = ""
    """If set, a folder of weights to start from: a snapshot, or what Transformers saved, in one file or in shards."""
    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    log_period: int = 20
    """Iterations between two lines of the log."""
    tensorboard: bool = False
    """Whether to write for TensorBoard too, a package of its own."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    seed: int = 1234
    """Fixes the weights at the start, the order of the data and dropout."""
    device: str | None = None
    """Where to train, such as ``"cuda:0"``; ``None`` is CUDA where there is one, or else the CPU."""
    capture: Literal["auto", "cuda_graph", "eager"] = "auto"
    """Whether a step runs as one CUDA graph: where it can, or else an error, or never. See ``docs/capture.md``."""
    amp: AmpConfig = field(default_factory=AmpConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    zero_optimization: ZeroConfig = field(default_factory=ZeroConfig)

    @property
    def sizes(self) -> BatchSizes:
        """How many samples a forward and an update take."""
        return batch_sizes(
            micro_batch=self.train_micro_batch_size,
            global_batch=self.global_batch_size,
            accumulation=self.num_accumulation_steps,
            data_parallel=self.dist.data_parallel_size,
        )

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the fields."""
        yield from _below_one(self, "test_micro_batch_size", "train_iter", "train_samples", "log_period")
        yield from self._size_faults()
        yield from not_neutral(self, "a snapshot says it", "consumed_valid_samples", "start_iter")
        for name in ("train_epoch", "consumed_train_samples"):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"{name}: {getattr(self, name)} · fix: use 0 or more"
        if self.train_samples is not None and self.train_epoch:
            yield f"train_samples: {self.train_samples}, and train_epoch is {self.train_epoch} · fix: set one of them"
        if not 0 <= self.warmup_ratio < 1:
            yield f"warmup_ratio: {self.warmup_ratio} · fix: use a share from 0 to below 1"
        if not 0 <= self.seed < _SEEDS:
            yield f"seed: {self.seed} · fix: use 0 or more, and less than 2**63"
        yield from self._spread_faults()
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self.dist, name) > 1 and self.amp.enabled and self.amp.dtype == "float16":
                yield f"amp.dtype: 'float16' does not go with dist.{name} above 1 · fix: use 'bfloat16'"
        if self.activation_checkpoint.memory_budget is not None and self.dist.pipeline_parallel_size > 1:
            what = "the stages of a pipeline have different blocks, and a plan is for equal processes"
            yield f"activation_checkpoint.memory_budget: {what} · fix: name the blocks"
        if self.device and self.device.startswith("meta"):
            yield f"device: {self.device!r} holds no values · fix: leave the key out, and the device is picked"
        if not self.output_dir:
            yield "output_dir: is empty · fix: name a folder"

    def _size_faults(self) -> Iterator[str]:
        """Yields what is wrong with the samples of a forward and of an update."""
        faults = list(_below_one(self, "train_micro_batch_size", "global_batch_size", "num_accumulation_steps"))
        yield from faults
        if faults or any(self.dist.faults()):
            return
        try:
            num_steps = self.sizes.accumulation
        except ConfigError as error:
            yield str(error)
            return
        num_stages = self.dist.pipeline_parallel_size
        if num_steps < num_stages:
            what = f"{num_stages} stages need as many micro-batches, and an update has {num_steps}"
            yield f"dist.pipeline_parallel_size: {what} · fix: num_accumulation_steps={num_stages} or more"

    def _spread_faults(self) -> Iterator[str]:
        """Yields what does not go with several processes."""
        dist, checkpoint = self.dist, self.activation_checkpoint
        if dist.data_parallel_size < 2 and self.zero_optimization.enabled:
            what = "zero_optimization.enabled: True, and dist.data_parallel_size is 1"
            yield f"{what}: one process would hold all of it · fix: raise the size, or leave the key out"
        elif dist.pipeline_parallel_size > 1 and self.zero_optimization.enabled:
            what = "zero_optimization.enabled: True does not go with dist.pipeline_parallel_size above 1"
            yield f"{what} · fix: leave the key out"
        kinds = ("data_parallel_size", "pipeline_parallel_size")
        above = next((name for name in kinds if getattr(dist, name) > 1), None)
        if above is None:
            return
        if self.capture == "cuda_graph":
            yield f"capture: 'cuda_graph' does not go with dist.{above} above 1 · fix: use 'eager'"
        is_on = checkpoint.enabled or checkpoint.memory_budget is not None
        if is_on and checkpoint.partition and dist.tensor_parallel_size == 1:
            what = "activation_checkpoint.partition: processes that do not share matrices keep different tensors"
            yield f"{what} · fix: raise dist.tensor_parallel_size, or leave the key out"


def _below_one(config: object, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            yield f"{name}: {value} · fix: use 1 or more"
