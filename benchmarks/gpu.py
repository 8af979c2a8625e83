"""Runs all that needs a CUDA device, in order, and sums it up on one page: goals, tests, more benchmarks.

Each step runs in a process of its own with a time limit, and what it has measured is kept when it fails. The parts are
for machines that are lent for ten minutes: 1 measures every goal, 2 runs the tests, 3 takes more rows. Copy the folders
of several parts into one, and ``--part 0`` writes the page of all.

    python benchmarks/gpu.py --part 1 [--minutes 9] [--out FOLDER] [--archive NAME] [--dry-run]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).parent
ROOT = HERE.parent
NEEDED = (
    "torch",
    "rich",
    "networkx",
    "matplotlib",
    "pytest",
    "pydantic",
    "omegaconf",
    "transformers.models.gpt2.modeling_gpt2",
    "graphckpt",
    "graphckpt.planning",
    "graphckpt.train.parallel.tensor_parallel",
)
PRELOADED = (
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.profiler",
    "graphckpt.checks.selftest",
    "graphckpt.cli",
    "numpy",
)
"""What steps import too. They are forked from this process, so that it is imported once."""


def missing() -> list[str]:
    """Returns what cannot be imported, and why; without it every row would fail by itself."""
    faults = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package that is broken is missing too
            faults.append(f"{name.partition('.')[0]} ({type(error).__name__}: {error})")
    return faults


sys.path.insert(0, str(ROOT))
if faults := missing():
    raise SystemExit(f"cannot import {', '.join(faults)}")

from device import Cuda, device_for  # noqa: E402 - after what it needs
from gpu_summary import summarize  # noqa: E402
from jobs import why  # noqa: E402
from processes import run  # noqa: E402
from report import RESULTS, header  # noqa: E402

PART_MINUTES = 9
NO_TESTS = 5
"""Pytest's exit status where none was collected."""
MOST_MINUTES = 9.5
"""Of a command whose minutes are not set: lent machines end one after ten."""


@dataclass(frozen=True)
class Step:
    """One step; ``weight`` is its share of the time that is left, beside the steps after it."""

    name: str
    part: int
    weight: float
    words: tuple[str, ...]


def bench(script: str, words: str = "") -> tuple[str, ...]:
    return (script, *words.split())


OFFLOADED = ("full, offload", "offload all")
# Weights are about the seconds that a step takes on an H200, so that one that hangs does not take the others' time.
STEPS = [
    Step("probe", 1, 40, bench("gpu_probe.py")),
    Step("selftest", 1, 45, ("-m", "graphckpt", "selftest")),
    Step("capture", 1, 80, bench("capture_gpu.py", "--batches 8 --policies none full")),
    Step("plan", 1, 140, bench("planner_gpu.py", "--pareto bert-large --shares 0.5 --models")),
    Step("stores", 1, 100, bench("stores_gpu.py", "--models gpt2 --tokens 1024 --variants plain full") + OFFLOADED),
    Step("ranks", 1, 60, bench("stores_gpu.py", "--models gpt2 --tokens 1024 --batch 2 --ranks 2 --warm-up 3")),
    Step("peaks", 1, 100, bench("planner_gpu.py", "--pareto --models gpt2 bert-large --precisions autocast")),
    Step("tests", 2, 400, ("-m", "pytest")),
    Step("serial_tests", 2, 120, ("-m", "pytest")),
    Step("more_capture", 3, 100, bench("capture_gpu.py", "--batches 8 1 --policies selective") + OFFLOADED[:1]),
    Step("more_stores", 3, 80, bench("stores_gpu.py", "--models gpt2 --tokens 1024 --batch 1")),
    Step("more_peaks", 3, 240, bench("planner_gpu.py", "--pareto --models llama-1b gpt2-1.5b")),
    Step("more_plans", 3, 80, bench("planner_gpu.py", "--pareto gpt2 --shares 0.5 --models --others")),
    Step("values", 3, 60, bench("values_gpu.py")),
    Step("profile", 3, 30, ("-m", "graphckpt", "profile-device")),
]  # fmt: skip
PARTS = max(step.part for step in STEPS)


def words_of(step: Step, options: argparse.Namespace, seconds: float, device: Cuda) -> list[str]:
    """Returns the command line of a step, without Python."""
    if step.words[-1] == "pytest":
        return [*step.words, *pytest_words(step, options, device)]
    if step.name == "profile":
        words = [*step.words, str(options.out / "device.yaml"), "--folder", str(options.out)]
        return [*words, "--seconds", "0.01" if options.dry_run else "0.5"]
    if step.name == "selftest":
        return [*step.words]
    script = Path(step.words[0])
    words = [str(HERE / script), *step.words[1:], "--out", str(options.out), "--name", f"{script.stem}_{step.name}"]
    return [*words, "--minutes", f"{seconds / 60 * 0.95:.2f}", *["--dry-run"] * options.dry_run]


