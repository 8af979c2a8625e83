"""Ops that stand for kernels of other libraries, which need a GPU: they have shapes and bytes, but no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("graphckpt", "FRAGMENT")
_EVERYWHERE = "CompositeExplicitAutograd"
"""The key of an op that runs in the same way on each device, fake tensors included."""


def _define(schema: str, run: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, _EVERYWHERE)
    return getattr(torch.ops.graphckpt, name)


def _update(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    del written, read


def _add_product(one: torch.Tensor, other: torch.Tensor, sums: torch.Tensor) -> None:
    del one, other, sums


def _dequantize(weight: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    del scales
    return weight.new_empty(shape, dtype=dtype)


def _quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(matrix, dtype=torch.int8), matrix.new_empty(matrix.shape[0], dtype=torch.float32)


update = _define("update(Tensor(a!)[] written, Tensor[] read) -> ()", _update)
"""One kernel that reads all of these tensors and writes the first ones, as a fused step of an optimizer does."""
add_product = _define("add_product(Tensor one, Tensor other, Tensor(a!) sums) -> ()", _add_product)
"""Adds the product of two matrices to a third one, which may be of another type."""
dequantize = _define("dequantize(Tensor weight, Tensor scales, int[] shape, ScalarType dtype) -> Tensor", _dequantize)
"""Unpacks a quantized tensor into a new one."""
quantize_rows = _define("quantize_rows(Tensor matrix) -> (Tensor, Tensor)", _quantize_rows)
"""Returns the rows of a matrix in int8, and a scale for each in float32."""
