"""Checks ``graph.pt`` and ``trainer.pt`` of a snapshot field by field, against the run that is resumed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from graphckpt.train.parallel.sharding import placeholder_shape
from graphckpt.train.snapshot.fields import FieldError, integer, is_float, item, mapping, number, sequence, tensor, text

_STEP, _OPTIMIZER, _SCHEDULER = "System-Train-TrainStep", "System-Train-Optimizer-0", "System-Train-LRScheduler-0"
_SCALER = "System-Train-GradScaler"
_COUNTS = {"last_epoch", "_step_count"}
_FACTORED = {"row_var", "col_var"}  # of Adafactor: one dim of the parameter is missing
_FREE = {"lr", "weight_decay", "dampening", "eps", "lr_decay", "maximize", "nesterov", "foreach", "fused", "capturable"}
"""Settings that say nothing of what an optimizer keeps."""
_MOST_GAUSS = 40  # standard deviations; the generators of Python and NumPy never come near
_BELOW_ONE = {"betas", "momentum", "dampening"}


@final
class MismatchedStateError(ValueError):
    """A state is whole, but of another optimizer or schedule than the run has."""


def check_graph(
    graph: Any,
    like: Mapping[str, Any],
    optimizer: Optimizer,
    scheduler: object,
    *,
    done: int,
    num_states: int | None,
    has_changed: bool,
) -> dict[str, Any]:
    """Returns the state of a graph, each field of which has been looked at.

    Args:
        graph: what ``graph.pt`` holds.
        like: the state of the graph that it is for.
        optimizer: of that graph.
        scheduler: of that graph.
        done: iterations that the snapshot counts.
        num_states: parameters that the optimizer has a state of, if that is known.
        has_changed: whether the param groups and the schedule are not used, as the run has others.

    Raises:
        FieldError: a field is missing, of another type, or out of its range.
        MismatchedStateError: the state is that of another optimizer or schedule.
    """
    state = mapping(graph, "(the whole file)")
    step = tensor(item(state, _STEP), _STEP, torch.tensor(0))
    least = 0 if _SCALER in state else done  # an update that overflowed is not counted
    integer(int(step), _STEP, least, done)
    saved = mapping(item(state, _OPTIMIZER), _OPTIMIZER)
    groups = sequence(item(saved, "param_groups"), f"{_OPTIMIZER}.param_groups")
    _check_groups(groups, like[_OPTIMIZER]["param_groups"], has_changed=has_changed, is_known=_is_of_pytorch(optimizer))
    _check_states(item(saved, "state"), optimizer, done=done, count=num_states)
    if _SCHEDULER in like and not has_changed:
        schedule = mapping(item(state, _SCHEDULER), _SCHEDULER)
        if _is_of_pytorch(scheduler):
            _check_schedule(schedule, like[_SCHEDULER], int(step))
    if _SCALER in state:
        scaler = mapping(state[_SCALER], _SCALER)
        _check_like(scaler, like.get(_SCALER, torch.amp.GradScaler("cpu").state_dict()), _SCALER)
    return dict(state)


def is_of_states(optimizer: Optimizer, key: str, before: Any, after: Any) -> bool:
    """Whether the states of an optimizer depend on a setting that has changed, so that they would not fit it.

    They have other entries if a setting such as ``amsgrad`` or ``momentum`` is turned on or off; two settings only say
    how they begin.

    >>> adam = torch.optim.Adam([torch.zeros(1)])
    >>> is_of_states(adam, "amsgrad", False, True), is_of_states(adam, "weight_decay", 0.0, 0.1)
    (True, False)
    """
    if key == "initial_accumulator_value" or (key == "lr" and isinstance(optimizer, torch.optim.Rprop)):
        return True
    is_set = None not in (before, after)  # not a key of another version, nor one that leaves the choice to PyTorch
    return is_set and key in optimizer.defaults and key not in _FREE and bool(before) != bool(after)


def _check_groups(groups: list[Any], like: Sequence[Mapping[str, Any]], *, has_changed: bool, is_known: bool) -> None:
    where = f"{_OPTIMIZER}.param_groups"
    for number_of, saved in enumerate(groups):
        group = mapping(saved, f"{where}[{number_of}]")
        for place, name in enumerate(sequence(item(group, "params"), f"{where}[{number_of}].params")):
            integer(name, f"{where}[{number_of}].params[{place}]")
    sizes, live = [len(group["params"]) for group in groups], [len(group["params"]) for group in like]
    if sizes != live:
        raise MismatchedStateError(f"{where}: expected groups of {live} parameters, got {sizes}")
    for number_of, (group, own) in enumerate(zip(groups, like, strict=True)):
        field = f"{where}[{number_of}]"
        if list(group["params"]) != list(own["params"]):
            raise FieldError(f"{field}.params", "the parameters in their order", group["params"])
        for key, value in own.items() if not has_changed else ():
            if key not in group:
                raise MismatchedStateError(f"{field}.{key}: expected a value, got nothing")
            if is_known or value is not None:
                _check_like(group[key], value, f"{field}.{key}")
            values = group[key] if isinstance(group.get(key), list | tuple) else [group.get(key)]
            if key in _BELOW_ONE and any(isinstance(one, int | float) and one > 1 for one in values):
                raise FieldError(f"{field}.{key}", "1 at most", group[key])


def _is_of_pytorch(part: object) -> bool:
    return type(part).__module__.startswith("torch.optim")


def _check_states(states: Any, optimizer: Optimizer, *, done: int, count: int | None) -> None:
    where = f"{_OPTIMIZER}.state"
    parameters = [(group, one) for group in optimizer.param_groups for one in group["params"]]
    is_known = _is_of_pytorch(optimizer)  # of other optimizers, nothing is known of what they keep
    names: dict[tuple[bool, ...], set[str]] = {}
    kinds: dict[tuple[bool, ...], dict[str, str]] = {}
    for key, saved in mapping(states, where).items():
        integer(key, f"{where}: a key", 0, len(parameters) - 1)
        group, parameter = parameters[key]
        entries = mapping(saved, f"{where}[{key}]")
        if not is_known:
            continue
        flags = tuple(bool(group[name]) for name in sorted(optimizer.defaults) if name not in _FREE and name in group)
        flags += (parameter.ndim > 1,)  # Adafactor keeps other things of matrices
        expected = names.setdefault(flags, set(entries))  # those of equal flags have the same names
        if not entries or set(entries) != expected:
            wanted = ", ".join(sorted(map(str, expected))) or "names"
            raise FieldError(f"{where}[{key}]", f"a mapping of {wanted}", dict(entries))
        for name, value in entries.items():
            text(name, f"{where}[{key}]: a key")
            kind = _check_entry(name, value, parameter, f"{where}[{key}].{name}", done)
            if parameter.ndim and kind != (other := kinds.setdefault(flags, {}).setdefault(name, kind)):
                raise FieldError(f"{where}[{key}].{name}", f"{other}, as of other parameters", value)
    if count is not None and len(states) != count:
        raise FieldError(where, f"the states of {count} parameters", states.keys())


def _check_entry(name: str, value: Any, like: Tensor, field: str, done: int) -> str:
    """Returns what kind of entry this is."""
    shape = list(value.shape) if isinstance(value, Tensor) else placeholder_shape(value)
    if name == "step":
        if shape not in (None, []) or not isinstance(value, Tensor | int | float):
            raise FieldError(field, "a count", value)
        steps = number(value.item() if isinstance(value, Tensor) else value, field, 0)
        if steps > done:
            raise FieldError(field, f"{done} at most", steps)
        return "a count"
    if value is None:
        return "None"
    if name in _FACTORED:
        return type(value).__name__
    if shape is None:
        number(value, field)
        return "a number"
    is_whole = shape == list(like.shape)
    if (shape and not is_whole) or (isinstance(value, Tensor) and not is_float(value) and like.is_floating_point()):
        raise FieldError(field, f"a tensor of {like.dtype} and shape {list(like.shape)}", value)
    return "a tensor" if is_whole else "a tensor without dimensions"


def _check_schedule(saved: Mapping[str, Any], like: Mapping[str, Any], steps: int) -> None:
    for key, value in like.items():
        field = f"{_SCHEDULER}.{key}"
        if key == "last_epoch":
            integer(item(saved, key), field, steps, steps)
        elif key in _COUNTS:
            integer(item(saved, key), field, 0, steps + 2)  # not every schedule counts here
        else:
            _check_like(item(saved, key), value, field)


def _check_like(value: Any, like: Any, field: str) -> None:
    """Compares a value with one of a run that has just begun: of the same kind, and not below zero if that is not."""
    if like is None or isinstance(like, bool):  # flags such as foreach, for which None means to choose
        if value is not None and not isinstance(value, bool):
            raise FieldError(field, "True, False or None", value)
    elif isinstance(like, int | float) or (isinstance(like, Tensor) and like.ndim == 0):
        plain = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
        if not (isinstance(plain, float) and abs(plain) == math.inf == abs(float(like))):
            number(plain, field, 0 if like >= 0 else -math.inf)
    elif isinstance(like, str):
        text(value, field)
    elif isinstance(like, Mapping):
        for key, own in like.items():
            _check_like(item(mapping(value, field), key), own, f"{field}.{key}")
    elif isinstance(like, list | tuple):
        for place, (one, own) in enumerate(zip(sequence(value, field, len(like)), like, strict=True)):
            _check_like(one, own, f"{field}[{place}]")
    elif isinstance(like, Tensor):
        tensor(value, field, like)


def check_trainer(
    trainer: Any, *, buffers: Mapping[str, Tensor], unsaved: Iterable[str], extra: Iterable[str]
) -> dict[str, Any]:
    """Returns the state beside the graph, each field of which has been looked at.

    Args:
        trainer: what ``trainer.pt`` holds.
        buffers: of the model, by name.
        unsaved: the names of those that the snapshot has to hold.
        extra: the names of what the model saves and is no tensor.

    Raises:
        FieldError: a field is missing, of another type, or out of its range.
    """
    state = mapping(trainer, "(the whole file)")
    _check_random(item(state, "random"), "random")
    if "random_of_each" in state:
        for number_of, each in enumerate(sequence(state["random_of_each"], "random_of_each")):
            _check_random(each, f"random_of_each[{number_of}]")
    if "pipeline_parallel_size" in state:
        integer(state["pipeline_parallel_size"], "pipeline_parallel_size", 1)
    settings = mapping(item(state, "settings"), "settings")
    integer(item(settings, "seed"), "settings.seed", most=2**63)
    text(item(settings, "optimizer"), "settings.optimizer")
    for number_of, group in enumerate(sequence(item(settings, "groups"), "settings.groups")):
        mapping(group, f"settings.groups[{number_of}]")
    mapping(item(settings, "schedule"), "settings.schedule")
    saved_buffers = mapping(item(state, "buffers"), "buffers")
    for name in {**dict.fromkeys(unsaved), **saved_buffers}:
        if name not in buffers:
            raise FieldError("buffers", "buffers of this model", name)
        found, like = tensor(item(saved_buffers, name), f"buffers.{name}"), buffers[name]
        if found.dtype != like.dtype or found.ndim != like.ndim:
            raise FieldError(f"buffers.{name}", f"a tensor of {like.dtype} with {like.ndim} dimensions", found)
    others = mapping(item(state, "extra"), "extra")
    for name in {*extra, *others}:
        if name not in others or name not in set(extra):
            raise FieldError("extra", f"values of {sorted(extra)}", sorted(map(str, others)))
    for name, hook in mapping(item(state, "hooks"), "hooks").items():
        mapping(hook, f"hooks.{name}")
    return dict(state)


def _check_random(value: Any, where: str) -> None:
    state = mapping(value, where)
    tensor(item(state, "cpu"), f"{where}.cpu", torch.get_rng_state())
    for number_of, pair in enumerate(sequence(item(state, "devices"), f"{where}.devices")):
        field = f"{where}.devices[{number_of}]"
        name, device_state = sequence(pair, field, 2)
        text(name, field)
        if tensor(device_state, field).dtype != torch.uint8:
            raise FieldError(field, "a tensor of torch.uint8", device_state)
    _, own, *_ = np.random.get_state()  # noqa: NPY002
    kind, keys, position, has_gauss, gauss = sequence(item(state, "numpy"), f"{where}.numpy", 5)
    if kind != "MT19937":
        raise FieldError(f"{where}.numpy[0]", "'MT19937'", kind)
    for key in sequence(keys, f"{where}.numpy[1]", len(own)):
        integer(key, f"{where}.numpy[1]", 0, 2**32 - 1)
    integer(position, f"{where}.numpy[2]", 0, len(own))
    integer(has_gauss, f"{where}.numpy[3]", 0, 1)
    _check_gauss(gauss, f"{where}.numpy[4]")
    version, words, last = sequence(item(state, "python"), f"{where}.python", 3)
    own_version, own_words, _ = random.getstate()
    integer(version, f"{where}.python[0]", own_version, own_version)
    for word in sequence(words, f"{where}.python[1]", len(own_words)):
        integer(word, f"{where}.python[1]", 0, 2**32 - 1)
    integer(words[-1], f"{where}.python[1]", 0, len(own_words) - 1)
    if last is not None:
        _check_gauss(last, f"{where}.python[2]")


def _check_gauss(value: Any, field: str) -> None:
    if abs(number(value, field)) > _MOST_GAUSS:
        raise FieldError(field, f"a normal deviate, at most {_MOST_GAUSS}", value)
