"""A package that is installed beside this one adds a rule, an offload target and a hook, which a config names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.small_run import CONFIG, same_weights, train
from helpers.third_party import BYTE_STORE, install

PACKAGE = f"""{BYTE_STORE}
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graphckpt.rules import Full, Rule
from graphckpt.stores import Offload
from graphckpt.train import HookBase


@dataclass(frozen=True)
class Counted(Rule):
    name: ClassVar[str] = "counted"

    def run(self, block, function, args, kwargs):
        calls["rule"] += 1
        return Full().run(block, function, args, kwargs)


@dataclass(frozen=True)
class CopiesTarget(Offload):
    name: ClassVar[str] = "copies"
    tier: ClassVar[str] = "disk"

    def byte_store_for(self, device, note):
        return CopyStore()


class Writes(HookBase):
    def after_step(self, loop):
        Path("calls.txt").write_text(f"{{loop.train_iter}} {{calls['rule']}} {{calls['put']}}")
"""
ENTRY_POINTS = """
[graphckpt.rules]
counted = third_party_plugin:Counted
[graphckpt.offload]
copies = third_party_plugin:CopiesTarget
"""
POLICY = """
model.config.n_embd = 64
train.update(train_iter=3)
train.evaluation.enabled = False
train.activation_checkpoint.update(enabled=True)
hooks = [{"_target_": "third_party_plugin.Writes"}]
"""


@pytest.mark.slow
def test_a_config_names_a_rule_an_offload_target_and_a_hook_of_an_installed_package(place: Path) -> None:
    folder = place / "site"
    install(folder, ENTRY_POINTS, third_party_plugin=PACKAGE)
    (place / "tiny.py").write_text(CONFIG + POLICY)
    assert train("train.activation_checkpoint.enabled=False", "hooks=[]", "train.output_dir=plain") == 0
    section = "train.activation_checkpoint"
    words = ["train", "--config-file", "tiny.py", f"{section}.rule=counted", f"{section}.offload=copies"]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # in a process of its own: what is registered by name stays registered
    done = subprocess.run(
        [sys.executable, "-m", "graphckpt", *words],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_steps, num_calls, num_puts = map(int, (place / "calls.txt").read_text().split())
    assert num_steps == 3
    assert num_calls >= 3
    assert num_puts >= num_calls
    assert same_weights(place / "out", place / "plain")
