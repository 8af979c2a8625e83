"""Fills in the parts of the reference that are generated: tables of config keys, and the help of the command line.

``<!-- keys: module.Dataclass as train -->`` becomes a table of its fields, followed by those of the sections in it.
``<!-- arguments: module.function as optim.params -->`` becomes a table of the keyword arguments of a function or class;
an argument after ``without`` is left out.
``<!-- help: train -->`` becomes the output of ``graphckpt train --help``.
``<!-- names: policies -->`` becomes a table of one line for each object that ``reference/api/policies.md`` describes.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from graphckpt.cli import _parser

_MARKER = re.compile(r"^<!-- (keys|arguments|help): (\S+)(?: as (\S+))?(?: without (\S+))? -->$", re.MULTILINE)
_NAMES = re.compile(r"^<!-- names: (\w+) -->$", re.MULTILINE)
_API = Path(__file__).parents[1] / "reference" / "api"
_OBJECT = re.compile(r"^::: ([\w.]+)$((?:\n +.*)*)", re.MULTILINE)
_HEAD = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
_COLUMNS = "100"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Mkdocs calls this for every page."""
    del kwargs
    return fill_in(markdown)


def fill_in(markdown: str) -> str:
    """Returns a page with its markers replaced."""
    return _MARKER.sub(_generated, _NAMES.sub(lambda found: _names(found[1]), markdown))


def _names(page: str) -> str:
    """Returns a table of the objects that a page of the API describes, each with the start of its docstring."""
    rows = ["| name | |", "| --- | --- |"]
    for path, target, options in _objects((_API / f"{page}.md").read_text(encoding="utf-8")):
        name = path.rpartition(".")[2]
        summary = _as_markdown(inspect.cleandoc(target.__doc__ or "").partition("\n\n")[0])
        heading = re.search(r"^      heading: (\S+)$", options, re.MULTILINE)
        shown = heading[1] if heading else name if "show_root_full_path: false" in options else path
        rows.append(f"| [`{shown}`](api/{page}.md#{path}) | {summary} |")
    return "\n".join(rows)


def _objects(markdown: str) -> Iterator[tuple[str, Any, str]]:
    """Yields path, object and options of each name that a page describes; of a module its public functions."""
    for path, options in _OBJECT.findall(markdown):
        target = pkgutil.resolve_name(path)
        if inspect.ismodule(target):
            functions = inspect.getmembers(target, inspect.isfunction)
            own = [one for name, one in functions if one.__module__ == path and not name.startswith("_")]
            yield from ((f"{path}.{one.__name__}", one, options) for one in own)
        else:
            yield path, target, options


def _generated(found: re.Match[str]) -> str:
    kind, name, prefix, without = found.groups()
    if kind == "help":
        return f"```text\n{command_help(name)}```"
    module, _, attribute = name.rpartition(".")
    target = getattr(importlib.import_module(module), attribute)
    return "\n".join(_sections(target, prefix)) if kind == "keys" else _arguments(target, prefix, without)


def command_help(command: str) -> str:
    """Returns what ``graphckpt COMMAND --help`` prints."""
    choices = next(a.choices for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    with mock.patch.dict(os.environ, {"COLUMNS": _COLUMNS}):
        return choices[command].format_help()


def _sections(kind: type, prefix: str, heading: str = "") -> Iterator[str]:
    """Yields the table of a dataclass, and those of the dataclasses in it, each below a heading of its own."""
    rows, inner = [], []
    meanings = _docstrings_of_fields(kind)
    for field in dataclasses.fields(kind):
        key = f"{prefix}.{field.name}" if prefix else field.name
        if dataclasses.is_dataclass(field.default_factory):
            inner.append((field.default_factory, key))
        else:
            rows.append(_row(key, str(field.type), _default(field), meanings[field.name]))
    yield heading + _HEAD + "\n".join(rows) + "\n"
    for section, key in inner:
        summary = inspect.cleandoc(section.__doc__ or "").partition("\n")[0]
        yield from _sections(section, key, f"### {key}\n\n{_as_markdown(summary)}\n\n")


def _docstrings_of_fields(kind: type) -> dict[str, str]:
    """Returns the string below each field of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = str(below.value.value)
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return field.default.__name__ if callable(field.default) else repr(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())


def _arguments(target: Callable[..., Any], prefix: str, without: str | None) -> str:
    text = inspect.cleandoc(target.__doc__ or "")
    meanings = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE))
    rows = [
        _row(f"{prefix}.{name}", str(parameter.annotation), repr(parameter.default), meanings[name])
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.default is not parameter.empty and name != without
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _row(key: str, kind: str, default: str, meaning: str) -> str:
    return f"| `{key}` | `{kind}` | `{default}` | {_as_markdown(meaning)} |"


def _as_markdown(text: str) -> str:
    """Returns a docstring as one line of Markdown, which begins with a capital letter."""
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
    return line[:1].upper() + line[1:]
