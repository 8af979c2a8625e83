"""One line in Lightning's ``Trainer``: ``Trainer(..., callbacks=[GraphckptCallback(unit="model.layers.*")])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from graphckpt.extras import MissingPackageError
from graphckpt.integrations.policy_callback import PolicyCallback, saved_line, saved_metrics

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    raise MissingPackageError(error.name or "lightning", "lightning") from None


if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@final
class GraphckptCallback(PolicyCallback, Callback):
    """Applies policies when ``fit`` starts, reports once what they save, and removes them at its end.

    It acts after the strategy has set the model up, whatever the strategy is: one device, DDP, FSDP.

    Args:
        rule: The rule of every unit: ``True`` or ``"full"``, ``"selective"``, a rule object; ``None`` for no rule.
        unit: Class names, name patterns or classes of the units; ``None`` is all layers.
        blocks: On top of that, by selector, as :func:`graphckpt.apply` takes them; names are the ``LightningModule``'s.
        report: ``False`` neither measures the first batch nor reports it.
        **fields: Further fields for every unit: ``offload``, ``contiguous``, ``partition``, ``min_elements``.

    Raises:
        ConfigError: A field does not exist, or a value is invalid for it.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the policies."""
        del trainer
        self._apply(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measures the first batch op by op: Lightning may call ``training_step`` without the module's hooks."""
        del trainer, pl_module, batch, batch_idx
        if self._report:
            self._measure()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports what the first batch saved."""
        del pl_module, outputs, batch, batch_idx
        seen = self._explain_once() if self._report else None
        if seen is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(saved_metrics(seen), step=trainer.global_step)
        if trainer.is_global_zero:
            trainer.print(saved_line(seen))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the policies."""
        del trainer, pl_module
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the policies: ``on_fit_end`` will not be called."""
        del trainer, pl_module, exception
        self._remove()
