"""The cache of prepared tokens: a folder is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphckpt.train.data.corpus import DataError

SPLITS = ("train", "heldout")


def cache_root(named: str | None) -> Path:
    """Returns the given folder, or the system's cache folder."""
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphckpt"


def documents(folder: Path, split: str) -> NDArray[np.int64]:
    """Returns the tokens and the group of each document, int64 of shape [D, 2]."""
    found: NDArray[np.int64] = np.load(folder / f"{split}.documents.npy")
    return found


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns the metadata of the tokens in a folder."""
    found = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def is_whole(folder: Path) -> bool:
    """Returns whether a cached folder is complete."""
    try:
        meta = read_meta(folder)
        width = np.dtype(meta["dtype"]).itemsize
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in meta["num_tokens"]}
        if any(documents(folder, name)[:, 0].sum() != counted for name, counted in meta["num_tokens"].items()):
            return False
        return (folder / "tokenizer.json").is_file() and sizes == {
            name: width * counted for name, counted in meta["num_tokens"].items()
        }
    except (OSError, ValueError, EOFError, KeyError, AssertionError):
        return False


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that is renamed to ``folder`` at the end; an error leaves nothing behind."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    except OSError as error:
        fix = "set data.cache_dir to a folder that can be written"
        raise DataError(f"data.cache_dir: {folder.parent}: {error.strerror} · fix: {fix}") from error
    try:
        yield made
        try:
            made.rename(folder)
        except OSError:
            if not is_whole(folder):  # it is incomplete; a complete one was written by another run meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    except OSError as error:
        raise DataError(f"data.cache_dir: {folder.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
