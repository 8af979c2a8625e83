"""Statements of SECURITY.md: no file creates foreign objects, and YAML runs no code until a training starts."""

from __future__ import annotations

import ast
import builtins
import copyreg
import pickle
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from graphckpt import ConfigError, GraphckptError
from graphckpt.config import LazyConfig, instantiate
from graphckpt.config.files import plain_values
from graphckpt.config.source import ConfigSource
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


def test_loading_a_yaml_imports_nothing_and_checking_it_imports_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    (tmp_path / "beside_the_config.py").write_text("import builtins\nbuiltins.was_imported = True\nVALUE = 1\n")
    path = tmp_path / "config.yaml"
    path.write_text("model: {_target_: beside_the_config.VALUE}\ntrain: {output_dir: '${oc.env:A_SECRET}'}\n")
    source = ConfigSource(path)
    assert not hasattr(builtins, "was_imported")
    assert plain_values(source.config)["train"]["output_dir"] == "${oc.env:A_SECRET}"
    assert source.config.train.output_dir == "hush"
    try:
        with pytest.raises(ConfigError, match="expected a callable"):
            source.describe()
        assert hasattr(builtins, "was_imported")
    finally:
        del builtins.was_imported  # type: ignore[attr-defined]


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


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def a_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


METADATA = "torch.distributed.checkpoint.metadata"
A_PATH = a_global("pathlib", "PosixPath")
MEMORY_FORMAT = a_global(METADATA, "_MEM_FORMAT_ENCODING")
GET_LAYOUT = a_global("torch.serialization", "_get_layout")
RECORD = a_global(METADATA, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
# A state goes into the `__dict__`, or, as the second of a pair, to `setattr`.
STATE = pickle.EMPTY_DICT + text("planted") + a_global("torch", "Size") + pickle.SETITEM
BUILT = STATE + pickle.BUILD
BUILT_BY_SETATTR = pickle.NONE + STATE + pickle.TUPLE2 + pickle.BUILD
ITEM = text("planted") + text("value")


@pytest.mark.parametrize(
    "opcodes",
    [
        A_PATH + BUILT_BY_SETATTR,
        A_PATH + BUILT,
        a_global(METADATA, "Metadata") + BUILT_BY_SETATTR,
        MEMORY_FORMAT + pickle.BININT1 + b"\0" + pickle.TUPLE1 + pickle.REDUCE + BUILT_BY_SETATTR,
        MEMORY_FORMAT + pickle.BININT1 + b"\0" + pickle.TUPLE1 + pickle.REDUCE + BUILT,
        GET_LAYOUT + BUILT_BY_SETATTR,
        GET_LAYOUT + BUILT,
        a_global("torch", "float32") + BUILT_BY_SETATTR,
        A_PATH + ITEM + pickle.SETITEM,
        A_PATH + pickle.MARK + ITEM + pickle.SETITEMS,
        A_PATH + ITEM[:9] + pickle.APPEND,
        A_PATH + pickle.MARK + ITEM + pickle.APPENDS,
        pickle.EMPTY_SET + pickle.MARK + ITEM + pickle.ADDITEMS,
        A_PATH + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
        pickle.MARK + A_PATH + pickle.OBJ,
        pickle.MARK + pickle.INST + b"pathlib\nPosixPath\n",
        pickle.EXT1 + b"\xf0",
        text("id") + pickle.BINPERSID,
        pickle.PERSID + b"id\n",
    ],
)
def test_a_list_of_tensors_changes_nothing_that_it_has_not_made(tmp_path: Path, opcodes: bytes) -> None:
    # A class that the program has registered, and that has been unpickled before, is not looked up again.
    copyreg.add_extension("pathlib", "PurePath", 0xF0)  # type: ignore[no-untyped-call]
    try:
        pickle.loads(pickle.PROTO + b"\x04" + pickle.EXT1 + b"\xf0" + pickle.STOP)
        (tmp_path / ".metadata").write_bytes(
            pickle.PROTO + b"\x04" + opcodes + pickle.POP + RECORD + pickle.EMPTY_DICT + pickle.BUILD + pickle.STOP
        )
        with pytest.raises(GraphckptError, match=r"cannot be read \(it (changes an object of|holds an opcode)"):
            dcp.names(tmp_path)
    finally:
        copyreg.remove_extension("pathlib", "PurePath", 0xF0)  # type: ignore[no-untyped-call]
        copyreg.clear_extension_cache()
    targets = (PosixPath, Metadata, _MEM_FORMAT_ENCODING, _MEM_FORMAT_ENCODING(0), torch.serialization._get_layout)
    assert not any(hasattr(target, "planted") for target in targets)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("outside", ["../other.distcp", "/dev/zero"])
def test_a_list_of_tensors_names_no_file_outside_of_its_folder(tmp_path: Path, outside: str) -> None:
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert dcp.names(tmp_path) == ["weight"]
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for entry in metadata.storage_data.values():
        entry.relative_path = outside
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(GraphckptError, match="outside of its folder"):
        dcp.names(tmp_path)


def test_a_broken_list_of_tensors_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shares"
    folder.mkdir()
    whole = pickle.dumps({"name": 2**40, "number": [1.5, "x" * 300]}, protocol=4)
    for length in range(len(whole) + 1):
        (folder / ".metadata").write_bytes(whole[:length])
        with pytest.raises(GraphckptError, match="shares: cannot be read"):
            dcp.names(folder)
