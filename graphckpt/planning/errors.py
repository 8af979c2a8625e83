"""The errors of planning."""

from __future__ import annotations

from typing import final

from graphckpt.errors import GraphckptError


class PlanError(GraphckptError, RuntimeError):
    """A step cannot be planned, or no plan fits."""


@final
class GroupError(PlanError):
    """Another process has failed, is gone or did not join: the processes cannot plan together any more."""
