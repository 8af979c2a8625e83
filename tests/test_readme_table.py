"""Each tick of the README's table of features names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text(encoding="utf-8")
PEERS = ["OneFlow", "libai", "PyTorch", "FairScale", "OSLO", "DeepSpeed", "Megatron", "Chen", "cybertronai", "HF"]
MARKS = {"✓", "~", "–", "=", "own", ""}  # noqa: RUF001  # the table's own dash


def table() -> list[list[str]]:
    section = README.partition("## Beside others\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_is_whole() -> None:
    head, _, *rows = table()
    assert head == ["", "graphckpt", *PEERS]
    assert len(rows) >= 20
    for feature, ours, *theirs in rows:
        assert len(theirs) == len(PEERS), feature
        assert ours.startswith("✓ `test_"), feature
        assert set(theirs) <= MARKS, feature


def test_each_tick_names_tests_that_exist() -> None:
    known = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = {name for _, ours, *_ in table()[2:] for name in re.findall(r"`(test_\w+)`", ours)}
    assert named - known == set()
