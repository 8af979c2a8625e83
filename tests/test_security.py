"""Statements of SECURITY.md: no file creates foreign objects, and YAML runs no code until a training starts."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from graphckpt import ConfigError, GraphckptError
from graphckpt.config import LazyConfig, instantiate
from graphckpt.train.snapshot import dcp
from graphckpt.train.snapshot.folder import read_state

SOURCES = sorted((Path(__file__).parent.parent / "graphckpt").rglob("*.py"))
LOADERS = {"pickle.load", "pickle.loads", "marshal.loads", "shelve.open", "yaml.load"}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yields the file and the function of each call, as it is written."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.name, ast.unparse(node.func), node


def test_no_source_unpickles_and_every_torch_load_is_weights_only() -> None:
    found = [(name, function) for name, function, _ in calls() if function in {*LOADERS, "eval", "exec"}]
    assert found == [("files.py", "exec")]
    loads = [(name, call) for name, function, call in calls() if function == "torch.load"]
    assert loads
    for name, call in loads:
        (value,) = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
        assert getattr(value, "value", None) is True, name


class Stranger:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_strangers_object_in_a_snapshot_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    sign = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Stranger(sign)))
    assert sign.exists()
    sign.unlink()
    torch.save({"step": Stranger(sign)}, tmp_path / "graph.pt")
    with pytest.raises(GraphckptError, match=r"graph\.pt: cannot be read"):
        read_state(tmp_path, "graph")
    assert not sign.exists()


def test_a_yaml_tag_that_would_call_is_an_error_and_a_target_runs_only_when_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir"):
        path.write_text(f"train: {tag} [{tmp_path / 'made'}]\n")
        with pytest.raises(ConfigError, match="could not determine a constructor"):
            LazyConfig.load(path)
        assert not (tmp_path / "made").exists()
    path.write_text(f"model: {{_target_: os.mkdir, path: {tmp_path / 'made'}}}\n")
    config = LazyConfig.load(path)
    assert not (tmp_path / "made").exists()
    instantiate(config.model)
    assert (tmp_path / "made").is_dir()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_strangers_object_among_shares_of_several_processes_is_not_made(tmp_path: Path) -> None:
    sign, folder = tmp_path / "it ran", tmp_path / "shares"
    torch.distributed.checkpoint.save({"weight": Stranger(sign)}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(GraphckptError, match="has no weight"):
        dcp.read(folder, {"weight": torch.ones(2)}, None)
    (folder / ".metadata").write_bytes(pickle.dumps(Stranger(sign)))
    with pytest.raises(GraphckptError, match=r"which a list of tensors never contains"):
        dcp.names(folder)
    assert not sign.exists()
