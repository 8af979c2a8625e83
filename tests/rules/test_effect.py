"""The effect of each rule: fewer bytes alive, by exactly the table's figures; only the rule's ops are recomputed."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.architectures import ARCHITECTURES
from helpers.count_ops import CountOps
from helpers.hard_modules import Mlp, chain
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.peaks import saved_bytes
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import SelectiveCheckpointContext

import graphckpt
from graphckpt import Segments, Selective, Tiles
from graphckpt.errors import ConfigError
from graphckpt.ledger.live_memory import LiveBytes

GPT2 = next(a for a in ARCHITECTURES if a.name == "gpt2")


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"[1-6]": True},
    "full, last kept": {"[1-5]": True},
    "selective matmul": {"[1-6]": Selective("matmul")},
    "selective by name": {"[1-6]": Selective(["aten.gelu.default"])},
    "holes": {"[1-6]": True, "[1-6].down": False},
    "segments 3": {"": Segments(3)},
    "segments log": {"": Segments("log")},
    "tiles": {"[1-6]": Tiles(3)},
    "mixed": {"1": True, "2": Selective("matmul"), "3": Tiles(2), "4": False},
    "nested": {"": True, "[1-6]": Selective("matmul")},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_fall_by_exactly_what_explain_says(policy: str) -> None:
    x = torch.randn(30, 16)
    plain = saved_bytes(chain("mlp", length=6), x)
    model = chain("mlp", length=6)
    with graphckpt.apply(model, POLICIES[policy]) as handle:
        ours = saved_bytes(model, x)
        with handle.measure():
            model(x).sum().backward()
        explanation = handle.explain(show=False)
    assert explanation.bytes_before == plain
    assert explanation.bytes_after == ours
    assert plain - ours == explanation.bytes_saved
    assert sum(row.bytes_after for row in explanation.rows) == ours
    assert ours < plain


@pytest.mark.parametrize("rule", [True, Selective("matmul")])
def test_bytes_fall_on_a_transformer(rule: bool | Selective) -> None:
    inputs = GPT2.inputs() | {"use_cache": False}
    plain = saved_bytes(GPT2.build(), inputs, GPT2.loss)
    model = GPT2.build()
    with graphckpt.apply(model, {GPT2.layers: rule}) as handle:
        ours = saved_bytes(model, inputs, GPT2.loss)
        with handle.measure():
            GPT2.loss(model(**inputs)).backward()
        assert plain - ours == handle.explain(show=False).bytes_saved > 0


def backward_ops(model: nn.Module, x: torch.Tensor) -> Counter[str]:
    """The ops of one backward, those recomputed among them."""
    for _ in range(2):
        loss = model(x).sum()
        with CountOps() as ops:
            loss.backward()
    return ops.counts


def ops_run_again(rules: dict[str, Any], kind: str = "mlp") -> Counter[str]:
    x = torch.randn(6, 16)
    plain = backward_ops(chain(kind), x)
    model = chain(kind)
    with graphckpt.apply(model, rules):
        ours = backward_ops(model, x)
    again = ours - plain
    for harmless in ("aten.detach.default", "aten.view.default", "aten.t.default", "aten.alias.default"):
        del again[harmless]
    return again


def test_full_runs_every_op_again_but_what_nothing_needs() -> None:
    # per block: up, gelu, down, dropout; the final add saves nothing, and so is not recomputed
    again = ops_run_again({"[123]": True})
    assert again["aten.addmm.default"] == 2 * 3
    assert again["aten.gelu.default"] == 3
    assert again["aten.add.Tensor"] == 0
    assert ops_run_again({"[123]": True, "[123].up": True}) == again, "nested full is one segment"


@pytest.mark.parametrize(
    ("last", "runs_to_its_end"),
    [(nn.ReLU(), True), (nn.Linear(4, 4), False), (nn.Unflatten(1, (2, 2)), False)],
    ids=lambda value: type(value).__name__,
)
def test_a_recomputation_is_stopped_where_an_op_is_left_to_skip(last: nn.Module, runs_to_its_end: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), last))
    ended = []
    last.register_forward_hook(lambda *_: ended.append(torch.is_grad_enabled()))
    graphckpt.apply(model, {"1": True})
    for _ in range(3):  # the first recomputation always runs to its end
        ended.clear()
        model(torch.randn(2, 4)).sum().backward()
    assert len(ended) == 1 + runs_to_its_end


def _keeps_wide_products(context: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.addmm.default and context.op_output.shape[1] == 32


@pytest.mark.parametrize(
    ("rules", "num_products", "num_gelus"),
    [
        ({"[123]": Selective("matmul")}, 0, 3),
        ({"[123]": Selective(["aten.gelu.default"])}, 3, 0),  # nothing needs the second product of a block
        ({"[123]": Selective(_keeps_wide_products)}, 3, 3),
        ({"[123]": True, "[123].up": False}, 3, 3),
    ],
    ids=["matmul", "gelu", "policy function", "excluded child"],
)
def test_ops_whose_results_are_saved_are_not_recomputed(
    rules: dict[str, Any], num_products: int, num_gelus: int
) -> None:
    again = ops_run_again(rules)
    assert (again["aten.addmm.default"], again["aten.gelu.default"]) == (num_products, num_gelus)


class Tanh(nn.Module):
    """A layer whose plain forward saves one tensor, its output: one boundary."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("count", [4, 16, 64, 100, 256])
