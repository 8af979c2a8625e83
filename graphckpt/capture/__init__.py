"""Runs a step as one recording of its device work: what is recorded once is replayed in every later call."""

from graphckpt.capture.captures import Captures, Program
from graphckpt.capture.choose import runner_for
from graphckpt.capture.runner import Recording, Runner

__all__ = ["Captures", "Program", "Recording", "Runner", "runner_for"]
