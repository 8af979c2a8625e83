"""Arithmetic of a layout: reasons that rule it out, and about how long an update takes. Nothing is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, final

import numpy as np
import torch
from torch import nn

from graphckpt.blocks.select import layers, marked_layers
from graphckpt.config.schema import RunConfig, model_of, optimizer_of
from graphckpt.errors import ConfigError
from graphckpt.search.layouts import Layout, StateBytes, crosses_nodes
from graphckpt.simulation.cluster_profile import ClusterProfile
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile
from graphckpt.simulation.timeline import bubble_seconds
from graphckpt.train.build_model import stages_of
from graphckpt.train.loop import attribute_errors
from graphckpt.train.output import Report
from graphckpt.train.parallel.pipeline import Stages, tied_weights
from graphckpt.train.parallel.tensor_parallel import divisible_plan, sharded_weights
from graphckpt.train.settings import TrainConfig, ZeroConfig
from graphckpt.train.tasks.base import Task
from graphckpt.tree import tensors_in
from graphckpt.units import format_bytes

_SAVED_BYTES = 34  # per token, channel and layer, in 16 bits with a fused attention: Korthikanti et al. 2022, section 4
_MOVED_BYTES = 300  # per token, channel and layer, by norms and residuals in 32 bits, in forward and backward
_RECOMPUTATION = 4 / 3  # a forward is a third of a step
_ALL: Stages = (("",),)  # of one stage, which is the model


@final
class LayoutChecks:
    """Checks layouts of a training, whose model and optimizer are on fake tensors, as in one process.

    Args:
        train: The settings, of one process.
        task: The task.
        model: The model, on fake tensors.
        states: The bytes of each parameter by its id, after an update.
        num_tokens: Those of a sample.
        machine: The device.
        network: The nodes and the links between them.
        limit_bytes: The memory of a rank.
        stays_in_node: Whether tensor parallelism beyond a node is ruled out.
    """

    def __init__(
        self,
        train: TrainConfig,
        task: Task,
        model: nn.Module,
        states: Mapping[int, StateBytes],
        num_tokens: int,
        *,
        machine: DeviceProfile,
        network: ClusterProfile,
        limit_bytes: int,
        stays_in_node: bool = True,
    ) -> None:
        self._train = train
        self._sizes = train.sizes
        self._task = task
        self._model: Any = model
        self._states = states
        self._num_tokens = num_tokens
        self._machine = machine
        self._network = network
        self._limit_bytes = limit_bytes
        self._stays_in_node = stays_in_node
        self._layers = frozenset(marked_layers(model) or layers(model))
        self._width: int = getattr(getattr(model, "config", None), "hidden_size", 0)

    @classmethod
    def of(
        cls,
        run: RunConfig,
        machine: DeviceProfile,
        network: ClusterProfile,
        limit_bytes: int,
        *,
        stays_in_node: bool = True,
    ) -> LayoutChecks:
        """Returns the checks of layouts of a config."""
        task: Any = run.task()
        data = run.data().open(task, seed=run.train.seed, report=Report.silent()).train
        sample = next(iter(data.batch(np.zeros(1, np.int64)).values()))
        fake = FakeDevice(machine)
        with attribute_errors("model, task", "making the model"), fake.building():
            model: Any = task.prepare(model_of(run))
        with fake:
            states = states_of_parameters(model, [optimizer_of(run, model, machine.kind)])
        return cls(
            run.train,
            task,
            model,
            states,
            prod(sample.shape[1:2]),  # tokens of a sample
            machine=machine,
            network=network,
            limit_bytes=limit_bytes,
            stays_in_node=stays_in_node,
        )

    @property
    def global_batch(self) -> int:
        return self._sizes.global_batch

    def train_of(self, layout: Layout) -> TrainConfig:
        """Returns the settings of the config with the sizes of a layout, for the same samples of an update."""
        stage = layout.zero_stage
        return replace(
            self._train,
            dist=replace(
                self._train.dist,
                data_parallel_size=layout.data_parallel_size,
                tensor_parallel_size=layout.tensor_parallel_size,
                pipeline_parallel_size=layout.pipeline_parallel_size,
            ),
            zero_optimization=ZeroConfig(enabled=stage > 0, stage=stage or 1),
            train_micro_batch_size=self._micro_batch(layout),
            global_batch_size=self.global_batch,
            num_accumulation_steps=None,
        )

    def _micro_batch(self, layout: Layout) -> int:
        """Returns the largest size up to the config's that divides a rank's samples and fills the pipeline."""
        samples, rest = divmod(self.global_batch, layout.data_parallel_size)
        if rest or not samples:
            return self._sizes.micro_batch  # which the settings refuse
        sizes = [size for size in range(1, self._sizes.micro_batch + 1) if samples % size == 0]
        # A pipeline with fewer micro-batches than stages has stages that are always idle, and 1F1B refuses it.
        filling = [size for size in sizes if samples // size >= layout.pipeline_parallel_size]
        return (filling or sizes)[-1]

    def reason_against(self, layout: Layout) -> str | None:
        """Returns why a layout cannot run, or ``None``."""
        return next(self._reasons(layout), None)

    def _reasons(self, layout: Layout) -> Iterator[str]:
        train = self.train_of(layout)
        yield from (f"train.dist.{fault}" for fault in train.dist.faults())
        yield from (f"train.{fault}" for fault in train.faults())
        ranks_per_node = self._network.ranks_per_node
        if self._stays_in_node and crosses_nodes(layout, ranks_per_node):
            what = f"a node of {self._network.name} has {ranks_per_node} ranks"
            yield f"tp={layout.tensor_parallel_size}: tensor parallelism across nodes; {what}"
        try:
            states = self._states_of_rank(layout)
        except ConfigError as error:
            yield " ".join(str(error).replace("•", "").split())
            return
        needed = self._least_bytes(layout, states)
        if needed > self._limit_bytes:
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in states._asdict().items())
            sharded = f" before ZeRO {layout.zero_stage}" if layout.zero_stage else ""
            memory = format_bytes(self._limit_bytes)
            yield f"states of {format_bytes(needed)} on a rank that has {memory}: {parts}{sharded}"

    def needed_bytes(self, layout: Layout) -> int:
        """Returns the bytes of states that are alive at the same time on a rank, at least."""
        return self._least_bytes(layout, self._states_of_rank(layout))

    def equal_stages(self, layout: Layout) -> list[tuple[int, ...]]:
        """Returns the numbers of the pipeline stages, those with equal layers together, and the last one alone.

        The embeddings of the first stage count as nothing: it bounds those behind it, as it keeps more micro-batches.
        """
        stages = self._stages(layout)
        alike: dict[Any, list[int]] = {}
        for number, names in enumerate(stages):
            modules = [self._model.get_submodule(name) for name in names if name in self._layers]
            sizes = tuple((type(module), sum(w.numel() for w in module.parameters())) for module in modules)
            alike.setdefault((sizes, number == len(stages) - 1), []).append(number)
        return list(map(tuple, alike.values()))

    def _stages(self, layout: Layout) -> Stages:
        if layout.pipeline_parallel_size == 1:
            return _ALL
        stages = stages_of(self._model, self._task, self.train_of(layout))
        tied_weights(self._model, stages)  # raises for weights that a pipeline does not support
        return stages

    def _states_of_rank(self, layout: Layout) -> StateBytes:
        """Returns those of the largest pipeline stage, sharded by tensor parallelism alone."""
        size = layout.tensor_parallel_size
        plan = divisible_plan(self._model, size) if size > 1 else {}
        sharded = {id(weight) for weight in sharded_weights(self._model, plan)}
        stages = []
        for names in self._stages(layout):
            weights = {id(w) for name in names for w in self._model.get_submodule(name).parameters()}
            stages.append(StateBytes.sum_of(self._states[w].divided(size if w in sharded else 1) for w in weights))
        return max(stages, key=sum)

    def _least_bytes(self, layout: Layout, states: StateBytes) -> int:
        accumulation = self.train_of(layout).sizes.accumulation
        return states.least_of_rank(layout.zero_stage, layout.data_parallel_size, accumulation)

    def estimated_seconds(self, layout: Layout) -> float:
        """Returns about how long an update takes: products at the rate of the device, collectives, and the bubble.

        It ranks layouts before they are simulated, by sizes that are usual in Transformers.
        """
        micro, accumulation, _ = self.train_of(layout).sizes
        dp, tp, pp = layout.sizes
        amp = self._train.amp
        dtype = amp.dtype if amp.enabled else str(next(self._model.parameters()).dtype).removeprefix("torch.")
        flops = self._machine.flops.get(dtype, self._machine.flops["float32"])
        rate = flops * self._machine.efficiency.get("matmul", 1.0)
        num_weights = sum(weight.numel() for weight in self._model.parameters())
        # A product and a sum for each weight and token in forward, twice as many in backward (Kaplan et al. 2020,
        # section 2.1).
        compute = 6 * num_weights * self.global_batch * self._num_tokens / (rate * layout.num_ranks)

        states = self._states_of_rank(layout)
        if pp > 1:  # all stages wait for the largest one, which the head makes slow
            compute *= pp * states.weights / sum(each.weights for each in self._states.values())
        channels = micro * self._num_tokens * self._width
        bandwidth = self._machine.memory_bandwidth * self._machine.efficiency.get("bandwidth", 1.0)
        # Tensor parallelism shards neither residuals nor norms.
        compute += _MOVED_BYTES * channels * accumulation * len(self._layers) / pp / bandwidth
        # Of a pipeline, the first stage keeps as many micro-batches as there are stages, of fewer layers each.
        saved = _SAVED_BYTES * channels * len(self._layers) // tp
        if self._least_bytes(layout, states) + saved > self._limit_bytes:
            compute *= _RECOMPUTATION

        seconds, hidden = self._network.seconds, 2 * channels  # bytes of hidden states
        # A layer all-reduces its hidden states after attention and after the MLP, in forward and in backward (Shoeybi
        # et al. 2019, section 3). A stage sends them in forward and their gradient in backward.
        of_tensors = 4 * len(self._layers) * accumulation * seconds("all_reduce", hidden, range(tp))
        of_stages = 2 * accumulation * seconds("send", hidden, (0, dp * tp)) if pp > 1 else 0.0
        ranks = range(0, dp * tp, tp)
        reduced, gathered = (seconds(kind, states.weights, ranks) for kind in ("scatter", "gather"))
        # Over the data-parallel ranks: DDP all-reduces gradients, which is a reduce-scatter and an all-gather. ZeRO 1
        # and 2 gather the weights once in an update, ZeRO 3 in forward and in backward of each micro-batch; from stage
        # 2 on gradients are reduced in each micro-batch.
        of_data = {
            0: 2 * reduced,
            1: gathered + reduced,
            2: gathered + accumulation * reduced,
            3: accumulation * (2 * gathered + reduced),
        }[layout.zero_stage]
        if layout.zero_stage or tp == pp == 1:  # FSDP2 and DDP overlap communication with computation
            of_data = max(0.0, of_data - compute)
        step = compute + of_tensors + of_stages
        total: float = step + bubble_seconds(step, pp, accumulation) + of_data
        return total


def states_of_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Mapping[int, StateBytes]:
    """Returns the bytes of each parameter by its id, after an update of a model on fake tensors."""
    weights: Sequence[nn.Parameter] = list(model.parameters())
    for weight in weights:
        # An optimizer creates its states in its first step, for weights with a gradient. The tensors are fake: no
        # memory.
        weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    for optimizer in optimizers:
        optimizer.step()
    sizes = {}
    for weight in weights:
        states = [optimizer.state[weight] for optimizer in optimizers if weight in optimizer.state]
        num_bytes = weight.numel() * weight.element_size()
        of_optimizer = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(states))
        sizes[id(weight)] = StateBytes(num_bytes, num_bytes if weight.requires_grad else 0, of_optimizer)
    return sizes
