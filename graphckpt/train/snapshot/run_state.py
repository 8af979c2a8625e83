"""The state of a run, taken for a snapshot and restored from one."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphckpt.errors import bullets, first_line
from graphckpt.thread_state import get_rng_state, rng_devices, set_rng_state
from graphckpt.train.parallel.ranks import TrainRanks, seed_per_rank
from graphckpt.train.parallel.sharding import (
    extract_sharded,
    extracted_shapes,
    full_tensor_tree,
    is_sharded,
    local_shard,
    map_leaves,
    on_cpu,
    on_other_stage,
    restore_sharded,
    shard_like,
)
from graphckpt.train.snapshot.schema import (
    FORMAT,
    OPTIMIZER,
    SCHEDULER,
    SHARDS,
    STAGES,
    STATE,
    STEP,
    RunInfo,
    SnapshotError,
    check_graph,
    check_trainer,
    is_of_states,
    reading,
    validate,
)
from graphckpt.train.snapshot.weights import distinct_tensors, load_weights, read_weights, tensors_of

if TYPE_CHECKING:
    from graphckpt.graph.graph import Graph

_FIX = "resume with the config that it was written with, or start from its weights: train.load_weight=..."


@final
@dataclass(eq=False)
class RunState:
    """The state of model, optimizer, schedule, scaler and random generators; make it before any of them is used."""

    model: nn.Module
    graph: Graph
    """Trains the model, under the attribute ``model``."""
    optimizer: Optimizer
    """The graph's optimizer."""
    device: torch.device
    ranks: TrainRanks
    """The processes of the run; rank 0 writes, the others contribute to the gathers."""
    seed: int
    """The seed of the run."""
    settings: dict[str, Any] = field(init=False)
    """The seed, the kind of the optimizer, and its param groups and schedule as they were made: a snapshot records
    them, so that a resume sees what has changed in the config."""
    _masks: set[str] = field(init=False, default_factory=set)
    """Names of buffers and frozen weights that are not finite from the start."""
    _num_scheduled: int = field(init=False, default=0)
    """Steps of the schedule before the state of a snapshot is loaded."""

    def __post_init__(self) -> None:
        kind = type(self.optimizer)
        self.settings = {
            "seed": self.seed,
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            **self._groups_and_schedule(),
        }
        # A buffer may hold infinities on purpose, such as an attention mask of -inf. A trained weight that is not
        # finite is an error at any time.
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        self._masks = set(self.not_finite()) - trained

    def _groups_and_schedule(self) -> dict[str, Any]:
        scheduler = self.graph._update.schedulers[0]
        return _plain_settings(self.optimizer.param_groups, {} if scheduler is None else scheduler.state_dict())

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def is_sharded(self) -> bool:
        return self.ranks.stage_mesh is not None or any(map(is_sharded, self._parameters))

    def _local_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors_of(self.model).items() if not on_other_stage(tensor)}

    def _unsaved_buffers(self) -> dict[str, Tensor]:
        """Returns the non-persistent buffers: some models change them in training."""
        saved = self.model.state_dict().keys()
        unsaved = {name: buffer for name, buffer in self.model.named_buffers() if name not in saved}
        return {name: buffer for name, buffer in unsaved.items() if not on_other_stage(buffer)}

    # ---- taken

    def not_finite(self) -> list[str]:
        """Names the weights here that are not finite, without those that never were; waits for the device once."""
        tensors = {name: tensor for name, tensor in self._local_tensors().items() if name not in self._masks}
        floats = {
            name: shard if shard.itemsize > 1 else shard.float()  # 8-bit floats have no order
            for name, shard in ((name, local_shard(tensor)) for name, tensor in tensors.items())
            if shard.is_floating_point() and shard.numel()
        }
        # Not `isfinite().all()` of each: that needs a mask of as many elements as the largest weight, at a time when
        # memory is full. One transfer for all weights together.
        ends = [torch.stack([shard.min(), shard.max()]) for shard in floats.values()]  # both are nan if a value is
        flags = [pair.isfinite().all().to(self.device) for pair in ends]
        are_finite = torch.stack(flags).tolist() if flags else []
        return [name for name, is_finite in zip(floats, are_finite, strict=True) if not is_finite]

    def weights(self) -> dict[str, Tensor]:
        """Gathers the state of the model, with each tied tensor once and none sharing memory; collective."""
        distinct = distinct_tensors(self._local_tensors())
        if self.ranks.stage_mesh is not None:
            return self.ranks.gather_tensors(distinct, like=tensors_of(self.model))
        return {name: full_tensor_tree(tensor, keep=self.ranks.is_main) for name, tensor in distinct.items()}

    def states(self, shards: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the rest by the name of its file, tensors and plain values, and fills ``shards``; collective."""
        graph = dict(self.graph.state_dict())
        model_state = graph.pop("model")
        if self.is_sharded:
            shards |= {f"model.{name}": tensor for name, tensor in distinct_tensors(self._local_tensors()).items()}
        everywhere = self.ranks.all_gather(self._take_random())
        each = everywhere[:: self.ranks.config.tensor_parallel_size]  # one of each stream: see `TrainRanks.stream`
        trainer = {
            "random": everywhere[0],
            "buffers": self._unsaved_buffers(),
            "extra": {name: value for name, value in model_state.items() if not isinstance(value, Tensor)},
            "settings": self.settings,
            **({"random_of_each": each} if len(each) > 1 else {}),
        }
        if self.ranks.stage_mesh is not None:
            buffers = self.ranks.all_gather(on_cpu(trainer["buffers"]))
            # Reversed, so that of two stages with a buffer of one name the first wins, as for weights
            # (`gather_tensors`).
            trainer["buffers"] = {name: value for stage in reversed(buffers) for name, value in stage.items()}
            trainer[STAGES] = self.ranks.config.pipeline_parallel_size
            # all but the step counts, which are as small as a placeholder
            graph = extract_sharded(graph, "graph", shards, lambda leaf: isinstance(leaf, Tensor) and leaf.ndim > 0)
            stages = self.ranks.all_gather(on_cpu(graph))  # each with the optimizer states of its weights
            # The optimizer of each stage has all parameters, under equal numbers, and states of its weights alone.
            every = {number: state for stage in stages[::-1] for number, state in stage[OPTIMIZER]["state"].items()}
            graph = {**stages[0], OPTIMIZER: {**stages[0][OPTIMIZER], "state": dict(sorted(every.items()))}}
        else:
            graph = extract_sharded(graph, "graph", shards)
        return {"graph": graph, "trainer": trainer}

    # ---- restored

    def load_weights(self, folder: Path) -> None:
        weights = read_weights(folder, like=tensors_of(self.model), group=self.ranks.control)
        load_weights(self.model, weights, str(folder))

    def add_defaults(self, states: Mapping[str, Any], folder: Path, info: RunInfo) -> list[str]:
        """Adds fields that the snapshot's format lacks to its states, and returns a line of the log for each."""
        lines = []
        for lack in [lack for number in range(info["format"], FORMAT) for lack in LACKS[number]]:
            state = states[lack.file]
            with reading(folder / STATE.format(lack.file)):
                validate(dict[str, Any], state)
            if lack.field not in state:
                state[lack.field] = lack.default(self, states, folder, info)
                default = lack.text.format(state[lack.field])
                what = f"{folder}: format {info['format']} has no {lack.field} in {STATE.format(lack.file)}"
                lines.append(f"{what} · default: {default}")
        return lines

    def check(self, graph: Any, trainer: Any, folder: Path, info: RunInfo) -> None:
        like = self.graph.state_dict()
        extra = [name for name, value in like.pop("model").items() if not isinstance(value, Tensor)]
        with reading(folder / STATE.format("trainer")):
            check_trainer(
                trainer,
                buffers=dict(self.model.named_buffers()),
                unsaved=self._unsaved_buffers(),
                extra=extra,
                machine=info["machine"],
            )
        if faults := list(self._setting_faults(trainer["settings"])):
            what = bullets("settings have changed", faults) if len(faults) > 1 else faults[0]
            fix = f"resume with the former value, or start a run from the weights: train.load_weight={folder}"
            raise SnapshotError(f"{folder}: {what} · fix: {fix}")
        with reading(folder / STATE.format("graph"), _FIX):
            check_graph(graph, like, self.optimizer, done=info["done"], num_states=info.get("optimizer_states"))

    def changes(self, then: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns the changes of param groups and schedule since a snapshot: the former and the new value."""
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

    def load_states(self, graph: dict[str, Any], trainer: dict[str, Any], folder: Path) -> None:
        """Restores the result of ``states``; call it last, as it also sets the random generators. Collective."""
        graph = self._local_graph(graph, folder)
        try:
            if trainer["extra"]:
                self.model.load_state_dict({**self.model.state_dict(), **trainer["extra"]})
            for name, value in trainer["buffers"].items():
                owner, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(owner)
                # Replaced and not copied into: a buffer that grows with the longest input may have another size by now.
                module._buffers[leaf] = value.to(getattr(module, leaf).device)
            # `load_state_dict` takes param groups from the state: without this a changed optim.lr would have no effect.
            if self.changes(trainer["settings"]):
                graph = self._with_own_settings(graph)
            # A captured step reads the learning rate from a tensor at a fixed address. `load_state_dict` puts another
            # tensor in its place, so the old one is filled and restored.
            rates = [group["lr"] for group in self.optimizer.param_groups]
            parameters = self._parameters
            for number, state in graph[OPTIMIZER]["state"].items():
                like = parameters[number]
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == like.shape:
                        state[name] = shard_like(like, value)
            self.graph.load_state_dict({"model": self.model.state_dict(), **graph})
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                if isinstance(rate, Tensor):
                    group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
            self._restore_random(trainer, done=int(graph[STEP]))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            what = f"{folder}: its optimizer or schedule is another ({first_line(error)})"
            raise SnapshotError(f"{what} · fix: {_FIX}") from error

    def _local_graph(self, graph: dict[str, Any], folder: Path) -> dict[str, Any]:
        # without the optimizer states of other stages' weights
        parameters = self._parameters
        every = graph[OPTIMIZER]["state"].items()
        states = {number: state for number, state in every if not on_other_stage(parameters[number])}
        graph = {**graph, OPTIMIZER: {**graph[OPTIMIZER], "state": states}}
        if not (folder / SHARDS).is_dir():
            return graph
        from graphckpt.train.snapshot import dcp  # noqa: PLC0415 - takes a second, for those who need it

        templates: dict[str, Tensor | None] = dict.fromkeys(extracted_shapes(graph))
        for number, state in states.items():
            like, shapes = parameters[number], extracted_shapes(state)
            templates |= {name: like for name, shape in shapes.items() if list(like.shape) == shape}
        local: dict[str, Any] = restore_sharded(graph, dcp.read(folder / SHARDS, templates, self.ranks.control))
        return local

    def _with_own_settings(self, graph: dict[str, Any]) -> dict[str, Any]:
        self._step_schedule(int(graph[STEP]))
        update_state = self.graph._update.state_dict()
        schedule = {SCHEDULER: update_state[SCHEDULER]} if SCHEDULER in update_state else {}
        return {**graph, **schedule, OPTIMIZER: {**update_state[OPTIMIZER], "state": graph[OPTIMIZER]["state"]}}

    def _step_schedule(self, step: int) -> None:
        # to where it is after `step` updates
        scheduler = self.graph._update.schedulers[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped before
            for _ in range(step - self._num_scheduled if scheduler is not None else 0):
                scheduler.step()  # most schedules compute a learning rate from the previous one, so they cannot jump
        self._num_scheduled = step

    def settings_in(self, graph: dict[str, Any], folder: Path, info: RunInfo) -> dict[str, Any]:
        """Returns settings for a snapshot that has none: those of this run, where its state shows no others.

        The state has param groups and schedule at its iteration alone: values that this run would have there are taken
        to be this run's from the start.
        """
        file, name, like = folder / STATE.format("graph"), self.settings["optimizer"], self.graph.state_dict()
        groups = []
        with reading(file, _FIX):
            check_graph(graph, like, self.optimizer, done=info["done"], num_states=info.get("optimizer_states"))
            self._step_schedule(int(graph[STEP]))
            present = self._groups_and_schedule()
            saved = _plain_settings(graph[OPTIMIZER]["param_groups"], graph.get(SCHEDULER, {}))
            for then, now, first in zip(saved["groups"], present["groups"], self.settings["groups"], strict=True):
                odd = sorted(key for key in then.keys() ^ now.keys() if not key.startswith("clip_grad_"))
                # an optimizer may have other keys under another version of PyTorch
                if odd and info["machine"]["torch"] == torch.__version__:
                    what = f"optim: expected the optimizer whose states the snapshot has, got {name}"
                    raise SnapshotError(f"{file}: {what}, as only one of the two has {', '.join(odd)} · fix: {_FIX}")
                groups.append({key: first[key] if now.get(key) == value else value for key, value in then.items()})
        schedule = (self.settings if saved["schedule"] == present["schedule"] else saved)["schedule"]
        return {**self.settings, "groups": groups, "schedule": schedule}

    # ---- random generators

    def _devices(self) -> tuple[torch.device, ...]:
        return rng_devices((*self.model.parameters(), *self.model.buffers(), torch.empty(0, device=self.device)))

    def _take_random(self) -> dict[str, Any]:
        cpu, devices, _ = get_rng_state(self._devices())
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        return {
            "cpu": cpu,
            "devices": [(str(device), state) for device, state in devices],
            "numpy": [str(kind), [int(key) for key in keys], *rest],
            "python": random.getstate(),
        }

    def _restore_random(self, trainer: dict[str, Any], done: int) -> None:
        """Restores the random generators; with another number of processes, all but the first are seeded anew."""
        each, config = trainer.get("random_of_each", [trainer["random"]]), self.ranks.config
        sizes = config.pipeline_parallel_size, config.data_parallel_size
        # Both must agree: 4 streams may be 4 data-parallel ranks, or 2 stages with 2 each, whose layers draw in another
        # order.
        if (trainer.get(STAGES, 1), len(each)) == (sizes[0], math.prod(sizes)):
            self._set_random(each[self.ranks.stream])
            return
        # Rank 0 goes on, and all other streams begin anew; `done` gives them other numbers at each such resume.
        self._set_random(trainer["random"])
        seed_per_rank(self.seed, self.ranks.stream, done=done)

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


@final
@dataclass(frozen=True, kw_only=True)
class Lack:
    """A field that snapshots of a format do not have yet."""

    file: str
    """The name of the state: ``graph`` or ``trainer``."""
    field: str
    default: Callable[[RunState, Mapping[str, Any], Path, RunInfo], Any]
    """Returns its value for the run that resumes, from the states, the folder and the manifest of the snapshot."""
    text: str
    """The line of the log about the default, which it may format."""


LACKS: dict[int, tuple[Lack, ...]] = {
    1: (
        Lack(
            file="trainer",
            field="settings",
            default=lambda run, states, folder, info: run.settings_in(states["graph"], folder, info),
            text="those of this config, train.seed={0[seed]} and {0[optimizer]}; a run that began with another seed or "
            "another optimizer of the same settings would not be noticed",
        ),
    ),
}
"""Fields that the next format added, by the number of the format without them."""


def _plain_settings(groups: list[dict[str, Any]], schedule: Mapping[str, Any]) -> dict[str, Any]:
    settings = [{key: group[key] for key in group if key != "params"} for group in groups]
    plain: dict[str, Any] = map_leaves({"groups": settings, "schedule": schedule}, lambda leaf, _: _plain(leaf))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    kinds = (bool, int, float, str)  # also of a subclass, such as a number of NumPy
    kind = next((kind for kind in kinds if isinstance(value, kind)), None)
    return kind(value) if kind is not None else None if value is None else type(value).__qualname__
