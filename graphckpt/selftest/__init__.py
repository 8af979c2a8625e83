"""Checks what the library promises, on a device of the user: ``graphckpt selftest``."""

from graphckpt.selftest.checks import device_of, machine, run
from graphckpt.selftest.report import report
from graphckpt.selftest.result import CheckResult

__all__ = ["CheckResult", "device_of", "machine", "report", "run"]
