"""After Ctrl-C while a `with` of the library is entered or left, nothing that it had set remains."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import pytest
import torch
from helpers.interrupts import POLICIES, Place, Subject, interrupt_at, left_in_thread, name_of, places
from torch import nn

import graphckpt
from graphckpt import _compat, _compat_memory
from graphckpt.blocks import disable_checkpointing
from graphckpt.blocks.forward import checkpointing_is_off, policy_of
from graphckpt.engine.execution import put_surroundings_back
from graphckpt.engine.sampling import forced_check
from graphckpt.ledger import recorder

_OPTIMIZERS = sys.modules["torch.optim.optimizer"]
_PATCHED = [
    (torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "disable_saved_tensors_hooks"),
    (torch.autocast, "__init__"), (torch.nn.init, "_no_grad_trunc_normal_"), (torch.utils, "swap_tensors"),
]  # fmt: skip


_TABLES = [name for name in vars(nn.Identity()) if name.endswith("_hooks") or "_hooks_" in name]


def state(model: nn.Module) -> dict[str, Any]:
    """Returns what contexts of the library set for a time: in the thread, the process, and the modules of a model."""
    return {
        "thread": left_in_thread(),
        "disabled": checkpointing_is_off(),
        "value checks": forced_check.get(),
        "hooks suspended in transforms": list(recorder._suspendable),
        "listeners to resized storages": (list(_compat_memory._listeners), "resize_" in vars(torch.UntypedStorage)),
        "hooks of optimizers": [
            [*vars(_OPTIMIZERS)[f"_global_optimizer_{when}_hooks"].values()] for when in ("pre", "post")
        ],
        "hooks of modules": [[id(each) for t in _TABLES for each in vars(m)[t].values()] for m in model.modules()],
        "flags of hooks": [[[*vars(m)[t]] for t in _TABLES] for m in model.modules()],
        "hooks of parameters": [
            len(p._backward_hooks or p._post_accumulate_grad_hooks or ()) for p in model.parameters()
        ],
        "policies": [id(policy_of(m)) for m in model.modules()],
        "objects frozen": gc.get_freeze_count() > 0,
        "replaced": [vars(owner).get(name) for owner, name in _PATCHED],
        "training": [m.training for m in model.modules()],
    }  # fmt: skip


_METHODS = {"__enter__", "__exit__", "_exit", "close", "put_back", "enter", "_install", "_put_back", "end", "uninstall"}


def sets_and_resets(code: CodeType) -> bool:
    if code.co_qualname == "Ending.__get__":  # where `with apply(...)` begins, before which policies are set for good
        return False
    is_scope = "undo" in code.co_varnames[: code.co_argcount]
    return (
        is_scope
        or ("graphckpt" in code.co_filename and code.co_name in _METHODS)
        or code.co_filename.endswith("undo.py")
    )


def interrupt(call: Callable[[], object], place: Place) -> BaseException | None:
    """Interrupts a call at a place; the error that it returns is kept by a caller, as IPython keeps the last one."""
    try:
        interrupt_at(call, place)
    except KeyboardInterrupt as error:
        return error
    return None


def measured(subject: Subject) -> None:
    with subject.handles[0].measure():
        subject.step(5)


def disabled(subject: Subject) -> None:
    with disable_checkpointing():
        subject.step(5)


def applied(subject: Subject) -> None:
    with graphckpt.apply(subject.model, POLICIES["full"]):
        subject.step(5)


def planned(subject: Subject) -> None:
    step = partial(subject.step, 5)
    graphckpt.plan(subject.model, step, memory_budget="1GiB", select=["1", "2", "3"], progress=False)


def verified(subject: Subject) -> None:
    graphckpt.verify(subject.model, partial(subject.step, 5), POLICIES["full"], steps=1, show=False)


CALLS: dict[str, tuple[Callable[[Subject], None], dict[str, Any], int]] = {
    "measure": (measured, POLICIES["full"], 5),
    "disable_checkpointing": (disabled, POLICIES["full"], 1),
    "apply": (applied, {}, 3),
    "plan": (planned, {}, 67),
    "verify": (verified, {}, 31),
}
"""A call, the policies that are set before, and of how many places one is tried."""


def faults_of(
    call: Callable[[Subject], None],
    policies: dict[str, Any],
    every: int,
    is_chosen: Callable[[CodeType], bool] = sets_and_resets,
) -> dict[str, list[str]]:
    subject = Subject(policies)
    call(subject)  # imports, and what a first call learns
    chosen = [place for place in places(partial(call, subject)) if sets_and_resets(place[0])][::every]
    assert chosen
    faults = {}
    for place in chosen:
        before = state(subject.model)
        error = interrupt(partial(call, subject), place)
        after = state(subject.model)
        found = [f"{name} with the error: {after[name]}" for name in before if before[name] != after[name]]
        del error
        found += subject.faults(lambda: None, checks_bytes=False)
        if found:
            faults[name_of(place)] = found
            subject.close()
            put_surroundings_back((None, None, _compat.NO_MODES, 0))
            subject = Subject(policies)
            call(subject)
    subject.close()
    return faults


@pytest.fixture
def _interrupts_in_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # an interrupt in the callback of a weak reference


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("_interrupts_in_callbacks")
def test_an_interrupt_where_a_with_is_entered_or_left_leaves_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert faults_of(*CALLS[name]) == {}
