"""Stores a call's arguments, the results of its ops and the outputs of excluded children for backward.

An argument that stays on the device and that forward does not modify in place is the same object in the recomputation.
Otherwise it is a new leaf with the same class and ``requires_grad``. One that forward modifies in place is kept as a
copy: the first call of a block, for which every tensor is copied, shows which ones these are. One that the joined block
right before returns is not kept: the recomputation of that block returns it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn

from graphckpt._compat import (
    is_fake,
    is_torch_checkpoint,
    own_attributes_of_fakes,
    shape_of,
    share_version_counter,
    version_sharing_detach,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt.engine import mismatch
from graphckpt.engine.call_state import CallState, ModuleState, has_changed
from graphckpt.engine.clones import has_strided_values, is_sparse_in_memory, num_spanned, with_strides
from graphckpt.engine.execution import may_be_filled_later
from graphckpt.engine.objects import (
    Objects,
    attribute_of,
    changed_tensors,
    copy_objects,
    items_of,
    swap,
    with_stand_ins,
    without_tensors,
)
from graphckpt.errors import MutatedError, RecomputeError
from graphckpt.stores.base import KEEP_ON_DEVICE, without_records
from graphckpt.tree import ATOMS, flatten_call, tensors_in
from graphckpt.undo import Undo

if TYPE_CHECKING:
    from graphckpt.engine.block import BlockContext
    from graphckpt.stores.base import TensorGroup

_NOTHING = nullcontext()
_NO_STRIDES: Mapping[int, tuple[int, ...]] = {}
# A copy has the strides of its original, gaps included, if these span at most so many times its own elements. A column
# of a large tensor would take the memory of all: its copy is dense.
_MOST_SPANNED = 8


class Call:
    """One call of a block, which holds tensors for backward."""

    __slots__ = ()

    block: BlockContext
    group: TensorGroup | None
    """The group of its tensors in the block's store."""
    outer_hooks: Any
    """The saved-tensor hooks around the call, which receive what it holds; ``None`` if the store does."""


class SavedTensor:
    """A tensor that a call holds for backward; :func:`save_tensor` makes one of three kinds."""

    # kind             what it holds                   who sees that it was modified   which tensors
    # ArgumentItself   the tensor                      this, by its version            arguments on the device
    # SavedAlias       a tensor without history        this, by its version            other tensors on the device
    # SavedElsewhere   a handle of the store           the store, which has a copy     where the block has a store
    #                  what the hooks around returned  these hooks                     where there are hooks around

    __slots__ = ("__weakref__", "_cls", "_entry", "_requires_grad")

    def __init__(self, entry: Any, cls: type[torch.Tensor] | None, *, requires_grad: bool) -> None:
        self._entry, self._cls, self._requires_grad = entry, cls, requires_grad

    def take(self) -> torch.Tensor | None:
        """Returns the tensor without history; ``None`` if it was modified in place since."""
        try:
            tensor = self._read()
        except MutatedError:  # from a block around this one
            return None
        return None if tensor is None else _leaf(tensor, self._cls, requires_grad=self._requires_grad)

    def _read(self) -> torch.Tensor | None:
        """Returns the tensor as it is held; ``None`` if it was modified in place since."""
        raise NotImplementedError

    def release(self, call: Call) -> None:
        """Drops the tensor, which :meth:`take` must not be called for any more."""
        del call
        self._entry = None


class SavedAlias(SavedTensor):
    """A tensor on its device, without history: the tensor's own graph must not be held by what it feeds."""

    __slots__ = ("_version",)

    def __init__(self, tensor: torch.Tensor, cls: type[torch.Tensor] | None, *, requires_grad: bool) -> None:
        # Not by `super`: there is one for nearly every argument, and each call takes 80 ns.
        self._entry, self._cls, self._requires_grad = tensor, cls, requires_grad
        self._version = None if tensor.is_inference() else tensor._version

    def _read(self) -> torch.Tensor | None:
        tensor: torch.Tensor | None = self._entry
        return tensor if tensor is None or self._version is None or tensor._version == self._version else None

    def release(self, call: Call) -> None:
        if call.block.recorder is not None and self._entry is not None:
            call.block.recorder.released(self._entry, self)
        super().release(call)


