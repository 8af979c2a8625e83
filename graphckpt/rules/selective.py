"""Keeps a block's inputs and the results of chosen ops; backward runs the rest again and is handed those."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from graphckpt._compat import pytree, version_sharing_detach
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.rng import set_random_state, take_random_state
from graphckpt.rules.base import Rule
from graphckpt.rules.frame import Frame
from graphckpt.rules.kept import Kept
from graphckpt.state import edited_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphckpt.rng import RandomState
    from graphckpt.rules.site import Site

Op: TypeAlias = Any
"""A ``torch._ops.OpOverload`` such as ``torch.ops.aten.mm.default``."""


def _ops(*names: str) -> frozenset[Op]:
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(packet.default for packet in found if packet is not None)


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

_SAVES = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})
_OFFLOADS = frozenset({CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD})


@final
@dataclass(frozen=True)
class Selective(Rule):
    """Keeps the results of chosen ops beside the inputs.

    Args:
        save: ``"matmul"``, ``"attention"``, ``"matmul+attention"``; or a list of ops, each an ``OpOverload`` or its
            name, such as ``"aten.mm.default"``; or a policy ``(context, op, *args, **kwargs)`` that returns a bool or
            a ``CheckpointPolicy``, as for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Raises:
        ConfigError: There is no such preset or op.
    """

    name: ClassVar[str] = "selective"
    save: str | tuple[Any, ...] | list[Any] | Callable[..., Any] = "matmul+attention"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_policy", _policy(self.save))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selective, (self.save,)  # the policy made from `save` need not be picklable

    def run(self, site: Site, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block; backward will run it again, but for the chosen ops."""
        return Frame(site, function, OpMemory(self._policy)).run(args, kwargs)  # type: ignore[attr-defined]

    def describe(self) -> str:
        """Names the preset, the ops or the policy function."""
        if isinstance(self.save, str):
            return f"selective({self.save})"
        if callable(self.save):
            return f"selective({getattr(self.save, '__name__', 'policy')})"
        return f"selective({', '.join(str(op) for op in self.save)})"


