"""Chooses policies for a memory budget, and predicts the peak of a step under them."""

from graphckpt.errors import PlanError
from graphckpt.planning.options import PlanOptions, PlanOptionsDict
from graphckpt.planning.plan import Plan

__all__ = ["Plan", "PlanError", "PlanOptions", "PlanOptionsDict"]
