"""Runs a programme plain and under its policies, and says how the two compare."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fuzz.bench import differing, run, run_captured
from fuzz.documented import family_of
from fuzz.programme import NAMES, Programme
from fuzz.shapes import SHAPES
from graphckpt import GraphckptError, GraphError

FAILURES = ("differs", "refused", "crashed", "died")


@dataclass(frozen=True)
class Outcome:
    """How a programme ended: ``invalid``, ``same``, ``documented``, or one of ``FAILURES``; and what was seen.

    ``where`` is the family of a documented refusal, or the line that raised an error.
    """

    kind: str
    what: str = ""
    where: str = ""

    @property
    def failed(self) -> bool:
        """Whether the engine has to be looked at."""
        return self.kind in FAILURES

    def is_like(self, other: Outcome) -> bool:
        """Whether two failures may have one cause."""
        return self.kind == other.kind and _class_of(self) == _class_of(other)


def execute(programme: Programme) -> Outcome:
    """Runs a programme both ways."""
    steps = [(SHAPES[step.shape], step.options()) for step in programme.steps]
    make_model = partial(_model_of, programme)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = run(make_model, None, steps)
        except Exception as error:
            return Outcome("invalid", _text(error))
        try:
            ours = run(make_model, _rules(programme), steps)
        except GraphckptError as error:
            family = family_of(error, programme)
            return Outcome("refused" if family is None else "documented", _text(error), family or _place_of(error))
        except Exception as error:
            return Outcome("crashed", _text(error), _place_of(error))
        names = differing(ours, plain)
        if not names:
            return Outcome("same")
        if differing(run(make_model, None, steps), plain):
            return Outcome("invalid", "the plain steps are not the same twice")
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        values = f" {ours['left behind']}" if names[0] == "left behind" else ""
        return Outcome("differs", f"{names[0]}{values}{more}")


def execute_captured(programme: Programme) -> Outcome:
    """Runs the model of a programme as a captured step, plain and under its policies."""
    make_model = partial(_model_of, programme)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = run_captured(make_model, None, "cuda_graph")
        except Exception as error:  # most of what a plain model does with values on the host cannot be captured
            return Outcome("invalid", _text(error))
        try:
            ours = run_captured(make_model, _rules(programme), "cuda_graph")
        except GraphckptError as error:
            has_disk = isinstance(error, GraphError) and "isk" in str(programme.rules())
            kind = "documented" if has_disk else "refused"
            return Outcome(kind, _text(error), "captures of a store on disk" if has_disk else _place_of(error))
        except Exception as error:
            return Outcome("crashed", _text(error), _place_of(error))
        eager = run_captured(make_model, None, "eager")
    for name, values in (("captured plain step", plain), ("captured step", ours)):
        if names := differing(values, eager):
            return Outcome("differs", f"{name}: {names[0]} and {len(names) - 1} more")
    return Outcome("same")


def evaluate(expression: str) -> Any:
    """Returns the value of an expression of a programme."""
    return eval(expression, NAMES)


def _model_of(programme: Programme) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = evaluate(programme.model_expression())
    return model.train()


def _rules(programme: Programme) -> dict[str, dict[str, Any]]:
    known: dict[str, Any] = {}  # blocks whose fields read the same share a store, as those of a user's variable do
    rules = programme.rules().items()
    return {name: {f: known.setdefault(e, evaluate(e)) for f, e in fields} for name, fields in rules}


def _text(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _place_of(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno} {last.name}"


def _class_of(outcome: Outcome) -> str:
    if outcome.kind == "differs":
        return "left behind" if outcome.what.startswith("left behind") else ""
    return re.sub(r"[\d.]+|`[^`]*`|\w*: its|^\w+: \S+:", "#", outcome.what)
