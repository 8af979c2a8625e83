"""The example notebook runs as its stored outputs say, and results show themselves as tables with pictures."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.layer_stacks import mlp_step

import graphckpt
from graphckpt import progress
from graphckpt.errors import ConfigError
from graphckpt.progress import Progress

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/notebook.ipynb"


def outputs(notebook: Any) -> list[Any]:
    """Returns the outputs of cells, without lines of progress, which only slow machines show."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in found if not output.get("text", "").startswith("planning, ")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_and_has_the_stored_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat  # noqa: PLC0415 - warns when it is imported
    from nbclient import NotebookClient  # noqa: PLC0415

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    stored, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    before, now = outputs(stored), outputs(notebook)
    assert [output.output_type for output in now] == [output.output_type for output in before]
    assert all(output.output_type != "error" for output in now)
    assert [output.get("text") for output in now] == [output.get("text") for output in before]
    assert sum(output.get("text", "").count("True") for output in now) == 2
    shown, were = ([o.data for o in these if o.output_type == "execute_result"] for these in (now, before))
    assert [data["text/plain"].split()[0] for data in shown] == ["<Explanation", "<Plan", "<Fit"]
    for number in (0, 2):  # a plan depends on measured times as well
        assert shown[number]["text/plain"] == were[number]["text/plain"]
    for data in (*shown, *were):
        assert "<table>" in data["text/html"]
        assert data["text/html"].count('src="data:image/png;base64,') == 1


def test_a_cell_that_applies_a_plan_can_run_again() -> None:
    model, step = mlp_step(num_layers=3)
    plan = graphckpt.plan(model, step, memory_budget="min", check=False)
    first = plan.apply()
    with pytest.raises(ConfigError, match=r"it already has a policy .*fix: .*apply\(\.\.\., replace=True\)"):
        plan.apply()
    second = plan.apply(replace=True)
    assert repr(second) == repr(first)
    with pytest.raises(ConfigError, match=r"it already has a policy · fix: call graphckpt\.remove\(model\) before"):
        graphckpt.plan(model, step, memory_budget="min")
    second.remove()


def test_an_explanation_without_matplotlib_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = mlp_step(num_layers=3)
    with graphckpt.apply(model, {"*": True}) as handle:
        with handle.measure():
            step()
        seen = handle.explain(show=False)
    assert "<img" in seen._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = seen._repr_html_()
    assert "<table>" in html
    assert "<img" not in html


@pytest.mark.parametrize(("place", "is_shown"), [("script", False), ("terminal", True), ("notebook", True)])
def test_progress_shows_where_somebody_watches(
    place: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: place == "terminal")
    shell = SimpleNamespace(kernel=None) if place == "notebook" else None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    model, step = mlp_step(num_layers=3)
    graphckpt.plan(model, step, memory_budget="1GiB", check=False)
    graphckpt.fit(lambda size: (model, step), batch_sizes=[1], memory_budget="1GiB")
    out, err = capsys.readouterr()
    text, other = (out, err) if place == "notebook" else (err, out)
    assert other == ""
    lines = re.findall(r"^planning, \d+ s: (.*)$", text, re.MULTILINE)
    assert ("choosing the policies of 3 blocks" in lines, "measuring the step at batch size 1" in lines) == (
        is_shown,
    ) * 2


def test_progress_that_is_set_asks_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", object())  # such as one that copies lines to a log, and has no `isatty`
    for is_shown in (False, True):
        with Progress(is_shown=is_shown) as lines:
            lines.begin("something")


def test_progress_is_silent_when_quick_and_when_not_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, step = mlp_step(num_layers=3)
    with Progress() as quick:
        quick.begin("one")
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    graphckpt.plan(model, step, memory_budget="1GiB", check=False, progress=False)
    assert capsys.readouterr().err == ""
    graphckpt.plan(model, step, memory_budget="1GiB", check=False, progress=True)
    assert "planning, 0 s: " in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match="progress: expected True, False or a function, got 'yes' · fix: progress=True"
    ):
        graphckpt.plan(model, step, memory_budget="1GiB", progress="yes")


def test_a_stage_that_takes_long_is_named_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.3)
    with Progress() as shown:
        shown.begin("long")
        time.sleep(1.0)
    assert re.fullmatch(r"planning, \d s: long\n", capsys.readouterr().err)
