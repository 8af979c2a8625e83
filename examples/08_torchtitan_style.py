"""Recompute as one step of a list: a function of model and config, between tensor parallelism and FSDP2.

python examples/08_torchtitan_style.py [--mode selective --every 2 --offload cpu], or over processes:
torchrun --nproc-per-node 2 examples/08_torchtitan_style.py
"""

import argparse
import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphckpt

# Legend: B batch, T tokens, D width, V vocabulary


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """What a config file of the training loop would hold."""

    mode: Literal["none", "full", "selective"] = "full"
    """What a layer keeps."""
    every: int = 1
    """Every so manieth layer does; the others keep all."""
    offload: str | None = None
    """Where what is kept goes: ``"cpu"`` or ``"disk"``."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.SiLU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Decoder(nn.Module):
    def __init__(self, *, vocab: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleDict({str(number): Layer(width, heads) for number in range(depth)})
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


def apply_activation_checkpoint(model: nn.Module, config: ActivationCheckpoint) -> graphckpt.Handle | None:
    """Every ``every``-th layer keeps what ``mode`` says."""
    if config.mode == "none":
        return None
    policy = {"activation_checkpointing": config.mode, "offload": config.offload}
    chosen = [name for name in model.layers if int(name) % config.every == 0]
    return graphckpt.apply(model, {f"layers.{name}": policy for name in chosen})


def parallelize(model: nn.Module, config: ActivationCheckpoint) -> graphckpt.Handle | None:
    """Tensor parallelism would come first; then recompute; then FSDP2, whose hooks stay outside of it."""
    handle = apply_activation_checkpoint(model, config)
    if dist.is_initialized():
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
    return handle


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mode", choices=["none", "full", "selective"], default="full")
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--offload", choices=["cpu", "disk"])
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if "RANK" in os.environ:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
is_first = not dist.is_initialized() or dist.get_rank() == 0

torch.manual_seed(0)
model = Decoder(vocab=256, width=64, heads=4, depth=6).to(device)
handle = parallelize(model, ActivationCheckpoint(mode=args.mode, every=args.every, offload=args.offload))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens_BT = torch.randint(0, 256, (4, 65), device=device)

for number in range(args.steps):
    logits_BTV = model(tokens_BT[:, :-1])
    loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        print(f"step {number}  loss {loss.item():.6f}")
if handle is not None and is_first:
    handle.explain()
if dist.is_initialized():
    dist.destroy_process_group()
