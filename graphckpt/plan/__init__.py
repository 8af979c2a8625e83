"""Chooses policies for a memory budget, and foretells the peak of a step under them."""

from graphckpt.plan.measure import PlanError
from graphckpt.plan.plan import Plan
from graphckpt.plan.planner import plan
from graphckpt.plan.presets import every_k, first_k, memory, speed, sqrt, uniform

__all__ = ["Plan", "PlanError", "every_k", "first_k", "memory", "plan", "speed", "sqrt", "uniform"]
