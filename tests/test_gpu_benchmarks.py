"""The command that runs all that needs a GPU, walked on the CPU, and what its page says of rows."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NOW = ("allocated_bytes.all.current", "requested_bytes.all.current")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def summary(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("gpu_summary")


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def jobs_of(jobs: ModuleType, script: Path, text: str, header: dict[str, Any]) -> Any:
    script.write_text(textwrap.dedent(text))
    return jobs.Jobs(str(script), argparse.Namespace(minutes=1, out=script.parent, dry_run=False, name=None), header)


@pytest.mark.slow
def test_benchmarks_name_what_the_package_has(tmp_path: Path) -> None:
    """They use private names too, and most of them never run with the tests."""
    config = tmp_path / "mypy.ini"
    untyped = "transformers.*,datasets.*,deepspeed.*,fairscale.*"
    config.write_text(
        f"[mypy]\nmypy_path = tests\nignore_missing_imports = True\n[mypy-{untyped}]\nfollow_imports = skip"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), "benchmarks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=BENCHMARKS.parent)
    assert done.returncode in (0, 1), done.stderr
    wrong = [
        line for line in done.stdout.splitlines() if line.endswith(("[attr-defined]", "[name-defined]", "[call-arg]"))
    ]
    assert wrong == []


@pytest.mark.slow
def test_dry_run_walks_all_parts_and_sums_them_up(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--minutes", "27", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    steps = [row for path in sorted(tmp_path.glob("gpu_part_*.jsonl")) for row in rows_in(path)]
    ends = [(row["step"], row.get("failed")) for row in steps if "step" in row]
    goals = ["probe", "selftest", "capture", "plan", "stores", "ranks", "peaks"]
    more = ["tests", "serial_tests", "more_capture", "more_stores", "more_peaks", "more_plans", "values", "profile"]
    assert ends == [(name, None) for name in [*goals, *more]]
    paths = [path for path in tmp_path.glob("*_*.json") if path.suffix == ".json"]
    assert len(paths) == 11
    for path in paths:
        rows = json.loads(path.read_text())["rows"]
        # Transformers' own offload pins its memory, which no CPU does.
        assert rows, path
        assert [row for row in rows if "failed" in row and row.get("variant") != "Transformers, offload"] == [], path
    captured = json.loads((tmp_path / "capture_gpu_capture.json").read_text())["rows"]
    kinds = [(row["policy"], row["kind"]) for row in captured]
    assert kinds[:2] == [("none", "eager"), ("full", "captured")], "the pair of the goal, whatever comes after it"
    assert set(kinds) == {*product(("none", "full"), ("eager", "captured"))}
    assert len(kinds) == 4
    assert all("1 capture, " in row["capture"] for row in captured if row["kind"] == "captured")
    page = (tmp_path / "gpu.md").read_text()
    assert "none, a dry run" in page
    assert "No test ended." in page  # there is no CUDA device, not even a simulated one
    assert "not measured" not in page.partition("offload / recompute")[0]
    assert " met " not in page  # a CPU says nothing of a GPU
    assert " missed " not in page
    assert (tmp_path / "gpu.png").stat().st_size > 0
    assert (tmp_path / "device.yaml").stat().st_size > 0


def test_all_parts_in_one_command_are_refused_and_the_commands_named(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run"])
    with pytest.raises(SystemExit, match="2"):
        benchmark("gpu").main()
    commands = [line.strip() for line in capsys.readouterr().err.splitlines() if "make gpu" in line]
    assert commands == [f"make gpu GPU='--part {part} --out gpu'" for part in (1, 2, 3)]


def test_a_missing_package_is_named_before_anything_runs(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = benchmark("gpu")
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(SystemExit, match=r"^cannot import networkx \(ModuleNotFoundError: import of networkx halted"):
        importlib.reload(command)


def test_a_job_that_fails_or_hangs_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: Callable[[str], ModuleType]
) -> None:
    """Rows that it printed count, also those before it fails, whatever else is printed and however it ends."""
    jobs = benchmark("jobs")
    steps = """
        import json, os, signal, sys, time
        job = json.loads(sys.argv[2])
        def say(**row): print(json.dumps({**job, **row} if row else {}), flush=True)
        if job['does'] == 'hang': time.sleep(60)
        if job['does'] == 'fail': raise ValueError('as it was asked to')
        say(seconds=1)
        if job['does'] == 'fail late': raise ValueError('after a row')
        if job['does'] == 'hang late': time.sleep(60)
        say()
        print('USDT: a library says goodbye')
        sys.stdout.flush()
        if job['does'] == 'die late': os.kill(os.getpid(), signal.SIGSEGV)
    """
    ours = jobs_of(jobs, tmp_path / "steps.py", steps, {"device": "none"})
    monkeypatch.setattr(jobs, "JOB_SECONDS", 20)
    for does, *seconds in (("fail",), ("work",), ("fail late",), ("die late",), ("hang", 0.5), ("hang late", 2)):
        ours.run({"does": does}, *seconds)
    ours.end = 0
    ours.run({"does": "work"})
    header, *rows = rows_in(tmp_path / "steps.jsonl")
    assert header == {"header": {"device": "none"}}
    assert rows == ours.rows
    ends = [(row["does"], row.get("seconds"), row.get("failed"), row.get("exit_status")) for row in rows]
    late = "took longer than its time limit"
    assert ends == [
        ("fail", None, "ValueError: as it was asked to", 1),
        ("work", 1, None, None),
        ("fail late", 1, None, None),
        ("fail late", None, "ValueError: after a row", 1),
        ("die late", 1, None, -11),
        ("hang", None, late, None),
        ("hang late", 1, None, None),
        ("hang late", None, late, None),
        ("work", None, "no time left", None),
    ]
    assert rows[0]["error"][-1] == "ValueError: as it was asked to"


def test_processes_are_forked_from_one_that_has_not_used_the_device(
    tmp_path: Path,
    benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processes = benchmark("processes")
    script = tmp_path / "script.py"
    # Not `print`: pytest has put a file of its own in the place of the standard output.
    script.write_text("import os, sys\nos.write(1, str('only_in_this_process' in sys.modules).encode())")
    monkeypatch.setitem(sys.modules, "only_in_this_process", ModuleType("only_in_this_process"))

    def is_forked() -> bool:
        done = processes.run([str(script)], 60)
        assert done.code == 0, done.stderr
        return bool(done.stdout.strip() == "True")

    monkeypatch.delenv(processes.FORKS, raising=False)
    assert not is_forked()
    monkeypatch.setenv(processes.FORKS, "1")
    assert is_forked()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert not is_forked(), "CUDA would refuse to be used in it"
    assert "has used CUDA" in capsys.readouterr().err


def test_the_name_of_the_device_comes_from_another_process(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forked if the device can be used in a process that is, as others are then."""
    device, processes = benchmark("device"), benchmark("processes")
    for variable in ("BENCHMARKS_DEVICE", processes.FORKS):
        monkeypatch.setenv(variable, "")
    attempts = []

    def run(words: list[str], seconds: float, *, is_forked: bool) -> Any:
        attempts.append(is_forked)
        return processes.Done(int(is_forked and is_poisoned), "a line\nNVIDIA H200\n", "", 0.0)

    monkeypatch.setattr(device, "run", run)
    for is_poisoned, forks in ((True, "0"), (False, "1")):
        monkeypatch.setenv("BENCHMARKS_DEVICE", "")
        assert device.name_of_device() == "NVIDIA H200"
        assert os.environ[processes.FORKS] == forks
    assert device.name_of_device() == "NVIDIA H200"
    assert attempts == [True, False, True]


