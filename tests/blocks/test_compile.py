"""`compile` on a block: its forward is compiled once for equal blocks, and its policy holds around it."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.hard_modules import BatchNorm, Parametrized, chain, differing, run_steps
from helpers.layer_stacks import residual_layers
from helpers.modules import as_module
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

import graphckpt
from graphckpt import ConfigError, RecomputeError

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler reads `.grad` of what it is given, and says so.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": True},
    "one tile": {"tiles": 1},
    "slab": {"contiguous": True, "min_elements": 1},
    "full, disk": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
}


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


@pytest.mark.slow
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


def test_compile_options_follow_the_model_into_copies_and_pickles() -> None:
    model = chain("mlp")
    with graphckpt.apply(model, {"1": {"compile": {"backend": "aot_eager"}, "activation_checkpointing": True}}):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert twin[1].forward.compile_options == {"backend": "aot_eager"}
            assert differing(run_steps(twin), run_steps(copy.deepcopy(model))) == []


def test_selective_says_that_it_cannot_see_compiled_ops() -> None:
    model = chain("mlp")
    rules = {"1": {"activation_checkpointing": "selective", "compile": {"backend": "aot_eager"}}}
    with graphckpt.apply(model, rules) as handle:
        model(torch.ones(2, 16)).sum().backward()
        assert any("cannot see the ops of compiled code" in w for w in handle.explain(show=False).warnings)


@as_module(lambda rate: {"linear": nn.Linear(16, 16), "rate": rate})
def _DropsPath(self: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.rand(len(x), 1).add(1 - self.rate).floor() / (1 - self.rate)
    return x + torch.sin(self.linear(x) * self.rate) * mask


def test_layers_that_share_compiled_code_with_dynamic_numbers() -> None:
    """The code of a later layer may be used in the recomputation of an earlier one: see docs/limits.md."""
    for options in ({}, {"dynamic": False}):
        torch._dynamo.reset()
        model = nn.Sequential(*(_DropsPath(rate) for rate in (0.1, 0.2, 0.3, 0.4)))
        plain, ours = copy.deepcopy(model), model
        graphckpt.apply(plain, {"*": {"compile": {"backend": "aot_eager", **options}}})
        graphckpt.apply(ours, {"*": {"activation_checkpointing": True, "compile": {"backend": "aot_eager", **options}}})
        if options:
            assert differing(run_steps(plain), run_steps(ours)) == []
        else:
            with pytest.raises(RecomputeError, match=r"if it is compiled, compile=\{'dynamic': False\}"):
                run_steps(ours)


@pytest.mark.parametrize("policy", [True, "selective", {"offload": "disk", "min_elements": 1}])
def test_a_part_that_its_owner_has_compiled_in_place_runs_again_with_its_block(
    policy: bool | str | dict[str, object],
) -> None:
    """The compiler then looks at what is called meanwhile, and at hooks as well."""
    plain = run_steps(chain("mlp"))
    model = chain("mlp")
    counter = CompileCounterWithBackend("aot_eager")
    for number in (1, 2, 3):
        model[number].up.compile(backend=counter)  # a class of PyTorch, whose code the compiler passes over up to 2.13
    fields = policy if isinstance(policy, dict) else {"activation_checkpointing": policy}
    with graphckpt.apply(model, {"[123]": fields}) as handle:
        assert differing(run_steps(model), plain) == []
        with handle.measure():
            model(torch.randn(300, 16)).sum().backward()
    ops = {node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert ops <= {F.linear}, "a hook of ours was compiled"


def compiled_layers() -> nn.Sequential:
    return nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in chain("mlp")))


def compiled_parts() -> nn.Sequential:
    model = chain("mlp")
    for number in (1, 2, 3):
        model[number].up = torch.compile(model[number].up, backend="aot_eager")
    return model


def compiled_below() -> nn.Sequential:
    model = chain("mlp")
    for number in (1, 2, 3):
        model[number] = nn.Sequential(nn.Sequential(torch.compile(model[number], backend="aot_eager")))
    return model


@pytest.mark.parametrize("policy", [True, "selective", {"activation_checkpointing": True, "offload": "disk"}])
@pytest.mark.parametrize("make", [compiled_layers, compiled_parts, compiled_below])
def test_an_object_of_torch_compile_is_recomputed_with_its_block(
    make: Callable[[], nn.Sequential], policy: bool | str | dict[str, object]
) -> None:
    plain = run_steps(make())
    torch._dynamo.reset()
    model = make()
    with graphckpt.apply(model, {"[123]": policy}) as handle:
        assert differing(run_steps(model), plain) == []
        with handle.measure():
            model(torch.randn(300, 16)).sum().backward()
        reruns = {row.block: row.reruns for row in handle.explain(show=False).rows}
    assert [reruns[name] for name in "123"] == [1, 1, 1]


def test_a_change_of_the_mode_before_backward_reaches_no_compiled_part() -> None:
    def step(model: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(1)
        loss = model(torch.ones(8, 16)).square().sum()
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        return [p.grad for p in model.parameters()]

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), torch.compile(nn.Sequential(nn.Dropout(0.5)), backend="aot_eager"))

    plain, model = step(make()), make()
    graphckpt.apply(model, {"": True})
    for a, b in zip(plain, step(model), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_policy_within_a_compiled_module_acts_in_its_graph(in_place: bool) -> None:
    """Of equal layers the compiler traces one, so that the wrappers of the others know nothing of it."""
    for _ in range(2):  # the second model shares the code of the first
        model = chain("mlp") if in_place else compiled_layers()
        for layer in model if in_place else ():
            layer.compile(backend="aot_eager")
        with graphckpt.apply(model, {"[123]" if in_place else "[123]._orig_mod": True}) as handle:
            for _ in range(2):
                model(torch.randn(300, 16)).sum().backward()
            with handle.measure():
                model(torch.randn(300, 16)).sum().backward()
            try:
                warnings = handle.explain(show=False).warnings
            except graphckpt.GraphError as error:
                warnings = (str(error),)
        assert len(warnings) == 1
        assert "torch.compile has made it a part of a larger graph" in warnings[0]


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return residual_layers(count)


def saved_and_gradients(model: nn.Module) -> tuple[int, dict[str, Any]]:
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(5)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return saved, {name: copy.deepcopy(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_share_saves_less_and_changes_no_bit(backend: str) -> None:
    """Not even with dropout, whose mask the compiler's own knob draws anew in backward."""
    found = {}
    for share in (None, 1, 0.8, 0.3, 0):
        options = {"backend": backend} | ({} if share is None else {"activation_memory_budget": share})
        model = layers()
        with graphckpt.apply(model, {re.compile(r"\d+"): {"compile": options}}) as handle:
            found[share] = saved_and_gradients(model)
            assert differing(found[share][1], found[None][1]) == [], share
            with handle.measure():
                model(torch.ones(256, 16)).sum().backward()
            row = handle.explain(show=False).rows[1]
            assert row.bytes_after >= 256 * 16 * 4
            assert (row.bytes_after > 256 * 64 * 4) == (share in (None, 1, 0.8))
            assert row.rule == ("keep, compiled" if share in (None, 1) else f"keep at {100 * share:g} %, compiled")
    saved = {share: found[share][0] for share in found}
    assert saved[None] == saved[1]
    assert saved[0] <= saved[0.3] < 0.5 * saved[0.8] < 0.5 * saved[1] * 0.8


