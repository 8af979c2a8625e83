"""The schema of a run's config: keys and types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer

from graphckpt.config import own_modules
from graphckpt.config.instantiate import DeferredCall, is_call
from graphckpt.config.load import importable_from
from graphckpt.config.typed import read_section
from graphckpt.errors import ConfigError, bullets, first_line
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
        return None, [key + first_line(error)]
    assert isinstance(plain, Mapping)
    made, faults = read_section(RunConfig, plain, "")
    return (None if faults else made), faults


@contextmanager
def checked(
    config: DictConfig, faults: list[str], path: Path, overrides: Iterable[str]
) -> Iterator[tuple[RunConfig, list[Path]]]:
    """Yields a checked config, and the folders of the user modules that it names, which can be imported meanwhile.

    Args:
        config: what the file and the overrides say.
        faults: faults found earlier.
        path: of the file.
        overrides: the overrides, which errors show behind the path.

    Raises:
        ConfigError: with every fault.
    """
    places, more = own_modules.folders(config, path)
    with importable_from(*places):
        run, found = check(config)
        every = list(dict.fromkeys([*faults, *more, *found]))
        if every or run is None:
            source = " ".join([str(path), *overrides])
            raise ConfigError(bullets(f"{source}: {len(every)} {'fault' if len(every) == 1 else 'faults'}", every))
        yield run, places
