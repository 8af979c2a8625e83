"""Runs a programme plain and under its policies, and says how the two compare: here, or in a process of its own."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fuzz.bench import differing, run, run_captured
from fuzz.programme import NAMES, Programme
from fuzz.shapes import SHAPES
from graphckpt import GraphckptError, GraphError
from graphckpt.errors import MutatedError, RecomputeError

FAILURES = ("differs", "refused", "crashed", "died")


class Refusal(NamedTuple):
    """A documented one: the plain step runs, and the package raises an error that says why it does not.

    No entry can excuse a difference between the two steps.
    """

    error: type[GraphckptError]
    family: str
    message: str
    """Regular expression of the error."""
    part: str
    """Regular expression of the programme."""
    words: str
    """Those of docs/limits.md."""


_LATER = "edits an argument from a later call on"
_MODIFIED = "its argument `[^`]+` was modified in place"
_NO_COPY = "modified its argument `[^`]+` in place, and the recomputation has no copy of it"
_AFTER, _AFTER_WORDS = "an argument is edited after the block", "modified in place after the block"
_HOOKS = "hooks that copy saved tensors hide an edit"
_HELD = "modified a tensor inside of a list, a dict or an object in place"
_HELD_WORDS = "a tensor that only a container or an object holds"
_SAVED = "a tensor that one of its ops saves was modified in place"
DOCUMENTED = (
    Refusal(RecomputeError, _LATER, _NO_COPY, "", "has no copy of it"),
    Refusal(RecomputeError, _LATER, _MODIFIED, "EditsItsInputLater", "only from a later call on"),
    Refusal(RecomputeError, _AFTER, _MODIFIED, r"EditsChildsOutput\('after'\)", _AFTER_WORDS),
    Refusal(RecomputeError, "edits a tensor that is only held", _HELD, "'held tensor'", _HELD_WORDS),
    Refusal(MutatedError, _HOOKS, _SAVED, "saved_as_copies", "save_on_cpu"),
)


def family_of(error: GraphckptError, programme: Programme) -> str | None:
    """Returns the family of a documented refusal, or ``None`` for any other error."""
    parts = f"{programme.root.expression()} {[step.shape for step in programme.steps]}"
    families = (
        refusal.family
        for refusal in DOCUMENTED
        if type(error) is refusal.error and re.search(refusal.part, parts) and re.search(refusal.message, str(error))
    )
    return next(families, None)


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


def execute(programme: Programme, *, determinism_check: str = "default") -> Outcome:
    steps = [(SHAPES[step.shape], step.options()) for step in programme.steps]
    make_model = partial(_model_of, programme)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = run(make_model, None, steps)
        except Exception as error:
            return Outcome("invalid", _text(error))
        try:
            ours = run(make_model, _rules(programme), steps, determinism_check)
        except GraphckptError as error:
            family = family_of(error, programme)
            return Outcome("documented" if family else "refused", _text(error), family or _place_of(error))
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


def execute_captured(programme: Programme, *, determinism_check: str = "default") -> Outcome:
    """Runs the model of a programme as a captured step, plain and under its policies."""
    make_model = partial(_model_of, programme)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = run_captured(make_model, None, "cuda_graph")
        except Exception as error:  # most of what a plain model does with values on the host cannot be captured
            return Outcome("invalid", _text(error))
        try:
            ours = run_captured(make_model, _rules(programme), "cuda_graph", determinism_check)
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


def execute_apart(
    programme: Programme, *, seconds: float = 60.0, execute: Callable[[Programme], Outcome] = execute
) -> Outcome:
    """Runs a programme in a child that is forked from this process: a crash, or a hang, is an outcome of it."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes that have threads
        child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            with os.fdopen(writer, "w") as pipe:
                json.dump(asdict(execute(programme)), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome("died", signal.Signals(os.WTERMSIG(status)).name)
    return Outcome(**json.loads(told)) if told else Outcome("died", f"no end within {seconds:g} seconds")


def _model_of(programme: Programme) -> nn.Module:
    torch.manual_seed(0)
    return eval(programme.root.expression(), NAMES).train()


def _rules(programme: Programme) -> dict[str, dict[str, Any]]:
    known: dict[str, Any] = {}  # blocks whose fields read the same share a store, as those of a user's variable do
    rules = programme.rules().items()
    return {name: {f: known.setdefault(e, eval(e, NAMES)) for f, e in fields} for name, fields in rules}


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
