"""Builds the trainer that a config describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from graphckpt.config.files import LazyConfig
from graphckpt.config.schema import RunConfig, model_of, optimizer_of
from graphckpt.config.source import ConfigSource, sets
from graphckpt.errors import ConfigError
from graphckpt.train.loop import HookBase
from graphckpt.train.output import replacing
from graphckpt.train.snapshot.saved_run import CONFIG
from graphckpt.train.tasks.base import Task
from graphckpt.train.trainer import Trainer


def trainer_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    fast_dev_run: bool = False,
    resume: bool = False,
    eval_only: bool = False,
) -> Trainer:
    """Returns the trainer that a config file and overrides describe. It saves the config in its output folder.

    Args:
        config_file: a path, or the name of a packaged config such as ``"configs/quickstart.py"``.
        overrides: words such as ``"optim.lr=3e-4"``; they win over the file and over ``fast_dev_run``.
        fast_dev_run: a run of a few small iterations, in a temporary folder unless ``overrides`` name one; its report
            says what was made smaller.
        resume: resume from the last snapshot in the output folder.
        eval_only: the trainer will evaluate and not train; the config in its output folder stays.

    Raises:
        ConfigError: with every fault.
    """
    source = ConfigSource(config_file, overrides, fast_dev_run=fast_dev_run)
    scratch = fast_dev_run and not eval_only and not sets(source.overrides, "train.output_dir")
    if scratch and resume:
        fix = "leave one of them out, or name the folder of the run: train.output_dir=..."
        raise ConfigError(f"--fast-dev-run: writes to a temporary folder, which has nothing to --resume · fix: {fix}")
    lines = list(source.trial_lines)
    with source.checked() as run:
        if resume and run.train.overwrite:
            raise ConfigError("train.overwrite: True is not supported with --resume · fix: leave one of them out")
        if run.train.activation_checkpoint.fit is not None and not eval_only:
            from graphckpt.config.run import fit_run  # noqa: PLC0415 - loads the planner

            lines += fit_run(run, source.config, resume=resume)
    with source.checked() as run:  # with the sizes that the fit has chosen
        trainer = _trainer(
            run,
            resume=resume,
            eval_only=eval_only,
            scratch=scratch,
            write_config=lambda folder: _write_config(source, folder),
        )
    if scratch:
        lines.append(f"--fast-dev-run writes to {trainer.folder}, which stays until you remove it")
    for line in lines:
        trainer.report.line(line)
    return trainer


def _write_config(source: ConfigSource, folder: Path) -> None:
    """Saves the config for resuming the run, without ``overwrite``."""
    OmegaConf.update(source.config, "train.output_dir", str(folder))
    # With it, a resume by this copy would be refused, and a run by it would replace the one that it belongs to.
    if OmegaConf.select(source.config, "train.overwrite"):
        OmegaConf.update(source.config, "train.overwrite", value=False)
    source.set_import_from()
    with replacing(folder / CONFIG) as fresh:
        LazyConfig.save(source.config, fresh)


def _trainer(run: RunConfig, **options: Any) -> Trainer:
    data, task = run.data(), run.task()
    hooks = tuple(hook() for hook in run.hooks)
    if faults := list(_wrong_kinds(data, task, hooks)):
        raise ConfigError("\n".join(faults))
    return Trainer(
        run.train,
        make_model=partial(model_of, run),
        make_optimizer=lambda model: optimizer_of(run, model),
        data=data,
        task=task,
        hooks=hooks,
        **options,
    )


def _wrong_kinds(data: object, task: object, hooks: Iterable[object]) -> Iterator[str]:
    if not callable(getattr(data, "open", None)):
        fix = "wrap your data sets in graphckpt.train.OwnData(train=..., heldout=...)"
        yield f"data: expected an object with a method open, got {type(data).__name__} · fix: {fix}"
    if not isinstance(task, Task):
        yield f"task: expected a Task, got {type(task).__name__} · fix: call a class of graphckpt.train.tasks"
    for number, hook in enumerate(hooks):
        if not isinstance(hook, HookBase):
            fix = "call a class derived from graphckpt.train.HookBase"
            yield f"hooks[{number}]: expected a HookBase, got {type(hook).__name__} · fix: {fix}"
