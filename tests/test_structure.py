"""The shape of the package: small folders, short modules, and one meaning per class name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import graphckpt

PACKAGE = Path(graphckpt.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_MODULES = 16
MOST_LINES = 400
LONGEST_CHAIN = 16
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


def run_time_imports(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """Yields the names that a module's own statements import, without those for annotations and those in functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If):
            yield from run_time_imports([] if "TYPE_CHECKING" in ast.unparse(node.test) else node.body)
            yield from run_time_imports(node.orelse)
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            yield from run_time_imports(node.body)


def test_no_chain_of_imports_is_too_long() -> None:
    """To understand a module a reader may have to follow its imports: this is how far, at most."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}

    @cache
    def chain(name: str) -> tuple[str, ...]:
        found = run_time_imports(ast.parse(names[name].read_text(encoding="utf-8")).body)
        modules = {full if full in names else full.rpartition(".")[0] for full in found}
        return (name, *max(map(chain, modules & names.keys() - {name}), key=len, default=()))

    longest = max(map(chain, names), key=len)
    assert len(longest) > 5, "the package was not read"
    assert len(longest) <= LONGEST_CHAIN, "\n".join(longest)
