"""The arithmetic and the bytes of ops, beside loops over what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt.simulation.cuda_kernels import AttentionCall
from graphckpt.simulation.op_costs import flops_of, moved_bytes, rate_name
from graphckpt.simulation.profile import load_profile

ROWS, WIDTH, PICKED = 1024, 64, 16


class Costs(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[float] = []
        self.num_bytes: list[int] = []
        self.rates: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_bytes.append(moved_bytes(func, args, kwargs or {}, result) or 0)
        if flops := flops_of(func, args, kwargs or {}, result):
            self.flops.append(flops)
            self.rates.append(rate_name(func, args))
        return result


@contextmanager
def costs() -> Iterator[Costs]:
    with Costs() as counted:
        yield counted


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, 0), (2, 1, 1), (1, 2, 2), (3, 2, 1)])
def test_a_convolution_multiplies_each_weight_once_for_each_position(
    transposed: bool, groups: int, stride: int, dilation: int, padding: int
) -> None:
    batch, channels, out_channels, taps, length = 2, 4, 8, 3, 11
    x = meta(batch, channels, length, grad=True)
    shape = (channels, out_channels // groups, taps) if transposed else (out_channels, channels // groups, taps)
    weight = meta(*shape, grad=True)
    call: Any = F.conv_transpose1d if transposed else F.conv1d
    with costs() as counted:
        out = call(x, weight, stride=stride, dilation=dilation, padding=padding, groups=groups)
        out.sum().backward()
    forward = 0
    for _sample in range(batch):
        for _channel in range(channels if transposed else out_channels):
            for _position in range(length if transposed else out.shape[-1]):
                forward += 2 * taps * (out_channels if transposed else channels) // groups
    assert counted.flops == [forward, 2 * forward]


def test_a_weight_without_a_gradient_needs_half_of_the_backward() -> None:
    x, weight = meta(2, 8, 9, 9, grad=True), meta(8, 1, 3, 3)
    with costs() as counted:
        F.conv2d(x, weight, groups=8).sum().backward()
    assert counted.flops == [2 * 2 * 8 * 49 * 9] * 2


@pytest.mark.parametrize(("groups", "rate"), [(1, "float16"), (4, "float16"), (16, "float32"), (64, "float32")])
def test_groups_of_few_channels_do_not_run_on_matrix_units(groups: int, rate: str) -> None:
    x, weight = (
        meta(2, 64, 8, 8, dtype=torch.float16, grad=True),
        meta(64, 64 // groups, 3, 3, dtype=torch.float16, grad=True),
    )
    with costs() as counted:
        F.conv2d(x, weight, groups=groups).sum().backward()
    assert counted.rates == [rate, rate]


@pytest.mark.parametrize(("kv_heads", "causal"), [(8, False), (8, True), (2, True), (1, False)])
def test_attention_with_grouped_heads_multiplies_for_each_head_of_the_query(kv_heads: int, causal: bool) -> None:
    query, key = (
        meta(2, 8, 32, 16, dtype=torch.bfloat16, grad=True),
        meta(2, kv_heads, 48, 16, dtype=torch.bfloat16, grad=True),
    )
    with costs() as counted:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key, 0.0, causal)[0].sum().backward()
    products = 2 * 8 * 32 * 48 * 16 * 2 / (2 if causal else 1)
    assert counted.flops == [2 * products, 5 * products]


@pytest.mark.parametrize(("length", "window"), [(None, None), (8, None), (None, 8), (None, 64), (16, 8), (48, 48)])
def test_attention_in_rows_counts_the_pairs_of_its_samples_and_windows(length: int | None, window: int | None) -> None:
    tokens, heads, width = 48, 8, 16
    query, key = (
        meta(2, heads, tokens, width, dtype=torch.bfloat16, grad=True),
        meta(2, 2, tokens, width, dtype=torch.bfloat16, grad=True),
    )
    with costs() as counted:
        rows = AttentionCall(query, key, key, is_causal=True).flash_in_rows(length, window)
        rows.backward(torch.empty_like(rows))
    sample = length or tokens
    # A token sees itself half, and whole those before it in its sample that the window reaches.
    pairs = tokens // sample * sum(min(token + 0.5, window or tokens) for token in range(sample))
    partly = 0.5 * (window or 0)  # a row of the window's width is counted as whole, up to half a token
    products = [flops / (2 * 2 * heads * 2 * width) for flops in counted.flops if flops]
    assert products[1] / products[0] == 2.5
    assert products[0] == pytest.approx(pairs, abs=partly * tokens // sample)
    assert rows.shape == (2, tokens, heads, width)


def test_a_product_with_an_operand_that_is_broadcast() -> None:
    one, other = meta(6, 4, 8), meta(1, 8, 5).expand(6, 8, 5)
    with costs() as counted:
        torch.bmm(one, other)
    assert counted.flops == [2 * 6 * 4 * 8 * 5]
    assert counted.num_bytes == [4 * (6 * 4 * 8 + 8 * 5 + 6 * 4 * 5)]


TABLE = [
    # what reads or writes rows of a table that is larger, with the bytes that it moves
    (lambda t, i, r: F.embedding(i, t), 2 * PICKED * WIDTH * 4),
    (lambda t, i, r: t.index_select(0, i), 2 * PICKED * WIDTH * 4),
    (lambda t, i, r: t[i], 2 * PICKED * WIDTH * 4),
    (lambda t, i, r: t.index_add_(0, i, r), 3 * PICKED * WIDTH * 4),
    (lambda t, i, r: t.index_put_((i,), r), 3 * PICKED * WIDTH * 4),
    (lambda t, i, r: t.index_copy_(0, i, r), 3 * PICKED * WIDTH * 4),
    (lambda t, i, r: t.scatter_add_(0, i[:, None].expand(PICKED, WIDTH), r), 3 * PICKED * WIDTH * 4),
    # what writes without reading
    (lambda t, i, r: t.zero_(), ROWS * WIDTH * 4),
    (lambda t, i, r: t.fill_(1), ROWS * WIDTH * 4),
    (lambda t, i, r: t.normal_(), ROWS * WIDTH * 4),
    (lambda t, i, r: t.copy_(t[:1].expand_as(t)), ROWS * WIDTH * 4 + WIDTH * 4),
    # what reads and writes
    (lambda t, i, r: t.add_(1), 2 * ROWS * WIDTH * 4),
    (lambda t, i, r: t.add(1), 2 * ROWS * WIDTH * 4),
    (lambda t, i, r: torch.add(r, r, out=meta(PICKED, WIDTH)), 3 * PICKED * WIDTH * 4),
    (lambda t, i, r: torch._foreach_add_([r, r], 1.0), 4 * PICKED * WIDTH * 4),
]


@pytest.mark.parametrize(("call", "expected"), TABLE)
def test_bytes_are_those_that_an_op_reads_and_writes(call: Callable[..., object], expected: int) -> None:
    table, rows = meta(ROWS, WIDTH), meta(PICKED, WIDTH)
    indices = torch.empty(PICKED, dtype=torch.long, device="meta")
    with costs() as counted:
        call(table, indices, rows)
    assert max(counted.num_bytes) == expected


def test_a_fused_optimizer_reads_four_tensors_and_writes_three() -> None:
    parameter, steps = meta(ROWS, WIDTH), [torch.empty((), device="meta")]
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    tensors = [[torch.empty_like(parameter)] for _ in range(4)]
    with costs() as counted:
        torch.ops.aten._fused_adamw_(*tensors, [], steps, **options)
    assert counted.num_bytes == [pytest.approx(7 * ROWS * WIDTH * 4, abs=8)]


def test_a_depthwise_convolution_is_bound_by_memory() -> None:
    """Published: ConvNeXt trains at 0.35 to 0.42 of the speed that a count of all groups with all others predicts."""
    machine = load_profile("rtx3090")
    x, weight = meta(8, 512, 14, 14, dtype=torch.float16), meta(512, 1, 7, 7, dtype=torch.float16)
    arguments = (x, x, weight, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 512, [True, True, False])
    op = torch.ops.aten.convolution_backward.default
    seconds = machine.op_seconds(op, arguments, {}, op(*arguments)) - machine.launch_seconds
    num_bytes = 2 * (3 * x.numel() + 2 * weight.numel())
    assert seconds < 3 * num_bytes / machine.memory_bandwidth


def test_each_kernel_of_attention_may_have_a_rate_of_its_own() -> None:
    """Published: FlashAttention-2 reaches 35 % of an H100, and cuDNN's kernel more."""
    machine = load_profile("h100")
    query, result = (meta(1, 8, 4096, 128, dtype=torch.bfloat16) for _ in range(2))
    aten: Any = torch.ops.aten

    def rate(op: Any, *arguments: Any) -> float:
        args = (query, query, query, *arguments)
        flops = flops_of(op, args, {}, None)
        return flops / (machine.op_seconds(op, args, {}, result) - machine.launch_seconds) / machine.flops["bfloat16"]

    assert rate(aten._scaled_dot_product_flash_attention.default, 0.0, False) == pytest.approx(0.35)
    cudnn = aten._scaled_dot_product_cudnn_attention.default
    assert rate(cudnn, None, True, 0.0, False) == pytest.approx(machine.efficiency["attention"])
