"""State shared by all calls of one block: its name, its store, and what earlier calls have shown."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from graphckpt.engine.call_state import CallState, Modes, ModuleState
from graphckpt.engine.sampling import CallSampler
from graphckpt.errors import warn_once
from graphckpt.stores.base import DeviceStore, TensorGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from graphckpt.ledger.recorder import Recorder
    from graphckpt.stores.base import Store

_NOTHING = nullcontext()

# Note [What a first call teaches]
#
# Every call copies the state of its modules: see Note [What every call copies] in call_state.py. The first call in each
# combination of train and eval modes copies more, compares it afterwards, and is recomputed to its end. Later calls
# trust what it has shown:
#
#   what a first call shows                  noted in                        a later call that does otherwise
#   arguments are modified in place          `mutated`                       is refused: no copy of the argument exists
#   buffers of more than 64 KiB change       `ModuleState._moved`            is refused, and the next call is a first
#                                                                            one again
#   Python's or NumPy's generator is used    `ModuleState.host_rng_modes`    is recomputed with other numbers
#   which ops run (of `selective`)           `schedules`, by shapes          keeps what the policy says, and skips no op
#
# An example: a linear layer, a BatchNorm and a buffer of 80 KB. `CallState.tensors` are the parameters 0 to 3
# (linear.weight, linear.bias, norm.weight, norm.bias), the large buffer 4, and 5 to 7: running_mean, running_var,
# num_batches_tracked.
#
# call 1   clones 4 to 7. Then 4 has not changed, and is large: its clone goes, and a later modification is refused, as
#          its version counter shows it. 5 to 7 are small, so that every later call clones them.
# call 2   clones 5 to 7. The recomputation updates clones of these, so that statistics count one forward.


@final
class BlockContext:
    """The name and the store of a block, and what its earlier calls have shown.

    Args:
        name: Path of the block, for messages and tables.
        roots: The modules that run in the block, each with all below it; they are held weakly.
        store: Where kept tensors go; ``None`` if the blocks around this one say that, or they stay on the device.
        learns: ``False`` for a function that is seen once: nothing can be learnt from a first call.
        determinism_check: What is compared in a recomputation; see :mod:`graphckpt.engine.values`.
        early_stop: Whether a recomputation ends with the last tensor that backward needs.
        sampler: Chooses the calls whose values are compared; by default one of the block's own.
    """

    __slots__ = (
        "_parts",
        "_roots",
        "determinism_check",
        "drawless_modes",
        "early_stop",
        "has_rrelu",
        "is_placed",
        "keeps_on_device",
        "learns",
        "mutated",
        "name",
        "notes",
        "on_recomputed",
        "recorder",
        "sampler",
        "schedules",
        "state",
        "store",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        roots: Iterable[nn.Module],
        store: Store | None = None,
        *,
        learns: bool = True,
        determinism_check: str = "default",
        early_stop: bool = True,
        sampler: CallSampler | None = None,
    ) -> None:
        self.name = name
        self.determinism_check = determinism_check
        self.early_stop = early_stop
        self.sampler = sampler or CallSampler(name)
        self._roots = [weakref.ref(root) for root in roots]
        self.is_placed = store is not None
        """Whether a store was set for the block itself, which those of blocks around do not replace."""
        self.store = store or DeviceStore()
        self.keeps_on_device = isinstance(self.store, DeviceStore)
        self.state = ModuleState(self.modules())
        self.learns = learns
        self.has_rrelu = any(isinstance(module, nn.RReLU) for module in self.modules())
        """Whether the block has an ``nn.RReLU``, whose op writes its noise after autograd has saved it."""
        self.drawless_modes: set[Modes] = set()
        """The modes in which a recomputation has drawn no random numbers although another thread drew some. Their calls
        are not checked any more: see Note [Threads that draw from one generator] in graphckpt/thread_state.py."""
        self.mutated: frozenset[int] = frozenset()
        """Positions of the tensor arguments that forward modifies in place, as first calls have shown."""
        self.schedules: dict[object, Any] = {}
        """Op schedules of earlier calls, by the shapes of their arguments; see :mod:`graphckpt.rules.ops`."""
        self.recorder: Recorder | None = None
        self.on_recomputed: Callable[[], object] | None = None
        """Called at the end of each recomputation, when all that backward needs is there."""
        self.notes: dict[str, None] = {}
        """Lines of ``explain()`` about this block, in order, each once."""
        self._parts: dict[object, BlockContext] = {}

    @property
    def title(self) -> str:
        return self.name or "(model)"

    def part(self, key: object, children: Iterable[object]) -> BlockContext:
        """Returns the context of some consecutive children of the block, with the same name, store and recorder."""
        roots = [child for child in children if isinstance(child, nn.Module)]
        # The children may have been replaced since, as adapters do: another part then, which has learnt nothing yet.
        part = self._parts.get(key)
        if part is None or [ref() for ref in part._roots] != roots:
            part = self._parts[key] = BlockContext(
                self.name,
                roots,
                self.store if self.is_placed else None,
                sampler=CallSampler(f"{self.name} {len(self._parts)}") if self.learns else self.sampler,
            )
        part.recorder, part.on_recomputed = self.recorder, self.on_recomputed
        part.determinism_check, part.early_stop = self.determinism_check, self.early_stop
        part.notes = self.notes
        return part

    def take(
        self, others: Sequence[Any] = (), *, has_moved: Callable[[torch.Tensor], bool] | None = None
    ) -> tuple[ModuleState, CallState]:
        """Copies the state of the modules, whichever these are by now: see :meth:`ModuleState.take`."""
        call_state = None if self.state.is_lazy else self.state.take(others, has_moved=has_moved)
        if call_state is None:
            call_state = self.renew_state().take(others, has_moved=has_moved)
            assert call_state is not None, "the modules were listed right before"
        return self.state, call_state

    def renew_state(self) -> ModuleState:
        self.state = ModuleState(self.modules())
        if self.state.is_lazy:
            self.note("a call that initializes lazy modules keeps everything")
        return self.state

    def open_group(self) -> TensorGroup | None:
        traffic = self.recorder.traffic[self.name] if self.recorder is not None else None
        return self.store.open_group(TensorGroup(self.title, self.tensors, self.note, traffic))

    def run_in_record(self) -> AbstractContextManager[None]:
        """Records a run of the block, whose saved tensors go to the hooks around it."""
        return _NOTHING if self.recorder is None else self.recorder.running(self.name)

    def modules(self) -> Iterable[nn.Module]:
        modules = (module for ref in self._roots if (root := ref()) is not None for module in root.modules())
        return dict.fromkeys(modules)

    def note(self, text: str) -> None:
        """Adds a line about the block to ``explain()``; that a field has no effect is logged once as well."""
        self.notes.setdefault(text)
        if "has no effect" in text:
            warn_once(self.title, text)

    @property
    def sketch_bytes(self) -> int:
        """The most that the value check has held at a time for calls of the block and of its parts."""
        return self.sampler.num_bytes + sum(part.sketch_bytes for part in self._parts.values())

    def tensors(self) -> list[torch.Tensor]:
        return self.state.tensors()
