"""Steps that drop graphs, run blocks several times or step the optimizer in backward, and chains of unequal layers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers.layer_stacks import D, ListModel, ResidualLayer
from helpers.plans import stepped_once

ROWS = 128  # of a batch
UpdateStep = tuple[Callable[[], None], Collection[Optimizer]]
"""A step, and its optimizers."""


class Gate(ResidualLayer):
    """Returns a gate too, which only the backward of the gate needs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden), torch.tanh(hidden)


class Views(nn.Module):
    """An encoder, a copy of it, a head that predicts, and layers whose output may be unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online, self.predictor = ListModel(3), nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online)
        self.auxiliary = nn.ModuleList(ResidualLayer() for _ in range(2))
        self.gates = nn.ModuleList(Gate() for _ in range(3))
        self.views = torch.randn(2, ROWS, D, generator=torch.Generator().manual_seed(1))

    def similarity(self, one: Tensor, other: Tensor) -> Tensor:
        return -F.cosine_similarity(self.predictor(one), other).mean()


def simsiam(model: Views) -> Tensor:
    return model.similarity(model.online(model.views[0]), model.online(model.views[1]).detach())


def simsiam_target_first(model: Views) -> Tensor:
    fixed = model.online(model.views[1]).detach()
    return model.similarity(model.online(model.views[0]), fixed)


def simsiam_target_alive(model: Views) -> Tensor:
    fixed = model.online(model.views[1])  # the graph lives until the end of this function
    return model.similarity(model.online(model.views[0]), fixed.detach())


def simsiam_symmetric(model: Views) -> Tensor:
    one, other = map(model.online, model.views)
    return model.similarity(one, other.detach()) + model.similarity(other, one.detach())


def byol(model: Views) -> Tensor:
    one, other = model.views
    first = model.similarity(model.online(one), model.target(other).detach())
    return first + model.similarity(model.online(other), model.target(one).detach())


def byol_no_grad(model: Views) -> Tensor:
    with torch.no_grad():
        fixed = model.target(model.views[1])
    return model.similarity(model.online(model.views[0]), fixed)


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def unused_output(model: Views) -> Tensor:
    y = x = through(model.online.layers, model.online.embed(model.views[0]))
    for layer in model.auxiliary:
        y = layer(y)
    return model.online.head(x).square().mean()


def unused_call(model: Views) -> Tensor:
    used, _ = model.online(model.views[0]), model.online(model.views[1])
    return used.square().mean()


def micro_batches(model: Views) -> Tensor:
    model.online(model.views[0]).square().mean().backward()
    return model.online(model.views[1]).square().mean()


def rebound_output(model: Views) -> Tensor:
    for view in model.views:
        y = model.online(view)
    return y.square().mean()


def detached_in_the_middle(model: Views) -> Tensor:
    first, *rest = model.online.layers
    x = through(rest, first(model.online.embed(model.views[0])).detach())
    return model.online.head(x).square().mean()


def unused_second_output(model: Views) -> Tensor:
    x = model.online.embed(model.views[0])
    for layer in model.gates:
        x, _ = layer(x)  # drops the gate of the layer before
    return model.online.head(x).square().mean()


def gan(model: Views) -> UpdateStep:
    """Discriminates what is generated twice: once detached, once through the generator."""
    generator, discriminator = model.online, nn.Sequential(nn.Linear(8, D), model.auxiliary[0], nn.Linear(D, 1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=False) for m in (generator, discriminator)]

    def step() -> None:
        torch.manual_seed(5)
        real = torch.ones(ROWS, 8)
        fake = generator(model.views[0]).detach()
        (F.softplus(discriminator(fake)) + F.softplus(-discriminator(real))).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        F.softplus(-discriminator(generator(model.views[0]))).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return step, optimizers


def truncated(model: Views) -> UpdateStep:
    """Updates the weights after each of four chunks, and passes a detached state on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        torch.manual_seed(5)
        state = torch.zeros(ROWS, D)
        for _ in range(4):
            x = through(model.online.layers, model.online.embed(model.views[0] + state))
            state = x.detach()
            model.online.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step, [optimizer]


def optimizer_in_backward(
    model: Views, loss: Callable[[Views], Tensor] = lambda model: model.online(model.views[0]).square().mean()
) -> UpdateStep:
    optimizers = {p: torch.optim.AdamW([p], lr=1e-4, foreach=False) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> None:
        torch.manual_seed(5)
        loss(model).backward()

    return step, optimizers.values()


LOSSES = [
    simsiam, simsiam_target_first, simsiam_target_alive, simsiam_symmetric, byol, byol_no_grad, unused_output,
    unused_second_output, unused_call, micro_batches, rebound_output, detached_in_the_middle,
]  # fmt: skip
STEPS: dict[str, Callable[[Views], UpdateStep]] = {
    **{loss.__name__: lambda model, loss=loss: stepped_once(model, loss) for loss in LOSSES},
    "gan": gan,
    "truncated": truncated,
    "optimizer_in_backward": optimizer_in_backward,
    "simsiam_with_optimizer_in_backward": lambda model: optimizer_in_backward(model, simsiam),
}


class OddChain(nn.Module):
    """Layers of several sizes and kinds, some of which save their output, their input, or neither."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        width = 8
        layers = []
        for _ in range(rng.randrange(3, 8)):
            wider = rng.choice((8, 24, 56))
            linear = nn.Linear(width, wider)
            kinds = {
                "relu": [linear, nn.ReLU()],
                "ends": [nn.ReLU(), linear],
                "norm": [nn.LayerNorm(width), linear, nn.Dropout(0.2)],
                "batch": [linear, nn.BatchNorm1d(wider), nn.Sigmoid()],
            }
            layers.append(nn.Sequential(*kinds[rng.choice(sorted(kinds))]))
            width = wider
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
