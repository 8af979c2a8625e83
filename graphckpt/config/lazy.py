"""Descriptions of calls, as in libai: ``LazyCall`` describes a call, and ``instantiate`` makes it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeGuard, final

from omegaconf import DictConfig, ListConfig, OmegaConf

from graphckpt.errors import ConfigError, GraphckptError, did_you_mean

# Note [A call, from its description to the object]
#
#     LazyCall(torch.optim.AdamW)(lr=3e-4)   {_target_: torch.optim.adamw.AdamW, lr: 0.0003}, a config: it can be saved
#     the override optim.lr=1e-3             {_target_: torch.optim.adamw.AdamW, lr: 0.001}
#     `read_calls`                           DeferredCall(AdamW, {"lr": 0.001}, "optim"): the target is imported, so
#                                            that the schema can check the arguments before anything is made
#     a call of it, with params=...          the optimizer. Calls among its arguments are made first, anew each time, so
#                                            that two objects never share a part
#
# `instantiate` does the last two steps at once, without a check.

P = ParamSpec("P")
TARGET = "_target_"
_MAX_INT, _MAX_FLOAT = 2**64, 1e300  # an int can exceed every float


@final
class LazyCall(Generic[P]):
    """Describes a call of ``target``, to be made later by ``instantiate``.

    The description is a config like any other: its arguments can be read, replaced and overridden.

    Raises:
        ConfigError: ``target`` cannot be called.

    >>> import collections
    >>> call = LazyCall(collections.Counter)(a=1, b=2)
    >>> call.a = 5
    >>> from graphckpt.config import instantiate
    >>> instantiate(call)
    Counter({'a': 5, 'b': 2})
    """

    def __init__(self, target: Callable[P, Any] | str) -> None:
        if not callable(target) and not isinstance(target, str):
            raise ConfigError(
                f"LazyCall: expected a callable or its dotted name, got {target!r} · fix: LazyCall(torch.optim.AdamW)"
            )
        self._target = target

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> DictConfig:
        """Returns the description, with these arguments.

        Raises:
            ConfigError: an argument has no name; only named ones can be overridden.
        """
        if args:
            what = f"LazyCall({dotted_name(self._target)}): expected only keyword arguments, got {len(args)} positional"
            raise ConfigError(f"{what} · fix: name each argument, as in lr=0.1")
        # A name wherever there is one: omegaconf would take a dataclass for a config.
        target = dotted_name(self._target) if importable(self._target) else self._target
        return OmegaConf.create({TARGET: target, **kwargs}, flags={"allow_objects": True})


@final
@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A described call, to be made later, any number of times, with further arguments."""

    target: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments as in the config; the calls among them, at any depth, are deferred too."""
    where: str = ""
    """The key in the config, for messages."""

    def __call__(self, **further: Any) -> Any:
        """Makes the call. ``further`` takes precedence over the arguments in the config."""
        arguments = {key: _make(value) for key, value in self.arguments.items() if key not in further}
        try:
            return self.target(**arguments, **further)
        except GraphckptError:
            raise
        except Exception as error:
            name = dotted_name(self.target)
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"  # in one line
            raise ConfigError(f"{self.where or 'instantiate'}: error in call to '{name}': {what}") from error


def is_call(node: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether ``node`` describes a call: a mapping with a ``_target_``."""
    return isinstance(node, Mapping | DictConfig) and TARGET in node


def instantiate(node: Any, **further: Any) -> Any:
    """Makes the call that ``node`` describes, after those among its arguments, at any depth.

    Anything but a call is returned as it is, except that omegaconf containers become lists and dicts.

    Args:
        node: a ``LazyCall`` node, a mapping with ``_target_``, or anything else.
        further: keyword arguments that win over those of the outermost call.

    Raises:
        ConfigError: a target cannot be found, or raised.
    """
    if isinstance(node, DictConfig | ListConfig):
        node = OmegaConf.to_container(node, resolve=True)
    faults: list[str] = []
    described = read_calls(node, "", faults)
    if faults:
        raise ConfigError(faults[0].removeprefix(": "))
    return described(**further) if isinstance(described, DeferredCall) else _make(described)


