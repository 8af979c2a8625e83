"""Modules that are written as their forward, so that a test shows what matters of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def as_module(fields: Callable[..., dict[str, Any]] = dict) -> Callable[[Callable[..., Any]], Any]:
    """Makes a module class of a forward. Instances have the ``fields``, which their arguments are given to.

    For the odd module that a test is about; stacks of plain layers are in :mod:`helpers.layer_stacks`. Forwards take
    ``self: Any``, since the fields are known to the decorator alone.

    >>> @as_module(lambda width: {"linear": nn.Linear(width, 2)})
    ... def Layer(self, x):
    ...     return self.linear(x).sin()
    >>> Layer(3)
    Layer(
      (linear): Linear(in_features=3, out_features=2, bias=True)
    )
    """

    def decorate(forward: Callable[..., Any]) -> Any:
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            nn.Module.__init__(self)
            for name, value in fields(*args, **kwargs).items():
                setattr(self, name, value)

        names = {"__module__": forward.__module__, "__qualname__": forward.__qualname__, "__doc__": forward.__doc__}
        kind = type(forward.__name__, (nn.Module,), {"__init__": __init__, "forward": forward, **names})
        forward.__code__ = forward.__code__.replace(co_name="forward")  # errors name it
        return kind

    return decorate
