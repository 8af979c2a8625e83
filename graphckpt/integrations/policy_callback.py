"""The base of all callbacks: applies policies to a model, reports once what they save, and removes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

from torch import nn

from graphckpt.blocks import BlockConfig, Handle, apply
from graphckpt.blocks.config import fields_of
from graphckpt.blocks.find_layers import layers
from graphckpt.errors import ConfigError, GraphError
from graphckpt.rules import Keep
from graphckpt.undo import put_back, replace_item
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphckpt.blocks.select import Selector
    from graphckpt.ledger.explanation import Explanation
    from graphckpt.rules import Rule
    from graphckpt.undo import Undo

    Value = Mapping[str, Any] | Rule | bool | str | None

_OWN_FLAG = "gradient_checkpointing"


@final
class CallbackPolicies:
    """The arguments of a callback: checked at once, and applied to a model when training starts.

    Args:
        owner: The callback's name, for messages.
        rule: The rule of every unit: a value of ``activation_checkpointing``; ``None`` for no rule.
        unit: Class names, name patterns or classes of the units; ``None`` is the items of its stacks of layers.
        blocks: On top of that, by selector, as :func:`graphckpt.apply` takes them.
        fields: Further fields of a :class:`~graphckpt.BlockConfig` for every unit, such as ``offload``.

    Raises:
        ConfigError: A field does not exist, or a value means nothing for it.
    """

    def __init__(
        self,
        owner: str,
        rule: Value = True,
        unit: Selector | Sequence[Selector] | None = None,
        blocks: Mapping[Selector, Value] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._owner = owner
        self._unit = unit
        self._fields = {"activation_checkpointing": rule, **(fields or {})}
        self._blocks = dict(blocks or {})
        BlockConfig(owner).update(self._fields)
        for selector, value in self._blocks.items():
            BlockConfig(f"{owner}.blocks[{selector!r}]").update(fields_of(value))

    def apply_to(self, model: nn.Module) -> Handle:
        """Applies the policies to ``model``.

        Raises:
            ConfigError: No unit can be found, a selector matches nothing, or a block has a policy already.
        """
        rules: dict[Selector, Any] = {}
        if any(value is not None for value in self._fields.values()):
            rules = dict.fromkeys(self._units(model), self._fields)
        for selector, value in self._blocks.items():
            rules[selector] = {**rules.pop(selector, {}), **fields_of(value)}  # last, so that it comes on top
        return apply(model, rules)

    def _units(self, model: nn.Module) -> list[Selector]:
        if self._unit is not None:
            given = [self._unit] if isinstance(self._unit, (str, type, re.Pattern)) else self._unit
            return [found for selector in given for found in _of_class(model, selector)]
        found = layers(model)
        if not found and not self._blocks:
            fix = f"name its class or its blocks: {self._owner}(unit='Block'), or {self._owner}(unit='layers.*')"
            raise ConfigError(f"{self._owner}: {type(model).__name__} has no stack of layers · fix: {fix}")
        return list(found)


class PolicyCallback:
    """The arguments of all callbacks, and the applied policies; subclasses decide when to act."""

    def __init__(
        self,
        rule: Value = True,
        *,
        unit: Selector | Sequence[Selector] | None = None,
        blocks: Mapping[Selector, Value] | None = None,
        report: bool = True,
        **fields: Any,
    ) -> None:
        self._policies = CallbackPolicies(type(self).__name__, rule, unit, blocks, fields)
        self._report = report
        self._measuring = ExitStack()
        self._disabled: Undo = []
        self.handle: Handle | None = None
        """The handle of the applied policies; ``None`` outside of training."""
        self.explanation: Explanation | None = None
        """What the first step of the last training saved; ``None`` before it."""

    def _apply(self, model: nn.Module) -> None:
        self._remove()  # left by a training that ended in an error
        self.explanation = None
        self.handle = self._policies.apply_to(model)
        self._disable_own_checkpointing()

    def _disable_own_checkpointing(self) -> None:
        """Disables, until the policies are removed, checkpointing that a recomputed block does in ``__call__``.

        Transformers 5.17 does it there, around the forward that a policy replaces, so that the policy has no effect.
        """
        for wrapper in self.handle._wrappers if self.handle is not None else ():
            block = wrapper.module
            if block is None or isinstance(wrapper.rule, Keep) or type(block).__call__ is nn.Module.__call__:
                continue
            if block.__dict__.get(_OWN_FLAG):
                replace_item(block.__dict__, _OWN_FLAG, False, self._disabled)

    def _measure(self) -> None:
        """Measures the next step op by op until :meth:`_explain_once`, unless that is done."""
        if self.handle is not None and self.explanation is None:
            self._measuring.enter_context(self.handle.measure())

    def _explain_once(self) -> Explanation | None:
        """Returns what the first step saved, once; ``None`` afterwards, or if the model has not run."""
        self._measuring.close()
        if self.handle is None or self.explanation is not None:
            return None
        try:
            self.explanation = self.handle.explain(show=False)
        except GraphError:
            return None
        return self.explanation

    def _remove(self) -> None:
        self._measuring.close()
        put_back(self._disabled)
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def saved_line(seen: Explanation) -> str:
    """Returns what the policies saved, in one line."""
    parts = [f"{format_bytes(seen.bytes_before)} -> {format_bytes(seen.bytes_after)}"]
    parts += [
        f"{format_bytes(num_bytes)} {where}"
        for num_bytes, where in ((seen.bytes_host, "in host memory"), (seen.bytes_disk, "on disk"))
        if num_bytes
    ]
    blocks = sum(1 for row in seen.rows if (row.reruns and not row.is_own) or row.place != "device")
    return f"graphckpt: policies act on {blocks} blocks; kept for backward: {', '.join(parts)}"


def saved_metrics(seen: Explanation) -> dict[str, float]:
    """Returns what the policies saved, as metrics for loggers."""
    metrics = {
        "graphckpt/kept_bytes_plain": float(seen.bytes_before),
        "graphckpt/kept_bytes": float(seen.bytes_after),
        "graphckpt/host_bytes": float(seen.bytes_host),
        "graphckpt/disk_bytes": float(seen.bytes_disk),
    }
    return metrics if seen.peak_bytes is None else {**metrics, "graphckpt/peak_bytes": float(seen.peak_bytes)}


def _of_class(model: nn.Module, selector: Selector) -> list[Selector]:
    """Returns the classes of this name in ``model``, or the selector itself."""
    classes: list[Selector] = list(dict.fromkeys(type(m) for m in model.modules() if type(m).__name__ == selector))
    return classes or [selector]
