"""Chooses policies for a memory budget, and foretells the peak of a step under them."""

from graphckpt.plan.measure import PlanError
from graphckpt.plan.plan import Plan
from graphckpt.plan.planner import plan

__all__ = ["Plan", "PlanError", "plan"]
