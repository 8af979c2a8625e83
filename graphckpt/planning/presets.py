"""Policies that people know from other libraries, as what :func:`graphckpt.apply` takes. Measures nothing.

Each returns a mapping from blocks to policies; ``train.activation_checkpoint.blocks`` takes the same.

>>> from torch import nn
>>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
>>> every_k(layers, 2)
{'0': True, '2': True, '4': True}
>>> first_k(layers, 2)
{'0': True, '1': True}
>>> uniform(layers, 3)
{'': {'rule': 'segments', 'runs': 2}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from graphckpt.blocks.layers import layers
from graphckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Policies: TypeAlias = dict[str, Any]
"""By block: a value of ``activation_checkpointing``."""

_FEWEST = 4  # children of which the square root makes more than one run; the last run is always kept


def every_k(model: nn.Module, k: int, policy: Any = True) -> Policies:
    """Every ``k``-th layer, the first one among them: torchtune's and Transformers' choice of layers.

    Args:
        model: one with layers that can be found.
        k: 1 is all layers.
        policy: what those layers do; by default they run again whole.

    Raises:
        ConfigError: ``k`` is below 1, or no layers can be found.
    """
    _check("every_k: k", k)
    return dict.fromkeys(_found(model)[::k], policy)


def first_k(model: nn.Module, k: int, policy: Any = True) -> Policies:
    """The first ``k`` layers: Megatron's ``recompute_method="block"`` on one pipeline stage.

    Raises:
        ConfigError: ``k`` is below 1, there are fewer layers, or none can be found.
    """
    _check("first_k: k", k)
    found = _found(model)
    if k > len(found):
        raise ConfigError(f"first_k: k is {k}, and there are {len(found)} layers · fix: use 1 to {len(found)}")
    return dict.fromkeys(found[:k], policy)


def uniform(model: nn.Module, n: int) -> Policies:
    """Groups of ``n`` layers, of which each runs again as one: Megatron's ``recompute_method="uniform"``.

    Groups of two layers or more need an ``nn.Sequential`` that calls the layers; where they do not come out even, all
    are about equally long. Its last group is kept, since backward wants it at once; Megatron runs it again too.

    Raises:
        ConfigError: ``n`` is below 1, groups cannot be joined, or no layers can be found.
    """
    _check("uniform: n", n)
    if n == 1:
        return dict.fromkeys(_found(model), True)
    policies: Policies = {}
    for name, stack, children in _stacks(model, f"uniform: groups of {n} layers", "uniform(model, 1)"):
        runs = -(-len(children) // n)
        policies[name] = {"rule": "segments", "runs": min(runs, len(stack))} if runs > 1 else True
    return policies


def sqrt(model: nn.Module) -> Policies:
    """About as many groups as each has layers: least memory with one second run (Chen et al. 2016, arXiv:1604.06174).

    Raises:
        ConfigError: no ``nn.Sequential`` calls the layers, or no layers can be found.
    """
    policies: Policies = {}
    for name, stack, _ in _stacks(model, "sqrt: groups of layers", "memory(model), or every_k(model, 1)"):
        if len(stack) < _FEWEST:
            where = _place(name, model)
            raise ConfigError(f"sqrt: {where} has {len(stack)} children, too few to cut · fix: use every_k(model, 1)")
        policies[name] = {"rule": "segments", "runs": "sqrt"}
    return policies


def memory(model: nn.Module) -> Policies:
    """Little memory for one second run of each layer: :func:`sqrt` where it can act, else all layers run again.

    cybertronai's ``memory`` keeps about a square root of a graph's tensors in the same way.

    Raises:
        ConfigError: no layers can be found.
    """
    try:
        return sqrt(model)
    except ConfigError:
        return dict.fromkeys(_found(model), True)


def speed(model: nn.Module) -> Policies:
    """Keeps what is slow to compute, the results of matrix products and convolutions: cybertronai's ``speed``.

    Raises:
        ConfigError: no layers can be found.
    """
    return {name: {"rule": "selective", "save": "matmul"} for name in _found(model)}


def _found(model: nn.Module) -> list[str]:
    found = layers(model)
    if not found:
        raise ConfigError(
            f"{type(model).__name__}: no list of layers is in it · fix: name the blocks, as graphckpt.apply takes them"
        )
    return found


def _stacks(model: nn.Module, what: str, instead: str) -> Iterator[tuple[str, nn.Sequential, list[str]]]:
    """Yields each ``nn.Sequential`` that calls layers, by name, with the names of those."""
    owners: dict[str, list[str]] = {}
    for name in _found(model):
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    for name, children in owners.items():
        stack = model.get_submodule(name)
        if not isinstance(stack, nn.Sequential) or type(stack).forward is not nn.Sequential.forward:
            raise ConfigError(
                f"{what} need an nn.Sequential that calls them, and {_place(name, model)} is none: code of the model "
                f"calls its layers one by one · fix: {instead}"
            )
        yield name, stack, children


def _place(name: str, model: nn.Module) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{name!r} ({kind})" if name else kind


def _check(what: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{what} is {number!r} · fix: use a whole number from 1 on")
