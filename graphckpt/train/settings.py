"""The section ``train`` of a config, as frozen dataclasses.

pydantic checks the types of their fields when a config is read; ``faults()`` yields what types cannot express.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, final

from pydantic import Field, NonNegativeInt, PositiveInt
from torch.optim.lr_scheduler import LRScheduler

from graphckpt.blocks.config import OTHER_NAMES, BlockConfig
from graphckpt.budget import check_budget
from graphckpt.deprecation import accepts_old_names
from graphckpt.errors import ConfigError
from graphckpt.planning.options import PlanOptions
from graphckpt.rules.base import parse_rule
from graphckpt.train.optim import warmup_cosine_lr

# Note [Sizes of an update]
# Of three keys two say the third, and one leaves one forward for each update. With data_parallel_size=2:
#
#     train_micro_batch_size  num_accumulation_steps  global_batch_size   micro batch x accumulation x processes
#              8                                             64           8 x 4 x 2
#              8                        4                                 8 x 4 x 2
#             null                      4                    64           8 x 4 x 2
#              8                                                          8 x 1 x 2
#              8                                            100           refused: no multiple of 16
#              8                        4                   100           refused: 64, which is the product
#
# The micro batch is 32 unless it is set, so it is written as null where the others are to decide it.


class BatchSizes(NamedTuple):
    """Samples of an update: ``global_batch = micro_batch * accumulation * data_parallel``."""

    micro_batch: int
    """Samples in one forward."""
    accumulation: int
    """Forwards for one update of the weights."""
    data_parallel: int
    """Processes that each do so."""

    @property
    def global_batch(self) -> int:
        """Samples of one update."""
        return self.micro_batch * self.data_parallel * self.accumulation


def _divided(global_batch: int, parts: int, described: str) -> int:
    if global_batch % parts:
        nearest = max(parts, round(global_batch / parts) * parts)
        raise ConfigError(
            f"global_batch_size: expected a multiple of {described}, got {global_batch} · fix: use {nearest}"
        )
    return global_batch // parts


@final
@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """The process groups of a run: ``train.dist``. ``torchrun`` starts the product of the sizes."""

    data_parallel_size: PositiveInt = 1
    """Number of data-parallel groups; each trains on its share of every batch."""
    tensor_parallel_size: PositiveInt = 1
    """Processes over which each matrix is sharded; their ranks are consecutive, so that they are on one machine."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages of the layers; ``num_accumulation_steps`` micro-batches run through them, by 1F1B."""
    pipeline_num_layers: int | None = None
    """For compatibility with libai; a pipeline always splits all layers."""
    custom_pipeline_stage_id: list[int] | None = None
    """The stage of each layer; ``None`` uses the blocks' ``stage_id``, or stages of equal size."""
    find_unused_parameters: bool = False
    """Whether a step may leave parameters without a gradient, under DDP."""
    timeout_seconds: Annotated[int, Field(ge=1, le=10**9)] = 600  # PyTorch counts microseconds, in 64 bits
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
        sizes = f"data_parallel_size {self.data_parallel_size} x tensor_parallel_size {self.tensor_parallel_size}"
        stages = self.pipeline_parallel_size
        return f"pipeline_parallel_size {stages} x {sizes}" if stages > 1 else sizes

    def faults(self) -> Iterator[str]:
        """Yields what is not supported."""
        if self.pipeline_num_layers is not None:
            why = "a pipeline splits all layers of the model"
            yield f"pipeline_num_layers: {self.pipeline_num_layers} is not supported, {why} · fix: leave the key out"
        if self.pipeline_parallel_size > 1 and self.tensor_parallel_size > 1:
            fix = "use 1, and data_parallel_size for the other processes"
            yield f"tensor_parallel_size: {self.tensor_parallel_size} is not supported with a pipeline · fix: {fix}"
        if self.custom_pipeline_stage_id is not None and self.pipeline_parallel_size == 1:
            fix = "raise pipeline_parallel_size, or leave the key out"
            yield f"custom_pipeline_stage_id: there is one stage · fix: {fix}"


