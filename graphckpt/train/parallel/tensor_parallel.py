"""Tensor parallelism: shards the layers that a plan of Transformers names, or the built-in plan of GPT-2.

Weights become DTensors; what flows between layers stays plain tensors, so that blocks, policies and Transformers'
code see what they see in one process, with fewer heads and a narrower MLP. The styles of
``torch.distributed.tensor.parallel`` support neither GPT-2's ``Conv1D`` nor layers that hold several matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.functional import embedding, linear
from transformers.pytorch_utils import Conv1D

from graphckpt._compat import is_fake, packed_shard
from graphckpt.errors import ConfigError, bullets
from graphckpt.thread_state import RNGState, get_rng_state, rng_devices, set_rng_state

# Legend: B samples, T tokens, I inputs of a layer, O its outputs, N processes

# Note [GPT-2 over two processes]
# Of width 768, with 12 heads and 8192 words:
#
#     layer        style      weight         of a process   its output on a process
#     wte          vocab      [8192, 768]    [4096, 768]    [B, T, 768], summed
#     attn.c_attn  qkv        [768, 2304]    [768, 1152]    [B, T, 1152]: queries, keys and values of 6 heads
#     attn.c_proj  rowwise    [768, 768]     [384, 768]     [B, T, 768], summed
#     mlp.c_fc     colwise    [768, 3072]    [768, 1536]    [B, T, 1536]
#     mlp.c_proj   rowwise    [3072, 768]    [1536, 768]    [B, T, 768], summed
#     lm_head      colwise    [8192, 768]    [4096, 768]    [B, T, 8192], gathered
#
# All else has its full weights on both, and runs on equal activations. Both wte and lm_head are sharded along dim 0, so
# they can stay one parameter.


@final
class ColwiseParallel(ParallelStyle):
    """Each process computes ``O / N`` of a layer's outputs, from all of its inputs."""

    def __init__(self, *, parts: int = 1, gather: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.gather = gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in (("weight", 1 if isinstance(module, Conv1D) else 0), ("bias", 0)):
            _shard(module, name, device_mesh, packed_shard(dim, self.parts) if self.parts > 1 else Shard(dim))

        def forward(module: Any, x: Tensor) -> Tensor:
            output = _affine(module, _sum_gradient(x, device_mesh), module.bias)
            if not self.gather:
                return output
            # A copy: FSDP2 warns of a view, since an in-place op on it drops the hook that gathers weights for backward
            # (pytorch#181832).
            return _redistribute(output, device_mesh, Shard(-1), Replicate()).clone()

        module.forward = MethodType(forward, module)
        return module


@final
class RowwiseParallel(ParallelStyle):
    """Each process computes partial outputs from ``I / N`` of a layer's inputs; they are all-reduced."""

    def __init__(self, *, split: bool = False) -> None:
        super().__init__()
        self.split = split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, "weight", device_mesh, Shard(0 if isinstance(module, Conv1D) else 1))

        def forward(module: Any, x: Tensor) -> Tensor:
            local_x = _redistribute(x, device_mesh, Replicate(), Shard(-1)) if self.split else x
            output = _redistribute(_affine(module, local_x, None), device_mesh, Partial(), Replicate())
            return output if module.bias is None else output + module.bias

        module.forward = MethodType(forward, module)
        return module