def pytest_words(step: Step, options: argparse.Namespace, device: Cuda) -> list[str]:
    """Returns what pytest is called with: tests that time, or count reserved memory, run with nothing beside them."""
    words = [str(ROOT / "tests"), "-q", "-W", "default", "-p", "pytest_rows", "-p", "no:cacheprovider"]
    words += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    words += ["--continue-on-collection-errors"]  # a file that cannot be imported must not end the others
    words += ["-m", f"gpu and not slow and {'not ' * (step.name == 'tests')}serial"]
    if importlib.util.find_spec("xdist") is not None:  # a worker ends with an error that its device does not get over
        num_workers = 1 if options.dry_run or step.name == "serial_tests" else os.cpu_count() or 1
        words += ["-n", str(num_workers), "--max-worker-restart", "20"]
    return words


def do(step: Step, options: argparse.Namespace, seconds: float, device: Cuda) -> None:
    """Runs one step and writes how it ended."""
    print(f"{step.name}: at most {seconds:.0f} s", flush=True)
    is_pytest = step.words[-1] == "pytest"
    is_forked = True if device.kind == "cpu" else None
    done = run(words_of(step, options, seconds, device), seconds, is_forked=is_forked, leads=True)
    row = {"step": step.name, "seconds": done.seconds, "exit_status": done.code}
    if done.code == 1 and is_pytest:
        row["failed"] = "some tests failed"
    elif done.code != 0 and not (is_pytest and done.code == NO_TESTS):
        row["failed"] = why(done.stderr or done.stdout, done.code)
    with (options.out / f"gpu_part_{step.part}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with (options.out / f"gpu_part_{step.part}.log").open("a") as file:
        file.write(f"---- {step.name}\n{done.stdout}\n{done.stderr}\n")
    print(f"{step.name}: {row.get('failed', 'done')} after {done.seconds:.0f} s", flush=True)


def page(folder: Path, archive: Path | None) -> None:
    """Writes the page and the archive; rows that it cannot read must not end the run."""
    try:
        summarize(folder)
        if archive is not None:
            shutil.make_archive(str(archive), "gztar", folder.parent, folder.name)
    except Exception:
        traceback.print_exc()


def main() -> None:
    """Runs the steps and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", type=int, choices=range(PARTS + 1), help="0 runs nothing and writes the page")
    parser.add_argument("--minutes", type=float, help=f"of this run; {PART_MINUTES} for one part")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="the folder of the results")
    parser.add_argument("--archive", type=Path, help="pack the folder into ARCHIVE.tar.gz after each step")
    parser.add_argument("--dry-run", action="store_true", help="run everything in tiny sizes, on the CPU without a GPU")
    options = parser.parse_args()
    steps = [step for step in STEPS if options.part in (None, step.part)]
    num_parts = len({step.part for step in steps})
    minutes = options.minutes or PART_MINUTES * num_parts
    if minutes > MOST_MINUTES and options.minutes is None:
        commands = "".join(f"\n  make gpu GPU='--part {part} --out gpu'" for part in range(1, PARTS + 1))
        parser.error(f"all parts take {minutes:g} minutes; run one after the other, or set --minutes:{commands}")
    options.out, options.archive = options.out.resolve(), options.archive and options.archive.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    end = perf_counter() + 60 * minutes
    if steps:
        for name in PRELOADED:
            importlib.import_module(name)
        device = device_for(is_dry=options.dry_run)
        head = json.dumps({"header": header(**device.header())}) + "\n"
        for part in {step.part for step in steps}:
            (options.out / f"gpu_part_{part}.jsonl").write_text(head)
            (options.out / f"gpu_part_{part}.log").write_text("")
        rows = options.out / "tests_gpu.jsonl"
        if any(step.name == "tests" for step in steps):
            rows.write_text(head)
        paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "GPU_TEST_ROWS": str(rows), "HF_HUB_OFFLINE": "1"}
    for at, step in enumerate(steps):
        weight = step.weight / sum(other.weight for other in steps[at:])
        do(step, options, (end - perf_counter()) * weight, device)
        page(options.out, options.archive)  # after each step: the run may be cut off
    page(options.out, options.archive)
    print((options.out / "gpu.md").read_text() if (options.out / "gpu.md").exists() else "there is no page")


if __name__ == "__main__":
    main()