@pytest.mark.parametrize("runs", ["sqrt", "log"])
def test_segments_keep_few_boundaries(runs: str, count: int) -> None:
    model = stack_of(Tanh, count)
    x = torch.randn(10, 10, requires_grad=True)
    with graphckpt.apply(model, {"": Segments(runs)}) as handle:
        model(x).sum().backward()
        with handle.measure():
            model(x).sum().backward()
        explanation = handle.explain(show=False)
        boundaries = explanation.bytes_after / x.untyped_storage().nbytes()
        limit = 2 * math.sqrt(count) if runs == "sqrt" else 2 * math.log2(count) + 2
        assert boundaries <= limit
        assert explanation.peak_bytes is not None
        # alive at the peak: the boundaries, the run being recomputed (kept and in passing), input and gradients
        assert explanation.peak_bytes / x.untyped_storage().nbytes() <= 2 * limit + 6


@pytest.mark.parametrize("runs", [1, 3, "sqrt", "log"])
def test_the_segment_that_is_kept_goes_to_the_store_too(runs: int | str) -> None:
    model = stack_of(Tanh, 6)
    policy = {"activation_checkpointing": Segments(runs), "offload": "disk", "min_elements": 1}
    with graphckpt.apply(model, {"": policy}) as handle:
        model(torch.randn(10, 10, requires_grad=True)).sum().backward()
        with handle.measure():
            model(torch.randn(10, 10, requires_grad=True)).sum().backward()
        assert handle.explain(show=False).bytes_after == 0


