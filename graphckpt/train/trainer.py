"""The trainer: builds data, model, graphs and hooks, and runs them."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.engine.values import report_differences
from graphckpt.errors import ConfigError, GraphError, first_line
from graphckpt.graph.out_of_memory import is_out_of_memory
from graphckpt.train.build_model import BuiltModel, EvalGraph, TrainGraph, build_model, check_task
from graphckpt.train.data.samples import (
    Opened,
    Prefetcher,
    ShuffledOrder,
    heldout_batches,
    synchronize,
    to_device,
)
from graphckpt.train.data.text_data import Data
from graphckpt.train.hooks.evaluate import EvalHook, format_metrics
from graphckpt.train.hooks.log import LogHook
from graphckpt.train.hooks.metrics import ExplainHook, MetricsHook, TensorBoardHook, WandbHook
from graphckpt.train.hooks.snapshot import BestHook, SnapshotHook, SnapshotWriter, export
from graphckpt.train.loop import HookBase, Loop, TrainError, attribute_errors
from graphckpt.train.output import Report
from graphckpt.train.parallel.ranks import TrainRanks, check_world_size, resolve_device
from graphckpt.train.policies import plan_on_batch, replan_on_out_of_memory
from graphckpt.train.settings import TrainConfig
from graphckpt.train.snapshot.run_state import RunState
from graphckpt.train.snapshot.saved_run import (
    LOG,
    METRICS,
    PICTURE,
    SavedRun,
    TrainResult,
    weights_folder,
    writing_to,
    written_files,
)
from graphckpt.train.snapshot.weights import load_weights, read_weights, tensors_of
from graphckpt.train.tasks.base import Task

# Note [Order of a run]
#
#    step of `_train`                  why it comes there
# 1  lock the folder, find the         A folder that is in use, or has nothing to resume, is refused before the model is
#    snapshot                          built, which may take minutes.
# 2  build the model, shard it         Sharding replaces parameters: the optimizer must get the new ones.
# 3  load `train.load_weight`          An optimizer may copy weights when it is created.
# 4  create optimizer and policies     Faults of the config end the run before text is tokenized, which may take hours.
# 5  open the data                     The number of samples gives that of iterations, for the schedule of step 6.
# 6  create graph and run state        The state records the settings that this run begins with: before `restore`, which
#                                      replaces them by those of the snapshot.
# 7  create the loop and its hooks     `restore` sets their state too.
# 8  restore                           Sets the random generators last: what draws after it would shift the run.
# 9  plan for the memory budget        On the next batch, with the optimizer's states. It restores all that its steps
#                                      change, and the loop reads the same batch again.
# 10 loop                              The first file is written after its first iteration: see `_StartHook`.
#
# So a model that does not fit, or a batch that cannot be read, leaves the folder, and a run in it, as they were.


class Trainer:
    """Trains a model on a task.

    Args:
        settings: the section ``train`` of a config.
        make_model: returns the model; called after seeding.
        make_optimizer: returns the optimizer of the model, which is on its device already.
        data: the data to train on.
        task: computes losses and metrics.
        report: output of the run; by default the console and ``log.txt`` in the output folder.
        hooks: further hooks, which run after the trainer's hooks and before a snapshot is taken.
        resume: resume from the last snapshot in the output folder.
        eval_only: change nothing in the output folder; only ``evaluate`` will be called.
        scratch: write to a new temporary folder instead of ``train.output_dir``.
        write_config: writes the config into the given folder; called once the run has begun.

    Raises:
        ConfigError: the device cannot be used.
    """

    def __init__(
        self,
        settings: TrainConfig,
        *,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], Optimizer],
        data: Data,
        task: Task,
        report: Report | None = None,
        hooks: tuple[HookBase, ...] = (),
        resume: bool = False,
        eval_only: bool = False,
        scratch: bool = False,
        write_config: Callable[[Path], None] | None = None,
    ) -> None:
        self.settings = settings
        self._make_model = make_model
        self._make_optimizer = make_optimizer
        self._data = data
        self._task = task
        self._more_hooks = hooks
        self.folder = Path(settings.output_dir).expanduser()
        self.device = resolve_device(settings.device, settings.dist)
        check_world_size(settings.dist)
        self.ranks = TrainRanks(settings.dist, self.device)
        if scratch:
            with writing_to(self.folder):
                folder = tempfile.mkdtemp(prefix="graphckpt-") if self.ranks.is_main else ""
            self.folder = Path(self.ranks.broadcast(folder))
        self.saved = SavedRun(
            self.folder, resume=resume, overwrite=settings.overwrite, batch_size=self.batch_size, ranks=self.ranks
        )
        if write_config is not None:
            self.saved.at_start(partial(write_config, self.folder))
        log = self.folder / LOG
        # An evaluation adds to the log of a run, and begins none.
        log_file = log if log.exists() or not eval_only else None
        default = Report(log_file=log_file, waits=not eval_only) if self.ranks.is_main else Report.silent()
        self.report = report or default

    @property
    def batch_size(self) -> int:
        """Samples in one iteration."""
        return self.settings.sizes.global_batch

    def train(self) -> TrainResult:
        """Prepares the data, trains, and writes the results.

        Raises:
            ConfigError: the output folder cannot be written, another process trains there, or another run is there.
            SnapshotError: no snapshot was found to resume from, or it is damaged.
            GraphckptError: the config is invalid, there is too little text or memory, or the loss is not finite.
        """
        with self.saved.locked():
            return self._train()

    def _train(self) -> TrainResult:
        settings = self.settings
        built = build_model(self._make_model, self._task, settings, self.ranks, self.device)
        if settings.load_weight and not self.saved.source:
            self._load(built.model, Path(settings.load_weight).expanduser(), "train.load_weight")
        optimizer = self._make_optimizer(built.model)
        blocks = built.block_fields()  # raises before the data is prepared, which may take long
        opened = self._open(built.model)
        train_iter = settings.iterations(len(opened.train))
        graph = self._train_graph(built, optimizer, blocks, train_iter)
        self.report.line(
            f"model: {built.architecture}, {sum(parameter.numel() for parameter in built.model.parameters()):,} "
            f"parameters on {self.ranks.describe(self.device)}; {train_iter} iterations of {self.batch_size} samples"
            + (f" x {opened.tokens_each} tokens" if opened.text else "")
        )
        state = RunState(built.model, graph, optimizer, self.device, ranks=self.ranks, seed=settings.seed)
        writer = self._snapshot_writer(built, opened, state)
        order = ShuffledOrder(num_sequences=len(opened.train), seed=settings.seed)

        def read(iteration: int) -> dict[str, Tensor]:
            start = settings.consumed_train_samples + self.saved.consumed_samples(iteration)
            return opened.train.batch(self.ranks.local_samples(order.take(start=start, count=self.batch_size)))

        # The order is a function of the number of samples consumed, not of batches drawn: a resume begins where the run
        # was.
        step = _Step(graph, Prefetcher(read, self.device, train_iter), self.ranks)
        loop = step.loop = Loop(
            step,
            train_iter=train_iter,
            report=self.report,
            hooks=list(self._hooks(built, optimizer, graph, opened, writer)),
            start_iter=self.saved.start_iter,
            agree=self.ranks.any,
            synchronize=partial(synchronize, self.device),
        )
        section = settings.activation_checkpoint
        with (
            _explain_out_of_memory(micro_batch=settings.sizes.micro_batch, is_checkpointed=section.enabled),
            self.ranks.translate_errors(),
        ):
            self.saved.restore(state, loop, data=writer.data, report=self.report)
            if section.memory_budget is not None and loop.done < train_iter:
                with attribute_errors(_KEYS, "planning"):
                    batch = step.batches.get(loop.done)
                    plan_on_batch(graph, section, self.ranks, built.runs, self.report, self.saved, batch)
            loop.run()
            # Value checks on CUDA are copied to the host without a wait: the last ones are read here, and may raise.
            report_differences()
        # Without an iteration the folder may still have the files of a run that was to be overwritten.
        files = written_files(self.folder) if self.saved.has_begun or self.saved.source else {}
        result = TrainResult(iterations=loop.done, is_stopped=loop.is_stopped, files=files)
        self.report.show(result.table())
        return result

    def _train_graph(
        self, built: BuiltModel, optimizer: Optimizer, blocks: dict[str, dict[str, Any]], train_iter: int
    ) -> TrainGraph:
        settings = self.settings
        warmup_iter = math.ceil(train_iter * settings.warmup_ratio)
        scheduler = settings.scheduler(optimizer=optimizer, max_iter=train_iter, warmup_iter=warmup_iter)
        try:
            graph = TrainGraph(built, optimizer, scheduler, blocks)
            graph._step.name = Path(settings.output_dir).name or graph.name  # the run's, in tables and messages
        except GraphError as error:
            raise ConfigError(f"optim, train.scheduler: {error}") from error
        section = settings.activation_checkpoint
        if section.on_out_of_memory == "replan" and settings.dist.num_processes == 1:  # ranks would wait for each other
            replan_on_out_of_memory(graph, section)
        return graph

    def _snapshot_writer(self, built: BuiltModel, opened: Opened, state: RunState) -> SnapshotWriter:
        tokenizer_file = opened.tokenizer_file
        tokens = tokenizer_file.parent.name if tokenizer_file else None  # a hash of text and tokenizer
        companions = partial(export, built.model, built.architecture, tokenizer_file, seq_length=opened.tokens_each)
        with attribute_errors("model", "saving its config"), tempfile.TemporaryDirectory() as trial:
            companions(Path(trial))  # fails before the run instead of at its end
        return SnapshotWriter(
            self.saved,
            state,
            data={"num_samples": len(opened.train), "tokens_each": opened.tokens_each, "tokens": tokens},
            companions=companions,
            is_async=self.settings.checkpointer.async_save,
        )

    def evaluate(self) -> dict[str, float]:
        """Evaluates ``train.load_weight`` or the last snapshot on held-out samples; prints and returns the metrics.

        Raises:
            GraphckptError: there are no weights, they belong to another model, or nothing is held out.
        """
        folder = weights_folder(self.settings.load_weight, self.folder)
        built = build_model(self._make_model, self._task, self.settings, self.ranks, self.device)
        self._load(built.model, folder, str(folder))
        hook = self._eval_hook(built, self._open(built.model))
        if hook is None:
            raise ConfigError("data: expected held-out samples, got none · fix: hold some of the data out")
        with self.ranks.translate_errors():
            metrics = hook.measure()
        self.report.line(f"{folder}: held-out {format_metrics(metrics)}", "bold")
        return metrics

    def _load(self, model: nn.Module, folder: Path, where: str) -> None:
        load_weights(model, read_weights(folder, like=tensors_of(model), group=self.ranks.control), where)

    def _open(self, model: nn.Module) -> Opened:
        with self.ranks.main_first(), attribute_errors("data", "opening it"):
            opened = self._data.open(self._task, seed=self.settings.seed, report=self.report)
        check_task(self._task, model, opened)
        return opened

    def _hooks(
        self, built: BuiltModel, optimizer: Optimizer, graph: TrainGraph, opened: Opened, writer: SnapshotWriter
    ) -> Iterator[HookBase]:
        settings = self.settings
        # The order matters. The log adds metrics, and raises for a loss that is not finite before anything is saved.
        # Evaluation adds other rows. Rows are written before snapshots: if the process is killed after a snapshot, all
        # iterations in it have their rows, and a resume drops those of later ones (`cut_metrics`). BestHook comes
        # before SnapshotHook, which saves its state. The picture is drawn after the final snapshot, so that a failure
        # costs only the picture, and before TensorBoard adds it to its events.
        yield _StartHook(self.saved.begin)
        yield LogHook(
            optimizer,
            device=self.device,
            log_period=settings.log_period,
            batch_size=self.batch_size,
            seq_length=opened.tokens_each,
            consumed_samples=self.saved.consumed_samples,
        )
        eval_hook = self._eval_hook(built, opened) if settings.evaluation.enabled else None
        if eval_hook:
            yield eval_hook
        if self.ranks.is_main:
            yield MetricsHook(self.folder / METRICS)
        if settings.wandb.enabled and self.ranks.is_main:
            yield WandbHook(settings.wandb, self.folder, self.saved.run)
        yield from self._more_hooks
        if eval_hook:
            metric, mode = settings.evaluation.eval_metric, settings.evaluation.eval_mode
            yield BestHook(writer.save, metric=metric or self._task.metric, mode=mode or self._task.metric_mode)
        snapshots = settings.checkpointer
        yield SnapshotHook(
            writer,
            period=settings.period(snapshots.period, snapshots.save_model_after_n_epoch, len(opened.train)),
            max_to_keep=snapshots.max_to_keep,
        )
        if self.ranks.is_main:
            yield ExplainHook(graph, self.folder / PICTURE)
        if settings.tensorboard and self.ranks.is_main:
            yield TensorBoardHook(self.folder)

    def _eval_hook(self, built: BuiltModel, opened: Opened) -> EvalHook | None:
        heldout = opened.heldout
        if heldout is None:
            return None
        settings, evaluation, ranks = self.settings, self.settings.evaluation, self.ranks
        eval_graph = EvalGraph(built)

        def batches() -> Iterator[tuple[dict[str, Tensor], bool]]:
            size, num_ranks = settings.test_micro_batch_size, settings.dist.data_parallel_size
            for batch, counts in heldout_batches(
                heldout, size=size, limit=evaluation.eval_iter, rank=ranks.data_rank, num_ranks=num_ranks
            ):
                yield to_device(batch, self.device), counts

        return EvalHook(
            lambda batch: eval_graph(**batch),
            batches,
            self._task.metrics,
            model=built.model,
            eval_period=settings.period(evaluation.eval_period, evaluation.eval_after_n_epoch, len(opened.train)),
            over_ranks=ranks.sum,
        )


@final
class _StartHook(HookBase):
    """Starts to write after the first iteration, before all other hooks: a run that cannot start writes nothing."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin: Callable[[int], None] | None = begin

    def after_step(self, loop: Loop) -> None:
        if self._begin is not None:
            self._begin(loop.start_iter - 1)
            self._begin = None
            loop.report.open_log()


