"""Tensors that are not plain views of bytes: stores leave them on the device, and explain() reports it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.modules import as_module
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import graphckpt
from graphckpt import ConfigError, Selective, Tiles
from graphckpt.stores import Store, TensorGroup
from graphckpt.stores.placement import placement_of

# Legend: N rows, D width
D = 32

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR) tensor support is in beta"),  # said once a process, of one
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
STORES: dict[str, dict[str, Any]] = {
    "disk": {"offload": "disk", "min_elements": 1},
    "slab": {"contiguous": True, "min_elements": 1},
}


def rows() -> Tensor:
    return torch.randn(64, D, generator=torch.Generator().manual_seed(0))


def jagged(layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([rows()[:20], rows()[20:]], layout=layout)


def quantized(values: Tensor) -> Tensor:
    return torch.quantize_per_tensor(values.detach(), 0.05, 0, torch.qint8)


ODD: dict[str, Callable[[], Tensor]] = {
    "sparse coo": lambda: rows().to_sparse(),
    "sparse csr": lambda: rows().to_sparse_csr(),
    "sparse csc": lambda: rows().to_sparse_csc(),
    "sparse bsr": lambda: rows().to_sparse_bsr((4, 4)),
    "mkldnn": lambda: rows().to_mkldnn(),
    "quantized": lambda: quantized(rows()),
    "nested": lambda: jagged(torch.strided),
    "jagged": jagged,
    "meta": lambda: rows().to("meta"),
}


def new_store(flags: dict[str, Any]) -> tuple[Store, TensorGroup, list[str]]:
    notes: list[str] = []
    store = placement_of(flags).store
    group = store.open_group(TensorGroup("block", list, notes.append))
    assert group is not None
    return store, group, notes


@pytest.mark.parametrize("flags", STORES.values(), ids=list(STORES))
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_that_is_not_a_view_of_bytes_stays(kind: str, flags: dict[str, Any]) -> None:
    store, group, notes = new_store(flags)
    tensor = ODD[kind]()
    found = store.get(store.put(tensor, group))
    assert isinstance(found, Tensor)
    assert (found.layout, found.dtype, found.device) == (tensor.layout, tensor.dtype, tensor.device)
    if kind not in ("meta", "mkldnn", "nested", "jagged"):
        assert torch.equal(dense(found), dense(tensor))
    assert (kind == "meta") == (notes == [])
    assert all("stay on the device" in note for note in notes)


def dense(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor.int_repr()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor + 0


@pytest.mark.parametrize("flags", STORES.values(), ids=list(STORES))
def test_fake_tensors_and_those_of_torch_func_stay(flags: dict[str, Any]) -> None:
    store, group, _ = new_store(flags)

    def keep(tensor: Tensor) -> Tensor:
        kept = store.get(store.put(tensor, group))
        assert kept is not None
        return kept * 2

    with FakeTensorMode():
        assert keep(torch.empty(64, D)).shape == (64, D)
    x = rows()
    assert torch.equal(torch.func.vmap(keep)(x), x * 2)
    assert torch.equal(torch.func.functionalize(keep)(x), x * 2)
    assert torch.equal(torch.func.jvp(keep, (x,), (x,))[0], x * 2)
    assert torch.func.grad(lambda t: (keep(t) * t).sum())(x).shape == x.shape


class Product(torch.autograd.Function):
    """Saves a quantized tensor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return hidden * factor.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].dequantize(), None


@as_module(lambda: {"up": nn.Linear(D, D), "down": nn.Linear(D, D)})
def Mlp(self: Any, x: Tensor) -> Tensor:
    return F.gelu(self.down(F.gelu(self.up(x))))


class Quantized(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.down(Product.apply(self.up(x), quantized(x))))


class TakesQuantized(Mlp):
    """A child is called with a quantized tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.product = Multiplies()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.product(self.up(x), quantized(x)))


class Multiplies(nn.Module):
    def forward(self, hidden: Tensor, factor: Tensor) -> Tensor:
        return torch.tanh(Product.apply(hidden, factor))


class Sparse(Mlp):
    def __init__(self, make_sparse: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make_sparse = make_sparse

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make_sparse(self.up.weight * (self.up.weight > 0))
        return F.gelu(self.down(torch.sparse.mm(weight, x.t()).t()))


class JaggedAttention(nn.Module):
    """On a CPU, its kernel saves nested tensors of strided layout."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(3)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, [4, D // 4]).transpose(1, 2) for part in self.parts]
        return x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))


class NestedInside(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:20], x[20:]], layout=torch.strided)
        hidden = torch.nested.to_padded_tensor(F.relu(self.up(nested)), 0.0)
        return F.gelu(self.down(hidden[1] + hidden[0].cos()))


class TakesNested(Mlp):
    """A child is called with a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:20], x[20:]], layout=torch.strided)
        return self.down(torch.nested.to_padded_tensor(self.inner(nested), 0.0)[1])


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "jagged": (Mlp, jagged),
    "jagged, attention": (JaggedAttention, jagged),
    "nested": (Mlp, partial(jagged, torch.strided)),
    "nested inside": (NestedInside, rows),
    "takes nested": (TakesNested, rows),
    "quantized": (Quantized, rows),
    "takes quantized": (TakesQuantized, rows),
    "coo": (partial(Sparse, Tensor.to_sparse), rows),
    "csr": (partial(Sparse, Tensor.to_sparse_csr), rows),
}
RULES: dict[str, Any] = {
    "keep": False,
    "full": True,
    "selective": Selective("matmul"),
    "everything": Selective(lambda *args, **kwargs: True),
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and all gradients."""
    x = x.detach().clone().requires_grad_()
    output = model(x)
    model.zero_grad(set_to_none=True)
    values(output).square().sum().backward()
    assert x.grad is not None
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [values(output).detach(), values(x.grad), *grads]


def values(tensor: Tensor) -> Tensor:
    if tensor.is_nested and tensor.layout is torch.strided:
        return torch.cat(tensor.unbind())
    return tensor.values() if tensor.is_nested else tensor


@pytest.mark.parametrize("flags", [{}, *STORES.values()], ids=["device", *STORES])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", MODULES)
def test_same_bits_as_the_plain_step(kind: str, rule: str, flags: dict[str, Any]) -> None:
    build, make_input = MODULES[kind]
    torch.manual_seed(0)
    model, x = nn.Sequential(build(), build()), make_input()
    expected = step(model, x)
    selector = "*.product" if kind == "takes quantized" else "*"
    with graphckpt.apply(model, {selector: {"activation_checkpointing": RULES[rule], **flags}}) as handle:
        for _ in range(3):
            assert all(map(torch.equal, step(model, x), expected))
        explanation = handle.explain(show=False)
    if flags and rule == "keep":
        assert "stay on the device" in str(explanation.rows)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_argument_is_not_cut_into_tiles(layout: torch.layout) -> None:
    model = nn.Sequential(Mlp(), Mlp())
    with (
        graphckpt.apply(model, {"1": Tiles(2)}),
        pytest.raises(ConfigError, match=r"1: tiles: .* got a nested tensor · fix: use activation_check"),
    ):
        step(model, jagged(layout))
    expected = step(model, jagged(layout))
    with graphckpt.apply(model, {"1": Tiles(1)}):
        assert all(map(torch.equal, step(model, jagged(layout)), expected))