@final
@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Sharding over data-parallel processes, by stages of ZeRO: ``train.zero_optimization``."""

    enabled: bool = False
    """Whether anything is sharded."""
    stage: Literal[1, 2, 3] = 1
    """1: optimizer states; 2: gradients too; 3: weights too, which are gathered layer by layer."""

    @property
    def active_stage(self) -> int:
        """The stage, or 0 if it is switched off."""
        return self.stage if self.enabled else 0


@final
@dataclass(frozen=True, kw_only=True)
class AmpConfig:
    """Automatic mixed precision: ``train.amp``."""

    enabled: bool = False
    """Whether forward runs under autocast."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The autocast dtype; ``"float16"`` uses a gradient scaler."""


OLD_KEYS: Mapping[str, str] = {"unit": "select", "blocks": "policies"}
"""The deprecated names of keys of ``train.activation_checkpoint``."""


@final
@accepts_old_names(**OLD_KEYS)
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """The policies of the model's blocks, or a budget to plan them for: ``train.activation_checkpoint``."""

    ALIASES: ClassVar[Mapping[str, str]] = OTHER_NAMES
    """Keys of OSLO and DeepSpeed that mean the same."""
    FOREIGN: ClassVar[Mapping[str, str]] = {
        "number_checkpoints": "the first step shows how big the slab has to be",
        "synchronize_checkpoint_boundary": "no synchronization is needed",
        "profile": "explain() shows bytes and seconds of every block",
    }
    """Keys of DeepSpeed without meaning here, and why."""

    enabled: bool = False
    """Whether blocks get policies; with ``memory_budget`` they do in any case."""
    rule: bool | str | dict[str, Any] | None = True
    """For every selected block: ``True``, ``"selective"``, or a mapping such as ``{"rule": "selective"}``; ``None`` for
    none."""
    select: str | list[str] | None = None
    """Class names or name patterns of the blocks; ``None`` is the layers that Transformers recomputes."""
    policies: dict[str, bool | str | dict[str, Any] | None] | None = None
    """On top of ``rule``, by name pattern: ``{"transformer.h.[01]": False, "transformer.h.2": "selective"}``."""
    offload: bool | str | None = None
    """Where saved tensors of selected blocks are stored: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``."""
    partition: bool | None = None
    """Whether they are partitioned over the processes of ``train.dist.tensor_parallel_size``."""
    contiguous: bool | None = None
    """Whether they are stored in one slab, as big as the first step needs."""
    determinism_check: Literal["none", "default", "values"] | None = None
    """The comparison in the recomputation of every selected block: nothing; shapes and dtypes, and the values of some
    calls; or the values of every call. ``None`` is ``"default"``."""
    compile: bool | dict[str, Any] | None = None
    """Whether each selected block is compiled inside of its policy; or what ``torch.compile`` is called with."""

    plan: str | None = None
    """A file that ``graphckpt plan --save`` or ``Plan.save`` has written: its policies, in place of ``rule``."""
    memory_budget: int | float | str | None = None
    """Bytes of each process, ``"12GiB"``, ``"50%"`` of the device's memory, ``0.6`` of the plain step's peak, ``"max"``
    or ``"min"``: before the first update, each selected block gets the policy with which the step is fastest within it.
    Beside it, ``offload`` says where tensors may go, ``partition`` that they may be sharded, and ``contiguous`` that
    kept tensors share one slab. Blocks with ``compile`` are planned as they run then."""
    fit: Literal["throughput", "batch"] | None = None
    """Choose ``train_micro_batch_size`` and ``num_accumulation_steps`` before the run, for the ``global_batch_size``:
    the fastest micro-batch that fits into ``memory_budget``, or the largest, with the policies that are planned for it.
    The budget is ``"max"`` by default."""
    host_budget: int | str | None = None
    """With ``memory_budget``, the most bytes that may be offloaded at a time, such as ``"64GiB"``."""
    candidates: list[Any] | None = None
    """With ``memory_budget``, the rules to consider, such as ``["full", "joined"]``; ``None`` is all."""
    check: bool = True
    """With ``memory_budget``: run the step under the plan, and replan if its peak is over the budget or off by 1 %."""
    on_out_of_memory: Literal["raise", "replan"] = "replan"
    """When an update runs out of memory: plan the blocks again for the free memory, and repeat it, with one warning; or
    raise the error. Several processes raise it in any case."""
    head: dict[str, Any] | None = None
    """With ``memory_budget``, the block that computes the loss, and one way or a list of ways in which it may run:
    ``{"loss_head": {"rule": "tiles", "num_tiles": 8, "reduce": "sum"}}``, with ``task.loss_head=True``."""

    @property
    def beside_rule(self) -> dict[str, Any]:
        """The keys that hold for every selected block, whatever its rule, as far as they are set."""
        values = {
            name: getattr(self, name) for name in ("offload", "partition", "contiguous", "determinism_check", "compile")
        }
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
                check_budget(self.memory_budget, for_fit=self.fit is not None)
                _ = self.plan_options()
            except ConfigError as error:
                yield str(error)
            if self.policies is not None:
                yield "memory_budget: expected no policies with it, as a plan chooses them · fix: unset one of them"
        if self.plan is not None and (self.policies is not None or self.memory_budget is not None):
            other = "policies" if self.memory_budget is None else "memory_budget"
            yield f"plan: expected no {other} with a saved plan · fix: unset one of them"
        if self.fit is not None and (self.policies is not None or self.plan is not None):
            other = "policies" if self.plan is None else "plan"
            yield f"fit: the plan of the chosen batch size sets the policies, and {other} is set · fix: unset one"
        yield from self._head_faults()
        for name, value in self.beside_rule.items():
            try:
                BlockConfig("").update({name: value})
            except ConfigError as error:
                yield str(error).removeprefix(".")

    def _head_faults(self) -> Iterator[str]:
        if self.head and self.memory_budget is None:
            yield "head: no memory_budget is set to plan it for · fix: set one, or name the block in policies"
        for name, value in (self.head or {}).items():
            try:
                if any(parse_rule(one) is None for one in (value if isinstance(value, list) else [value])):
                    fix = "{'rule': 'tiles', 'num_tiles': 8, 'reduce': 'sum'}"
                    yield f"head.{name}: expected a rule, got None · fix: {fix}"
            except ConfigError as error:
                yield f"head.{name}: {error}"


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out samples: ``train.evaluation``."""

    FOREIGN: ClassVar[Mapping[str, str]] = {"evaluator": "the task says what is measured"}
    """Keys of libai without meaning here, and why."""

    enabled: bool = True
    """Whether to evaluate at all."""
    eval_period: PositiveInt = 1000
    """Iterations between two evaluations; one more comes at the end."""
    eval_after_n_epoch: PositiveInt | None = None
    """If set, the period in epochs."""
    eval_iter: PositiveInt | None = None
    """If set, evaluates at most this many batches."""
    eval_metric: str | None = None
    """The metric of ``model_best``, such as ``"eval_ppl"``; ``None`` is the metric of the task."""
    eval_mode: Literal["min", "max"] | None = None
    """Whether lower or higher is better; ``None`` is as the task says."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """Snapshots to resume from: ``train.checkpointer``, as in libai."""

    period: PositiveInt = 5000
    """Iterations between two snapshots; one more comes at the end."""
    max_to_keep: PositiveInt = 100
    """How many periodic snapshots are kept."""
    save_model_after_n_epoch: PositiveInt | None = None
    """If set, the period in epochs."""
    async_save: bool = False
    """Whether snapshots are written in the background, from a copy in CPU memory."""


@final
@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Logging to Weights & Biases, an optional package: ``train.wandb``."""

    enabled: bool = False
    """Whether metrics are sent."""
    project: str = "graphckpt"
    """The project of the run."""
    name: str | None = None
    """The run's name; ``None`` is that of the output folder."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``"offline"`` writes to the output folder only."""


