"""`compile` on a block: its forward is compiled once for equal blocks, and its policy holds around it."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from zoo import chain, differing, run_steps

import graphckpt
from graphckpt import ConfigError

pytestmark = [  # the compiler reads `.grad` of what it is given, and says so
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": True},
    "one tile": {"tiles": 1},
    "slab": {"contiguous": True, "min_elements": 1},
    "full, disk": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", POLICIES)
def test_bits_are_those_of_the_compiled_block(policy: str) -> None:
    model = chain("mlp")
    with graphckpt.apply(model, {"[123]": {"compile": {"backend": "aot_eager"}}}):
        compiled = run_steps(model)
    model = chain("mlp")
    with graphckpt.apply(model, {"[123]": POLICIES[policy] | {"compile": {"backend": "aot_eager"}}}) as handle:
        assert differing(run_steps(model), compiled) == []
        x = torch.randn(300, 16)
        with handle.measure():
            model(x).sum().backward()
        rows = handle.explain(show=False).rows
    first = next(row for row in rows if row.block == "1")
    assert first.rule.endswith(", compiled")
    assert first.bytes_after < first.bytes_before or policy == "slab"


def test_equal_blocks_are_compiled_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = chain("mlp", length=6)
    with graphckpt.apply(model, {"[1-6]": {"compile": {"backend": counter}, "activation_checkpointing": True}}):
        run_steps(model)
    assert counter.frame_count == 1


def test_a_compiled_part_of_a_recomputed_block_runs_again_with_it() -> None:
    model = chain("mlp")
    with graphckpt.apply(model, {"[123].up": {"compile": {"backend": "aot_eager"}}}):
        compiled = run_steps(model)
    counter = CompileCounterWithBackend("aot_eager")
    model = chain("mlp")
    rules = {"[123]": True, "[123].up": {"compile": {"backend": counter}}}
    with graphckpt.apply(model, rules) as handle:
        assert differing(run_steps(model), compiled) == []
        with handle.measure():
            model(torch.randn(300, 16)).sum().backward()
        rules_of = {row.block: row.rule for row in handle.explain(show=False).rows}
    assert counter.frame_count <= 2  # the input of the second run is a leaf, which the compiler tells apart
    assert rules_of["1.up"] == "part, compiled"


def test_the_default_backend_draws_the_same_masks_twice() -> None:
    def grads(policy: dict[str, Any]) -> list[Tensor]:
        model = chain("mlp", length=1)
        torch.manual_seed(3)
        with graphckpt.apply(model, {"1": policy | {"compile": True}}):
            for _ in range(2):
                model(torch.ones(64, 16)).sum().backward()
        return [p.grad for p in model.parameters()]

    plain, ours = grads({}), grads({"activation_checkpointing": True})
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_it_follows_the_model_into_copies_and_pickles() -> None:
    model = chain("mlp")
    with graphckpt.apply(model, {"1": {"compile": {"backend": "aot_eager"}, "activation_checkpointing": True}}):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert twin[1].forward.compile_options == {"backend": "aot_eager"}
            assert differing(run_steps(twin), run_steps(copy.deepcopy(model))) == []


def test_flags_that_cannot_act_say_so() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList([chain("mlp")])})
    with graphckpt.apply(model, {"list": {"compile": True}}) as handle:
        model["list"][0](torch.ones(2, 16)).sum().backward()
        assert "it has no forward" in handle._watcher._idle["list"]
    model = chain("mlp")
    rules = {"1": {"activation_checkpointing": "selective", "compile": {"backend": "aot_eager"}}}
    with graphckpt.apply(model, rules) as handle:
        model(torch.ones(2, 16)).sum().backward()
        assert any("cannot see the ops of compiled code" in w for w in handle.explain(show=False).warnings)
    with pytest.raises(ConfigError, match=r"1\.compile: 'yes' is neither yes nor no nor options"):
        graphckpt.apply(model, {"1": {"compile": "yes"}})


@pytest.mark.parametrize("policy", [True, "selective", {"offload": "disk", "min_elements": 1}])
def test_a_part_that_its_owner_has_compiled_in_place_runs_again_with_its_block(policy: Any) -> None:
    """The compiler then looks at what is called meanwhile, and at hooks as well."""
    plain = run_steps(chain("mlp"))
    model = chain("mlp")
    counter = CompileCounterWithBackend("aot_eager")
    for number in (1, 2, 3):
        model[number].up.compile(backend=counter)  # a class of PyTorch, whose own code the compiler passes over
    fields = policy if isinstance(policy, dict) else {"activation_checkpointing": policy}
    with graphckpt.apply(model, {"[123]": fields}) as handle:
        assert differing(run_steps(model), plain) == []
        with handle.measure():
            model(torch.randn(300, 16)).sum().backward()
    assert counter.frame_count == 0, "a hook of ours was compiled"
