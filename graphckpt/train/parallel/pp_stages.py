"""Splits a causal language model of Transformers into pipeline stages.

A stage keeps the whole module tree, so that names, masks and positions are those of one process. Modules of other
stages pass their input through, and their weights are on the meta device.

    stage 0    wte  wpe  drop  h.0  h.1   .    .    .     .        ids -> hidden
    stage 1     .    .    .     .    .   h.2  h.3  ln_f  lm_head   hidden -> loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graphckpt.errors import ConfigError
from graphckpt.integrations.pipelining import stages_of

Stages: TypeAlias = tuple[tuple[str, ...], ...]
"""For each stage, the names of its own modules, in order."""
Read: TypeAlias = Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]]
"""Returns a task's losses or sums of a batch, on the last stage."""

_GPT2 = ("wte", "wpe", "drop", "h", "ln_f")  # of other models, `base_model_pp_plan` of the config says it
_WHERE = "train.dist.pipeline_parallel_size"
_FIX = f"fix: {_WHERE}=1"


def split_layers(
    model: nn.Module, fields: Mapping[str, Mapping[str, Any]], *, num_stages: int, layer_stages: list[int] | None = None
) -> Stages:
    """Returns the modules of each stage: embeddings in the first, the head in the last, layers as requested.

    Args:
        model: full, or split already.
        fields: the fields of its blocks, by name; only ``stage_id`` is used.
        num_stages: how many.
        layer_stages: the stage of each layer; ``None`` uses ``fields``, or stages of equal size.

    Raises:
        ConfigError: no pipeline plan is known for the model, or the stages do not match the ranks.
    """
    before, layers, after = _parts(model)
    said = {name: values.get("stage_id") for name, values in fields.items()}
    staged = {name: {"stage_id": stage} for name, stage in said.items() if stage is not None}
    if layer_stages is not None:
        if len(layer_stages) != len(layers):
            what = f"{len(layer_stages)} stages, and the model has {len(layers)} layers"
            raise ConfigError(f"train.dist.custom_pipeline_stage_id: {what} · fix: name one for each")
        staged = {name: {"stage_id": stage} for name, stage in zip(layers, layer_stages, strict=True)}
    if not staged:
        if len(layers) < num_stages:
            what = f"{_WHERE}: {num_stages}, and the model has {len(layers)} layers"
            raise ConfigError(f"{what} · fix: use {len(layers)} or less")
        staged = {name: {"stage_id": n * num_stages // len(layers)} for n, name in enumerate(layers)}
    numbers = stages_of(layers, staged, num_stages=num_stages)
    own = [[name for name, number in zip(layers, numbers, strict=True) if number == n] for n in range(num_stages)]
    own[0] = [*before, *own[0]]
    own[-1] = [*own[-1], *after]
    return tuple(map(tuple, own))


def _parts(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of the modules before the layers, of the layers, and of those after them."""
    config: Any = getattr(model, "config", None)
    is_gpt2 = getattr(config, "model_type", None) == "gpt2" and not getattr(config, "add_cross_attention", False)
    order = _GPT2 if is_gpt2 else tuple(getattr(config, "base_model_pp_plan", None) or ())
    base: Any = getattr(model, "base_model", model)
    lists = [name for name in order if isinstance(getattr(base, name, None), nn.ModuleList)]
    if not isinstance(model, PreTrainedModel) or base is model or len(lists) != 1:
        what = f"{_WHERE}: no pipeline plan is known for {type(model).__name__}"
        fix = "use GPT-2 or a model of Transformers whose config has a base_model_pp_plan, such as Llama"
        raise ConfigError(f"{what} · fix: {fix}, or {_WHERE}=1")
    prefix, at = model.base_model_prefix, order.index(lists[0])
    layers = [f"{prefix}.{lists[0]}.{number}" for number, _ in getattr(base, lists[0]).named_children()]
    heads = [name for name, child in model.named_children() if child is not base]
    before, after = ([f"{prefix}.{name}" for name in names] for names in (order[:at], order[at + 1 :]))
    return before, layers, [*after, *heads]


def tied_weights(model: nn.Module, stages: Stages) -> list[str]:
    """Returns the names of the weights tied between the first and the last stage, such as GPT-2's embedding and head.

    Raises:
        ConfigError: other stages share weights, or a module with weights runs on all stages.
    """
    owners: dict[int, set[int]] = {id(weight): set() for weight in model.parameters()}
    for number, names in enumerate(stages):
        for name in names:
            for weight in model.get_submodule(name).parameters():
                owners[id(weight)].add(number)
    shared = []
    for name, weight in model.named_parameters():
        used_by = owners[id(weight)]
        if not weight.requires_grad:
            continue
        if used_by == {0, len(stages) - 1}:
            shared.append(name)
        elif len(used_by) != 1:
            who = "all stages" if not used_by else f"stages {', '.join(map(str, sorted(used_by)))}"
            raise ConfigError(f"model: {name} is used by {who}: expected one stage for each weight · {_FIX}")
    return shared


def keep_stage(model: nn.Module, stages: Stages, stage: int, device: torch.device) -> None:
    """Moves this stage's modules to a device and all others to the meta device; in place."""
    away = set(_elsewhere(model, stages, stage))
    inside = {module for other in away for module in other.modules()}
    own = [module for module in model.modules() if module not in inside]
    held = {id(t) for module in own for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # what was there too: while it lives, nothing else has its id

    def placed(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            there = tensor.detach().to(device if id(tensor) in held else "meta")
            is_weight = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = tensor, nn.Parameter(there, tensor.requires_grad) if is_weight else there
        return moved[id(tensor)][1]

    for module in model.modules():
        held_by: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for tensors in held_by:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = placed(tensor)
    for other in away:
        _pass_through(other)


def check_split(model: PreTrainedModel, stages: Stages, read: Read) -> None:
    """Compares the whole model with its stages, run in sequence, on two tokens.

    Args:
        model: full, and on the CPU, where CUDA's attention kernels do not run.
        stages: of it.
        read: returns the losses of a batch.

    Raises:
        ConfigError: the losses differ: the model passes more than hidden states between its layers.
    """
    ids = torch.arange(2, device=next(model.parameters()).device).view(1, 2)
    config: Any = model.config
    was_training, kernel = model.training, config._attn_implementation
    model.eval()
    config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            whole = read(model, {"input_ids": ids, "labels": ids})
            x = ids
            for stage in range(len(stages)):
                run = StageRun(model, read, is_first=stage == 0, is_last=stage == len(stages) - 1)
                with _passing_through(model, stages, stage):
                    x = run(x, labels=ids)
    finally:
        model.train(was_training)
        config._attn_implementation = kernel
    if not torch.allclose(x, _stacked(whole), rtol=1e-5):  # the same ops, so rounding is the same too
        what = f"model: the stages of {type(model).__name__}, run in sequence, differ from the whole model"
        raise ConfigError(f"{what}; more than hidden states passes between its layers · {_FIX}")


@final
class StageRun(nn.Module):
    """Runs one stage on a micro-batch: from ids or hidden states to hidden states or the task's losses.

    Args:
        model: of which this process has the stage.
        read: the output of the last stage, stacked in the order of ``names``.
        is_first: takes ids as input.
        is_last: calls ``read``.
        dtype: of autocast; ``None`` for none.
    """

    def __init__(
        self, model: nn.Module, read: Read, *, is_first: bool, is_last: bool, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.names: list[str] = []
        """Names of the last stage's outputs."""
        self._read = read
        self._input = "input_ids" if is_first else "inputs_embeds"
        self._is_last = is_last
        self._dtype = dtype

    def forward(self, x: Tensor, labels: Tensor, **batch: Tensor) -> Tensor:
        """Runs the stage; ``batch`` holds the other tensors of the micro-batch, which all stages get."""
        given = {**batch, self._input: x}
        with torch.autocast(x.device.type, self._dtype, enabled=self._dtype is not None):
            if not self._is_last:
                base: Any = self.model.base_model
                hidden: Tensor = base(**given, use_cache=False)[0]
                return hidden.to(hidden_dtype(self.model))
            found = self._read(self.model, {**given, "labels": labels})
        self.names = list(found)
        return _stacked(found)


def hidden_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of hidden states: that of the embeddings."""
    known: Any = model
    dtype: torch.dtype = known.get_input_embeddings().weight.dtype
    return dtype


def _stacked(found: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.float() for value in found.values()])


@contextmanager
def _passing_through(model: nn.Module, stages: Stages, stage: int) -> Iterator[None]:
    away = _elsewhere(model, stages, stage)
    for module in away:
        _pass_through(module)
    try:
        yield
    finally:
        for module in away:
            del module.forward


def _pass_through(module: nn.Module) -> None:
    module.forward = _nothing if isinstance(module, nn.Embedding) else _same


def _same(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    del args, kwargs
    return x


def _nothing(ids: Tensor) -> Tensor:
    """Returns zero: the first stage has added the positions."""
    return torch.zeros((), device=ids.device)


def _elsewhere(model: nn.Module, stages: Stages, stage: int) -> list[nn.Module]:
    return [model.get_submodule(name) for n, names in enumerate(stages) if n != stage for name in names]
