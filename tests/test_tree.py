"""Calls and values taken apart into leaves, and put together again."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, GPT2Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from graphckpt.errors import ConfigError
from graphckpt.tree import build_value, flatten_call, flatten_value


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Record:
    x: Any
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    n: int = 3


@dataclass
class Parent:
    child: Record
    rest: list[Any]

    def __post_init__(self) -> None:
        self.extra = "not a field"


T = torch.arange(3.0)
CONTAINERS: dict[str, tuple[Any, int]] = {
    "tensor": (T, 1),
    "none": (None, 1),
    "list": ([T, 1, None], 3),
    "tuple": ((T,), 1),
    "empty": ([], 0),
    "size": ([T, T.shape, Record(T, {"shape": T.shape})], 4),
    "dict": ({"a": T, "b": {"c": [T]}}, 2),
    "ordered dict": (OrderedDict(b=T, a=1), 2),
    "default dict": (defaultdict(list, a=T), 1),
    "deque": (deque([T, 2]), 2),
    "named tuple": (Pair(T, [None]), 2),
    "dataclass": (Record(T, {"k": [T]}), 2),
    "frozen dataclass with slots": (Frozen(T), 2),
    "nested dataclasses": (Parent(Record(T), [Record(T), 1]), 3),
    "dataclass in a list": ([1, Record(T), 2], 3),
    "model output": (BaseModelOutputWithPast(last_hidden_state=T, hidden_states=(T, T)), 3),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_values_come_back_with_other_leaves(case: str) -> None:
    value, count = CONTAINERS[case]
    leaves, spec = flatten_value(value)
    assert len(leaves) == count
    again = build_value(spec, leaves)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    replaced = [leaf + 100 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    other = flatten_value(build_value(spec, replaced))[0]
    assert all(a is b for a, b in zip(other, replaced, strict=True))
    assert repr(value) == repr(CONTAINERS[case][0]), "the original must not change"


def test_attributes_that_are_no_fields_stay() -> None:
    leaves, spec = flatten_value(Parent(Record(T), []))
    assert build_value(spec, leaves).extra == "not a field"


@pytest.mark.parametrize(
    "value", [DynamicCache(), GPT2Config(), Record(1, {"k": None}), torch.nn.Linear(1, 1), {1, 2}, print]
)
def test_a_value_that_holds_no_tensors_or_is_opaque_passes_by_reference(value: Any) -> None:
    leaves, spec = flatten_value([value, T])
    assert leaves[0] is value
    assert build_value(spec, leaves)[0] is value


def ring(x: Any) -> Record:
    record = Record(x)
    record.more["inner"] = [Record({"outer": record})]
    return record


def test_a_dataclass_that_contains_itself_passes_by_reference_without_tensors() -> None:
    value = ring(1)
    leaves, _ = flatten_value([value, T])
    assert leaves[0] is value


def test_a_container_of_tensors_that_contains_itself_is_one_clear_error() -> None:
    endless: list[Any] = [T]
    endless.append(endless)
    for value, name in ((ring(T), "a Record"), (endless, "a container")):
        with pytest.raises(ConfigError, match=rf"contain themselves, got {name} that does · fix: "):
            flatten_value(value)
        with pytest.raises(ConfigError, match="contain themselves"):
            flatten_call((value,), {})


def test_the_spec_holds_no_tensor() -> None:
    tensor, inner = torch.ones(3), torch.ones(4)
    refs = [weakref.ref(t.untyped_storage()) for t in (tensor, inner)]
    gc.disable()
    try:
        spec = flatten_value(Parent(Record(tensor), [Record(inner)]))[1]
        shape = flatten_call((Record(tensor),), {"k": [inner]})[1]
        del tensor, inner
        assert [ref() for ref in refs] == [None, None]
        assert (spec, shape) != (None, None)
    finally:
        gc.enable()


def test_containers_are_fresh_and_leaves_are_not() -> None:
    given_list = [T, {"k": T}]
    leaves, shape = flatten_call((given_list,), {})
    (again,), _ = shape.assemble(leaves)
    assert again is not given_list
    assert again[1] is not given_list[1]
    assert again[0] is given_list[0] is T


def function(hidden: Any, *rest: Any, scale: Any = None, **more: Any) -> None: ...


NAMES: list[tuple[tuple[Any, ...], dict[str, Any], list[str]]] = [
    ((T,), {}, ["hidden"]),
    ((T, 1, 2), {"scale": 3, "other": T}, ["hidden", "rest[0]", "rest[1]", "scale", "other"]),
    (([T, (T, 1)],), {}, ["hidden[0]", "hidden[1][0]", "hidden[1][1]"]),
    (({"a": T, "b": [T]}, [T]), {"scale": {"s": 1}}, ["hidden['a']", "hidden['b'][0]", "rest[0][0]", "scale['s']"]),
    ((Record(T, {"k": [T]}),), {}, ["hidden.x", "hidden.more['k'][0]"]),
    (([1, Record([T], {}), Pair(T, 2)],), {}, ["hidden[0]", "hidden[1].x[0]", "hidden[2].a", "hidden[2].b"]),
    (
        (T,),
        {"scale": Parent(Record(T), [Frozen(T)])},
        ["hidden", "scale.child.x", *(f"scale.rest[0].{f}" for f in "xn")],
    ),
]


@pytest.mark.parametrize(("args", "kwargs", "names"), NAMES)
def test_leaves_are_named_as_the_user_would(args: Any, kwargs: Any, names: list[str]) -> None:
    leaves, shape = flatten_call(args, kwargs)
    assert shape.names(function) == names
    assert len(leaves) == len(names)
    assert [shape.name(position, function) for position in range(len(names))] == names


def test_names_of_functions_without_a_signature() -> None:
    _, shape = flatten_call((T, [T]), {"k": 1})
    assert shape.names(torch.add) == ["argument 0", "argument 1[0]", "k"]
    assert shape.names(lambda x: x) == ["x", "argument 1[0]", "k"]


def test_thousands_of_leaves_are_named_quickly() -> None:
    _, shape = flatten_call(([T] * 5000,), {})
    assert shape.names(function)[4999] == "hidden[4999]"


VALUES = st.recursive(
    st.sampled_from([None, 1, "text", 2.5, T, torch.float32, torch.Size([1])]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner)
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from(["k", "j"]), VALUES))
def test_any_nesting_comes_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    leaves, shape = flatten_call(tuple(args), kwargs)
    again_args, again_kwargs = shape.assemble(leaves)
    assert repr((list(again_args), again_kwargs)) == repr((args, kwargs))
    assert len(shape.names(function)) == len(leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert all(tensor is T for tensor in tensors)
    assert repr((args, kwargs)).count("tensor(") == len(tensors)
