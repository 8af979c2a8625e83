"""Keeps a block's inputs and the results of chosen ops; backward recomputes the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from graphckpt._compat import op_names, shape_of
from graphckpt.engine.block import BlockContext
from graphckpt.engine.frame import Frame
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.rules.base import Rule
from graphckpt.rules.in_graph import checkpoint_in_graph, contexts_of
from graphckpt.rules.ops import NamedOps, Op, Policy, SelectiveContexts
from graphckpt.tree import flatten_call


def _ops(*names: str) -> frozenset[Op]:
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


PRESETS: dict[str, frozenset[Op]] = {
    "matmul": _ops(
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "mkldnn_linear", "convolution",
        "_scaled_mm", "_grouped_mm",
    ),
    "attention": _ops(
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
    ),
}  # fmt: skip
PRESETS["matmul+attention"] = PRESETS["matmul"] | PRESETS["attention"]

_NUMBERED = re.compile(r"(?P<op>[^\[\]]+)\[(?P<numbers>\d+(,\d+)*)\]")  # "aten.mm.default[0,2]"
_FUNCTIONS = (BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # callable, but not policies
_OPS = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
_SAVES = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})
_OFFLOADS = frozenset({CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD})


@final
@dataclass(frozen=True)
class Selective(Rule):
    """Keeps the results of chosen ops in addition to the inputs.

    Ops that only lead up to a kept result are not recomputed, and a result that no recomputation reads is not kept.
    Under a policy function, which may decide otherwise in each call, all ops up to the last saved tensor are
    recomputed, except those whose results it keeps.

    Args:
        save: ``"matmul"``, ``"attention"``, ``"matmul+attention"``; or a list of ops, each an ``OpOverload`` or its
            name: ``"aten.mm.default"`` is all of its results, ``"aten.mm.default[0,2]"`` those of its first and third
            call in the block, and ``"attention[0]"`` that of the first call of whichever op of the preset; or a
            policy ``(context, op, *args, **kwargs)`` that returns a bool or
            a ``CheckpointPolicy``, as for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
        label: a name for tables, in place of the ops: the planner calls its choices "level 1 of 4", and so on.

    Raises:
        ConfigError: No preset or op has such a name.
    """

    name: ClassVar[str] = "selective"
    save: str | tuple[Any, ...] | list[Any] | Callable[..., Any] = "matmul+attention"
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # Attributes and not fields, so that equality and `describe` see `save` as the user has written it.
        policy = _policy(self.save)
        in_graph = partial(_decision, policy.decide if isinstance(policy, NamedOps) else self.save)
        object.__setattr__(self, "_policy", policy)
        object.__setattr__(self, "_contexts_in_graph", contexts_of(in_graph))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selective, (self.save, self.label)  # the policy that is derived from `save` cannot always be pickled

    def run(self, block: BlockContext, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; backward will recompute it, except for the chosen ops."""
        policy: Policy = self._policy  # type: ignore[attr-defined]
        signature = None
        if isinstance(policy, NamedOps):
            # Calls with equal signatures run the same ops, as a rule; `SelectiveContexts` notices where they do not.
            # `requires_grad` is a part of it: autograd saves other tensors for a frozen input.
            leaves, _ = flatten_call(args, kwargs)
            tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            signature = tuple((shape_of(tensor), tensor.dtype, tensor.requires_grad) for tensor in tensors)
        return Frame(block, function, SelectiveContexts(policy, signature)).run(args, kwargs)

    def graph_break(self, *, has_gradients: bool) -> str | None:
        """Rejects numbers of calls: the compiler may order calls of an op in another way."""
        policy = self._policy  # type: ignore[attr-defined]
        if has_gradients and isinstance(policy, NamedOps) and policy.numbered:
            return "selective with numbers of calls cannot be traced"
        return None

    def run_in_graph(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block under PyTorch's selective checkpoint."""
        del module
        return checkpoint_in_graph(function, args, kwargs, self._contexts_in_graph)  # type: ignore[attr-defined]

    def describe(self) -> str:
        """Names the preset, the ops or the policy function."""
        if self.label:
            return f"selective({self.label})"
        if callable(self.save):
            return f"selective({getattr(self.save, '__name__', 'policy')})"
        return f"selective({self.save if isinstance(self.save, str) else ', '.join(map(str, self.save))})"


def _policy(save: Any) -> Policy:
    if isinstance(save, str) and save in PRESETS:
        return NamedOps(PRESETS[save])
    if isinstance(save, (list, tuple, set, frozenset)):
        return _parse_ops(save)
    if isinstance(save, _FUNCTIONS) or getattr(save, "__module__", None) == nn.functional.__name__:
        what = "expected a list of ops or a policy function"
        raise ConfigError(f"selective.save: {what}, got {save!r} · fix: use a list such as [torch.ops.aten.mm.default]")
    # The policy function is called only in the original forward; a recomputation uses the kept results, by count.
    if callable(save) and not isinstance(save, str):

        def saves(output: Any, func: Op, args: Any, kwargs: dict[str, Any], _: int) -> bool:
            context = SelectiveCheckpointContext(is_recompute=False)
            context.op_output = output  # a separate argument only since torch 2.13
            return _decision(save, context, func, *args, **kwargs) in _SAVES

        return saves
    presets = ", ".join(repr(name) for name in PRESETS)
    raise ConfigError(
        f"selective.save: expected one of {presets}, a list of ops or a policy function, got {save!r}"
        f"{did_you_mean(str(save), PRESETS)} · fix: use one of these"
    )


def _parse_ops(entries: Iterable[Any]) -> NamedOps:
    """Returns the policy that a list of ops means."""
    all_calls: set[Op] = set()
    some: dict[Op, set[int]] = {}
    names: dict[str, tuple[frozenset[Op], set[int] | None]] = {}
    for entry in entries:
        numbered = _NUMBERED.fullmatch(entry) if isinstance(entry, str) else None
        name = entry if numbered is None else numbered["op"]
        is_preset = isinstance(name, str) and name in PRESETS
        ops = PRESETS[name] if is_preset else frozenset([_parse_op(name)])
        numbers = None if numbered is None else set(map(int, numbered["numbers"].split(",")))
        names[str(entry)] = ops, numbers
        if numbers is None:
            all_calls |= ops
            continue
        for op in ops:
            some.setdefault(op, set()).update(numbers)
    return NamedOps(all_calls, some, names)


def _parse_op(op: Any) -> Op:
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = str(op)
    if isinstance(op, str):
        named: Any = torch.ops
        names = op.removeprefix("torch.ops.").split(".")
        try:
            for name in names:
                named = getattr(named, name)
            named = named.default if isinstance(named, torch._ops.OpOverloadPacket) else named
        except AttributeError:
            named = None
        if not isinstance(named, _OPS):  # another attribute of an op, such as __class__
            raise ConfigError(f"selective.save: {_unknown(op, names)}")
        return named
    if not isinstance(op, _OPS):
        raise ConfigError(
            f"selective.save: expected an OpOverload or its name, got {op!r} · fix: use torch.ops.aten.mm.default"
        )
    return op


def _unknown(op: str, names: list[str]) -> str:
    base = ".".join(names[:2])
    if "[" in op:
        return f"expected the numbers of calls in brackets, got {op!r} · fix: write {op.partition('[')[0]}[0,2]"
    names_of_ops = op_names()
    if base in names_of_ops:
        overloads = [f"{base}.{name}" for name in getattr(getattr(torch.ops, names[0]), names[1]).overloads()]
        return f"{base!r} has no such overload, got {op!r} · fix: use {', '.join(overloads[:8])}"
    hint = did_you_mean(base, names_of_ops) or did_you_mean(f"aten.{base}", names_of_ops)
    return f"expected an op or one of {', '.join(PRESETS)}, got {op!r}{hint} · fix: such as 'aten.mm.default'"


def _decision(policy: Any, context: Any, func: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    decision = policy(context, func, *args, **kwargs)
    if isinstance(decision, bool):
        return CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
    if decision in _OFFLOADS:
        raise ConfigError(
            f"selective.save: expected MUST_SAVE for {func}, got {decision} from the policy · "
            "fix: return MUST_SAVE and set `offload` on the block"
        )
    if not isinstance(decision, CheckpointPolicy):
        raise ConfigError(
            f"selective.save: expected a bool or CheckpointPolicy for {func}, got {decision!r} · fix: return one"
        )
    return decision
