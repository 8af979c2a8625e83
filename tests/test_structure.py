"""The shape of the package: small folders, short modules, and one meaning per class name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import graphckpt

PACKAGE = Path(graphckpt.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_MODULES = 16
MOST_LINES = 400
ONE_MEANING = {"GraphckptCallback"}
"""What each integration calls its callback: the same thing for another trainer."""


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    counts = Counter(path.parent for path in MODULES if not path.name.startswith("__"))
    assert {str(folder.relative_to(PACKAGE)): n for folder, n in counts.items() if n > MOST_MODULES} == {}


def test_no_module_is_too_long() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: n for name, n in lines.items() if n > MOST_LINES} == {}


def test_a_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 100, "the package was not read"
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in ONE_MEANING} == {}
