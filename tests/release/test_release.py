"""Facts that a release states in several places, which must agree."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    digests = []
    for number in range(2):
        folder, copy = tmp_path / f"built{number}", tmp_path / f"source{number}"
        folder.mkdir()
        copy.mkdir()
        for name in ("graphckpt", "configs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "hatch_build.py"):
            shutil.copy(ROOT / name, copy / name)
        for path in copy.rglob("*"):
            os.utime(path, (number * 10**6 + 10**9, number * 10**6 + 10**9))
        code = f"from hatchling import build; build.build_sdist({str(folder)!r}); build.build_wheel({str(folder)!r})"
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        subprocess.run([sys.executable, "-c", code], cwd=copy, env=environment, check=True, capture_output=True)
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


def test_a_release_has_addresses_and_a_readme_whose_links_are_absolute(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    code = (
        "import sys; from hatchling import build; from zipfile import ZipFile; name = build.build_wheel(sys.argv[1]);"
        "files = ZipFile(f'{sys.argv[1]}/{name}');"
        "print(files.read(next(n for n in files.namelist() if n.endswith('METADATA'))).decode())"
    )
    texts = {}
    for address in ("", "https://example.org/us/graphckpt"):
        environment = {**os.environ, "GRAPHCKPT_REPOSITORY": address}
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        texts[address] = done.stdout
    plain, released = texts.values()
    assert "Project-URL: " not in plain
    assert "pip install graphckpt" not in plain
    assert "Project-URL: Repository, https://example.org/us/graphckpt\n" in released
    assert "$ pip install graphckpt  " in released
    assert "$ pip install 'graphckpt[plot,plan,train]'" in released
    assert "](https://example.org/us/graphckpt/raw/v" in released, "the picture"
    assert re.findall(r"\]\((?!https:|#)[^)]*\)", released) == []
