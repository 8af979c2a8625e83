"""Makes the benchmark pages of the site from `benchmarks/results`, and adds what lies outside of `docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import plots

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GROUPS = {
    "overhead": "Overhead",
    "memory": "Memory",
    "stores": "Stores",
    "partition": "Partition",
    "compile": "Compiled",
    "scale": "Scale",
    "planner": "Planner",
    "fit": "Batch sizes",
    "solve": "Solvers",
    "growth": "Growth",
    "commands": "Commands",
    "published": "Published figures",
    "capacity": "All memory of a card",
    "assumptions": "Assumptions",
    "trainer": "Trainers",
    "matrix": "What works",
}
TESTS = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)\)")
"""A link to a test. The site has its source as text, since it is not known where the repository can be read."""
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
"""A flag in code, such as ``--device``. A browser would break the line between its hyphens and its name."""
FIRST = (
    "tutorial.md",
    "howto/cuda_out_of_memory.md",
    "howto/fit.md",
    "planning.md",
    "graph.md",
    "reference/policies.md",
    "reference/cli.md",
    "reference/config.md",
)
"""Pages that come first in the results of a search."""
MOVED = {
    "howto/budget.md": ("Pick a policy for a budget", "../planning.md#pick-policies-by-hand"),
    "howto/out_of_memory.md": (
        "Recover from running out of memory",
        "../planning.md#recover-from-running-out-of-memory",
    ),
    "howto/capture.md": ("Capture a step", "../capture.md"),
    "training_memory.md": ("Memory of the training configs", "training.md#memory-of-the-packaged-configs"),
}
"""Addresses of pages that are parts of others now, each with its title and where it is: they go on as a link."""
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}


def on_config(config: Any) -> Any:
    """Leaves pages out of the menu that have nothing to show yet."""
    there = {f"benchmarks/{group}.md" for group in GROUPS if any(RESULTS.glob(f"{group}*.md"))}
    there |= {"benchmarks/index.md", "decisions/index.md", *OUTSIDE.values()}

    def kept(node: Any) -> Any:
        if isinstance(node, list):
            return [item for item in map(kept, node) if item]
        if isinstance(node, dict):
            return {title: value for title, value in ((title, kept(value)) for title, value in node.items()) if value}
        return node if node in there or (ROOT / "docs" / node).exists() else None

    config.nav = kept(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made."""

    def add(name: str, content: str) -> None:
        old = files.get_file_from_path(name)
        if old is not None:
            files.remove(old)
        files.append(File.generated(config, name, content=content))

    for source, name in OUTSIDE.items():
        add(name, (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "]("))
    for test in set(TESTS.findall((ROOT / "docs" / "comparison.md").read_text(encoding="utf-8"))):
        add(f"{test}.txt", (ROOT / test).read_text(encoding="utf-8"))
    for name, (title, target) in MOVED.items():
        add(name, f"# {title}\n\nThis page is now [{title}]({target}).\n")
    decisions = ["# Decisions", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].strip("# ")
        decisions.append(f"- [{title}]({path.name})")
    add("decisions/index.md", "\n".join(decisions))
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for group, title in GROUPS.items():
        page = [f"# {title}", ""]
        for result in sorted(RESULTS.glob(f"{group}*.md")):
            head, _, table = result.read_text(encoding="utf-8").partition("\n")
            page += [f"## {head.strip('# ')}", ""]
            own = result.with_suffix(".svg")
            drawing = own.read_text(encoding="utf-8") if own.exists() else plots.draw(result.with_suffix(".json"))
            if drawing:
                add(f"benchmarks/{result.stem}.svg", drawing)
                page += [f"![{result.stem}]({result.stem}.svg)", ""]
            page += [re.sub(r"^## ", "### ", table, flags=re.MULTILINE), ""]
        if page[2:]:
            add(f"benchmarks/{group}.md", "\n".join(page))
        for result in RESULTS.glob(f"{group}*.md"):
            readme = readme.replace(f"`results/{result.name}`", f"[{title}]({group}.md)")
        readme = readme.replace(f"`results/{group}*.md`", f"[{title}]({group}.md)")
    add("benchmarks/index.md", readme)
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Leads links to tests to their text, and lets the search prefer the pages that describe names.

    Decision records and benchmarks are for developers: the search leaves them out, and addresses that have moved.
    """
    del kwargs
    if page.file.src_uri in FIRST:
        page.meta["search"] = {"boost": 2}
    elif page.file.src_uri.startswith("reference/api/"):
        page.meta["search"] = {"boost": 0.2}
    elif page.file.src_uri.startswith(("decisions/", "benchmarks/")) or page.file.src_uri in MOVED:
        page.meta["search"] = {"exclude": True}
    return TESTS.sub(r"](\1.txt)", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Turns reStructuredText of docstrings, as ``:meth:`measure` ``, into plain code, and keeps flags in one line."""
    del page, config, files

    def flags_in_one_line(code: re.Match[str]) -> str:
        return FLAG.sub(r'<span class="flag">\g<0></span>', code[0])

    html = re.sub(r":(?:meth|class|func|mod|attr):<code>~?(?:graphckpt\.)?", "<code>", html)
    return re.sub(r"<code[ >].*?</code>", flags_in_one_line, html, flags=re.DOTALL)
