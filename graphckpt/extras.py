"""Packages that an extra installs: imported on first use, with the command to install them in the error."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, final

from graphckpt.errors import GraphckptError


@final
class MissingPackageError(GraphckptError, ModuleNotFoundError):
    """A package is not installed that an extra of graphckpt installs."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed · fix: pip install 'graphckpt[{extra}]'", name=package)


def require(extra: str, *packages: str) -> None:
    """Checks that packages can be imported, without importing them.

    Raises:
        MissingPackageError: the first that is missing.

    >>> require("train", "torch", "a_package_of_nobody")
    Traceback (most recent call last):
      ...
    graphckpt.extras.MissingPackageError: a_package_of_nobody is not installed · fix: pip install 'graphckpt[train]'
    """
    for package in packages:
        try:
            is_there = find_spec(package) is not None
        except (ImportError, ValueError):  # an importer that refuses it; a module without a spec
            is_there = False
        if not is_there:
            raise MissingPackageError(package, extra)


@final
class LazyPackage:
    """Stands for a package and imports it when an attribute is first used.

    Args:
        package: its name.
        extra: of graphckpt, which installs it.

    >>> LazyPackage("json", "plan").dumps([1])
    '[1]'
    """

    def __init__(self, package: str, extra: str) -> None:
        self._package = package
        self._extra = extra

    def __getattr__(self, attribute: str) -> Any:
        """Returns an attribute of the package.

        Raises:
            MissingPackageError: the package is not installed.
        """
        require(self._extra, self._package)
        value = getattr(import_module(self._package), attribute)
        setattr(self, attribute, value)  # found directly from now on
        return value
