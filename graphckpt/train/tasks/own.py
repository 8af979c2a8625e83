"""Trains on the losses that the model itself returns. The metrics are their means."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import final

from torch import Tensor, nn

from graphckpt.blocks.proxy import unwrap
from graphckpt.errors import ConfigError, did_you_mean
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
            ConfigError: the model returned no loss, or does not take the keys of a sample.
        """
        try:
            output = model(**batch)
        except TypeError as error:
            if (fault := _fault_of_keys(model, batch)) is not None:
                raise ConfigError(fault) from error
            raise
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


def _fault_of_keys(model: nn.Module, batch: Mapping[str, Tensor]) -> str | None:
    """Returns what is wrong with the keys of a sample, as arguments of the model; ``None`` if they fit."""
    kind = type(unwrap(model))
    _, *arguments = signature(kind.forward).parameters.values()  # the first is `self`
    names = [one.name for one in arguments if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = [one.name for one in arguments if one.name in names and one.default is one.empty]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in arguments)
    unknown = [] if takes_any else [key for key in batch if key not in names]
    missing = [name for name in required if name not in batch]
    if not unknown and not missing:
        return None
    what = f"expected samples with the keys {', '.join(names)}, as {kind.__name__}.forward takes them"
    data = "data.train, data.heldout"
    hints = "".join(did_you_mean(key, missing or names) for key in unknown)
    return f"{data}: {what}, got {', '.join(batch)}{hints} · fix: rename the keys, or the arguments of forward"


def _mean(value: Tensor) -> Tensor:
    """Returns the mean, of counts and masks too; a scalar that the model has just computed is returned as it is."""
    # What is not new may be a parameter or a buffer, such as a temperature: hooks read it after the update has changed
    # it in place, so it is copied, by `mean`.
    if not value.dim() and is_new(value):
        return value
    return value.mean() if value.is_floating_point() or value.is_complex() else value.float().mean()