@as_module(lambda: {"inner": nn.Linear(16, 16), "scale": nn.Buffer(torch.ones(16))})
def Updating(self: Any, x: Tensor) -> Tensor:
    """Overwrites a buffer by what it computes with."""
    self.scale.mul_(1.5)
    return torch.tanh(self.inner(x) * torch.cos(self.scale)) * x


@as_module(lambda: {"first": nn.Linear(16, 16), "inner": nn.Linear(16, 16)})
def Dropped(self: Any, x: Tensor) -> Tensor:
    """A layer needs both results of the dropout, the output and the mask."""
    return self.inner(F.dropout(self.first(x), 0.3))


@as_module(lambda: {"inner": nn.Linear(16, 16)})
def Drawing(self: Any, x: Tensor) -> Tensor:
    """Draws numbers by an op that edits its argument and says that it draws, among its own."""
    noise = torch.empty_like(x)
    fill_with_noise(noise)
    hidden = self.inner(x)
    return torch.sigmoid(hidden * noise) * hidden


@torch.library.custom_op("graphckpt_tests::fill", mutates_args=("into",), tags=(torch.Tag.nondeterministic_seeded,))
def fill_with_noise(into: Tensor) -> None:
    into.uniform_()


HARD: dict[str, Callable[[], nn.Module]] = {
    "a buffer that is overwritten": Updating,
    "spectral norm": Parametrized,
    "batch norm": BatchNorm,
    "dropout before a layer": Dropped,
    "a random op of one's own": Drawing,
    "attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_results_that_cannot_be_recomputed_are_saved(name: str) -> None:
    """At no share do gradients or buffers differ from those of the plain block."""
    found: dict[float | None, Any] = {}
    x = torch.linspace(-1, 1, 2 * 16 * 16).view(2, 16, 16)
    x = x if name == "attention" else x.flatten(0, 1)
    for share in (None, 1.0, 0.5, 0.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), HARD[name](), nn.Linear(16, 16))
        how = {"compile": {"backend": "aot_eager", "activation_memory_budget": share}}
        with graphckpt.apply(model, {} if share is None else {"1": how}):
            for seed in (3, 4):
                torch.manual_seed(seed)
                model(x).sum().backward()
        found[share] = {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())
        assert differing(found[share], found[None]) == [], share


