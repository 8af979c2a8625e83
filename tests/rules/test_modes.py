"""The dispatch modes of `selective`: they see all ops of the block, as they are without a mode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hard_modules import chain, differing, plain_steps, run_steps
from helpers.modules import as_module
from helpers.policies import put
from helpers.train_graphs import SquareGraph
from torch import nn
from torch._higher_order_ops import associative_scan, while_loop
from torch._ops import OpOverload
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import SelectiveCheckpointContext
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.rules import Selective

# Legend: N rows, D width


def everything(context: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return True


@torch.library.custom_op("graphckpt_tests::multiply", mutates_args=())
def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def _save_for_backward(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _multiply_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ctx.saved_tensors
    return grad @ b.t().to(grad.dtype), a.t().to(grad.dtype) @ grad


multiply.register_autograd(_multiply_backward, setup_context=_save_for_backward)


@as_module(lambda function: {"weight": nn.Parameter(torch.randn(32, 32)), "function": function})
def Calls(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.function(x, self.weight).float())


@as_module(lambda: {"product": nn.Bilinear(32, 32, 32)})
def Doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.product(x, x.sin()))


MODULES: dict[str, Any] = {
    "bilinear": Doubled,
    "a custom op": lambda: Calls(multiply),
    "cdist": lambda: Calls(torch.cdist),  # casts to float32, so that its kernel does not cast
    "cdist of few rows": lambda: Calls(lambda x, weight: torch.cdist(x, weight, 2.0, "donot_use_mm_for_euclid_dist")),
    "matmul": lambda: Calls(torch.matmul),
}


def steps(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        model.zero_grad(set_to_none=True)
        output.float().square().sum().backward()
        seen += [output.detach(), *(parameter.grad for parameter in model.parameters())]
    return seen


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(build(), build()), torch.randn(64, 32)


@pytest.mark.parametrize("save", ["matmul", everything], ids=["matmul", "everything"])
@pytest.mark.parametrize("name", MODULES)
def test_kernels_that_call_ops_compute_the_same_under_autocast(name: str, save: str | Callable[..., bool]) -> None:
    model, x = made(MODULES[name])
    expected = steps(model, x)
    with graphckpt.apply(model, {"*": {"activation_checkpointing": Selective(save)}}):
        assert all(map(torch.equal, steps(model, x), expected))


@pytest.mark.parametrize("name", MODULES)
def test_counting_bytes_does_not_change_a_step_under_autocast(name: str) -> None:
    model, x = made(MODULES[name])
    expected = steps(model, x)
    with LiveBytes():
        assert all(map(torch.equal, steps(model, x), expected))


@pytest.mark.parametrize("function", [torch.pinverse, lambda weight: torch.linalg.pinv(weight.detach()) * weight])
def test_an_op_that_is_a_part_of_another_or_not_is_refused_under_autocast(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, x = made(lambda: Calls(lambda x, weight: x @ function(weight)))
    expected = steps(model, x)
    with graphckpt.apply(model, {"*": {"activation_checkpointing": True}}):
        assert all(map(torch.equal, steps(model, x), expected))
    with (
        graphckpt.apply(model, {"*": {"activation_checkpointing": Selective("matmul")}}),
        pytest.raises(RuntimeError, match=r"expected no autocast.*fix: "),
    ):
        steps(model, x)


@as_module(lambda function: {"first": nn.Linear(32, 32), "last": nn.Linear(32, 32), "function": function})
def CallsWithin(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.last(torch.tanh(self.function(self.first(x))))


@torch.no_grad()
def _loop(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.5), (torch.tensor(0), x))[1]  # type: ignore[no-any-return]


@torch.no_grad()
def _attention(x: torch.Tensor) -> torch.Tensor:  # on a CPU it has no backward
    q = x.detach().view(1, 2, -1, 16)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + i - j).view_as(x)  # type: ignore[union-attr]


HIGHER_ORDER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,)),
    "while_loop": lambda x: x * _loop(x),
    "associative_scan": lambda x: associative_scan(lambda a, b: a * b + a, x, 0, combine_mode="generic"),
    "flex_attention": lambda x: x + _attention(x),
    "checkpoint": lambda x: torch_checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False),
}


def trained(name: str, policies: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(CallsWithin(HIGHER_ORDER[name]), CallsWithin(HIGHER_ORDER[name]))
    found: list[torch.Tensor] = []
    with graphckpt.apply(model, policies):
        for _ in range(3):
            x = torch.randn(8, 32, requires_grad=True)
            model.zero_grad()
            model(x).square().mean().backward()
            found += [x.grad, *(p.grad for p in model.parameters())]
    return found


@cache
def trained_plainly(name: str) -> list[torch.Tensor]:
    return trained(name, {})


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's, which traces the functions of these ops
@pytest.mark.parametrize(
    "rule", [True, "selective", "segments", Selective(everything)], ids=["full", "matmul", "segments", "all"]
)
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_higher_order_ops(name: str, rule: Any) -> None:
    policies = {"" if rule == "segments" else "*": {"activation_checkpointing": rule}}
    assert all(map(torch.equal, trained(name, policies), trained_plainly(name)))


@pytest.mark.slow
def test_all_ops_of_pytorch_compute_the_same() -> None:
    script = Path(__file__).with_name("op_samples.py")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    (num_compared,) = [int(line.split()[1]) for line in lines if line.startswith("compared:")]
    assert num_compared > 1000
    # `linalg.pinv` is refused; the noise of `rrelu` is written after autograd has saved it, which no rule sees
    found = {line.removeprefix("differs: ").strip() for line in lines if line.startswith("differs:")}
    assert found - {"nn.functional.rrelu", "nn.functional.rrelu autocast"} <= {
        "linalg.pinv autocast",
        "pinverse autocast",
    }


KINDS = ["mlp", "batch_norm", "gru", "spectral_norm", "attention", "edits_its_input", "containers"]
SAVES: dict[str, Any] = {"clones": ["aten.clone.default"], "everything": everything}
INNER: dict[str, dict[str, Any]] = {
    "nothing": {},
    "selective": {"[123]": Selective("matmul")},
    "everything": {"[123]": Selective(everything)},
    "everything, twice": {"[123]": Selective(everything), "re:[123]\\..*": Selective("matmul")},
    "a segment": {"re:[123]\\..*": Selective(["aten.clone.default"])},
    "excluded children": {"[123]": Selective(everything), "re:[123]\\.[a-z]*[aeiou]": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("save", SAVES)
def test_ops_of_the_engine_are_no_ops_of_the_block(save: str, inner: str, kind: str) -> None:
    plain = plain_steps(kind)
    model = chain(kind)
    with put(model, {"": Selective(SAVES[save])} | INNER[inner]):
        assert differing(run_steps(model), plain) == []


@as_module(lambda inner: {"inner": inner})
def OnHost(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What it saves goes through hooks of the caller's, whose copies are no ops of the block."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return self.inner(x)


@pytest.mark.parametrize(
    "rules", [{"0.inner": Selective(everything)}, {"0.inner": Selective(everything), "0.inner.1": False}]
)
def test_ops_of_hooks_around_are_no_ops_of_the_block(rules: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OnHost(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU())))
    x = torch.randn(8, 32)
    expected = steps(model, x)
    with graphckpt.apply(model, {name: {"activation_checkpointing": rule} for name, rule in rules.items()}):
        assert all(map(torch.equal, steps(model, x), expected))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_results_are_kept() -> None:
    @as_module(lambda: {"weight": nn.Parameter(torch.randn(32, 32))})
    def Masked(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm((self.weight * (self.weight > 0.5)).to_sparse_csr(), x).tanh()

    model, x = made(Masked)
    _, expected = kept_bytes(model, x[:32], amp=False, backward_within=False)
    with graphckpt.apply(model, {"*": {"activation_checkpointing": Selective(everything)}}):
        for _ in range(3):
            _, found = kept_bytes(model, x[:32], amp=False, backward_within=False)
            assert all(map(torch.equal, found, expected))


class Block(nn.Module):
    """Casts its input once for each of three products: in the recomputation that is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + torch.tanh(self.out(torch.softmax(q @ k.t(), -1).to(v.dtype) @ v))