def test_the_pair_of_the_goal_is_measured_first(benchmark: Callable[[str], ModuleType]) -> None:
    capture = benchmark("capture_gpu")
    assert capture.pairs_of(["none", "full", "selective"]) == [
        [("none", "eager"), ("full", "captured")],
        [("none", "captured"), ("full", "eager")],
        [("selective", "eager"), ("selective", "captured")],
    ]
    assert capture.pairs_of(["selective"]) == [[("selective", "eager"), ("selective", "captured")]]


def test_rows_are_written_while_their_job_runs(tmp_path: Path, benchmark: Callable[[str], ModuleType]) -> None:
    steps = """
        import json, pathlib, sys, time
        print(json.dumps({'row': 1}), flush=True)
        lines = pathlib.Path(__file__).with_suffix('.jsonl')
        end = time.monotonic() + 20
        while len(lines.read_text().splitlines()) < 2 and time.monotonic() < end: time.sleep(0.05)
        print(json.dumps({'row': 2, 'lines': len(lines.read_text().splitlines())}), flush=True)
    """
    ours = jobs_of(benchmark("jobs"), tmp_path / "steps.py", steps, {})
    assert ours.run({}) == [{"row": 1}, {"row": 2, "lines": 2}]


def test_a_capture_that_fails_leaves_the_eager_row_and_the_error(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, capture_gpu = benchmark("device"), benchmark("capture_gpu")

    def capture(self: Any, step: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device.RerunBackend, "capture", capture)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    pair = [("full", "eager"), ("full", "captured")]
    job = {"pair": pair, "batch": 1, "tokens": 8, "warm_up": 4, "steps": 2, "sizes": sizes}
    with warnings.catch_warnings(action="ignore"):
        eager, captured = capture_gpu.measure(**job, device=device.Cpu())
    assert eager["seconds"]["median"] > 0
    assert "failed" not in eager
    assert "the step cannot be captured" in captured["failed"]
    assert "RuntimeError: operation not permitted when stream is capturing" in captured["error"]
    assert len(captured["error"]) <= 20
    assert captured["capture"].startswith("rerun, 0 captures")
    assert captured["notes"] == []


def test_bytes_are_given_as_allocated_and_as_requested(benchmark: Callable[[str], ModuleType]) -> None:
    device = benchmark("device")

    class Counted(device.Cpu):  # type: ignore[name-defined, misc]
        def stats(self) -> dict[str, int]:
            peaks = {"allocated_bytes.all.peak": 1024, "requested_bytes.all.peak": 900}
            return peaks | {"inactive_split_bytes.all.peak": 50, **dict.fromkeys(NOW, 100)}

    calls: list[int] = []
    peak = Counted().peak_of(lambda: calls.append(1), device.Bytes(100, 90), "plain", times=3)
    assert peak == {"plain_bytes": 924, "plain_requested_bytes": 810, "plain_inactive_split_bytes": 50}
    assert len(calls) == 3
    assert Counted().bytes_now() == device.Bytes(100, 100)


def test_a_snapshot_that_fails_is_not_the_end_of_a_row(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call() -> None:
        raise RuntimeError("the step failed")

    benchmark("device").Cuda(is_dry=True).save_snapshot(call, tmp_path / "snapshot.pickle")
    assert "Error: " in capsys.readouterr().err


# ---- the tests' rows


def run_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[dict[str, Any]]:
    rows = pytester.path / "rows.jsonl"
    rows.write_text("")
    monkeypatch.setenv("GPU_TEST_ROWS", str(rows))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=os.pathsep)
    pytester.runpytest_subprocess("-p", "pytest_rows", "-p", "no:cacheprovider", "-p", "no:randomly", *words)
    return rows_in(rows)


def test_an_error_that_stays_with_the_device_ends_a_worker_and_not_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        """
        import os, pytest
        @pytest.fixture(scope="session")
        def device(): return []
        def test_before(device): print(os.getpid())
        def test_breaks(device):
            device.append("broken")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        @pytest.mark.parametrize("n", range(4))
        def test_after(device, n): assert device == []
        """
    )
    rows = run_tests(pytester, monkeypatch, "-n", "1", "--max-worker-restart", "20")
    ends = [(row["test"].partition("::")[2], row["outcome"]) for row in rows]
    assert sorted(ends) == [
        *((f"test_after[{n}]", "passed") for n in range(4)), ("test_before", "passed"), ("test_breaks", "failed")
    ]  # fmt: skip
    (failed,) = [row["failed"] for row in rows if "failed" in row]
    assert failed == "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("workers", [(), ("-n", "1", "--max-worker-restart", "20")], ids=["alone", "worker"])
