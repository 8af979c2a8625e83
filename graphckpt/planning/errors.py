"""The errors of planning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from graphckpt.errors import GraphckptError


class PlanError(GraphckptError, RuntimeError):
    """A step cannot be planned, or no plan fits."""


@final
class PathError(PlanError):
    """A step calls its blocks in another order each time.

    Args:
        orders: the numbers of the blocks as runs of the step have called them.
    """

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        super().__init__(
            "the step calls its blocks in another order each time · fix: plan with one batch, and with a model that "
            "takes the same path each time, such as one with `layerdrop=0`"
        )
        self.orders = orders


@final
class GroupError(PlanError):
    """Another process has failed, is gone or did not join: the processes cannot plan together any more."""
