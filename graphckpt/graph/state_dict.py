"""What a Graph saves and loads: the state of its modules by attribute name, and that of the training beside them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from graphckpt.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

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
    if strict and (missing or unknown):
        raise GraphError(
            f"{graph_name}.load_state_dict: missing {missing}, unknown {unknown} · fix: load a state of this graph"
        )
    for name, module in roots.items():
        if name in state:
            module.load_state_dict(state[name], strict=strict)
    update.load_state_dict(state)
