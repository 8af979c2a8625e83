"""The layers of random programmes, each hard for recomputation in its own way: tensors of shape [B, D] in and out.

The scripts that the fuzzer prints have copies of what is defined here: it uses no name from elsewhere but those that
`script.py` imports.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from helpers.modules import as_module
from torch import Tensor, nn

D = 16  # width


class Linear(nn.Linear):
    def __init__(self, frozen: str = "") -> None:
        super().__init__(D, D)
        for name in frozen.split():
            getattr(self, name).requires_grad_(False)


@as_module(
    lambda p=0.2: {"up": nn.Linear(D, 2 * D), "act": nn.GELU(), "down": nn.Linear(2 * D, D), "drop": nn.Dropout(p)}
)
def Mlp(self: Any, x: Tensor) -> Tensor:
    return x + self.drop(self.down(self.act(self.up(x))))


NORMS = {
    "batch": lambda: nn.BatchNorm1d(D),
    "batch, average": lambda: nn.BatchNorm1d(D, momentum=None),
    "batch, read": lambda: nn.BatchNorm1d(D),
    "instance": lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, D),
    "layer": lambda: nn.LayerNorm(D),
    "rms": lambda: nn.RMSNorm(D),
}


@as_module(lambda kind="batch": {"kind": kind, "norm": NORMS[kind]()})
def Norm(self: Any, x: Tensor) -> Tensor:
    """A normalization over [B, D]; those with running statistics move them without a version bump."""
    x = self.norm(x.view(-1, 2, D // 2)).view(-1, D) if self.kind == "instance" else self.norm(x)
    # Not the variance itself: autograd would save it, and the next forward change what it has saved (pytorch#13402).
    return x * (self.norm.running_var * 1.5) if self.kind == "batch, read" else x


class FrozenStatistics(nn.Module):
    """A BatchNorm that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@as_module(lambda name, **options: {"act": getattr(nn, name)(**options)})
def Activation(self: Any, x: Tensor) -> Tensor:
    return self.act(x)


@as_module(lambda name="Dropout", *, inplace=False: {"drop": getattr(nn, name)(0.3, inplace=inplace)})
def Dropout(self: Any, x: Tensor) -> Tensor:
    return self.drop(x)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 0.1 * self.count


class Sum:
    def __init__(self) -> None:
        self.total = torch.zeros((), device="cpu")

    def __call__(self) -> float:
        return self.total.add_(0.1).item()


DRAWS = {
    "python": lambda: lambda: random.gauss(1.0, 0.2),
    "numpy": lambda: lambda: float(np.random.rand()),  # noqa: NPY002
    "own python": lambda: random.Random(7).random,
    "own numpy": lambda: np.random.default_rng(7).random,
    "object": Counter,
    "partial": lambda: partial(Counter.__call__, Counter()),
    "held tensor": Sum,
}


@as_module(lambda source="python": {"linear": nn.Linear(D, D), "draw": DRAWS[source]()})
def HostNoise(self: Any, x: Tensor) -> Tensor:
    """Noise from a generator of Python or NumPy, or a number from an object, in training mode."""
    if not self.training:
        return self.linear(x)
    scale = self.draw()
    return torch.tanh(self.linear(x) * scale) * scale


class Late(nn.Module):
    """Begins in its second call to change a norm, a buffer, an attribute or a list."""

    def __init__(self, place: str = "norm") -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("steps", torch.zeros(()))
        self.place, self.number, self.table = place, 0, []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.number == 0 and self.place != "number":
            self.number = 1
            return x
        if self.place == "norm":
            return self.norm(x)
        if self.place == "buffer":
            self.steps.data.add_(1)
            return x * self.steps.item()
        if self.place == "list":
            self.table.append(1)
            return x * len(self.table)
        self.number += 1
        return x * self.number


class Box:
    """Holds a number, in an attribute or in a slot."""

    __slots__ = ("__dict__", "number")

    def __init__(self) -> None:
        self.number = self.other = 0


def _appends(layer: Any) -> float:
    layer.items.append(1)
    return len(layer.items)


def _nests(layer: Any) -> float:
    layer.table.setdefault("a", []).append(1)
    return len(layer.table["a"])


def _counts(layer: Any) -> float:
    layer.box.other += 1
    return layer.box.other


def _counts_in_a_slot(layer: Any) -> float:
    layer.box.number += 1
    return layer.box.number


def _counts_in_a_child(layer: Any) -> float:
    layer.linear.count = getattr(layer.linear, "count", 0) + 1
    return layer.linear.count


def _adds(layer: Any) -> float:
    layer.total.add_(1)
    return layer.total.item()


