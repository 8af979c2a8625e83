"""Watches the updates of a training: their inputs, what they train and, while they are measured, their levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.blocks.hooks import add_pre_hook
from graphckpt.blocks.select import has_forward
from graphckpt.planning.level_meter import LevelMeter, level_counter
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import state_tensors
from graphckpt.planning.update_table import PlannedUpdate
from graphckpt.training_state import on_optimizer_step
from graphckpt.tree import inner_tensors, tensors_in
from graphckpt.undo import Undo, enter, put_back

LATER = "later "
"""Begins the names of sizes of later micro-batches of an update, in which gradients are alive."""


class BlockCall(NamedTuple):
    """A call of a block, in a hook before its forward."""

    block: int
    of_hook: tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
    """The arguments of the hook."""


@final
class UpdateWatch:
    """The present update of a training, which the caller begins and ends.

    Args:
        model: The model that is trained.
        optimizers: Those of the updates, where they are known.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.sizes: dict[str, int] | None = None
        """The largest inputs of the blocks and of modules around and before them, by argument; ``None`` between
        updates."""
        self._model = model
        self._optimizers = dict.fromkeys(optimizers)
        self._hooks: Undo = []
        self._metering: Undo = []
        self._meter: LevelMeter | None = None
        self._num_batches = 0  # micro-batches of the update that have begun
        self._last_block: tuple[str, int] | None = None  # of this micro-batch: its container, and its place in there
        self._num_before = 0  # those that had ended when measuring began
        self._num_states = 0  # of optimizers, when measuring began
        self._may_keep_gradients = True  # from one update to the next, as the first one shows
        self._trained = 0, 0  # the most states of optimizers, and parameters to train: some alternate with others

    def add_hooks(self, blocks: Iterable[str], on_inputs: Callable[[BlockCall | None], None]) -> None:
        """Registers hooks that see the optimizers, and the inputs of the model and of the modules that its code calls.

        These are the blocks, the modules around them, and those beside them, such as an embedding: a loop that calls a
        method of the model in place of its forward calls these. ``on_inputs`` is called whenever :attr:`sizes` may have
        grown, with the call of a block that shows it.
        """
        enter(self._hooks, on_optimizer_step(self._optimizers.setdefault))
        places = {name: (name.rpartition(".")[0], number) for number, name in enumerate(blocks)}
        parents = {"", *chain.from_iterable(accumulate(n.split(".")[:-1], "{}.{}".format) for n in places)}
        for name, module in self._model.named_modules(remove_duplicate=False):
            if has_forward(module) and name.rpartition(".")[0] in parents:
                see = partial(self._see_inputs, name, places.get(name), name not in parents, on_inputs)
                add_pre_hook(self._hooks, module, see, with_kwargs=True, prepend=True)

    def begin(self, sizes: Mapping[str, int] | None = None) -> None:
        """Begins an update; hooks find the sizes of its inputs if they are not given."""
        self.sizes, self._num_batches, self._last_block = dict(sizes or {}), 1, None

    def begin_micro_batch(self) -> None:
        """Begins another micro-batch of the update."""
        self._num_batches += 1
        self._last_block = None

    def measure(self, blocks: Blocks) -> LevelMeter:
        """Measures the update from here on."""
        self.stop()
        self._num_states, self._num_before = self._count_states(), self._num_batches - 1
        meter = LevelMeter(self.device, level_counter(self.device, state_tensors(self._model, self._optimizers)))
        self._meter = meter
        enter(self._metering, meter.metering(blocks))
        return meter

    def measure_rest(self, blocks: Blocks, call: BlockCall | None) -> bool:
        """Measures an update whose blocks have other options from now on, the one that ``call`` has begun included.

        Returns:
            Whether what is measured shows these options; else some blocks have run before, and nothing is measured.
        """
        has_calls = self._meter is not None and bool(self._meter.order)
        if self._last_block is not None or (call is not None and has_calls):
            self.discard()
        elif self._meter is None or has_calls:
            meter = self.measure(blocks)
            if call is not None:  # hooks that are registered in a hook do not see this call
                meter.begin_forward(call.block, self._metering, *call.of_hook)
        return self._meter is not None

    def stop(self) -> None:
        """Measures no further."""
        put_back(self._metering)

    def discard(self) -> None:
        """Forgets what was measured of the update; a hook may call this, as none is removed before the end."""
        self._meter = None

    def end(self, options: Sequence[int]) -> PlannedUpdate | None:
        """Ends the update, whose blocks had these options; returns it if it was measured, and had a backward."""
        self.stop()
        meter, self._meter = self._meter, None
        sizes, self.sizes = self.sizes, None
        levels = None if meter is None else meter.result()
        if sizes is None or levels is None or not levels.has_backward:
            return None
        # A program that frees gradients at the start of each update, and does not keep them, is not told apart by one
        # update: the second then begins with less than expected.
        has_gradients = self._may_keep_gradients and any(each.grad is not None for each in self._model.parameters())
        self._may_keep_gradients = False
        adds_lasting = has_gradients or self._count_states() != self._num_states
        return PlannedUpdate(levels, options, tuple(sorted(sizes.items())), adds_lasting, self._num_before > 0)

    def abandon(self) -> None:
        """Ends an update that has failed."""
        self.stop()
        self.discard()
        self.sizes = None

    def trains_more(self) -> bool:
        """Returns whether there are more states of optimizers, or parameters to train, than in any call before."""
        before, num_parameters = self._trained, sum(each.requires_grad for each in self._model.parameters())
        self._trained = max(self._count_states(), before[0]), max(num_parameters, before[1])
        return self._trained != before

    def close(self) -> None:
        """Ends watching, also in the middle of an update, and removes all hooks."""
        self.abandon()
        put_back(self._hooks)

    def _count_states(self) -> int:
        return sum(len(state) for optimizer in self._optimizers for state in optimizer.state.values())

    def _see_inputs(
        self,
        name: str,
        place: tuple[str, int] | None,
        is_before: bool,
        on_inputs: Callable[[BlockCall | None], None],
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        """Notes the inputs of a module: of a block if it begins a pass, of one beside the blocks if it comes before."""
        if self.sizes is None or not torch.is_grad_enabled():
            return
        last, call = self._last_block, None
        if place is not None:
            name, call = place[0], BlockCall(place[1], (module, args, kwargs))
            if last is not None and last[0] == place[0] and last[1] < place[1]:
                self._last_block = place
                return
        elif is_before and last is not None:
            return
        prefix = f"{LATER if self._num_batches > 1 else ''}{name}:"
        for key, size in sizes_of(chain(enumerate(args), kwargs.items())).items():
            self.sizes[prefix + key] = max(size, self.sizes.get(prefix + key, 0))
        on_inputs(call)
        self._last_block = place or last


def sizes_of(named: Iterable[tuple[object, Any]]) -> dict[str, int]:
    """Returns the bytes of the tensors in each value, and their lengths: fewer texts of more tokens may take more.

    >>> sizes_of([("mask", torch.ones(2, 3))])
    {'mask': 24, 'mask.0': 2, 'mask.1': 3}
    """
    sizes: dict[str, int] = {}
    for name, value in named:
        for tensor in tensors_in(value):
            count = tensor.numel()
            if tensor.is_nested:  # its lengths may be symbols
                count = sum(inner.numel() for inner in inner_tensors(tensor)) or count
            sizes[f"{name}"] = sizes.get(f"{name}", 0) + count * tensor.element_size()
            for dim, length in enumerate(() if tensor.is_nested else tensor.shape):
                sizes[f"{name}.{dim}"] = max(length, sizes.get(f"{name}.{dim}", 0))
    return sizes


def covers(largest: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Returns whether no size exceeds the one of its name.

    Names that ``largest`` lacks do not matter, but those of later micro-batches.

    >>> covers({"0": 8}, {"0": 8, "1": 3}), covers({"0": 8}, {"0": 9}), covers({"0": 8}, {"0": 8, "later 0": 8})
    (True, False, False)
    """
    return all(size <= largest.get(name, 0 if name.startswith(LATER) else size) for name, size in sizes.items())
