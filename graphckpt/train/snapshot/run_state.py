"""The state of a run, taken for a snapshot and restored from one."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.engine.call_state import get_rng_state, rng_devices, set_rng_state
from graphckpt.errors import bullets, first_line
from graphckpt.train.parallel.ranks import TrainRanks
from graphckpt.train.parallel.sharding import (
    extract_sharded,
    extracted_shapes,
    full_tensor_tree,
    is_sharded,
    local_shard,
    map_leaves,
    merge_stage_states,
    on_cpu,
    on_other_stage,
    shard_optimizer_state,
)
from graphckpt.train.seeds import seed_per_rank
from graphckpt.train.snapshot.fields import reading
from graphckpt.train.snapshot.folder import STATE, SnapshotError
from graphckpt.train.snapshot.state_fields import MismatchedStateError, check_graph, check_trainer, is_of_states
from graphckpt.train.snapshot.weights import distinct_tensors, load_weights, read_weights, tensors_of

if TYPE_CHECKING:
    from graphckpt.graph.graph import Graph

_STAGES = "pipeline_parallel_size"


@final
@dataclass(eq=False)
class RunState:
    """The state of model, optimizer, schedule, scaler and random generators; make it before any of them is used."""

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
    settings: dict[str, Any] = field(init=False)
    """The seed, the kind of the optimizer, and its param groups and schedule as they were made: a snapshot records
    them, so that a resume sees what has changed in the config."""
    _masks: set[str] = field(init=False, default_factory=set)
    """Names of buffers and frozen weights that are not finite from the start."""

    def __post_init__(self) -> None:
        scheduler, kind = self.graph._update.schedulers[0], type(self.optimizer)
        groups = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        parts = {"groups": groups, "schedule": {} if scheduler is None else scheduler.state_dict()}
        self.settings = {
            "seed": self.seed,
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            **map_leaves(parts, lambda leaf, _: _plain(leaf)),
        }
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        self._masks = set(self.not_finite()) - trained

    def weights(self) -> dict[str, Tensor]:
        """Returns the state of the model, with each tied tensor once and none sharing memory.

        Sharded tensors are gathered; collective.
        """
        kept = distinct_tensors(self._local_tensors())
        if self.ranks.stage_mesh is not None:
            return self.ranks.gather_tensors(kept, like=tensors_of(self.model))
        return {name: full_tensor_tree(tensor, keep=self.ranks.is_main) for name, tensor in kept.items()}

    def not_finite(self) -> list[str]:
        """Returns the names of weights on this process that are not finite, without what was so before training.

        Waits for the device once.
        """
        shards = {
            name: local_shard(tensor) for name, tensor in self._local_tensors().items() if name not in self._masks
        }
        floats = {
            name: shard if shard.itemsize > 1 else shard.float()  # 8-bit floats have no order
            for name, shard in shards.items()
            if shard.is_floating_point() and shard.numel()
        }
        ends = [torch.stack([shard.min(), shard.max()]) for shard in floats.values()]  # both are nan if a value is
        flags = [pair.isfinite().all().to(self.device) for pair in ends]
        are_finite = torch.stack(flags).tolist() if flags else []
        return [name for name, is_finite in zip(floats, are_finite, strict=True) if not is_finite]

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded or split over stages."""
        return self.ranks.stage_mesh is not None or any(map(is_sharded, self._parameters()))

    def _local_tensors(self) -> dict[str, Tensor]:
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
            shards |= {f"model.{name}": tensor for name, tensor in distinct_tensors(self._local_tensors()).items()}
        everywhere = self.ranks.all_gather(self._take_random())
        each = everywhere[:: self.ranks.config.tensor_parallel_size]  # tensor-parallel ranks have equal states
        trainer = {"random": everywhere[0], "buffers": self._unsaved_buffers(), "extra": extra}
        trainer["settings"] = self.settings
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

    def check(self, graph: Any, trainer: Any, folder: Path, *, done: int, num_states: int | None) -> None:
        """Checks each field that ``read_state`` returned, before any of them is set.

        Args:
            graph: of ``graph.pt``.
            trainer: of ``trainer.pt``.
            folder: of the snapshot.
            done: iterations done at the snapshot.
            num_states: number of parameters with optimizer state, if known.

        Raises:
            SnapshotError: a field is missing, of a wrong type or out of range, or of another optimizer or schedule, or
                a setting has changed that cannot take effect in a resumed run.
        """
        like = self.graph.state_dict()
        own = like.pop("model")
        with reading(folder / STATE.format("trainer")):
            check_trainer(
                trainer,
                buffers=dict(self.model.named_buffers()),
                unsaved=self._unsaved_buffers(),
                extra=[name for name, value in own.items() if not isinstance(value, Tensor)],
            )
        if faults := list(self._setting_faults(trainer["settings"])):
            what = bullets("settings have changed", faults) if len(faults) > 1 else faults[0]
            fix = f"resume with the former value, or start a run from the weights: train.load_weight={folder}"
            raise SnapshotError(f"{folder}: {what} · fix: {fix}")
        try:
            with reading(folder / STATE.format("graph")):
                check_graph(
                    graph,
                    like,
                    self.optimizer,
                    self.graph._update.schedulers[0],
                    done=done,
                    num_states=num_states,
                    has_changed=bool(self.changes(trainer["settings"])),
                )
        except MismatchedStateError as error:
            raise mismatch_error(str(folder), ValueError(f"{STATE.format('graph')}: {error}")) from error

    def changes(self, then: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns what has changed of the param groups and the schedule since a snapshot: the former and the new value.

        Args:
            then: the settings of the snapshot.
        """
        now = self.settings
        changes: dict[str, tuple[Any, Any]] = {}
        for before, after in zip(then["groups"], now["groups"], strict=False):
            pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
            changes |= {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        is_same = then["schedule"] == now["schedule"]
        return changes if is_same else {**changes, "schedule": (then["schedule"], now["schedule"])}

    def _setting_faults(self, then: Mapping[str, Any]) -> Iterator[str]:
        now = self.settings
        if then["seed"] != now["seed"]:
            why = "in another order, some samples would be repeated and others skipped"
            yield f"train.seed: expected {then['seed']}, got {now['seed']}; {why}"
        if then["optimizer"] != now["optimizer"]:
            yield f"optim: expected {then['optimizer']}, whose states the snapshot has, got {now['optimizer']}"
            return
        for key, (before, after) in self.changes(then).items():
            if is_of_states(self.optimizer, key, before, after):
                yield f"optim.{key}: expected {before}, with which the optimizer's states were made, got {after}"

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
            if self.changes(trainer["settings"]):
                graph = self._with_own_settings(graph)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            shard_optimizer_state(self.optimizer, graph)
            self.graph.load_state_dict({"model": self.model.state_dict(), **graph})
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                if isinstance(rate, Tensor):  # kept on its device: a captured step reads this tensor
                    group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
            self._restore_rng(trainer, done=int(graph["System-Train-TrainStep"]))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise mismatch_error(where, error) from error

    def _with_own_settings(self, graph: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a snapshot with this run's param groups and schedule, as they are at its iteration."""
        scheduler = self.graph._update.schedulers[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped before
            for _ in range(int(graph["System-Train-TrainStep"]) if scheduler is not None else 0):
                scheduler.step()  # most schedules compute a learning rate from the one before
        own = self.graph._update.state_dict()
        parts = {key: value for key, value in own.items() if "LRScheduler" in key}
        parts |= {key: {**own[key], "state": graph[key]["state"]} for key in own if "Optimizer" in key}
        return {**graph, **parts}

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
        cpu, devices, _ = get_rng_state(self._devices())
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
        set_rng_state((state["cpu"], devices, None))
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


def _plain(value: Any) -> Any:
    """Returns a setting as a snapshot can record it; of an object, the name of its class."""
    if isinstance(value, Tensor):
        return value.tolist()
    kinds = (bool, int, float, str)  # also of a subclass, such as a number of NumPy
    kind = next((kind for kind in kinds if isinstance(value, kind)), None)
    return kind(value) if kind is not None else None if value is None else type(value).__qualname__


def mismatch_error(where: str, error: Exception) -> SnapshotError:
    """Returns the error for a snapshot that is intact but belongs to another run configuration."""
    fix = "resume with the config that it was written with, or start from its weights: train.load_weight=..."
    return SnapshotError(f"{where}: its optimizer or schedule is another ({first_line(error)}) · fix: {fix}")
