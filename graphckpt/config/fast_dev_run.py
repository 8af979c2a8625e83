"""Shrinks a config to a run that only checks whether all parts work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from graphckpt.config import overrides as _overrides
from graphckpt.config.lazy import try_get_key
from graphckpt.errors import ConfigError
from graphckpt.train.batch_sizes import batch_sizes
from graphckpt.train.settings import TrainConfig

_ITERATIONS = 3  # of libai's 20: the second is the first that holds all of AdamW's state, the third starts from it
_SET = {
    "train.train_epoch": 0,
    "train.train_samples": None,
    "train.log_period": 1,
    "train.evaluation.eval_after_n_epoch": None,
    "train.activation_checkpoint.fit": None,
}
_AT_MOST = {
    "train.train_iter": _ITERATIONS,
    "train.evaluation.eval_period": 2,
    "train.evaluation.eval_iter": 2,
    "train.test_micro_batch_size": 2,
}
_MICRO, _ACCUMULATION = "train.train_micro_batch_size", "train.num_accumulation_steps"
_GLOBAL = "train.global_batch_size"
_BATCH_AT_MOST = 2  # the least that still shows a mix-up of samples and forwards
_MISSING = object()


def shrink(config: DictConfig, overrides: Iterable[str]) -> list[str]:
    """Changes ``config`` in place, except keys in ``overrides``, and returns the lines that describe the changes.

    Args:
        config: the whole config, with the overrides in it.
        overrides: words of the command line, which win.

    >>> config = OmegaConf.create({"train": {"train_iter": 7, "train_micro_batch_size": 16}})
    >>> lines = shrink(config, ["train.train_iter=7"])
    >>> config.train.train_iter, config.train.train_micro_batch_size
    (7, 2)
    >>> lines[1:3]
    ['  train.train_micro_batch_size=2  (else 16)', '  train.evaluation.eval_period=2  (else 1000)']
    """
    if not isinstance(try_get_key(config, "train"), DictConfig):
        return []  # a fault, which the schema names
    given = OmegaConf.create({})
    _overrides.apply(given, overrides)
    changes: list[str] = []
    for key, value in _wanted(config, given):
        before = try_get_key(config, key, default=_default(key))
        if try_get_key(given, key, default=_MISSING) is _MISSING and before != value:
            changes.append(f"  {key}={_word(value)}  (else {_word(before)})")
            OmegaConf.update(config, key, value, force_add=True)
    if not changes:
        return []
    return ["--fast-dev-run made the run smaller; key=value on the command line wins over these:", *changes]


def is_given(overrides: Iterable[str], key: str) -> bool:
    """Returns whether overrides set ``key``, directly or within a section.

    >>> is_given(["train={output_dir: here}"], "train.output_dir"), is_given(["train.seed=1"], "train.output_dir")
    (True, False)
    """
    given = OmegaConf.create({})
    _overrides.apply(given, overrides)
    return try_get_key(given, key, default=_MISSING) is not _MISSING


def _wanted(config: DictConfig, given: DictConfig) -> Iterator[tuple[str, Any]]:
    yield from _batch(config, given)
    for key, most in _AT_MOST.items():
        value = try_get_key(config, key, default=_default(key))
        if value is None or (isinstance(value, int | float) and value > most):
            yield key, most
    yield from _SET.items()
    if try_get_key(config, "train.amp.enabled", default=False) is True and _is_on_cpu(config):
        yield "train.amp.enabled", False  # emulated on many CPUs, where it takes several times as long


def _batch(config: DictConfig, given: DictConfig) -> Iterator[tuple[str, Any]]:
    if try_get_key(given, _GLOBAL, default=_MISSING) is not _MISSING:
        return  # who asks for so many samples means it
    micro, accumulation, whole = (
        try_get_key(config, key, default=_default(key)) for key in (_MICRO, _ACCUMULATION, _GLOBAL)
    )
    data_parallel = try_get_key(config, "train.dist.data_parallel_size", default=1)
    if not all(value is None or (isinstance(value, int) and value >= 1) for value in (micro, accumulation, whole)):
        return  # a fault, which the schema names
    try:
        sizes = batch_sizes(
            micro_batch=micro, global_batch=whole, accumulation=accumulation, data_parallel=data_parallel
        )
    except (ConfigError, TypeError):
        return  # and so is this
    yield _MICRO, min(sizes.micro_batch, _BATCH_AT_MOST)
    if sizes.accumulation > 1:
        yield _ACCUMULATION, _BATCH_AT_MOST
    yield _GLOBAL, None


def _is_on_cpu(config: DictConfig) -> bool:
    device = try_get_key(config, "train.device")
    return device == "cpu" if device is not None else not torch.cuda.is_available()


def _default(key: str) -> Any:
    return attrgetter(key.removeprefix("train."))(TrainConfig())


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
