"""Reads plain values into typed, frozen dataclasses, and collects all faults."""

from __future__ import annotations

import logging
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from graphckpt.config.instantiate import TARGET, DeferredCall, defaults, dotted_name, is_call, parameters
from graphckpt.errors import ConfigError, did_you_mean

_log = logging.getLogger("graphckpt")

_PLAIN = (bool, int, float, str, bytes, type(None), Path)
_LIMITS: dict[type, int] = {int: 2**64, float: 10**300}
"""Limits of valid numbers; an int can exceed every float."""

Read = tuple[Any, list[str]]
"""The value and the faults; with faults, the value is undefined."""


def read(hint: Any, value: Any, where: str) -> Read:  # noqa: PLR0911 - one for each kind of type
    """Reads ``value`` as the type ``hint`` of the config key ``where``.

    A whole float is good as an int (``1e3``) and an int as a float; a bool is neither, and neither is nan. A described
    call is good where a callable is expected (it becomes a ``DeferredCall``) and where its result may be expected,
    which is not so for plain values: numbers and text are written in a config themselves.
    """
    if isinstance(value, str) and "\0" in value:
        return None, [f"{where}: expected text without null characters, got {value!r}"]
    if hint is Any or isinstance(hint, typing.TypeVar | str):
        return (value, check_call(value, where)[1]) if is_call(value) else (value, [])
    origin = get_origin(hint)
    if origin in {Union, types.UnionType}:
        return _read_union(get_args(hint), value, where)
    if origin is Literal:
        return (value, []) if value in get_args(hint) else (None, [_choice(get_args(hint), value, where)])
    if origin is Callable or hint is Callable:
        return check_call(value, where)
    if is_call(value) and hint not in _PLAIN:
        return value, check_call(value, where)[1]
    if is_dataclass(hint) and isinstance(hint, type):
        return read_section(hint, value, where)
    if origin in {list, tuple, Sequence} or hint in {list, tuple, Sequence}:
        return _read_sequence(hint, value, where)
    if origin in {dict, Mapping} or hint in {dict, Mapping}:
        return _read_mapping(hint, value, where)
    return _read_plain(hint, value, where)


def read_section(section: type, value: Any, where: str) -> Read:
    """Reads a mapping as a dataclass: its fields are the keys, and a field without default has to be there.

    A method ``faults()`` of the dataclass is asked for what the types cannot say; its class attribute ``FOREIGN``
    says of keys that other programs have why this one has not, and ``ALIASES`` how it calls those that it has.
    """
    if not isinstance(value, Mapping):
        return None, [f"{where}: expected a section, got {_shown(value)}"]
    hints = get_type_hints(section)
    known = [field.name for field in fields(section) if field.init]
    foreign: Mapping[str, str] = getattr(section, "FOREIGN", {})
    value, faults = _by_our_names(value, getattr(section, "ALIASES", {}), where)
    faults += [
        f"{where}.{key}: has no meaning here, {foreign[key]} · fix: leave the key out"
        if key in foreign
        else _unknown(str(key), known, where)
        for key in value
        if key not in known
    ]
    made: dict[str, Any] = {}
    for field in fields(section):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            item, found = _read_field(hints[field.name], value[field.name], path)
            faults += found
            if not found:
                made[field.name] = item
        elif _is_required(field):
            faults.append(f"{path}: is missing · fix: give it a value")
    faults += _own_faults(section, made, where)
    return (None, faults) if faults else (section(**made), [])


def _read_field(hint: Any, value: Any, where: str) -> Read:
    """As ``read``, but a described call is accepted only where a callable is expected: sections are never called."""
    choices = get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)
    if is_call(value) and not any(choice is Callable or get_origin(choice) is Callable for choice in choices):
        return None, [f"{where}: expected {' or '.join(map(_name, choices))}, got a call of {value[TARGET]!r}"]
    return read(hint, value, where)


def _by_our_names(value: Mapping[str, Any], aliases: Mapping[str, str], where: str) -> Read:
    """Replaces aliases, the key names of other programs, with a warning."""
    ours = {key: item for key, item in value.items() if key not in aliases}
    faults = []
    for key in value:
        if key not in aliases:
            continue
        name = aliases[key]
        if ours.get(name) is None:
            _log.warning("%s.%s: read as %s.%s, which is its name here", where, key, where, name)
            ours[name] = value[key]
        elif ours[name] != value[key]:
            faults.append(f"{where}.{key}: {value[key]!r}, and {name} is {ours[name]!r} · fix: leave {key} out")
    return ours, faults