def read_calls(node: Any, where: str, faults: list[str]) -> Any:
    """Copies a config's dicts and lists, with a :class:`DeferredCall` for each description of a call.

    ``faults`` receives the targets that cannot be found, whose calls then take any arguments, and impossible values.
    """
    if isinstance(node, Mapping):
        prefix = f"{where}." if where else ""
        values = {key: read_calls(value, f"{prefix}{key}", faults) for key, value in node.items()}
        if TARGET not in node:
            return values
        try:
            target = locate(values.pop(TARGET))
        except ConfigError as error:
            faults.append(f"{where}: {error}")
            target = lambda **_: None  # noqa: E731 - takes any arguments, in a config that is refused
        return DeferredCall(target, {str(key): value for key, value in values.items()}, where)
    if isinstance(node, list | tuple):
        items = [read_calls(value, f"{where}[{index}]", faults) for index, value in enumerate(node)]
        return items if isinstance(node, list) else tuple(items)
    if fault := _plain_fault(node):
        faults.append(f"{where}: {fault}")
    return node


def _plain_fault(value: object) -> str:
    if isinstance(value, str) and "\0" in value:
        return f"expected text without null characters, got {value!r}"
    if isinstance(value, float) and math.isnan(value):
        return "expected a number, got nan"
    limit = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
    if isinstance(value, int | float) and limit <= abs(value) != math.inf:
        return f"expected a number below {limit:.0e}, got a larger one"
    return ""


def _make(node: Any) -> Any:
    if isinstance(node, DeferredCall):
        return node()
    if isinstance(node, dict):
        return {key: _make(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        items = [_make(value) for value in node]
        return items if isinstance(node, list) else tuple(items)
    return node


def locate(target: object) -> Callable[..., Any]:
    """Returns the callable of a dotted name; a callable is returned as it is.

    Raises:
        ConfigError: the module or attribute does not exist, or cannot be called.

    >>> locate("collections.OrderedDict")
    <class 'collections.OrderedDict'>
    """
    value = _import(target) if isinstance(target, str) else target
    if not callable(value):
        raise ConfigError(f"_target_ {target!r}: expected a callable or its dotted name, got {type(value).__name__}")
    return value


@cache
def _import(name: str) -> object:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            value: object = import_module(module_name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # "torch.optim.AdamW.step": importing torch.optim.AdamW lacks `torch.optim.AdamW`, a beginning of this name,
            # so a shorter one is tried. A module that exists and lacks another package is another error, and so
            # is any other exception.
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                continue  # perhaps a class within a shorter module name
            what = f"importing {module_name} raised {type(error).__name__}: {error}"
            raise ConfigError(f"_target_ {name!r}: {what} · fix: correct the module") from error
        for attribute in parts[length:]:
            if not hasattr(value, attribute):
                raise ConfigError(
                    f"_target_ {name!r}: {module_name} has no {attribute!r}{did_you_mean(attribute, dir(value))}"
                )
            value = getattr(value, attribute)
        return value
    fix = "install it, correct the name, or say in which folder it is: import_from=folder"
    raise ConfigError(f"_target_ {name!r}: no module is called {parts[0]!r} · fix: {fix}")


def dotted_name(target: object) -> str:
    """Returns the name under which ``target`` can be imported."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def importable(target: object) -> bool:
    """Whether ``target`` can be imported by its dotted name."""
    try:
        return isinstance(target, str) or locate(dotted_name(target)) is target
    except ConfigError:
        return False


def parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Returns the keyword parameters of ``target``, and whether it has ``**kwargs``.

    Names that the target's class itself maps onto parameters (Transformers' ``attribute_map``) count too, and so do the
    properties of such a class that can be set.
    """
    try:
        signature = inspect.signature(target, eval_str=True)
    except (NameError, TypeError, ValueError, AttributeError, SyntaxError):  # none, or annotations for type checkers
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):
            return {}, True
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }
    aliases: dict[str, str] | None = getattr(target, "attribute_map", None)
    if aliases is not None:
        # GPT2Config takes hidden_size for n_embd: the alias has the type and the default of its parameter.
        for alias, name in aliases.items():
            named.setdefault(alias, named.get(name, inspect.Parameter(alias, inspect.Parameter.KEYWORD_ONLY)))
        for name in dir(target):  # Transformers also takes what its configs compute, such as num_labels
            attribute = getattr(target, name, None)
            if isinstance(attribute, property) and attribute.fset is not None:
                key = name.lstrip("_")
                named.setdefault(key, inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY))
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
