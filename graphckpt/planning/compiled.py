"""Layers that ``torch.compile`` compiles, each for itself: planned as they run then, and said so in the plan."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from graphckpt.blocks.compiled import SHARE, CompiledForward, takes_share
from graphckpt.blocks.config import BlockConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

SHARES = (0.8, 0.5, 0.3, 0.1)
"""Of what the compiler saves of a layer by itself: what lies between them is reached by layers that differ."""


@final
@dataclass(frozen=True, slots=True)
class LayerCompilation:
    """How the layers of a plan are compiled."""

    field: bool | dict[str, Any] | None = None
    """What the plan says of all layers that it says nothing else of; ``None`` if they are not compiled."""
    shares: tuple[dict[str, Any], ...] = ()
    """Options by which the compiler saves less of a layer for backward."""

    @property
    def options(self) -> dict[str, Any] | None:
        """What ``torch.compile`` of a layer is called with; ``None`` if it is not compiled."""
        return compile_options(self.field)


NOT_COMPILED = LayerCompilation()


def parse_compile(value: Any, rules: object = None) -> LayerCompilation:
    """Returns how layers are to be compiled that ``value`` says that of.

    Args:
        value: what a plan was asked for: yes, no or options.
        rules: what else it may consider, as the user says; ``None`` is everything, such as to save less.

    Raises:
        ConfigError: ``value`` is neither yes nor no nor options.
    """
    options = compile_options(value)
    if options is None:
        return NOT_COMPILED
    if rules is not None or SHARE in options or not takes_share(options):
        return LayerCompilation(value)
    return LayerCompilation({**options, SHARE: 1.0}, tuple({**options, SHARE: share} for share in SHARES))


def compile_options(value: Any) -> dict[str, Any] | None:
    """Returns what a layer is compiled with; ``None`` if it is not.

    Raises:
        ConfigError: ``value`` is neither yes nor no nor options.
    """
    config = BlockConfig("plan")
    config.update({"compile": value})
    return config.compile_options


def without_share(value: bool | dict[str, Any] | None) -> bool | dict[str, Any] | None:
    """Returns what a block's ``compile`` says beside the share that it saves, which is what plans are about."""
    options = compile_options(value)
    return None if options is None else {key: said for key, said in options.items() if key != SHARE} or True


@contextmanager
def compiled_forwards(modules: Iterable[nn.Module], options: dict[str, Any] | None) -> Iterator[None]:
    """Has the forward of each module run compiled, beneath the policies that are put on meanwhile."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module in modules if options is not None else ():
            fields, forward = module.__dict__, CompiledForward(module.forward, options or {})
            before.append((fields, fields.get("forward")))
            fields["forward"] = forward
        yield
    finally:
        for fields, forward in before:
            del fields["forward"]
            if forward is not None:
                fields["forward"] = forward
