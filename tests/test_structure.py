"""The shape of the package: modules of a readable length, no import cycle, one meaning per class name, plain names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "graphckpt"
MODULES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
MAX_LINES = 700
MAX_CHAIN = 16
SHARED_NAMES = {"GraphckptCallback"}
"""What each integration calls its callback: the same thing for another trainer."""
BANNED_NAMES = frozenset(
    """
    again apart around asked below beneath beside cut far fewest found given gone handed held hole kept known least made
    most near never parted said seen taken told whole words
    """.split()  # noqa: SIM905  # one name a line would be thirty lines
)
"""Participles and adverbs that say neither what a value is nor what a function does."""
IS_NO = re.compile(r"\bis no (?!longer\b|more than\b)\w")


def test_no_module_is_too_long() -> None:
    lines = {name: len(text.splitlines()) for name, text in MODULES.items()}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_a_class_name_is_defined_once() -> None:
    modules = defaultdict(list)
    for name, text in MODULES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(name)
    assert len(modules) > 100, "the package was not read"
    assert {name: where for name, where in modules.items() if len(where) > 1 and name not in SHARED_NAMES} == {}


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


@cache
def import_graph() -> Mapping[str, frozenset[str]]:
    """Returns the modules that each module imports when it is imported."""
    dotted = {".".join(("graphckpt", *Path(name).with_suffix("").parts)): text for name, text in MODULES.items()}
    texts = {name.removesuffix(".__init__"): text for name, text in dotted.items()}
    graph = {}
    for name, text in texts.items():
        imports = run_time_imports(ast.parse(text).body)
        modules = {full if full in texts else full.rpartition(".")[0] for full in imports}
        graph[name] = frozenset(modules & texts.keys() - {name})
    return graph


def test_no_import_cycle() -> None:
    assert sum(map(len, import_graph().values())) > 500, "the package was not read"
    TopologicalSorter(import_graph()).prepare()  # raises CycleError, which names the modules


def test_no_chain_of_imports_is_too_long() -> None:
    """To understand a module a reader may have to follow its imports: this is how far, at most."""

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max(map(chain, import_graph()[name]), key=len, default=()))

    longest = max(map(chain, import_graph()), key=len)
    assert len(longest) > 5, "the package was not read"
    assert len(longest) <= MAX_CHAIN, "\n".join(longest)


def odd_lines(text: str) -> list[int]:
    """Returns the numbers of the lines with a banned name, or with "is no ..." in code, comments or strings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    numbers = {t.start[0] for t in tokens if t.type == tokenize.NAME and t.string.strip("_") in BANNED_NAMES}
    numbers |= {number for number, line in enumerate(text.splitlines(), 1) if IS_NO.search(line)}
    return sorted(numbers)


def test_no_module_has_a_banned_name_or_sentence() -> None:
    text = "def _found(x):\n    # a is no b\n    kept_bytes = 'it is no longer'\n    return self.held\n"
    assert odd_lines(text) == [1, 2, 4]
    assert {name: numbers for name, text in MODULES.items() if (numbers := odd_lines(text))} == {}


REGISTERS = re.compile(r"register_(forward|full_backward|backward|state_dict|load_state_dict|module)_?\w*hook")
PARTS_OF_THE_MODEL = {"train/parallel/tensor_parallel.py"}
"""Where hooks are a part of what the model computes, so that its copies have them too."""


def plain_hooks(text: str) -> Iterator[str]:
    """Yields the calls that register a module hook other than a `ModuleHook`."""
    tree = ast.parse(text)
    calls = {node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    safe: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = (
                zip(node.targets[0].elts, node.value.elts, strict=False)
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                else [(node.targets[0], node.value)]
            )
            safe |= {ast.unparse(target) for target, value in pairs if ast.unparse(value).startswith("ModuleHook(")}
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if REGISTERS.fullmatch(name):
            hook = ast.unparse(call.args[0]) if call.args else ""
            if hook not in safe and not hook.startswith("ModuleHook("):
                yield f"{name}({hook})"


def test_no_hook_of_the_package_goes_along_into_copies_of_a_module() -> None:
    """Hooks on tensors need nothing: `copy.deepcopy` and `torch.save` leave those of parameters behind."""
    assert list(plain_hooks("m.register_forward_hook(f)")) == ["register_forward_hook(f)"]
    assert list(plain_hooks("h, g = ModuleHook(f), f\nm.register_forward_pre_hook(h, prepend=True)")) == []
    assert list(plain_hooks("h, g = ModuleHook(f), f\nm.register_full_backward_pre_hook(g)")) != []
    sites = {name: list(plain_hooks(text)) for name, text in MODULES.items() if name not in PARTS_OF_THE_MODEL}
    assert {name: hooks for name, hooks in sites.items() if hooks} == {}
    ways = ("(ModuleHook(", "= ModuleHook(", "add_hook(", "add_pre_hook(")
    assert sum(text.count(way) for text in MODULES.values() for way in ways) >= 6
