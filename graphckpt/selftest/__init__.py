"""Checks what the library promises, on a device of the user: ``graphckpt selftest``."""

from graphckpt.selftest.checks import CheckResult, device_of, machine, run
from graphckpt.selftest.report import report

__all__ = ["CheckResult", "device_of", "machine", "report", "run"]