def _own_faults(target: Callable[..., Any], made: dict[str, Any], where: str) -> list[str]:
    """Collects a dataclass's own ``faults()``; fields that are already wrong have their defaults."""
    if not (is_dataclass(target) and callable(getattr(target, "faults", None))):
        return []
    missing = [field.name for field in fields(target) if _is_required(field) and field.name not in made]
    if missing:
        return []
    instance: Any = target(**made)
    faults: Iterable[str] = instance.faults()
    return [f"{where}.{fault}" if where else fault for fault in faults]


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def check_call(value: Any, where: str) -> Read:
    """Reads a described call and checks its keywords against the target's signature, without calling it."""
    if not is_call(value):
        return None, [f"{where}: expected a call · fix: write LazyCall(target)(...), or a mapping with _target_"]
    try:
        call = DeferredCall.read(value, where)
    except (ConfigError, ImportError) as error:
        return None, [f"{where}: {error}"]
    known, takes_any = parameters(call.target)
    faults: list[str] = []
    made: dict[str, Any] = {}
    for key, argument in call.arguments.items():
        path = f"{where}.{key}"
        if key in known:
            item, found = read(known[key], argument, path)
            if not found and _is_negative_count(call.target, key, item):
                found = [f"{path}: expected 1 or more, got {item}"]
            faults += found
            if not found:
                made[key] = item
        elif not takes_any:
            faults.append(_unknown(key, known, where, of=f" of {dotted_name(call.target).rpartition('.')[2]}"))
    return call, faults + _own_faults(call.target, made, where)


def _is_negative_count(target: Callable[..., Any], key: str, value: Any) -> bool:
    """Whether ``value`` is below zero and ``key`` counts something, by its name and its default.

    Transformers takes ``n_head=-1`` and fails in the first forward, in words about shapes.
    """
    if not isinstance(value, int) or value >= 0:
        return False
    aliases: Mapping[str, str] = getattr(target, "attribute_map", None) or {}
    default = defaults(target).get(aliases.get(key, key))
    is_count = key.startswith(("n_", "num_")) or key.endswith(("_size", "_layers", "_heads", "_dim"))
    return is_count and isinstance(default, int) and default > 0


def _unknown(key: str, known: Sequence[str] | Mapping[str, Any], where: str, of: str = "") -> str:
    path = f"{where}.{key}" if where else key
    few = f" · fix: use one of {', '.join(known)}" if 0 < len(known) <= 12 else ""
    return f"{path}: no such key{of}{did_you_mean(key, known) or few}"


def _read_union(choices: tuple[Any, ...], value: Any, where: str) -> Read:
    if value is None and type(None) in choices:
        return None, []
    tried = [read(choice, value, where) for choice in choices if choice is not type(None)]
    for made, faults in tried:
        if not faults:
            return made, []
    if isinstance(value, Mapping | list):  # the choice that came nearest says more than a list of types
        near = [faults for (_, faults) in tried if not all(fault.startswith(f"{where}: expected") for fault in faults)]
        if near:
            return None, min(near, key=len)
    return None, [f"{where}: expected {' or '.join(dict.fromkeys(map(_name, choices)))}, got {_shown(value)}"]


def _read_sequence(hint: Any, value: Any, where: str) -> Read:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None, [f"{where}: expected {_name(hint)}, got {_shown(value)}"]
    arguments = get_args(hint) or (Any, ...)
    is_fixed = get_origin(hint) is tuple and arguments[-1] is not Ellipsis
    if is_fixed and len(value) != len(arguments):
        return None, [f"{where}: expected {len(arguments)} values, got {len(value)}"]
    hints = arguments if is_fixed else (arguments[0],) * len(value)
    items = [
        read(item_hint, item, f"{where}[{index}]")
        for index, (item_hint, item) in enumerate(zip(hints, value, strict=True))
    ]
    kind = list if (get_origin(hint) or hint) is list else tuple
    return kind(made for made, _ in items), [fault for _, faults in items for fault in faults]


def _read_mapping(hint: Any, value: Any, where: str) -> Read:
    if not isinstance(value, Mapping):
        return None, [f"{where}: expected a mapping, got {_shown(value)}"]
    _, item_hint = get_args(hint) or (Any, Any)
    items = {key: read(item_hint, item, f"{where}[{key!r}]") for key, item in value.items()}
    return {key: made for key, (made, _) in items.items()}, [fault for _, faults in items.values() for fault in faults]


def _read_plain(hint: Any, value: Any, where: str) -> Read:
    if not isinstance(hint, type):
        return value, []  # a hint of another kind, such as a NewType: the target itself has to judge
    if hint in _LIMITS:
        return _read_number(hint, value, where)
    if hint is Path and isinstance(value, str):
        return Path(value), []
    if hint is object or (isinstance(value, hint) and (not isinstance(value, bool) or hint is bool)):
        return value, []
    return None, [f"{where}: expected {_name(hint)}, got {_shown(value)}"]


def _read_number(hint: type, value: Any, where: str) -> Read:
    if isinstance(value, bool) or not isinstance(value, int | float) or str(value) == "nan":
        return None, [f"{where}: expected {_name(hint)}, got {_shown(value)}"]
    if _LIMITS[hint] <= abs(value) != math.inf:
        return None, [f"{where}: expected {_name(hint)}, got a number beyond {_LIMITS[hint]:.0e}"]
    if hint is int and value != value // 1:
        return None, [f"{where}: expected int, got {_shown(value)}"]
    return hint(value), []


def _choice(choices: tuple[Any, ...], value: Any, where: str) -> str:
    hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
    return f"{where}: expected one of {', '.join(map(repr, choices))}, got {_shown(value)}{hint}"


def _name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in {dict, Mapping}:
        return "mapping"
    if get_origin(hint) is not None:
        return str(hint).replace("collections.abc.", "").replace("typing.", "")
    return str(getattr(hint, "__name__", hint))


def _shown(value: Any) -> str:
    return f"{value!r} ({'null' if value is None else type(value).__name__})"
