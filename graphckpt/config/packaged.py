"""Finds the config files that come with graphckpt, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from graphckpt.config.load import load
from graphckpt.errors import ConfigError, did_you_mean


def folder() -> Path:
    """Returns the folder of the packaged configs.

    Raises:
        ConfigError: the installation holds none.
    """
    package = Path(__file__).parents[1]
    for candidate in (package / "configs", package.parent / "configs"):  # of a wheel, of a checkout
        if (candidate / "common").is_dir():
            return candidate
    raise ConfigError(f"no configs beside {package} · fix: install graphckpt again")


def find(name: str) -> Path:
    """Returns the path of a packaged config, such as ``"common/train.py"``, or ``"quickstart"`` for short.

    Raises:
        ConfigError: there is none of this name.
    """
    root = folder()
    for path in (root / name, root / f"{name}.py"):
        if path.is_file():
            return path
    known = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py"))
    hint = did_you_mean(name, known) or f" · fix: use one of {', '.join(known)}"
    raise ConfigError(f"no packaged config is called {name!r}{hint}")


def existing(path: Path) -> Path:
    """Returns ``path``, or the packaged config of this name if it does not exist."""
    if path.exists() or path.is_absolute():
        return path
    try:
        return find(path.relative_to("configs").as_posix() if path.parts[:1] == ("configs",) else path.as_posix())
    except ConfigError as error:
        raise ConfigError(f"{path}: no such config file; {error}") from error


def get_config(name: str) -> DictConfig:
    """Loads a packaged config; ``get_config("common/train.py").train`` is its section ``train``.

    Raises:
        ConfigError: there is none of this name.
    """
    return load(find(name))
