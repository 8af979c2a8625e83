"""Classes that configs name, including those of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Generic, TypeVar, final
from weakref import WeakValueDictionary

from graphckpt.errors import ConfigError

T = TypeVar("T")


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
        known = self._classes.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{self._base}.name: expected a new name, got {name!r}, which is {known} · fix: rename it")
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
