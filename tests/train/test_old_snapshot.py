"""Runs of earlier versions are resumed: ``old_runs/README.md`` says which commits have written them."""

from __future__ import annotations

import functools
import json
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_on_ranks
from helpers.small_run import StopAfter, equal, rows_of, same_weights, stopped, train, trainer_of, writer_of
from safetensors.torch import load_file

from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.snapshot import folder as snapshot
from graphckpt.train.snapshot import schema
from graphckpt.train.snapshot.run_state import LACKS
from graphckpt.train.snapshot.schema import FORMAT, READABLE, FormatError, SnapshotError
from graphckpt.train.snapshot.weights import read_weights

OLD_RUNS = Path(__file__).with_name("old_runs")
WORDS = ["model.config.n_layer=1", "model.config.n_embd=8", "data.vocab_size=270"]
AMP = ["train.amp.enabled=True", "train.amp.dtype=float16"]
ZERO = [
    *("train.dist.data_parallel_size=2", "train.train_micro_batch_size=1"),
    *("train.zero_optimization.enabled=True", "train.zero_optimization.stage=3"),
]
LAST = "model_0000003"
DEFAULT = (
    "format 1 has no settings in trainer.pt · default: those of this config, train.seed=1234 and "
    "torch.optim.adamw.AdamW; a run that began with another seed"
)


class Look(HookBase):
    """Notes the whole state as it was read."""

    def before_train(self, loop: Loop) -> None:
        state = writer_of(loop)._state
        self.weights = {name: value.clone() for name, value in state.weights().items()}
        self.states = state.states({})
        self.states["trainer"]["hooks"] = loop.hook_states()
        torch.save(self.states, "read.pt")
        self.states = torch.load("read.pt", weights_only=True)


def old_run(name: str, place: Path) -> float:
    """Extracts a run into ``out``, and returns its last snapshot."""
    with zipfile.ZipFile(OLD_RUNS / f"{name}.zip") as archive:
        archive.extractall(place)
    return place / "out" / LAST


def states_of(folder: Path) -> dict[str, Any]:
    return {name: snapshot.read_state(folder, name) for name in ("graph", "trainer")}


def rewrite(folder: Path, state: object = None, **fields: Any) -> None:
    """Replaces ``trainer.pt`` and fields of the manifest of a snapshot, with right sizes and checksums."""
    info = json.loads((folder / "snapshot.json").read_text())
    if state is not None:
        torch.save(state, folder / "trainer.pt")
        data = (folder / "trainer.pt").read_bytes()
        info["files"]["trainer.pt"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "snapshot.json").write_text(json.dumps({**info, **fields}))


def as_format_1(folder: Path) -> Any:
    """Takes out of a snapshot what its format 1 did not have; returns the snapshot."""
    state = snapshot.read_state(folder, "trainer")
    del state["settings"]
    rewrite(folder, state, format=1)
    return folder


def test_every_format_that_is_read_has_a_run_here_and_says_what_it_lacks() -> None:
    assert {int(path.stem.split("_")[1]) for path in OLD_RUNS.glob("format_*.zip")} >= set(READABLE)
    assert sorted(LACKS) == [*range(1, FORMAT)]
    assert [*READABLE] == [1, 2]
    for number in READABLE:
        with zipfile.ZipFile(OLD_RUNS / f"format_{number}.zip") as archive:
            assert json.loads(archive.read(f"out/{LAST}/snapshot.json"))["format"] == number


@pytest.mark.parametrize("number", READABLE)
def test_every_bit_of_a_snapshot_of_an_earlier_version_is_read(place: Path, number: int) -> None:
    old = old_run(f"format_{number}", place)
    written = states_of(old)
    look = Look()
    result = trainer_of("out", *WORDS, *AMP, hooks=(look,), resume=True).train()
    assert result.iterations == 10
    assert equal(look.weights, load_file(old / "model.safetensors"))
    assert equal(look.states["graph"], written["graph"])
    for name in ("random", "buffers", "extra", "hooks"):
        assert equal(look.states["trainer"][name], written["trainer"][name])
    assert [row["iteration"] for row in rows_of(place / "out")] == [0, 2, 5, 8, 9]
    assert snapshot.check(place / "out" / "model_final")["run"] == snapshot.read_info(old)["run"]
    assert snapshot.read_info(place / "out" / "model_final")["format"] == FORMAT