def test_a_test_that_hangs_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[Any, ...]
) -> None:
    if workers:
        pytest.importorskip("xdist")
    monkeypatch.setenv("GPU_TEST_SECONDS", "2")
    pytester.makepyfile("import time\ndef test_hangs(): time.sleep(60)\ndef test_after(): pass")
    rows = run_tests(pytester, monkeypatch, *workers)
    ends = [(row["test"].partition("::")[2], row.get("failed")) for row in rows]
    assert ends[0] == ("test_hangs", "took longer than 2 s")
    assert ends[1:] == [("test_after", None)] * bool(workers)  # a worker is replaced
    assert "in test_hangs" in (pytester.path / "rows.stacks").read_text()


# ---- the page

RUN = {"model": "gpt2", "batch": 8, "tokens": 1024}


def test_goals_are_met_missed_or_not_measured(summary: ModuleType) -> None:
    def row(policy: str, kind: str, seconds: float) -> dict[str, Any]:
        return {**RUN, "policy": policy, "kind": kind, "seconds": {"median": seconds}}

    plain = row("none", "eager", 2.0)
    assert summary.captured([plain, row("full", "captured", 1.9)]).state == "met"
    assert summary.captured([plain, row("full", "eager", 1.9), row("full", "captured", 2.1)]).state == "missed"
    goal = summary.captured([plain, {**RUN, "policy": "full", "kind": "captured", "failed": "out of memory"}])
    assert (goal.state, goal.note) == ("not measured", "out of memory")

    peaks = {"model": "gpt2", "precision": "autocast", "is_captured": False, "peak_bytes": 100, "foretold_bytes": 102}
    measured, alone = summary.predicted([peaks])
    assert (measured.state, alone.state) == ("missed", "not measured")


