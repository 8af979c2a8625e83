"""Prints the config that a run would use, and where each value is set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphckpt.config import overrides as _overrides
from graphckpt.config.fast_dev_run import shrink
from graphckpt.config.load import load_with_origins
from graphckpt.config.packaged import existing
from graphckpt.config.schema import checked
from graphckpt.config.values import Origins, plain_values, yaml_text

_COLUMN = 48  # where comments begin


def describe_config(config_file: str | Path, overrides: Iterable[str] = (), *, fast_dev_run: bool = False) -> str:
    """Returns the config of a run as YAML, with a comment behind each value that names where it is set.

    Args:
        config_file: A path, or the name of a packaged config such as ``"configs/quickstart.py"``.
        overrides: Words such as ``"optim.lr=3e-4"``.
        fast_dev_run: Whether the run is shrunk to a few iterations.

    Raises:
        ConfigError: With every fault.
    """
    path = existing(Path(config_file))
    config, origins = load_with_origins(path)
    overrides = list(overrides)
    faults = _overrides.apply(config, overrides)
    origins.note(config, "command line")
    if fast_dev_run:
        shrink(config, overrides)
        origins.note(config, "--fast-dev-run")
    with checked(config, faults, path, overrides):
        return "".join(_lines(plain_values(config), origins))


def _lines(node: Mapping[str, Any], origins: Origins, prefix: str = "", indent: str = "") -> Iterator[str]:
    for key, value in node.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{yaml_text(key)}:\n"
            yield from _lines(value, origins, path, f"{indent}  ")
        else:
            line = f"{indent}{yaml_text(key)}: {yaml_text(value)}"
            yield f"{line:<{_COLUMN}}  # {_short(origins.of(path))}\n"


def _short(origin: str) -> str:
    """Returns a path from the current folder, or that of a packaged config from its folder."""
    path = Path(origin)
    if not path.is_absolute():
        return origin
    for folder in (Path.cwd(), Path(__file__).parents[2], Path(__file__).parents[1]):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)
