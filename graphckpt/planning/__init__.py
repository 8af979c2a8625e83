"""Chooses policies for a memory budget, and foretells the peak of a step under them."""

from graphckpt.planning.measure import PlanError
from graphckpt.planning.plan import Plan
from graphckpt.planning.presets import every_k, first_k, memory, speed, sqrt, uniform

__all__ = ["Plan", "PlanError", "every_k", "first_k", "memory", "speed", "sqrt", "uniform"]
