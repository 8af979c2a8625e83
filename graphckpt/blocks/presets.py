"""Well-known policies of other libraries, as mappings for :func:`graphckpt.apply`.

Each returns a mapping from blocks to policies; ``train.activation_checkpoint.policies`` takes the same.

>>> from torch import nn
>>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
>>> every_k(layers, 2)
{'0': True, '2': True, '4': True}
>>> first_k(layers, 2)
{'0': True, '1': True}
>>> uniform(layers, 3)
{'0': True, '1': 'joined', '2': 'joined', '3': True, '4': 'joined', '5': 'joined'}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from torch import nn

from graphckpt.blocks.select import layers
from graphckpt.errors import ConfigError
from graphckpt.rules.segments import segment_starts

Policies: TypeAlias = dict[str, Any]
"""By block: a value of ``activation_checkpointing``."""

_FEWEST = 4  # children for which the square root gives more than one run; the last run is always kept


def every_k(model: nn.Module, k: int, policy: Any = True) -> Policies:
    """Every ``k``-th layer, starting with the first, as in torchtune and Transformers.

    Args:
        model: a model with a list of layers.
        k: 1 selects all layers.
        policy: the policy of those layers; by default ``full``.

    Raises:
        ConfigError: ``k`` is below 1, or no layers were found.
    """
    _check("every_k: k", k)
    return dict.fromkeys(_layers(model)[::k], policy)


def first_k(model: nn.Module, k: int, policy: Any = True) -> Policies:
    """The first ``k`` layers: Megatron's ``recompute_method="block"`` on one pipeline stage.

    Raises:
        ConfigError: ``k`` is below 1, or there are fewer layers.
    """
    _check("first_k: k", k)
    names = _layers(model)
    if k > len(names):
        raise ConfigError(f"first_k: expected k up to {len(names)}, got {k} · fix: use 1 to {len(names)}")
    return dict.fromkeys(names[:k], policy)


def uniform(model: nn.Module, n: int) -> Policies:
    """Groups of ``n`` layers, each recomputed as one: Megatron's ``recompute_method="uniform"``.

    The last group of a stack of layers may be shorter.

    Raises:
        ConfigError: ``n`` is below 1, or no layers were found.
    """
    _check("uniform: n", n)
    groups = [stack[first : first + n] for stack in _stacks(model) for first in range(0, len(stack), n)]
    return _joined(groups)


def sqrt(model: nn.Module) -> Policies:
    """About √n groups of √n layers: least memory with one recomputation (Chen et al. 2016, arXiv:1604.06174).

    The last group of a stack of layers is kept, since backward starts with it.

    Raises:
        ConfigError: a stack has too few layers, or no layers were found.
    """
    groups = []
    for stack in _stacks(model):
        if len(stack) < _FEWEST:
            raise ConfigError(
                f"sqrt: {stack[0]!r}: expected at least {_FEWEST} layers, got {len(stack)} · fix: every_k(model, 1)"
            )
        starts = segment_starts(num_children=len(stack), num_segments="sqrt")
        groups += [stack[first:end] for first, end in pairwise(starts)]
    return _joined(groups)


def _layers(model: nn.Module) -> list[str]:
    names = layers(model)
    if not names:
        raise ConfigError(
            f"{type(model).__name__}: no list of layers was found · fix: name the blocks, as graphckpt.apply takes them"
        )
    return names


def _stacks(model: nn.Module) -> list[list[str]]:
    """Returns the layers, those of one list together."""
    owners: dict[str, list[str]] = {}
    for name in _layers(model):
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return list(owners.values())


def _joined(groups: Iterable[Sequence[str]]) -> Policies:
    return {name: "joined" if number else True for group in groups for number, name in enumerate(group)}


def _check(what: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{what}: expected a positive int, got {number!r} · fix: use a whole number from 1 on")
