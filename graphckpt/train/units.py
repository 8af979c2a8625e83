"""Resolves ``train.activation_checkpoint`` to the blocks of a model and their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from graphckpt.blocks.apply import policies_from_file
from graphckpt.blocks.config import BlockConfig, fields_of
from graphckpt.blocks.select import marked_layers, select
from graphckpt.errors import ConfigError, bullets, did_you_mean, without_repeats
from graphckpt.train.settings import ActivationCheckpointConfig

_WHERE = "train.activation_checkpoint"


def block_policies(model: nn.Module, config: ActivationCheckpointConfig) -> dict[str, dict[str, Any]]:
    """Returns the fields to set on each block, by its name in ``model``.

    ``rule``, the store and ``compile`` apply to every unit; the fields in ``blocks`` override them, pattern by
    pattern. A saved plan replaces both.

    Raises:
        ConfigError: A name matches no block, a value is invalid, no unit can be found, or the plan cannot be read.
    """
    if not config.enabled or config.memory_budget is not None:
        return {}
    settings: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    blocks = config.blocks or {} if config.plan is None else _blocks_of_plan(config.plan)
    try:
        fields: dict[str, Any] = {} if config.rule is None else {"activation_checkpointing": config.rule}
        fields |= config.beside_rule
        if fields and config.plan is None:
            settings = {name: dict(fields) for name in unit_names(model, config)}
    except ConfigError as error:
        faults.append(str(error))
    for pattern, value in blocks.items():
        try:
            for name, _ in select(model, pattern):
                settings[name] = {**settings.get(name, {}), **fields_of(value)}
        except ConfigError as error:
            faults.append(f"{_WHERE}.{'blocks' if config.plan is None else 'plan'}: {error}")
    faults += _invalid_fields(settings)
    if faults := without_repeats(faults):
        raise ConfigError(bullets(f"{_WHERE} is invalid", faults) if len(faults) > 1 else faults[0])
    return settings


def _blocks_of_plan(path: str) -> Mapping[Any, Any]:
    try:
        return policies_from_file(path)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.plan: {error}") from None


def head_policies(model: nn.Module, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the candidate rules of the block that computes the loss, by its name in ``model``.

    Raises:
        ConfigError: there is no such block.
    """
    known = [name for name, _ in model.named_modules()]
    for name in head or ():
        if name not in known:
            hint = did_you_mean(name, [name for name, _ in model.named_children()])
            fix = "task.loss_head=True gives a causal language model the block 'loss_head'"
            raise ConfigError(f"{_WHERE}.head: there is no block {name!r}{hint} · fix: {fix}")
    return dict(head or {})


def layer_names(model: nn.Module, config: ActivationCheckpointConfig) -> list[str]:
    """Returns the names of the units of a model, checkpointed or not; empty if it marks none.

    Raises:
        ConfigError: ``unit`` names no block.
    """
    return marked_layers(model) if config.unit is None else unit_names(model, config)


def _invalid_fields(settings: dict[str, dict[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for name, fields in settings.items():
        try:
            BlockConfig(name).update(fields)
        except ConfigError as error:
            text = str(error).removeprefix(name)
            if text not in seen:  # once per pattern
                seen.add(text)
                yield f"{_WHERE}: {error}"


def unit_names(model: nn.Module, config: ActivationCheckpointConfig) -> list[str]:
    """Returns the names of the units that ``unit`` means, or of those that the model itself marks."""
    if config.unit is None:
        found = marked_layers(model)
        if found or config.blocks is not None:
            return found
        fix = f"name its class or its blocks: {_WHERE}.unit=Block, or {_WHERE}.unit='layers.*'"
        raise ConfigError(f"{_WHERE}: {type(model).__name__} marks no layer as a unit · fix: {fix}")
    patterns = [config.unit] if isinstance(config.unit, str) else config.unit
    try:
        return list(dict.fromkeys(name for pattern in patterns for name, _ in select(model, pattern)))
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.unit: {error}") from None