@final
class VocabParallel(ParallelStyle):
    """Each process holds ``1 / N`` of the rows of an embedding; PyTorch's style has the gradient of all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, "weight", device_mesh, Shard(0))

        def forward(module: Any, ids: Tensor) -> Tensor:
            weight = module.weight.to_local()
            start = device_mesh.get_local_rank() * len(weight)
            # Ids of other ranks' rows look up row 0, and their output is set to 0: so the sum over ranks is the one
            # row, and row 0 gets no gradient from them.
            rows = ids - start
            is_elsewhere = (rows < 0) | (rows >= len(weight))
            pad = -1 if module.padding_idx is None else module.padding_idx - start
            output = embedding(rows.masked_fill(is_elsewhere, 0), weight, pad if 0 <= pad < len(weight) else None)
            return _redistribute(output.masked_fill(is_elsewhere.unsqueeze(-1), 0), device_mesh, Partial(), Replicate())

        module.forward = MethodType(forward, module)
        return module


@final
class ReplicatedWithGradAllReduce(ParallelStyle):
    """The layer is replicated and runs on local activations; gradients of its weights are all-reduced."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for layer in module.modules():
            if any(parameter is not None and parameter.requires_grad for parameter in layer._parameters.values()):
                self._apply_to_layer(layer, device_mesh)
        return module

    def _apply_to_layer(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        run: Any = type(layer).forward

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = module._parameters
            # The layer sees weights whose gradient is summed over the ranks. A hook on the weights would not do: FSDP2
            # puts other parameters in their place, before and after each forward.
            module._parameters = {
                name: weight if weight is None or not weight.requires_grad else _sum_gradient(weight, mesh)
                for name, weight in parameters.items()
            }
            try:
                return run(module, *args, **kwargs)
            finally:
                module._parameters = parameters

        layer.forward = MethodType(forward, layer)


def _features(module: nn.Module) -> tuple[int, int]:
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def _shard(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = getattr(module, name, None)
    if parameter is not None:
        # Without communication (`src_data_rank=None`): `shard_model` has broadcast the full weights.
        shard = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def _affine(module: Any, x: Tensor, bias: DTensor | None) -> Tensor:
    """Returns ``x @ weight + bias`` of the local shards, computed as by the layer itself: [B, T, I] -> [B, T, O]."""
    weight, offset = module.weight.to_local(), None if bias is None else bias.to_local()
    if not isinstance(module, Conv1D):
        return linear(x, weight, offset)
    flat = x.reshape(-1, x.shape[-1])
    output = flat @ weight if offset is None else torch.addmm(offset, flat, weight)
    return output.view(*x.shape[:-1], -1)


# The operators f and g of Megatron-LM (arXiv:1909.08053, section 3): `_sum_gradient` is f, which does nothing in
# forward and all-reduces in backward; `_redistribute` from Partial to Replicate is g, the reverse. A colwise layer
# begins with f, a rowwise one ends with g. Between them nothing is communicated.


def _redistribute(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    output: Tensor = DTensor.from_local(x, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()
    return output


def _sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    output: Tensor = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return output


_STYLES: Mapping[str, ParallelStyle | None] = {
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
_ONE_PROCESS = "train.dist.tensor_parallel_size=1"


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards a model over a mesh, in place, after broadcasting rank 0's weights.

    The weights of sharded layers become DTensors, all others stay plain. Call it before the optimizer is created. The
    plan is Transformers' ``tp_plan``, or an attribute of this name on any module; GPT-2's is built in.
    """
    plan = divisible_plan(model, mesh.size())
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, group_src=0, group=mesh.get_group())
    # Before sharding: `parallelize_module` shards each layer separately, so that tied names would get two parameters.
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
        stream = _DropoutStream(mesh.get_local_rank())
        model.get_submodule(colwise).register_forward_hook(stream.begin)
        model.get_submodule(rowwise).register_forward_pre_hook(stream.end)
    return model


def divisible_plan(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Returns the plan of a model for so many processes, by which its heads, channels and vocabulary are divisible."""
    plan = tensor_parallel_plan(model)
    faults = list(_indivisible(model, plan, size))
    if faults:
        head = f"model: {type(model).__name__} cannot be sharded over {size} processes"
        raise ConfigError(bullets(head, faults) if len(faults) > 1 else f"{head}: {faults[0]}")
    return plan


def sharded_weights(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> Iterator[nn.Parameter]:
    """Yields the parameters of a model that :func:`shard_model` divides among the processes."""
    for name, style in plan.items():
        module = model.get_submodule(name)
        if not isinstance(style, ReplicatedWithGradAllReduce):
            has_bias = isinstance(style, ColwiseParallel)
            yield from (w for key, w in module.named_parameters(recurse=False) if key == "weight" or has_bias)


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    styles = _styles_by_pattern(model)
    if not styles:
        fix = "give the model an attribute tp_plan such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        what = f"model: no tensor-parallel plan is known for {type(model).__name__}"
        raise ConfigError(f"{what} · fix: {fix}, or {_ONE_PROCESS}")
    plan: dict[str, ParallelStyle] = {}
    faults: dict[str, None] = {}
    unused = set(styles)
    for name, module in model.named_modules():
        pattern = next((pattern for pattern in styles if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        unused -= {pattern for pattern in styles if fnmatchcase(name, pattern)}
        style = _STYLES.get(styles[pattern])
        if style is not None and _supports(style, module):
            plan[name] = style
        # Between these two alone activations are shards; an embedding that is replicated instead has the same output.
        elif styles[pattern] not in _STYLES or isinstance(style, ColwiseParallel | RowwiseParallel):
            what = f"{pattern}: {styles[pattern]!r} of a {type(module).__name__} is not supported"
            faults[f"{what} · fix: {_ONE_PROCESS}"] = None
    # Transformers' plan is that of the class: a subclass that has another head than `lm_head` inherits its entry.
    for pattern in unused:
        if isinstance(_STYLES.get(styles[pattern]), ColwiseParallel | RowwiseParallel) and pattern != "lm_head":
            faults[f"{pattern}: matches no layer · fix: {_ONE_PROCESS}"] = None
    if faults:
        raise ConfigError(bullets(f"model: {type(model).__name__} cannot be sharded over processes", faults))
    for names in _ties(model):  # a layer whose weight is tied to one that is not sharded is replicated as well
        layers = [name.rpartition(".")[0] for name in names]
        if not all(layer in plan for layer in layers):
            plan = {name: style for name, style in plan.items() if name not in layers}
    return plan


def _styles_by_pattern(model: nn.Module) -> dict[str, str]:
    tp_plan: Any = getattr(model, "tp_plan", None)
    if tp_plan:
        return dict(tp_plan)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "gpt2" or getattr(config, "add_cross_attention", False):
        return {}
    base = "" if hasattr(model, "h") else f"{model.base_model_prefix}."
    head = {"lm_head": "colwise_gather_output"} if hasattr(model, "lm_head") else {}
    return {**{f"{base}{pattern}": style for pattern, style in _GPT2.items()}, **head}


def _supports(style: ParallelStyle, module: nn.Module) -> bool:
    run: Any = type(module).forward
    if isinstance(style, VocabParallel):  # an embedding that does more than look up is replicated
        if not isinstance(module, nn.Embedding) or run is not nn.Embedding.forward:
            return False
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return isinstance(style, ReplicatedWithGradAllReduce) or run in {nn.Linear.forward, Conv1D.forward}


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _indivisible(model: nn.Module, plan: Mapping[str, ParallelStyle], size: int) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    if any(isinstance(style, ColwiseParallel) and not style.gather for style in plan.values()):
        for field in _HEADS:
            count = getattr(config, field, None)
            if isinstance(count, int) and count % size:
                yield f"{field} is {count} · fix: use {_next_multiple(count, size)}"
    patterns: set[str] = set()
    for name, style in plan.items():
        module: Any = model.get_submodule(name)
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if isinstance(style, ColwiseParallel):
            count = _features(module)[0] // style.parts
        else:
            count = _features(module)[1] if isinstance(style, RowwiseParallel) else getattr(module, "num_embeddings", 0)
        if count % size and pattern not in patterns:
            patterns.add(pattern)
            is_vocabulary = isinstance(module, nn.Embedding) or count == getattr(config, "vocab_size", None)
            what = f"{pattern}: vocab_size is {count}" if is_vocabulary else f"{pattern}: {count} channels"
            yield f"{what} · fix: use {_next_multiple(count, size)}"


def _next_multiple(count: int, size: int) -> int:
    return -(-count // size) * size


def _regions(plan: Mapping[str, ParallelStyle]) -> Iterator[tuple[str, str]]:
    """Yields pairs of layers between which activations are sharded: the last colwise one before a rowwise one."""
    first: str | None = None
    for name, style in plan.items():
        if isinstance(style, ColwiseParallel) and not style.gather:
            first = name
        elif isinstance(style, RowwiseParallel) and not style.split and first is not None:
            if _numbered_block(first) == _numbered_block(name):
                yield first, name
            first = None


def _numbered_block(name: str) -> list[str]:
    """Returns the name of the numbered block that a layer is in, such as ``h.3``, in parts."""
    parts = name.split(".")
    return parts[: max((n + 1 for n, part in enumerate(parts) if part.isdigit()), default=0)]


@final
class _DropoutStream:
    """The random stream of one process between a column-parallel and a row-parallel layer.

    There each process has other heads, and equal masks would drop the same places in different heads. Elsewhere
    activations are replicated and all processes draw the same numbers. The seed is drawn from the common stream, so
    that a recomputation, which starts from the RNG state of the original forward, draws the same masks. If nothing was
    drawn, the common stream is put back: without dropout between these layers a model draws the numbers of one process.
    DTensor's RNG tracker supports CUDA only, and only activations that are DTensors.

    ``begin`` and ``end`` are hooks, which run outside of ``forward``: a policy on one of the two layers does not run
    them a second time.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._states: tuple[RNGState, RNGState, RNGState] | None = None

    def begin(self, module: nn.Module, args: Any, output: Tensor) -> None:
        del args
        self._states = None
        if not module.training or is_fake(output):  # a simulated rank draws no numbers
            return
        # `before` and `after` are the common stream without and with the draw of the seed. The third state is where
        # this rank's stream begins; `end` sees by it whether anything was drawn.
        devices = rng_devices([output])
        before = get_rng_state(devices)
        seed = int(torch.randint(2**62, (), device="cpu")) + self._rank
        after = get_rng_state(devices)
        states = [torch.Generator(device).manual_seed(seed).get_state() for device in (torch.device("cpu"), *devices)]
        set_rng_state((states[0], tuple(zip(devices, states[1:], strict=True)), None))
        self._states = before, after, get_rng_state(devices)

    def end(self, module: nn.Module, args: Any) -> None:
        del module, args
        if self._states is not None:
            (before, after, start), self._states = self._states, None
            now = get_rng_state(tuple(device for device, _ in start[1]))
            is_unused = all(map(torch.equal, _generator_states(now), _generator_states(start)))
            set_rng_state(before if is_unused else after)


def _generator_states(state: RNGState) -> list[Tensor]:
    return [state[0], *(tensor for _, tensor in state[1])]
