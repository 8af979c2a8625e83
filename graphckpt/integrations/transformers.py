"""One line in Transformers' ``Trainer``: ``Trainer(..., callbacks=[GraphckptCallback(rule="full")])``."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast, final

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from graphckpt.deprecation import rename
from graphckpt.engine.objects import replaced
from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.integrations.policy_callback import PolicyCallback, restored_rng
from graphckpt.planning.options import FitOptionsDict, lists_options
from graphckpt.search.fit import find_batch_size

require("transformers-trainer", "transformers", "tqdm", "accelerate")  # the last is imported when a Trainer is made

from tqdm import tqdm  # noqa: E402
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer

    from graphckpt.budget import Budget
    from graphckpt.search.fit_result import Goal


@final
class GraphckptCallback(PolicyCallback, TrainerCallback):
    """Applies policies when ``Trainer.train`` starts, reports what they save, and removes them at its end.

    PEFT, accelerate and ``torchrun`` need nothing more; ``enable_input_require_grads`` is not needed.

    Args:
        rule: The rule of every selected block: ``True`` or ``"full"``, ``"selective"``, a rule object; ``None`` for
            no rule.
        select: Class names, name patterns or classes of the blocks; ``None`` is all layers.
        policies: On top of that, by selector, as :func:`graphckpt.apply` takes them.
        memory_budget: The peak of a step in bytes, ``"12GiB"``, ``"50%"`` of the device's memory, ``0.6`` of the plain
            step's peak, or ``"max"``: policies are planned for it in the first updates of the training, in place of
            ``rule`` and ``policies``, and ``fields`` are those of :class:`~graphckpt.planning.PlanOptions`.
        report: ``"table"`` prints the table of :meth:`~graphckpt.Handle.explain` for the second step, the first with
            optimizer states, and that of a plan; ``True`` one line for each, ``False`` nothing.
        plot: File for a picture of the live bytes over the second step, ``.png``, ``.svg`` or ``.html``.
        **fields: Further fields for every selected block: ``offload``, ``contiguous``, ``partition``, ``min_elements``,
            ``determinism_check``.

    Raises:
        ConfigError: A field does not exist, or a value is invalid for it.

    >>> callback = GraphckptCallback(rule="selective", policies={"*.h.0": False}, offload="cpu")
    >>> GraphckptCallback(cpu_checkpointing=True)
    Traceback (most recent call last):
      ...
    graphckpt.errors.ConfigError: GraphckptCallback.cpu_checkpointing: unknown field · fix: write offload, \
which means the same
    """

    @classmethod
    def from_arguments(cls, arguments: GraphckptArguments) -> GraphckptCallback:
        """Creates a callback from the arguments that ``HfArgumentParser`` has read."""
        return cls(**arguments.keys())

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Applies the policies; with a memory budget, those that take least until some updates were measured."""
        del control, kwargs
        assert model is not None
        self._begin(model, tqdm.write, is_writer=state is None or state.is_local_process_zero)
        if any(module.__dict__.get("gradient_checkpointing") for module in model.modules()):  # a plan has disabled it
            text = "graphckpt acts on the blocks that have a policy, Transformers on the others"
            name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
            fix = f"set {name}=False in the trainer's arguments (TRL's default is True)"
            what = f"{self._owner}: the model's own checkpointing is on as well"
            warnings.warn(f"{what}: {text} · fix: {fix}", stacklevel=2)
        if (trainer := _calling_trainer()) is not None:
            self._remove_on_error(trainer)

    def _remove_on_error(self, trainer: Trainer) -> None:
        """Removes the policies if a training step raises: a trainer does not tell its callbacks."""
        # Replaced on the instance and not on the class: other trainers are not affected, and deleting the attribute
        # restores the method. Errors between steps, such as in a data loader, pass it by: `graphckpt.remove(model)` is
        # for those.
        training_step = trainer.training_step

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return training_step(*args, **kwargs)
            except BaseException:
                self._remove()
                raise

        self._disabled.enter_context(replaced([trainer], "training_step", guarded))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures the first two steps, if they are to be shown as a table or a picture, or are planned from."""
        del args, control, kwargs
        self._begin_step(state.global_step, measures=self._report == "table" or self._plot is not None)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tells the planner that a micro-batch is over: in the next one its gradients are alive."""
        del args, state, control, kwargs
        self._end_micro_batch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reports once what a step saved."""
        del args, control, kwargs
        self._end_step(partial(_log, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reports what the first step saved, if there was no second, and removes the policies."""
        del args, control, kwargs
        self._end(partial(_log, state))


def _log(state: TrainerState, metrics: dict[str, float]) -> None:
    state.log_history.append({**metrics, "epoch": state.epoch, "step": state.global_step})


def _calling_trainer() -> Trainer | None:
    """Returns the trainer that calls the callback, by the callers' frames: it does not pass itself."""
    from transformers import Trainer  # noqa: PLC0415 - the callback needs less

    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


