"""Writes a programme as a script that runs by itself: torch and graphckpt are all that it imports."""

from __future__ import annotations

import ast
import inspect
import re

from helpers import modules

from fuzz import bench, choices, containers, layers, shapes
from fuzz.execute import Outcome
from fuzz.programme import Programme

_IMPORTS = """\
from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import graphckpt
from graphckpt import Disk, Host, Segments, Selective, Tiles
from graphckpt.engine.execution import running

torch.set_num_threads(1)
warnings.simplefilter("ignore")
"""

_END = """\
plain = run(make_model, None, STEPS)
ours = run(make_model, RULES, STEPS)
names = differing(ours, plain)
print("what differs:", names or "nothing")
for name in names[:3]:
    print(f"{name}\\n  plain: {str(plain.get(name))[:200]}\\n  ours:  {str(ours.get(name))[:200]}")
"""


def script_of(programme: Programme, outcome: Outcome, title: str) -> str:
    """Returns the source of a script that shows how a programme fails."""
    rules = "".join(
        f"    {name!r}: {{{', '.join(f'{field!r}: {value}' for field, value in fields)}}},\n"
        for name, fields in programme.rules().items()
    )
    steps = ", ".join(f"({step.shape}, {step.options()!r})" for step in programme.steps)
    model = f"""\
def make_model() -> nn.Module:
    torch.manual_seed(0)
    return {programme.root.expression()}.train()


RULES = {{
{rules}}}
STEPS = [{steps}]
"""
    sources = _sources_for(f"{model}\n{_END}")
    comment = "".join(f"# {line}\n" for line in (title, f"{outcome.kind}: {outcome.what}", outcome.where) if line)
    return "\n\n".join([f"{comment}{_IMPORTS}", *sources, model, _END])


def _sources_for(text: str) -> list[str]:
    """Returns the sources of all that ``text`` names, and of what these name, in the order of their definitions."""
    known: dict[str, str] = {}
    for module in (modules, layers, containers, choices, bench, shapes):
        source = inspect.getsource(module)
        lines = source.splitlines()
        for item in ast.parse(source).body:
            if isinstance(item, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
                first = min([item.lineno, *(decorator.lineno for decorator in getattr(item, "decorator_list", ()))])
                name = item.targets[0].id if isinstance(item, ast.Assign) else item.name
                known[name] = "\n".join(lines[first - 1 : item.end_lineno]) + "\n"
    wanted: set[str] = set()
    todo = [text]
    while todo:
        words = set(re.findall(r"\w+", todo.pop()))
        new = [name for name in known if name in words and name not in wanted]
        wanted.update(new)
        todo.extend(known[name] for name in new)
    return [source for name, source in known.items() if name in wanted]
