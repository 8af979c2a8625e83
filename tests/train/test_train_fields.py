"""Each field of a snapshot has a type and a range: whatever else stands there is one error, and soon."""

# ruff: noqa: F811 - pytest asks for the imported fixture by its name

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import signal
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from helpers.small_run import place, stopped, train  # noqa: F401
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import lr_scheduler

from graphckpt import Graph
from graphckpt.train.snapshot.folder import Snapshots
from graphckpt.train.snapshot.saved_run import SavedRun
from graphckpt.train.snapshot.schema import (
    IN_LINE,
    Count,
    FieldError,
    Number,
    SnapshotError,
    Text,
    _Hooks,
    check_graph,
    reading,
    validate,
)

SNAPSHOT = "model_0000003"
WRONG: list[Any] = [None, -1, -5, 10**30, 1e9, float("nan"), "x", "", True, [], {}, [1], {"a": 1}]
GONE = object()
"""Stands for a field that is taken out."""
SECONDS = 60


@pytest.fixture
def run(place, monkeypatch, capsys):
    """A snapshot, and a function that resumes from it and returns what the error says; ``None`` if there is none."""
    stopped("out", 4, "train.log_period=3", "train.evaluation.eval_period=2")
    kept = place / "kept"
    shutil.copytree(place / "out", kept)

    def late(*_):
        raise TimeoutError(f"no end within {SECONDS} s")

    monkeypatch.setattr(signal, "SIGALRM", signal.SIGALRM)
    before = signal.signal(signal.SIGALRM, late)

    def resume() -> str | None:
        capsys.readouterr()
        signal.alarm(SECONDS)
        try:
            code = train("--resume", "train.train_iter=5", "train.log_period=3", "train.evaluation.eval_period=5")
        finally:
            signal.alarm(0)
        error = capsys.readouterr().err
        if code == 0:
            shutil.rmtree(place / "out")
            shutil.copytree(kept, place / "out")
            return None
        assert code == 2, error
        return error

    yield resume
    signal.signal(signal.SIGALRM, before)


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each field of nested containers; of long lists, the first and the last one."""
    if path:
        yield path
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from paths(value, (*path, key))
    elif isinstance(node, list | tuple):
        for number_of in sorted({0, len(node) - 1} if node else ()):
            yield from paths(node[number_of], (*path, number_of))


def changed(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of nested containers with another value, or without one, in one place."""
    first, *rest = path
    if isinstance(node, Mapping):
        made: Any = dict(node)
        if not rest and value is GONE:
            del made[first]
        else:
            made[first] = value if not rest else changed(node[first], tuple(rest), value)
        return made
    items = list(node)
    if not rest and value is GONE:
        del items[first]
    else:
        items[first] = value if not rest else changed(node[first], tuple(rest), value)
    return type(node)(items)


