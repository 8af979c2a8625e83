"""Tensor-parallel plans: which layers are sharded, and how; the model's own, or the built-in one of GPT-2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from graphckpt.errors import ConfigError, bullets
from graphckpt.train.parallel.tp_dropout import DropoutStream
from graphckpt.train.parallel.tp_styles import (
    ColwiseParallel,
    ReplicatedWithGradAllReduce,
    RowwiseParallel,
    Style,
    VocabParallel,
    fits,
)

_STYLES: Mapping[str, Style | None] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(gather=True),
    "colwise_rep": ColwiseParallel(gather=True),
    "packed_colwise": ColwiseParallel(parts=2),
    "qkv": ColwiseParallel(parts=3),  # ours: queries, keys and values in one layer, one after the other
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(split=True),
    "rowwise_rep": RowwiseParallel(split=True),
    "embedding_rowwise": VocabParallel(),
    "replicated_with_grad_allreduce": ReplicatedWithGradAllReduce(),
    "replicate": None,
}
"""The styles by the names that Transformers uses in its plans, and one of ours."""

_GPT2: Mapping[str, str] = {
    "wte": "embedding_rowwise",
    "h.*.attn.c_attn": "qkv",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_HEADS = ("num_attention_heads", "num_key_value_heads")
_FIX = "give the model an attribute tp_plan such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards a model over a mesh, in place, after broadcasting rank 0's weights.

    The weights of sharded layers become DTensors, all others stay plain. Call it before the optimizer is created. The
    plan is Transformers' own ``tp_plan``, or an attribute of this name on any module; GPT-2's is built in.

    Args:
        model: on its device, with the same shapes on every process.
        mesh: one-dimensional.

    Raises:
        ConfigError: no plan is known for the model, or a size is not divisible by the number of processes.
    """
    plan = tensor_parallel_plan(model)
    faults = list(_indivisible(model, plan, mesh.size()))
    if faults:
        head = f"model: {type(model).__name__} cannot be sharded over {mesh.size()} processes"
        raise ConfigError(bullets(head, faults) if len(faults) > 1 else f"{head}: {faults[0]}")
    root = dist.get_global_rank(mesh.get_group(), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, root, group=mesh.get_group())
    ties = _ties(model)
    parallelize_module(model, mesh, dict(plan))
    for names in ties:
        for name in names[1:]:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, model.get_parameter(names[0]))
    for name, module in model.named_modules():
        if f"{name}.c_attn" in plan and hasattr(module, "split_size"):
            module.split_size //= mesh.size()  # GPT-2's attention takes what c_attn returns apart by it
    for colwise, rowwise in _regions(plan):
        stream = DropoutStream(mesh.get_local_rank())
        model.get_submodule(colwise).register_forward_hook(stream.begin)
        model.get_submodule(rowwise).register_forward_pre_hook(stream.end)
    return model


def tensor_parallel_plan(model: nn.Module) -> dict[str, Style]:
    """Returns the style of each sharded layer, by name, in the order of the model.

    Raises:
        ConfigError: no plan is known, or a layer does not support its style.
    """
    words = _words(model)
    if not words:
        fix = f"{_FIX}, or train.dist.tensor_parallel_size=1"
        raise ConfigError(f"model: no tensor-parallel plan is known for {type(model).__name__} · fix: {fix}")
    plan: dict[str, Style] = {}
    faults: dict[str, None] = {}
    whole = "fix: train.dist.tensor_parallel_size=1"
    for name, module in model.named_modules():
        pattern = next((pattern for pattern in words if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        style = _STYLES.get(words[pattern])
        if words[pattern] not in _STYLES or (
            style is not None and not fits(style, module) and not isinstance(style, VocabParallel)
        ):
            faults[f"{pattern}: {words[pattern]!r} of a {type(module).__name__} is not supported · {whole}"] = None
        elif style is not None and fits(style, module):  # an embedding that does more than look up stays whole
            plan[name] = style
    for pattern in set(words) - {p for p in words for name, _ in model.named_modules() if fnmatchcase(name, p)}:
        if isinstance(_STYLES.get(words[pattern]), ColwiseParallel | RowwiseParallel) and pattern != "lm_head":
            faults[f"{pattern}: there is no such layer · {whole}"] = None
    if faults:
        raise ConfigError(bullets(f"model: {type(model).__name__} cannot be sharded over processes", faults))
    return _with_whole_ties(model, plan)


def _words(model: nn.Module) -> dict[str, str]:
    own: Any = getattr(model, "tp_plan", None)
    if own:
        return dict(own)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "gpt2" or getattr(config, "add_cross_attention", False):
        return {}
    base = "" if hasattr(model, "h") else f"{model.base_model_prefix}."
    head = {"lm_head": "colwise_gather_output"} if hasattr(model, "lm_head") else {}
    return {**{f"{base}{pattern}": word for pattern, word in _GPT2.items()}, **head}


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _with_whole_ties(model: nn.Module, plan: dict[str, Style]) -> dict[str, Style]:
    """Leaves out a layer whose weight is tied to one that is not sharded."""
    for names in _ties(model):
        layers = [name.rpartition(".")[0] for name in names]
        if not all(layer in plan for layer in layers):
            plan = {name: style for name, style in plan.items() if name not in layers}
    return plan


def _indivisible(model: nn.Module, plan: Mapping[str, Style], size: int) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    if any(isinstance(style, ColwiseParallel) and not style.gather for style in plan.values()):
        for field in _HEADS:
            count = getattr(config, field, None)
            if isinstance(count, int) and count % size:
                yield f"{field} is {count} · fix: use {_next(count, size)}"
    seen: set[str] = set()
    for name, style in plan.items():
        module = model.get_submodule(name)
        count = style.size(module)
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if count % size and pattern not in seen:
            seen.add(pattern)
            is_vocabulary = isinstance(style, VocabParallel) or count == getattr(config, "vocab_size", None)
            what = f"{pattern}: vocab_size is {count}" if is_vocabulary else f"{pattern}: {count} channels"
            yield f"{what} · fix: use {_next(count, size)}"


def _next(count: int, size: int) -> int:
    return -(-count // size) * size


def _regions(plan: Mapping[str, Style]) -> Iterator[tuple[str, str]]:
    """Yields pairs of layers between which activations are sharded: the last colwise one before a rowwise one."""
    first: str | None = None
    for name, style in plan.items():
        if isinstance(style, ColwiseParallel) and not style.gather:
            first = name
        elif isinstance(style, RowwiseParallel) and not style.split and first is not None:
            if _block(first) == _block(name):
                yield first, name
            first = None


def _block(name: str) -> list[str]:
    """Returns the name of the numbered block that a layer is in, such as ``h.3``, in parts."""
    parts = name.split(".")
    return parts[: max((n + 1 for n, part in enumerate(parts) if part.isdigit()), default=0)]
