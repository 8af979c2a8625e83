"""Activation checkpointing for PyTorch, block by block: keep, recompute or offload saved tensors."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from graphckpt._api import *
    from graphckpt._api import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Imports the library, and with it torch, on first use: ``graphckpt --help`` needs neither."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import random  # noqa: PLC0415  # `graphckpt --help` needs it no more than torch

        state = random.getstate()
        try:
            api = import_module("graphckpt._api")
        finally:
            random.setstate(state)  # rich draws from it where it is imported, which a seeded step must not see
        globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        dunder = {name for name in globals() if name.startswith("__")}
        return sorted({*dunder, *__getattr__("__all__")})