def test_half_is_of_activations_and_of_the_peak(summary: ModuleType) -> None:
    def row(target: str, ratio: float, peak: int) -> dict[str, Any]:
        method = f"{target} in {peak}"
        plan = {"model": "bert-large", "family": "graphckpt plan", "method": method, "target": target}
        return plan | {"ratio": {"median": ratio}, "allocator_peak_bytes": peak, "budget_bytes": 60, "peak_share": 0.6}

    kept = "50% of activations"
    activations, peak = summary.half([row(kept, 1.05, 60), row(kept, 1.2, 50), row("50% of the plain peak", 1, 61)])
    assert (activations.state, activations.value) == ("met", 1.05)
    assert "peak 0.60 of plain's" in activations.note
    assert (peak.state, peak.note) == ("not measured", "no plan's step was within its budget")


def test_offload_counts_only_where_its_copies_fit(summary: ModuleType) -> None:
    probe = [{"probe": "copy_rates", "answer": {"out_idle_bytes_per_second": 100.0}}]

    def row(variant: str, seconds: float, pinned: int, kind: str = "eager") -> dict[str, Any]:
        return {**RUN, "variant": variant, "kind": kind, "step_seconds": {"median": seconds}, "pinned_bytes": pinned}

    rows = [row("plain", 3.0, 0), row("full", 4.0, 0), row("full, offload", 4.04, 90), row("offload all", 9.0, 900)]
    goal = summary.offloaded(rows, probe, "eager")
    assert goal.state == "met"
    assert goal.value == pytest.approx(1.01)
    assert summary.offloaded(rows, probe, "captured").state == "not measured"


def test_bytes_saved_by_two_ranks_are_compared_with_the_plain_model_on_them(summary: ModuleType) -> None:
    def row(variant: str, kept: int, **more: Any) -> dict[str, Any]:
        return {**RUN, "variant": variant, "kept_bytes": kept, "layers_kept_bytes": kept // 2, **more}

    rows = [row("plain", 1), row("plain", 100, ranks=2), row("full, cpu+partition+contiguous", 36, ranks=2)]
    goal = summary.partitioned(rows)
    assert (goal.state, goal.value) == ("missed", 0.36)
    assert "0.360 without the loss" in goal.note


def test_the_page_names_each_failed_test_and_a_picture_that_fails(
    summary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = [
        {"header": {}},
        {"test": "a::b", "outcome": "passed", "when": "call"},
        {"test": "a::c", "outcome": "failed", "when": "call", "failed": "assert 1 == 2"},
    ]
    cut_off = '{"test": "a::d", "outc'
    (tmp_path / "tests_gpu.jsonl").write_text("\n".join([*(json.dumps(row) for row in rows), cut_off]))
    page = summary.summarize(tmp_path)
    assert "No picture: ModuleNotFoundError" in page
    assert "1 passed, 1 failed, 0 skipped" in page
    assert "- `a::c`: assert 1 == 2" in page
