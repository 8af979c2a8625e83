"""Installed packages: those of an extra, imported on first use, and those that register classes for configs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Generic, TypeVar, final
from weakref import WeakValueDictionary

from graphckpt.errors import ConfigError, GraphckptError

T = TypeVar("T")
_PROJECTS = {"yaml": "pyyaml"}  # by the package that they install, where it has another name


@final
class MissingPackageError(GraphckptError, ModuleNotFoundError):
    """A package is not installed that an extra of graphckpt installs."""

    def __init__(self, package: str, extra: str) -> None:
        project = _PROJECTS.get(package, package)
        fix = f"pip install {project}, or, in a checkout of graphckpt, pip install '.[{extra}]'"
        super().__init__(f"{package} is not installed · fix: {fix}", name=package)


def require(extra: str, *packages: str) -> None:
    """Checks that packages can be imported, without importing them.

    Raises:
        MissingPackageError: the first that is missing.

    >>> require("train", "torch", "a_package_of_nobody")
    Traceback (most recent call last):
      ...
    graphckpt.extras.MissingPackageError: a_package_of_nobody is not installed · fix: pip install a_package_of_nobody, \
or, in a checkout of graphckpt, pip install '.[train]'
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


@final
class Registry(Generic[T]):
    """The subclasses of a base class, by name.

    An installed package makes a class known by an entry point, whose name is that of the class; it is loaded when that
    name is first used. Classes are held weakly, so that a notebook can define one again.

    Args:
        base: Name of the base class.
        group: The entry-point group.
    """

    def __init__(self, base: str, group: str) -> None:
        self._base = base
        self._group = group
        self._classes: WeakValueDictionary[str, type[T]] = WeakValueDictionary()

    def add(self, name: str, cls: type[T]) -> None:
        """Adds a class.

        Raises:
            TypeError: Another class has this name.
        """
        other = self._classes.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{self._base}.name: expected a new name, got {name!r}, which is {other} · fix: rename it")
        self._classes[name] = cls

    def classes(self) -> dict[str, type[T]]:
        return dict(sorted(self._classes.items()))

    def names(self) -> list[str]:
        """Returns the names of all classes, loaded or not."""
        return sorted({*self._classes, *(point.name for point in entry_points(group=self._group))})

    def find(self, name: str) -> type[T] | None:
        """Returns the class of this name, or ``None``.

        Raises:
            ConfigError: The package that has it cannot be imported.
        """
        if name not in self._classes:
            for point in entry_points(group=self._group, name=name):
                try:
                    point.load()
                except Exception as error:
                    raise ConfigError(
                        f"{name!r}: expected a class at {point.value!r}, got {type(error).__name__}: {error} · "
                        "fix: repair or uninstall that package"
                    ) from error
        return self._classes.get(name)
