"""What a call of a block holds for backward.

These are placeholders that the recomputation fills, tensors in a store, and the outputs of excluded children: children
of a recomputed block that are not recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn

from graphckpt._compat import WithoutValues, version_sharing_detach
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine.mismatch import modified_in_place, runs_backward
from graphckpt.errors import MutatedError, RecomputeError
from graphckpt.tree import build_value, flatten_call, flatten_value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphckpt.engine.block import BlockContext
    from graphckpt.engine.call_state import CallState, RNGState
    from graphckpt.stores.base import Store, TensorGroup


@final
class SameArgument:
    """Placeholder for an argument that is the same object as an earlier one."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class Call:
    """One call of a block, which holds tensors for backward."""

    __slots__ = ("__weakref__", "block", "devices", "group", "outer_hooks")

    block: BlockContext
    devices: tuple[torch.device, ...]
    """Whose RNG state the call may use, beside that of the CPU."""
    group: TensorGroup | None
    """The group of its tensors in the block's store."""
    outer_hooks: Any
    """The saved-tensor hooks around the call, which receive what it holds; ``None`` if the store does."""


@final
class SavedTensor:
    """A kept tensor: an argument, an output or op result, or what a block that is not recomputed saves.

    It passes through the hooks around the block, if there are any: within a block that is recomputed itself, it is not
    kept, but recomputed.

    Args:
        tensor: The tensor.
        call: The call that keeps it.
    """

    __slots__ = ("__weakref__", "_entry", "_requires_grad", "_store", "_unpack", "_version")

    def __init__(self, tensor: torch.Tensor, call: Call) -> None:
        block, outer_hooks = call.block, call.outer_hooks
        self._requires_grad = tensor.requires_grad
        self._store: Store | None = block.store if outer_hooks is None else None
        self._unpack: Any = None
        self._version: int | None = None
        recorder = block.recorder
        if outer_hooks is None:
            self._entry = block.store.put(tensor, call.group)
            if self.stays:  # other stores detect modifications themselves
                self._version = None if tensor.is_inference() else tensor._version
                if recorder is not None:
                    recorder.tensor_saved(block.name, tensor, self)
        else:
            pack, self._unpack = outer_hooks
            tensor = version_sharing_detach(tensor)  # one with history is saved by an op, which may fill another one
            if recorder is None:
                self._entry = pack(tensor)
            else:
                with recorder.passing_on():
                    self._entry = pack(tensor)

    @property
    def stays(self) -> bool:
        """Whether the tensor stays on its device."""
        return self._store is not None and isinstance(self._entry, torch.Tensor)

    def release(self, call: Call) -> None:
        """Drops the tensor, which :meth:`take` must not be called for any more."""
        recorder = call.block.recorder
        if recorder is not None and self._store is not None and isinstance(self._entry, torch.Tensor):
            recorder.released(self._entry, self)
        self._entry = None

    def take(self) -> torch.Tensor | None:
        """Returns the tensor without history; ``None`` if it was modified in place since."""
        tensor: torch.Tensor | None
        try:
            tensor = self._unpack(self._entry) if self._store is None else self._store.get(self._entry)
        except MutatedError:  # from a block around this one
            return None
        if tensor is None or (self._version is not None and tensor._version != self._version):
            return None
        return tensor.detach().requires_grad_() if self._requires_grad else tensor.detach()


@final
@dataclass(frozen=True, slots=True)
class SavedResult:
    """A kept result of an op."""

    leaves: list[Any]
    spec: Any
    """``None`` if it is one tensor."""
    versions: list[tuple[torch.Tensor, int]]
    random: RNGState | None  # after an op that draws random numbers, for the ops behind it

    def is_mutated(self) -> bool:
        return are_mutated(self.versions)

    def take(self) -> list[Any] | None:
        """Returns its leaves; ``None`` if one was modified in place."""
        if self.is_mutated():
            return None  # by code after the block: the op is recomputed
        leaves = [leaf.take() if isinstance(leaf, SavedTensor) else leaf for leaf in self.leaves]
        is_mutated = any(
            isinstance(leaf, SavedTensor) and value is None for leaf, value in zip(self.leaves, leaves, strict=True)
        )
        return None if is_mutated else leaves

    def release(self, call: Call) -> None:
        for leaf in self.leaves:
            if isinstance(leaf, SavedTensor):
                leaf.release(call)