@pytest.mark.parametrize("number", READABLE)
def test_a_resumed_old_run_continues_as_one_that_was_not_stopped(
    place: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    old = old_run(f"format_{number}", place)
    stopped("here", 4, *WORDS, *AMP)
    # Another processor may have rounded the old run's sums differently: then it cannot end in the same bits.
    is_exact = equal(load_file(old / "model.safetensors"), load_file(place / "here" / LAST / "model.safetensors"))
    trainer_of("plain", *WORDS, *AMP).train()
    capsys.readouterr()
    assert train("--resume", *WORDS, *AMP) == 0
    log = capsys.readouterr().out
    assert (DEFAULT in log) == (number == 1)
    # A release of torch other than that of the old run is named, and nothing else has changed.
    assert not re.search(r"(?<!processes )changed since|processes changed since: (?!torch )", log)
    assert same_weights(place / "out", place / "plain", torch.equal if is_exact else near)
    if is_exact:
        then, now = (states_of(place / name / "model_final") for name in ("plain", "out"))
        assert equal(then["graph"], now["graph"])
        assert equal(then["trainer"]["random"], now["trainer"]["random"])
        assert then["trainer"]["settings"] == now["trainer"]["settings"]
        assert rows_of(place / "out") == rows_of(place / "plain")


near = functools.partial(torch.allclose, rtol=1e-3, atol=1e-4)


def test_shards_of_two_ranks_are_read_by_one(place: Path) -> None:
    old = old_run("format_1_two_ranks", place)
    weights, random = read_weights(old), states_of(old)["trainer"]["random_of_each"]
    look = Look()
    one = ["train.train_micro_batch_size=2", "train.zero_optimization.enabled=False"]
    trainer_of("out", *WORDS, *one, hooks=(look, StopAfter(5)), resume=True).train()
    assert equal(look.weights, weights)
    assert len(random) == 2
    assert snapshot.check(place / "out" / "model_0000004")["format"] == FORMAT


def go_on(rank: int, folder: Path) -> None:
    del rank, folder
    trainer_of("out", *WORDS, *ZERO, resume=True).train()


def run_plainly(rank: int, folder: Path) -> None:
    del rank, folder
    trainer_of("plain", *WORDS, *ZERO).train()
    trainer_of("here", *WORDS, *ZERO, hooks=(StopAfter(4),)).train()


@pytest.mark.multi_process
@pytest.mark.slow
def test_shards_continue_on_two_ranks_as_if_never_stopped(place: Path) -> None:
    old = old_run("format_1_two_ranks", place)
    run_on_ranks(run_plainly, place)
    run_on_ranks(go_on, place)
    is_exact = equal(read_weights(old), read_weights(place / "here" / LAST))
    assert same_weights(place / "out", place / "plain", torch.equal if is_exact else near)
    then, now = (states_of(place / name / "model_final")["trainer"] for name in ("plain", "out"))
    assert then["settings"] == now["settings"]
    if is_exact:
        assert equal(then["random_of_each"], now["random_of_each"])


def stop_on_two(rank: int, folder: Path) -> None:
    del rank, folder
    for kind in ("tensor", "pipeline"):
        words = [*WORDS, "model.config.n_layer=2", f"train.dist.{kind}_parallel_size=2"]
        trainer_of(f"{kind} plain", *words).train()
        trainer_of(kind, *words, hooks=(StopAfter(5),)).train()


def resume_on_two(rank: int, folder: Path) -> None:
    del rank, folder
    for kind in ("tensor", "pipeline"):
        words = [*WORDS, "model.config.n_layer=2", f"train.dist.{kind}_parallel_size=2"]
        trainer_of(kind, *words, resume=True).train()


@pytest.mark.multi_process
@pytest.mark.slow
def test_parts_of_layers_and_stages_continue_without_settings(place: Path) -> None:
    run_on_ranks(stop_on_two, place)
    for kind in ("tensor", "pipeline"):
        as_format_1(place / kind / "model_0000004")
    run_on_ranks(resume_on_two, place)
    for kind in ("tensor", "pipeline"):
        assert "format 1 has no settings" in (place / kind / "log.txt").read_text()
        assert same_weights(place / kind, place / f"{kind} plain")
        then, now = (states_of(place / name / "model_final")["trainer"] for name in (f"{kind} plain", kind))
        assert then["settings"] == now["settings"]
        assert equal(then["random"], now["random"])


# ---- what format 1 lacks: the settings of the run


def test_a_snapshot_without_settings_is_what_the_old_code_has_written(place: Path) -> None:
    """``as_format_1`` stands for other runs of 37f83c5 below."""
    old = old_run("format_1", place)
    stopped("here", 4, *WORDS, *AMP)
    one, other = states_of(as_format_1(place / "here" / LAST)), states_of(old)
    assert one["trainer"].keys() == other["trainer"].keys()
    assert one["graph"].keys() == other["graph"].keys()
    assert one["trainer"]["hooks"].keys() == other["trainer"]["hooks"].keys()


SCHEDULES = """
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR, SequentialLR, StepLR


def cycle(optimizer, *, max_iter, warmup_iter):
    return OneCycleLR(optimizer, 0.05, total_steps=max_iter + 1)


def parts(optimizer, *, max_iter, warmup_iter):
    restarts = CosineAnnealingWarmRestarts(optimizer, 2)
    return SequentialLR(optimizer, [StepLR(optimizer, 1, gamma=0.7), restarts], [3])


def tensor_rate(params, lr):
    return torch.optim.SGD(params, lr=torch.tensor(lr), momentum=0.9)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train.scheduler._target_=moving_schedules.cycle", "optim._target_=torch.optim.SGD", "optim.momentum=0.9"],
        ["train.scheduler._target_=moving_schedules.parts"],
        ["optim._target_=moving_schedules.tensor_rate"],
        ["optim.amsgrad=True", "train.seed=5"],
    ],
    ids=["momentum moves too", "schedules in a schedule", "tensor rate", "amsgrad"],
)
def test_settings_that_move_are_those_of_the_run_bit_by_bit(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (place / "moving_schedules.py").write_text(SCHEDULES)
    text = (place / "tiny.py").read_text()
    if any("scheduler" in word for word in words):
        text += "del train.scheduler['warmup_factor'], train.scheduler['alpha']\n"
    if any("SGD" in word or "tensor_rate" in word for word in words):
        text += "for key in ('betas', 'eps', 'weight_decay'):\n    optim.pop(key, None)\n"
    (place / "tiny.py").write_text(text)
    trainer_of("plain", *WORDS, *words).train()
    stopped("out", 5, *WORDS, *words)
    as_format_1(place / "out" / "model_0000004")
    capsys.readouterr()
    assert train("--resume", *WORDS, *words) == 0
    log = capsys.readouterr().out
    assert "format 1 has no settings" in log
    assert "changed since" not in log
    assert same_weights(place / "out", place / "plain")
    then, now = (states_of(place / name / "model_final") for name in ("plain", "out"))
    assert equal(then["graph"], now["graph"])
    assert then["trainer"]["settings"] == now["trainer"]["settings"]


def test_changed_settings_take_effect_and_are_named_as_in_the_newest_format(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = {}
    for name in ("out", "newest"):
        stopped(name, 5, *WORDS)
    as_format_1(place / "out" / "model_0000004")
    words = ["optim.lr=0.02", "optim.betas=[0.8, 0.9]", "optim.params.clip_grad_max_norm=0.5"]
    for name in ("out", "newest"):
        capsys.readouterr()
        assert train("--resume", f"train.output_dir={name}", *WORDS, *words) == 0
        logs[name] = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
    assert logs["out"] == logs["newest"]
    assert "lr, betas, schedule changed since" in logs["out"][0]
    assert same_weights(place / "out", place / "newest")
    assert rows_of(place / "out") == rows_of(place / "newest")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["optim.amsgrad=True"],
            "optim.amsgrad: expected False, with which the optimizer's states were made",
        ),
        (["optim._target_=torch.optim.Adam"], "optim.decoupled_weight_decay: expected True, with which"),
        (["optim._target_=torch.optim.Adamax"], "got torch.optim.adamax.Adamax, as only one of the two has amsgrad, "),
        (["optim._target_=torch.optim.NAdam"], "got torch.optim.nadam.NAdam, as only one of the two has amsgrad, "),
    ],
)
def test_an_optimizer_that_its_states_do_not_fit_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    stopped("out", 5, *WORDS)
    as_format_1(place / "out" / "model_0000004")
    assert train("--resume", *WORDS, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "fix: resume with the " in error
    assert not (place / "out" / "model_final").exists()


def test_the_newest_format_needs_what_the_older_ones_lack(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = old_run("format_2", place)
    state = snapshot.read_state(old, "trainer")
    del state["settings"]
    rewrite(old, state)
    assert train("--resume", *WORDS, *AMP) == 2
    assert f"{LAST}/trainer.pt: settings: expected a value, got nothing" in capsys.readouterr().err


@pytest.mark.parametrize("state", [3, [], {"hooks": 3}])
def test_a_broken_state_of_an_older_format_is_one_error(
    place: Path, capsys: pytest.CaptureFixture[str], state: object
) -> None:
    old = old_run("format_1", place)
    rewrite(old, state)
    assert train("--resume", *WORDS, *AMP) == 2
    assert f"{LAST}/trainer.pt: " in capsys.readouterr().err


# ---- other uses of an older snapshot


def test_an_older_snapshot_is_evaluated_loaded_and_removed_as_others_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = old_run("format_1", place)
    metrics = trainer_of("out", *WORDS, eval_only=True).evaluate()
    again = trainer_of("other", *WORDS, f"train.load_weight={old}", eval_only=True).evaluate()
    assert metrics == again
    assert train("--resume", *WORDS, *AMP, "train.checkpointer.max_to_keep=1") == 0
    assert not old.exists(), "a run keeps as many snapshots as it says, of any format"


def test_a_broken_snapshot_leads_back_to_an_older_format(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_run("format_1", place)
    stopped("out", 5, *WORDS, *AMP, resume=True)
    (place / "out" / "model_0000004" / "graph.pt").write_bytes(b"")
    assert train("--resume", *WORDS, *AMP) == 2
    assert f"fix: resume from {LAST}, the previous one: " in capsys.readouterr().err


# ---- the number itself


@pytest.mark.parametrize(
    ("number", "got"),
    [(0, "0"), (-1, "-1"), ("1", "'1'"), (None, "None"), (True, "True"), (1.5, "1.5"), ([1], "[1]"), ({}, "{}")],
)
def test_a_broken_number_is_a_broken_snapshot(place: Path, number: object, got: str) -> None:
    old = old_run("format_1", place)
    rewrite(old, format=number)
    with pytest.raises(SnapshotError, match=r"snapshot\.json: format: expected ") as raised:
        snapshot.Snapshots(place / "out").last()
    assert f", got {got} · fix: no other snapshot here is whole" in str(raised.value)
    assert not isinstance(raised.value, FormatError)


def test_no_number_is_a_broken_snapshot(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = old_run("format_1", place)
    info = json.loads((old / "snapshot.json").read_text())
    del info["format"]
    (old / "snapshot.json").write_text(json.dumps(info))
    assert train("--resume", *WORDS, *AMP) == 2
    assert "snapshot.json: format: expected a value, got nothing" in capsys.readouterr().err


@pytest.mark.parametrize("number", [FORMAT + 1, 99, 10**30])
def test_a_newer_format_is_refused_before_its_fields_are_read(
    place: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """It may have none of ours. Going back to an older snapshot, or to the start, would lose what it holds."""
    old = old_run("format_1", place)
    (old / "snapshot.json").write_text(json.dumps({"format": number, "parts": {}}))
    before = sorted(path.name for path in (place / "out").iterdir())
    assert train("--resume", *WORDS, *AMP) == 2
    error = capsys.readouterr().err
    assert f"snapshot.json: format: expected 1 or 2, got {number}, which a newer version of graphckpt has writ" in error
    assert "fix: update graphckpt, or start a run from the weights: train.load_weight=" in error
    assert error.count("fix:") == 1
    assert sorted(path.name for path in (place / "out").iterdir()) == before
    assert train("--eval-only", *WORDS) == 2
    assert "which a newer version of graphckpt has written" in capsys.readouterr().err


def test_a_format_that_is_too_old_is_refused_by_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = old_run("format_1", place)
    monkeypatch.setattr(schema, "READABLE", range(2, 4))
    with pytest.raises(FormatError) as raised:
        snapshot.Snapshots(place / "out").last()
    assert str(raised.value) == (
        f"{old}/snapshot.json: format: expected 2 or 3, got 1, which an older version of graphckpt has written · fix: "
        f"resume once with a version that writes format 2, or start a run from the weights: train.load_weight={old}"
    )
