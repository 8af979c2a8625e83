"""Watches the updates of a training: their inputs, what they train and, while they are measured, their levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, final

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
from graphckpt.tree import tensors_in
from graphckpt.undo import Undo, enter, put_back

LATER = "later "
"""Begins the names of sizes of later micro-batches of an update, in which gradients are alive."""


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
        """The largest inputs of the modules around the blocks, by argument; ``None`` between updates."""
        self._model = model
        self._optimizers = dict.fromkeys(optimizers)
        self._hooks: Undo = []
        self._metering: Undo = []
        self._meter: LevelMeter | None = None
        self._num_batches = 0  # micro-batches of the update that have begun
        self._num_before = 0  # those that had ended when measuring began
        self._num_states = 0  # of optimizers, when measuring began
        self._may_keep_gradients = True  # from one update to the next, as the first one shows
        self._trained = 0, 0  # the most states of optimizers, and parameters to train: some alternate with others

    def add_hooks(self, blocks: Iterable[str], on_inputs: Callable[[], None]) -> None:
        """Registers hooks that see the optimizers, and the inputs of all modules around blocks of these names.

        ``on_inputs`` is called whenever :attr:`sizes` may have grown.
        """
        enter(self._hooks, on_optimizer_step(self._optimizers.setdefault))
        parts = [name.split(".") for name in blocks]
        parents = (".".join(each[:number]) for each in parts for number in range(len(each)))
        for name in dict.fromkeys(parents):
            module = self._model.get_submodule(name)
            if has_forward(module):
                see = partial(self._see_inputs, name, on_inputs)
                add_pre_hook(self._hooks, module, see, with_kwargs=True, prepend=True)

    def begin(self, sizes: Mapping[str, int] | None = None) -> None:
        """Begins an update; hooks find the sizes of its inputs if they are not given."""
        self.sizes, self._num_batches = dict(sizes or {}), 1

    def begin_micro_batch(self) -> None:
        """Begins another micro-batch of the update."""
        self._num_batches += 1

    def measure(self, blocks: Blocks) -> None:
        """Measures the update from here on."""
        self.stop()
        self._num_states, self._num_before = self._count_states(), self._num_batches - 1
        self._meter = LevelMeter(self.device, level_counter(self.device, state_tensors(self._model, self._optimizers)))
        enter(self._metering, self._meter.metering(blocks))

    def stop(self) -> None:
        """Measures no further."""
        put_back(self._metering)

    def discard(self) -> None:
        """Measures no further, and forgets what was measured."""
        self.stop()
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
        self, name: str, on_inputs: Callable[[], None], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if self.sizes is None or not torch.is_grad_enabled():
            return
        for argument, value in chain(enumerate(args), kwargs.items()):
            size = max((tensor.numel() for tensor in tensors_in(value)), default=0)
            if size:
                key = f"{LATER if self._num_batches > 1 else ''}{name}:{argument}"
                self.sizes[key] = max(size, self.sizes.get(key, 0))
        on_inputs()


def covers(largest: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Returns whether no size exceeds the one of its name.

    Names that ``largest`` lacks do not matter, but those of later micro-batches.

    >>> covers({"0": 8}, {"0": 8, "1": 3}), covers({"0": 8}, {"0": 9}), covers({"0": 8}, {"0": 8, "later 0": 8})
    (True, False, False)
    """
    return all(size <= largest.get(name, 0 if name.startswith(LATER) else size) for name, size in sizes.items())
