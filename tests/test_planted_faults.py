"""Faults that can be planted, and tests that can find them: `make planted` runs all of them."""

from __future__ import annotations

import ast
import re

import pytest
from planted_faults import ROOT, Fault, load_faults

FAULTS = load_faults()


def test_every_package_has_faults() -> None:
    package = ROOT / "graphckpt"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    assert packages - {fault.module.partition("/")[0] for fault in FAULTS} == set()
    assert len(FAULTS) > 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_and_the_tests_of_a_fault_exist(fault: Fault) -> None:
    ast.parse(fault.planted(ROOT))  # raises where the text is gone
    assert fault.tests
    for test in fault.tests:
        file, *_, name = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {name.rpartition('.')[2]}\(", text, re.MULTILINE), test