@final
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run: ``train``. The names are libai's."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "nccl_fusion_threshold_mb": "NCCL fuses for OneFlow",
        "nccl_fusion_max_ops": "NCCL fuses for OneFlow",
        "rdma_enabled": "PyTorch picks the transport",
        "input_placement_device": "train.device places the input too",
    }
    """Keys of libai without meaning in PyTorch, and why."""

    output_dir: str = "output"
    """Output folder of the run. A folder with a run is refused, unless it is resumed or overwritten."""
    overwrite: bool = False
    """Whether a run in ``output_dir`` is replaced, after the first iteration of this one."""
    train_micro_batch_size: PositiveInt | None = 32
    """Samples in one forward; ``None`` derives it from ``global_batch_size``."""
    global_batch_size: PositiveInt | None = None
    """Samples of one update: micro batch x data parallel x accumulation; ``None`` derives it."""
    test_micro_batch_size: PositiveInt = 32
    """Samples in one forward of an evaluation."""
    num_accumulation_steps: PositiveInt | None = None
    """Forwards, each with its backward, before one update of the weights; ``None`` derives it, or is 1."""
    train_iter: PositiveInt = 10000
    """Number of updates, at least."""
    train_epoch: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """Number of epochs, if that is more."""
    train_samples: PositiveInt | None = None
    """If set, the run ends after so many samples, whatever ``train_iter`` is."""
    consumed_train_samples: NonNegativeInt = 0
    """Samples to skip at the start."""
    consumed_valid_samples: Literal[0] = 0
    """For compatibility with libai; an evaluation always starts with the first held-out sample."""
    start_iter: Literal[0] = 0
    """For compatibility with libai; ``--resume`` continues from the snapshot's iteration."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the updates in which the learning rate warms up."""
    scheduler: Callable[..., LRScheduler] = field(default=warmup_cosine_lr)
    """Called with ``optimizer``, ``max_iter`` and ``warmup_iter``."""
    load_weight: str = ""
    """If set, a folder of weights to start from: a snapshot, or what Transformers saved, in one file or in shards."""
    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    log_period: PositiveInt = 20
    """Iterations between two lines of the log."""
    tensorboard: bool = False
    """Whether to write TensorBoard events, with an optional package."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    seed: NonNegativeInt = 1234
    """Seed of the initial weights, the order of the data and dropout."""
    device: str | None = None
    """The device, such as ``"cuda:0"``; ``None`` uses CUDA if available."""
    capture: Literal["auto", "cuda_graph", "eager"] = "auto"
    """Whether a step runs as one CUDA graph: if possible, always (or an error), or never. See ``docs/capture.md``."""
    amp: AmpConfig = field(default_factory=AmpConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    zero_optimization: ZeroConfig = field(default_factory=ZeroConfig)

    @property
    def sizes(self) -> BatchSizes:
        """Samples of a forward and of an update; one forward of all until ``activation_checkpoint.fit`` has chosen.

        Raises:
            ConfigError: the numbers contradict each other, do not divide, or too few are set.

        >>> TrainConfig(train_micro_batch_size=8, global_batch_size=64, dist=DistConfig(data_parallel_size=2)).sizes
        BatchSizes(micro_batch=8, accumulation=4, data_parallel=2)
        """
        micro, total, accumulation = self.train_micro_batch_size, self.global_batch_size, self.num_accumulation_steps
        parallel = self.dist.data_parallel_size
        # The fit itself asks for sizes, when the config is checked and the model is built: until it has set both keys,
        # an update is one forward of all samples on one process, which always divides.
        if self.activation_checkpoint.fit is not None and total is not None:
            micro, accumulation, parallel = None, 1, 1
        if micro is None:
            if total is None:
                fix = "set one of train.train_micro_batch_size and train.global_batch_size"
                raise ConfigError(f"train_micro_batch_size: is null, and so is global_batch_size · fix: {fix}")
            accumulation = accumulation or 1
            described = f"data_parallel_size {parallel} x accumulation {accumulation}"
            micro = _divided(total, parallel * accumulation, described)
        elif accumulation is None:
            described = f"micro batch {micro} x data_parallel_size {parallel}"
            accumulation = 1 if total is None else _divided(total, micro * parallel, described)
        sizes = BatchSizes(micro, accumulation, parallel)
        if total not in {None, product := sizes.global_batch}:
            what = f"micro batch {micro} x data_parallel_size {parallel} x accumulation {accumulation} is {product}"
            fix = f"set global_batch_size to {product}, or leave one of the three out (null)"
            raise ConfigError(f"global_batch_size: {total}, but {what} · fix: {fix}")
        return sizes

    def iterations(self, num_samples: int) -> int:
        """Returns how many updates a run makes with so many training samples.

        >>> TrainConfig(train_iter=5, train_epoch=2, train_micro_batch_size=4).iterations(num_samples=25)
        13
        """
        global_batch = self.sizes.global_batch
        if self.train_samples is not None:
            return math.ceil(self.train_samples / global_batch)
        return max(self.train_iter, math.ceil(num_samples * self.train_epoch / global_batch))

    def period(self, iterations: int, epochs: int | None, num_samples: int) -> int:
        """Returns a period in updates; that of ``epochs`` as libai does, without the rest of an epoch.

        >>> TrainConfig(train_micro_batch_size=4).period(iterations=100, epochs=2, num_samples=25)
        12
        """
        return iterations if epochs is None else max(1, num_samples // self.sizes.global_batch * epochs)

    def faults(self) -> Iterator[str]:
        """Yields the faults of the fields."""
        yield from self._size_faults()
        if self.train_samples is not None and self.train_epoch:
            yield f"train_samples: {self.train_samples}, and train_epoch is {self.train_epoch} · fix: set one of them"
        if self.seed >= 2**63:  # the limit of PyTorch's generators on all devices
            yield f"seed: expected less than 2**63, got {self.seed}"
        yield from self._spread_faults()
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self.dist, name) > 1 and self.amp.enabled and self.amp.dtype == "float16":
                yield f"amp.dtype: 'float16' is not supported with dist.{name} above 1 · fix: use 'bfloat16'"
        yield from self._fit_faults()
        if self.device and self.device.startswith("meta"):
            what = f"expected a device that can train, got {self.device!r}, whose tensors have no values"
            yield f"device: {what} · fix: leave the key out, and the device is chosen"
        if not self.output_dir:
            yield "output_dir: is empty · fix: name a folder"

    def _fit_faults(self) -> Iterator[str]:
        if self.activation_checkpoint.fit is None:
            return
        where = "activation_checkpoint.fit"
        if self.global_batch_size is None:
            yield f"{where}: expected a fixed number of samples for each update, got none · fix: set global_batch_size"
        if self.num_accumulation_steps is not None:
            what = f"expected no num_accumulation_steps, which fit chooses, got {self.num_accumulation_steps}"
            yield f"{where}: {what} · fix: unset num_accumulation_steps"
        if self.dist.num_processes > 1:
            yield f"{where}: expected one process, got {self.dist.num_processes} · fix: set train_micro_batch_size"

    def _size_faults(self) -> Iterator[str]:
        # Sizes of a contradictory `dist` would only add faults that vanish with the contradiction.
        if any(self.dist.faults()):
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
        dist, checkpoint = self.dist, self.activation_checkpoint
        if dist.data_parallel_size < 2 and self.zero_optimization.enabled:
            what = "zero_optimization.enabled: True, and dist.data_parallel_size is 1"
            yield f"{what}: one process would hold all of it · fix: raise the size, or leave the key out"
        elif dist.pipeline_parallel_size > 1 and self.zero_optimization.enabled:
            what = "zero_optimization.enabled: True is not supported with dist.pipeline_parallel_size above 1"
            yield f"{what} · fix: leave the key out"
        kinds = ("data_parallel_size", "pipeline_parallel_size")
        above = next((name for name in kinds if getattr(dist, name) > 1), None)
        if above is None:
            return
        if self.capture == "cuda_graph":
            yield f"capture: 'cuda_graph' is not supported with dist.{above} above 1 · fix: use 'eager'"
        is_on = checkpoint.enabled or checkpoint.memory_budget is not None
        if is_on and checkpoint.partition and dist.tensor_parallel_size == 1:
            what = "activation_checkpoint.partition: processes that do not share matrices keep different tensors"
            yield f"{what} · fix: raise dist.tensor_parallel_size, or leave the key out"