@pytest.mark.slow
def test_layers_may_save_different_shares() -> None:
    """More of them than the compiler takes for one code by itself; those with the same share are compiled once."""
    counter = CompileCounterWithBackend("aot_eager")
    shares = [n / 10 for n in range(11)] * 2
    model = layers(len(shares))
    rules = {
        str(n): {"compile": {"backend": counter, "activation_memory_budget": share}} for n, share in enumerate(shares)
    }
    with graphckpt.apply(model, rules):
        saved, gradients = saved_and_gradients(model)
    assert counter.frame_count == 12  # the first layer's input asks for no gradient
    model = layers(len(shares))
    with graphckpt.apply(model, {re.compile(r"\d+"): {"compile": {"backend": "aot_eager"}}}):
        most, expected = saved_and_gradients(model)
    assert saved < 0.8 * most
    assert differing(gradients, expected) == []


@pytest.mark.slow
def test_a_share_goes_with_other_options_of_the_compiler() -> None:
    model = layers()
    options = {"mode": "default", "dynamic": False, "fullgraph": True, "activation_memory_budget": 0.3}
    with graphckpt.apply(model, {re.compile(r"\d+"): {"compile": options}}):
        saved, _ = saved_and_gradients(model)
    with graphckpt.apply(model, {re.compile(r"\d+"): {"compile": options | {"activation_memory_budget": 1.0}}}):
        most, _ = saved_and_gradients(model)
    assert saved < 0.5 * most
    with (
        graphckpt.apply(model, {re.compile(r"\d+"): {"compile": options | {"mode": "nonsense"}}}),
        pytest.raises(RuntimeError, match="nonsense"),
    ):
        saved_and_gradients(model)


def test_a_share_counts_within_a_recomputed_block_and_beside_a_store() -> None:
    options = {"backend": "aot_eager", "activation_memory_budget": 0.3}
    model = layers()
    with graphckpt.apply(model, {re.compile(r"\d+"): {"compile": {"backend": "aot_eager"}}}):
        _, expected = saved_and_gradients(model)
    for policy in ({"activation_checkpointing": True}, {"offload": "disk", "min_elements": 1}):
        model = layers()
        with graphckpt.apply(model, {re.compile(r"\d+"): policy | {"compile": options}}):
            assert differing(saved_and_gradients(model)[1], expected) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation_memory_budget": 1.5},
            r"0\.compile: expected activation_memory_budget from 0 to 1, got 1\.5 · fix: ",
        ),
        ({"activation_memory_budget": True}, "from 0 to 1, got True"),
        ({"activation_memory_budget": "0.5"}, "from 0 to 1, got '0.5'"),
        ({"activation_memory_budget": 0.5, "backend": "eager"}, r"has no effect with backend 'eager'.*'aot_eager'"),
    ],
)
def test_a_share_that_cannot_act_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphckpt.apply(layers(), {"0": {"compile": options}})
