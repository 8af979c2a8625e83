"""A package beside this one, as an installer writes it: for the tests of what other packages add."""

from __future__ import annotations

from pathlib import Path

BYTE_STORE = """
import collections

from graphckpt.stores import ByteHandle, ByteStore

calls = collections.Counter()


class Copied(ByteHandle):
    def __init__(self, data):
        super().__init__(data.numel())
        self.data = data


class CopyStore(ByteStore):
    label = "elsewhere"
    tier = "disk"

    def put(self, data, group):
        calls["put"] += 1
        return Copied(data.clone())

    def get(self, handle, group):
        return handle.data.clone()

    def free(self, handle):
        handle.data = None
"""
"""The source of a byte store that keeps copies."""


def install(folder: Path, entry_points: str, **modules: str) -> None:
    """Writes modules into ``folder``, and the metadata of a distribution with these entry points."""
    metadata = folder / "third_party-1.0.dist-info"
    metadata.mkdir(parents=True)
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
