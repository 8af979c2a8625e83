"""LazyCall describes a call without making it; LazyConfig loads, saves and overrides configs. Both as in libai."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, ParamSpec, final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphckpt.config import overrides as _overrides
from graphckpt.config.instantiate import TARGET, dotted_name, importable
from graphckpt.config.load import load
from graphckpt.config.values import plain_values
from graphckpt.errors import ConfigError, bullets

P = ParamSpec("P")


@final
class LazyCall(Generic[P]):
    """Describes a call of ``target``, to be made later by ``instantiate``.

    The description is a config like any other: its arguments can be read, replaced and overridden.

    Raises:
        ConfigError: ``target`` cannot be called.

    >>> import collections
    >>> call = LazyCall(collections.Counter)(a=1, b=2)
    >>> call.a = 5
    >>> from graphckpt.config import instantiate
    >>> instantiate(call)
    Counter({'a': 5, 'b': 2})
    """

    def __init__(self, target: Callable[P, Any] | str) -> None:
        if not callable(target) and not isinstance(target, str):
            raise ConfigError(f"LazyCall: expected a callable or its dotted name, got {target!r}")
        self._target = target

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> DictConfig:
        """Returns the description, with these arguments.

        Raises:
            ConfigError: an argument has no name; only named ones can be overridden.
        """
        if args:
            raise ConfigError(f"LazyCall({dotted_name(self._target)}): every argument needs its name, as in lr=0.1")
        # A name wherever there is one: omegaconf would take a dataclass for a config of its own.
        target = dotted_name(self._target) if importable(self._target) else self._target
        return OmegaConf.create({TARGET: target, **kwargs}, flags={"allow_objects": True})


@final
class LazyConfig:
    """Loads, saves and overrides configs."""

    @staticmethod
    def load(filename: str | Path) -> DictConfig:
        """Returns the top-level dicts and lists of a ``.py`` or ``.yaml`` file that are not named ``_...``.

        Raises:
            ConfigError: no such file, or it raised; the message shows its own line.
        """
        return load(Path(filename))

    @staticmethod
    def apply_overrides(config: DictConfig, overrides: Iterable[str]) -> DictConfig:
        """Applies overrides such as ``"optim.lr=3e-4"`` to ``config`` in place, and returns it.

        Raises:
            ConfigError: with every word that makes no sense.
        """
        if faults := _overrides.apply(config, overrides):
            raise ConfigError(bullets("the overrides have faults", faults))
        return config

    @staticmethod
    def save(config: DictConfig, filename: str | Path) -> None:
        """Writes ``config`` as YAML, each callable as its dotted name, so that ``load`` reads it back.

        Warns:
            UserWarning: a callable cannot be imported by a name, so that ``load`` will not find it again.
        """
        Path(filename).write_text(OmegaConf.to_yaml(OmegaConf.create(plain_values(config))), encoding="utf-8")


def try_get_key(config: DictConfig, *keys: str, default: Any = None) -> Any:
    """Returns the value of the first of ``keys`` (dotted) in ``config``, or ``default``.

    >>> try_get_key(OmegaConf.create({"train": {"seed": 7}}), "seed", "train.seed")
    7
    """
    missing = object()
    for key in keys:
        try:
            found = OmegaConf.select(config, key, default=missing)
        except OmegaConfBaseException:
            continue
        if found is not missing:
            return found
    return default
