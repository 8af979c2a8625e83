"""Runs a step as one recording of its device work: what is recorded once is replayed in every later call."""

from graphckpt.capture.backend import Recording, Runner
from graphckpt.capture.choose import runner_for
from graphckpt.capture.manager import Captures, Program

__all__ = ["Captures", "Program", "Recording", "Runner", "runner_for"]
