"""Metadata of a run, read and checked from ``snapshot.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from graphckpt.train.snapshot.fields import MOST, FieldError, integer, item, mapping, number, reading, text
from graphckpt.train.snapshot.folder import MANIFEST, SHARDS, STATE, WEIGHTS

_STATES = ("graph", "trainer")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The progress of a run at a snapshot."""

    run: str
    """An id of the run and of all runs resumed from it."""
    done: int
    """Iterations done."""
    consumed_samples: int
    """Samples consumed so far."""
    data: dict[str, Any]
    """Values that identify the data."""
    machine: dict[str, Any]
    """Values that affect the rounding of sums."""
    optimizer_states: int | None
    """Number of parameters with optimizer state; ``None`` in snapshots of versions that did not record it."""

    @classmethod
    def read(cls, info: Mapping[str, Any], folder: Path) -> RunInfo:
        """Reads what ``snapshot.check`` returned.

        Raises:
            SnapshotError: a field is missing, of another type, or out of its range.
        """
        with reading(folder / MANIFEST):
            _check_names(info["files"])
            done = integer(item(info, "done"), "done", 1)
            integer(item(info, "iteration"), "iteration", done - 1, done - 1)
            for name, value in mapping(item(info, "metrics"), "metrics").items():
                number(value, f"metrics.{name}")
            states = info.get("optimizer_states")
            return cls(
                run=text(item(info, "run"), "run", 100),
                done=done,
                consumed_samples=integer(item(info, "consumed_samples"), "consumed_samples", done),
                data=_data(mapping(item(info, "data"), "data")),
                machine=_machine(mapping(item(info, "machine"), "machine")),
                optimizer_states=None if "optimizer_states" not in info else integer(states, "optimizer_states"),
            )


def _check_names(files: Mapping[str, Any]) -> None:
    for name in map(STATE.format, _STATES):
        if name not in files:
            raise FieldError("files", f"an entry {name!r}", sorted(files))
    if WEIGHTS not in files and not any(name.startswith(f"{SHARDS}/") for name in files):
        raise FieldError("files", f"an entry {WEIGHTS!r}", sorted(files))


def _data(data: Mapping[str, Any]) -> dict[str, Any]:
    integer(item(data, "num_samples"), "data.num_samples", 1)
    integer(item(data, "tokens_each"), "data.tokens_each")
    if item(data, "tokens") is not None:
        text(item(data, "tokens"), "data.tokens")
    return dict(data)


def _machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    text(item(machine, "torch"), "machine.torch", 100)
    for name in ("threads", *(name for name in machine if name not in {"torch", "threads"})):
        integer(item(machine, name), f"machine.{name}", 1, MOST)
    return dict(machine)