def versions_of(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """Returns the tensors among ``leaves`` with their present versions; inference tensors have none."""
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def are_mutated(versions: Iterable[tuple[torch.Tensor, int]]) -> bool:
    return any(tensor._version != version for tensor, version in versions)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage of its own: wrappers, sparse and nested tensors have none."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")


def may_be_filled_later(tensor: torch.Tensor) -> bool:
    """Whether the op that saves ``tensor`` may write its values only after that, as ``rrelu`` does with its noise."""
    return (
        not tensor.requires_grad
        and type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and not tensor._version
        and not tensor._is_view()
    )


@final
class StoredCall(Call):
    """The saved-tensor hooks (``pack``, ``unpack``) of one call that is not recomputed."""

    __slots__ = ()

    def __init__(self, block: BlockContext) -> None:
        self.block, self.devices, self.group, self.outer_hooks = block, (), block.open_group(), None

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        """Hook for a tensor that autograd saves."""
        if self.block.has_rrelu and may_be_filled_later(tensor):
            return tensor
        return SavedTensor(tensor, self)

    @never_compiled
    def unpack(self, entry: SavedTensor | torch.Tensor) -> torch.Tensor:
        """Hook for a saved tensor that autograd needs.

        Raises:
            RecomputeError: The tensor was modified in place since.
        """
        if isinstance(entry, torch.Tensor):
            return entry
        tensor = entry.take()
        if tensor is None:
            raise MutatedError(modified_in_place(self.block.title, "a tensor that one of its ops saves"))
        return tensor

    def seal(self) -> None:
        """Is called at the end of the call."""
        self.block.store.close_group(self.group)


@never_compiled
def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # a node that holds its own output would never be freed


@never_compiled
def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


KEEP_ON_DEVICE = (_without_history, _same)
"""The hooks of a block whose saved tensors stay on the device whatever is around it."""


def _are_own(hooks: Any) -> bool:
    """Whether ``hooks`` are those of a block that is not recomputed, rather than the user's or a recomputed block's."""
    return hooks[1] is _same or getattr(hooks[1], "__func__", None) is StoredCall.unpack


def hooks_around(block: BlockContext, hooks: Any) -> Any:
    """Returns which of the active ``hooks`` what a block saves passes through; ``None`` if it goes to its store."""
    if block.recorder is not None:
        hooks = block.recorder.hooks_below(hooks)
    return None if block.is_placed and hooks is not None and _are_own(hooks) else hooks


