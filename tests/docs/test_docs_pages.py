"""The Python of the pages runs as it stands there, and prints what they show; the README says what matters first."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import pages
from helpers.thinning import slow_unless

from graphckpt.stores import offload_targets

DOCS = Path(__file__).parent.parent.parent / "docs"
NAMES = ("tutorial.md", "graph.md", "planning.md", "estimate.md", "reference/selectors.md", "reference/policies.md")
README = DOCS.parent / "README.md"
SLOW = "fit", "budget", "cluster"
RUN = [README, *(DOCS / name for name in NAMES), *sorted((DOCS / "howto").glob("*.md"))]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=slow_unless(page.stem not in SLOW), id=page.stem) for page in RUN]
)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # trainers write into it
    threads = torch.get_num_threads()
    try:
        for step, printed in pages.run(page):
            shown = step.shown or ""
            assert pages.same(shown, printed), f"{page.name}:{step.line} prints\n{printed}\nand shows\n{shown}"
    finally:
        torch.set_num_threads(threads)
        gc.collect()  # classes that a page defines end with it
    assert "zip" not in offload_targets()


def test_the_readme_is_short_and_says_what_it_is_for() -> None:
    text = README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 170
    first = text.split("\n\n")[1].lower()
    assert "activation checkpointing" in first
    assert "gradient checkpointing" in first
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[:2] == ["Why graphckpt", "Installation"]
    screen = text[: text.index("## ")]
    for shown in ("graphckpt.apply(model, True)", "peak memory: ", "docs/images/step.png", "cuda_out_of_memory.md"):
        assert shown in screen
    assert "CUDA support has run on one H200 only, for nine minutes" in text
    assert "pip install graphckpt" not in text, "it is on no index"
    assert [*pages.steps(text)][-1].code.endswith("loss = TrainStep()(tokens)\n")
    assert [line.count("|") for line in lines if line.startswith("|")][-10:] == [7] * (2 + 8)


def test_numbers_may_differ_a_little_and_words_not_at_all() -> None:
    assert pages.same("loss 4.801  in 3.2 ms\n---- --\n", "loss 4.8014 in 9 us\n---\n")
    assert not pages.same("loss 4.80", "loss 4.90")
    assert not pages.same("full 1", "keep 1")
    assert not pages.same("a\nb", "a b")


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]
)
def test_links_beside_the_site_lead_somewhere(name: str) -> None:
    page = DOCS.parent / name
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