def sealed(folder, name) -> None:
    """Corrects size and checksum of a file that was changed."""
    info = json.loads((folder / "snapshot.json").read_text())
    content = (folder / name).read_bytes()
    info["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / "snapshot.json").write_text(json.dumps(info))


def is_one_line(error: str | None, file: str) -> bool:
    return error is not None and error.startswith("error: ") and len(error.splitlines()) == 1 and file in error


def is_good(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a value can stand in a field of snapshot.json."""
    if path[0] == "metrics" and path[1:] and value is GONE:
        return True  # what was measured is told, and not needed
    if path[0] == "files" and path[1:] == (path[-1],) and value is GONE:
        return path[-1] not in {"graph.pt", "trainer.pt", "model.safetensors"}  # what a resume does not read
    if path[0] == "metrics" and path[1:]:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if path == ("metrics",):
        return value == {} or value == {"a": 1}
    if path == ("run",) or path[-1] == "torch":
        return value == "x"
    if path == ("data", "tokens"):
        return value in (None, "x")
    return path == ("optimizer_states",) and value is GONE


@pytest.mark.slow
def test_every_field_of_snapshot_json(place, run):
    folder = place / "out" / SNAPSHOT
    info = json.loads((folder / "snapshot.json").read_text())
    assert {path[0] for path in paths(info)} == {
        *("format", "run", "iteration", "done", "consumed_samples", "data", "metrics", "machine", "optimizer_states"),
        "files",
    }
    accepted = []
    for path in paths(info):
        for value in [GONE, *WRONG]:
            if is_good(path, value) or value == _at(info, path):
                continue
            (folder / "snapshot.json").write_text(json.dumps(changed(info, path, value)))
            try:
                Snapshots(place / "out").last()
                error = ""
            except SnapshotError as raised:
                error = f"error: {raised}"
            if not is_one_line(error, f"{SNAPSHOT}/") or str(path[-1]).split("/")[-1] not in error:
                accepted.append((path, value if value is not GONE else "gone", error))
    assert accepted == []


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def may_be(state: Any, path: tuple[Any, ...], value: Any) -> bool:
    """Whether a value can stand in a field of graph.pt or trainer.pt without another result."""
    old = _at(state, path)
    if value is not GONE and type(old) is type(value) and not isinstance(old, torch.Tensor) and bool(old == value):
        return True
    if "param_groups" in path and path[-1] not in {"params", "param_groups"} and isinstance(path[-1], str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        return (_flag(old) and _flag(value)) or (not _flag(old) and is_number)
    if "LRScheduler" in str(path[0]) and len(path) > 1:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        return (_flag(old) and _flag(value)) or (path[1] in {"base_lrs", "_last_lr"} and len(path) == 3 and is_number)
    if path[:2] == ("hooks", "BestHook-0"):
        is_best = type(value) in {int, float, type(None)} and value == value
        return (path[2:] == () and value is GONE) or (path[2:] == ("best",) and is_best)
    if path[0] == "settings" and len(path) > 1:  # compared with the run's, and never used
        is_other = {
            "seed": type(value) is int and value >= 0,
            "optimizer": isinstance(value, str) and value != "",
            "groups": len(path) > 3 or value == [] or (len(path) == 3 and (value is GONE or isinstance(value, dict))),
            "schedule": len(path) > 2 or isinstance(value, dict),
        }
        return is_other[path[1]]
    if path == ("hooks", "LogHook-0", "sums", "lm_loss") and value is GONE:
        return True  # the task says which losses there are
    if path[-1] == "step" and path[0] == "System-Train-Optimizer-0":
        return False
    if path in {("random", "numpy", 4), ("random", "python", 2)}:
        return (type(value) in {int, float} and abs(value) <= 40) or (path[1] == "python" and value is None)
    return False


def cases(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields each field of a state with each value that cannot stand there."""
    for value in (None, 5, "x", [], {}):
        yield (), value
    for path in paths(state):
        for value in [GONE, *WRONG, torch.ones(2, 2)] if not _is_repeated(path) else []:
            if not may_be(state, path, value):
                yield path, value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graph", "trainer"])
def test_every_field_of_the_states(place, run, monkeypatch, name):
    """Each value is put into the file, and what reads it in a run that goes on is called with it."""
    folder = place / "out" / SNAPSHOT
    state = torch.load(folder / f"{name}.pt", weights_only=True)
    restore = SavedRun.restore
    accepted, counted = [], 0

    def restore_each(*args: Any, **how: Any) -> None:
        nonlocal counted
        for path, value in cases(state):
            counted += 1
            signal.alarm(SECONDS)
            torch.save(changed(state, path, value) if path else value, folder / f"{name}.pt")
            try:
                restore(*args, **how)
                error = ""
            except SnapshotError as raised:
                error = f"error: {raised}"
            if not is_one_line(error, f"{name}.pt"):
                accepted.append((path, value if value is not GONE else "gone", error))
        torch.save(state, folder / f"{name}.pt")
        restore(*args, **how)

    monkeypatch.setattr(SavedRun, "restore", restore_each)
    assert run() is None
    assert accepted == []
    assert counted > 200


@pytest.mark.parametrize("name", ["graph", "trainer"])
def test_some_fields_by_the_command_line(place, run, name):
    folder = place / "out" / SNAPSHOT
    state = torch.load(folder / f"{name}.pt", weights_only=True)
    for path, value in random.Random(4).sample(list(cases(state)), 6):
        torch.save(changed(state, path, value) if path else value, folder / f"{name}.pt")
        sealed(folder, f"{name}.pt")
        assert is_one_line(run(), f"{name}.pt"), (path, value)


def _is_repeated(path: tuple[Any, ...]) -> bool:
    """Whether a field is one of many alike, of which others are changed."""
    return "state" in path and len(path) > 2 and isinstance(path[2], int) and path[2] not in {0, 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumed_samples": -1}, "consumed_samples: expected at least 0, got -1"),
        ({"consumed_samples": 3}, "done: expected iteration + 1, and at most consumed_samples, got 4"),
        ({"consumed_samples": 10**30}, "consumed_samples: expected at most 9007199254740992, got 1000"),
        ({"done": -5}, "done: expected at least 1, got -5"),
        ({"done": 1e9}, "done: expected a valid integer, got 1000000000.0"),
        ({"iteration": 4}, "done: expected iteration + 1, and at most consumed_samples, got 4"),
        (
            {"done": 10**9, "iteration": 10**9 - 1},
            "done: expected iteration + 1, and at most consumed_samples, got 1000000000",
        ),
        (
            {"done": 10**9, "iteration": 10**9 - 1, "consumed_samples": 10**12},
            "graph.pt: System-Train-TrainStep: expected an int64 scalar from 1000000000 to 1000000000, got tensor(4)",
        ),
        ({"files": {"graph.pt": "x"}}, "files.graph.pt: expected an object, got 'x'"),
        (
            {"files": {"../out/graph.pt": {"bytes": 1, "crc32": 0}}},
            "files: expected the name of a file in the folder or in shares, not '../out/graph.pt', got",
        ),
        ({"files": {}}, "files: expected an entry 'graph.pt', got {}"),
        (
            {"machine": {"torch": "2", "threads": 1, "data_parallel_size": 2}},
            "trainer.pt: random_of_each: expected the generators of 2 processes, got 1",
        ),
        (
            {"machine": {"torch": "2", "threads": 1, "pipeline_parallel_size": 2}},
            "trainer.pt: random_of_each: expected the generators of 2 processes, got 1",
        ),
        ({"machine": {"torch": "2", "threads": 0}}, "machine.threads: expected at least 1, got 0"),
        ({"optimizer_states": 3}, "System-Train-Optimizer-0.state: expected the states of 3 parameters, got"),
    ],
)
def test_a_field_that_is_wrong_is_named(place, run, change, message):
    file = place / "out" / SNAPSHOT / "snapshot.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    error = run()
    assert is_one_line(error, SNAPSHOT)
    assert message in error


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "1" * 10_000, '{"format": 2, "files": {}, "done": ' + "1" * 5000 + "}"]
)
def test_json_that_python_cannot_read_is_one_error(place, run, text):
    (place / "out" / SNAPSHOT / "snapshot.json").write_text(text)
    assert is_one_line(run(), f"{SNAPSHOT}/snapshot.json: (all of it): expected valid JSON: ")


