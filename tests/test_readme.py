"""The README is short, says what matters first, and runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from helpers import pages

PATH = Path(__file__).parent.parent / "README.md"
README = PATH.read_text(encoding="utf-8")


def test_it_is_short_and_says_what_it_is_for() -> None:
    assert len(README.splitlines()) <= 150
    first = README.split("\n\n")[1]
    assert "activation checkpointing" in first
    assert "gradient checkpointing" in first
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert headings[0].startswith("Install")
    assert README.index("none has been run on a GPU") < README.index("## ")


def test_its_code_runs_and_prints_what_it_shows() -> None:
    for step, printed in pages.run(PATH):
        assert pages.same(step.shown or "", printed), f"README.md:{step.line} prints\n{printed}"
    assert step.code.endswith("loss = TrainStep()(tokens)\n")


def test_the_table_is_narrow() -> None:
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 8
    assert {row.count("|") for row in rows} == {7}
