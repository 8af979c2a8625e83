"""Gives torchtitan's models graphckpt's policies, in the place of torchtitan's FullAC and SelectiveAC.

`GraphckptAC.Config(...)` goes where a torchtitan config has `activation_checkpoint=SelectiveAC.Config()`. This file
compares it with torchtitan's own classes on a small model, on the CPU, and prints what each keeps. It needs torchtitan:

pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchdata einops
pip install tyro
python examples/09_torchtitan.py
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes

# Legend: B batch, T tokens, D width, V vocabulary


class GraphckptAC(ActivationCheckpointing):
    """A policy for each layer. torchtitan applies it before `torch.compile` and FSDP2, as its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        policies: dict[str, Any] = field(default_factory=lambda: {"layers.*": True})
        """As `graphckpt.apply` takes them."""

    def apply(self, model: nn.Module) -> None:
        graphckpt.apply(model, self.config.policies, determinism_check=self.config.determinism_check)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x_BTD)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.drop(self.out(attended))
        return x_BTD + self.drop(self.mlp(x_BTD))


class Decoder(nn.Module):
    """A model as torchtitan's are: its layers are in `layers`, by name."""

    def __init__(self, num_layers: int = 4, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleDict({str(number): Layer(width) for number in range(num_layers)})
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.head(x_BTD)


def train(config: ActivationCheckpointing.Config | None) -> tuple[int, list[torch.Tensor]]:
    """Returns the bytes that are alive for backward at the end of a forward, and the gradients."""
    model = Decoder()
    if config is not None:
        config.build().apply(model)
    tokens_BT = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with LiveBytes() as live:
        loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
        num_bytes = live.live_bytes
    loss.backward()
    return num_bytes, [parameter.grad for parameter in model.parameters()]


def main() -> None:
    _, expected = train(None)
    for name, config in {
        "no checkpointing": None,
        "torchtitan, FullAC": FullAC.Config(),
        "torchtitan, SelectiveAC": SelectiveAC.Config(),
        "graphckpt, full": GraphckptAC.Config(),
        "graphckpt, selective": GraphckptAC.Config(policies={"layers.*": "selective"}),
        "graphckpt, full but the last": GraphckptAC.Config(policies={"layers.*": True, "layers.3": False}),
        "graphckpt, offloaded to disk": GraphckptAC.Config(
            policies={"layers.*": {"activation_checkpointing": True, "offload": "disk"}}
        ),
    }.items():
        num_bytes, gradients = train(config)
        is_equal = all(map(torch.equal, gradients, expected))
        print(f"{name:34} {num_bytes / 2**20:6.2f} MiB for backward, gradients bitwise equal: {is_equal}")


if __name__ == "__main__":
    main()
