"""What a Graph saves and loads: the state of its modules by attribute name, and that of the training beside them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphckpt.errors import GraphError, bullets
from graphckpt.graph.update import Update


def saved_state(roots: Mapping[str, nn.Module], update: Update, destination: Any) -> OrderedDict[str, Any]:
    """Returns each module's state under its name; with an optimizer, those of optimizers, schedulers and scaler."""
    state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
    for name, module in roots.items():
        state[name] = module.state_dict()
    if update.optimizers:
        state.update(update.state_dict())
    return state


def load_state(
    graph_name: str, roots: Mapping[str, nn.Module], update: Update, state: Mapping[str, Any], *, strict: bool
) -> None:
    """Loads what :func:`saved_state` returned; if ``strict``, all of it or nothing."""
    own = saved_state(roots, update, None)
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    for name in [name for name in roots if name in state]:
        missing += [f"{name}.{key}" for key in own[name] if key not in state[name]]
        unknown += [f"{name}.{key}" for key in state[name] if key not in own[name]]
    shapes = [
        f"{name}.{key}: expected shape {tuple(own[name][key].shape)}, got {tuple(value.shape)}"
        for name in roots
        for key, value in (state.get(name) or {}).items()
        if isinstance(value, torch.Tensor) and key in own[name] and value.shape != own[name][key].shape
    ]
    named = {"missing": missing, "unexpected": unknown} if strict else {}
    faults = [f"{word} {', '.join(map(str, keys))}" for word, keys in named.items() if keys] + shapes
    if faults:
        fix = "fix: load a state of this Graph" + (", or strict=False" if strict and not shapes else "")
        raise GraphError(bullets(f"{graph_name}.load_state_dict: nothing is loaded", [*faults, fix]))
    for name, module in roots.items():
        if name in state:
            module.load_state_dict(state[name], strict=strict)
    update.load_state_dict(state)
