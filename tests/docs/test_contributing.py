"""The map of the package in CONTRIBUTING.md names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def definitions(path: Path) -> set[str]:
    """Returns the functions, classes and methods that a module defines, such as ``Frame.run``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{child.name}" for child in ast.walk(node) if isinstance(child, ast.FunctionDef)}
    return names


def test_the_journeys_name_functions_that_exist() -> None:
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", TEXT)
    assert len(steps) > 20, "the journeys were not read"
    missing = [
        f"{path}:{name}"
        for path, name in steps
        if not (ROOT / "graphckpt" / path).is_file() or name not in definitions(ROOT / "graphckpt" / path)
    ]
    assert missing == []


def test_the_table_names_each_package_and_module_of_the_top_level() -> None:
    table = TEXT.partition("## Layout of the code")[2].partition("## Two walkthroughs")[0]
    cells = " ".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE))
    names = {name.rstrip("*") for name in re.findall(r"`([\w*]+)`", cells)}
    package = ROOT / "graphckpt"
    top = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    entry_points = {"__init__", "__main__", "_api"}
    listed = {name for name in top for prefix in names if name.startswith(prefix)}
    assert top - listed - entry_points == set()
    assert {name for name in names if not any(other.startswith(name) for other in top)} == set()
