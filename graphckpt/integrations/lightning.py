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
    """Puts policies on the module when ``fit`` starts, tells once what they save, and takes them off at its end.

    It acts after the strategy has set the model up, whatever the strategy is: one device, DDP, FSDP.

    Args:
        rule: What every unit keeps: ``True`` or ``"full"``, ``"selective"``, a rule object; ``None`` for no rule.
        unit: Class names, name patterns or classes of the units; ``None`` is all layers.
        blocks: On top of that, by selector, as :func:`graphckpt.apply` takes them; names are the ``LightningModule``'s.
        report: ``False`` neither measures the first batch nor says what it kept.
        **fields: Further fields for every unit: ``offload``, ``contiguous``, ``partition``, ``min_elements``.

    Raises:
        ConfigError: A field does not exist, or a value means nothing for it.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the policies on."""
        del trainer
        self._put_on(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Has the first batch watched op by op: Lightning may call ``training_step`` without the module's hooks."""
        del trainer, pl_module, batch, batch_idx
        if self._report:
            self._measure()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tells what the first batch kept."""
        del pl_module, outputs, batch, batch_idx
        seen = self._look() if self._report else None
        if seen is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(saved_metrics(seen), step=trainer.global_step)
        if trainer.is_global_zero:
            trainer.print(saved_line(seen))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the policies off."""
        del trainer, pl_module
        self._take_off()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Takes the policies off, as there will be no end of the fit."""
        del trainer, pl_module, exception
        self._take_off()
