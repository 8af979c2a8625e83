"""What the callback of any trainer does: puts policies on, looks once at what they keep, takes them off again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from graphckpt.errors import GraphError
from graphckpt.integrations.policies import Policies
from graphckpt.rules import Keep
from graphckpt.undo import put_back, replace_item

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphckpt.blocks import Handle
    from graphckpt.blocks.select import Selector
    from graphckpt.integrations.policies import Value
    from graphckpt.ledger.record import Explanation
    from graphckpt.undo import Undo

_OWN = "gradient_checkpointing"


class PolicyCallback:
    """The keys that all callbacks take, and what is in force; when to act is for the trainer's own class to say."""

    def __init__(
        self,
        rule: Value = True,
        *,
        unit: Selector | Sequence[Selector] | None = None,
        blocks: Mapping[Selector, Value] | None = None,
        report: bool = True,
        **fields: Any,
    ) -> None:
        self._policies = Policies(type(self).__name__, rule, unit, blocks, fields)
        self._report = report
        self._measuring = ExitStack()
        self._disabled: Undo = []
        self.handle: Handle | None = None
        """What is in force; ``None`` unless a training is under way."""
        self.explanation: Explanation | None = None
        """What the first step of the last training kept; ``None`` before it."""

    def _put_on(self, model: nn.Module) -> None:
        self._take_off()  # what a training that ended in an error has left
        self.explanation = None
        self.handle = self._policies.put_on(model)
        self._disable_own_checkpointing()

    def _disable_own_checkpointing(self) -> None:
        """Switches off, until the policies are removed, checkpointing that a recomputed block does in ``__call__``.

        Transformers 5.17 does it there, around the forward that a policy replaces, so that no policy would act.
        """
        for wrapper in self.handle._wrappers if self.handle is not None else ():
            block = wrapper.module
            if block is None or isinstance(wrapper.rule, Keep) or type(block).__call__ is nn.Module.__call__:
                continue
            if block.__dict__.get(_OWN):
                replace_item(block.__dict__, _OWN, False, self._disabled)

    def _measure(self) -> None:
        """Has the coming step watched op by op until :meth:`_look`, if nothing has shown yet what is kept."""
        if self.handle is not None and self.explanation is None:
            self._measuring.enter_context(self.handle.measure())

    def _look(self) -> Explanation | None:
        """Returns what the first step kept, the first time only; ``None`` too if the model has not run."""
        self._measuring.close()
        if self.handle is None or self.explanation is not None:
            return None
        try:
            self.explanation = self.handle.explain(show=False)
        except GraphError:
            return None
        return self.explanation

    def _take_off(self) -> None:
        self._measuring.close()
        put_back(self._disabled)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
