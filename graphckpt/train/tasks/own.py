"""Trains on the losses that the model itself returns. The metrics are their means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from graphckpt.errors import ConfigError
from graphckpt.graph.step import is_new
from graphckpt.train.tasks.base import Task, summed

_FIX = "return the loss, a dict such as {'lm_loss': ...}, or an object with .loss"


@final
class OwnLoss(Task):
    """For a model whose ``forward(**sample)`` returns a loss, a dict of values, or an object with ``loss``.

    In a dict, as in libai, the values with ``loss`` in their names are learned from and all are reported.
    """

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what the model returned, each value as its mean.

        Raises:
            ConfigError: the model returned no loss.
        """
        output = model(**batch)
        if isinstance(output, Tensor):
            output = {"loss": output}
        elif isinstance(getattr(output, "loss", None), Tensor):
            output = {"loss": output.loss}
        if not isinstance(output, Mapping) or not any("loss" in name for name in output):
            got = f"the names {', '.join(map(repr, output))}" if isinstance(output, Mapping) else type(output).__name__
            raise ConfigError(f"model: {type(model).__name__}.forward returned {got}, and no loss · fix: {_FIX}")
        return {name: _mean(value) for name, value in output.items() if isinstance(value, Tensor)}

    def tally(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns each of the model's values, weighted by samples, and ``loss``, the sum of the losses."""
        values = self.losses(model, batch)
        count = len(next(iter(batch.values())))
        total = sum((value for name, value in values.items() if "loss" in name), start=next(iter(values.values())) * 0)
        others = {name: value for name, value in values.items() if name != "loss"}
        return {name: summed(value.detach(), count) for name, value in {"loss": total, **others}.items()}


def _mean(value: Tensor) -> Tensor:
    """Returns the mean, of counts and masks too; a scalar that the model has just computed is returned as it is."""
    # What is not new may be a parameter or a buffer, such as a temperature: hooks read it after the update has changed
    # it in place, so it is copied, by `mean`.
    if not value.dim() and is_new(value):
        return value
    return value.mean() if value.is_floating_point() or value.is_complex() else value.float().mean()