def _adds_to_a_view(layer: Any) -> float:
    layer.row.add_(1)
    return layer.rows.sum().item()


def _replaces(layer: Any) -> float:
    layer.average = layer.average + 1
    return layer.average.item()


def _toggles(layer: Any) -> float:
    layer.flag = not layer.flag
    return 1 + layer.flag


def _draws(layer: Any) -> float:
    return torch.rand((), generator=layer.generator, device="cpu").item()


def _draws_in_python(layer: Any) -> float:
    return layer.random.random()


def _draws_in_numpy(layer: Any) -> float:
    return layer.numpy.random()


def _once(act: Any) -> Any:
    def changes(layer: Any) -> float:
        if not layer.items:
            layer.items.append(1)
            act(layer.linear)
        return 1.0

    return changes


def _patches(linear: Any) -> None:
    forward = linear.forward
    linear.forward = lambda x: forward(x) * 0.5


BEGINNINGS = {
    "list": _appends, "dict": _nests, "object": _counts, "slot": _counts_in_a_slot, "child": _counts_in_a_child,
    "tensor": _adds, "view": _adds_to_a_view, "buffer": _replaces, "flag": _toggles, "generator": _draws,
    "own python": _draws_in_python, "own numpy": _draws_in_numpy,
    "hook": _once(lambda linear: linear.register_forward_hook(lambda module, args, output: output * 0.5)),
    "pre-hook": _once(lambda linear: linear.register_forward_pre_hook(lambda module, args: args[0] * 0.5)),
    "patch": _once(_patches),
}  # fmt: skip


class Begins(nn.Module):
    """Begins in one of its calls to change something of itself, which its result depends on."""

    def __init__(self, what: str = "list", first: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.what, self.first, self.calls = what, first, 0
        self.items, self.table, self.box, self.flag = [], {}, Box(), False
        self.total = torch.zeros((), device="cpu")
        self.generator, self.random, self.numpy = (
            torch.Generator().manual_seed(3),
            random.Random(3),
            np.random.default_rng(3),
        )
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(2, 3))

    @property
    def row(self) -> Tensor:
        return self.rows[0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = BEGINNINGS[self.what](self) if self.calls >= self.first else 1.0
        return torch.tanh(self.linear(x) * (0.5 + 0.1 * scale))


class Recurrent(nn.Module):
    def __init__(self, name: str = "GRU", *, keeps_state: bool = False) -> None:
        super().__init__()
        self.rnn = getattr(nn, name)(D, D, num_layers=2, dropout=0.3, batch_first=True)
        self.keeps_state = keeps_state
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.sin()], 1)
        state = self.state
        if state is not None and (state[0] if isinstance(state, tuple) else state).shape[1] != len(x):
            state = None
        y, state = self.rnn(x, state)
        if self.keeps_state:
            self.state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        return y[:, -1]


class Attention(nn.Module):
    def __init__(self, *, weights: bool = False, same: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.2, batch_first=True)
        self.weights = weights
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        key = x if self.same else x * 1.0
        y, weights = self.attention(x, key, key, need_weights=self.weights)
        return y.squeeze(0) if weights is None else y.squeeze(0) * weights.sum()


