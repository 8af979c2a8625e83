"""Sets the policies that updates of a training run under: those that show what options take, then those of the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

from torch import nn

from graphckpt.blocks.apply import Handle, apply
from graphckpt.blocks.forward import policy_of
from graphckpt.planning.candidates import Option, compiled_forwards, parse_compile
from graphckpt.planning.options import PlanOptions
from graphckpt.planning.rows import PlanRow
from graphckpt.planning.step_clock import Blocks
from graphckpt.stores.base import Store
from graphckpt.undo import Undo, enter, put_back

BlockChoice: TypeAlias = tuple[Option, Store | None]
"""The option of a block, and where that stores saved tensors; ``None`` is the device."""


class UpdatePolicies(ABC):
    """Sets the policies that updates run under."""

    handle: Handle | None = None
    """That of the plan, if its policies were applied to the modules themselves."""

    @abstractmethod
    def install(
        self, blocks: Sequence[tuple[str, nn.Module]], choices: Sequence[BlockChoice], head: Sequence[PlanRow]
    ) -> None:
        """Gives each block its choice, and the blocks of ``head`` those policies."""

    @abstractmethod
    def apply(self, policies: Mapping[str, Mapping[str, Any]]) -> None:
        """Gives blocks the policies of a plan, by name."""

    @abstractmethod
    def remove(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Removes all of these policies."""


@final
class ModulePolicies(UpdatePolicies):
    """Sets policies on the modules, where they stay until they are removed.

    Args:
        model: The model.
        options: Of which ``compile`` says how its blocks are compiled.
    """

    def __init__(self, model: nn.Module, options: PlanOptions) -> None:
        self._model = model
        self._code = parse_compile(options.compile, options.candidates)
        self._installed: dict[str, tuple[nn.Module, BlockChoice, Undo]] = {}
        """The module and the option of each block while there is no ``handle``, and how to remove its policy."""
        self._head: Handle | None = None

    def install(
        self, blocks: Sequence[tuple[str, nn.Module]], choices: Sequence[BlockChoice], head: Sequence[PlanRow]
    ) -> None:
        # Blocks whose option stays keep what their first call has taught.
        if head and self._head is None:
            self._head = apply(self._model, {row.block: row.fields for row in head})
        for (name, module), choice in zip(blocks, choices, strict=True):
            before = self._installed.get(name)
            if before is not None and before[:2] == (module, choice):
                continue
            if before is not None:
                put_back(before[2])
            if (wrapper := policy_of(module)) is not None:  # of a copy, which took it along
                wrapper.uninstall()
            option, store = choice
            undo: Undo = []
            self._installed[name] = module, choice, undo
            enter(undo, compiled_forwards([module], self._code.options))
            enter(undo, Blocks([(name, module)]).under([option], [store]))

    def apply(self, policies: Mapping[str, Mapping[str, Any]]) -> None:
        self.handle = apply(self._model, dict(policies))

    def remove(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        for handle in (self.handle, self._head):
            if handle is not None:
                handle.remove()
        self.handle = self._head = None
        for _, _, undo in self._installed.values():
            put_back(undo)
        self._installed.clear()
        for _, module in blocks:
            if (wrapper := policy_of(module)) is not None:  # of a copy, which took it along
                wrapper.uninstall()