def test_log_segments_run_each_layer_at_most_log_times() -> None:
    count = 64
    calls = [0]

    class Counted(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return super().forward(x)

    model = stack_of(Counted, count)
    with graphckpt.apply(model, {"": Segments("log")}):
        model(torch.randn(2, requires_grad=True)).sum().backward()
        calls[0] = 0
        model(torch.randn(2, requires_grad=True)).sum().backward()
    assert count < calls[0] <= count * (1 + math.log2(count) / 2)


@as_module(lambda: {"head": nn.Linear(32, 5000, bias=False)})
def LossHead(self: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(self.head(hidden), labels, reduction="sum")


def test_tiles_cut_the_logits_peak_to_one_slice() -> None:
    hidden, labels = torch.randn(256, 32, requires_grad=True), torch.randint(0, 5000, (256,))
    logits_bytes = 256 * 5000 * 4

    def activation_peak(head: nn.Module) -> tuple[int, torch.Tensor]:
        head(hidden, labels).backward()
        with LiveBytes() as live:
            live.track([*head.parameters(), *(p.grad for p in head.parameters()), hidden, hidden.grad, labels])
            before = live.live_bytes
            loss = head(hidden, labels)
            loss.backward()
        weight_grad = head.head.weight.untyped_storage().nbytes()
        return live.peak_bytes - before - weight_grad, loss.detach()

    torch.manual_seed(0)
    head = LossHead()
    plain_peak, plain_loss = activation_peak(head)
    with graphckpt.apply(head, {"": Tiles(8, reduce="sum")}):
        tiled_peak, tiled_loss = activation_peak(head)
    # what is alive of the logits: themselves, their log-softmax, its gradient
    assert plain_peak >= 2 * logits_bytes
    small = hidden.untyped_storage().nbytes() * 2 + head.head.weight.untyped_storage().nbytes()
    assert tiled_peak <= plain_peak / 8 + small
    torch.testing.assert_close(tiled_loss, plain_loss, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_tiles_agree_with_a_float64_reference(reduce: str, rows: int) -> None:
    @as_module(lambda: {"head": nn.Linear(8, 11, dtype=torch.float64)})
    def Head(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, y, reduction=reduce), logits.argmax(-1)

    torch.manual_seed(0)
    head, y = Head(), torch.randint(0, 11, (rows,))
    x = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
    loss, best = head(x, y)
    plain = torch.autograd.grad(loss, [x, *head.parameters()])
    with graphckpt.apply(head, {"": Tiles(4, reduce=reduce)}):
        tiled_loss, tiled_best = head(x, y)
        tiled = torch.autograd.grad(tiled_loss, [x, *head.parameters()])
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-12, atol=1e-12)
    assert torch.equal(tiled_best, best)
    for ours, theirs in zip(tiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("reduction", "reduce"), [("mean", "sum"), ("sum", "mean")])
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x, **options: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long), **options),
        lambda x, **options: F.cross_entropy(x.bfloat16(), torch.zeros(len(x), dtype=torch.long), **options).float(),
        lambda x, **options: F.mse_loss(x, torch.zeros_like(x), **options),
        lambda x, **options: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), **options),
        lambda x, **options: F.smooth_l1_loss(x, torch.zeros_like(x), **options),
    ],
)
def test_tiles_that_reduce_otherwise_than_the_loss_are_refused(loss_of: Any, reduction: str, reduce: str) -> None:
    """Loss and gradients would be several times as large, or as small."""

    @as_module(lambda: {"head": nn.Linear(8, 11)})
    def Head(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(self.head(x), reduction=reduction)
        return loss

    head, x = Head(), torch.randn(16, 8)
    plain = head(x)
    message = f"reduce: expected '{reduction}', .* got '{reduce}' · fix: Tiles"
    with graphckpt.apply(head, {"": Tiles(4, reduce=reduce)}), pytest.raises(ConfigError, match=message):
        head(x)
    with graphckpt.apply(head, {"": Tiles(4, reduce=reduction)}):
        torch.testing.assert_close(head(x), plain, rtol=2e-2, atol=0)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_reduction_of_the_blocks_own_is_as_it_says(reduce: str) -> None:
    """Of a loss that scales what PyTorch has reduced, the reduction over slices is not known."""

    @as_module(lambda: {"head": nn.Linear(8, 11)})
    def Head(self: Any, x: torch.Tensor) -> torch.Tensor:
        other = "mean" if reduce == "sum" else "sum"
        loss = F.mse_loss(self.head(x), torch.zeros(len(x), 11), reduction=other)
        return loss * len(x) if reduce == "sum" else loss / len(x)

    head, x = Head(), torch.randn(16, 8)
    plain = head(x)
    with graphckpt.apply(head, {"": Tiles(4, reduce=reduce)}):
        torch.testing.assert_close(head(x), plain)


@pytest.mark.parametrize(("reduce", "most_rows"), [("sum", 3), (None, 9)])
def test_without_gradients_a_loss_is_cut_and_nothing_else(reduce: str | None, most_rows: int) -> None:
    block, x, rows = nn.Linear(4, 4), torch.randn(9, 4), []
    block.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    model = nn.Sequential(block)
    with graphckpt.apply(model, {"": Tiles(3, reduce=reduce)}), torch.no_grad():
        cut = model(x)
    assert max(rows) == most_rows
    torch.testing.assert_close(cut, nn.functional.linear(x, block.weight, block.bias))


def test_tile_dim_one_cuts_tokens() -> None:
    block, x = Mlp(p=0.0).double(), torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    rows = []
    block.up.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    with graphckpt.apply(block, {"": Tiles(4, tile_dim=1)}):
        (ours,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert max(rows) == 3


def test_an_argument_object_keeps_the_tensors_that_it_held_until_backward() -> None:
    """As the block may have read them: they are inputs, whatever the caller puts in their place."""

    class Cache:
        def __init__(self) -> None:
            self.other: torch.Tensor | None = torch.zeros(1000)
            self.own: torch.Tensor | None = None

    class UsesCache(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.own = x.detach() * 2
            return (x * cache.own).sin()

    block, cache = UsesCache(), Cache()
    with graphckpt.apply(nn.Sequential(block), {"0": True}):
        out = block(torch.ones(3, requires_grad=True), cache)
        assert cache.other is not None
        storage = weakref.ref(cache.other.untyped_storage())
        cache.other = None
        assert storage() is not None
        out.sum().backward()
        del out
        assert storage() is None
