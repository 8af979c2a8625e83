"""Linear layers of bitsandbytes for simulated steps: the tensors that each has, saves and allocates, without values.

After the code of bitsandbytes 0.50 for CUDA, whose kernels need a GPU; the tests compare tensors with the library's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from graphckpt.simulation import kernel_ops
from graphckpt.units import format_bytes

_BLOCK = 64  # weights of one scale; the default of `quantize_4bit`
_BLOCK_OF_SCALES = 256  # scales of one scale, with double quantization
_OUTLIER = 6.0  # the default of `llm_int8_threshold`


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight is quantized. Inputs and outputs have its type of before.

    Args:
        linear: the layer in whose place it is.
    """

    def __init__(self, linear: nn.Module, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)
        weight: Any = linear.weight
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype: torch.dtype = weight.dtype
        self.weight = nn.Parameter(self._quantized(weight.detach()), requires_grad=False)
        bias: Any = linear.bias
        self.bias: Any = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @abstractmethod
    def _quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the packed weight, and adds the tensors that belong to it."""

    # A parameter, as the library hides these tensors in that of the weight: a recomputation copies small buffers.
    def _add(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))


class Nf4Linear(QuantizedLinear):
    """``bitsandbytes.nn.Linear4bit``: two weights a byte, and a scale in float32 for each 64 of them.

    Forward, recomputation and backward each dequantize the weight into a tensor that lives for one matrix product, as
    the kernels for CUDA do above 1536 tokens. Below, some GPUs multiply without it: their peak is lower by one weight.
    """

    absmax: nn.Parameter

    def _quantized(self, weight: torch.Tensor) -> torch.Tensor:
        self._add("absmax", -(-weight.numel() // _BLOCK))
        self._add("code", 16)
        return torch.zeros((weight.numel() + 1) // 2, 1, dtype=torch.uint8)

    def scales(self) -> torch.Tensor:
        """Returns the scales of all blocks in float32."""
        absmax: torch.Tensor = self.absmax
        return absmax

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802 - a name in HQQ's layers, by which PEFT finds `dequantize` for DoRA
        return self.weight

    def dequantize(self) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        weight: torch.Tensor = kernel_ops.dequantize(self.weight, self.scales(), shape, self.compute_dtype)
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        product: torch.Tensor = _Nf4Product.apply(input.to(self.compute_dtype), self, self.bias)
        return product.to(input.dtype)


@final
class Nf4DoubleLinear(Nf4Linear):
    """``Linear4bit(compress_statistics=True)``: scales in 8 bits, with a scale in float32 for each 256 of them."""

    absmax_of_absmax: nn.Parameter

    def _quantized(self, weight: torch.Tensor) -> torch.Tensor:
        packed = super()._quantized(weight)
        num_blocks = self.absmax.numel()
        self._add("absmax", num_blocks, dtype=torch.uint8)
        self._add("absmax_of_absmax", -(-num_blocks // _BLOCK_OF_SCALES))
        self._add("offset")
        return packed

    def scales(self) -> torch.Tensor:
        scales = kernel_ops.dequantize(self.absmax, self.absmax_of_absmax, self.absmax.shape, torch.float32)
        shifted: torch.Tensor = scales + 1.0  # the offset, as a number: the bytes are the same
        return shifted


class _Nf4Product(torch.autograd.Function):
    """``MatMul4Bit``: saves neither its input nor the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, linear: Nf4Linear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.linear = linear
        return F.linear(inputs, linear.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return torch.matmul(grad, ctx.linear.dequantize().to(grad.dtype)), None, None


@final
class Int8Linear(QuantizedLinear):
    """``bitsandbytes.nn.Linear8bitLt``: a byte a weight, and a scale in float32 for each row.

    No column of the input is taken for an outlier, which a simulated step cannot know.
    """

    scale: nn.Parameter

    def _quantized(self, weight: torch.Tensor) -> torch.Tensor:
        self._add("scale", self.out_features)
        return torch.zeros(self.out_features, self.in_features, dtype=torch.int8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        product: torch.Tensor = _Int8Product.apply(input, self, self.bias)
        return product


class _Int8Product(torch.autograd.Function):
    """``MatMul8bitLt``, which keeps its input although its backward does not read it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, linear: Int8Linear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.linear = linear
        ctx.inputs = rows = inputs.reshape(-1, inputs.shape[-1])  # an attribute: no hook on saved tensors sees it
        quantized, _ = _quantized_rows(rows.to(torch.float16))
        product = _product(quantized, linear, bias, inputs.dtype)
        return product.view(*inputs.shape[:-1], linear.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        dtype, shape = ctx.inputs.dtype, grads[0].shape[:-1]
        weight = ctx.linear.weight.to(dtype).mul_(ctx.linear.scale.unsqueeze(1))
        return torch.matmul(grad.to(dtype), weight).view(*shape, ctx.linear.in_features), None, None


def _quantized_rows(rows: torch.Tensor) -> Any:
    outliers = rows.abs() >= _OUTLIER  # of no use here, but alive beside the result, as in the library
    result = kernel_ops.quantize_rows(rows)
    del outliers
    return result


def _product(rows: torch.Tensor, linear: Int8Linear, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    sums = torch._int_mm(rows, linear.weight.t())  # in int32, alive until the end
    half = sums.new_empty(sums.shape, dtype=torch.float16)
    kernel_ops.update([half], [sums])
    if bias is not None:
        half.add_(bias)
    return half.to(dtype)


KINDS: Mapping[str, type[QuantizedLinear]] = {"nf4": Nf4Linear, "nf4-double": Nf4DoubleLinear, "int8": Int8Linear}


def quantize(model: Any, kind: str) -> None:
    """Replaces the linear layers of a Transformers model, as its integration of bitsandbytes does.

    The output embedding, the last module and what shares a weight with them stay as they are, as do the embeddings,
    the norms and the experts of a mixture, which are not linear layers.
    """
    head, names = model.get_output_embeddings(), [name for name, _ in model.named_parameters()]
    last = names[-1].rpartition(".")[0]
    tied = {name.rpartition(".")[0] for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}
    for name, module in list(model.named_modules()):
        is_transposed = type(module).__name__ == "Conv1D"  # Transformers' own linear layer, of GPT-2
        if not (is_transposed or type(module) is nn.Linear) or module is head or name == last or name in tied:
            continue
        sizes = module.weight.shape if is_transposed else module.weight.shape[::-1]
        model.set_submodule(name, KINDS[kind](module, *sizes))


def num_parameters(model: nn.Module) -> int:
    """Returns the number of parameters of a model, quantized ones as before quantization."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    packed = {id(p) for module in quantized for name, p in module.named_parameters() if name != "bias"}
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in packed)
    return others + sum(module.in_features * module.out_features for module in quantized)


def quantized_phrase(model: nn.Module, kind: str) -> str:
    """Returns the line of the assumptions on a quantized model: which weights are, and what the others take."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    packed = {id(parameter) for module in quantized for parameter in module.parameters(recurse=False)}
    others = sum(p.nbytes for p in model.parameters() if id(p) not in packed and not p.requires_grad)
    double = " with double quantization" if kind == "nf4-double" else ""
    name = f"{kind.partition('-')[0]}{double} (bitsandbytes)"
    return f"{len(quantized)} linear layers in {name}, the other {format_bytes(others)} not quantized"