@final
class ArgumentItself(SavedAlias):
    """An argument on its device, of which the recomputation receives the same object.

    It is held with its history, which leads to earlier blocks and not to this call: no cycle, unlike a result's.
    """

    __slots__ = ()

    def take(self) -> torch.Tensor | None:
        # The caller may have switched `requires_grad` since.
        if self._entry is not None and self._entry.requires_grad is self._requires_grad:
            return self._read()
        return super().take()


@final
class SavedElsewhere(SavedTensor):
    """A tensor in the store of its block, or with the hooks around the call, which for a recomputed block recompute it.

    ``get`` returns it, given the handle or what the hooks returned.
    """

    __slots__ = ("_get",)

    def __init__(
        self,
        entry: Any,
        get: Callable[[Any], torch.Tensor | None],
        cls: type[torch.Tensor] | None,
        *,
        requires_grad: bool,
    ) -> None:
        super().__init__(entry, cls, requires_grad=requires_grad)
        self._get = get

    def _read(self) -> torch.Tensor | None:
        return self._get(self._entry)


def save_tensor(
    tensor: torch.Tensor,
    call: Call,
    cls: type[torch.Tensor] | None = None,
    *,
    is_argument: bool = False,
    copied: torch.Tensor | None = None,
) -> SavedTensor:
    """Saves an argument, an output or op result, or what a block that is not recomputed saves.

    Inside another recomputed block it goes to that block's hooks, which recompute it.

    Args:
        tensor: The tensor.
        call: The call that keeps it.
        cls: The class of the tensor that is returned; ``None`` for the class as which it is stored.
        is_argument: Whether it is an argument: if it stays on the device, the recomputation receives the same object.
        copied: A copy of an argument to keep in its place, where forward modifies it in place or may do so.
    """
    block, outer_hooks = call.block, call.outer_hooks
    value = tensor if copied is None else copied
    requires_grad = tensor.requires_grad
    # A parameter stays on its device, where its module holds it anyway. A tensor with Python attributes stays too:
    # neither a store nor hooks would return them.
    stays = is_argument and (
        (outer_hooks is None and block.keeps_on_device) or isinstance(tensor, nn.Parameter) or has_attributes(tensor)
    )
    recorder = block.recorder
    if outer_hooks is not None and not stays:
        pack, unpack = outer_hooks
        # With history, it would look to a recomputation around like the input of `rrelu`, which must not stop it.
        value = version_sharing_detach(value)
        with _NOTHING if recorder is None else recorder.passing_on():
            entry = pack(value)
        return SavedElsewhere(entry, unpack, cls, requires_grad=requires_grad)
    entry = value if stays else block.store.put(value, call.group)
    if not isinstance(entry, torch.Tensor):
        return SavedElsewhere(entry, block.store.get, cls, requires_grad=requires_grad)
    # An argument is held as it is: the store on the device has returned an alias without its history.
    kind = ArgumentItself if is_argument and copied is None else SavedAlias
    saved = kind(value if is_argument else entry, cls, requires_grad=requires_grad)
    if outer_hooks is None and recorder is not None:
        recorder.tensor_saved(block.name, value, saved)
    return saved


def _leaf(tensor: torch.Tensor, cls: type[torch.Tensor] | None, *, requires_grad: bool) -> torch.Tensor:
    tensor = tensor.detach()
    # An AsyncCollectiveTensor, which alone has `trigger_wait`, is a wrapper: as a plain tensor it would have no memory.
    if cls is not None and type(tensor) is not cls and not hasattr(tensor, "trigger_wait"):
        if hasattr(cls, "__tensor_flatten__"):
            raise RecomputeError(
                f"expected an argument of class {cls.__name__} for the recomputation, got a "
                f"{type(tensor).__name__} from its store · fix: set offload = False on this block"
            )
        tensor = tensor.as_subclass(cls)
    return tensor.requires_grad_() if requires_grad else tensor


