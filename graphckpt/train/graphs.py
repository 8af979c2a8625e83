"""The two graphs of a run, one that trains and one that evaluates, over the same model."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from graphckpt import Graph
from graphckpt.blocks.select import select
from graphckpt.errors import ConfigError, bullets
from graphckpt.train.settings import ActivationCheckpointConfig, AmpConfig

_WHERE = "train.activation_checkpoint"


@final
class TrainGraph(Graph):
    """One update of the weights: forward, backward, clip, optimizer, learning rate."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        *,
        activation_checkpoint: ActivationCheckpointConfig,
        amp: AmpConfig,
        num_accumulation_steps: int = 1,
    ) -> None:
        super().__init__()
        self.model = _causal(model)
        for name, fields in checkpointed_blocks(model, activation_checkpoint).items():
            block = self._block_of(model.get_submodule(name))
            block.config.update(fields)
        self.add_optimizer(optimizer, lr_sch=scheduler)
        if num_accumulation_steps > 1:
            self.config.set_gradient_accumulation_steps(num_accumulation_steps)
        if amp.enabled:
            self.config.enable_amp(True, dtype=getattr(torch, amp.dtype))

    def _block_of(self, module: nn.Module) -> Any:
        return next(block for block in self.model.modules() if block.origin is module)

    def build(self, **batch: Tensor) -> Tensor:
        """Returns the mean loss of a batch, of which ``backward`` was called."""
        loss: Tensor = self.model(**batch, use_cache=False).loss
        loss.backward()
        return loss


@final
class EvalGraph(Graph):
    """One forward over held-out text; nothing is kept for a backward."""

    def __init__(self, model: nn.Module, *, amp: AmpConfig) -> None:
        super().__init__()
        self.model = _causal(model)
        if amp.enabled:
            self.config.enable_amp(True, dtype=getattr(torch, amp.dtype))

    def build(self, **batch: Tensor) -> Tensor:
        """Returns the mean loss of a batch."""
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss


def _causal(model: nn.Module) -> nn.Module:
    """Names the loss that Transformers takes for a model such as GPT-2 anyway, with a warning."""
    if isinstance(model, PreTrainedModel) and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model


def checkpointed_blocks(model: nn.Module, config: ActivationCheckpointConfig) -> dict[str, dict[str, Any]]:
    """Returns the settings of each block to set, by its name in ``model``.

    Without names the blocks are the model's layers, as Transformers marks them for every architecture.

    Raises:
        ConfigError: a name matches no block, or the model has no layer that Transformers marks.
    """
    if not config.enabled:
        return {}
    if config.blocks is None:
        return {name: {"activation_checkpointing": config.rule} for name in _layers(model)}
    settings: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for pattern, fields in config.blocks.items():
        try:
            for name, _ in select(model, pattern):
                settings[name] = {**settings.get(name, {}), **fields}
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(bullets(f"{_WHERE}.blocks", faults))
    return settings


def _layers(model: nn.Module) -> list[str]:
    layers = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        fix = f'name its blocks: {_WHERE}.blocks={{"layers.*": {{"activation_checkpointing": true}}}}'
        raise ConfigError(f"{_WHERE}: {type(model).__name__} marks no layer as a unit · fix: {fix}")
    return layers
