"""The engine on a CUDA device: its generators, a step in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from helpers.modules import as_module
from torch import nn

import graphckpt
from graphckpt import Graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
]


def wide_chain(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)) for _ in range(8)]
    return nn.Sequential(*(nn.Sequential(*layers) for layers in parts)).cuda()


def test_rng_state_of_every_device_in_use_is_restored() -> None:
    """A block whose tensors come as keywords and in containers, which PyTorch's own checkpoint does not look into."""

    class Drops(nn.Module):
        def forward(self, *, states: dict[str, torch.Tensor]) -> torch.Tensor:
            return nn.functional.dropout(states["h"].sin(), 0.5) * torch.rand((), device="cuda")

    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    grads = []
    for rules in ({}, {"0": True}):
        torch.manual_seed(1)
        model = nn.Sequential(Drops())
        with graphckpt.apply(model, rules):
            (grad,) = torch.autograd.grad(model[0](states={"h": x * 1}).sum(), x)
        grads.append((grad, torch.cuda.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_graph_with_scaler_and_clipping() -> None:
    def losses(flag: bool | None) -> list[float]:
        torch.manual_seed(0)
        model = wide_chain(64)
        optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "clip_grad_max_norm": 1.0}], lr=1e-3)

        class Step(Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                for block in self.model:
                    block.config.activation_checkpointing = flag
                self.add_optimizer(optimizer)
                self.set_grad_scaler(torch.amp.GradScaler("cuda"))
                self.config.enable_amp(True, dtype=torch.float16)

            def build(self, x: torch.Tensor) -> torch.Tensor:
                loss = self.model(x).float().square().mean()
                loss.backward()
                return loss

        step = Step()
        return [step(torch.randn(32, 64, device="cuda")).item() for _ in range(6)]

    plain, ours = losses(None), losses(True)
    assert plain == ours
    assert plain[-1] < plain[0]


def test_recompute_with_dropout_inside_one_cuda_graph() -> None:
    """Rewinding the RNG state is legal under capture: forward and second run draw equal masks in every replay."""
    torch.manual_seed(0)
    model = wide_chain(64)
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    with graphckpt.apply(model, {"[0-7]": True}):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in (x, *model.parameters()):
            tensor.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss = model(x).sum()
            loss.backward()
        loss = loss.detach()  # its graph holds nodes of the parameters that remember the stream of the capture
        seen = []
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert x.grad is not None
            seen.append((loss.clone(), x.grad.clone()))
    assert not torch.equal(seen[0][1], seen[1][1]), "replays must draw new masks"
    # <d loss / d x, x> by a mask that agrees: a finite difference under the same replayed masks cannot be had, so
    # compare with an eager step from the same RNG state
    torch.cuda.manual_seed(7)
    graph.replay()
    captured = (loss.clone(), x.grad.clone())
    torch.cuda.manual_seed(7)
    eager_x = x.detach().clone().requires_grad_()
    eager_loss = model(eager_x).sum()
    eager_loss.backward()
    assert torch.equal(captured[0], eager_loss.detach())
    assert torch.equal(captured[1], eager_x.grad)


class Region(nn.Sequential):
    """Its layers under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x).float()


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def Slope(self, x: torch.Tensor) -> torch.Tensor:
    """Runs backward in its forward, through the layers before it too, and uses its weight before and after that."""
    energy = self.linear(x).tanh().pow(2).sum()
    (slope,) = torch.autograd.grad(energy, self.linear.weight, create_graph=True)
    return x + slope.mean() * self.linear(x)


def test_a_backward_within_a_forward_leaves_its_casts_in_the_cache() -> None:
    """The cache is the process's; backward recomputes in a thread of the device, which is in no region of its own."""
    grads = []
    for policy in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Region(Slope()), nn.Linear(8, 8)).cuda()
        graphckpt.apply(model, {"1": {"activation_checkpointing": policy}})
        x = torch.randn(4, 8).cuda().requires_grad_()
        model(model(x).sin()).sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *grads))
