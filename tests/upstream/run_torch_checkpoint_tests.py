"""Runs PyTorch's own tests of ``torch.utils.checkpoint`` with graphckpt's functions in place of PyTorch's. By hand.

The tests are no part of an installed PyTorch. Debian's source package has them::

    apt-get source --download-only pytorch
    tar xf pytorch_*.orig.tar.xz --wildcards '*/test/test_utils.py' '*/test/test_autograd.py'
    pip install expecttest pytest
    python tests/upstream/run_torch_checkpoint_tests.py pytorch-*/test

A test runs if its name or that of its class has "checkpoint" in it; first with PyTorch's own functions, as the tests of
one release do not all pass on another one, and then with graphckpt's. Those that fail only then are printed. The ones
of ``EXPECTED`` fail by design; docs/limits.md describes them.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

import graphckpt

FILES = ("test_utils.py", "test_autograd.py")
_ERROR_TEXT = "the text of the error is another one"
_ONE_KIND = "it expects the limits of PyTorch's reentrant kind, and there is one kind, which has none of them"
_NO_WARNING = "use_reentrant has no meaning, so that nothing warns if it is not given"
EXPECTED = {
    "TestAutograd.test_checkpoint_detects_non_determinism": _ERROR_TEXT,
    "TestAutograd.test_checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly": _NO_WARNING,
    "TestAutograd.test_checkpoint_valid_reset_on_error": _ONE_KIND,
    "TestAutograd.test_checkpoint_warns_if_use_reentrant_not_passed_explcitly": _NO_WARNING,
    "TestAutograd.test_checkpointing_without_reentrant_custom_function_works": (
        "a custom function may read its saved tensors twice; the test expects an error"
    ),
    "TestAutograd.test_checkpointing_without_reentrant_detached_tensor_use_reentrant_True": _ONE_KIND,
    "TestCheckpoint.test_checkpoint_non_tensor_inputs_outputs": (
        "an argument that is returned stays that argument, whose gradient may be taken any number of times"
    ),
    "TestCheckpoint.test_checkpoint_partial_grad": _ERROR_TEXT,
    "TestCheckpoint.test_checkpoint_trigger (use_reentrant=False)": "module attributes count one forward, not two",
    "TestCheckpoint.test_checkpoint_trigger (use_reentrant=True)": "module attributes count one forward, not two",
    "TestCheckpoint.test_checkpoint_valid": _ONE_KIND,
}
"""Tests that fail by design, and why."""


class _Result(unittest.TextTestResult):
    """Collects the names of tests by outcome."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.passed: list[str] = []

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed.append(_name(test))


def main() -> int:
    """Returns 1 if a test fails with graphckpt alone, and is not expected to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder `test` of PyTorch's source")
    parser.add_argument("--only", default="", help="a part of a test's name")
    parser.add_argument("--traces", action="store_true", help="print whole tracebacks")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # PyTorch's test library reads them too
    sys.path.insert(0, str(arguments.folder))
    warnings.simplefilter("ignore")
    plain, of_another_release = _run(arguments.folder, arguments.only)
    torch.utils.checkpoint.checkpoint = graphckpt.checkpoint
    torch.utils.checkpoint.checkpoint_sequential = graphckpt.checkpoint_sequential
    ours, failures = _run(arguments.folder, arguments.only)
    failures = {name: text for name, text in failures.items() if name not in of_another_release}
    for name, text in sorted(failures.items()):
        lines = [line for line in text.splitlines() if line.strip()]
        cause = text if arguments.traces else next((ln for ln in lines if ln.startswith(_ERRORS)), lines[-1])[:300]
        print(f"{f'expected: {EXPECTED[name]}' if name in EXPECTED else 'FAILED'}\n  {name}\n    {cause}")
    print(f"torch {torch.__version__}: {len(plain.passed)} passed, {len(of_another_release)} failed")
    unexpected = [name for name in failures if name not in EXPECTED]
    passed = f"{len(ours.passed)} passed, {len(failures)} failed of those that pass above"
    print(f"graphckpt: {passed}, {len(unexpected)} of them unexpectedly; {len(ours.skipped)} skipped in both")
    return 1 if unexpected else 0


def _run(folder: Path, only: str) -> tuple[_Result, dict[str, str]]:
    """Runs the tests, and returns the tracebacks of those that fail."""
    suite = unittest.TestSuite()
    for file in FILES:
        suite.addTests(test for test in _tests_of(folder / file) if only in _name(test))
    result: Any = unittest.TextTestRunner(stream=io.StringIO(), resultclass=_Result, buffer=True).run(suite)
    return result, {_name(test): text for test, text in [*result.failures, *result.errors]}


_ERRORS = ("AssertionError", "RuntimeError", "TypeError", "ValueError", "graphckpt.errors", "AttributeError", "torch.")


def _tests_of(path: Path) -> list[unittest.TestCase]:
    """Returns the tests of a file that are about checkpointing."""
    name = f"upstream_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    while True:
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:  # a name of another release, which tests of other things need
            missing = re.match(r"cannot import name '(\w+)'", str(error))
            if missing is None or error.name is None:
                raise
            setattr(sys.modules[error.name], missing[1], None)
        else:
            break
    found = []
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == name:
            tests = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
            cases = [test for test in tests if isinstance(test, unittest.TestCase)]
            found += [test for test in cases if "checkpoint" in _name(test).lower()]
    return found


def _name(test: unittest.TestCase) -> str:
    return test.id().partition(".")[2]


if __name__ == "__main__":
    sys.exit(main())
