"""Runs the Python of a page, block by block in one namespace, and compares what it prints with what the page shows.

A block titled with a peer's name is that peer's code and is not run; nor is one that says it takes long. `<!-- run`
begins a block that readers do not see.
Write a page's outputs anew: python tests/helpers/pages.py docs/tutorial.md
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_NOT_RUN = ("FairScale", "DeepSpeed", "OSLO", "OneFlow", "libai", "Megatron", "outline", "takes two minutes")
_BLOCK = re.compile(
    r"^(?P<indent> *)```python(?P<options>[^\n]*)\n(?P<code>.*?)^ *```\n"
    r"(?:\s*(?:</div>\s*)?^ *```text\n(?P<output>.*?)^ *```\n)?|^<!-- run\n(?P<hidden>.*?)^-->\n",
    re.DOTALL | re.MULTILINE,
)
_TIME = re.compile(r"\b\d+(\.\d+)? (ns|us|ms|s)\b|\b\d+ %$|[+-]\d+(\.\d+)? %")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Step(NamedTuple):
    """A block of a page, with what the page says it prints."""

    code: str
    line: int
    shown: str | None
    output_span: tuple[int, int]


def steps(text: str) -> Iterator[Step]:
    """Yields the blocks to run, in order."""
    for match in _BLOCK.finditer(text):
        if match["hidden"] is None and any(title in match["options"] for title in _NOT_RUN):
            continue
        indent = match["indent"] or ""
        lines = (match["hidden"] or match["code"]).splitlines(keepends=True)
        code = "".join(line.removeprefix(indent) for line in lines)
        yield Step(code, text[: match.start()].count("\n") + 2, match["output"], match.span("output"))


def run(page: Path) -> Iterator[tuple[Step, str]]:
    """Runs the page, and yields each block with what it really printed."""
    names: dict[str, Any] = {"__name__": "page"}
    text = page.read_text(encoding="utf-8")
    for step in steps(text):
        printed = io.StringIO()
        code = compile("\n" * (step.line - 1) + step.code, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        yield step, printed.getvalue()


def same(shown: str, printed: str) -> bool:
    """Compares line by line: times are anything, numbers are equal to half a percent, all else to the letter."""
    ours, theirs = (_words(text) for text in (shown, printed))
    return len(ours) == len(theirs) and all(_near(a, b) for a, b in zip(ours, theirs, strict=True))


def _words(text: str) -> list[str]:
    lines = (_TIME.sub("TIME", line.rstrip()) for line in text.strip().splitlines())
    return [word for line in lines if line.strip("- ") or not line for word in [*line.split(), "\n"]]


def _near(a: str, b: str) -> bool:
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    return all(abs(float(x) - float(y)) <= 0.005 * max(float(x), float(y)) for x, y in pairs)


def write(page: Path) -> None:
    """Puts the outputs of a run into the page."""
    text = page.read_text(encoding="utf-8")
    for step, printed in reversed([*run(page)]):
        if step.shown is not None:
            begin, end = step.output_span
            text = text[:begin] + printed.strip("\n") + "\n" + text[end:]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
