"""Config files: YAML, or Python whose relative imports go by path; overrides of their values, and where each is set."""

from __future__ import annotations

import ast
import builtins
import linecache
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, final

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphckpt.config.lazy import dotted_name, importable, is_call
from graphckpt.errors import ConfigError, GraphckptError, bullets, did_you_mean, first_line
from graphckpt.yaml_text import compose

_MISSING = object()
_SUFFIXES = (".py", ".yaml", ".yml")
IMPORT_FROM = "import_from"
"""The one key of a config that is text."""
_ODD_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?|0[0-9_]+)")
"""Numbers that YAML 1.1 reads differently than they look: 12:30:45 is 45045, and 010 is 8."""


@final
class LazyConfig:
    """Loads, saves and overrides configs, as in libai."""

    @staticmethod
    def load(filename: str | Path) -> DictConfig:
        """Returns the top-level dicts and lists of a ``.py`` or ``.yaml`` file that are not named ``_...``.

        Raises:
            ConfigError: no such file, or it raised; the message shows its line.
        """
        config, _ = load_with_origins(Path(filename))
        return config

    @staticmethod
    def apply_overrides(config: DictConfig, overrides: Iterable[str]) -> DictConfig:
        """Applies overrides such as ``"optim.lr=3e-4"`` to ``config`` in place, and returns it.

        Raises:
            ConfigError: with every override that cannot be applied.
        """
        if faults := override(config, overrides):
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
    for key in keys:
        try:
            value = OmegaConf.select(config, key, default=_MISSING)
        except OmegaConfBaseException:
            continue
        if value is not _MISSING:
            return value
    return default


def packaged_folder() -> Path:
    """Returns the folder of the packaged configs."""
    package = Path(__file__).parents[1]
    for candidate in (package / "configs", package.parent / "configs"):  # of a wheel, of a checkout
        if (candidate / "common").is_dir():
            return candidate
    raise ConfigError(f"there are no configs in {package} · fix: install graphckpt again")


def find_packaged(name: str) -> Path:
    """Returns the path of a packaged config, such as ``"common/train.py"``, or ``"quickstart"`` for short."""
    root = packaged_folder()
    for path in (root / name, root / f"{name}.py"):
        if path.is_file():
            return path
    names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py"))
    hint = did_you_mean(name, names) or f" · fix: use one of {', '.join(names)}"
    raise ConfigError(f"no packaged config is called {name!r}{hint}")


def existing(path: Path) -> Path:
    """Returns ``path``, or the packaged config of this name if it does not exist."""
    if path.exists() or path.is_absolute():
        return path
    is_prefixed = path.parts[:1] == ("configs",)
    try:
        return find_packaged((path.relative_to("configs") if is_prefixed else path).as_posix())
    except ConfigError as error:
        raise ConfigError(f"{path}: no such config file; {error}") from error


def get_config(name: str) -> DictConfig:
    """Loads a packaged config; ``get_config("common/train.py").train`` is its section ``train``.

    Raises:
        ConfigError: there is none of this name.
    """
    return LazyConfig.load(find_packaged(name))


@final
class Origins:
    """The places in which the values of a config were last set, by their dotted keys.

    Nothing is recorded while a config file runs: after each file, all values are compared with those before.
    """

    # common/train.py runs first, as it is imported:   train.seed: "1234" is new        -> common/train.py
    # then its importer, which sets train.seed = 7:    train.seed: "7" has changed      -> quickstart.py
    # then overrides, with train.seed=7 among them:    train.seed: "7" has not changed  -> quickstart.py still

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, str]] = {}  # by key: the text of the value, and where it is set

    def note(self, config: Any, origin: str) -> None:
        """Notes that the values that are new or have changed are set at ``origin``."""
        for key, text in _leaves(plain_values(config)):
            if self._entries.get(key, ("", ""))[0] != text:
                self._entries[key] = text, origin

    def of(self, key: str) -> str | None:
        """Returns where a value is set; ``None`` if it is not."""
        return self._entries.get(key, ("", None))[1]

    def all_of(self, key: str) -> set[str]:
        """Returns where the values at ``key`` and below it are set."""
        return {origin for name, (_, origin) in self._entries.items() if f"{name}.".startswith(f"{key}.")}

    def rename(self, old: str, new: str) -> None:
        """Moves the places of the keys under ``old`` to the keys under ``new``."""
        for key in [key for key in self._entries if f"{key}.".startswith(f"{old}.")]:
            self._entries[new + key.removeprefix(old)] = self._entries.pop(key)


