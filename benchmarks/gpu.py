"""Runs all that needs a CUDA device, in order, and sums it up on one page: probe, tests, benchmarks.

Each step runs in a process of its own with a time limit, and what it found so far is kept when it fails. The parts are
for machines that are lent for ten minutes: 1 is the probe and the tests, 2 what captured steps and stores cost, 3 the
planner. Copy the folders of several parts into one, and ``--part 0`` writes the page of all.

    python benchmarks/gpu.py [--minutes 9] [--part 1] [--out FOLDER] [--dry-run]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from device import device_for
from gpu_summary import summarize
from jobs import why
from processes import run
from report import RESULTS, header

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Step:
    """One step; ``weight`` is its share of the time that is left, beside the steps after it."""

    name: str
    part: int
    weight: float
    words: tuple[str, ...]


STEPS = [
    Step("probe", 1, 1, ("gpu_probe.py",)),
    Step("tests", 1, 6, ("-m", "pytest")),
    Step("capture", 2, 4, ("capture_gpu.py", "--batches", "1", "8")),
    Step("stores", 2, 4, ("stores_gpu.py",)),
    Step(
        "planner", 3, 8,
        ("planner_gpu.py", "--pareto", "bert-large", "--shares", "0.5", "--models", "bert-large", "gpt2"),
    ),
]  # fmt: skip
PARTS = max(step.part for step in STEPS)


def words_of(step: Step, options: argparse.Namespace, seconds: float) -> list[str]:
    """Returns the command line of a step, without Python."""
    if step.name == "tests":
        # Without a device no test of it is collected; a dry run takes those that import them.
        tests = "tests/test_gpu_files.py" if options.dry_run else "tests/gpu"
        words = [*step.words, str(ROOT / tests), "-q", "-W", "default", "-p", "pytest_rows", "-p", "no:cacheprovider"]
        words += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        if options.dry_run:
            return [*words, "-k", "imported"]
        if importlib.util.find_spec("xdist") is not None:
            words += ["-n", str(os.cpu_count() or 1)]
        return words
    words = [str(HERE / step.words[0]), *step.words[1:], "--out", str(options.out)]
    return [*words, "--minutes", f"{seconds / 60 * 0.95:.2f}", *["--dry-run"] * options.dry_run]


def do(step: Step, options: argparse.Namespace, seconds: float) -> None:
    """Runs one step and writes how it ended."""
    print(f"{step.name}: at most {seconds:.0f} s", flush=True)
    done = run(words_of(step, options, seconds), seconds, is_forked=options.dry_run, leads=True)
    row = {"step": step.name, "seconds": done.seconds, "exit_status": done.code}
    if done.code == 1 and step.name == "tests":
        row["failed"] = "some tests failed"
    elif done.code != 0:
        row["failed"] = why(done.stderr or done.stdout, done.code)
    with (options.out / f"gpu_part_{step.part}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with (options.out / f"gpu_part_{step.part}.log").open("a") as file:
        file.write(f"---- {step.name}\n{done.stdout}\n{done.stderr}\n")
    print(f"{step.name}: {row.get('failed', 'done')} after {done.seconds:.0f} s", flush=True)


def main() -> None:
    """Runs the steps and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", type=int, choices=range(PARTS + 1), help="0 runs nothing and writes the page")
    parser.add_argument("--minutes", type=float, help="of this run; by default 9 for each of its parts")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="the folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU in tiny sizes")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if options.part in (None, step.part)]
    minutes = options.minutes or 9 * len({step.part for step in steps})
    end = perf_counter() + 60 * minutes
    if steps:
        device = device_for(is_dry=options.dry_run)
        if options.dry_run:
            import transformers.models.gpt2.modeling_gpt2  # noqa: F401, PLC0415 - for all forks; real runs need none
        head = json.dumps({"header": header(**device.header())}) + "\n"
        for part in {step.part for step in steps}:
            (options.out / f"gpu_part_{part}.jsonl").write_text(head)
            (options.out / f"gpu_part_{part}.log").write_text("")
        rows = options.out / "tests_gpu.jsonl"
        if any(step.name == "tests" for step in steps):
            rows.write_text(head)
        paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "GPU_TEST_ROWS": str(rows), "HF_HUB_OFFLINE": "1"}
        sys.path.insert(0, str(ROOT))
    for at, step in enumerate(steps):
        weight = step.weight / sum(other.weight for other in steps[at:])
        do(step, options, (end - perf_counter()) * weight)
        summarize(options.out)  # after each step: the run may be cut off
    print(summarize(options.out))


if __name__ == "__main__":
    main()
