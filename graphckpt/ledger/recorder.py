"""Records one step: which storages each block would save, which it saves, how often and how long it runs."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias, final

import torch

from graphckpt._compat import (
    active_saved_tensor_hooks,
    current_backward,
    is_transformed,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from graphckpt._compat_compiler import never_compiled
from graphckpt._compat_memory import resizes_reported_to
from graphckpt.ledger.live_memory import StorageLog, when_gone
from graphckpt.stores import Traffic
from graphckpt.stores.base import KEEP_ON_DEVICE, TIERS, RecordUnpack, Total
from graphckpt.tree import storages_of
from graphckpt.undo import Undo, enter, put_back, scope

Pack: TypeAlias = Callable[[torch.Tensor], Any]
Unpack: TypeAlias = Callable[[Any], torch.Tensor]

REST = "(outside of blocks)"
"""The row for tensors saved while no block of the table runs."""


# Note [Counts of one step]
#
#     plain_total   saved for backward by the plain step    `_plain` adds to it, by block: "before" in the table
#     totals        saved for backward by this step         by tier: `_saved` adds what stays on the device,
#                                                           `traffic` what stores hold: "after" and "offloaded"
#     live          all storages that are alive             the peak, the timeline and the plot
#     live's        the same, if some blocks kept all       `levels_if_kept`: the predicted peak without policies
#
# The first two count a storage once, from its first owner to its last: the objects that autograd or a block holds in
# its place. Only original forwards count: what a recomputation saves is freed by the same backward.
#
# An example: two layers `tanh(x @ w)` of 256 KiB tensors, of which layers.0 is recomputed. Both save their result, and
# layers.1 its input as well, which is the result of layers.0:
#
#                before    after
#     layers.0   256 KiB     0 B   its input is the step's own, which is alive anyway
#     layers.1   256 KiB 512 KiB   now the first to save the result of layers.0
#     total      512 KiB 512 KiB   so that nothing is won, which only the total shows

#
# Note [Events of one step]
# Of h.0, which is recomputed, h.1, which keeps all, and a head without a policy, in a step of AdamW:
#
#     event                             phase and block from then on
#     original_forward_began, _ended    forward of h.0, then of no block
#     the same                          forward of h.1, then of no block
#     enter_plain, leave_plain          forward of head, then of no block
#     backward_reads(""), ("head")      backward of no block, which is the loss, then of head, as what it saved is read
#     backward_reads("h.1")             backward of h.1
#     backward_reads("h.0")             backward of h.0, which needs what it has not kept
#     recomputation_began, _ended       recompute of h.0, then backward of h.0 again
#     optimizer_steps                   optimizer
#
# So a backward begins where the first tensor of a block is read, and nothing says where it ends: gradients that come
# between two blocks are in the backward of the one whose tensors were read last.


@final
class Recorder:
    """Receives events from the rules during one step.

    A storage counts once, for the block that saves it first. Storages of ``alive_anyway`` (parameters, buffers, the
    step's inputs) are not counted: no policy could free them. See Note [Counts of one step].
    """

    def __init__(self, alive_anyway: Iterable[torch.Tensor] = (), live: StorageLog | None = None) -> None:
        self.totals = {tier: Total() for tier in TIERS}
        """The bytes that the step saves at each tier."""
        self.plain_total = Total()
        """The bytes that the plain step saves."""
        self.traffic: defaultdict[str, Traffic] = defaultdict(lambda: Traffic(self.totals))
        self.runs: Counter[str] = Counter()
        self.reruns: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.recompute_seconds: defaultdict[str, float] = defaultdict(float)
        self.order: dict[str, None] = {}
        self._ignored: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._plain = SavedBytes(self.plain_total, self._ignored)
        self._saved = SavedBytes(self.totals["device"], self._ignored)
        self.live = live
        """The log of live bytes, if they are counted."""
        self.has_optimizer_states = True
        """Whether the states of all optimizers existed before the step."""
        self._running: list[tuple[str, float]] = []  # blocks whose forward or recomputation runs, and since when
        self._recompute_depth = 0
        self._is_passing_on = False
        self._outer: Any = None  # the hooks around those of this recorder
        self._suspension: Undo = []  # ends what `begin` has begun beside its hooks
        self._own: list[str] = []  # the part of `own_checkpointing` that is being recomputed
        self.own_checkpointing: set[str] = set()
        """Modules that the model's gradient checkpointing recomputes."""
        self.weightless: set[str] = set()
        """Modules without weights, as those of other pipeline stages may be."""
        self.ignore(alive_anyway)

    def ignore(self, alive_anyway: Iterable[torch.Tensor]) -> None:
        self._ignored.update(storage for tensor in alive_anyway for storage in storages_of(tensor))

    def bytes_before(self, block: str) -> int:
        return self._plain.of_block(block)

    def bytes_after(self, block: str) -> int:
        """Returns the bytes that a block saves on its device, stored or not, when the step saves most there."""
        stored = self.traffic[block].bytes_at["device"] if block in self.traffic else 0
        return self._saved.of_block(block) + stored

    @scope
    def watching(self, undo: Undo) -> Iterator[None]:
        undo.append((self.end, ()))
        self.begin()
        with self.live or nullcontext():
            yield

    def begin(self) -> None:
        self._outer = active_saved_tensor_hooks()
        # Only the innermost pair of hooks acts in PyTorch: these are for tensors saved outside of blocks, and pass them
        # on to the pair that was active, such as `save_on_cpu`.
        hooks = self._save_plainly, _PlainUnpack(self, self._outer)
        push_saved_tensor_hooks(*hooks)
        enter(self._suspension, _suspended_in_transforms(*hooks))
        for saved in (self._plain, self._saved):
            enter(self._suspension, resizes_reported_to(saved.resized))

    def end(self) -> None:
        """Removes the hooks of :meth:`begin`, if they are still installed."""
        put_back(self._suspension)
        hooks = active_saved_tensor_hooks()
        if hooks is not None and hooks[0] == self._save_plainly:
            pop_saved_tensor_hooks()

    def phase(self, name: str, block: str = "") -> None:
        if self.live is not None:
            self.live.phase = name
            self.live.block = block

    def optimizer_steps(self, state: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        """Begins an optimizer step of ``weights``; its state was alive before."""
        if self.live is not None:
            tensors = list(state)
            self.live.track_as_old(tensors)
            self.live.label(tensors, "optimizer states")
            self.live.label((weight.grad for weight in weights), "gradients")
        self.phase("optimizer")

    def original_forward_began(
        self, block: str, pack: Pack, unpack: Unpack, *, is_kept: bool = False, is_stored: bool = False
    ) -> tuple[Pack, Unpack]:
        """Begins a block's original forward.

        Returns the hooks: ``pack`` also counts what the plain step would save, ``unpack`` begins the block's backward.
        What ``is_kept`` is counted as saved too, unless it ``is_stored``: the store counts it.
        """
        if self._recompute_depth:
            return pack, unpack
        self._enter(block)

        @never_compiled
        def look_and_pack(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if is_kept or not self._is_passing_on:
                self._plain.add(block if is_kept else self._running[-1][0], tensor, packed)
                is_saved = is_kept and not is_stored
                if is_saved:
                    self._saved.add(block, tensor, packed)
                if self.live is not None:
                    self.live.hold(tensor, None if is_kept else block, packed, saved_by=block if is_saved else None)
            return packed

        return look_and_pack, _AttributedUnpack(self, block, look_and_pack, unpack)

    def original_forward_ended(self, block: str, arguments: Iterable[torch.Tensor] = ()) -> None:
        """Ends a block's original forward, for which its caller has held ``arguments``."""
        if not self._recompute_depth:
            self._leave(block)
            if self.live is not None:
                self.live.use(arguments)

    def tensor_saved(self, block: str, tensor: torch.Tensor, owner: object) -> None:
        if not self._recompute_depth:
            self._saved.add(block, tensor, owner)
            if self.live is not None:
                self.live.hold(tensor, block, owner, is_kept=True, saved_by=block)

    def state_kept(self, block: str, tensors: Iterable[torch.Tensor], owner: object) -> None:
        """Notes that a block keeps the tensors that its modules held before its forward, while ``owner`` is alive."""
        if self.live is not None and not self._recompute_depth:
            for tensor in tensors:
                self.live.hold(tensor, block, owner, is_kept=True, ends_early=True)

    def objects_kept(self, block: str, values: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        """Notes that a block keeps objects among its arguments, which reach ``tensors`` after its forward."""
        if self.live is not None and not self._recompute_depth:
            self.live.keep_objects(values, tensors, block)

    def released(self, tensor: torch.Tensor, owner: object) -> None:
        if not self._recompute_depth:
            self._saved.remove(tensor, owner)

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Marks tensors packed within it as saved by a rule, not by an op."""
        self._is_passing_on = True
        try:
            yield
        finally:
            self._is_passing_on = False

    def backward_reads(self, block: str) -> None:
        """Begins the backward of a block, or goes on with it: autograd needs a tensor that it has saved."""
        if not self._recompute_depth:
            self.phase("backward", block)

    def recomputation_began(self, block: str) -> None:
        self._recompute_depth += 1
        self.reruns[block] += 1
        self.phase("recompute", block)
        if self.live is not None and self._recompute_depth == 1:
            self.live.recomputed = block
        self._running.append((block, _now()))

    def recomputation_ended(self, block: str) -> None:
        self._recompute_depth -= 1
        _, begin = self._running.pop()
        self.recompute_seconds[block] += _now() - begin
        if self.live is not None and not self._recompute_depth:
            self.live.recomputed = None
        self.phase(
            "recompute" if self._recompute_depth else "backward",
            self._running[-1][0] if self._recompute_depth else block,
        )

    def copies_for(self, block: str | None) -> None:
        """Marks results of ops, until ``None``, as copies for a block's recomputation, which the plain step lacks."""
        if self.live is not None:
            self.live.copied = block

    def _enter(self, block: str) -> None:
        self.order.setdefault(block)
        self.runs[block] += not self._is_part_of(block)
        self.phase("forward", block)
        self._running.append((block, _now()))

    def _leave(self, block: str) -> None:
        _, begin = self._running.pop()
        if not self._is_part_of(block):
            self.seconds[block] += _now() - begin
        self.phase("forward", self._running[-1][0] if self._running else "")

    def _is_part_of(self, block: str) -> bool:
        """Whether ``block`` is running: a call that begins under its name is a segment of it."""
        return bool(self._running) and self._running[-1][0] == block

    @contextmanager
    def running(self, block: str) -> Iterator[None]:
        """Records a run of a block, whose saved tensors go to the hooks around it."""
        self.enter_plain(block)
        try:
            yield
        finally:
            self.leave_plain(block)

    def enter_plain(self, block: str) -> None:
        if block in self.own_checkpointing and current_backward() != -1:
            self.recomputation_began(block)
            self._own.append(block)
        elif not self._recompute_depth and not is_transformed():
            self._enter(block)

    def leave_plain(self, block: str) -> None:
        if self._own and self._own[-1] == block:
            self.recomputation_ended(self._own.pop())
        elif not self._recompute_depth and self._running and self._running[-1][0] == block:
            self._leave(block)

    @never_compiled
    def _save_plainly(self, tensor: torch.Tensor) -> _PlainlySaved:
        block = self._running[-1][0] if self._running else REST
        saved = _PlainlySaved(block, (self._outer or KEEP_ON_DEVICE)[0](tensor))
        if not self._recompute_depth:
            self._plain.add(block, tensor, saved)
            self._saved.add(block, tensor, saved)
            if self.live is not None:
                self.live.hold(tensor, None, saved, saved_by=block)
        return saved


@final
class _PlainUnpack(RecordUnpack):
    """The hook ``unpack`` for tensors that are saved outside of blocks."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, next_hooks: tuple[Pack, Unpack] | None) -> None:
        super().__init__(next_hooks)
        self._recorder = recorder

    @never_compiled
    def __call__(self, saved: _PlainlySaved) -> torch.Tensor:
        self._recorder.backward_reads("" if saved.block == REST else saved.block)
        tensor: torch.Tensor = (self.next_hooks or KEEP_ON_DEVICE)[1](saved.packed)
        return tensor


@final
class _AttributedUnpack(RecordUnpack):
    """The hook ``unpack`` of a block, which reports to the recorder whose backward runs."""

    __slots__ = ("_block", "_recorder", "_unpack")

    def __init__(self, recorder: Recorder, block: str, pack: Pack, unpack: Unpack) -> None:
        super().__init__((pack, unpack))  # it counts in `pack`
        self._recorder = recorder
        self._block = block
        self._unpack = unpack

    @never_compiled
    def __call__(self, packed: Any) -> torch.Tensor:
        self._recorder.backward_reads(self._block)
        return self._unpack(packed)


class _PlainlySaved:
    """Stands for a tensor saved outside of every block with a policy; autograd holds it."""

    __slots__ = ("__weakref__", "block", "packed")

    def __init__(self, block: str, packed: Any) -> None:
        self.block = block
        self.packed = packed


def _now() -> float:
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if torch.accelerator.is_available() and not is_captured:  # a capture cannot be waited for
        torch.accelerator.synchronize()
    return perf_counter()


@dataclass(eq=False, slots=True)
class _Saved:
    block: str
    num_bytes: int
    ends: list[weakref.finalize[Any, Any]] = field(default_factory=list)
    """Finalizers of its owners: of the objects that autograd or blocks hold while it is saved."""

    def is_owned(self) -> bool:
        # A finalizer that runs is not alive any more, so `_drop` of the last owner finds none.
        self.ends = [end for end in self.ends if end.alive]
        return bool(self.ends)


@final
class SavedBytes:
    """Sums the saved bytes: each storage once, for its first block. See Note [One storage, one object]."""

    def __init__(self, total: Total, ignored: weakref.WeakSet[torch.UntypedStorage]) -> None:
        self._total = total
        self._ignored = ignored
        self._saved: weakref.WeakKeyDictionary[torch.UntypedStorage, _Saved] = weakref.WeakKeyDictionary()

    def of_block(self, block: str) -> int:
        return self._total.share_of(block)

    def add(self, block: str, tensor: torch.Tensor, owner: object) -> None:
        """Counts the tensor's storage for ``block``, if it is new, until all its owners are freed."""
        for storage in storages_of(tensor):
            if storage in self._ignored:
                continue
            saved = self._saved.get(storage)
            if saved is None or not saved.is_owned():
                saved = self._saved[storage] = _Saved(block, storage.nbytes())
                self._total.add(block, saved.num_bytes)
            saved.ends.append(when_gone(owner, tensor, self._drop, saved))

    def remove(self, tensor: torch.Tensor, owner: object) -> None:
        for storage in storages_of(tensor):
            saved = self._saved.get(storage)
            if saved is None or not saved.is_owned():
                continue
            for end in saved.ends:
                if (watched := end.peek()) and watched[0] is owner:
                    end.detach()
            if not saved.is_owned():
                self._total.add(saved.block, -saved.num_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Takes off a storage that was freed by ``resize_``: FSDP saves weights for backward, and gathers them anew."""
        saved = self._saved.get(storage)
        if saved is None or storage.nbytes() >= saved.num_bytes:
            return
        del self._saved[storage]
        if saved.is_owned():
            for end in saved.ends:
                end.detach()
            self._total.add(saved.block, -saved.num_bytes)

    def _drop(self, saved: _Saved) -> None:
        if not saved.is_owned():
            self._total.drop(saved.block, saved.num_bytes)


_disable_saved_tensor_hooks = torch.autograd.graph.disable_saved_tensors_hooks
_suspendable: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = []


@scope
def _suspended_in_transforms(
    undo: Undo, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """Takes these hooks off during transforms of ``torch.func``, which refuse to run within any.

    Each transform disables hooks by one public function, and that is the last moment before its error.
    """

    def end() -> None:
        if (pack, unpack) in _suspendable:
            _suspendable.remove((pack, unpack))
        if not _suspendable:  # several models may be measured at a time
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensor_hooks

    undo.append((end, ()))
    _suspendable.append((pack, unpack))
    torch.autograd.graph.disable_saved_tensors_hooks = _suspend_and_disable
    yield


@contextmanager
def _suspend_and_disable(error_message: str) -> Iterator[None]:
    suspended = []
    while (hooks := active_saved_tensor_hooks()) is not None and hooks in _suspendable:
        pop_saved_tensor_hooks()
        suspended.append(hooks)
    try:
        with _disable_saved_tensor_hooks(error_message):
            yield
    finally:
        while suspended:
            push_saved_tensor_hooks(*suspended.pop())
