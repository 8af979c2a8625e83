"""From a config file and overrides to a trainer that is ready to start."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from graphckpt.config import overrides as _overrides
from graphckpt.config import own_modules
from graphckpt.config.fast_dev_run import shrink
from graphckpt.config.instantiate import Call, is_call
from graphckpt.config.lazy import LazyConfig
from graphckpt.config.load import importable_from, load
from graphckpt.config.packaged import find
from graphckpt.config.schema import RunConfig, checked
from graphckpt.errors import ConfigError
from graphckpt.train.saved import CONFIG, unwritable
from graphckpt.train.tasks import Task
from graphckpt.train.trainer import Trainer


def trainer_from(
    config_file: str | Path,
    overrides: Iterable[str] = (),
    *,
    fast_dev_run: bool = False,
    resume: bool = False,
    eval_only: bool = False,
) -> Trainer:
    """Returns the trainer that a config file and overrides describe; saves the config beside its results.

    Args:
        config_file: a path, or the name of a packaged config such as ``"configs/quickstart.py"``.
        overrides: words such as ``"optim.lr=3e-4"``; they win over the file and over ``fast_dev_run``.
        fast_dev_run: a run of a few small iterations; its report says what was made smaller.
        resume: go on from the last snapshot in the output folder.
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
    places, more = own_modules.folders(config, path)
    faults += more
    with importable_from(*places):
        run = checked(config, faults, str(path))
        trainer = _trainer(run, resume=resume, eval_only=eval_only)
    if not eval_only and trainer.ranks.is_main:
        own_modules.remember(config, places)
        try:
            LazyConfig.save(config, trainer.folder / CONFIG)
        except OSError as error:
            raise unwritable(trainer.folder, error) from error
    for line in smaller:
        trainer.report.line(line)
    return trainer


def existing(path: Path) -> Path:
    """Returns ``path``, or the packaged config of this name where there is no checkout around."""
    if path.exists() or path.is_absolute():
        return path
    try:
        return find(path.relative_to("configs").as_posix() if path.parts[:1] == ("configs",) else path.as_posix())
    except ConfigError as error:
        raise ConfigError(f"{path}: no such config file; {error}") from error


def optimizer_of(run: RunConfig, model: nn.Module, device: str | None = None) -> Optimizer:
    """Returns the optimizer that a config describes, for ``model``; ``device`` is the kind that it will run on."""
    assert isinstance(run.optim, Call)
    described = run.optim.arguments.get("params")
    params = Call.read(described, "optim.params")(model=model) if is_call(described) else model.parameters()
    kind = device or next((weight.device.type for weight in model.parameters() if not weight.is_meta), "cpu")
    is_scaled = run.train.amp.enabled and run.train.amp.dtype == "float16"
    fast = {} if is_scaled else fast_settings(run.optim, kind)
    optimizer: Optimizer = run.optim(params=params, **fast)
    return optimizer


def fast_settings(optim: Call, device: str) -> dict[str, bool]:
    """Returns what lets an optimizer of PyTorch step in one kernel, and within a CUDA graph, unless the config says.

    >>> from torch.optim import SGD, AdamW
    >>> fast_settings(Call(AdamW, {}), "cuda"), fast_settings(Call(AdamW, {}), "cpu")
    ({'fused': True, 'capturable': True}, {})
    >>> fast_settings(Call(AdamW, {"foreach": True}), "cuda"), fast_settings(Call(SGD, {}), "cuda")
    ({'capturable': True}, {'fused': True})
    """
    if device != "cuda" or not isinstance(optim.target, type):
        return {}
    known = inspect.signature(optim.target).parameters
    free = [name for name in ("fused", "capturable") if name in known and name not in optim.arguments]
    return {name: True for name in free if name != "fused" or "foreach" not in optim.arguments}


def _trainer(run: RunConfig, *, resume: bool, eval_only: bool) -> Trainer:
    def make_model() -> nn.Module:
        model: object = run.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: {type(model).__name__} is no nn.Module · fix: call a class of modules")
        return model

    data, task = run.data(), run.task()
    if faults := list(_wrong_kinds(data, task)):
        raise ConfigError("\n".join(faults))
    return Trainer(
        run.train,
        make_model=make_model,
        make_optimizer=lambda model: optimizer_of(run, model),
        data=data,
        task=task,
        resume=resume,
        eval_only=eval_only,
    )


def _wrong_kinds(data: object, task: object) -> Iterator[str]:
    if not callable(getattr(data, "open", None)):
        fix = "wrap data sets of your own in graphckpt.train.own_data.OwnData(train=..., heldout=...)"
        yield f"data: {type(data).__name__} cannot be opened · fix: {fix}"
    if not isinstance(task, Task):
        yield f"task: {type(task).__name__} is no task · fix: call a class of graphckpt.train.tasks"
