"""What a release says of itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import graphckpt

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_version_is_one_and_the_changelog_tells_of_it() -> None:
    assert graphckpt.__version__ == PROJECT["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", changes, re.M)


def test_ci_installs_pinned_releases_of_all_that_is_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line}
    extras = PROJECT["optional-dependencies"]
    tested = ("test", "docs", "release", "plot", "plan", "train", "transformers-trainer", "lightning")
    wanted = [*PROJECT["dependencies"], *(text for name in tested for text in extras[name])]
    names = {plain(re.match(r"[\w.-]+", text)[0]) for text in wanted} - {"graphckpt"}
    assert names - pinned == set()


def test_the_package_is_typed_and_carries_its_configs() -> None:
    assert (ROOT / "graphckpt" / "py.typed").exists()
    assert (ROOT / "configs" / "common" / "train.py").exists()
