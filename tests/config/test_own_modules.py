"""A config that names modules beside its file is saved so that it runs from anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from graphckpt.cli import main
from graphckpt.config.files import importable_from
from graphckpt.config.lazy import _import

EXAMPLE = Path(__file__).parents[2] / "examples" / "04_own_model"
SMALL = ["train.train_iter=2", "train.device=cpu", "train.output_dir=out", "train.evaluation.enabled=False"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, beside that of the example, and no module of the example in memory."""
    shutil.copytree(EXAMPLE, tmp_path / "example")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    """As in a new process."""
    sys.modules.pop("waves", None)
    _import.cache_clear()


def _train(file: str | Path, *words: str) -> int:
    return main(["train", "--config-file", str(file), *words])


def test_a_saved_config_finds_the_modules_of_the_first(place: Path) -> None:
    assert _train("../example/config.py", *SMALL) == 0
    for saved in ("out/config.yaml", "out/model_final/run.yaml"):
        assert OmegaConf.load(saved).import_from == str(place / "example")
    for saved, again in (("out/model_final/run.yaml", "again"), ("again/config.yaml", "third")):
        _forget()
        assert _train(saved, f"train.output_dir={again}") == 0
    weights = [Path(folder, "model_final", "model.safetensors").read_bytes() for folder in ("out", "again", "third")]
    assert weights[0] == weights[1] == weights[2]
    _forget()
    assert _train("out/config.yaml", "--eval-only") == 0


def test_a_folder_that_moved_is_one_clear_error_with_the_fix(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("../example/config.py", *SMALL) == 0
    (place / "example").rename(place / "moved")
    _forget()
    capsys.readouterr()
    assert _train("out/config.yaml") == 2
    error = capsys.readouterr().err
    assert f"import_from: {place / 'example'}: no such folder · fix: name the folder of the modules" in error
    assert "no module is called 'waves' · fix: install it, correct the name, or say in which folder it is" in error
    assert _train("out/config.yaml", "import_from=../moved", "train.overwrite=True") == 0
    assert OmegaConf.load("out/config.yaml").import_from == str(place / "moved")


def test_a_module_that_cannot_be_imported_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "here" / "broken_module.py").write_text("def f(:\n")
    (place / "here" / "broken.yaml").write_text(
        "model: {_target_: broken_module.f}\noptim: {_target_: torch.optim.SGD}\n"
        "data: {_target_: graphckpt.train.data.TextData}\ntrain: {}\n"
    )
    assert _train("broken.yaml") == 2
    assert "model: _target_ 'broken_module.f': importing broken_module raised SyntaxError" in capsys.readouterr().err


def test_transformers_is_loaded_for_its_models_alone() -> None:
    code = "import sys, graphckpt.config.trainer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_folders_that_were_importable_before_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python puts the folder of a script first, which may be the folder of its config."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = list(sys.path)
    with importable_from(tmp_path, tmp_path):
        assert sys.path[-2:] == [str(tmp_path)] * 2
    assert sys.path == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("foo = 3", r"foo: no such section, and nothing in this file reads it · fix: use train, model, "),
        ("optm = 'adam'", r"optm: no such section, .* · did you mean 'optim'\?"),
        ("a, shapes = 1, [(1, -2)]\nmodel.width = a\nsizes = [(1, -2)]", "sizes: no such section"),
        ("_mine = 3\nwidth = 64\nmodel.width = width\nimport_from = '.'", None),
    ],
)
def test_a_top_level_name_without_effect_is_reported(
    line: str, message: str | None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = place / "example" / "config.py"
    config.write_text(f"{config.read_text('utf-8')}\n{line}\n", encoding="utf-8")
    assert _train(config, "--print-config") == (0 if message is None else 2)
    printed = capsys.readouterr()
    if message is None:
        assert re.search(r"^import_from: '?\.'? +# \S*config.py", printed.out, re.MULTILINE)
    else:
        assert re.search(message, printed.err)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "x=x, y=x.sin()",
            "x=x, yy=x.sin()",
            r"with the keys x, y, as Regressor.forward takes them, got x, yy · did you",
        ),
        ("x=x, y=x.sin()", "x=x", "with the keys x, y, as Regressor.forward takes them, got x · fix: rename"),
        ("x=x, y=x.sin()", "x=x, y=x.sin(), extra=x", "got x, y, extra · fix"),
    ],
)
def test_a_wrong_key_of_a_sample_names_the_data(
    old: str, new: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = place / "example" / "waves.py"
    module.write_text(module.read_text("utf-8").replace(old, new), encoding="utf-8")
    assert _train("../example/config.py", *SMALL) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "data.train, data.heldout: expected samples" in error
    assert re.search(message, error)


def test_a_run_has_its_name_and_lists_what_is_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("../example/config.py", *SMALL) == 0
    text = capsys.readouterr().out
    assert "out: bytes kept for backward, before and after" in text
    assert "TrainGraph" not in text
    assert re.search(r"^ ?weights +out/model_final", text, re.MULTILINE), "it has no tokenizer, and no config.json"
