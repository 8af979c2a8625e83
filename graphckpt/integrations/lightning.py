"""One line in Lightning's ``Trainer``: ``Trainer(..., callbacks=[GraphckptCallback(select="model.layers.*")])``."""

from __future__ import annotations

from functools import partial
from typing import Any, final

from graphckpt.extras import MissingPackageError
from graphckpt.integrations.policy_callback import PolicyCallback

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise MissingPackageError(error.name or "lightning", "lightning") from None


@final
class GraphckptCallback(PolicyCallback, Callback):
    """Applies policies when ``fit`` starts, reports once what they save, and removes them at its end.

    It acts after the strategy has set the model up, whatever the strategy is: one device, DDP, FSDP.

    Args:
        rule: The rule of every selected block: ``True`` or ``"full"``, ``"selective"``, a rule object; ``None`` for
            no rule.
        select: Class names, name patterns or classes of the blocks; ``None`` is all layers.
        policies: On top of that, by selector, as :func:`graphckpt.apply` takes them; names are those of the
            ``LightningModule``.
        memory_budget: The peak of a step in bytes, ``"12GiB"``, ``"50%"`` of the device's memory, ``0.6`` of the plain
            step's peak, or ``"max"``: policies are planned for it in the first updates, in place of ``rule`` and
            ``policies``, and ``fields`` are those of :class:`~graphckpt.planning.PlanOptions`.
        report: ``"table"`` prints the table of :meth:`~graphckpt.Handle.explain` for the first batch with optimizer
            states, and that of a plan; ``True`` one line for each, ``False`` nothing, and measures no batch.
        plot: File for a picture of the live bytes over the same batch, ``.png``, ``.svg`` or ``.html``.
        **fields: Further fields for every selected block: ``offload``, ``contiguous``, ``partition``, ``min_elements``,
            ``determinism_check``.

    Raises:
        ConfigError: A field does not exist, or a value is invalid for it.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the policies; with a memory budget, those that take least until some were measured."""
        self._num_updates = 0
        self._begin(pl_module, trainer.print)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measures two batches op by op: Lightning may call ``training_step`` without the module's hooks."""
        del pl_module, batch, batch_idx
        self._begin_step(trainer.global_step, measures=bool(self._report) or self._plot is not None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports once what a batch saved."""
        del pl_module, outputs, batch, batch_idx
        # `global_step` counts optimizer steps, and a batch whose gradients are only accumulated leaves it as it is.
        is_update, self._num_updates = trainer.global_step != self._num_updates, trainer.global_step
        self._end_step(partial(_log, trainer), is_update=is_update)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports what the first batch saved, if there was no second, and removes the policies."""
        del pl_module
        self._end(partial(_log, trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the policies: ``on_fit_end`` will not be called."""
        del trainer, pl_module, exception
        self._remove()


def _log(trainer: Trainer, metrics: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
