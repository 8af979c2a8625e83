"""Makes the calls that a config describes: mappings with a ``_target_``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, TypeGuard, final

from omegaconf import DictConfig, ListConfig, OmegaConf

from graphckpt.errors import ConfigError, GraphckptError, did_you_mean

TARGET = "_target_"


def is_call(node: object) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether ``node`` describes a call."""
    return isinstance(node, Mapping | DictConfig) and TARGET in node


@final
@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A described call, to be made later, any number of times, with further arguments."""

    target: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments as in the config; calls among them are not made yet."""
    where: str = ""
    """The key in the config, for messages."""

    def __call__(self, **further: Any) -> Any:
        """Makes the call. ``further`` takes precedence over the arguments in the config.

        Raises:
            ConfigError: the target raised; its own error is the cause.
        """
        arguments = {
            key: _make(value, f"{self.where}.{key}") for key, value in self.arguments.items() if key not in further
        }
        try:
            return self.target(**arguments, **further)
        except GraphckptError:
            raise
        except Exception as error:
            name = dotted_name(self.target)
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"  # in one line
            raise ConfigError(f"{self.where or 'instantiate'}: error in call to '{name}': {what}") from error

    @classmethod
    def read(cls, node: Mapping[str, Any], where: str = "") -> DeferredCall:
        """Reads a description.

        Raises:
            ConfigError: its target is nothing that can be imported and called.
        """
        return cls(locate(node[TARGET]), {str(key): value for key, value in node.items() if key != TARGET}, where)


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
    if is_call(node):
        return DeferredCall.read(node)(**further)
    return _make(node, "")


def _make(node: Any, where: str) -> Any:
    if is_call(node):
        return DeferredCall.read(node, where)()
    if isinstance(node, Mapping):
        return {key: _make(value, f"{where}.{key}") for key, value in node.items()}
    if isinstance(node, list | tuple):
        items = [_make(value, f"{where}[{index}]") for index, value in enumerate(node)]
        return items if isinstance(node, list) else tuple(items)
    return node


def locate(target: object) -> Callable[..., Any]:
    """Returns the callable of a dotted name; a callable is returned as it is.

    Raises:
        ConfigError: there is no such module or attribute, or it cannot be called.

    >>> locate("collections.OrderedDict")
    <class 'collections.OrderedDict'>
    """
    found = _imported(target) if isinstance(target, str) else target
    if not callable(found):
        raise ConfigError(f"_target_ {target!r}: expected a callable or its dotted name, got {type(found).__name__}")
    return found


@cache
def _imported(name: str) -> object:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: object = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue  # this prefix is no module: a class within a shorter one, perhaps
            raise
        except Exception as error:
            what = f"importing {module_name} raised {type(error).__name__}: {error}"
            raise ConfigError(f"_target_ {name!r}: {what} · fix: mend the module") from error
        for part in parts[cut:]:
            if not hasattr(found, part):
                hint = did_you_mean(part, dir(found))
                raise ConfigError(f"_target_ {name!r}: {module_name} has no {part!r}{hint}")
            found = getattr(found, part)
        return found
    fix = "install it, mend the name, or say in which folder it is: import_from=folder"
    raise ConfigError(f"_target_ {name!r}: no module is called {parts[0]!r} · fix: {fix}")


def dotted_name(target: object) -> str:
    """Returns the name under which ``target`` can be imported."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def importable(target: object) -> bool:
    """Returns whether ``target`` can be imported by its dotted name."""
    try:
        return isinstance(target, str) or locate(dotted_name(target)) is target
    except (ConfigError, ImportError, ValueError):  # ValueError: a name that starts with a dot, or is empty
        return False


def parameters(target: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Returns the keyword parameters of ``target`` with their types, and whether it has ``**kwargs``.

    Names that the target's class itself maps onto parameters (Transformers' ``attribute_map``) count too, and so do the
    properties of such a class that can be set.
    """
    try:
        signature = inspect.signature(target, eval_str=True)
    except (NameError, TypeError, ValueError, AttributeError, SyntaxError):  # none, or annotations of typing time
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):
            return {}, True
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = {
        name: Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind in {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    }
    aliases: dict[str, str] | None = getattr(target, "attribute_map", None)
    if aliases is not None:
        for alias, name in aliases.items():
            named.setdefault(alias, named.get(name, Any))
        for name in dir(target):  # Transformers also takes what its configs compute, such as num_labels
            found = getattr(target, name, None)
            if isinstance(found, property) and found.fset is not None:
                named.setdefault(name.lstrip("_"), Any)
    return named, inspect.Parameter.VAR_KEYWORD in kinds


def defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of the parameters of ``target`` that have one."""
    try:
        found = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    return {name: parameter.default for name, parameter in found.items() if parameter.default is not parameter.empty}
