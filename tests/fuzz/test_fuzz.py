"""Random programmes of fixed seeds are the same under policies as without; and the fuzzer finds what is not."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.subprocess_runner import run_script
from helpers.thinning import slow_unless

from fuzz import run
from fuzz.execute import DOCUMENTED, Outcome, execute, execute_apart, family_of
from fuzz.programme import CONTAINERS, LAYERS, SHAPES, Node, Programme, Step, generate, is_left_out, nodes
from fuzz.script import script_of
from fuzz.shrink import shrink
from graphckpt.errors import MutatedError, RecomputeError

FULL = (("", (("activation_checkpointing", "True"),)),)
OFFLOADED = (("", (("offload", "'disk'"), ("min_elements", "1"))),)
CHUNK = 25
NUM_FAST = 50 if torch.cuda.is_available() else 200


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=slow_unless(first < NUM_FAST)) for first in range(0, 400, CHUNK)]
)
def test_fixed_seeds(first: int, device: str) -> None:
    check = "values" if first // CHUNK % 2 else "default"
    outcomes = {seed: execute(generate(seed), determinism_check=check) for seed in range(first, first + CHUNK)}
    assert {seed: outcome for seed, outcome in outcomes.items() if outcome.failed} == {}
    assert sum(outcome.kind == "same" for outcome in outcomes.values()) > CHUNK // 3


def test_a_seed_is_one_programme_and_many_have_every_kind_of_part() -> None:
    programmes = [generate(seed) for seed in range(400)]
    assert generate(3) == programmes[3]
    assert len(set(programmes[:50])) == 50
    kinds = collections.Counter(node.kind for programme in programmes for node in nodes(programme.root))
    shapes = collections.Counter(step.shape for programme in programmes for step in programme.steps)
    assert set(kinds) == {*LAYERS, *CONTAINERS}
    assert set(shapes) == set(SHAPES)
    assert min(*kinds.values(), *shapes.values()) > 5


def test_a_broken_engine_is_found_and_the_programme_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = [programme for programme in map(generate, range(12)) if execute(programme).kind == "same"]
    monkeypatch.setattr("graphckpt.engine.frame.set_rng_state", lambda state: None)
    alarms = [outcome.what for outcome in map(execute, right) if outcome.failed]
    assert [text for text in alarms if "expected the values of the original forward" in text], "by the value check"
    monkeypatch.setattr("graphckpt.engine.values.tolerance_of", lambda dtype: float("inf"))
    found = ((programme, execute(programme)) for programme in right)
    programme, outcome = next((p, o) for p, o in found if o.kind == "differs")
    small = shrink(programme, lambda other: execute(other).is_like(outcome))
    assert small.size() <= 6 < programme.size()
    script = ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", script)  # where dataclasses look for the types of their fields
    exec(compile(script_of(small, outcome, "seed"), "script", "exec"), vars(script))
    assert "what differs: ['step 0: " in capsys.readouterr().out


def test_an_error_of_the_plain_step_is_no_failure() -> None:
    leaf_is_edited = Programme(Node("Chain", "", (Node("EditsItsInput"),), FULL), (Step("plain"),))
    assert execute(leaf_is_edited).kind == "invalid"


def test_a_process_that_ends_or_hangs_is_an_outcome() -> None:
    def hangs(_: Programme) -> Outcome:
        time.sleep(60)
        return Outcome("same")

    programme = generate(0)
    assert execute_apart(programme, execute=lambda _: os.kill(os.getpid(), 9)) == Outcome("died", "SIGKILL")
    assert execute_apart(programme, execute=hangs, seconds=0.2) == Outcome("died", "no end within 0.2 seconds")
    assert execute_apart(programme, execute=lambda _: Outcome("same")) == Outcome("same")


@pytest.mark.parametrize(
    "policies", [pytest.param(FULL, id="full"), pytest.param(OFFLOADED, marks=pytest.mark.slow, id="offloaded")]
)
def test_a_script_runs_by_itself(tmp_path: Path, policies: Any) -> None:
    children = (Node("Linear"), Node("Dropout"), Node("SharesMemory", "'list'"))
    programme = Programme(Node("Chain", "", children, policies), (Step("penalty"), Step("two_losses", autocast=True)))
    script = tmp_path / "script.py"
    script.write_text(script_of(programme, execute(programme), "seed 1"))
    assert run_script(script, folder=tmp_path) == (0, "what differs: nothing\n", "")
    assert "fuzz" not in script.read_text()


@pytest.mark.parametrize(("words", "minutes"), [([], 30.0), (["--seeds", "0:9"], None), (["--worker", *"091"], None)])
def test_a_range_of_seeds_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch, words: list[str], minutes: float | None
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    assert run.parse_arguments().minutes == minutes


@pytest.mark.slow
def test_workers_share_the_seeds_of_a_run() -> None:
    words = [sys.executable, Path(__file__).parent / "run.py", "--seeds", "0:6", "--workers", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n6 programmes in " in done.stdout


def test_programmes_left_out_or_refused_are_documented() -> None:
    model = Node("Chain", "", (Node("Activation", "'RReLU'"),))
    assert [is_left_out(Programme(model, (Step(shape),))) for shape in ("saved_as_copies", "plain")] == [True, False]
    words = ["autograd passes the noise tensor to the store before it is filled", *(each.words for each in DOCUMENTED)]
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    assert [each for each in words if each not in text] == []


def test_a_difference_is_never_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Node("Chain", "", (Node("Linear"), Node("EditsItsInputLater")), FULL)
    programme = Programme(root, (Step("plain"),))
    assert execute(programme).kind == "same"
    answers = iter([["step 0: output"], []])  # differs from the plain step, and the plain steps do not differ
    monkeypatch.setattr("fuzz.execute.differing", lambda *_: next(answers))
    assert execute(programme) == Outcome("differs", "step 0: output")


def test_an_error_of_another_class_is_not_documented() -> None:
    programme = Programme(Node("EditsItsInputLater", "", (), FULL), (Step("plain"),))
    text = "0: its argument `x` was modified in place"
    assert family_of(RecomputeError(text), programme) == "edits an argument from a later call on"
    assert family_of(MutatedError(text), programme) is None
    assert family_of(RecomputeError("0: saved tensor 2 differs"), programme) is None