@final
class OpMemory:
    """The kept op results of one call of a block."""

    def __init__(self, policy: Callable[..., bool]) -> None:
        self.policy = policy
        self.results: dict[Op, dict[int, _Result]] = defaultdict(dict)
        self.storages: dict[int, tuple[Op, int]] = {}  # id of a kept result's storage: which one it is
        self._modes: list[_Counting] = []

    def first_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that keeps the chosen results."""
        return self._in_force(_Keep(self, frame))

    def second_run(self, frame: Frame) -> AbstractContextManager[None]:
        """Returns the context that hands them back."""
        return self._in_force(_HandBack(self, frame))

    @contextmanager
    def _in_force(self, mode: _Counting) -> Iterator[None]:
        self._modes.append(mode)
        try:
            with mode:
                yield
        finally:
            self._modes.remove(mode)  # it holds this object: a cycle would keep what it keeps alive

    def forget_edited(self, func: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Forgets a kept result that ``func`` edits, also through a view that does not share its version counter.

        GRU edits what ``unsafe_chunk`` returns, which is such a view.
        """
        for tensor in edited_by(func, args, kwargs):
            func_and_number = self.storages.get(id(tensor.untyped_storage()))
            if func_and_number is not None:
                kept, number = func_and_number
                self.results[kept].pop(number, None)

    def settle(self, frame: Frame) -> None:
        """Forgets the results that the block edited in place after they were kept: those ops run again."""
        self.storages.clear()
        for results in self.results.values():
            for number, result in list(results.items()):
                if result.is_edited():
                    del results[number]
                elif frame.outer is not None or frame.group is not None:
                    result.versions.clear()  # what is around the block keeps it, or a store, and sees edits itself

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets ops run unseen by the modes that are in force now."""
        modes = [mode for mode in self._modes if not mode.is_paused]
        for mode in modes:
            mode.is_paused = True
        try:
            yield
        finally:
            for mode in modes:
                mode.is_paused = False


@dataclass(frozen=True, slots=True)
class _Result:
    leaves: list[Any]
    spec: Any
    versions: list[tuple[torch.Tensor, int]]
    random: RandomState | None  # after an op that draws: the second run must not lose its place in the stream

    def is_edited(self) -> bool:
        return any(tensor._version != version for tensor, version in self.versions)

    def take(self) -> list[Any] | None:
        if self.is_edited():
            return None  # by code after the block: the op runs again
        taken = [leaf.take() if isinstance(leaf, Kept) else leaf for leaf in self.leaves]
        edited = any(isinstance(leaf, Kept) and value is None for leaf, value in zip(self.leaves, taken, strict=True))
        return None if edited else taken


class _Counting(TorchDispatchMode):
    def __init__(self, memory: OpMemory, frame: Frame) -> None:
        super().__init__()
        self._memory = memory
        self._frame = frame
        self._calls: dict[Op, int] = defaultdict(int)
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or func is _DETACH:  # the hooks of the two runs detach unlike often
            return func(*args, **kwargs)
        number = self._calls[func]
        self._calls[func] = number + 1
        return self._call(func, number, args, kwargs)

    def _call(self, func: Op, number: int, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


@final
class _Keep(_Counting):
    def _call(self, func: Op, number: int, args: Any, kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        self._memory.forget_edited(func, args, kwargs)
        if _makes_new_tensors(func) and self._memory.policy(output, func, args, kwargs):
            frame = self._frame
            leaves, spec = pytree.tree_flatten(output)
            aliases = [version_sharing_detach(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            versions = [(x, x._version) for x in aliases if isinstance(x, torch.Tensor)]
            kept = [Kept(x, frame, frame.outer) if isinstance(x, torch.Tensor) else x for x in aliases]
            random = take_random_state(frame.devices) if torch.Tag.nondeterministic_seeded in func.tags else None
            for tensor, _ in versions:
                self._memory.storages[id(tensor.untyped_storage())] = (func, number)
            self._memory.results[func][number] = _Result(kept, spec, versions, random)
        return output


@final
class _HandBack(_Counting):
    def _call(self, func: Op, number: int, args: Any, kwargs: dict[str, Any]) -> Any:
        result = self._memory.results[func].get(number) if func in self._memory.results else None
        leaves = result.take() if result is not None else None
        if result is None or leaves is None:
            return func(*args, **kwargs)
        if result.random is not None:
            set_random_state(result.random)
        return pytree.tree_unflatten(leaves, result.spec)


_DETACH = torch.ops.aten.detach.default


def _makes_new_tensors(func: Op) -> bool:
    """Whether the op neither edits a tensor nor returns a view: those cost nothing to run again."""
    schema = getattr(func, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def _policy(save: Any) -> Callable[..., bool]:
    if isinstance(save, str) and save in PRESETS:
        ops = PRESETS[save]
    elif isinstance(save, (list, tuple, set, frozenset)):
        ops = frozenset(_op(op) for op in save)
    elif callable(save) and not isinstance(save, str):
        return lambda output, func, args, kwargs: _decides(save, output, func, args, kwargs)
    else:
        known = ", ".join(repr(name) for name in PRESETS)
        raise ConfigError(
            f"selective.save: there is no preset {save!r}{did_you_mean(str(save), PRESETS)} · "
            f"fix: use one of {known}, a list of ops, or a policy function"
        )
    return lambda _output, func, _args, _kwargs: func in ops


def _op(op: Any) -> Op:
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op.default
    if isinstance(op, str):
        packet: Any = torch.ops
        names = op.removeprefix("torch.ops.").split(".")
        try:
            for name in names:
                packet = getattr(packet, name)
        except AttributeError:
            packet = None
        if packet is None or len(names) < 2:
            raise ConfigError(f"selective.save: there is no op {op!r} · fix: write it as 'aten.mm.default'") from None
        return packet.default if isinstance(packet, torch._ops.OpOverloadPacket) else packet
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        raise ConfigError(
            f"selective.save: {op!r} is no op · fix: use an OpOverload such as torch.ops.aten.mm.default, or its name"
        )
    return op


def _decides(policy: Callable[..., Any], output: Any, func: Op, args: Any, kwargs: dict[str, Any]) -> bool:
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output  # an argument of its own only since torch 2.13
    decision = policy(context, func, *args, **kwargs)
    if isinstance(decision, bool):
        return decision
    if decision in _OFFLOADS:
        raise ConfigError(
            f"selective.save: the policy asks to offload the result of {func} · "
            "fix: return MUST_SAVE and set `offload` on the block"
        )
    if not isinstance(decision, CheckpointPolicy):
        raise ConfigError(
            f"selective.save: the policy returned {decision!r} for {func} · fix: return a bool or a CheckpointPolicy"
        )
    return decision in _SAVES
