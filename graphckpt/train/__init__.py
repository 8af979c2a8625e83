"""Trains a model through graphckpt.Graph: data, loop, hooks, metrics."""

from importlib import import_module
from typing import Any

from graphckpt.extras import require

require("train", "numpy", "pydantic", "safetensors", "tokenizers", "transformers")

_PUBLIC = {
    "HookBase": "loop",
    "Loop": "loop",
    "OwnData": "data.samples",
    "OwnLoss": "tasks",
    "Task": "tasks",
    "TextData": "data.text_data",
    "TrainConfig": "settings",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    """Returns a public name; imported on first use, for all of them together take seconds."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