def kept_bytes(
    model: nn.Module, x: torch.Tensor, *, amp: bool, backward_within: bool
) -> tuple[int, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    with LiveBytes(record_timeline=False) as live:
        live.track([*model.parameters(), x])
        before = live.live_bytes
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = model(x).float().square().sum()
            kept = live.live_bytes - before
            if backward_within:
                loss.backward()
        if not backward_within:
            loss.backward()
    return kept, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("shared", [False, True], ids=["blocks of their own", "one block, twice"])
@pytest.mark.parametrize(
    "save",
    [
        "matmul",
        ["aten.addmm.default[0,2]", "aten.tanh.default[0]"],
        ["aten._to_copy.default[0]", "aten.tanh.default[0]"],
    ],
    ids=str,
)
def test_backward_within_autocast_keeps_the_same_bytes(save: list[str] | str, shared: bool) -> None:
    model, x = made(Block)
    model = nn.Sequential(*[model[0]] * 2) if shared else model
    for backward_within in (False, True):
        _, expected = kept_bytes(model, x, amp=True, backward_within=backward_within)
        with graphckpt.apply(model, {"0" if shared else "*": {"activation_checkpointing": True}}):
            full = [kept_bytes(model, x, amp=True, backward_within=backward_within)[0] for _ in range(3)]
        with graphckpt.apply(model, {"0" if shared else "*": {"activation_checkpointing": Selective(save)}}) as handle:
            found = [kept_bytes(model, x, amp=True, backward_within=backward_within) for _ in range(3)]
            assert "by number are not kept" not in str(handle.explain(show=False).rows)
        assert all(map(torch.equal, found[-1][1], expected))
        assert found[-1][0] == found[0][0] > full[-1]
        assert [kept for kept, _ in found] == [found[0][0]] * 3


@as_module(lambda: {"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
def Narrow(self: Any, x: torch.Tensor) -> torch.Tensor:
    """All that a policy may keep of it is as big with autocast as without."""
    return x + self.down(torch.tanh(self.up(x).float())).float()


def test_a_graph_keeps_the_same_bytes_with_amp_as_without() -> None:
    kept: dict[bool, int] = {}
    for amp in (False, True):
        model, x = made(Narrow)
        graph = SquareGraph(model, dict.fromkeys("01", Selective(["aten.tanh.default[0]"])))
        graph.config.enable_amp(amp, dtype=torch.bfloat16)
        for _ in range(5):
            graph(x)
        with graph.measure():
            graph(x)
        explanation = graph.explain(show=False)
        assert "by number are not kept" not in str(explanation)
        kept[amp] = sum(row.bytes_after for row in explanation.rows if row.rule.startswith("selective"))
    assert kept[True] == kept[False]
