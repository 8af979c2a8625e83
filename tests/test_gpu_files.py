"""The tests that need a CUDA device are not collected without one, but can be imported everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_can_be_imported(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert any(name.startswith("test_") for name in vars(module))
    marks = module.pytestmark if isinstance(module.pytestmark, list) else [module.pytestmark]
    assert "gpu" in [mark.name for mark in marks]


def test_are_collected_only_with_a_device(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((FILES[0].parents[1] / "conftest.py").read_text(encoding="utf-8"))
    folder = pytester.mkdir("gpu")
    (folder / "test_one.py").write_text("def test_it(): pass", encoding="utf-8")
    num_collected = len(pytester.inline_run("--collect-only").getcalls("pytest_itemcollected"))
    assert num_collected == int(torch.cuda.is_available())
