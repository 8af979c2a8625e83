"""All modules below some roots as lists, which the backup of each step of a Graph reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from graphckpt.tree import ATOMS

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_TORCH = frozenset(nn.Module().__dict__)


@final
class ModuleTree:
    """All modules below some roots, as lists that a backup of each step reads.

    Args:
        roots: Modules, each with all below it.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = list(roots)
        self.modules = list(dict.fromkeys(module for root in self._roots for module in root.modules()))
        self.children = [(m._modules, m._modules.copy()) for m in self.modules]
        """The dictionary of the children of each module, and a copy of it."""
        self.dictionaries = [own for m in self.modules for own in (m.__dict__, m._parameters, m._buffers)]
        self._own_keys = [_own_keys(m.__dict__) for m in self.modules]
        self.renormalized: list[Any] = [m for m in self.modules if _renormalizes(m)]

    def is_of(self, roots: Iterable[nn.Module]) -> bool:
        """Whether these are the roots, and no module below was added, removed or replaced since."""
        return list(roots) == self._roots and all(now == then for now, then in self.children)

    def attributes(self) -> list[Any]:
        """Returns the attributes of the modules that are no plain numbers or texts and not those of every module."""
        values = []
        for number, module in enumerate(self.modules):
            fields, (count, keys) = module.__dict__, self._own_keys[number]
            try:
                own = [fields[key] for key in keys]
            except KeyError:
                count = -1
            if len(fields) != count:  # of torch's keys none is ever removed: as many keys are the same keys
                _, keys = self._own_keys[number] = _own_keys(fields)
                own = [fields[key] for key in keys]
            values += [value for value in own if type(value) not in ATOMS]
        return values

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters, those that several modules share several times."""
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    def buffers(self) -> list[torch.Tensor]:
        """Returns the buffers."""
        return [b for module in self.modules for b in module._buffers.values() if b is not None]


def _own_keys(fields: dict[str, Any]) -> tuple[int, list[str]]:
    return len(fields), [key for key in fields if key not in _OF_TORCH]


def _renormalizes(module: nn.Module) -> bool:
    """Whether a forward modifies the weight of ``module`` in place, as embeddings with ``max_norm`` do."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