def take_all(entries: Iterable[Any]) -> list[Any] | None:
    """Returns ``entries`` with the tensors of those that are saved; ``None`` if one was modified in place since."""
    values = []
    for entry in entries:
        value = entry.take() if isinstance(entry, SavedTensor) else entry
        if value is None and entry is not None:
            return None
        values.append(value)
    return values


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Returns the class of ``tensor`` in a recomputation: an ``AsyncCollectiveTensor`` is plain once waited on."""
    cls = type(tensor)
    return torch.Tensor if cls is not torch.Tensor and hasattr(tensor, "trigger_wait") else cls


def versions_of(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def are_mutated(versions: Iterable[tuple[torch.Tensor, int]]) -> bool:
    return any(tensor._version != version for tensor, version in versions)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has exactly one storage: wrappers, sparse and nested tensors have none."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")


def has_attributes(tensor: Any) -> bool:
    """Whether a tensor carries Python attributes, beside the tensors that a wrapper such as a DTensor holds."""
    attributes = tensor.__dict__
    if not attributes or hasattr(tensor, "__tensor_flatten__"):
        return False
    return not is_fake(tensor) or not attributes.keys() <= own_attributes_of_fakes()


@final
class StoredCall(Call):
    """The saved-tensor hooks (``pack``, ``unpack``) of one call that is not recomputed."""

    __slots__ = ("block", "group", "outer_hooks")

    def __init__(self, block: BlockContext) -> None:
        self.block, self.group, self.outer_hooks = block, block.open_group(), None

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        # A store would copy the noise of `rrelu` before it is written.
        if self.block.has_rrelu and may_be_filled_later(tensor):
            return tensor
        return save_tensor(tensor, self)

    @never_compiled
    def unpack(self, entry: SavedTensor | torch.Tensor) -> torch.Tensor:
        if isinstance(entry, torch.Tensor):
            return entry
        tensor = entry.take()
        if tensor is None:
            raise MutatedError(mismatch.modified_in_place(self.block.title, "a tensor that one of its ops saves"))
        return tensor


def hooks_around(block: BlockContext, hooks: Any) -> Any:
    """Returns the hooks that receive what a block saves, given the active ``hooks``; ``None`` if its store does.

    A placed block uses its store in spite of the hooks of a block that is not recomputed. The hooks of the user and of
    a recomputed block come first.
    """
    if block.recorder is not None:
        hooks = without_records(hooks)
    if is_torch_checkpoint(hooks):
        block.note("PyTorch's checkpoint is around it and recomputes it as well · fix: use one of the two")
    if hooks is None or not block.is_placed:
        return hooks
    # A bound method is a new object at each access, so that it is compared by its function.
    is_kept_around = hooks[1] is KEEP_ON_DEVICE[1] or getattr(hooks[1], "__func__", None) is StoredCall.unpack
    return None if is_kept_around else hooks


@final
class BlockOutput:
    """The tensors that a recomputed block has returned. It keeps neither them nor the call alive."""

    # `last_output` would hold the last block of a step, and its graph, until the next step.

    __slots__ = ("_tensors", "call")

    def __init__(self, call: Call, output: Any) -> None:
        self.call = weakref.ref(call)
        self._tensors = [(weakref.ref(t), None if t.is_inference() else t._version) for t in tensors_in(output)]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the position of ``tensor`` among them, or ``None`` if it is not there or was modified since."""
        if self.call() is None or tensor.is_inference():
            return None
        for number, (ref, version) in enumerate(self._tensors):
            if ref() is tensor:
                return number if tensor._version == version else None
        return None


last_output: ContextVar[BlockOutput | None] = ContextVar("last_output", default=None)

joined_blocks = SimpleNamespace(may_exist=False)
"""Whether outputs are noted in ``last_output``, which takes 4 us a block: only a joined block asks for it."""