def test_weights_of_another_kind_are_one_error(place, run):
    folder = place / "out" / SNAPSHOT
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name].to(torch.int64)}, folder / "model.safetensors", {"format": "pt"})
    sealed(folder, "model.safetensors")
    assert is_one_line(run(), f"{name} is torch.int64, not torch.float32")


def test_an_unchanged_snapshot_is_resumed(run):
    assert run() is None


def test_the_readers_say_what_they_expect(tmp_path):
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


class _Mixed(nn.Module):
    """Has parameters of 0, 1 and 2 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class _Step(Graph):
    def __init__(self, make, schedule) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = _Mixed()
        model = self.model.origin
        matrices = [one for one in model.parameters() if one.ndim == 2]
        optimizer = make(matrices if make is torch.optim.Muon else list(model.parameters()))
        self.add_optimizer(optimizer, lr_sch=schedule(optimizer))

    def build(self, x):
        loss = self.model(x).square().sum()
        loss.backward()
        return loss


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
]
SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}


def _checked(make, schedule, steps=3):
    graph = _Step(make, schedule)
    for _ in range(steps):
        graph(torch.ones(2, 3))
    state = graph.state_dict()
    del state["model"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = _Step(make, schedule)
    like = fresh.state_dict()
    check_graph(
        torch.load(file, weights_only=True),
        like,
        fresh._update.optimizers[0],
        fresh._update.schedulers[0],
        done=steps,
        num_states=len(state["System-Train-Optimizer-0"]["state"]),
        has_changed=False,
    )
    return state


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_states_of_every_optimizer_are_good(kind):
    assert _checked(kind, SCHEDULES["lambda"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_states_of_schedules_are_good(schedule):
    assert _checked(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), SCHEDULES[schedule])


def test_the_state_of_an_optimizer_of_another_package_is_good():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for number_of, parameter in enumerate(self.param_groups[0]["params"]):
                self.state[parameter][f"own {number_of}"] = {"words": ["any", None, 3]}

    assert _checked(lambda p: Own(p, lr=0.1), SCHEDULES["lambda"])


def test_a_line_of_the_log_that_is_not_written_yet():
    """On a device the log is one line behind, so that a snapshot contains one."""
    late = {"iteration": 2, "losses": ["total_loss"], "metrics": {**dict.fromkeys(IN_LINE, 1.0), "total_loss": 2.5}}
    state = {"LogHook-0": {"sums": {}, "iterations": 0, "late": late}}
    assert validate(_Hooks, state, "hooks") == state
    refused = 0
    for path in [path for path in paths(state) if "late" in path]:
        for value in [GONE, *WRONG] if path[-1] != "late" else WRONG[1:]:
            if path[-1] in {*IN_LINE, "total_loss"} and type(value) in {int, float} and abs(value) < float("inf"):
                continue
            if (value == [] and path[-1] == "losses") or (value is GONE and path[-1] == 0):
                continue  # a line without losses is possible
            with pytest.raises(FieldError, match=r"^hooks\.LogHook-0\.late"):
                validate(_Hooks, changed(state, path, value), "hooks")
            refused += 1
    assert refused > 100
