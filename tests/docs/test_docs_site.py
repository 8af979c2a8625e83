"""The built site in a browser: nothing is cut off, and the search finds what readers look for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.browser import CHECK_SITE as CHECK
from helpers.browser import needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]
ROOT = Path(__file__).parent.parent.parent

PAGE = """<!doctype html><meta charset="utf-8">{style}<input class="md-search__input">
<pre><code>{code}</code></pre><script>
document.querySelector("input").addEventListener("keyup", event => {{
  for (const page of {pages}[event.target.value] ?? []) {{
    const link = document.createElement("a");
    link.className = "md-search-result__link";
    link.href = page;
    document.body.append(link);
  }}
}});</script>"""


def site(folder: Path, style: str, code: str, pages: dict[str, list[str]]) -> Path:
    (folder / "index.html").write_text(PAGE.format(style=style, code=code, pages=json.dumps(pages)), encoding="utf-8")
    return folder


def test_a_page_without_faults_has_none(tmp_path: Path) -> None:
    pages = {word: [page, "other.html"] for word, page in CHECK.WORDS.items()}
    style = "<style>code { display: block; overflow-x: auto }</style>"
    assert CHECK.check(site(tmp_path, style, "x" * 100, pages)) == []


def test_each_fault_is_found(tmp_path: Path) -> None:
    style = "<style>code { display: block; overflow: hidden; } input { width: 500px }</style>"
    faults = CHECK.check(
        site(tmp_path, style, "y" * 400, {word: ["graph.html", page] for word, page in CHECK.WORDS.items()})
    )
    assert [fault for fault in faults if "at 390 pixels: the page is" in fault]
    assert len([fault for fault in faults if "pixels of a code block are cut off: yyy" in fault]) == len(CHECK.WIDTHS)
    assert [word for word in CHECK.WORDS if any(f"search for '{word}'" in fault for fault in faults)] == [
        word for word, page in CHECK.WORDS.items() if page != "graph.html"
    ]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs")
def test_the_site_has_no_faults(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert CHECK.check(tmp_path) == []
    places = [
        entry["location"] for entry in json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    ]
    assert any(place.startswith("howto/cluster") for place in places)
    assert not any(place.startswith("decisions/") for place in places)
