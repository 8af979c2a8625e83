"""Runs a step as one recording of its device work: what is recorded once is replayed in every later call."""

from graphckpt.capture.backend import Capture, CaptureBackend
from graphckpt.capture.choose import backend_for
from graphckpt.capture.manager import CaptureManager, Program

__all__ = ["Capture", "CaptureBackend", "CaptureManager", "Program", "backend_for"]
