"""The options of the planner: one dataclass behind every way to call it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, final

from graphckpt.blocks.config import BlockConfig
from graphckpt.blocks.select import Selector
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.units import parse_bytes

Surface = Literal["config", "command"]
"""Where an option can be set beside Python: ``train.activation_checkpoint`` of a config, ``graphckpt plan``."""


def _except(*surfaces: Surface) -> dict[str, Any]:
    return {"not_on": surfaces}


@final
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the planner may use, and how it plans.

    The fields are the keyword arguments of :func:`graphckpt.plan` and :meth:`graphckpt.Graph.plan`, the keys of
    ``Graph.config.plan_options`` and of ``train.activation_checkpoint``, and the flags of ``graphckpt plan``.

    >>> PlanOptions(offload="cpu", host_budget="64GiB").host_bytes
    68719476736
    """

    offload: bool | str = False
    """Where saved tensors may go: ``True`` or ``"cpu"``, ``"disk"``, ``"disk:/a/folder"``."""
    host_budget: int | str | None = None
    """The most bytes that may be offloaded at a time, such as ``"64GiB"``; ``None`` is no limit."""
    blocks: Selector | Iterable[Selector] | None = field(default=None, metadata=_except("config", "command"))
    """Selectors of the blocks to plan, such as ``"model.layers.*"``; ``None`` finds the layers of the model. In a
    config ``unit`` selects them."""
    candidates: Iterable[Any] | None = None
    """The rules to consider beside ``keep``, as ``activation_checkpointing`` takes them. ``None`` is all of ``full``,
    up to four levels of ``selective`` that are found op by op for each kind of layer, and ``joined`` runs of layers,
    which need ``full`` too."""
    head: Mapping[str, Any] | None = None
    """The block that computes the loss, and a rule or a list of rules by which it may run in slices:
    ``{"loss_head": Tiles(8, reduce="sum")}``. Each is measured too, and taken where it is faster or alone fits."""
    partition: Any = field(default=None, metadata=_except("command"))
    """The ranks over which saved tensors may be partitioned: ``True``, a ``ProcessGroup`` or a ``DeviceMesh``."""
    contiguous: bool = False
    """Whether each layer keeps its saved tensors in one slab."""
    compile: bool | dict[str, Any] | None = field(default=None, metadata=_except("command"))
    """Whether each layer is compiled inside of its policy: ``True``, or the arguments of ``torch.compile``. The levels
    of ``selective`` are then replaced by the compiler's ``activation_memory_budget`` at 0.8, 0.5, 0.3 and 0.1, unless
    ``candidates`` or an ``activation_memory_budget`` is given."""
    group: Any = field(default=None, metadata=_except("config", "command"))
    """The processes that run this step together: a ``ProcessGroup``, whose ranks must all plan and get the same plan.
    ``None`` is the default group if ``torch.distributed`` is initialized; ``False`` is this process alone."""
    check: bool = field(default=True, metadata=_except("command"))
    """Run the step under the plan, and plan again if its peak exceeds the budget or differs by more than 1 %."""
    progress: Callable[[int, int], None] | None = field(default=None, metadata=_except("config", "command"))
    """Called as ``progress(done, total)`` with the measuring runs of the step that are done, and how many there are."""

    def __post_init__(self) -> None:
        if self.candidates is not None:
            is_one = isinstance(self.candidates, (str, Mapping)) or not isinstance(self.candidates, Iterable)
            object.__setattr__(self, "candidates", (self.candidates,) if is_one else tuple(self.candidates))
        for name in ("contiguous", "check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r} · fix: {name}=True")
        _ = self.host_bytes
        BlockConfig("plan").update({"compile": self.compile})

    @property
    def host_bytes(self) -> int | None:
        """``host_budget`` in bytes."""
        if self.host_budget is None:
            return None
        try:
            return parse_bytes(self.host_budget)
        except ValueError as error:
            raise ConfigError(str(error).replace("memory size", "host_budget:", 1)) from None

    @classmethod
    def of(cls, values: PlanOptions | Mapping[str, Any] | None, where: str) -> Self:
        """Returns options from keyword arguments or keys.

        Args:
            values: the options by name.
            where: what messages begin with.

        Raises:
            ConfigError: There is no such option, or a value cannot be used.
        """
        if isinstance(values, cls):
            return values
        named: dict[str, Any] = dict(values or {})  # type: ignore[arg-type]  # other options are final
        if "rules" in named:
            text = f"{where}: 'rules' is deprecated · fix: candidates={named['rules']!r}"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            named.setdefault("candidates", named.pop("rules"))
        known = [option.name for option in fields(cls)]
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            raise ConfigError(
                f"{where}: there is no option {unknown!r}{did_you_mean(unknown, known)} · fix: use {', '.join(known)}"
            )
        return cls(**named)

    @classmethod
    def names(cls, surface: Surface | None = None) -> tuple[str, ...]:
        """Returns the options, or those that can be set on ``surface``."""
        return tuple(option.name for option in fields(cls) if surface not in option.metadata.get("not_on", ()))
