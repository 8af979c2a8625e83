"""Shows the doctests of docstrings as code, and the defaults of dataclass fields without ``field(...)``."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around each doctest, and replaces ``field(default=...)`` by the default."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Griffe calls this for every object that it has read."""
        del kwargs
        if obj.docstring is not None and ">>> " in obj.docstring.value and "```pycon" not in obj.docstring.value:
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
        value = getattr(obj, "value", None)
        if isinstance(value, griffe.ExprCall) and str(value.function) == "field":
            keywords = [word for word in value.arguments if isinstance(word, griffe.ExprKeyword)]
            obj.value = next((word.value for word in keywords if word.name == "default"), None)
