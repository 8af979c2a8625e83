"""One line in Lightning's ``Trainer``: ``Trainer(..., callbacks=[GraphckptCallback(unit="model.layers.*")])``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from graphckpt.engine.objects import replaced
from graphckpt.errors import ConfigError
from graphckpt.extras import MissingPackageError
from graphckpt.integrations.policy_callback import PolicyCallback, saved_metrics

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    raise MissingPackageError(error.name or "lightning", "lightning") from None


@final
class GraphckptCallback(PolicyCallback, Callback):
    """Applies policies when ``fit`` starts, reports once what they save, and removes them at its end.

    It acts after the strategy has set the model up, whatever the strategy is: one device, DDP, FSDP.

    Args:
        rule: The rule of every unit: ``True`` or ``"full"``, ``"selective"``, a rule object; ``None`` for no rule.
        unit: Class names, name patterns or classes of the units; ``None`` is all layers.
        blocks: On top of that, by selector, as :func:`graphckpt.apply` takes them; names are the ``LightningModule``'s.
        memory_budget: The peak of a step in bytes, ``"12GiB"``, ``"50%"`` of the device's memory, ``0.6`` of the plain
            step's peak, or ``"max"``: policies are planned for it with the first batch, in place of ``rule`` and
            ``blocks``, and ``fields`` are those of :class:`~graphckpt.planning.PlanOptions`.
        report: ``"table"`` prints the table of :meth:`~graphckpt.Handle.explain` for the first batch with optimizer
            states, ``True`` one line of it, ``False`` nothing; no batch is measured then.
        plot: File for a picture of the live bytes over the same batch, ``.png``, ``.svg`` or ``.html``.
        **fields: Further fields for every unit: ``offload``, ``contiguous``, ``partition``, ``min_elements``.

    Raises:
        ConfigError: A field does not exist, or a value is invalid for it.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the policies; with a memory budget, the first batch does."""
        del trainer
        self._is_planned = not self._plans
        if self._is_planned:
            self._apply(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measures two batches op by op: Lightning may call ``training_step`` without the module's hooks."""
        if not self._is_planned:
            lines = self._plan(pl_module, _step_fn(trainer, pl_module, batch, batch_idx))
            self._is_planned = True
            if trainer.is_global_zero:
                trainer.print("\n".join(lines))
        if self._report or self._plot is not None:
            self._measure(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports once what a batch saved."""
        del pl_module, outputs, batch, batch_idx
        self._show(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports what the first batch saved, if there was no second."""
        del pl_module
        self._show(trainer, is_last=True)

    def _show(self, trainer: Trainer, *, is_last: bool = False) -> None:
        seen = self._explain_once(is_last=is_last) if self._report or self._plot is not None else None
        if seen is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(saved_metrics(seen), step=trainer.global_step)
        if trainer.is_global_zero and self._report:
            trainer.print(self._text(seen))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the policies."""
        del trainer, pl_module
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the policies: ``on_fit_end`` will not be called."""
        del trainer, pl_module, exception
        self._remove()


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


def _step_fn(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Callable[[], None]:
    """Returns a training step on a batch, whose metrics are not logged."""
    if not module.automatic_optimization:
        fix = "graphckpt.plan and GraphckptCallback(None, blocks=plan.blocks)"
        raise ConfigError(f"GraphckptCallback.memory_budget: expected automatic optimization · fix: {fix}")

    def step() -> None:
        with (
            replaced([module], "log", _log_nothing),
            replaced([module], "log_dict", _log_nothing),
            trainer.precision_plugin.train_step_context(),
        ):
            output = module.training_step(batch, batch_idx)
        loss = output["loss"] if isinstance(output, Mapping) else output
        loss.backward()
        for optimizer in trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step