# The keys of a config that name code of the user's. An error of a step cannot be told apart further: all of it runs in
# one graph, so its message has all of them, with the file and line that raised.
_KEYS = "model, task, data, optim, train.scheduler"


@final
@dataclass(eq=False)
class _Step:
    """Reads a batch, updates the weights, and returns the losses of the iteration, means over the processes."""

    graph: TrainGraph
    batches: Prefetcher
    ranks: TrainRanks
    loop: Loop | None = None
    """Receives the seconds that the step waited for its data."""

    def __call__(self, iteration: int) -> dict[str, Tensor]:
        with attribute_errors(_KEYS, f"iteration {iteration + 1}"), self.ranks.translate_errors():
            started = time.perf_counter()
            batch = self.batches.get(iteration)
            if self.loop is not None:
                self.loop.data_seconds = time.perf_counter() - started
            # This order hides the data behind the device: the host launches the step, reads and copies the next batch
            # while it runs, and only then needs a value of it, if a hook reads the losses.
            losses: dict[str, Tensor] = self.graph(**batch)
            self.batches.prefetch(iteration + 1)
            # Means over all ranks, so that a loss that is not finite ends the run on each in the same iteration.
            return self.ranks.average({name: loss.mean() for name, loss in losses.items()})


@contextmanager
def _explain_out_of_memory(*, micro_batch: int, is_checkpointed: bool) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fixes = [] if is_checkpointed else ["train.activation_checkpoint.enabled=True"]
        if micro_batch > 1:
            fixes.append(f"a train.train_micro_batch_size below {micro_batch}, with more train.num_accumulation_steps")
        fix = ", or ".join(fixes) or "use a smaller model, shorter samples, or a device with more memory"
        # The last note is that of the graph, about a plan that does not fit; its fix would repeat this one.
        notes = "".join(f" ({note.partition(' · fix: ')[0]})" for note in getattr(error, "__notes__", ())[-1:])
        raise TrainError(f"memory ran out: {first_line(error)} · fix: {fix}{notes}") from error
