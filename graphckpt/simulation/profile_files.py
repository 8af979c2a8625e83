"""Profile files: YAML with the fields of a dataclass, packaged under a name or written by a user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from graphckpt.errors import ConfigError, bullets, did_you_mean
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
_GUIDES: Mapping[ProfileKind, tuple[int, str]] = {
    "device": (20, '"Custom profiles" in docs/reference/planning.md'),
    "cluster": (10, '"Time" in docs/howto/cluster.md'),
}
"""By kind: the lines of a profile, and where they are explained."""


def packaged_names(kind: ProfileKind) -> list[str]:
    return sorted(path.stem for path in _FOLDERS[kind].glob("*.yaml"))


def names_fix(kind: ProfileKind) -> str:
    """Returns the fix for a name that is unknown."""
    size, guide = _GUIDES[kind]
    return f"use one of {', '.join(packaged_names(kind))}; or write a profile of about {size} lines, see {guide}"


def _write_fix(kind: ProfileKind) -> str:
    return "write one with `graphckpt profile-device`" if kind == "device" else names_fix(kind)


def profile_path(kind: ProfileKind, name_or_path: Any, fix: str = "") -> Path:
    """Returns the file of a profile; see :func:`read_profile`. It takes no time: a command checks its flags by it.

    Raises:
        ConfigError: There is none.
    """
    fix = fix or names_fix(kind)
    if not isinstance(name_or_path, (str, Path)):
        raise ConfigError(f"{kind}: expected the name of a profile, got {name_or_path!r} · fix: {fix}")
    # What ends in .yaml, or exists, is a file, and anything else a packaged name.
    path, name, names = Path(name_or_path), str(name_or_path), packaged_names(kind)
    if not (path.suffix in (".yaml", ".yml") or path.is_file()):
        variants = [each for each in names if each.rpartition("-")[0] == name]
        # "a100" is a device of 40 and of 80 GB, whose plans differ: none of them is meant by default.
        if variants and kind == "device":
            listed = ", ".join(variants)
            raise ConfigError(f"{kind}: expected one of {listed}, got {name!r} · fix: use {variants[0]!r}")
        if name not in names:
            raise ConfigError(f"{kind}: unknown profile {name!r}{did_you_mean(name, names)} · fix: {fix}")
        path = _FOLDERS[kind] / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{kind}: the file {path} does not exist · fix: {_write_fix(kind)}")
    return path


def read_profile(
    kind: ProfileKind,
    profile_class: type,
    name_or_path: Any,
    fix: str = "",
    parts: Mapping[str, type] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the fields of a profile, by its packaged name or from a file.

    Args:
        kind: What it describes.
        profile_class: The dataclass of it.
        name_or_path: What the user has passed.
        fix: For a name that is unknown; by default :func:`names_fix`.
        parts: The dataclasses of fields that have fields themselves.

    Raises:
        ConfigError: There are none, or they are not those of the classes; the message lists all of these.
    """
    path = profile_path(kind, name_or_path, fix)
    try:
        # A copy: the callers change what they get, and the parsed values are cached.
        values = deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ConfigError(f"{kind} profile {path}: expected YAML · fix: {_write_fix(kind)}\n{error}") from error
    where = f"{kind} profile {path}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected fields, one per line · fix: write 'name: ...' and the rest")
    faults = _field_faults(values, profile_class)
    for name, part in parts.items():
        value = values.get(name, {})
        if not isinstance(value, dict):
            faults.append(f"{name}: expected {', '.join(each.name for each in fields(part))}, got {value!r}")
        elif name in values:
            faults += _field_faults(value, part, f"{name}.")
    if faults:
        raise ConfigError(bullets(where, faults))
    return {**values, **{name: part(**values[name]) for name, part in parts.items()}}


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Returns the content of a file. Parsing takes 10 ms a file, and an estimate reads the profiles of all devices."""
    return yaml.safe_load(text)


def _field_faults(values: Mapping[Any, Any], kind: type, where: str = "") -> list[str]:
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
