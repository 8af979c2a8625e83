"""Profile files: YAML with the fields of a dataclass, packaged under a name or written by a user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.extras import LazyPackage

if TYPE_CHECKING:
    import yaml
else:
    yaml = LazyPackage("yaml", "plan")

ProfileKind: TypeAlias = Literal["device", "cluster"]

_FOLDERS: Mapping[ProfileKind, Path] = {
    "device": Path(__file__).parent / "profiles",
    "cluster": Path(__file__).parent / "clusters",
}


def packaged_names(kind: ProfileKind) -> list[str]:
    return sorted(path.stem for path in _FOLDERS[kind].glob("*.yaml"))


def read_profile(
    name_or_path: Any, kind: ProfileKind, fix: str, *, if_missing: str, if_not_yaml: str
) -> tuple[dict[Any, Any], Path]:
    """Returns the fields of a profile, by its packaged name or from a file, and its file.

    Raises:
        ConfigError: There are none, with the fix for a name that is unknown, a file that is missing, or one that is not
            YAML.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise ConfigError(f"{kind}: expected the name of a profile, got {name_or_path!r} · fix: {fix}")
    path, name, names = Path(name_or_path), str(name_or_path), packaged_names(kind)
    if not (path.suffix in (".yaml", ".yml") or path.is_file()):
        variants = [each for each in names if each.rpartition("-")[0] == name]
        if variants and kind == "device":  # which differ in their memory
            listed = ", ".join(variants)
            raise ConfigError(f"{kind}: expected one of {listed}, got {name!r} · fix: use {variants[0]!r}")
        if name not in names:
            raise ConfigError(f"{kind}: unknown profile {name!r}{did_you_mean(name, names)} · fix: {fix}")
        path = _FOLDERS[kind] / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{kind}: the file {path} does not exist · fix: {if_missing}")
    try:
        values = deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ConfigError(f"{kind} profile {path}: expected YAML · fix: {if_not_yaml}\n{error}") from error
    if not isinstance(values, dict):
        what = "expected fields, one per line"
        raise ConfigError(f"{kind} profile {path}: {what} · fix: write 'name: ...' and the rest")
    return values, path


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Returns the content of a file. Parsing takes 10 ms a file, and an estimate reads the profiles of all devices."""
    return yaml.safe_load(text)


def field_faults(values: Mapping[Any, Any], kind: type, where: str = "") -> list[str]:
    """Returns the faults in the names of the fields of a dataclass, each after ``where``."""
    listed = fields(kind)
    names = [each.name for each in listed]
    needed = [each.name for each in listed if each.default is MISSING and each.default_factory is MISSING]
    faults = [f"{where}{key}: unknown field{did_you_mean(str(key), names)}" for key in values if key not in names]
    return faults + [f"{where}{key}: is missing" for key in needed if key not in values]


def value_faults(profile: Any, *, above_zero: Iterable[str] = (), from_zero: Iterable[str] = ()) -> Iterator[str]:
    """Yields what is wrong with the name of a profile and with its numbers, which a file may have of any type."""
    for bound, names in (("above 0", above_zero), ("from 0 on", from_zero)):
        for name in names:
            value = getattr(profile, name)
            if not is_number(value) or value < 0 or (value == 0 and bound == "above 0"):
                yield f"{name}: expected a number {bound}, got {value!r}"
    if not isinstance(profile.name, str):
        yield f"name: expected text, got {profile.name!r}"


def is_number(value: Any) -> bool:
    """Whether a value of a file is a number, and not ``True`` or ``False``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
