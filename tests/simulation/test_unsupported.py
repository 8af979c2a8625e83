"""What trainers use today, on an absent GPU: simulated, or one error that says what, where, and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphckpt
from graphckpt.errors import ConfigError

WIDTH = 64
Made = tuple[nn.Module, Callable[[], object]]


@torch.library.custom_op("graphckpt_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("graphckpt_tests::with_fake", mutates_args=())
def with_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


with_fake.register_fake(torch.empty_like)
with_fake.register_autograd(lambda ctx, grad: grad)


class ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk, as Liger's and Unsloth's losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x_grad, weight_grad, total = torch.empty_like(x), torch.zeros_like(weight), torch.zeros((), device=x.device)
        for start in range(0, len(x), 8):
            rows, head = x[start : start + 8].detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(rows @ head.t(), targets[start : start + 8], reduction="sum")
            x_grad[start : start + 8], grad = torch.autograd.grad(loss, (rows, head))
            weight_grad += grad
            total = total + loss.detach()
        ctx.save_for_backward(x_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad * grad, None


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        one, float8 = torch.ones((), device=x.device), torch.float8_e4m3fn
        return torch._scaled_mm(x.to(float8), weight.to(float8).t(), one, one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]).to("cuda", dtype)


def step_of(loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> Made:
    model, x = layers(dtype), torch.zeros(64, WIDTH, device="cuda", dtype=dtype)

    def step() -> None:
        loss_of(model, x).backward()
        model.zero_grad()

    return model, step


def heads(h: torch.Tensor) -> torch.Tensor:
    return h.view(1, 64, 4, 16).transpose(1, 2)


def flex(h: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    return flex_attention(heads(h), heads(h), heads(h)).sum()


def compiled_flex(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

    h = heads(model(x))
    return torch.compile(flex_attention, backend="eager")(h, h, h).sum()


def varlen(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    h, ends = model(x).view(64, 4, 16), torch.tensor([0, 32, 64], device="cuda", dtype=torch.int32)
    return varlen_attn(h, h, h, ends, ends, 32, 32).sum()


def packed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([0, 10, 64], device="cuda")
    numbers = torch.bucketize(torch.arange(64, device="cuda"), ends, right=True)
    mask = (numbers[:, None] == numbers[None]) & torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()
    h = heads(model(x))
    return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).sum()


def split_by_values(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, last = torch.tensor([10, 64], device="cuda").tolist()
    return model(x[first:last]).sum()


def read_pointer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out.data_ptr()
    return out.sum()


def on_a_stream(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.Stream()):
        x.to("cpu", non_blocking=True)
    return model(x).sum()


def offloaded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return model(x).sum()


def jagged(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.nested_tensor([x[:3], x[:5]], layout=torch.jagged, device="cuda")
    return model(rows).values().sum()


def with_statistics(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.cuda.empty_cache()
    loss = model(x).sum()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == 0
    return loss


def chunked() -> Made:
    model = nn.ModuleList([layers(), nn.Linear(WIDTH, 100, bias=False).to("cuda")])
    x, targets = torch.zeros(64, WIDTH, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")

    def step() -> None:
        ChunkedLoss.apply(model[0](x), model[1].weight, targets).backward()
        model.zero_grad()

    return model, step


def scaled_by(build_scaler: Callable[[], torch.amp.GradScaler], **options: Any) -> Callable[[], Made]:
    """Returns what makes a step under float16 autocast, whose gradients are scaled and clipped."""

    def make() -> Made:
        model, x = layers(), torch.zeros(64, WIDTH, device="cuda")
        optimizer, scaler = torch.optim.AdamW(model.parameters(), **options), build_scaler()

        def step() -> None:
            with torch.autocast("cuda", torch.float16):
                loss = model(x).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return model, step

    return make


def compiled_model() -> Made:
    model, x = torch.compile(layers(), backend="eager"), torch.zeros(64, WIDTH, device="cuda")
    return model, lambda: model(x).sum().backward()


def compiled_in_place() -> Made:
    model, x = layers(), torch.zeros(64, WIDTH, device="cuda")
    model.compile(backend="eager")
    return model, lambda: model(x).sum().backward()


def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # of the machine without CUDA
    DISABLED = torch.amp.GradScaler("cuda")
COMPILED_BEFORE = torch.compile(half, backend="eager")

TABLE: dict[str, tuple[Callable[[], Made], str | None]] = {
    # what trainers use, and the text of the error; None where it is simulated
    "compiled model": (compiled_model, "compiled function.*force_eager"),
    "model.compile()": (compiled_in_place, "compiled function.*force_eager"),
    "compiled loss": (
        lambda: step_of(lambda m, x: torch.compile(half, backend="eager")(m(x)).sum()),
        "compiled function.*force_eager",
    ),
    "compiled before": (lambda: step_of(lambda m, x: COMPILED_BEFORE(m(x)).sum()), "compiled function.*force_eager"),
    "flex attention": (lambda: step_of(lambda m, x: flex(m(x))), "flex_attention.*scaled_dot_product_attention"),
    "compiled flex attention": (lambda: step_of(compiled_flex), "compiled function.*force_eager"),
    "varlen attention": (lambda: step_of(varlen, torch.bfloat16), None),
    "float8": (lambda: step_of(lambda m, x: Float8Product.apply(m(x), m[0][0].weight).sum(), torch.bfloat16), None),
    "custom op": (
        lambda: step_of(lambda m, x: without_fake(m(x)).sum()),
        "without a fake implementation.*register_fake",
    ),
    "custom op with a fake": (lambda: step_of(lambda m, x: with_fake(m(x)).sum()), None),
    "kernel of its own": (lambda: step_of(read_pointer), "reads the memory of a tensor.*register_fake"),
    "chunked loss": (chunked, None),
    "activation offloading": (lambda: step_of(offloaded), None),
    "activation offloading on a stream": (lambda: step_of(on_a_stream), "torch.cuda for a stream.*offload='cpu'"),
    "sequence packing by a mask": (lambda: step_of(packed), None),
    "sequence packing by values": (lambda: step_of(split_by_values), "reads the value of a tensor.*plan on the device"),
    "nested tensors": (lambda: step_of(jagged), "nested tensors.*pad them"),
    "statistics of memory": (lambda: step_of(with_statistics), None),
    "gradient scaler": (scaled_by(partial(torch.amp.GradScaler, "cuda")), None),
    "gradient scaler built before": (scaled_by(lambda: DISABLED), r"gradient scaler.*GradScaler\('cpu'\)"),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:.*non-leaf Tensor is being accessed", "ignore:Using a non-full backward hook")
def test_what_trainers_use_is_simulated_or_refused_with_a_way_out(name: str) -> None:
    make, error = TABLE[name]
    if error is None:
        assert graphckpt.plan(make, device="h100", memory_budget="max", candidates=["full"]).predicted_peak_bytes > 0
        return
    with pytest.raises(ConfigError, match=rf"the step \(\w+\.py, line \d+\).*{error}") as raised:
        graphckpt.plan(make, device="h100", memory_budget="max", candidates=["full"])
    assert " · fix: " in str(raised.value)


def test_a_compiled_function_is_simulated_as_it_runs_without() -> None:
    torch.compiler.set_stance("force_eager")
    try:
        make, _ = TABLE["compiled before"]
        compiled = graphckpt.plan(make, device="h100", memory_budget="max", candidates=["full"])
    finally:
        torch.compiler.set_stance("default")
    plain = graphckpt.plan(
        lambda: step_of(lambda m, x: m(x).sum()), device="h100", memory_budget="max", candidates=["full"]
    )
    assert compiled.predicted_peak_bytes == pytest.approx(plain.predicted_peak_bytes, rel=0.01)


def test_after_a_plan_functions_compile_as_before() -> None:
    graphckpt.plan(lambda: step_of(lambda m, x: m(x).sum()), device="h100", memory_budget="max", candidates=["full"])
    assert torch.equal(torch.compile(half, backend="eager")(torch.ones(2)), torch.full((2,), 0.5))


class Parts(nn.Module):
    """A DenseNet's two convolutions: no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(11, 8, 3, padding=1)
        self.activation, self.head = nn.ReLU(), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.one(x))
        return self.head(self.activation(self.other(torch.cat([x, y], 1))).mean((2, 3)))


def test_a_prediction_needs_no_list_of_layers() -> None:
    def make() -> Made:
        model, x = Parts().to("cuda"), torch.zeros(8, 3, 32, 32, device="cuda")
        return model, lambda: model(x).sum().backward()

    plan = graphckpt.plan(make, device="h100", memory_budget="1GiB")
    assert [row.block for row in plan.rows] == ["one", "other", "head"]
    assert not plan.policies
