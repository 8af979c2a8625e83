"""The step of torchtitan's Llama 3.1 under FSDP2, on one simulated rank: see ``published.py``.

Written from its description: complex rotary embedding, keys and values repeated for the heads, a loss in float32,
selective checkpointing that keeps attention, every second matrix product and what a reduce-scatter returns, AdamW over
lists of tensors, clipping; and tensor parallelism with norms and residuals on shards of the sequence, and the loss on
shards of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Legend: B samples, T tokens, H query heads, K key heads, D width of a head, C channels

SELECTIVE: Mapping[str, Any] = {"rule": "selective", "save": ["aten.mm.default[0,2,4,6]", "attention"]}
"""Every second matrix product of a layer, beginning with the first, and attention, as a rule of this library."""
_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}  # fmt: skip


def contexts() -> Any:
    """Returns the contexts of PyTorch's selective checkpointing that keep the same results."""
    num_products = {True: 0, False: 0}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func is _aten.mm.default:
            num_products[context.is_recompute] += 1
        is_second = func is _aten.mm.default and num_products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if func in _SAVED and not is_second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, channels // heads
        self.wq, self.wo = (nn.Linear(channels, channels, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(channels, key_heads * self.width, bias=False) for _ in range(2))

    def forward(self, x_BTC: Tensor, turns_TD: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = self.wq(x_BTC), self.wk(x_BTC), self.wv(x_BTC)
        q_BTHD = rotated(q.view(B, T, self.heads, self.width), turns_TD)
        k_BTKD = rotated(k.view(B, T, self.key_heads, self.width), turns_TD)
        v_BTKD = v.view(B, T, self.key_heads, self.width)
        k_BTHD, v_BTHD = (repeated(y, self.heads // self.key_heads) for y in (k_BTKD, v_BTKD))
        q, k, v = (y.transpose(1, 2) for y in (q_BTHD, k_BTHD, v_BTHD))
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y_BHTD.transpose(1, 2).contiguous().view(B, T, -1))


def rotated(x: Tensor, turns_TD: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns_TD.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def repeated(x_BTKD: Tensor, times: int) -> Tensor:
    B, T, K, D = x_BTKD.shape
    return x_BTKD[:, :, :, None].expand(B, T, K, times, D).reshape(B, T, K * times, D)


class FeedForward(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(channels, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(channels, heads, key_heads), FeedForward(channels, hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(channels), nn.RMSNorm(channels)

        self.is_checkpointed = False
        """By PyTorch's selective checkpointing."""

    def forward(self, x: Tensor, turns_TD: Tensor) -> Tensor:
        if not self.is_checkpointed:
            return self._run(x, turns_TD)
        how = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False}
        return checkpoint(self._run, x, turns_TD, **how)

    def _run(self, x: Tensor, turns_TD: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns_TD)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(
        self, *, channels: int, hidden: int, num_layers: int, heads: int, key_heads: int, num_words: int, length: int
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(num_words, channels)
        self.layers = nn.ModuleList(Block(channels, heads, key_heads, hidden) for _ in range(num_layers))
        self.norm, self.output = nn.RMSNorm(channels), nn.Linear(channels, num_words, bias=False)
        self.register_buffer("turns_TD", torch.zeros(length, channels // heads // 2, dtype=torch.complex64))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens_BT)
        for layer in self.layers:
            x = layer(x, self.turns_TD)
        return self.output(self.norm(x))


SIZES: dict[str, dict[str, int]] = {
    "8B": {"channels": 4096, "hidden": 14336, "num_layers": 32, "heads": 32, "key_heads": 8},
    "70B": {"channels": 8192, "hidden": 28672, "num_layers": 80, "heads": 64, "key_heads": 8},
}


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Divides the matrices of a ``Llama`` over the ranks of a mesh, and the sequence between them."""
    rows, columns, shards = RowwiseParallel(output_layouts=Shard(1)), ColwiseParallel(), SequenceParallel()
    for layer in model.layers:
        layer.attention.heads //= mesh.size()
        layer.attention.key_heads //= mesh.size()
        plan = {
            "attention_norm": shards,
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), columns),
            "attention.wo": rows,
            "ffn_norm": shards,
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), columns),
            "feed_forward.w2": rows,
        }
        parallelize_module(layer, mesh, plan)
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    logits = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"tok_embeddings": words, "norm": shards, "output": logits})


def titan(
    size: str,
    batch: int,
    length: int = 8192,
    num_words: int = 128256,
    *,
    is_checkpointed: bool = False,
    tensor_parallel: int = 1,
) -> tuple[nn.Module, Callable[[], None]]:
    """Returns the model, sharded over all ranks, and its step; ``is_checkpointed`` by PyTorch's checkpointing."""
    model = Llama(**SIZES[size], num_words=num_words, length=length)
    for layer in model.layers:
        layer.is_checkpointed = is_checkpointed
    shape = dist.get_world_size() // tensor_parallel, tensor_parallel
    meshes = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
    mesh = meshes["data"]
    if tensor_parallel > 1:
        parallelize(model, meshes["tensor"])
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    last = len(model.layers) - 1
    for number, layer in enumerate(model.layers):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=number < last)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens_BT, labels_BT = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        with loss_parallel() if tensor_parallel > 1 else nullcontext():
            logits = model(tokens_BT)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels_BT.flatten(0, 1))
            del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return model, step
