"""The schema of a run's config: keys and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer

from graphckpt.config.instantiate import DeferredCall, is_call
from graphckpt.config.typed import read_section
from graphckpt.errors import ConfigError, bullets
from graphckpt.train.data.text_data import Data
from graphckpt.train.loop import HookBase
from graphckpt.train.settings import TrainConfig
from graphckpt.train.tasks.base import Task
from graphckpt.train.tasks.causal_lm import CausalLM


@final
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A checked config, before its calls are made."""

    train: TrainConfig
    model: Callable[..., nn.Module]
    optim: Callable[..., Optimizer]
    data: Callable[..., Data]
    task: Callable[..., Task] = CausalLM
    """The task; causal language modeling by default."""
    hooks: list[Callable[..., HookBase]] = field(default_factory=list)
    """Additional hooks. They run after the trainer's, in this order, and before a snapshot is taken."""
    import_from: str | None = None
    """Folder of the modules named in the config, if they are neither installed nor beside its file."""

    def faults(self) -> Iterator[str]:
        """Yields a fault for ``optim.params`` that is not a call taking the model."""
        params = self.optim.arguments.get("params") if isinstance(self.optim, DeferredCall) else None
        if params is not None and not is_call(params):
            fix = "write LazyCall(get_default_optimizer_params)(...), which takes the model, or leave the key out"
            yield f"optim.params: expected a call, got {params!r} · fix: {fix}"


def check(config: DictConfig) -> tuple[RunConfig | None, list[str]]:
    """Reads a whole config, and returns all its faults; with faults there is no ``RunConfig``."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        return None, [key + str(error).strip().split("\n", 1)[0]]
    assert isinstance(plain, Mapping)
    made, faults = read_section(RunConfig, plain, "")
    return (None if faults else made), faults


def checked(config: DictConfig, faults: list[str], source: str) -> RunConfig:
    """Returns a checked config.

    Args:
        config: what the file and the overrides say.
        faults: faults found earlier.
        source: where the config comes from, for the message.

    Raises:
        ConfigError: with every fault.
    """
    run, more = check(config)
    every = list(dict.fromkeys([*faults, *more]))
    if every or run is None:
        raise ConfigError(bullets(f"{source}: {len(every)} {'fault' if len(every) == 1 else 'faults'}", every))
    return run