@lists_options(FitOptionsDict)
def fit_training_arguments(
    model: nn.Module,
    args: TrainingArguments,
    dataset: Dataset[Any],
    *,
    memory_budget: Budget = "max",
    goal: Goal = "throughput",
    data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
    **options: Unpack[FitOptionsDict],
) -> TrainingArguments:
    """Returns arguments with the batch size and the accumulation that suit a memory budget.

    The samples of one update, ``per_device_train_batch_size * gradient_accumulation_steps``, stay the same. The step of
    a ``Trainer`` runs at a few batch sizes, as by :func:`graphckpt.find_batch_size`, and what it changes is restored.
    Train with ``GraphckptCallback(memory_budget=...)``, which plans the policies for the batch size.

    Args:
        model: the model to train.
        args: the arguments; they stay as they are.
        dataset: a map-style data set, whose first samples are used. Where their lengths differ, pass the longest.
        memory_budget: the peak of a step in bytes, ``"12GiB"``, ``"50%"`` of the device's memory, or ``"max"``.
        goal: ``"throughput"`` for the fastest batch size, ``"batch"`` for the largest.
        data_collator: as ``Trainer`` takes it.
        options: fields of :class:`~graphckpt.planning.PlanOptions`.

    Raises:
        ConfigError: an argument cannot be used, or there are several processes.
        PlanError: no batch size that divides the samples of an update fits.
    """
    from transformers import Trainer  # noqa: PLC0415 - the callback needs less

    if isinstance(dataset, IterableDataset):
        fix = "a data set with len()"
        raise ConfigError(f"fit_training_arguments: expected a map-style data set to fit on · fix: {fix}")
    if type(args).__module__.partition(".")[0] == "trl":
        what = f"expected the arguments of Transformers' Trainer, got {type(args).__name__}"
        raise ConfigError(
            f"fit_training_arguments: {what} · fix: graphckpt.find_batch_size with the step of its trainer"
        )
    was_training = model.training
    # Its `__init__` seeds all generators by `args.seed`; the caller's random numbers go on as if there were none.
    with restored_rng():
        trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=data_collator)
    prepared: Any = trainer.model
    optimizer = trainer.create_optimizer()
    num_samples = len(cast("Sized", dataset))

    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        with restored_rng():
            batch = trainer.data_collator([dataset[number % num_samples] for number in range(batch_size)])
        inputs = trainer._prepare_inputs(batch)

        def step() -> None:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(prepared, inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return prepared, step

    # A batch of 8 with 4 steps of accumulation may become 1 x 32, 2 x 16, 4 x 8, 16 x 2 or 32 x 1: the same update.
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    try:
        prepared.train()
        fitted = find_batch_size(make_step, batch_sizes=sizes, memory_budget=memory_budget, **options)
    finally:
        prepared.train(was_training)
    best = fitted.at_global_batch(samples, goal)
    fitted_args = copy.copy(args)
    fitted_args.per_device_train_batch_size = best.batch_size
    fitted_args.gradient_accumulation_steps = best.accumulation
    return fitted_args


_NEW_ARGUMENTS = {"graphckpt_unit": "graphckpt_select", "graphckpt_blocks": "graphckpt_policies"}


@final
@dataclass(kw_only=True)
class GraphckptArguments:
    """The keys of :class:`GraphckptCallback` for ``HfArgumentParser((TrainingArguments, GraphckptArguments))``."""

    graphckpt_rule: str | None = field(
        default="full", metadata={"help": "rule of every selected block: full, selective, keep, or none for no rule"}
    )
    graphckpt_select: str | None = field(
        default=None, metadata={"help": "class name or name pattern of the blocks; all layers if left out"}
    )
    graphckpt_policies: str | None = field(
        default=None, metadata={"help": """on top of that, as JSON: '{"*.h.0": false, "*.h.1": "selective"}'"""}
    )
    graphckpt_memory_budget: str | None = field(
        default=None,
        metadata={
            "help": "plan policies for this peak, in place of a rule: 12GiB, 50%% of the device, 0.6 of the step, max"
        },
    )
    graphckpt_offload: str | None = field(default=None, metadata={"help": "cpu, disk, or disk:/a/folder"})
    graphckpt_contiguous: bool | None = field(default=None, metadata={"help": "whether saved tensors are in one slab"})

    graphckpt_determinism_check: str | None = field(
        default=None,
        metadata={
            "help": "what is compared in a recomputation: none, default (shapes, dtypes and the values of some calls), "
            "or values (those of every call)"
        },
    )
    graphckpt_unit: str | None = field(default=None, metadata={"help": "deprecated: graphckpt_select"})
    graphckpt_blocks: str | None = field(default=None, metadata={"help": "deprecated: graphckpt_policies"})

    def keys(self) -> dict[str, Any]:
        """Returns the arguments of :class:`GraphckptCallback`.

        Raises:
            ConfigError: ``graphckpt_policies`` is not a JSON object.

        >>> GraphckptArguments(graphckpt_policies='{"*.h.0": false}', graphckpt_offload="disk").keys()
        {'rule': 'full', 'select': None, 'policies': {'*.h.0': False}, 'offload': 'disk'}
        """
        named = {name: getattr(self, name) for name in _NEW_ARGUMENTS.values()}
        named |= {name: value for name in _NEW_ARGUMENTS if (value := getattr(self, name)) is not None}
        rename(named, _NEW_ARGUMENTS, "GraphckptArguments")
        rule: Any = None if self.graphckpt_rule == "none" else self.graphckpt_rule
        fields = {
            "offload": self.graphckpt_offload,
            "contiguous": self.graphckpt_contiguous,
            "determinism_check": self.graphckpt_determinism_check,
        }
        set_fields = {name: value for name, value in fields.items() if value is not None}
        if self.graphckpt_memory_budget is not None:
            rule = True if rule == "full" else rule
            set_fields["memory_budget"] = self.graphckpt_memory_budget
        return {
            "rule": rule,
            "select": named["graphckpt_select"],
            "policies": _policies(named["graphckpt_policies"]),
            **set_fields,
        }


def _policies(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    fix = """fix: write it as '{"*.h.0": false}'"""
    try:
        policies = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"graphckpt_policies: expected a JSON object: {error} · {fix}") from None
    if not isinstance(policies, dict):
        raise ConfigError(f"graphckpt_policies: expected a JSON object, got {policies!r} · {fix}")
    return policies
