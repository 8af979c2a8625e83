"""Writes what a benchmark measured: one JSON file with every number, one Markdown file with the table."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "fairscale", "numpy")


def header(**settings: Any) -> dict[str, Any]:
    """Describes the run: command, machine, versions, load, and the benchmark's own ``settings``."""
    # A folder relative to this one, as the absolute path says nothing on another machine.
    arguments = [os.path.relpath(each) if Path(each).is_absolute() else each for each in sys.argv[1:]]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])
    return {
        "command": command,
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "load_1min_at_start": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), "graphckpt": _commit()}
        | {package: _version(package) for package in _PACKAGES},
        "threads": torch.get_num_threads(),
        **settings,
    }


def write(name: str, head: dict[str, Any], rows: list[dict[str, Any]], text: str, folder: Path = RESULTS) -> None:
    """Writes ``<folder>/<name>.json`` and ``<folder>/<name>.md``, and prints the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n")
    machine, versions = head["machine"], head["versions"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_GiB']} GiB, {machine['system']}"
    load = machine["load_1min_at_start"]
    lines = [
        f"# {name}",
        "",
        f"- command: `{head['command']}`",
        f"- machine: {hardware}; load at the start {load}; threads used: {head['threads']}",
        "- versions: " + ", ".join(f"{package} {number}" for package, number in versions.items()),
        *(f"- {key}: {value}" for key, value in head.items() if key not in _SHOWN),
        "",
        text.rstrip(),
        "",
    ]
    (folder / f"{name}.md").write_text("\n".join(lines))
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    print("\n".join(lines))


_SHOWN = {"command", "machine", "versions", "threads"}


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table; all columns but the first are right-aligned."""
    widths = [max(map(len, texts)) for texts in zip(columns, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(columns), line(rule), *map(line, rows)])


def spread(values: list[float]) -> dict[str, float]:
    """Returns the least, the middle and the largest of ``values``."""
    return {"min": min(values), "median": median(values), "max": max(values)}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Returns version and commit, with a plus if the library's own files were edited since."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        edited = subprocess.run(
            ["git", "status", "--porcelain", "../graphckpt"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return _version("graphckpt")
    return f"{_version('graphckpt')} ({commit}{'+' if edited else ''})"
