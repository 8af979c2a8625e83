"""Plants each fault of `planted_faults.toml` in a copy of the repository, and runs the tests that must find it.

python tests/planted_faults.py [part of a name ...]

All of these tests run once before, without a fault, and must pass. A run of all faults writes
`benchmarks/results/planted.md`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
_SIMULATED = ("-p", "simulated_cuda.plugin", "-m", "gpu")
_SECONDS = 300  # for the tests of one fault, which take about 10
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_ORIGIN = "import importlib.util; print(importlib.util.find_spec('graphckpt').origin)"


class Fault(NamedTuple):
    name: str
    module: str
    """File in the package."""
    text: str
    """Occurs once in it."""
    replacement: str
    tests: list[str]
    """Node ids of pytest."""
    is_simulated: bool = False
    """Whether the tests run on the simulated CUDA device."""

    def planted(self, root: Path) -> str:
        """Returns the text of the module under ``root`` with the fault."""
        text = (root / "graphckpt" / self.module).read_text(encoding="utf-8")
        if (count := text.count(self.text)) != 1:
            raise ValueError(f"{self.name}: expected {self.text!r} once in {self.module}, got it {count} times")
        return text.replace(self.text, self.replacement)


def load_faults() -> list[Fault]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Fault(name, **fields) for name, fields in content.items()]


def copy_tracked(target: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_python(root: Path, *arguments: str, seconds: float | None = None) -> tuple[int, str]:
    paths = os.pathsep.join([str(root), str(root / "tests")])  # before the installed package
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run([sys.executable, *arguments], cwd=root, env=env, timeout=seconds, check=False, **out)
    except subprocess.TimeoutExpired:
        return -1, f"it takes more than {seconds} s"
    return done.returncode, done.stdout


def run_tests(root: Path, tests: Iterable[str], *options: str, is_simulated: bool, **limit: float) -> tuple[int, str]:
    """Returns the exit code of pytest, and the tests that fail, or else all of its output."""
    options = (*options, *(_SIMULATED if is_simulated else ("-m", "")))
    arguments = ["-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *options, *dict.fromkeys(tests)]
    code, output = run_python(root, *arguments, **limit)
    failures = dict.fromkeys(_FAILURE.findall(output) if code == 1 else ())
    return code, ", ".join(failures) or output


def find(fault: Fault, plain: Path, planted: Path) -> tuple[bool, str]:
    """Returns whether a test fails on the fault, and which, or what happens instead."""
    shutil.copytree(plain, planted)  # with the bytecode of the run before
    try:
        (planted / "graphckpt" / fault.module).write_text(fault.planted(plain), encoding="utf-8")
        _, origin = run_python(planted, "-c", _ORIGIN)
        assert Path(origin.strip()).is_relative_to(planted), f"the tests would import {origin}"
        code, found_by = run_tests(planted, fault.tests, "-x", is_simulated=fault.is_simulated, seconds=_SECONDS)
    finally:
        shutil.rmtree(planted)
    return code == 1, {1: found_by, 0: "no test fails"}.get(code, f"pytest ends with {code}: {found_by}")


def main(parts: list[str]) -> int:
    faults = [fault for fault in load_faults() if not parts or any(part in fault.name for part in parts)]
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain")
        copy_tracked(plain)
        for is_simulated in sorted({fault.is_simulated for fault in faults}):
            tests = [test for fault in faults if fault.is_simulated is is_simulated for test in fault.tests]
            code, output = run_tests(plain, tests, is_simulated=is_simulated)
            if code != 0:
                print(f"without a fault, pytest ends with {code}: {output}")
                return 1
        print(f"all tests pass without a fault  {time.monotonic() - started:.0f} s", flush=True)
        for fault in faults:
            began = time.monotonic()
            is_found, what = find(fault, plain, Path(folder, "planted"))
            result = what if is_found else f"NOT FOUND: {what}"
            print(f"{fault.name}  {time.monotonic() - began:.0f} s  {result}", flush=True)
            rows.append({"fault": fault.name, "module": fault.module, "is_found": is_found, "found by": result})
    num_found = sum(row["is_found"] for row in rows)
    print(f"{num_found} of {len(rows)} faults found in {time.monotonic() - started:.0f} s")
    if not parts:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from report import header, table, write  # noqa: PLC0415 - loads torch

        head = {**header(found=f"{num_found} of {len(rows)} faults"), "command": "python tests/planted_faults.py"}
        cells = [[row["fault"], f"`{row['module']}`", f"`{row['found by']}`"] for row in rows]
        write("planted", head, rows, table(["fault", "module", "test that found it"], cells))
    return int(num_found < len(rows) or not rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
