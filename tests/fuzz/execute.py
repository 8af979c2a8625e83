"""Runs a programme plain and under its policies, and says how the two compare."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuzz.bench import differing, run
from fuzz.documented import reason_for
from fuzz.programme import NAMES, Programme
from fuzz.shapes import SHAPES
from graphckpt import GraphckptError

FAILURES = ("differs", "refused", "crashed", "died")


@dataclass(frozen=True)
class Outcome:
    """How a programme ended: ``invalid``, ``same``, ``documented``, or one of ``FAILURES``; and what was seen."""

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

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = evaluate(programme.model_expression())
        return model.train()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = run(make_model, None, steps)
        except Exception as error:
            return Outcome("invalid", _text(error))
        try:
            ours = run(make_model, _rules(programme), steps)
        except GraphckptError as error:
            return Outcome(
                "documented" if reason_for(str(error), programme) else "refused", _text(error), _place_of(error)
            )
        except Exception as error:
            return Outcome("crashed", _text(error), _place_of(error))
        names = differing(ours, plain)
        if not names:
            return Outcome("same")
        if differing(run(make_model, None, steps), plain):
            return Outcome("invalid", "the plain steps are not the same twice")
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        values = f" {ours['left behind']}" if names[0] == "left behind" else ""
        what = f"{names[0]}{values}{more}"
        return Outcome("documented" if reason_for(what, programme) else "differs", what)


def evaluate(expression: str) -> Any:
    """Returns the value of an expression of a programme."""
    return eval(expression, NAMES)


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
