"""Compiles one block with ``torch.compile``, and limits the share of intermediate results that it saves for backward.

The compiler's setting of that share holds for the process, and so for all that is compiled in it. Here each share has a
separate backend, so that it is a setting of the block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from graphckpt._compat_compiler import compiler_of, saving
from graphckpt.errors import ConfigError, did_you_mean, shown

SHARE = "activation_memory_budget"
"""The compiler's name of the option: 1 is its default, 0 saves only the inputs."""

_PLAIN = ("eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "aot_eager_default_partitioner")
"""Backends that leave it to autograd, or to every op, what is saved."""

_KNOWN = (*(name for name in inspect.signature(torch.compile).parameters if name != "model"), SHARE)


def check_options(block: str, value: Any) -> None:
    """Sees whether ``value`` says how a block is compiled."""
    if not (value is None or isinstance(value, (bool, dict))):
        raise ConfigError(f"{block}.compile: expected a bool or a dict of options, got {shown(value)} · fix: use True")
    if not isinstance(value, dict):
        return
    for name in value:
        if name not in _KNOWN:
            raise ConfigError(
                f"{block}.compile: torch.compile has no option {name!r}{did_you_mean(str(name), _KNOWN)} · "
                f"fix: use {', '.join(_KNOWN)}"
            )
    if SHARE not in value:
        return
    share, backend = value[SHARE], value.get("backend")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ConfigError(
            f"{block}.compile: expected {SHARE} from 0 to 1, got {share!r} · "
            "fix: 0 saves the inputs alone, 1 what the compiler saves by itself"
        )
    if not takes_share(value):
        raise ConfigError(
            f"{block}.compile: {SHARE} has no effect with backend {backend!r}, which does not choose what is saved · "
            "fix: backend 'inductor' or 'aot_eager', or leave it out"
        )


def takes_share(options: Mapping[str, Any]) -> bool:
    """Whether the backend that options name chooses what is saved; a backend of the user is taken to do so."""
    return options.get("backend") not in _PLAIN


def share_of(options: Mapping[str, Any]) -> str:
    """Returns the share that options name, as tables show it behind a rule.

    >>> share_of({"activation_memory_budget": 0.3})
    ' at 30 %'
    """
    share = options.get(SHARE, 1)
    return "" if share == 1 else f" at {100 * share:g} %"


@final
class CompiledForward:
    """A compiled function with a reference to the original."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function: Callable[..., Any] = function._function if isinstance(function, CompiledForward) else function
        self._options = options
        if SHARE not in options:
            self._run = torch.compile(self._function, **options)
            return
        # Mode and options are settings of the compiler, which is called by a backend that has none.
        rest = {key: value for key, value in options.items() if key not in (SHARE, "backend", "mode", "options")}
        backend = options.get("backend") or "inductor"
        compiler = compiler_of(backend, options.get("mode"), options.get("options"), options.get("dynamic"))
        within = _WithinBudget(compiler, float(options[SHARE]))
        self._run = torch.compile(_with_own_code(self._function, within), backend=within, **rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self._function, self._options)  # a copy must not run the code of this one's module


_twins: WeakKeyDictionary[FunctionType, dict[_WithinBudget, FunctionType]] = WeakKeyDictionary()


def _with_own_code(function: Callable[..., Any], backend: _WithinBudget) -> Callable[..., Any]:
    """Returns the same method with a separate code object for each backend.

    The compiler gives up on a code object of which it has compiled eight variants, its ``recompile_limit``. Layers of
    one class share their code: with four shares, each in training and evaluation, they reach it.
    """
    # https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html
    if not isinstance(function, MethodType) or not isinstance(function.__func__, FunctionType):
        return function
    plain = function.__func__
    twins = _twins.setdefault(plain, {})
    if backend not in twins:
        code = plain.__code__.replace()
        twin = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
        twin.__kwdefaults__ = plain.__kwdefaults__
        twin.__dict__.update(plain.__dict__)
        twins[backend] = twin
    return MethodType(twins[backend], function.__self__)


@final
@dataclass(frozen=True, repr=False)
class _WithinBudget:
    """A backend: another one that has a share to keep to. Equal ones are one to the compiler's cache."""

    compiler: Callable[[Any, Any], Any]
    share: float

    def __call__(self, graph: Any, inputs: Any) -> Any:
        with saving(self.share):
            return self.compiler(graph, inputs)

    def reset(self) -> None:
        """``torch._dynamo.reset()`` calls this."""
        self.compiler.reset()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{type(self.compiler).__name__} at {SHARE} {self.share:g}"

    def __hash__(self) -> int:
        # Not of the compiler itself, which has its options in a dictionary: of equal backends this is equal too.
        return hash((type(self.compiler), self.share))
