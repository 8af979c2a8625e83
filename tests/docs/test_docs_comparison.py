"""Each tick of the comparison names tests that exist, in the files that it links."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
FEATURES, _, TESTS = (DOCS / "comparison.md").read_text(encoding="utf-8").partition("\n## Tests\n")
PEERS = ["PyTorch", "HF", "FairScale", "DeepSpeed", "OSLO", "Megatron", "OneFlow"]
MARKS = {"✓", "~", "–", "own", ""}  # noqa: RUF001  # the table's own dash


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_is_whole() -> None:
    head, _, *rows = table(FEATURES)
    assert head == ["", "graphckpt", *PEERS]
    assert len(rows) >= 20
    for feature, ours, *theirs in rows:
        assert len(theirs) == len(PEERS), feature
        assert ours == "✓", feature
        assert set(theirs) <= MARKS, feature


def test_each_tick_links_to_tests_that_exist() -> None:
    assert [feature for feature, *_ in table(FEATURES)[2:]] == [feature for feature, _ in table(TESTS)[2:]]
    for feature, tests in table(TESTS)[2:]:
        links = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", tests)
        assert links, feature
        for name, path in links:
            assert re.search(rf"^ *def {name}\(", (DOCS / path).read_text(encoding="utf-8"), re.MULTILINE), name
