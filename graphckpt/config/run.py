"""Builds a trainer from a config file and overrides."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from graphckpt.config import overrides as _overrides
from graphckpt.config import own_modules
from graphckpt.config.fast_dev_run import is_given, shrink
from graphckpt.config.fit_run import fit_run
from graphckpt.config.instantiate import DeferredCall, is_call
from graphckpt.config.lazy import LazyConfig
from graphckpt.config.load import load
from graphckpt.config.packaged import existing
from graphckpt.config.schema import RunConfig, checked
from graphckpt.errors import ConfigError
from graphckpt.train.files import replacing
from graphckpt.train.loop import HookBase
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
    """Returns the trainer that a config file and overrides describe. It saves the config beside its results.

    Args:
        config_file: a path, or the name of a packaged config such as ``"configs/quickstart.py"``.
        overrides: words such as ``"optim.lr=3e-4"``; they win over the file and over ``fast_dev_run``.
        fast_dev_run: a run of a few small iterations, in a temporary folder unless ``overrides`` name one; its report
            says what was made smaller.
        resume: resume from the last snapshot in the output folder.
        eval_only: the trainer will evaluate and not train; the config beside its results stays.

    Raises:
        ConfigError: with every fault.
        SnapshotError: there is nothing to resume, or it is broken.
    """
    path = existing(Path(config_file))
    config = load(path)
    overrides = list(overrides)
    faults = _overrides.apply(config, overrides)
    smaller = shrink(config, overrides) if fast_dev_run else []
    scratch = fast_dev_run and not eval_only and not is_given(overrides, "train.output_dir")
    if scratch and resume:
        fix = "leave one of them out, or name the folder of the run: train.output_dir=..."
        raise ConfigError(f"--fast-dev-run: writes to a temporary folder, which has nothing to --resume · fix: {fix}")
    with checked(config, faults, path, overrides) as (asked, places):
        if resume and asked.train.overwrite:
            raise ConfigError("train.overwrite: True is not supported with --resume · fix: leave one of them out")
        chosen: list[str] = []
        if asked.train.activation_checkpoint.fit is not None and not eval_only:
            chosen = fit_run(asked, config, partial(optimizer_of, asked), resume=resume)
    with checked(config, faults, path, overrides) as (run, places):
        trainer = _trainer(
            run,
            resume=resume,
            eval_only=eval_only,
            scratch=scratch,
            write_config=lambda folder: _write_config(config, places, folder),
        )
    for line in [*smaller, *chosen]:
        trainer.report.line(line)
    if scratch:
        trainer.report.line(f"--fast-dev-run writes to {trainer.folder}, which stays until you remove it")
    return trainer


def _write_config(config: DictConfig, places: list[Path], folder: Path) -> None:
    """Saves the config for resuming the run, without ``overwrite``."""
    OmegaConf.update(config, "train.output_dir", str(folder))
    if OmegaConf.select(config, "train.overwrite"):
        OmegaConf.update(config, "train.overwrite", value=False)
    own_modules.remember(config, places)
    with replacing(folder / CONFIG) as fresh:
        LazyConfig.save(config, fresh)


def optimizer_of(run: RunConfig, model: nn.Module, device: str | None = None) -> Optimizer:
    """Returns the optimizer that a config describes, for ``model``; ``device`` is the device type."""
    assert isinstance(run.optim, DeferredCall)
    described = run.optim.arguments.get("params")
    params = DeferredCall.read(described, "optim.params")(model=model) if is_call(described) else model.parameters()
    kind = device or next((weight.device.type for weight in model.parameters() if not weight.is_meta), "cpu")
    is_scaled = run.train.amp.enabled and run.train.amp.dtype == "float16"
    fast = {} if is_scaled else fast_settings(run.optim, kind)
    optimizer: object = run.optim(params=params, **fast)
    if not isinstance(optimizer, Optimizer):
        found = type(optimizer).__name__
        raise ConfigError(f"optim: expected an Optimizer, got {found} · fix: call a class of optimizers")
    return optimizer


def fast_settings(optim: DeferredCall, device: str) -> dict[str, bool]:
    """Returns ``fused`` and ``capturable`` for an optimizer of PyTorch on CUDA, unless set in the config.

    >>> from torch.optim import SGD, AdamW
    >>> fast_settings(DeferredCall(AdamW, {}), "cuda"), fast_settings(DeferredCall(AdamW, {}), "cpu")
    ({'fused': True, 'capturable': True}, {})
    >>> fast_settings(DeferredCall(AdamW, {"foreach": True}), "cuda"), fast_settings(DeferredCall(SGD, {}), "cuda")
    ({'capturable': True}, {'fused': True})
    """
    if device != "cuda" or not isinstance(optim.target, type):
        return {}
    known = inspect.signature(optim.target).parameters
    free = [name for name in ("fused", "capturable") if name in known and name not in optim.arguments]
    return {name: True for name in free if name != "fused" or "foreach" not in optim.arguments}


def _trainer(run: RunConfig, **how: Any) -> Trainer:
    def make_model() -> nn.Module:
        model: object = run.model()
        if not isinstance(model, nn.Module):
            found = type(model).__name__
            raise ConfigError(f"model: expected an nn.Module, got {found} · fix: call a class of modules")
        return model

    data, task = run.data(), run.task()
    hooks = tuple(hook() for hook in run.hooks)
    if faults := list(_wrong_kinds(data, task, hooks)):
        raise ConfigError("\n".join(faults))
    return Trainer(
        run.train,
        make_model=make_model,
        make_optimizer=lambda model: optimizer_of(run, model),
        data=data,
        task=task,
        hooks=hooks,
        **how,
    )


def _wrong_kinds(data: object, task: object, hooks: Iterable[object]) -> Iterator[str]:
    if not callable(getattr(data, "open", None)):
        fix = "wrap data sets of your own in graphckpt.train.OwnData(train=..., heldout=...)"
        yield f"data: expected an object with a method open, got {type(data).__name__} · fix: {fix}"
    if not isinstance(task, Task):
        yield f"task: expected a Task, got {type(task).__name__} · fix: call a class of graphckpt.train.tasks"
    for number, hook in enumerate(hooks):
        if not isinstance(hook, HookBase):
            fix = "call a class derived from graphckpt.train.HookBase"
            yield f"hooks[{number}]: expected a HookBase, got {type(hook).__name__} · fix: {fix}"
