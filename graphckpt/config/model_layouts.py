"""Ranks the layouts of a Transformers model over the ranks of a cluster by arithmetic, from the config of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from rich.console import RenderableType
from rich.text import Text

from graphckpt.config.layout_checks import LayoutChecks, states_of_parameters
from graphckpt.ledger.table import Column, bullet, table_of
from graphckpt.planning.options import absent_memory
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.layout_result import SkippedLayout
from graphckpt.search.layouts import Layout, layouts_of
from graphckpt.search.pretrained import read_model, step_errors
from graphckpt.search.search import Report
from graphckpt.simulation.cluster_profile import ClusterProfile
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile
from graphckpt.train.settings import AmpConfig, TrainConfig
from graphckpt.train.tasks.causal_lm import CausalLM
from graphckpt.units import format_bytes, format_rate, format_seconds

_SHOWN = 6  # layouts in the table
_STAGES = (0, 2, 3)  # DDP, and FSDP2 with and without the weights of all layers after forward


class RankedLayout(NamedTuple):
    """A layout that may fit, with figures by arithmetic."""

    layout: Layout
    micro_batch: int
    accumulation: int
    states_bytes: int
    """Weights, gradients and optimizer states that are alive at the same time on a rank, at least."""
    seconds: float
    """About those of an update, without recomputation unless the layout needs it."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LayoutRanking:
    """The layouts of a model, fastest first. No one was simulated."""

    world_size: int
    num_nodes: int
    samples: int
    """Those of an update of all ranks."""
    rows: tuple[RankedLayout, ...]
    ruled_out: tuple[SkippedLayout, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "samples": self.samples,
            "num_nodes": self.num_nodes,
            "rows": [
                {**row.layout.to_dict(), **{k: v for k, v in row._asdict().items() if k != "layout"}}
                for row in self.rows
            ],
            "ruled_out": [{**each.layout.to_dict(), "reason": each.reason} for each in self.ruled_out],
        }

    def renderables(self) -> Iterator[RenderableType]:
        """Yields the parts of the table."""
        nodes = "one node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        yield Text(
            f"\nlayouts of {self.world_size} ranks on {nodes}, by arithmetic, {self.samples} samples in an update:"
        )
        columns = [
            Column("layout"),
            *(Column(name, is_number=True) for name in ("batch", "states", "step", "samples/s")),
        ]
        cells = []
        for row in self.rows[:_SHOWN]:
            seconds = format_seconds(row.seconds)
            rate = format_rate(self.samples / row.seconds)
            batch = f"{row.micro_batch} x {row.accumulation}"
            cells.append([str(row.layout), batch, format_bytes(row.states_bytes), f"about {seconds}", rate])
        yield table_of(columns, cells)
        if len(self.rows) > _SHOWN:
            yield Text(f"and {len(self.rows) - _SHOWN} slower ones")
        if self.ruled_out:
            yield Text(f"ruled out: {len(self.ruled_out)}")
            yield from (bullet(line) for line in SkippedLayout.grouped(self.ruled_out))
        yield bullet(
            "dp: data parallelism, by DDP, by FSDP2 (zero=3), or by FSDP2 that keeps weights after forward (zero=2); "
            "tp: tensor parallelism; pp: stages of a pipeline, by 1F1B; batch: samples of a forward x forwards; "
            "states: weights, gradients and optimizer states of a rank, at least",
            "*",
        )
        yield bullet(
            f"{Layout(self.world_size, zero_stage=3)} is what the table above has simulated; the others were not, and "
            "their times are relative to it: near ones may be in another order. Their states fit; what their layers "
            "keep was not counted",
            "*",
        )


def rank_layouts(
    model: Any,
    machine: DeviceProfile,
    network: ClusterProfile,
    options: EstimateOptions,
    *,
    simulated_seconds: float | None,
    begin: Report,
) -> LayoutRanking:
    """Ranks the layouts of a model over ``options.world_size`` ranks, each with ``options.batch`` samples.

    Args:
        model: As :func:`graphckpt.estimate` takes it.
        machine: The device.
        network: The nodes and the links between them.
        options: The step.
        simulated_seconds: Those of a step under FSDP2 over all ranks, by which all times are scaled; ``None`` scales
            none.
        begin: Gets a line about what begins.

    Raises:
        ConfigError: The model does not exist, or an option cannot be used.
    """
    assert options.world_size is not None
    world_size, batch = options.world_size, options.batch
    source = read_model(model, replace(options, world_size=None, cluster=None, nodes=None))
    begin(f"comparing the layouts of {source.architecture} over {world_size} ranks")
    fake = FakeDevice(machine, is_padded=False)
    with step_errors(source), fake.building():
        module, _, optimizers = source.make(machine.kind)
    with step_errors(source), fake:
        states = states_of_parameters(module, optimizers)
    amp = AmpConfig(enabled=options.autocast is not None, dtype=options.autocast or "bfloat16")  # type: ignore[arg-type]
    memory = absent_memory(machine.kind, machine.memory_bytes, machine.context_bytes + network.comm_bytes)
    samples = batch * world_size * options.accumulation

    def checks_of(layout: Layout) -> LayoutChecks:
        # As many samples as the simulated step has for each rank that shares the activations of a forward. The first
        # stage of a pipeline keeps as many micro-batches as there are stages, of its share of the layers.
        micro_batch = batch * layout.tensor_parallel_size
        return LayoutChecks(
            TrainConfig(train_micro_batch_size=micro_batch, global_batch_size=samples, amp=amp),
            CausalLM(),
            module,
            states,
            source.seq or 1,
            machine=machine,
            network=network,
            limit_bytes=memory.available,
        )

    rows, ruled_out = [], []
    for layout in layouts_of(world_size):
        if layout.zero_stage not in _STAGES or (layout.zero_stage and layout.data_parallel_size == 1):
            continue
        if layout.pipeline_parallel_size > 1 and (layout.tensor_parallel_size > 1 or layout.zero_stage):
            continue  # which the trainer does not have
        checks, reason = checks_of(layout), None
        if layout.pipeline_parallel_size > 1 and source.task != "causal-lm":
            reason = f"a pipeline of {source.task} is not known"
        reason = reason or checks.reason_against(layout)
        if reason is not None:
            what = reason.partition(" · fix: ")[0].replace("train.dist.", "")
            ruled_out.append(SkippedLayout(layout, what))
            continue
        sizes = checks.train_of(layout).sizes
        states_bytes, seconds = checks.needed_bytes(layout), checks.estimated_seconds(layout)
        rows.append(RankedLayout(layout, sizes.micro_batch, sizes.accumulation, states_bytes, seconds))
    sharded = next((row for row in rows if row.layout == Layout(world_size, zero_stage=3)), None)
    if sharded is not None and simulated_seconds is not None:
        # Arithmetic does not know what kernels attain: one layout, which is simulated, shows by how much they fall
        # short, for all. So the times of a table and its order are by arithmetic, their scale is not.
        factor = simulated_seconds / sharded.seconds
        rows = [row._replace(seconds=factor * row.seconds) for row in rows]
    return LayoutRanking(
        world_size=world_size,
        num_nodes=-(-world_size // network.ranks_per_node),
        samples=samples,
        # Of those that take as long, the one that needs less memory first.
        rows=tuple(sorted(rows, key=lambda row: (float(f"{row.seconds:.3g}"), row.states_bytes))),
        ruled_out=tuple(ruled_out),
    )
