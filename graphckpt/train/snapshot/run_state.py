"""The state of a run, taken for a snapshot and restored from one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.errors import first_line
from graphckpt.state.rng import get_rng_state, rng_devices, set_rng_state
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import (
    extract_sharded,
    extracted_shapes,
    full_tensor_tree,
    is_sharded,
    merge_stage_states,
    on_cpu,
    on_other_stage,
    shard_optimizer_state,
)
from graphckpt.train.seeds import seed_per_rank
from graphckpt.train.snapshot.fields import reading
from graphckpt.train.snapshot.folder import STATE, SnapshotError
from graphckpt.train.snapshot.state_fields import MismatchedStateError, check_graph, check_trainer
from graphckpt.train.snapshot.weights import distinct_tensors, load_weights, read_weights, tensors_of

if TYPE_CHECKING:
    from graphckpt.graph.graph import Graph

_STAGES = "pipeline_parallel_size"


@final
@dataclass(frozen=True, eq=False)
class RunState:
    """The state of model, optimizer, schedule, scaler and random generators."""

    model: nn.Module
    graph: Graph
    """Trains the model, under the attribute ``model``."""
    optimizer: Optimizer
    """That of the graph."""
    device: torch.device
    ranks: TrainRanks
    """The processes of the run; rank 0 writes, the others take part in gathering."""
    seed: int
    """The seed of the run."""

    def weights(self) -> dict[str, Tensor]:
        """Returns the state of the model, with each tied tensor once and none sharing memory.

        Sharded tensors are gathered; collective.
        """
        kept = distinct_tensors(self._held())
        if self.ranks.stage_mesh is not None:
            return self.ranks.gather_tensors(kept, like=tensors_of(self.model))
        return {name: full_tensor_tree(tensor, keep=self.ranks.is_main) for name, tensor in kept.items()}

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded or split over stages."""
        return self.ranks.stage_mesh is not None or any(map(is_sharded, self._parameters()))

    def _held(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors_of(self.model).items() if not on_other_stage(tensor)}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def states(self, shards: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Returns the rest of the state, by the name of its file: tensors and plain values only.

        Collective.

        Args:
            shards: receives the weights and what else is sharded; ``None`` gathers the rest instead.
        """
        graph = self.graph.state_dict()
        own = graph.pop("model")
        extra = {name: value for name, value in own.items() if not isinstance(value, Tensor)}
        if shards is not None:
            shards |= {f"model.{name}": tensor for name, tensor in distinct_tensors(self._held()).items()}
        everywhere = self.ranks.all_gather(self._take_random())
        each = everywhere[:: self.ranks.config.tensor_parallel_size]  # tensor-parallel ranks have equal states
        trainer = {"random": everywhere[0], "buffers": self._unsaved_buffers(), "extra": extra}
        if len(each) > 1:
            trainer["random_of_each"] = each
        if self.ranks.stage_mesh is not None:
            return {"graph": self._graph_of_all_stages(graph, shards), "trainer": self._of_all_stages(trainer)}
        rest = (
            full_tensor_tree(dict(graph), keep=self.ranks.is_main)
            if shards is None
            else extract_sharded(dict(graph), "graph", shards)
        )
        return {"graph": rest, "trainer": trainer}

    def _graph_of_all_stages(self, graph: dict[str, Any], shards: dict[str, Tensor] | None) -> dict[str, Any]:
        """Returns the state of one process; with ``shards``, all tensors but step counts are moved there."""
        if shards is not None:
            graph = extract_sharded(graph, "graph", shards, lambda value: isinstance(value, Tensor) and value.ndim > 0)
        return merge_stage_states(self.ranks.all_gather(on_cpu(graph)))

    def _of_all_stages(self, trainer: dict[str, Any]) -> dict[str, Any]:
        buffers = self.ranks.all_gather(on_cpu(trainer["buffers"]))
        everywhere = {name: value for held in reversed(buffers) for name, value in held.items()}
        return {**trainer, "buffers": everywhere, _STAGES: self.ranks.config.pipeline_parallel_size}

    def load_weights(self, folder: Path) -> None:
        """Sets the model's weights to those of a snapshot; collective.

        Raises:
            SnapshotError: they cannot be read, or belong to another model; nothing was changed.
        """
        weights = read_weights(folder, like=tensors_of(self.model), group=self.ranks.control)
        load_weights(self.model, weights, str(folder))

    def load_templates(self, graph: dict[str, Any]) -> dict[str, Tensor | None]:
        """Returns a template for each tensor that was extracted from ``graph``, by its name among the shards."""
        parameters = self._parameters()
        found: dict[str, Tensor | None] = dict.fromkeys(extracted_shapes(graph))
        for key in [key for key in graph if "Optimizer" in key]:
            for number, state in graph[key]["state"].items():
                for name, shape in extracted_shapes(state).items():
                    like = parameters[int(number)] if int(number) < len(parameters) else None
                    found[name] = like if like is not None and list(like.shape) == shape else None
        return found

    def local_part(self, graph: dict[str, Any]) -> dict[str, Any]:
        """Returns the graph state without the optimizer states of other stages' weights."""
        away = {number for number, weight in enumerate(self._parameters()) if on_other_stage(weight)}
        own = dict(graph)
        for key in [key for key in graph if "Optimizer" in key]:
            states = {number: state for number, state in graph[key]["state"].items() if int(number) not in away}
            own[key] = {**graph[key], "state": states}
        return own

    def check(
        self, graph: Any, trainer: Any, folder: Path, *, done: int, num_states: int | None, is_same_torch: bool
    ) -> None:
        """Checks each field that ``read_state`` returned, before any of them is set.

        Args:
            graph: of ``graph.pt``.
            trainer: of ``trainer.pt``.
            folder: of the snapshot.
            done: iterations done at the snapshot.
            num_states: number of parameters with optimizer state, if known.
            is_same_torch: whether the same version of PyTorch wrote it.

        Raises:
            SnapshotError: a field is missing, of a wrong type or out of range, or of another optimizer or schedule.
        """
        like = self.graph.state_dict()
        own = like.pop("model")
        try:
            with reading(folder / STATE.format("graph")):
                check_graph(
                    graph,
                    like,
                    self.optimizer,
                    self.graph._update.schedulers[0],
                    done=done,
                    num_states=num_states,
                    is_same_torch=is_same_torch,
                )
        except MismatchedStateError as error:
            raise mismatch_error(str(folder), ValueError(f"{STATE.format('graph')}: {error}")) from error
        with reading(folder / STATE.format("trainer")):
            check_trainer(
                trainer,
                buffers=dict(self.model.named_buffers()),
                unsaved=self._unsaved_buffers(),
                extra=[name for name, value in own.items() if not isinstance(value, Tensor)],
            )

    def load_states(self, graph: dict[str, Any], trainer: dict[str, Any], where: str) -> None:
        """Restores what ``states`` returned; call it last, since it also sets the random generators.

        Raises:
            SnapshotError: the state belongs to another optimizer or schedule.
        """
        try:
            if trainer["extra"]:
                self.model.load_state_dict({**self.model.state_dict(), **trainer["extra"]})
            for name, value in trainer["buffers"].items():
                owner, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(owner)
                module._buffers[leaf] = value.to(getattr(module, leaf).device)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            shard_optimizer_state(self.optimizer, graph)
            self.graph.load_state_dict({"model": self.model.state_dict(), **graph})
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                if isinstance(rate, Tensor):  # kept on its device: a captured step reads this tensor
                    group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
            self._restore_rng(trainer, done=int(graph["System-Train-TrainStep"]))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise mismatch_error(where, error) from error

    def _restore_rng(self, trainer: dict[str, Any], done: int) -> None:
        """Restores the random generators; with another number of processes, all but the first are seeded anew."""
        each, config = trainer.get("random_of_each", [trainer["random"]]), self.ranks.config
        sizes = config.pipeline_parallel_size, config.data_parallel_size
        if (trainer.get(_STAGES, 1), len(each)) == (sizes[0], math.prod(sizes)):
            self._set_random(each[self.ranks.stream])
            return
        self._set_random(trainer["random"])
        seed_per_rank(self.seed, self.ranks.stream, done=done)

    def _take_random(self) -> dict[str, Any]:
        cpu, devices = get_rng_state(self._devices())
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        return {
            "cpu": cpu,
            "devices": [(str(device), state) for device, state in devices],
            "numpy": [str(kind), [int(key) for key in keys], *rest],
            "python": random.getstate(),
        }

    def _set_random(self, state: dict[str, Any]) -> None:
        here = self._devices()
        saved = dict(state["devices"])
        if len(here) == len(saved) == 1:  # one device then and now, maybe with another index
            saved = {str(here[0]): value for value in saved.values()}
        devices = tuple((device, saved[str(device)]) for device in here if str(device) in saved)
        set_rng_state((state["cpu"], devices))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002
        random.setstate(state["python"])

    def _devices(self) -> tuple[torch.device, ...]:
        tensors = (*self.model.parameters(), *self.model.buffers(), torch.empty(0, device=self.device))
        return rng_devices(tensors)

    def _unsaved_buffers(self) -> dict[str, Tensor]:
        """Returns the non-persistent buffers: some models change them in training."""
        saved = self.model.state_dict().keys()
        own = {name: buffer for name, buffer in self.model.named_buffers() if name not in saved}
        return {name: buffer for name, buffer in own.items() if not on_other_stage(buffer)}


def mismatch_error(where: str, error: Exception) -> SnapshotError:
    """Returns the error for a snapshot that is intact but belongs to another run configuration."""
    fix = "resume with the config that it was written with, or start from its weights: train.load_weight=..."
    return SnapshotError(f"{where}: its optimizer or schedule is another ({first_line(error)}) · fix: {fix}")
