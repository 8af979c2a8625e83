"""Builds the shared library with g++ and the headers in PyTorch's wheel, once for each of its versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror")


class NoCompiler(RuntimeError):
    """There is no g++."""


def torch_folder() -> Path:
    """Returns where PyTorch is installed, without importing it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def build() -> Path:
    """Returns the path of the library, and builds it if there is none for these sources and this PyTorch.

    Raises:
        NoCompiler: There is no g++.
        RuntimeError: g++ failed.
    """
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    name = f"{importlib.metadata.version('torch')}-{digest.hexdigest()[:16]}.so"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(cache) / "graphckpt" / "simulated_cuda" / name
    if not target.exists():
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None:
            raise NoCompiler("no g++ to build the simulated CUDA device with")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = _compile(compiler, Path(folder))
            built.rename(target)  # atomic: of two processes that build it, both have a library all the time
    return target


def _compile(compiler: str, folder: Path) -> Path:
    torch = torch_folder()
    # Headers of the system: their warnings are not ours.
    includes = [f"-isystem{torch / part}" for part in ("include", "include/torch/csrc/api/include")]

    def run(*arguments: str) -> None:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"building the simulated CUDA device failed:\n{done.stderr[:4000]}")

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        run(*_FLAGS, *includes, "-c", str(source), "-o", target)
        return target

    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sources))
    library = folder / "library.so"
    run("-shared", *objects, "-o", str(library), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10")
    return library