@as_module(lambda: {"qkv": nn.Linear(D, 3 * D)})
def ScaledDotProduct(self: Any, x: Tensor) -> Tensor:
    q, k, v = (t.view(1, -1, 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
    p = 0.2 if self.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).reshape(-1, D)


@as_module(lambda: {"bilinear": nn.Bilinear(D, D, D)})
def Bilinear(self: Any, x: Tensor) -> Tensor:
    return self.bilinear(x, x.tanh())


PARAMETRIZATIONS = {
    "spectral": nn.utils.parametrizations.spectral_norm,
    "spectral, by hook": nn.utils.spectral_norm,
    "weight": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@as_module(lambda kind="spectral": {"linear": PARAMETRIZATIONS[kind](nn.Linear(D, D))})
def Parametrized(self: Any, x: Tensor) -> Tensor:
    """A weight that is computed anew in every forward; spectral norm also moves two buffers."""
    return torch.tanh(self.linear(x))


@as_module(lambda: {"conv": nn.Conv1d(1, 2, 3, padding=1), "pool": nn.MaxPool1d(2)})
def Convolution(self: Any, x: Tensor) -> Tensor:
    return self.pool(self.conv(x.unsqueeze(1))).flatten(1)


@as_module(lambda: {"table": nn.Embedding(5, D)})
def Lookup(self: Any, x: Tensor) -> Tensor:
    """Embeddings of indices that are computed from ``x``."""
    index = (x.detach().float().sum(-1).abs() * 10).long() % 5
    return x + self.table(index)


INPUT_EDITS = {
    "mul": lambda x: x.mul_(0.5),
    "add": lambda x: x.add_(1),
    "relu": F.relu_,
    "rows": lambda x: x.__setitem__(0, 0.5),
    "view": lambda x: x.view(-1)[1:3].mul_(2),
    "detached": lambda x: x.detach().clamp_(-1, 1),
    "noise": lambda x: x.add_(torch.randn_like(x)),
}


@as_module(lambda how="mul": {"linear": nn.Linear(D, D), "how": how})
def EditsItsInput(self: Any, x: Tensor) -> Tensor:
    INPUT_EDITS[self.how](x)
    return self.linear(x).sin()


@as_module(lambda: {"linear": nn.Linear(D, D), "count": 0})
def EditsItsInputLater(self: Any, x: Tensor) -> Tensor:
    """Edits its argument from the second call on only."""
    self.count += 1
    return self.linear(x.mul_(0.5) if self.count > 1 else x).sin()


OUTPUT_EDITS = {
    "add": lambda h, x: h.add_(x),
    "relu": lambda h, x: F.relu_(h),
    "twice": lambda h, x: h.mul_(2).add_(1),
    "part": lambda h, x: h.chunk(2, 1)[0].mul_(2),
}


@as_module(lambda how="add": {"first": nn.Linear(D, D), "drop": nn.Dropout(0.3), "last": nn.Linear(D, D), "how": how})
def EditsChildsOutput(self: Any, x: Tensor) -> Tensor:
    h = self.drop(self.first(x))
    if self.how == "after":
        y = self.last(h) + h.sum()
        h.detach().add_(0)
        return y
    OUTPUT_EDITS[self.how](h, x)
    return self.last(h)


@as_module()
def TakesViews(self: Any, flat: Tensor, rows: Any, *, part: Any = None) -> Tensor:
    """Reads arguments that share memory."""
    row = rows[0] if isinstance(rows, list) else rows
    first = part["part"] if isinstance(part, dict) else part
    y = flat.view(-1, D).sin() + row.view(-1, D).cos()
    return y if first is None else y * first.sum()


@as_module(lambda how="positional": {"linear": nn.Linear(D, D), "inner": TakesViews(), "how": how})
def SharesMemory(self: Any, x: Tensor) -> Tensor:
    """Calls a child with views of one tensor: positional, in a list, by keyword."""
    flat = self.linear(x).view(-1)
    rows = flat.view(-1, 4)
    if self.how == "list":
        return self.inner(flat, [rows, 3])
    if self.how == "keyword":
        return self.inner(flat, rows, part=flat[2:6])
    if self.how == "nested":
        return self.inner(flat, [rows], part={"part": flat[2:6], "n": 1})
    return self.inner(flat, flat.detach() if self.how == "detached" else rows)


@as_module(lambda: {"inner": TakesBuffer(), "average": nn.Buffer(torch.zeros(D))})
def EditsBuffer(self: Any, x: Tensor) -> Tensor:
    """Hands its own buffer to a child, which edits it."""
    return self.inner(x, self.average)


@as_module()
def TakesBuffer(self: Any, x: Tensor, average: Tensor) -> Tensor:
    average.lerp_(x.detach().float().mean(0), 0.1)
    return torch.sigmoid(x + average)


class Pair(NamedTuple):
    a: Tensor
    rest: Any


@dataclass
class Record:
    h: Tensor
    more: dict[str, Any] = field(default_factory=dict)


@as_module(lambda: {"linear": nn.Linear(D, D), "drop": nn.Dropout(0.2)})
def TakesContainers(
    self: Any, record: Record, *, pairs: list[Pair], scale: float, nothing: None = None
) -> dict[str, Any]:
    """Nested arguments and outputs: dict, named tuple, dataclass, None, non-tensors."""
    h = self.linear(record.h) * scale + record.more["bias"]
    for pair in pairs:
        h = h + torch.cos(pair.a)
    return {"h": self.drop(h), "nothing": nothing, "pair": Pair(h.sigmoid(), "text"), "n": 3}


@as_module(lambda: {"inner": TakesContainers(), "bias": nn.Parameter(torch.zeros(D))})
def UsesContainers(self: Any, x: Tensor) -> Tensor:
    out = self.inner(Record(x, {"bias": self.bias}), pairs=[Pair(x * 2, None), Pair(x.sin(), 1)], scale=1.5)
    assert (out["nothing"], out["pair"].rest, out["n"]) == (None, "text", 3)
    return out["h"] + out["pair"].a


class Counts(nn.Module):
    """Its result depends on how often it ran, and on what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.count = 0
        self.last: Tensor | None = None
        self.seen: list[int] = []
        self.table: dict[str, Any] = {"n": 0}
        self.register_buffer("average", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        self.table["n"] = self.table["n"] + 2
        y = self.linear(x) * (1 + 0.1 * self.count + 0.01 * self.table["n"] + 0.1 * len(self.seen))
        if self.last is not None:
            y = y + self.last.mean()
        self.last = y.detach()
        self.average.lerp_(y.detach().float().mean(0), 0.1)
        return torch.sigmoid(y + self.average)


class Codebook(nn.Module):
    """A buffer that is replaced, not edited."""

    def __init__(self, *, later: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("code", torch.ones(D))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.code
        if self.training:
            self.steps += 1
            if not self.later or self.steps > 1:
                self.code = self.code * 0.9 + 0.1 * y.detach().float().mean(0)
        return y.tanh()


@as_module(lambda: {"average": nn.Buffer(torch.zeros(D)), "count": 0})
def MovesLater(self: Any, x: Tensor) -> Tensor:
    """A buffer that is edited from the second call on only."""
    y = x * (1 + self.average)
    self.count += 1
    if self.count > 1:
        self.average.add_(x.detach().float().mean(0))
    return y.sin()


class LowRank(nn.Module):
    """A frozen weight with a trained update beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b, self.drop = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + self.b(self.a(self.drop(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@as_module(lambda: {"linear": nn.Linear(D, D)})
def Noise(self: Any, x: Tensor) -> Tensor:
    """Draws from the random stream in several ways."""
    h = self.linear(x)
    h = F.dropout(h * torch.rand_like(h), 0.3) + torch.bernoulli(torch.full_like(x, 0.5)) * h
    return h + torch.empty_like(h).uniform_(-0.1, 0.1) * h


class SquashFunction(torch.autograd.Function):
    """Saves an input, an output and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        y = torch.tanh(x * factor)
        noise = torch.rand_like(x)
        ctx.save_for_backward(x, y, noise)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y, noise = ctx.saved_tensors
        return grad * (1 - y * y) * ctx.factor + 0 * x + 0.01 * noise * grad, None


class AddInPlaceFunction(torch.autograd.Function):
    """Edits its argument and says so; keeps a tensor beside ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.sign = x.detach().sign()
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.sign


@as_module(lambda *, inplace=False: {"linear": nn.Linear(D, D), "inplace": inplace})
def OwnFunction(self: Any, x: Tensor) -> Tensor:
    h = self.linear(x)
    return AddInPlaceFunction.apply(h) if self.inplace else SquashFunction.apply(h, 0.7)


@as_module()
def Indexing(self: Any, x: Tensor) -> Tensor:
    """Sorting, indexing, masking, and a branch that depends on values."""
    values, order = x.sort(dim=1)
    y = torch.zeros_like(x).scatter(1, order, values * 2)
    y = torch.where(x > 0, y, x.exp())
    y[:, 0] = x[:, 1]
    y = y.masked_fill(x.abs() > 2, 0.0)
    return y * 2 if x.detach().float().sum() > 0 else y + x.topk(2, dim=1).values.sum(1, keepdim=True)


@as_module(lambda *, edits=False: {"inner": ReturnsViews(), "edits": edits})
def ManyOutputs(self: Any, x: Tensor) -> Tensor:
    """A child that returns views and several tensors, of which some are edited and some are not used."""
    left, (right, whole, _) = self.inner(x)
    if self.edits:
        whole.mul_(0.5)
    return torch.cat([right * 2, left.sin()], 1) + whole


@as_module(lambda: {"linear": nn.Linear(D, D)})
def ReturnsViews(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    return y[:, : D // 2], (y[:, D // 2 :], y, x)


@as_module(lambda: {"linear": nn.Linear(D, D)})
def HooksInside(self: Any, x: Tensor) -> Tensor:
    """A hook on a tensor, put there by forward."""
    h = self.linear(x)
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 0.5)
    return h.tanh()


@as_module(lambda: {"linear": nn.Linear(D, D), "teacher": nn.Linear(D, D)})
def Detaches(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = self.teacher(x)
        target.add_(torch.rand_like(target))
    return self.linear(x.detach()) * target + x


@as_module(lambda: {"linear": nn.Linear(D, D, dtype=torch.float64)})
def ChangesType(self: Any, x: Tensor) -> Tensor:
    """Double precision and complex numbers on the way."""
    y = self.linear(x.double())
    return torch.fft.ifft(torch.fft.fft(y) * 1j).abs().to(x.dtype)
