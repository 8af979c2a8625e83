"""What a kind of memory is that `offload` can name, and how a value of the flag is read. Kinds find themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from graphckpt.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from graphckpt.stores.byte_store import Place


class Offload(ABC):
    """Settings of a kind of memory beside the device's. Subclasses are frozen dataclasses, one file each."""

    name: ClassVar[str]
    """Its word for ``offload`` and in tables."""

    @abstractmethod
    def place_for(self, device: torch.device, note: Callable[[str], None]) -> Place | None:
        """Returns a place of this kind for tensors of ``device``; ``None``, and a note of why, if there is none."""

    @classmethod
    def parse(cls, argument: str) -> Offload:
        """Reads what follows the name and a colon."""
        raise ConfigError(f"{cls.name!r} takes nothing after a colon, got {argument!r} · fix: use {cls.name!r}")


def offload_kinds() -> dict[str, type[Offload]]:
    """Returns the kinds by name."""
    return {kind.name: kind for kind in sorted(Offload.__subclasses__(), key=lambda kind: kind.name)}


def parse_offload(value: Any) -> Offload | None:
    """Reads a value of ``offload``: ``True`` is ``"cpu"``; ``None`` and ``False`` are ``None``.

    Raises:
        ConfigError: There is no such kind of memory.
    """
    if value is None or value is False:
        return None
    if isinstance(value, Offload):
        return value
    word, colon, argument = ("cpu" if value is True else str(value)).partition(":")
    kind = offload_kinds().get(word) if isinstance(value, (str, bool)) else None
    if kind is None:
        known = ", ".join(repr(name) for name in offload_kinds())
        raise ConfigError(
            f"no place is called {value!r}{did_you_mean(word, offload_kinds())} · fix: use one of {known}, or False"
        )
    return kind.parse(argument) if colon else kind()