class _JoinedInput(NamedTuple):
    """An argument that is not kept: the recomputation of the block before returns it."""

    number: int
    kind: tuple[torch.dtype, torch.Size]
    cls: type[torch.Tensor]
    requires_grad: bool

    def of(self, block: str, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        kinds = [(tensor.dtype, shape_of(tensor)) for tensor in outputs]
        if kinds[self.number : self.number + 1] != [self.kind]:
            raise RecomputeError(mismatch.returns_differ(block, self.number, self.kind, kinds))
        return _leaf(outputs[self.number], self.cls, requires_grad=self.requires_grad)


class _OriginalArgument(NamedTuple):
    position: int
    tensor: torch.Tensor
    version: int | None  # inference tensors have none
    copied: torch.Tensor | None


def _has_new_values(original: _OriginalArgument) -> bool:
    """Whether forward has modified an argument that may be the running statistics of a batch norm.

    The kernel writes them without a version bump, so that only their values show it.
    """
    tensor, copied = original.tensor, original.copied
    if type(tensor) is not torch.Tensor or copied is None or tensor.requires_grad or tensor.dim() != 1:
        return False
    if not (tensor.is_floating_point() and has_strided_values(tensor)):
        return False
    return not torch.allclose(tensor, copied, rtol=0, atol=0, equal_nan=True)


# Note [Timeline of arguments]
#
#                 first call in a mode (`learning`)         later calls
# keep            copies every tensor, and keeps none       keeps each tensor; copies those that an earlier call
#                                                           has modified in place
# forward         runs on the caller's own tensors: outputs must have their history, and in-place ops must reach them
# after_forward   learns which ones were modified: keeps    refuses a tensor that is modified for the first time:
#                 the copies of those, else the tensors     no copy of it exists
# take            in backward: reloads each and checks its version; clones those that forward modifies
# assemble        puts in place what objects held at the call, and returns `(args, kwargs)`
#
# `leaves` follows this: the caller's tensors at first, then a SavedTensor or a _JoinedInput for each. Other values stay
# as they are. A repeated tensor is `None` at its later positions, and `_first_of` names the first one.


@final
class Arguments:
    """The arguments of one call: see Note [Timeline of arguments]."""

    __slots__ = (
        "_changed", "_error", "_first_of", "_function", "_mutated", "_objects", "_originals", "_shape", "_strides",
        "before", "leaves",
    )  # fmt: skip

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], function: Callable[..., Any]) -> None:
        self.leaves, self._shape = flatten_call(args, kwargs)
        self._function = function
        self._originals: Sequence[_OriginalArgument] = ()
        # Of each repeated tensor, the first position: `attention(x, x, x)` takes another path than three equal tensors.
        self._first_of: dict[int, int] = {}
        self._objects: Objects = []
        self._changed: list[torch.Tensor] = []  # those in containers and objects that forward modified in place
        self._error: str | None = None
        self._mutated: frozenset[int] = frozenset()  # positions of the tensors that forward modifies in place
        self._strides = _NO_STRIDES  # by position: of those that are copied, and whose copies are denser
        self.before: Call | None = None
        """The call of the recomputed block right before, if the two are recomputed as one."""

    def name(self, position: int) -> str:
        return self._shape.name(position, self._function)

    def keep(self, call: Call, previous: BlockOutput | None, *, learning: bool) -> None:
        leaves = self.leaves
        first_of: dict[int, int] = {}
        originals: list[_OriginalArgument] = []
        has_objects = False
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                first = first_of.setdefault(id(leaf), position)
                if first == position:  # each tensor is kept once: the recomputation passes one object again
                    # In a first call any may turn out to be modified, and only a copy from before can tell what it
                    # was: until `after_forward`, this call takes its inputs twice.
                    is_copied = learning or position in call.block.mutated
                    copied = leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_copied else None
                    if is_copied and is_sparse_in_memory(leaf) and num_spanned(leaf) <= _MOST_SPANNED * leaf.numel():
                        self._strides = {**self._strides, position: leaf.stride()}
                    version = None if leaf.is_inference() else leaf._version
                    originals.append(_OriginalArgument(position, leaf, version, copied))
                else:
                    self._first_of[position] = first
            elif type(leaf) not in ATOMS:
                if hasattr(leaf.__class__, "__next__"):  # not `type`: that of a weak proxy has it
                    raise RecomputeError(
                        f"{call.block.title}: argument `{self.name(position)}` is an iterator, which the recomputation "
                        "would find exhausted · fix: pass a list"
                    )
                has_objects = True
        if has_objects:
            self._objects = copy_objects(leaves)
        self._originals, self._mutated = originals, call.block.mutated
        if not learning or call.outer_hooks is not None:
            # Otherwise `after_forward` keeps them, when it knows which ones forward modifies. Not with outer hooks: the
            # block around counts what passes through them, so that its original forward and its recomputation, in which
            # this may be a later call, must pass the same tensors in the same order.
            for each in originals:
                leaves[each.position] = self._keep(call, each, each.copied, previous)
        for position in self._first_of:
            leaves[position] = None

    def after_forward(
        self,
        call: Call,
        state: ModuleState,
        call_state: CallState,
        previous: BlockOutput | None,
        *,
        learning: bool,
        is_guarded: bool,
    ) -> None:
        """Drops what the recomputation does not need, after the original forward.

        A tensor that only a container or an object holds cannot be restored: a forward that modifies it in place
        cannot be recomputed, unless it is guarded by ``is_recomputing()``.

        Raises:
            RecomputeError: Forward modified an argument in place that earlier calls left alone, or that shares memory
                with another argument or a buffer.
        """
        originals, self._originals = self._originals, ()
        changed = changed_tensors(self._objects) if self._objects else []
        if changed:
            self._objects = without_tensors(self._objects, changed)
        if self._objects and call.block.recorder is not None:
            self._record_objects(call)
        mutated = frozenset(
            [each.position for each in originals if each.version is not None and each.tensor._version != each.version]
        )
        if learning:
            mutated |= {each.position for each in originals if _has_new_values(each)}
            call.block.mutated = self._mutated = mutated | call.block.mutated
        if mutated or learning:
            names = self._shared_memory(state, call_state, originals)
            message = self._refusal(call.block.title, names, mutated - self._mutated)
            if message is not None:
                self.drop(message)
                raise RecomputeError(message)
        if learning:
            self._keep_all(call, originals, previous)
        self._changed = changed = [*changed, *call_state.changed_tensors]
        # What shares its version counter with an argument or a buffer is a view of it, and of these a copy exists, or
        # an error was raised above. Other memory cannot be restored; `take` raises, as only backward needs it.
        if changed and not is_guarded:
            restorable = [t for t in chain(call_state.tensors, (each.tensor for each in originals)) if t is not None]
            restorable = [tensor for tensor in restorable if not tensor.is_inference()]
            if not all(any(share_version_counter(tensor, each) for each in restorable) for tensor in self._changed):
                self.drop(mismatch.modifies_held_tensor(call.block.title))

    def _refusal(self, title: str, sharing: list[str] | None, unexpected: frozenset[int]) -> str | None:
        """Says why a call whose forward has modified arguments cannot be recomputed; ``None`` if it can.

        ``sharing`` are two names of the same memory, ``unexpected`` the positions of arguments without a copy.
        """
        if sharing is not None:
            names = " or ".join(f"`{name}`" for name in sharing)
            return (
                f"{title}: forward modified {names} in place, which share memory; the recomputation cannot "
                "restore both · fix: pass a clone"
            )
        return mismatch.mutates_argument(title, self.name(min(unexpected))) if unexpected else None

    def _keep_all(self, call: Call, originals: Iterable[_OriginalArgument], previous: BlockOutput | None) -> None:
        """Keeps the arguments of a first call, once it is known which of them forward modifies."""
        for each in originals:
            # What was passed on stays with the hooks around, which must receive the same in every call.
            if not isinstance(self.leaves[each.position], SavedElsewhere):
                copied = each.copied if each.position in self._mutated else None
                self.leaves[each.position] = self._keep(call, each, copied, previous)

    def _record_objects(self, call: Call) -> None:
        """Counts the tensors that objects among the arguments hold: those before the call, and those after it."""
        recorder = call.block.recorder
        assert recorder is not None
        recorder.state_kept(call.block.name, self.held_tensors(), call)
        objects = [x for x in self.leaves if attribute_of(x, "__dict__") and not isinstance(x, torch.Tensor)]
        items = chain.from_iterable(items_of(owner, content) for owner, content in copy_objects(objects))
        recorder.objects_kept(call.block.name, objects, (item for item in items if isinstance(item, torch.Tensor)))

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors in containers and objects among the arguments."""
        return (owner for owner, _ in self._objects if isinstance(owner, torch.Tensor))

    def drop(self, error: str) -> None:
        """Drops all tensors after an error, which :meth:`take` raises from now on.

        The ``grad_fn`` of a tensor that was modified in place would make a reference cycle.
        """
        self.leaves, self._originals, self._objects, self._changed = [], (), [], []
        self._error = error

    def take(
        self, call: Call, outputs_before: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[tuple[int | None, torch.Tensor, int]]]:
        """Returns the leaves for the recomputation; :meth:`assemble` makes arguments of them.

        Beside them it returns the tensors that the recomputation must not modify: their positions, if they are leaves,
        and versions. ``outputs_before`` is what the recomputation of the block before has returned.
        """
        if self._error is not None:
            raise RecomputeError(self._error)
        leaves = self.leaves.copy()
        versions: list[tuple[int | None, torch.Tensor, int]] = []
        for position, entry in enumerate(leaves):
            if isinstance(entry, SavedTensor):
                leaf = entry.take()
                if leaf is None:
                    what = f"its argument `{self.name(position)}`"
                    raise RecomputeError(mismatch.modified_in_place(call.block.title, what))
                if position in self._mutated:
                    with torch.enable_grad():  # autograd forbids in-place ops on a leaf that requires grad
                        leaf = leaf.clone()
                        # A sum of a slice is rounded otherwise than one of its dense clone, and forward may ask for
                        # strides.
                        if position in self._strides:
                            leaf = with_strides(leaf, self._strides[position])
            elif isinstance(entry, _JoinedInput):
                leaf = entry.of(self.before.block.title if self.before else "", outputs_before)
            else:
                continue
            leaves[position] = leaf
            # The recomputation may take another branch than forward has, and modify a tensor that that left alone.
            if position not in self._mutated and not leaf.is_inference():
                versions.append((position, leaf, leaf._version))
        for position, first in self._first_of.items():
            leaves[position] = leaves[first]
        if self._changed:
            versions += [(None, tensor, tensor._version) for tensor in self._changed]
        return leaves, versions

    def assemble(
        self, leaves: list[Any], stand_in: Callable[[torch.Tensor], Any], undo: Undo
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns ``(args, kwargs)``, once the modules are in the state of the original forward.

        Objects among the arguments hold what they held then; see :func:`with_stand_ins`.
        """
        if self._objects:
            swap(with_stand_ins(self._objects, stand_in), undo)
        return self._shape.assemble(leaves)

    def _keep(
        self, call: Call, original: _OriginalArgument, copied: torch.Tensor | None, previous: BlockOutput | None
    ) -> SavedTensor | _JoinedInput:
        tensor = original.tensor
        cls = torch.Tensor if type(tensor) is torch.Tensor else class_of(tensor)
        number = None if previous is None or copied is not None else previous.number_of(tensor)
        if previous is None or number is None:
            return save_tensor(tensor, call, cls, is_argument=True, copied=copied)
        self.before = previous.call()
        return _JoinedInput(number, (tensor.dtype, shape_of(tensor)), cls, tensor.requires_grad)

    def _shared_memory(
        self, state: ModuleState, call_state: CallState, originals: Sequence[_OriginalArgument]
    ) -> list[str] | None:
        """Returns the names of two that share memory, arguments or buffers, if forward has modified one in place."""
        # Views of one storage count as sharing although they may not overlap: to tell these apart would take strides.
        owners: dict[int, list[int]] = {}
        mutated: set[int] = set()
        for each in originals:
            if has_storage(each.tensor):
                storage_id = id(each.tensor.untyped_storage())
                owners.setdefault(storage_id, []).append(each.position)
                mutated |= {storage_id} if each.position in self._mutated else set()
        for index in call_state.copies:
            buffer = call_state.tensors[index]
            positions = owners.get(id(buffer.untyped_storage())) if has_storage(buffer) else None
            # Compared last: that waits for an accelerator, which a capture forbids.
            if positions is not None and has_changed(call_state, index):
                return [self.name(positions[0]), state.name(index, call_state)]
        several = next((owners[storage] for storage in mutated if len(owners[storage]) > 1), None)
        return None if several is None else list(map(self.name, several))
