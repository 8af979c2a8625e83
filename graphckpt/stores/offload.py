"""Offload targets: the base class, a registry by name, and the parser of `offload`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from graphckpt.stores.base import ByteStore

ENTRY_POINTS = "graphckpt.offload"
"""The entry-point group that installed packages use to name their offload targets."""


class DeviceRates(Protocol):
    """The copy rates in a device profile, in bytes per second; 0 if unknown."""

    @property
    def copy_out(self) -> float: ...  # noqa: D102
    @property
    def copy_in(self) -> float: ...  # noqa: D102
    @property
    def disk_write(self) -> float: ...  # noqa: D102
    @property
    def disk_read(self) -> float: ...  # noqa: D102


class Offload(ABC):
    """A target that saved tensors can be offloaded to. Subclasses are frozen dataclasses, registered by ``name``.

    An installed package makes its target known by an entry point of the group ``graphckpt.offload``, whose name is the
    target's; it is loaded when that name is first used.
    """

    name: ClassVar[str]
    """The word for ``offload`` and in tables."""
    tier: ClassVar[Literal["host", "disk"]] = "host"
    """The kind of memory, which decides how the planner counts its bytes and estimates its copies."""

    _registry: ClassVar[Registry[Offload]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            Offload._registry.add(cls.name, cls)

    def check(self) -> str | None:
        """Returns why tensors cannot be offloaded to this target and how to fix it, or ``None`` if they can."""
        return None

    @abstractmethod
    def byte_store_for(self, device: torch.device, note: Callable[[str], None]) -> ByteStore | None:
        """Returns a byte store for tensors of ``device``; ``None``, and a note with the reason, if there is none."""

    def rates(self, profile: DeviceRates) -> tuple[float, float]:
        """Returns the bytes per second of copies to this target and back, on a device described by a profile."""
        if self.tier == "disk":
            return profile.disk_write, profile.disk_read
        return profile.copy_out, profile.copy_in

    @classmethod
    def parse(cls, argument: str) -> Offload:
        """Parses the text after the name and a colon."""
        raise ConfigError(f"{cls.name!r}: expected nothing after a colon, got {argument!r} · fix: use {cls.name!r}")


Offload._registry = Registry("Offload", ENTRY_POINTS)


def offload_targets() -> dict[str, type[Offload]]:
    """Returns the registered targets by name."""
    return Offload._registry.classes()


def parse_offload(value: Any) -> Offload | None:
    """Parses a value of ``offload``: ``True`` is ``"cpu"``; ``None`` and ``False`` are ``None``."""
    if value is None or value is False:
        return None
    if isinstance(value, Offload):
        return value
    word, colon, argument = ("cpu" if value is True else str(value)).partition(":")
    target = Offload._registry.find(word) if isinstance(value, (str, bool)) else None
    if target is None:
        known = Offload._registry.names()
        names = ", ".join(map(repr, known))
        raise ConfigError(
            f"expected an offload target, got {value!r}{did_you_mean(word, known)} · fix: use one of {names}, or False"
        )
    return target.parse(argument) if colon else target()
