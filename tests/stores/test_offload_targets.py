"""Offload targets are found by their names: those of this package, and those of installed ones."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers.third_party import BYTE_STORE, install
from torch import nn

import graphckpt
from graphckpt import ConfigError, Disk, Host
from graphckpt.planning.candidates import options
from graphckpt.stores import Offload, offload_targets, parse_offload

PACKAGE = f"""{BYTE_STORE}
from dataclasses import dataclass
from typing import ClassVar

from graphckpt.stores import Offload


@dataclass(frozen=True)
class Elsewhere(Offload):
    name: ClassVar[str] = "elsewhere"
    tier: ClassVar[str] = "disk"

    folder: str = ""

    def byte_store_for(self, device, note):
        return CopyStore()

    def rates(self, profile):
        return 2e9, 1e9

    @classmethod
    def parse(cls, argument):
        return cls(argument)
"""
ENTRY_POINTS = "[graphckpt.offload]\nelsewhere = elsewhere:Elsewhere\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("elsewhere", None)
    gc.collect()


def test_an_installed_target_is_used_by_its_name(packages: Path) -> None:
    install(packages, ENTRY_POINTS, elsewhere=PACKAGE)
    assert "elsewhere" not in offload_targets(), "it is imported when its name is used, not before"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with graphckpt.apply(model, {"": {"offload": "elsewhere"}}) as handle:
        with handle.measure():
            model(x).sum().backward()
        (row,) = handle.explain(show=False).rows[:1]
    assert (row.place, row.bytes_after, row.bytes_disk >= row.bytes_before > 0) == ("elsewhere", 0, True)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert parse_offload("elsewhere:/a/folder").folder == "/a/folder"  # type: ignore[union-attr]
    assert "full + disk" in [option.name for option in options("elsewhere")]


def test_the_rates_of_a_target_are_its_own(packages: Path) -> None:
    install(packages, ENTRY_POINTS, elsewhere=PACKAGE)
    profile: Any = SimpleNamespace(copy_out=4.0, copy_in=3.0, disk_write=2.0, disk_read=1.0)
    target = parse_offload("elsewhere")
    assert target is not None
    assert (Host().rates(profile), Disk().rates(profile), target.rates(profile)) == ((4.0, 3.0), (2.0, 1.0), (2e9, 1e9))
    assert (Host().tier, Disk().tier, target.tier) == ("host", "disk", "disk")


def test_a_name_that_is_not_known_lists_installed_targets(packages: Path) -> None:
    install(packages, ENTRY_POINTS, elsewhere=PACKAGE)
    with pytest.raises(ConfigError, match=r"did you mean 'elsewhere'. · fix: use one of 'cpu', 'disk', 'elsewhere'"):
        parse_offload("elsewher")
    assert "elsewhere" not in sys.modules


def test_a_package_that_cannot_be_imported_is_named(packages: Path) -> None:
    install(packages, ENTRY_POINTS, elsewhere="import no_such_module")
    with pytest.raises(ConfigError, match=r"'elsewhere': .* at 'elsewhere:Elsewhere', got ModuleNotFoundError: .* fix"):
        parse_offload("elsewhere")


def test_a_name_is_taken_once_and_may_be_defined_anew() -> None:
    def define(name: str) -> type[Offload]:
        @dataclass(frozen=True)
        class Target(Offload):
            pass

        Target.name = name
        return Target

    assert "unnamed" not in offload_targets()
    define("unnamed")
    assert "unnamed" not in offload_targets(), "a base without a name in its body is not registered"

    class Again(Offload):
        name: ClassVar[str] = "again"

    first = Again

    class Again(Offload):  # type: ignore[no-redef]  # as a notebook does when a cell runs again
        name: ClassVar[str] = "again"

    assert offload_targets()["again"] is Again is not first
    with pytest.raises(TypeError, match="expected a new name, got 'disk'"):
        type("Mine", (Offload,), {"name": "disk"})
    del Again, first
    gc.collect()
    assert "again" not in offload_targets()
