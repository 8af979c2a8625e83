"""Layers that ``torch.compile`` compiles one by one, in measurements and plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from graphckpt.blocks.compiled import SHARE, CompiledForward, takes_share
from graphckpt.blocks.config import BlockConfig

SHARES = (0.8, 0.5, 0.3, 0.1)
"""Shares of the bytes that the compiler saves by itself; plans mix them for values in between."""


@final
@dataclass(frozen=True, slots=True)
class LayerCompilation:
    """How the layers of a plan are compiled."""

    field: bool | dict[str, Any] | None = None
    """The ``compile`` field of layers without one in their option; ``None`` if they are not compiled."""
    shares: tuple[dict[str, Any], ...] = ()
    """Arguments with which the compiler saves less for backward."""

    @property
    def options(self) -> dict[str, Any] | None:
        """The arguments of ``torch.compile``; ``None`` if layers are not compiled."""
        return compile_options(self.field)


NOT_COMPILED = LayerCompilation()


def parse_compile(value: Any, rules: object = None) -> LayerCompilation:
    """Returns how layers are compiled.

    Args:
        value: the planner option ``compile``.
        rules: the planner option ``candidates``; ``None`` also considers that the compiler saves less.

    Raises:
        ConfigError: ``value`` is not a bool or a mapping of arguments.
    """
    options = compile_options(value)
    if options is None:
        return NOT_COMPILED
    if rules is not None or SHARE in options or not takes_share(options):
        return LayerCompilation(value)
    return LayerCompilation({**options, SHARE: 1.0}, tuple({**options, SHARE: share} for share in SHARES))


def compile_options(value: Any) -> dict[str, Any] | None:
    """Returns the arguments of ``torch.compile`` for a value of ``compile``; ``None`` if it does not compile.

    Raises:
        ConfigError: ``value`` is not a bool or a mapping of arguments.
    """
    config = BlockConfig("plan")
    config.update({"compile": value})
    return config.compile_options


def without_share(value: bool | dict[str, Any] | None) -> bool | dict[str, Any] | None:
    """Returns a block's ``compile`` without the share that the compiler saves, which plans choose."""
    options = compile_options(value)
    return None if options is None else {key: said for key, said in options.items() if key != SHARE} or True


@contextmanager
def compiled_forwards(modules: Iterable[nn.Module], options: dict[str, Any] | None) -> Iterator[None]:
    """Compiles the forward of each module within the ``with`` block, inside of policies that are set there."""
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
