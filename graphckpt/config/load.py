"""Loads a config file: YAML, or Python, whose relative imports are resolved by path and run anew each time."""

from __future__ import annotations

import builtins
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphckpt.config.instantiate import is_call
from graphckpt.config.numbers import fault_of, odd_numbers
from graphckpt.config.values import Origins
from graphckpt.errors import ConfigError, GraphckptError, bullets, first_line

_SUFFIXES = (".py", ".yaml", ".yml")


def load(path: Path) -> DictConfig:
    """Returns the top-level dicts, lists and calls of a config file whose names do not start with ``_``.

    Raises:
        ConfigError: No such file, another kind of file, or it raised; the message shows its own line.
    """
    config, _ = load_with_origins(path)
    return config


def load_with_origins(path: Path) -> tuple[DictConfig, Origins]:
    """Returns what :func:`load` returns, and the file that sets each value.

    Raises:
        ConfigError: As for :func:`load`.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: a config file ends in .py, .yaml or .yml")
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    with importable_from(path.resolve().parent):
        if path.suffix == ".py":
            return _run(path)
        config = _read_yaml(path)
    origins = Origins()
    origins.note(config, str(path.resolve()))
    return config, origins


@contextmanager
def importable_from(*folders: Path) -> Iterator[None]:
    """Makes modules in some folders importable, after installed ones, within the context."""
    places = [str(folder) for folder in folders]
    sys.path += places
    try:
        yield
    finally:
        for place in places:
            sys.path.remove(place)


def _read_yaml(path: Path) -> DictConfig:
    try:
        odd_values = list(odd_numbers(path.read_text("utf-8")))  # first: it refuses what would never end to load
        config = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        place = f"{path}:{at.line + 1}" if at else str(path)
        raise ConfigError(f"{place}: {error.problem or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from error
    if faults := [f"{key} in line {line}: {fault_of(odd)}" for key, odd, line in odd_values]:
        raise ConfigError(bullets(str(path), faults) if len(faults) > 1 else f"{path}: {faults[0]}")
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: expected a mapping at the top level, got a list")
    config._set_flag("allow_objects", True)
    return config


def _run(path: Path) -> tuple[DictConfig, Origins]:
    ran = _ConfigFiles()
    try:
        module = ran.execute(path)
    except GraphckptError as error:
        line = _line_of(error, ran.files)
        raise ConfigError(f"{line}: {error}" if line else str(error)) from error
    except Exception as error:
        if isinstance(error, SyntaxError):
            source = f"\n    {error.text.rstrip()}" if error.text else ""
            raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}{source}") from error
        line = _line_of(error, ran.files) or str(path)
        text = first_line(error) if isinstance(error, OmegaConfBaseException) else str(error)
        raise ConfigError(f"{line}: {type(error).__name__}: {text}") from error
    config = OmegaConf.create(_configs_in(module), flags={"allow_objects": True})
    return config, ran.origins


def _line_of(error: Exception, ran: Sequence[str]) -> str:
    """Returns ``file:line`` and the source of the innermost config line that ``error`` went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in ran]
    if not frames:
        return ""
    innermost = frames[-1]
    return f"{innermost.filename}:{innermost.lineno}: {innermost.line}"


def _configs_in(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and _is_config(value)}


def _is_config(value: object) -> bool:
    is_list_of_calls = isinstance(value, list) and any(is_call(item) for item in value)
    return is_list_of_calls or isinstance(value, dict | DictConfig | ListConfig)


class _ConfigFiles:
    """The config files that one load has run, and those still running."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.origins = Origins()
        self._running: list[Path] = []

    def execute(self, path: Path) -> ModuleType:
        """Runs a config file as a module outside of ``sys.modules``, so that every load runs it anew."""
        self.files.append(str(path))
        linecache.checkcache(str(path))
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        # An import statement looks here for its function: the process's own import stays untouched.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import_beside(path)}
        self._running.append(path)
        exec(code, vars(module))  # noqa: S102 - a config file is a program of the user's
        self._running.pop()
        for name, value in list(vars(module).items()):
            if isinstance(value, dict) and not name.startswith("_"):
                setattr(module, name, OmegaConf.create(value, flags={"allow_objects": True}))
        self.origins.note(_configs_in(module), str(path.resolve()))
        return module

    def _import_beside(self, path: Path) -> Callable[..., Any]:
        def import_beside(
            name: str,
            globals: Mapping[str, Any] | None = None,  # noqa: A002 - the names of the built-in function
            locals: Mapping[str, Any] | None = None,  # noqa: A002
            fromlist: Sequence[str] = (),
            level: int = 0,
        ) -> Any:
            if level == 0:
                return builtins.__import__(name, globals, locals, fromlist, level)
            if not name:
                fix = "name the file, as in 'from .common.train import train'"
                raise ConfigError(f"'from . import' names a folder · fix: {fix}")
            folder = path.parents[level - 1]
            imported = folder.joinpath(*name.split(".")).with_suffix(".py")
            if not imported.is_file():
                raise ConfigError(f"no config file {imported} · fix: a relative import goes by this file's folder")
            if imported in self._running:
                raise ConfigError(f"{imported} imports this file, and this file imports it")
            return self.execute(imported)

        return import_beside
