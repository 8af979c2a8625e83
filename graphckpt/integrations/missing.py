"""One line, with the command, for a library that is not installed."""

from __future__ import annotations


def missing(package: str | None, extra: str) -> ModuleNotFoundError:
    """Returns the error to raise: ``package`` is not there, and ``extra`` brings it.

    >>> missing("lightning", "lightning")
    ModuleNotFoundError("lightning is not installed · fix: pip install 'graphckpt[lightning]'")
    """
    return ModuleNotFoundError(f"{package} is not installed · fix: pip install 'graphckpt[{extra}]'", name=package)
