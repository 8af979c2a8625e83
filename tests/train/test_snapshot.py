"""Snapshots as files: whole or absent, safe to read, and clear about what is wrong with them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot.folder import Snapshots, SnapshotWriteError, periodic_name
from graphckpt.train.snapshot.schema import SnapshotError
from graphckpt.train.snapshot.weights import distinct_tensors, load_weights, read_weights

INFO = {
    "run": "r",
    "iteration": 0,
    "done": 1,
    "consumed_samples": 4,
    "data": {"num_samples": 9, "tokens_each": 16, "tokens": None},
    "metrics": {},
    "machine": {"torch": "2", "threads": 1},
}


def _write(folder: Path, value: float = 1.0, run: str = "r", **more: Any) -> None:
    snapshot.write(
        folder,
        weights={"w": torch.full((3,), value)},
        states={"graph": {"step": 1}, "trainer": {"random": torch.get_rng_state()}},
        info={**INFO, "run": run},
        **more,
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_written_snapshot_is_read_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "model_best"
    _write(folder, companions=lambda folder: (folder / "config.json").write_text("{}"))
    assert _names(tmp_path) == ["model_best"]
    assert _names(folder) == ["config.json", "graph.pt", "model.safetensors", "snapshot.json", "trainer.pt"]
    assert snapshot.check(folder)["run"] == "r"
    assert snapshot.read_state(folder, "graph") == {"step": 1}
    assert torch.equal(read_weights(folder)["w"], torch.ones(3))
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    _write(folder, 2.0)
    assert _names(tmp_path) == ["model_best"]
    assert read_weights(folder)["w"][0] == 2


def test_a_whole_snapshot_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model_best"
    synced = []
    monkeypatch.setattr(snapshot, "sync", lambda path: synced.append((path.name, target.exists())))
    _write(target)
    assert {name for name, has_name in synced if not has_name} == {*_names(target), ".model_best.tmp"}
    assert (tmp_path.name, True) in synced


class _Killed(BaseException):
    """Ends the writer where it is, as a kill does: nothing is cleaned up."""


@pytest.mark.parametrize("number", range(12))
def test_killed_at_any_call_of_the_system_the_old_or_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Each rename and each sync is a place to die; at every one of them what the folder holds is whole."""
    _write(tmp_path / "model_best", 1.0)
    calls = iter(range(1000))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                raise _Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "sync", dying(snapshot.sync))
        patch.setattr(type(tmp_path), "rename", dying(type(tmp_path).rename))
        try:
            _write(tmp_path / "model_best", 2.0)
            died = False
        except _Killed:
            died = True
    assert died == (next(calls) == number + 1)
    snapshot.recover(tmp_path)
    assert _names(tmp_path) == ["model_best"]
    snapshot.check(tmp_path / "model_best")
    assert float(read_weights(tmp_path / "model_best")["w"][0]) in {1.0, 2.0}


class _Full:
    def write(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("broken", ["save_file", "sync", "torch.save"])
def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    _write(tmp_path / "model_best")
    if broken == "torch.save":  # whose writer has words of its own
        save = torch.save
        monkeypatch.setattr(torch, "save", lambda state, file: save(state, _Full()))
    else:
        monkeypatch.setattr(snapshot, broken, lambda *_, **__: _Full().write())
    with pytest.raises(SnapshotWriteError, match=r"model_best: No space left on device$"):
        _write(tmp_path / "model_best", 2.0)
    assert _names(tmp_path) == ["model_best"]
    assert read_weights(tmp_path / "model_best")["w"][0] == 1


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "graph.pt", "trainer.pt"])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_cut_short, r"is broken, [\d,]+ bytes of [\d,]+"),
        (_flip, "is broken: its checksum does not match"),
        (lambda path: path.unlink(), "No such file or directory"),
    ],
)
def test_a_broken_file_is_named_and_the_snapshot_before_it_is_offered(
    tmp_path: Path, name: str, break_it: Callable[[Path], object], message: str
) -> None:
    for iteration in (3, 7, 11):
        _write(tmp_path / periodic_name(iteration))
    Snapshots(tmp_path).mark_last("model_0000011")
    break_it(tmp_path / "model_0000011" / name)
    _flip(tmp_path / "model_0000007" / "graph.pt")  # not whole either
    command = rf"echo model_0000003 > {tmp_path}/last_checkpoint, then --resume"
    with pytest.raises(SnapshotError, match=rf"model_0000011/{name}: {message} · fix: resume from .*{command}$"):
        Snapshots(tmp_path).last()
    Snapshots(tmp_path).mark_last("model_0000003")  # what the command does
    assert Snapshots(tmp_path).last()[0].name == "model_0000003"


def test_a_snapshot_that_is_alone_and_broken_says_so(tmp_path: Path) -> None:
    _write(tmp_path / "model_0000003")
    Snapshots(tmp_path).mark_last("model_0000003")
    (tmp_path / "model_0000003" / "snapshot.json").write_text("{")
    message = r"snapshot\.json: .* expected valid JSON: .* no other snapshot here is whole"
    with pytest.raises(SnapshotError, match=message):
        Snapshots(tmp_path).last()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the name of a folder, got ''"),
        ("../elsewhere\n", "expected the name of a folder, got '../elsewhere'"),
        ("..\n", r"expected the name of a folder, got '\.\.'"),
        ("model_0000003/..", r"expected the name of a folder, got 'model_0000003/\.\.'"),
        (".", r"expected the name of a folder, got '\.'"),
        ("/", "expected the name of a folder, got '/'"),
        ("a\0b", r"expected the name of a folder, got 'a\\x00b'"),
        ("model_0000009\n", "names model_0000009, which is not there"),
    ],
)
def test_last_checkpoint_that_makes_no_sense(tmp_path: Path, text: str, message: str) -> None:
    _write(tmp_path / "model_0000003")
    (tmp_path / "last_checkpoint").write_text(text)
    with pytest.raises(SnapshotError, match=rf"{message}.* · fix: resume from model_0000003"):
        Snapshots(tmp_path).last()


def test_prune_keeps_the_newest_of_this_run_alone(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    _write(tmp_path / "model_0000001", run="another")
    for iteration in (3, 7, 11, 15, 99):
        _write(tmp_path / periodic_name(iteration))
    _write(tmp_path / "model_best")
    snapshots.prune("model_0000015", 2, "r")
    assert snapshots.names() == ["model_0000001", "model_0000011", "model_0000015", "model_0000099", "model_best"]
    snapshots.prune("model_0000015", 1, "r")
    assert snapshots.names() == ["model_0000001", "model_0000015", "model_0000099", "model_best"]


def test_tied_weights_and_views_are_saved_once_and_loaded_whole(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    weights = distinct_tensors(dict(model.state_dict()))
    assert list(weights) == ["a.weight"]
    snapshot.write(tmp_path / "model_best", weights=weights, states={}, info=INFO)
    other = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    other["b"].weight = other["a"].weight
    load_weights(other, load_file(tmp_path / "model_best" / "model.safetensors"), "x")
    assert torch.equal(other["b"].weight, model["a"].weight)


def test_weights_of_another_model_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(3), "1.bias": torch.ones(2), "2.bias": torch.ones(2)}
    faults = r"1\.weight is missing, 2\.bias is unknown, 0\.bias is \(3,\), not \(2,\) · fix: describe the model"
    with pytest.raises(SnapshotError, match=rf"here: is of another model: {faults}"):
        load_weights(model, weights, "here")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
