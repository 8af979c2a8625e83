"""The schema of the files of a snapshot, on their own and for the run that reads them."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.captured_steps import Train
from helpers.modules import as_module
from torch import nn
from torch.optim import lr_scheduler

from graphckpt.train.snapshot.folder import read_info
from graphckpt.train.snapshot.schema import (
    Count,
    FieldError,
    Number,
    SnapshotError,
    Text,
    check_graph,
    check_trainer,
    reading,
    validate,
)

ENTRY = {"bytes": 1, "crc32": 0}
INFO = {
    "format": 2,
    "run": "a1",
    "iteration": 3,
    "done": 4,
    "consumed_samples": 16,
    "data": {"num_samples": 9, "tokens_each": 16, "tokens": "tokens-1"},
    "machine": {"torch": "2.13", "threads": 1},
    "metrics": {"total_loss": 2.5},
    "optimizer_states": 3,
    "files": {"graph.pt": ENTRY, "trainer.pt": ENTRY, "model.safetensors": ENTRY},
}
OPTIMIZER, STEP = "System-Train-Optimizer-0", "System-Train-TrainStep"
WRONG = [None, -1, 10**30, 1e9, float("nan"), "", True, [], [1], {"a": "b"}]


def written(folder: Path, text: object) -> Path:
    (folder / "snapshot.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


def test_a_good_description_is_read(tmp_path: Path) -> None:
    assert read_info(written(tmp_path, INFO)) == INFO


@pytest.mark.parametrize("field", INFO)
def test_every_field_of_the_description_has_a_type(tmp_path: Path, field: str) -> None:
    for value in WRONG:
        if field == "metrics" and value == []:
            continue
        with pytest.raises(SnapshotError, match=rf"snapshot\.json: {field}[\w.]*: expected .*, got "):
            read_info(written(tmp_path, {**INFO, field: value}))
    if field != "optimizer_states":  # of later versions
        with pytest.raises(SnapshotError, match=rf"snapshot\.json: {field}: expected a value, got nothing"):
            read_info(written(tmp_path, {name: value for name, value in INFO.items() if name != field}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format: expected 1 or 2, got 99, which a newer version"),
        ({"consumed_samples": 3}, "done: expected iteration + 1, and at most consumed_samples, got 4"),
        ({"consumed_samples": 10**30}, "consumed_samples: expected at most 9007199254740992, got 1000"),
        ({"iteration": 4}, "done: expected iteration + 1, and at most consumed_samples, got 4"),
        ({"files": {"graph.pt": "x"}}, "files.graph.pt: expected an object, got 'x'"),
        ({"files": {"../graph.pt": ENTRY}}, "files: expected the name of a file in the folder or in shares, not '../g"),
        ({"files": {"graph.pt": {"bytes": 1}}}, "files: expected a crc32 of 'graph.pt', got"),
        ({"files": {}}, "files: expected an entry 'graph.pt', got {}"),
        ({"files": {"graph.pt": ENTRY, "trainer.pt": ENTRY}}, "files: expected an entry 'model.safetensors', got"),
        ({"machine": {"torch": "2", "threads": 0}}, "machine.threads: expected at least 1, got 0"),
        ({"data": {**INFO["data"], "num_samples": 0}}, "data.num_samples: expected at least 1, got 0"),
        ({"metrics": {"loss": None}}, "metrics.loss: expected a valid number, got None"),
    ],
)
def test_a_field_of_the_description_that_is_wrong_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(SnapshotError) as raised:
        read_info(written(tmp_path, {**INFO, **change}))
    assert str(raised.value).startswith(f"{tmp_path}/snapshot.json: {message}")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "1" * 10_000, '{"format": 2, "files": {}, "done": ' + "1" * 5000 + "}"]
)
def test_json_that_python_cannot_read_is_one_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(SnapshotError, match=r"snapshot\.json: \(all of it\): expected valid JSON: [^\n]*$"):
        read_info(written(tmp_path, text))
    with pytest.raises(SnapshotError, match=r"snapshot\.json: \(all of it\): expected .*, got \[1\]"):
        read_info(written(tmp_path, "[1]"))


def test_the_readers_say_what_they_expect() -> None:
    for kind, value in ((Count, True), (Count, 2.0), (Number, float("inf")), (Number, "1"), (Text, ""), (Text, 3)):
        with pytest.raises(FieldError, match=r"^a\.b: expected .*, got "):
            validate(kind, value, "a.b")
    with pytest.raises(FieldError, match=r"^a: expected a valid integer, got an object of type list$"):
        validate(Count, [1] * 1000, "a")
    with pytest.raises(FieldError, match=r"got a value too long to print$"):
        validate(Count, 10**5000, "a")
    with pytest.raises(SnapshotError, match=r"x\.pt: a: expected at least 0, got -4"), reading("x.pt"):
        validate(Count, -4, "a")
    with pytest.raises(SnapshotError, match=r"x\.pt: is broken \(KeyError: 'b'\)"), reading("x.pt"):
        copy.copy({})["b"]


def trainer_state(**changes: Any) -> dict[str, Any]:
    kind, keys, *rest = np.random.RandomState(0).get_state()
    generators = {
        "cpu": torch.get_rng_state(),
        "devices": [],
        "numpy": [kind, [int(key) for key in keys], *rest],
        "python": random.Random(0).getstate(),
    }
    settings = {"seed": 1, "optimizer": "torch.optim.AdamW", "groups": [{}], "schedule": {}}
    state = {"random": generators, "settings": settings, "buffers": {"mask": torch.ones(2)}, "extra": {}, "hooks": {}}
    return {**state, **changes}


def numpy_state(position: object) -> dict[str, Any]:
    state = trainer_state()["random"]
    return {**state, "numpy": [*state["numpy"][:2], position, *state["numpy"][3:]]}


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (5, "(all of it): expected a valid dictionary, got 5"),
        (trainer_state(hooks=3), "hooks: expected a valid dictionary, got 3"),
        (trainer_state(random={}), "random.cpu: expected a value, got nothing"),
        (trainer_state(random=numpy_state(-1)), "random.numpy[2]: expected at least 0, got -1"),
        (trainer_state(random=numpy_state(625)), "random.numpy[2]: expected at most 624, got 625"),
        (trainer_state(settings={**trainer_state()["settings"], "seed": -1}), "settings.seed: expected at least 0"),
        (trainer_state(random_of_each=[numpy_state(0)] * 2), "random_of_each: expected the generators of 1 processes"),
        (trainer_state(pipeline_parallel_size=2), "pipeline_parallel_size: expected 1, got 2"),
        (trainer_state(buffers={}), "buffers.mask: expected a tensor of torch.float32 and shape [2], got nothing"),
        (trainer_state(buffers={"mask": torch.ones(2, 2)}), "buffers.mask: expected a tensor of torch.float32 and"),
        (trainer_state(buffers={"mask": torch.ones(2), "no": torch.ones(2)}), "buffers.no: expected nothing, got"),
        (trainer_state(extra={"head._extra_state": 1}), "extra: expected the entries [], got ['head._extra_state']"),
    ],
)
def test_a_field_of_the_trainer_state_that_is_wrong_is_named(trainer: Any, message: str) -> None:
    run = {"buffers": {"mask": torch.zeros(2)}, "unsaved": ["mask"], "extra": [], "machine": {}}
    check_trainer(trainer_state(), **run)
    with pytest.raises(FieldError) as raised:
        check_trainer(trainer, **run)
    assert str(raised.value).startswith(message)


def test_several_processes_have_a_generator_each() -> None:
    run = {"buffers": {"mask": torch.zeros(2)}, "unsaved": [], "extra": [], "machine": {"data_parallel_size": 2}}
    check_trainer(trainer_state(random_of_each=[numpy_state(0)] * 2), **run)
    with pytest.raises(FieldError, match=r"^random_of_each: expected the generators of 2 processes, got 1"):
        check_trainer(trainer_state(), **run)
    run["machine"] = {"data_parallel_size": 2, "pipeline_parallel_size": 2}
    check_trainer(trainer_state(random_of_each=[numpy_state(0)] * 4, pipeline_parallel_size=2), **run)


@as_module(lambda: {"linear": nn.Linear(3, 3), "scale": nn.Parameter(torch.tensor(1.0))})
def Mixed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has parameters of 0, 1 and 2 dimensions."""
    return self.linear(x) * self.scale


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def step_of(make: MakeOptimizer) -> Train:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = make([p for p in model.parameters() if p.ndim == 2 or make is not torch.optim.Muon])
    return Train(model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n), capture="eager")


