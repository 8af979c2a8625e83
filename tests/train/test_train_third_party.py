"""A package that is installed beside this one adds a rule, an offload target and a hook, which a config names."""

# ruff: noqa: F811 - pytest asks for the imported fixture by its name

from __future__ import annotations

import os
import subprocess
import sys

from small_run import CONFIG, place, same_weights, train  # noqa: F401 - a fixture

PACKAGE = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from graphckpt.rules import Full, Rule
from graphckpt.stores import ByteHandle, ByteStore, Offload
from graphckpt.train import HookBase

calls = {"rule": 0, "put": 0}


@dataclass(frozen=True)
class Counted(Rule):
    name: ClassVar[str] = "counted"

    def run(self, block, function, args, kwargs):
        calls["rule"] += 1
        return Full().run(block, function, args, kwargs)


class Copied(ByteHandle):
    def __init__(self, data):
        super().__init__(data.numel())
        self.data = data


class Copies(ByteStore):
    label = "copies"
    tier = "disk"

    def put(self, data, group):
        calls["put"] += 1
        return Copied(data.clone())

    def get(self, handle, group):
        return handle.data.clone()

    def free(self, handle):
        handle.data = None


@dataclass(frozen=True)
class CopiesTarget(Offload):
    name: ClassVar[str] = "copies"
    tier: ClassVar[str] = "disk"

    def byte_store_for(self, device, note):
        return Copies()


class Writes(HookBase):
    def after_step(self, loop):
        Path("calls.txt").write_text(f"{loop.train_iter} {calls['rule']} {calls['put']}")
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


def test_a_config_names_a_rule_an_offload_target_and_a_hook_of_an_installed_package(place):
    folder = place / "site"
    metadata = folder / "third_party_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "third_party_plugin.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
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