class TensorKind(NamedTuple):
    """What a tensor has beside its values, so that one from a store can take its place."""

    cls: type[torch.Tensor]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """Returns that of ``tensor``. An ``AsyncCollectiveTensor`` is a plain tensor once waited on."""
        return cls(torch.Tensor if hasattr(tensor, "trigger_wait") else type(tensor), tensor.requires_grad)

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``, which has no history, as one of this kind.

        Raises:
            RecomputeError: A plain tensor cannot be made one of this class.
        """
        if type(tensor) is not self.cls and not hasattr(tensor, "trigger_wait"):
            if hasattr(self.cls, "__tensor_flatten__"):
                raise RecomputeError(
                    f"expected an argument of class {self.cls.__name__} for the recomputation, got a "
                    f"{type(tensor).__name__} from its store · fix: set offload = False on this block"
                )
            tensor = tensor.as_subclass(self.cls)
        return tensor.requires_grad_() if self.requires_grad else tensor


def has_attributes(tensor: Any) -> bool:
    """Whether a tensor carries Python attributes, beside the tensors that a wrapper such as a DTensor holds."""
    return bool(tensor.__dict__) and not hasattr(tensor, "__tensor_flatten__")


@final
class ExcludedCall:
    """One call of an excluded child: the recomputation takes its outputs from here, or repeats it.

    Args:
        block: The child.
        output: What it has returned.
        call: The call of the block around it.
        random: The RNG state after it.
        is_repeated: Whether the recomputation repeats the call, as it raised or has modified its arguments in place.
    """

    __slots__ = ("_block", "_handles", "_leaves", "_spec", "_versions", "is_repeated", "random")

    def __init__(
        self, block: BlockContext, output: Any, call: Call, random: RNGState, *, is_repeated: bool = False
    ) -> None:
        self._block = block
        self.random = random
        leaves, self._spec = flatten_value(output)
        self.is_repeated: bool = is_repeated or any(map(_is_special, leaves))
        if self.is_repeated:
            leaves = []
        self._handles = [_watch_node(leaf, call) for leaf in leaves if _has_history(leaf)]
        self._versions = [(tensor.detach(), version) for tensor, version in versions_of(leaves)]
        self._leaves = [_Output(leaf, call) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @property
    def name(self) -> str:
        return self._block.name

    @property
    def buffer_ids(self) -> set[int]:
        return self._block.state.buffer_ids()

    @property
    def parameter_ids(self) -> set[int]:
        return {id(tensor) for tensor in self._block.tensors() if isinstance(tensor, nn.Parameter)}

    def decide(self, call_state: CallState) -> None:
        """Decides whether the recomputation can take the outputs from here.

        It cannot where the parent has modified one in place, and where the child sets attributes of its modules, which
        the parent may read.
        """
        changed = call_state.changed
        if are_mutated(self._versions) or (changed and not changed.isdisjoint(self._block.state.attribute_ids())):
            self.repeat()

    def repeat(self) -> None:
        """Drops the outputs: the recomputation repeats the call."""
        self.is_repeated = True
        self._leaves = []

    def after_forward(self) -> None:
        """Drops what is needed only during the original forward."""
        self._versions = []
        while self._handles:
            self._handles.pop().remove()

    def answer(self) -> tuple[bool, Any]:
        """Returns ``(True, output)``, or ``(False, None)`` if the child has to be recomputed after all."""
        if self.is_repeated:
            return False, None
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, _Output):
                tensor = leaf.take()
                if tensor is None:
                    return False, None
                leaves.append(tensor)
            else:
                leaves.append(leaf)
        return True, build_value(self._spec, leaves)


@final
class _Output:
    """A tensor that an excluded child has returned."""

    __slots__ = ("_kind", "_saved")

    def __init__(self, tensor: torch.Tensor, call: Call) -> None:
        self._saved = SavedTensor(tensor, call)
        self._kind = TensorKind.of(tensor)

    def take(self) -> torch.Tensor | None:
        """Returns the tensor, with a history if it had one; ``None`` if it was modified in place since."""
        tensor = self._saved.take()
        return None if tensor is None else self._kind.apply_to(tensor.detach())


@final
class UnreadParameter(WithoutValues):
    """Stands for a parameter of an excluded child that was modified since: the recomputation must not read it."""

    message: str

    @classmethod
    def of(cls, parameter: torch.Tensor, message: str) -> UnreadParameter:
        """Returns one that raises a :class:`MutatedError` with ``message`` when an op reads it."""
        kind = parameter.size(), parameter.stride(), parameter.storage_offset(), parameter.dtype, parameter.device
        stand_in = cls.like(kind)
        stand_in.message = message
        return stand_in

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        leaves, _ = flatten_call(args, kwargs or {})
        raise MutatedError(next(leaf.message for leaf in leaves if isinstance(leaf, UnreadParameter)))


def unread_parameters(calls: Sequence[ExcludedCall]) -> frozenset[int]:
    """Returns the ids of the parameters of excluded children whose calls are not repeated."""
    return frozenset().union(*(call.parameter_ids for call in calls if not call.is_repeated))


def decide(calls: Sequence[ExcludedCall], call_state: CallState) -> None:
    """Decides which calls of excluded children a recomputation repeats.

    If it repeats one whose child has buffers, it repeats all of those: each must find the buffers as the ones before it
    have left them.
    """
    for call in calls:
        call.decide(call_state)
    if any(call.is_repeated and call.buffer_ids for call in calls):
        for call in calls:
            if call.buffer_ids:
                call.repeat()


def _is_special(leaf: Any) -> bool:
    """Whether code may depend on which object a tensor is: the recomputation gets another one."""
    return isinstance(leaf, torch.Tensor) and (isinstance(leaf, nn.Parameter) or has_attributes(leaf))


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _watch_node(tensor: torch.Tensor, call: Call) -> Any:
    """Refuses a backward within the forward of ``call`` that reaches the ``grad_fn`` of ``tensor``."""
    title = call.block.title

    def refuse(_: Any) -> None:
        raise RecomputeError(runs_backward(title))

    return tensor.grad_fn.register_prehook(refuse)  # type: ignore[union-attr]
