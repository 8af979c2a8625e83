"""A model and a data set from outside of the package, by a config file of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.subprocess_runner import run_script

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "examples" / "04_own_model" / name for name in ("waves.py", "config.py")]
PAGE = ROOT / "docs" / "own_model.md"


def _code(path: Path) -> str:
    """Returns a file without its docstring."""
    return path.read_text(encoding="utf-8").split('"""', 2)[2].strip()


def test_the_page_shows_the_files() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert [block.strip() for block in shown[: len(FILES)]] == [_code(path) for path in FILES]


def test_model_data_and_config_are_under_30_lines() -> None:
    lines = [line for path in FILES for line in _code(path).splitlines() if line.strip()]
    assert len(lines) < 30


@pytest.mark.slow
def test_it_learns_and_checkpoints_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_script("graphckpt", "train", "--config-file", str(FILES[1]), "train.device=cpu", folder=tmp_path)
    assert done.code == 0, done.stderr
    assert re.search(r"model\.net\.1-4 \(4x\) +full", done.stdout)
    folder = tmp_path / "output" / "waves"
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["eval_mse_loss"] < 0.01
    assert (folder / "model_final" / "model.safetensors").is_file()
