"""The engine on a CUDA device: same bits with dropout and autocast, less memory by the allocator's own count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.hard_modules import ZOO, chain, differing, plain_steps, run_steps
from torch import nn

import graphckpt
from graphckpt import Graph, Segments, Selective, Tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:.*non-deterministic algorithm"),  # attention's backward says so once a process
]

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[123]": True},
    "selective": {"[123]": Selective("matmul")},
    "random ops kept": {"[123]": Selective(["aten.native_dropout.default"])},
    "results by number": {"[123]": Selective(["aten.addmm.default[0]", "aten.tanh.default[0]", "aten.mul.Tensor[1]"])},
    "segments": {"": Segments("sqrt")},
    "log": {"": Segments("log")},
    "tiles": {"[123]": Tiles(1)},
    "joined": {"1": True, "[23]": "joined"},
    "one block kept": {"": True, "2": False},
    "nested": {"": True, "[123]": Selective("matmul")},
}
DECODERS = [a for a in ARCHITECTURES if a.name in ("gpt2", "bert", "llama", "t5", "qwen2_moe", "vit")]


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    """Bitwise comparisons need kernels without atomics."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [k for k in ZOO if k not in ("rnn", "lstm", "gru")])  # cuDNN's are not deterministic
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_same_bits_as_the_plain_step(policy: str, kind: str, autocast: bool) -> None:
    plain = plain_steps(kind, autocast=autocast, device="cuda")
    model = chain(kind).cuda()
    with graphckpt.apply(model, POLICIES[policy]):
        assert differing(run_steps(model, autocast=autocast, device="cuda"), plain) == []


@pytest.mark.parametrize("architecture", DECODERS, ids=lambda a: a.name)
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_transformers_keep_their_bits(architecture: Architecture) -> None:
    results = []
    for rule in (False, True, "selective"):
        model = architecture.build().cuda()
        inputs = {k: v.cuda() for k, v in architecture.inputs().items()}
        torch.manual_seed(3)
        with graphckpt.apply(model, dict.fromkeys(architecture.layer_modules(model), rule)):
            loss = architecture.loss(model(**inputs))
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for ours in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ours, results[0], strict=True))


def allocated_after_forward(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Bytes that a forward leaves allocated, and the peak of the step, by the allocator's count."""
    model(x).sum().backward()  # a first call learns, and fills cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(x).sum()
    after = torch.cuda.memory_allocated()
    loss.backward()
    return after - before, torch.cuda.max_memory_allocated() - before


def wide_chain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)) for _ in range(8)]
    return nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("rules", [{"[0-7]": True}, {"[0-7]": Selective("matmul")}, {"": Segments("sqrt")}])
def test_the_allocator_confirms_what_explain_says(rules: dict[str, Any]) -> None:
    x = torch.randn(1024, 512, device="cuda")
    plain_kept, plain_peak = allocated_after_forward(wide_chain(), x)
    model = wide_chain()
    with graphckpt.apply(model, rules) as handle:
        kept, peak = allocated_after_forward(model, x)
        with handle.measure():
            model(x).sum().backward()
        explanation = handle.explain(show=False)
    rounding = 512 * 64  # the allocator rounds each block up to 512 bytes
    assert abs((plain_kept - kept) - explanation.bytes_saved) <= rounding
    assert peak < plain_peak
    model.zero_grad()
    torch.cuda.synchronize()


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
        model = wide_chain()
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
        return [step(torch.randn(256, 512, device="cuda")).item() for _ in range(6)]

    plain, ours = losses(None), losses(True)
    assert plain == ours
    assert plain[-1] < plain[0]


def test_recompute_with_dropout_inside_one_cuda_graph() -> None:
    """Rewinding the RNG state is legal under capture: forward and second run draw equal masks in every replay."""
    torch.manual_seed(0)
    model = wide_chain()
    x = torch.randn(256, 512, device="cuda", requires_grad=True)
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


class Slope(nn.Module):
    """Runs backward in its forward, through the layers before it too, and uses its weight before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.linear(x).tanh().pow(2).sum()
        (slope,) = torch.autograd.grad(energy, self.linear.weight, create_graph=True)
        return x + slope.mean() * self.linear(x)


@pytest.mark.parametrize(
    ("make_model", "block"),
    [
        pytest.param(lambda: Region(Region(nn.Linear(8, 8)), Slope()), "", id="the block runs backward"),
        pytest.param(lambda: nn.Sequential(Region(Slope()), nn.Linear(8, 8)), "1", id="a block before it"),
    ],
)
def test_a_backward_within_a_forward_leaves_its_casts_in_the_cache(make_model: Any, block: str) -> None:
    """The cache is the process's; backward recomputes in a thread of the device, which is in no region of its own."""
    grads = []
    for policy in (False, True):
        torch.manual_seed(0)
        model = make_model().cuda()
        graphckpt.apply(model, {block: {"activation_checkpointing": policy}})
        x = torch.randn(4, 8).cuda().requires_grad_()
        model(model(x).sin()).sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *grads))
