"""The errors that graphckpt raises. Each message says what is wrong, where, and how to fix it."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import final

_log = logging.getLogger("graphckpt")
_WARNED: set[str] = set()
_NUMBER = re.compile(r"\d+")
_LINE = 100  # characters
_LINES_OF_TRACEBACK = 10
NOT_SCRIPTABLE = "torch.jit.script cannot compile a model with policies · fix: remove() the handle first"
_LITERALS = {"true": True, "false": False, "none": None}


class GraphckptError(Exception):
    """Base of all errors of this library."""


@final
class ConfigError(GraphckptError, ValueError):
    """A policy, a rule, a selector or a config file has an invalid value."""


@final
class GraphError(GraphckptError, RuntimeError):
    """A Graph was defined or called in an invalid way."""


class PlanError(GraphckptError, RuntimeError):
    """A step cannot be planned, or no plan fits."""


class RecomputeError(GraphckptError, RuntimeError):
    """The recomputation of a block differed from its original forward."""


@final
class MutatedError(RecomputeError):
    """A tensor that backward needs was modified in place after the forward."""


@final
class StoreError(GraphckptError, RuntimeError):
    """A store has failed: no host memory, a full disk, a lost rank."""


def bullets(head: str, faults: Iterable[str]) -> str:
    """Returns one message that lists every fault.

    >>> print(bullets("two faults", ["a", "b"]))
    two faults:
      • a
      • b
    """
    return "\n".join([f"{head}:", *(f"  • {fault}" for fault in faults)])


def check_keywords(function: Callable[..., object], unknown: Iterable[str]) -> None:
    """Raises a ``ConfigError`` for keyword arguments that ``function`` does not have, with a similar name that it has.

    >>> check_keywords(check_keywords, ["unknwon"])
    Traceback (most recent call last):
      ...
    graphckpt.errors.ConfigError: check_keywords: unknown argument 'unknwon' · did you mean 'unknown'? · \
fix: use function, unknown
    """
    names = [name for name, one in signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD]
    for name in unknown:
        hint = did_you_mean(name, names)
        raise ConfigError(f"{function.__name__}: unknown argument {name!r}{hint} · fix: use {', '.join(names)}")


def without_repeats(faults: Iterable[str]) -> list[str]:
    """Returns faults of which those that differ in numbers alone are one.

    >>> without_repeats([f"layers.{n}: not found" for n in range(80)] + ["lr: negative"])
    ['layers.0: not found (and 79 more like it)', 'lr: negative']
    """
    alike: dict[str, list[str]] = {}
    for fault in faults:
        alike.setdefault(_NUMBER.sub("#", fault), []).append(fault)
    for same in alike.values():
        what, dot, fix = same[0].partition(" · fix: ")
        if len(same) > 1:
            same[0] = f"{what} (and {len(same) - 1} more like it){dot}{fix}"
    return [same[0] for same in alike.values()]


def warn(text: str) -> None:
    """Logs a warning, which begins with this library's name: without a formatter a log shows the text alone."""
    _log.warning("graphckpt: %s", text)


def warn_once(block: str, text: str) -> None:
    """Logs a warning about a block, unless another block has caused the same one in this process."""
    if text not in _WARNED:
        _WARNED.add(text)
        warn(f"{block}: {text}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if it has none."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def drop_frames(error: BaseException, where: str) -> None:
    """Frees what the traceback of an error holds, such as the tensors of a step; a note keeps the last lines.

    The frames themselves go, not only their variables: a frame holds its function, and that the variables of the one
    around it, such as the inputs of a module with hooks.
    """
    error.add_note(f"{where}:\n" + "".join(traceback.format_tb(error.__traceback__)[-_LINES_OF_TRACEBACK:]))
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def shown(value: object) -> str:
    """Returns a value as messages show it: its ``repr``, or its type alone if that takes more than a line.

    >>> shown("cuda"), shown([0] * 100)
    ("'cuda'", 'an object of type list')
    """
    text = repr(value)
    return text if len(text) <= _LINE and "\n" not in text else f"an object of type {type(value).__name__}"


def nearest(word: str, choices: Iterable[str]) -> list[str]:
    """Returns the choices nearest to ``word``, at most three; of the same case if possible.

    A word with a suffix is a variant, and not a misspelling: who writes ``adamw-8bit`` does not mean ``adamw``.

    >>> nearest("ofload", ["offload", "partition"]), nearest("adamw-8bit", ["adamw"])
    (['offload'], [])
    """
    names = {name.lower(): name for name in choices if not word.lower().startswith(f"{name.lower()}-")}
    exact = get_close_matches(word, names.values(), n=3, cutoff=0.6)
    return exact or [names[name] for name in get_close_matches(word.lower(), names, n=3, cutoff=0.6)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns a hint that lists the choices nearest to ``word``, or an empty string; of the same case if possible.

    >>> did_you_mean("ofload", ["offload", "partition"])
    " · did you mean 'offload'?"
    >>> did_you_mean("zzz", ["offload"]), did_you_mean("true", ["full"])
    ('', ' · did you mean True?')
    """
    names = {name.lower(): name for name in choices}
    similar: list[object] = [*nearest(word, names.values())]
    if word.lower() in _LITERALS and word.lower() not in names:
        similar = [_LITERALS[word.lower()]]
    return " · did you mean " + " or ".join(map(repr, similar)) + "?" if similar else ""
