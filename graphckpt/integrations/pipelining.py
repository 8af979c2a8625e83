"""Pipeline stages from the blocks of an ``nn.Sequential``, with the policies set on them.

For your own loop, with a schedule of ``torch.distributed.pipelining``; the trainer makes its stages itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from graphckpt.blocks.apply import Handle, apply
from graphckpt.blocks.config import BlockConfig, fields_of
from graphckpt.blocks.proxy import Block, unwrap
from graphckpt.blocks.select import Selector, select
from graphckpt.errors import ConfigError, bullets

_STAGE = "stage_id"
Policies = Mapping[Selector, Any]


@final
@dataclass(frozen=True, slots=True)
class PipelinePart:
    """This rank's stage of a chain."""

    module: nn.Sequential
    """Its blocks, under their names in the chain; pass their parameters to the optimizer."""
    stage: PipelineStage
    """The stage for a schedule, such as ``Schedule1F1B(part.stage, num_micro_batches, loss_fn)``."""
    handle: Handle
    """The handle of the policies: ``explain()`` reports what they save, ``remove()`` removes them."""


def pipeline_part(
    model: Any, policies: Policies | None = None, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> PipelinePart:
    """Returns this rank's stage of a chain of blocks, with its policies applied.

    A block without a stage is in that of the previous block. Blocks of other stages are not referenced, so their memory
    is free once ``model`` is.

    Args:
        model: an ``nn.Sequential`` with the same weights on every rank, or a Graph's block of one, on whose blocks
            ``config.set_stage(i)`` and policies were set.
        policies: as ``graphckpt.apply`` takes them, with ``stage_id`` among the fields; for a plain module.
        device: where this rank runs; its blocks are moved there.
        group: the ranks of the pipeline, one for each stage; ``None`` for all.

    Raises:
        ConfigError: the stages are not one for each rank, in their order, or one is set on a module outside the chain.
    """
    chain = unwrap(model)
    if not isinstance(chain, nn.Sequential):
        fix = "put its blocks into an nn.Sequential, each with one tensor in and one out"
        raise ConfigError(f"pipeline: expected an nn.Sequential, got {type(chain).__name__} · fix: {fix}")
    group = group or dist.group.WORLD
    if group is None:
        raise ConfigError(
            "pipeline: expected a process group, got none · fix: torch.distributed.init_process_group(), by torchrun"
        )
    fields: dict[str, dict[str, Any]] = {}
    if isinstance(model, Block):
        names = {module: name for name, module in chain.named_modules()}
        blocks = [block for block in model.modules() if block.config.fields()]
        fields = {names[block.origin]: block.config.fields() for block in blocks}
    for selector, value in (policies or {}).items():
        for name, _ in select(chain, selector):
            config = BlockConfig(name)
            config.update(fields_of(value))
            fields[name] = {**fields.get(name, {}), **config.fields()}
    stages = stages_of([name for name, _ in chain.named_children()], fields, num_stages=group.size())
    stage_blocks = OrderedDict(
        (name, block)
        for (name, block), stage in zip(chain.named_children(), stages, strict=True)
        if stage == group.rank()
    )
    module = nn.Sequential(stage_blocks).to(device)
    rules: dict[Selector, Any] = {
        name: values for name, values in fields.items() if not name or name.partition(".")[0] in stage_blocks
    }
    stage = PipelineStage(module, group.rank(), group.size(), device, group=group)
    return PipelinePart(module, stage, apply(module, rules))


def stages_of(blocks: Iterable[str], fields: Mapping[str, Mapping[str, Any]], *, num_stages: int) -> list[int]:
    """Returns the stage of each block.

    Args:
        blocks: names, in their order.
        fields: the fields, by name; also of modules within blocks.
        num_stages: the number of stages.

    Raises:
        ConfigError: with every fault.

    >>> stages_of(["a", "b", "c"], {"b": {"stage_id": 1}}, num_stages=2)
    [0, 1, 1]
    """
    blocks = list(blocks)
    stages: list[int] = []
    for name in blocks:
        before = stages[-1] if stages else 0
        value = fields.get(name, {}).get(_STAGE)
        stages.append(before if value is None else value)
    if faults := list(_faults(blocks, stages, fields, num_stages)):
        raise ConfigError(bullets("pipeline: no stages can be made", faults) if len(faults) > 1 else faults[0])
    return stages


def _faults(
    blocks: list[str], stages: list[int], fields: Mapping[str, Mapping[str, Any]], num_stages: int
) -> Iterator[str]:
    for name, values in fields.items():
        if values.get(_STAGE) is not None and name not in blocks:
            what = f"{name or 'the chain'}.stage_id: expected a block of the chain"
            yield f"{what} · fix: set it on a block, such as {', '.join(blocks)}"
    for name, stage, before in zip(blocks, stages, [0, *stages], strict=False):
        if not before <= stage <= before + 1:
            yield f"{name}.stage_id: {stage} after {before} · fix: use {before} or {before + 1}, in the order of blocks"
    if stages and max(stages) + 1 != num_stages:
        what = f"stage_id: expected one stage for each of {num_stages} ranks, got {max(stages) + 1}"
        yield f"{what} · fix: config.set_stage(i) on the first block of each stage, up to {num_stages - 1}"
