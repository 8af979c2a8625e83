"""Hooks of one's own, named in a config file."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.small_run import CONFIG, train

from graphckpt import train as package
from graphckpt.cli import main
from graphckpt.train import HookBase
from graphckpt.train.snapshot import folder as snapshot

pytestmark = pytest.mark.usefixtures("place")

THIRD_PARTY = """
from pathlib import Path

from graphckpt.train import HookBase


class Counts(HookBase):
    def __init__(self, path, start=0):
        self.path, self.count = Path(path), start

    def after_step(self, loop):
        self.count += 1
        self.path.write_text(f"{self.count} of {loop.train_iter}")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
"""
HOOKS = """
from graphckpt.config import LazyCall
from third_party_hooks import Counts

hooks = [LazyCall(Counts)(path="first.txt"), LazyCall(Counts)(path="second.txt", start=100)]
train.update(train_iter=2)
train.evaluation.enabled = False
train.checkpointer.period = 1
"""


@pytest.fixture
def third_party(place: Path) -> Path:
    (place / "third_party_hooks.py").write_text(THIRD_PARTY)
    (place / "tiny.py").write_text(CONFIG + HOOKS)
    return place


def test_a_hook_of_another_package_is_named_in_a_config_and_goes_on_with_its_run(third_party: Path) -> None:
    assert train() == 0
    assert (third_party / "first.txt").read_text() == "2 of 2"
    assert (third_party / "second.txt").read_text() == "102 of 2"
    states = snapshot.read_state(third_party / "out" / "model_0000000", "trainer")["hooks"]
    assert (states["Counts-0"], states["Counts-1"]) == ({"count": 1}, {"count": 101})
    assert train("--resume", "train.train_iter=3") == 0
    assert (third_party / "first.txt").read_text() == "3 of 3"
    hooks = "hooks=[{_target_: third_party_hooks.Counts, path: third.txt}]"
    assert main(["train", "--config-file", "out/config.yaml", hooks, "train.output_dir=other"]) == 0
    assert (third_party / "third.txt").read_text() == "3 of 3"


def test_a_value_that_is_not_a_hook_is_one_error_before_the_run(
    third_party: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hooks, message in (
        ("[{_target_: builtins.dict}]", "hooks[0]: expected a HookBase, got dict · fix: call a class derived from"),
        ("[{_target_: third_party_hooks.Counts}]", "hooks[0]"),
        ("[{_target_: third_party_hooks.Missing}]", "third_party_hooks has no 'Missing'"),
        ("3", "hooks: expect"),
    ):
        assert train(f"hooks={hooks}") == 2
        assert message in capsys.readouterr().err
        assert not (third_party / "out" / "log.txt").exists()


def test_the_public_names_are_exported() -> None:
    assert package.HookBase is HookBase
    for name in ("HookBase", "Loop", "OwnData", "OwnLoss", "Task", "TextData", "TrainConfig", "Trainer"):
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing
