"""The schema of a config: every fault is reported, all of them in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from graphckpt.config import get_config
from graphckpt.config.lazy import read_calls
from graphckpt.config.schema import call_faults, check, read


@dataclass(frozen=True, kw_only=True)
class Inner:
    ratio: float = 0.5
    kind: Literal["a", "bb"] = "a"

    def faults(self) -> Iterator[Any]:
        if self.ratio > 1:
            yield f"ratio: {self.ratio} is above 1"


@dataclass(frozen=True, kw_only=True)
class Outer:
    needed: int
    maybe: int | None = None
    names: str | list[str] | None = None
    pair: tuple[int, float] = (1, 2.0)
    table: dict[str, dict[str, Any]] | None = None
    make: Callable[..., int] = int
    inner: Inner = field(default_factory=Inner)


def read_outer(outer: Any) -> Any:
    return read(Outer, {"t": read_calls(outer, "t", [])}, "t")


def faults_of_call(described: Any, where: Any) -> list[Any]:
    faults: list[str] = []
    described = read_calls(described, where, faults)
    return [*faults, *call_faults(described)]


def test_good_values_become_frozen_fields() -> None:
    given = {
        "needed": 1e3,
        "names": ["x"],
        "pair": [1, 2],
        "table": {"h.*": {"k": 1}},
        "make": {"_target_": "builtins.int"},
        "inner": {"ratio": 1, "kind": "bb"},
    }
    made, faults = read_outer(given)
    assert faults == []
    assert (made.needed, made.names, made.pair) == (1000, ["x"], (1, 2.0))
    assert type(made.inner.ratio) is float
    assert made.inner == Inner(ratio=1.0, kind="bb")
    assert made.make() == 0
    with pytest.raises(AttributeError):
        made.needed = 3


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"needed": True}, "t.needed: expected int, got True (bool)"),
        ({"needed": 1.5}, "t.needed: expected int, got 1.5 (float)"),
        ({"needed": None}, "t.needed: expected int, got None (null)"),
        ({"maybe": "x"}, "t.maybe: expected int, got 'x' (str)"),
        ({"names": 3}, "t.names: expected str or a list, got 3 (int)"),
        ({"names": ["a", 3]}, "t.names[1]: expected str, got 3 (int)"),
        ({"pair": [1]}, "t.pair: expected 2 values, got [1] (list)"),
        ({"pair": []}, "t.pair: expected 2 values, got [] (list)"),
        ({"pair": [1, 2, 3]}, "t.pair: expected 2 values, got [1, 2, 3] (list)"),
        ({"pair": 5}, "t.pair: expected a list, got 5 (int)"),
        ({"table": {"x": 3}}, "t.table.x: expected a mapping, got 3 (int)"),
        ({"make": 3}, "t.make: expected a call · fix: write LazyCall(target)(...), or a mapping with _target_"),
        ({"inner": 3}, "t.inner: expected a section, got 3 (int)"),
        ({"inner": {"kind": "b"}}, "t.inner.kind: expected 'a' or 'bb', got 'b' (str) · did you mean 'bb'?"),
        ({"inner": {"ratio": 2}}, "t.inner.ratio: 2.0 is above 1"),
        ({"innner": 2}, "t.innner: no such key · did you mean 'inner'?"),
        ({"names": [4, "a", 3]}, "t.names[0]: expected str, got 4 (int)\nt.names[2]: expected str, got 3 (int)"),
        ({"table": {1: {}}}, "t.table[1]: expected text as a key, got 1 · fix: quote it"),
        ({"inner": {3: "b"}}, "t.inner[3]: expected text as a key, got 3 · fix: quote it"),
        ({"inner": {"zzz": 2}}, "t.inner.zzz: no such key · fix: use one of ratio, kind"),
    ],
)
def test_each_fault_names_key_and_fix(given: dict[str, Any], fault: str) -> None:
    assert read_outer({"needed": 1, **given})[1] == fault.splitlines()


def test_all_faults_come_at_once() -> None:
    assert read_outer({})[1] == ["t.needed: is missing · fix: give it a value"]
    faults = read_outer({"maibe": 1, "pair": 5, "inner": {"ratio": 3, "kind": 4}})[1]
    keys = ["t.inner.kind", "t.inner.ratio", "t.maibe", "t.needed", "t.pair"]
    assert sorted(fault.split(":")[0] for fault in faults) == keys


def _target(*, width: int, rate: float = 0.1, **others: object) -> None: ...


def test_call_is_checked_against_the_signature_of_its_target() -> None:
    described = {"_target_": _target, "width": "wide", "rate": 1, "other": 3}
    assert faults_of_call(described, "model") == ["model.width: expected int, got 'wide' (str)"]
    described = {"_target_": "torch.optim.SGD", "lr": "fast", "momentun": 0.9}
    assert faults_of_call(described, "optim") == [
        "optim.lr: expected float or Tensor, got 'fast' (str)",
        "optim.momentun: no such key of SGD · did you mean 'momentum'?",
    ]
    assert faults_of_call({"_target_": "torch.optim.SDG"}, "optim")[0].startswith("optim: _target_ 'torch.optim.SDG'")


def test_call_within_a_call_is_checked_too() -> None:
    model = {
        "_target_": "transformers.GPT2LMHeadModel",
        "config": {"_target_": "transformers.GPT2Config", "n_layers": 3, "hidden_size": 8, "n_head": "x"},
    }
    assert faults_of_call(model, "model") == [
        (
            "model.config.n_layers: no such key of GPT2Config"
            " · did you mean 'n_layer' or 'num_labels' or 'num_hidden_layers'?"
        ),
        "model.config.n_head: expected int, got 'x' (str)",
    ]


def test_a_bad_config_lists_all_faults() -> None:
    config = get_config("quickstart.py")
    config.train.activation_checkpoint.enable = True  # libai takes this in silence
    config.train.seed = -1
    config.data.update(vocab_size=3, seq_lenght=8)
    config.optim.lrr = 0.9
    config.trian = {}
    config.optim.lr = "${nothing}"
    assert check(config) == (None, ["optim.lr: Interpolation key 'nothing' not found"])
    config.optim.lr = 1e-3
    run, faults = check(config)
    assert run is None
    assert sorted(faults) == [
        "data.seq_lenght: no such key of TextData · did you mean 'seq_length'?",
        "data.vocab_size: expected 257 or more, one for each byte, got 3",
        "optim.lrr: no such key of AdamW · did you mean 'lr'?",
        "train.activation_checkpoint.enable: no such key · did you mean 'enabled'?",
        "train.seed: expected 0 or more, got -1",
        "trian: no such key · did you mean 'train'?",
    ]


def test_missing_sections_are_named() -> None:
    faults = check(OmegaConf.create({"train": {}}))[1]
    assert faults == [f"{name}: is missing · fix: give it a value" for name in ("model", "optim", "data")]
