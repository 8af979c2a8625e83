"""Training steps under a policy, and the bits that they leave: for what must hold under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import captured_steps
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from torch import Tensor, nn

from graphckpt import Segments, Selective, Tiles
from graphckpt.stores import Host
from simulated_cuda.library import use_schedule

D = 32
NUM_STEPS = 6  # three of warm-up, then replays


@as_module(
    lambda: {"norm": nn.LayerNorm(D), "drop": nn.Dropout(0.1), "up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D)}
)
def Block(self: Any, x: Tensor) -> Tensor:
    return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


Rule = Callable[["Train"], None]


def on_blocks(**fields: Any) -> Rule:
    def apply(graph: Train) -> None:
        for block in graph.model:
            block.config.update(fields)

    return apply


def joined(graph: Train) -> None:
    on_blocks(activation_checkpointing="joined")(graph)
    graph.model[0].config.activation_checkpointing = True


RULES: dict[str, Rule] = {
    "keep": lambda graph: None,
    "full": on_blocks(activation_checkpointing=True),
    "selective": on_blocks(activation_checkpointing=Selective("matmul")),
    "joined": joined,
    "segments": lambda graph: graph.model.config.update({"activation_checkpointing": Segments("sqrt")}),
    "tiles": on_blocks(activation_checkpointing=Tiles(1)),
}
STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "offload": {"offload": True},
    "offload, nothing in flight": {"offload": Host(in_flight_bytes=0)},
    "slab": {"contiguous": True},
    "offload and slab": {"offload": True, "contiguous": True},
    "disk": {"offload": "disk"},
}


class Train(captured_steps.Train):
    def __init__(self, rule: str, store: str, capture: str) -> None:
        torch.manual_seed(0)
        model = stack_of(Block, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        super().__init__(model, optimizer, capture=capture)
        RULES[rule](self)
        if STORES[store]:
            for block in [self.model] if rule == "segments" else self.model:
                block.config.update({**STORES[store], "min_elements": 1})


def bits_of_steps(
    rule: str = "keep", store: str = "device", *, is_captured: bool = False, then: Sequence[str] = ()
) -> list[Tensor]:
    """Returns the losses, then the parameters and the state of the random generator, on the host.

    Each schedule of ``then`` has two more steps.
    """
    graph = Train(rule, store, "cuda_graph" if is_captured else "eager")
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(5)

    def steps(count: int) -> list[Tensor]:
        return [graph(torch.randn(8, D, generator=generator).cuda()) for _ in range(count)]

    losses = steps(NUM_STEPS)
    for schedule in then:
        use_schedule(schedule)
        losses += steps(2)
    if is_captured:
        assert graph._step.captured is not None
        assert graph._step.captured.num_replays == NUM_STEPS - 3 + 2 * len(then)
    return [*(t.detach().cpu() for t in (*losses, *graph.model.parameters())), torch.cuda.get_rng_state()]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two runs have left the same bits: NaN, which memory that is not written has, equals nothing."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
