"""Runs samples of all ops of PyTorch's test database under `selective`, and prints which differ from the plain step.

It runs in a process of its own: the database is private, and importing it changes settings of the process.
"""

from __future__ import annotations

import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

warnings.simplefilter("ignore")
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]

import torch  # noqa: E402
from torch._ops import OpOverload  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo, SampleInput  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402
from torch.utils.checkpoint import SelectiveCheckpointContext  # noqa: E402

from graphckpt.rules import BlockContext, Rule, Selective  # noqa: E402

NUMBER = 2  # of the sample of an op: the first ones are small
WITHOUT_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
WITHOUT_VALUES |= {"linalg.lstsq"}  # results that it does not compute are as they were in memory


def main() -> None:
    num_compared = 0
    for op in op_db:
        if op.name in WITHOUT_VALUES or not op.supports_autograd or torch.float32 not in op.supported_dtypes("cpu"):
            continue
        for sample, autocast in itertools.product(samples(op)[-1:], (False, True)):
            try:
                plain, again = (outcome(op, sample, None, autocast=autocast) for _ in range(2))
            except Exception:  # of samples that the plain step refuses there is nothing to compare
                continue
            if not is_same(plain, again):
                continue  # it leaves parts of its results as they are in memory
            num_compared += 1
            try:
                same = is_same(outcome(op, sample, Selective(everything), autocast=autocast), plain)
            except Exception as error:  # each is reported
                same = False
                print("refused:", str(error).splitlines()[0][:200])
            if not same:
                print("differs:", op.name, "autocast" if autocast else "")
    print("compared:", num_compared)


def everything(context: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return True


def samples(op: OpInfo) -> list[SampleInput]:
    found: Iterator[SampleInput] = op.sample_inputs("cpu", torch.float32, requires_grad=True)
    return list(itertools.islice(found, NUMBER + 1))


def outcome(op: OpInfo, sample: SampleInput, rule: Rule | None, *, autocast: bool) -> list[torch.Tensor | None]:
    """Returns the results of an op, and the gradients of its arguments."""
    args, kwargs = tree_map(fresh, (sample.input, *sample.args)), tree_map(fresh, dict(sample.kwargs))
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = call(rule, op.op, args, kwargs)
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    wanted = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    ends = [result for result in results if result.requires_grad]
    grads: tuple[torch.Tensor | None, ...] = ()
    if ends and wanted:
        grads = torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return [*(result.detach() for result in results), *grads]


def call(rule: Rule | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs) if rule is None else rule.run(BlockContext("op", ()), function, args, kwargs)


def fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def is_same(ours: list[torch.Tensor | None], plain: list[torch.Tensor | None]) -> bool:
    return len(ours) == len(plain) and all(map(has_same_bits, ours, plain))


def has_same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if a.is_complex():
        a, b = (torch.view_as_real(value.to(torch.complex64).resolve_conj()) for value in (a, b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


main()
