"""Captures the device work of a step once, and replays it in every later call."""

from graphckpt.capture.backend import Capture, CaptureBackend
from graphckpt.capture.choose import backend_for
from graphckpt.capture.manager import CaptureManager, Program

__all__ = ["Capture", "CaptureBackend", "CaptureManager", "Program", "backend_for"]
