"""Updates of a training whose levels are read, each under some options, and the table that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from graphckpt.planning.candidates import Option, options
from graphckpt.planning.intervals import StepReadings
from graphckpt.planning.level_meter import LevelMeter, block_classes, level_counter
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import state_tensors
from graphckpt.planning.update_table import PlannedUpdate, UpdateTable

FIVE: tuple[Option, ...] = options(
    False, ["full", *({"rule": "selective", "save": ops} for ops in ("matmul+attention", "matmul", "attention"))]
)
"""``keep``, ``full`` and three fixed levels."""
FULL = 1


class Updates:
    """The updates of one training.

    Args:
        model: The model.
        named: Its blocks.
        update: Runs an update.
        optimizers: Those of the update.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        update: Callable[[], object],
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        self.model, self.update, self.optimizers = model, update, list(optimizers)
        self.blocks = Blocks(named)
        self.full = [FULL] * len(named)
        self.measured(self.full)  # creates the states of optimizers

    def measured(self, plan: Sequence[int]) -> StepReadings:
        """Runs an update under the options of a plan, and returns its levels."""
        device = next(self.model.parameters()).device
        meter = LevelMeter(device, level_counter(device, state_tensors(self.model, self.optimizers)))
        with self.blocks.under([FIVE[o] for o in plan], [None] * len(plan)), meter.metering(self.blocks):
            self.update()
        return meter.result()

    def table(self) -> UpdateTable:
        """Returns the table of five updates: in each, one block of each class has another option."""
        base = self.measured(self.full)
        table = UpdateTable(block_classes(self.blocks, base), FULL, len(FIVE))
        table.add([PlannedUpdate(base, self.full, ())])
        for turn in self.turns(table.classes, base):
            table.add([PlannedUpdate(self.measured(turn), turn, ())])
        return table

    def turns(self, classes: Sequence[int], base: StepReadings) -> Iterator[list[int]]:
        """Yields the options of all blocks: another one in the middle of the blocks of each class."""
        called = dict(zip(base.block_of_call, base.are_typical, strict=True))
        for option in (0, 2, 3, 4):
            turn = list(self.full)
            for kind in {classes[block] for block in called}:
                alike = [block for block in called if classes[block] == kind]
                own = [block for block in alike if called[block]] or alike
                turn[own[len(own) // 2]] = option
            yield turn
