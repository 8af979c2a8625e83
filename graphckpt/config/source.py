"""A config file with its overrides: checked, made smaller for a trial, and printed with where each value is set."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, final, get_type_hints

import torch
from omegaconf import DictConfig, OmegaConf

from graphckpt.config.files import (
    IMPORT_FROM,
    Origins,
    existing,
    importable_from,
    load_with_origins,
    override,
    plain_values,
    try_get_key,
    values_without_effect,
    yaml_text,
)
from graphckpt.config.lazy import TARGET, dotted_name, is_call, locate, parameters
from graphckpt.config.schema import RunConfig, check
from graphckpt.deprecation import rename
from graphckpt.errors import ConfigError, bullets, did_you_mean
from graphckpt.train.settings import OLD_KEYS, TrainConfig

# Note [From a file to a checked config]
#
#     load      the file, and the files that it imports                        train.seed: 7      # quickstart.py
#     override  key=value; the schema reports keys that do not exist           train.seed: 8      # command line
#     rename    old keys, whether the file or an override has them
#     shrink    with --fast-dev-run: needs the checked config, as sizes that   train.train_iter: 3    # --fast-dev-run
#               are not set follow from others
#     check     types, calls and what settings say of each other; all faults at once, after those of the steps before
#
# Each step only collects its faults, so that a user corrects a typo in an override and one in the file together.

_OVERRIDES = "command line"
_COLUMN = 48  # where comments begin
_MISSING = object()

_TRIAL: Mapping[str, Any] = {
    "train_epoch": 0,
    "train_samples": None,
    "log_period": 1,
    "evaluation.eval_after_n_epoch": None,
    "activation_checkpoint.fit": None,
}
"""The settings of ``--fast-dev-run``."""
_TRIAL_AT_MOST = {
    "train_iter": 3,  # of libai's 20: the second is the first with all of AdamW's state, the third starts from it
    "evaluation.eval_period": 2,
    "evaluation.eval_iter": 2,
    "test_micro_batch_size": 2,
}
_TRIAL_BATCH = 2  # the least that still shows a mix-up of samples and forwards


@final
class ConfigSource:
    def __init__(self, config_file: str | Path, overrides: Iterable[str] = (), *, fast_dev_run: bool = False) -> None:
        self.path = existing(Path(config_file))
        self.overrides = list(overrides)
        self.config, self.origins = load_with_origins(self.path)
        self._faults = [_no_section(name) for name in values_without_effect(self.path)]
        self._faults += override(self.config, self.overrides)
        self.origins.note(self.config, _OVERRIDES)
        # After overrides, which may have old names too, and after both are noted: the places follow the keys.
        self._faults += rename_old_keys(self.config, self.origins)
        self.trial_lines: list[str] = []
        """Changes that ``fast_dev_run`` made, for the log."""
        if fast_dev_run:
            with self.checked() as run:
                self.trial_lines = shrink(self.config, run.train, self.overrides)
            self.origins.note(self.config, "--fast-dev-run")

    @contextmanager
    def checked(self) -> Iterator[RunConfig]:
        """Yields the checked config; the user modules that it names can be imported meanwhile."""
        folders, faults = self._module_folders()
        with importable_from(*folders):
            run, more = check(self.config)
            faults = list(dict.fromkeys([*self._faults, *faults, *more]))
            if faults or run is None:
                count = f"{len(faults)} error{'s' if len(faults) > 1 else ''}"
                raise ConfigError(bullets(f"{self._where(faults)}: {count}", faults))
            yield run

    def _where(self, faults: Iterable[str]) -> str:
        """Returns where the values that have faults are set: the config file, the command line, or both."""
        # Of "optim.betas[1]: expected ..." the key is optim.betas: origins are noted for lists as a whole.
        keys = [re.split(r": |\[", fault)[0] for fault in faults]
        of_overrides = [key.startswith("override ") or self.origins.all_of(key) == {_OVERRIDES} for key in keys]
        if all(of_overrides):
            return _OVERRIDES
        return f"{self.path} and {_OVERRIDES}" if any(of_overrides) else str(self.path)

    def set_import_from(self) -> None:
        """Sets ``import_from``, for a copy of the config in another folder, if it names user modules."""
        names = {target.partition(".")[0] for target in _targets(plain_values(self.config))}
        # Of the modules that the check of the config has imported, those from the config's folder: a copy of the
        # config in the output folder would look for them there.
        for folder, name in product(self._module_folders()[0], names):
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            places = [Path(file).parent] if file else map(Path, getattr(module, "__path__", []))
            # A module `data` is data.py in the folder, or the folder data with an __init__.py, or without one.
            if any(place.resolve() in {folder, folder / name} for place in places):
                self.config[IMPORT_FROM] = str(folder)

    def _module_folders(self) -> tuple[list[Path], list[str]]:
        """Returns the folders of user modules, and the faults of ``import_from``."""
        folder = self.path.resolve().parent
        named = self.config.get(IMPORT_FROM)
        if not isinstance(named, str) or "\0" in named:
            return [folder], []  # the schema reports values that are not text
        further = Path(named).expanduser().resolve()
        if not further.is_dir():
            fix = f"name the folder of the modules: {IMPORT_FROM}=folder"
            return [folder], [f"{IMPORT_FROM}: {named}: no such folder · fix: {fix}"]
        return list(dict.fromkeys([folder, further])), []

    def describe(self) -> str:
        """Returns all keys as YAML, with a comment behind each that names where it is set and its default."""
        with self.checked():
            return "".join(_lines(plain_values(self.config), _defaults(RunConfig), self.origins))


def _no_section(name: str) -> str:
    sections = [one.name for one in fields(RunConfig)]
    what = f"{name}: no such section, and nothing in this file reads it{did_you_mean(name, sections)}"
    return f"{what} · fix: use {', '.join(sections)}, or begin the name of a variable with _"


def rename_old_keys(config: DictConfig, origins: Origins | None = None) -> list[str]:
    """Renames keys with deprecated names in place, with a warning for each; returns the faults."""
    where, faults = "train.activation_checkpoint", []
    section = try_get_key(config, where)
    if not isinstance(section, DictConfig):
        return []
    for old, new in OLD_KEYS.items():
        if old not in section:
            continue
        values: Any = OmegaConf.to_container(section, resolve=False)  # an interpolation stays one
        del section[old]
        try:
            rename(values, {old: new}, where)
        except ConfigError as error:
            faults.append(str(error))
            continue
        if origins is not None and section.get(new) is None:
            origins.rename(f"{where}.{old}", f"{where}.{new}")
        section[new] = values[new]
    return faults


def shrink(config: DictConfig, train: TrainConfig, overrides: Iterable[str]) -> list[str]:
    """Changes ``config`` in place to a short trial, except keys in ``overrides``; returns lines about the changes.

    >>> config = OmegaConf.create({"train": {"train_iter": 7, "train_micro_batch_size": 16}})
    >>> lines = shrink(config, TrainConfig(train_iter=7, train_micro_batch_size=16), ["train.train_iter=7"])
    >>> config.train.train_iter, config.train.train_micro_batch_size
    (7, 2)
    >>> lines[1:3]
    ['  train.train_micro_batch_size=2  (else 16)', '  train.evaluation.eval_period=2  (else 1000)']
    """
    changes: list[str] = []
    for key, value in _trial_values(train, overrides):
        before = attrgetter(key)(train)
        if before != value and not sets(overrides, f"train.{key}"):
            changes.append(f"  train.{key}={yaml_text(value)}  (else {'null' if before is None else before})")
            OmegaConf.update(config, f"train.{key}", value, force_add=True)
    if not changes:
        return []
    return ["--fast-dev-run made the run smaller; key=value on the command line wins over these:", *changes]


def _trial_values(train: TrainConfig, overrides: Iterable[str]) -> Iterator[tuple[str, Any]]:
    if not sets(overrides, "train.global_batch_size"):
        yield "train_micro_batch_size", min(train.sizes.micro_batch, _TRIAL_BATCH)
        if train.sizes.accumulation > 1:
            yield "num_accumulation_steps", _TRIAL_BATCH
        yield "global_batch_size", None
    for key, limit in _TRIAL_AT_MOST.items():
        value = attrgetter(key)(train)
        yield key, limit if value is None else min(value, limit)
    yield from _TRIAL.items()
    is_on_cpu = not torch.cuda.is_available() if train.device is None else train.device == "cpu"
    if is_on_cpu and train.amp.enabled:
        yield "amp.enabled", False  # emulated on many CPUs, where it takes several times as long


def sets(overrides: Iterable[str], key: str) -> bool:
    """Whether overrides set ``key``, directly or within a section.

    >>> sets(["train={output_dir: here}"], "train.output_dir"), sets(["train.seed=1"], "train.output_dir")
    (True, False)
    """
    config = OmegaConf.create({})
    override(config, overrides)
    return try_get_key(config, key, default=_MISSING) is not _MISSING


def _targets(node: Any) -> Iterator[str]:
    if is_call(node):
        yield str(node[TARGET])
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(value)


def _defaults(section: Any) -> dict[str, Any]:
    hints = get_type_hints(section)
    values: dict[str, Any] = {}
    for one in fields(section):
        if is_dataclass(hints[one.name]):
            values[one.name] = _defaults(hints[one.name])
        elif callable(one.default):
            values[one.name] = {TARGET: dotted_name(one.default)}
        elif one.default is not MISSING:
            values[one.name] = one.default
    return values


def _lines(
    node: Mapping[str, Any], defaults: Mapping[str, Any], origins: Origins, prefix: str = "", indent: str = ""
) -> Iterator[str]:
    mark = ""
    if is_call(node):  # an argument that is not set stays so: its default is a comment
        arguments = parameters(locate(node[TARGET]))[0].values()
        defaults = {one.name: plain_values(one.default) for one in arguments if _is_plain(one.default)}
        mark = "# "
    unset = {key: default for key, default in defaults.items() if key not in node}
    for key, value in {**node, **unset}.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        default = defaults.get(key, value)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{yaml_text(key)}:\n"
            yield from _lines(value, default if isinstance(default, Mapping) else {}, origins, path, f"{indent}  ")
            continue
        origin = origins.of(path)
        comment = "default" if origin is None else _short(origin)
        if origin is not None and default != value:
            comment += f", default {yaml_text(default)}"
        text = f"{indent}{mark if key in unset else ''}{yaml_text(key)}: {yaml_text(value)}"
        yield f"{text:<{_COLUMN}}  # {comment}\n"


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _short(origin: str) -> str:
    """Returns a path from the current folder, or that of a packaged config from its folder."""
    path = Path(origin)
    if not path.is_absolute():
        return origin
    for folder in (Path.cwd(), Path(__file__).parents[2], Path(__file__).parents[1]):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)