def graph_states(make: MakeOptimizer, steps: int = 3) -> tuple[dict[str, Any], Train]:
    """Returns the state after some steps, as a snapshot holds it, and a graph that has just begun."""
    graph = step_of(make)
    for _ in range(steps):
        graph(torch.ones(2, 3))
    state = graph.state_dict()
    del state["model"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True), step_of(make)


def check(state: dict[str, Any], fresh: Train, num_states: int) -> None:
    check_graph(state, fresh.state_dict(), fresh._update.optimizers[0], done=3, num_states=num_states)


class Custom(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter][f"own {number}"] = {"words": ["any", None, torch.ones(7)]}


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, Custom], ids=lambda kind: kind.__name__)
def test_the_states_of_every_optimizer_are_good(kind: type[torch.optim.Optimizer]) -> None:
    state, fresh = graph_states(kind)
    check(state, fresh, len(state[OPTIMIZER]["state"]))


def replaced(state: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**state, first: replaced(state[first], *rest, value=value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((STEP,), torch.tensor(9), f"{STEP}: expected an int64 scalar from 3 to 3, got"),
        ((STEP,), torch.tensor(3.0), f"{STEP}: expected an int64 scalar from 3 to 3, got"),
        ((STEP,), 3, f"{STEP}: expected an instance of Tensor, got 3"),
        ((OPTIMIZER,), [], f"{OPTIMIZER}: expected a valid dictionary, got []"),
        ((OPTIMIZER, "param_groups"), [], f"{OPTIMIZER}.param_groups: expected groups of [3] parameters, got []"),
        ((OPTIMIZER, "param_groups"), [{"params": [1, 0, 2]}], f"{OPTIMIZER}.param_groups: expected the parameters in"),
        ((OPTIMIZER, "state"), {}, f"{OPTIMIZER}.state: expected the states of 3 parameters, got {{}}"),
        ((OPTIMIZER, "state", 1, "exp_avg"), torch.ones(1, 3), f"{OPTIMIZER}.state[1].exp_avg: expected a tensor of "),
        (
            (OPTIMIZER, "state", 1, "exp_avg"),
            {"is among the shares": "a", "shape": [3, 4]},
            f"{OPTIMIZER}.state[1].exp_avg: expected a tensor of shape [3, 3], got",
        ),
    ],
)
def test_a_field_of_the_graphs_state_that_is_wrong_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    state, fresh = graph_states(torch.optim.AdamW)
    with pytest.raises(FieldError) as raised:
        check(replaced(state, *path, value=value), fresh, 3)
    assert str(raised.value).startswith(message)