def load_with_origins(path: Path) -> tuple[DictConfig, Origins]:
    """Returns the dicts, lists and calls of a config file, and the file that sets each value."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: expected a config file that ends in .py, .yaml or .yml · fix: rename it")
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    with importable_from(path.resolve().parent):
        if path.suffix == ".py":
            return _run_python(path)
        config = _read_yaml(path)
    origins = Origins()
    origins.note(config, str(path.resolve()))
    return config, origins


@contextmanager
def importable_from(*folders: Path) -> Iterator[None]:
    """Makes modules in some folders importable, after installed ones, within the context."""
    names = [str(folder) for folder in folders]
    # At the end: a file of the user's called random.py must not replace a module of the standard library.
    sys.path += names
    try:
        yield
    finally:
        for name in names:  # the last one of that name: the folder of a script is the first entry as well
            last = len(sys.path) - 1 - sys.path[::-1].index(name)
            del sys.path[last]


def _read_yaml(path: Path) -> DictConfig:
    try:
        # First: nine lists, each of ten aliases of the previous one, are nine lines and 10**9 values for OmegaConf.
        node = compose(path.read_text("utf-8"))
        config = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        place = f"{path}:{at.line + 1}" if at else str(path)
        raise ConfigError(f"{place}: {error.problem or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from error
    if faults := [f"{key} in line {line}: {_odd_number_fault(text)}" for key, text, line in _odd_numbers(node)]:
        raise ConfigError(bullets(str(path), faults) if len(faults) > 1 else f"{path}: {faults[0]}")
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: expected a mapping at the top level, got a list")
    config._set_flag("allow_objects", True)
    return config


def _run_python(path: Path) -> tuple[DictConfig, Origins]:
    files = _PythonFiles()
    try:
        module = files.execute(path)
    except GraphckptError as error:
        line = files.line_of(error)
        raise ConfigError(f"{line}: {error}" if line else str(error)) from error
    except SyntaxError as error:
        source = f"\n    {error.text.rstrip()}" if error.text else ""
        raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}{source}") from error
    except Exception as error:
        text = first_line(error) if isinstance(error, OmegaConfBaseException) else str(error)
        raise ConfigError(f"{files.line_of(error) or path}: {type(error).__name__}: {text}") from error
    return OmegaConf.create(_configs_in(module), flags={"allow_objects": True}), files.origins


def _configs_in(module: ModuleType) -> dict[str, Any]:
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: value for name, value in named.items() if _is_config(value) or name == IMPORT_FROM}


def values_without_effect(path: Path) -> list[str]:
    """Returns the names to which a Python config assigns plain values that neither it reads nor a config has.

    A dict, or a call, is a section, which the schema checks; a name that begins with ``_`` is the user's.
    """
    if path.suffix != ".py":
        return []
    # `batch_size = 8` alone does nothing, where its author expects a batch of 8; with a line that sets
    # `train.train_micro_batch_size` to `batch_size`, it is read.
    tree = ast.parse(path.read_text(encoding="utf-8"))
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names = [
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign) and _is_plain(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    return [name for name in dict.fromkeys(names) if name not in {*read, IMPORT_FROM} and not name.startswith("_")]


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_is_plain, node.elts))
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _is_config(value: object) -> bool:
    is_list_of_calls = isinstance(value, list) and any(is_call(item) for item in value)
    return is_list_of_calls or isinstance(value, dict | DictConfig | ListConfig)


class _PythonFiles:
    """The Python config files that one load has run, and those still running."""

    def __init__(self) -> None:
        self.origins = Origins()
        self._files: list[str] = []
        self._running: list[Path] = []

    def execute(self, path: Path) -> ModuleType:
        """Runs a config file as a module outside of ``sys.modules``, so that every load runs it anew."""
        self._files.append(str(path))
        # A file that was edited since it was last loaded, as in a notebook: messages quote its present lines.
        linecache.checkcache(str(path))
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        # An import statement takes `__import__` from the `__builtins__` of its globals. So only this file has
        # relative imports by path, and the import function of the process stays as it is.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._importer(path)}
        self._running.append(path)
        exec(code, vars(module))  # noqa: S102 - a config file is a program of the user's
        # Not in `finally`: an error ends the whole load, with this object.
        self._running.pop()
        # After the file has run, so that its code sees dicts, and a file that imports it may write train.seed.
        for name, value in list(vars(module).items()):
            if isinstance(value, dict) and not name.startswith("_"):
                setattr(module, name, OmegaConf.create(value, flags={"allow_objects": True}))
        self.origins.note(_configs_in(module), str(path.resolve()))
        return module

    def line_of(self, error: Exception) -> str:
        """Returns ``file:line`` and the source of the innermost config line that ``error`` went through."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in self._files]
        return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""

    def _importer(self, path: Path) -> Callable[..., Any]:
        def import_by_path(
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
            # In configs/own/gpt2.py, `from ..common.train import train` has level 2 and the name "common.train", which
            # is configs/common/train.py: parents[0] is the file's own folder. No folder has to be a package.
            imported = path.parents[level - 1].joinpath(*name.split(".")).with_suffix(".py")
            if not imported.is_file():
                raise ConfigError(f"no config file {imported} · fix: a relative import goes by this file's folder")
            if imported in self._running:
                raise ConfigError(f"{imported} imports this file, and this file imports it")
            # Anew for each import: two files that change one that both import would otherwise change it for each other.
            return self.execute(imported)

        return import_by_path


def override(config: DictConfig, overrides: Iterable[str]) -> list[str]:
    """Applies ``key=value`` overrides in order, in place, and returns the faults. Values are YAML.

    A mapping is merged into the mapping at its key; any other value replaces the one at its key.
    A key that does not exist yet is added: whether it may exist at all is for the schema to say.

    >>> config = OmegaConf.create({"train": {"log_period": 20}})
    >>> override(config, ["train.log_period=5", "train.seed"])
    ["override 'train.seed': expected key=value"]
    >>> config.train.log_period
    5
    """
    return [fault for word in overrides if (fault := _override_one(config, word))]


def _override_one(config: DictConfig, word: str) -> str:
    key, equals, text = word.partition("=")
    key = key.strip()
    if key.startswith("~"):  # as Hydra removes keys
        name = key.removeprefix("~")
        is_set = name and try_get_key(config, name, default=_MISSING) is not _MISSING
        fix = f"set {name}=..., as to its default, which --print-config shows" if is_set else f"leave {word!r} out"
        what = "a key can be set, not removed" if is_set else f"{name!r} is not set, so there is nothing to remove"
        return f"override {word!r}: {what} · fix: {fix}"
    if not equals or not key or not all(key.split(".")) or key.startswith("+"):  # as Hydra adds keys
        fix = " · fix: leave '+' out" if key.startswith("+") else ""
        return f"override {word!r}: expected key=value{fix}"
    try:
        odd = next(_odd_numbers(compose(text), key), None)
        # By OmegaConf's reader, as files are: for PyYAML's own, 3e-4 is text, as it has no dot.
        value = OmegaConf.from_dotlist([f"value={text}"])["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        return f"{key}: expected a YAML value, got {text!r} · fix: quote it ({first_line(error)})"
    if odd is not None:
        return f"{odd[0]}: {_odd_number_fault(odd[1])}"
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
        return f"{key}: expected a key, or an index of a list ({first_line(error)})"
    return ""


def _odd_number_fault(text: str) -> str:
    fix = "write it in digits, without ':' and without a zero in front, or quote it"
    return f"expected a plain number, got {text} · fix: {fix}"


def _odd_numbers(node: yaml.Node | None, key: str = "") -> Iterator[tuple[str, str, int]]:
    """Yields key, value and line, from 1, of each number in base 60 or with a zero in front, unless it is quoted.

    >>> list(_odd_numbers(compose("a: {b: 12:30:45, c: '12:30', d: 10}")))
    [('a.b', '12:30:45', 1)]
    """
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _odd_numbers(value, f"{key}.{name.value}".removeprefix("."))
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _odd_numbers(value, f"{key}[{number}]")
    elif node is not None and node.style is None and node.tag.endswith((":int", ":float")):
        yield from [(key, node.value, node.start_mark.line + 1)] if _ODD_NUMBER.fullmatch(node.value) else ()


def plain_values(node: Any) -> Any:
    """Returns a config as dicts, lists and plain values, other objects as their dotted name or text.

    Warns:
        UserWarning: A callable cannot be imported by a name.
    """
    if OmegaConf.is_config(node):
        # An interpolation stays one: a saved config that is resumed with overrides has to follow them.
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, Mapping):
        return {key: plain_values(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain_values(value) for value in node]
    if node is None or isinstance(node, bool | int | float | str | bytes):
        return node
    if not callable(node):
        return str(node)
    name = dotted_name(node)
    if not importable(node):
        warnings.warn(f"{name} cannot be imported by this name: the saved config will not load", stacklevel=2)
    return name


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the YAML text of each value in a section.

    >>> dict(_leaves({"train": {"seed": 1, "betas": [0.9, 0.95]}}))
    {'train.seed': '1', 'train.betas': '[0.9, 0.95]'}
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, yaml_text(node)


def yaml_text(value: Any) -> str:
    """Returns a value as YAML on one line.

    >>> yaml_text("*.h"), yaml_text(None), yaml_text({"rule": "full"})
    ("'*.h'", 'null', '{rule: full}')
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(text).removesuffix("...\n").rstrip("\n")
