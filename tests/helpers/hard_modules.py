"""Modules that are hard for recompute, each in a few lines, and the step that the contract is checked on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Legend: B batch, D width
B, D = 6, 16


class Mlp(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.up, self.act, self.down, self.drop = (
            nn.Linear(D, 2 * D),
            nn.GELU(),
            nn.Linear(2 * D, D),
            nn.Dropout(p),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(x))))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.relu = nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.linear(x)))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(D, D, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(0).repeat(3, 1, 1))[0][-1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(0)


class EditsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5)).sin()


class EditsChildsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(D, D), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.first(x))
        h += x
        return F.relu_(h)


class Counts(nn.Module):
    """Its result depends on how often it ran, and on what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.count = 0
        self.last: Tensor | None = None
        self.seen: list[int] = []
        self.register_buffer("average", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        y = self.linear(x) * self.count
        if self.last is not None:
            y = y + self.last.mean()
        self.last = y.detach()
        self.average.lerp_(y.detach().float().mean(0), 0.1)
        return torch.sigmoid(y + self.average)


class Codebook(nn.Module):
    """A buffer that is replaced, not edited."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("code", torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.code
        self.code = self.code * 0.9 + 0.1 * y.detach().mean(0)
        return y.tanh()


class Frozen(nn.Module):
    """Frozen weight with a low-rank update beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + self.b(F.dropout(self.a(x), 0.1)))


class Pair(NamedTuple):
    a: Tensor
    rest: Any


@dataclass
class Record:
    h: Tensor
    more: dict[str, Any] = field(default_factory=dict)


class Containers(nn.Module):
    """Nested arguments and outputs: dict, named tuple, dataclass, None, non-tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, record: Record, *, pairs: list[Pair], scale: float, nothing: None = None) -> dict[str, Any]:
        h = self.linear(record.h) * scale + record.more["bias"]
        for pair in pairs:
            h = h + torch.cos(pair.a)
        return {"h": F.dropout(h, 0.2), "nothing": nothing, "pair": Pair(h.sigmoid(), "text"), "n": 3}


class UsesContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = Containers(), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(Record(x, {"bias": self.bias}), pairs=[Pair(x * 2, None), Pair(x.sin(), 1)], scale=1.5)
        assert (out["nothing"], out["pair"].rest, out["n"]) == (None, "text", 3)
        return out["h"] + out["pair"].a


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Noise(nn.Module):
    """Draws twice: if the first draw is handed back, the second must still find its place in the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return F.dropout(h * torch.rand_like(h), 0.3) + torch.bernoulli(torch.full_like(x, 0.5)) * h


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "batch_norm": BatchNorm,
    "spectral_norm": Spectral,
    "rnn": lambda: Recurrent(nn.RNN),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "edits_its_input": EditsItsInput,
    "edits_childs_output": EditsChildsOutput,
    "counts": Counts,
    "codebook": Codebook,
    "frozen": Frozen,
    "containers": UsesContainers,
    "tied": Tied,
    "noise": Noise,
}
if torch.cuda.is_available():  # cuDNN's are not deterministic, and fused cells have no kernels on the simulated device
    ZOO = {kind: build for kind, build in ZOO.items() if kind not in ("rnn", "lstm", "gru")}


def chain(kind: str, length: int = 3) -> nn.Sequential:
    """Builds a chain of blocks of one kind, between two layers that train; always the same weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, D), *[ZOO[kind]() for _ in range(length)], nn.Linear(D, 4)).train()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns all that a step may change: gradients, buffers, plain attributes."""
    seen: dict[str, Any] = {f"grad {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for name, module in model.named_modules():
        for key in ("count", "last", "seen"):
            if key in module.__dict__:
                seen[f"{key} {name}"] = module.__dict__[key]
    return seen


def run_steps(
    model: nn.Module, *, steps: int = 3, autocast: bool = False, needs_grad: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """Runs some training steps and returns losses, gradients, buffers, attributes and the RNG state after them."""
    torch.manual_seed(5)
    seen: dict[str, Any] = {}
    for number in range(steps):
        x = torch.randn(B, D, device=device, requires_grad=needs_grad)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        seen[f"loss {number}"] = loss.detach()
        seen[f"input grad {number}"] = x.grad
    return seen | state_of(model) | {"RNG state": rng_state(device)}


def rng_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


@functools.cache
def plain_steps(
    kind: str, *, length: int = 3, autocast: bool = False, needs_grad: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """What the steps of a chain without policies return: once a process, as it is the same for all policies."""
    return run_steps(chain(kind, length).to(device), autocast=autocast, needs_grad=needs_grad, device=device)


def differing(ours: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Names what is not the same in every bit."""
    assert ours.keys() == plain.keys()
    return [name for name in plain if not _same(ours[name], plain[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)
