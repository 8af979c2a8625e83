"""Finds user modules that a config names: beside its file, or in the folder ``import_from``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphckpt.config.instantiate import TARGET, is_call

KEY = "import_from"
"""The config key of the folder; set in a saved config if needed."""


def folders(config: DictConfig, path: Path) -> tuple[list[Path], list[str]]:
    """Returns the folders of user modules, and the faults of ``import_from``.

    Args:
        config: which may have the key.
        path: of its file.
    """
    beside = path.resolve().parent
    named = config.get(KEY)
    if not isinstance(named, str) or "\0" in named:
        return [beside], []  # the schema reports values that are not text
    folder = Path(named).expanduser().resolve()
    if not folder.is_dir():
        return [beside], [f"{KEY}: {named}: no such folder · fix: name the folder of the modules: {KEY}=folder"]
    return list(dict.fromkeys([beside, folder])), []


def remember(config: DictConfig, places: list[Path]) -> None:
    """Sets ``import_from`` in a config that is saved elsewhere, if it uses user modules."""
    names = {target.partition(".")[0] for target in _targets(config) if isinstance(target, str)}
    for folder in places:
        if any(_is_in(folder, name) for name in names):
            config[KEY] = str(folder)


def _targets(config: DictConfig) -> Iterator[object]:
    try:
        plain = OmegaConf.to_container(config, resolve=False)
    except OmegaConfBaseException:
        return
    nodes: list[Any] = [plain]
    while nodes:
        node = nodes.pop()
        if is_call(node):
            yield node[TARGET]
        nodes += list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _is_in(folder: Path, name: str) -> bool:
    """Returns whether the imported module ``name`` is a file or a package directly in ``folder``."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    places = [Path(file).parent] if file else [Path(place) for place in getattr(module, "__path__", [])]
    return any(place.resolve() in {folder, folder / name} for place in places)
