"""`torch.compile` of a model whose blocks have policies, or that calls the drop-in functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers.architectures import ARCHITECTURES
from helpers.hard_modules import differing
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from graphckpt import ConfigError, GraphError, Selective, Tiles
from graphckpt.blocks import disable_checkpointing

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler reads `.grad` of what it is given, and says so.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


@as_module(lambda: {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 64), "act": nn.GELU(), "down": nn.Linear(64, 16)})
def Layer(self: Any, x: Tensor, *, debug: float = 1.0) -> Tensor:
    """`debug` is also the name of an argument of PyTorch's checkpoint."""
    return x + debug * F.dropout(self.down(self.act(self.up(self.norm(x)))), 0.3, self.training)


class Counter(Layer):
    """Sets an attribute, which the compiler cannot trace inside of a checkpoint."""

    count = 0

    def forward(self, x: Tensor, *, debug: float = 1.0) -> Tensor:
        self.count += 1
        return self.count * super().forward(x, debug=debug)


class Breaking(Layer):
    """Breaks the graph, and moves the buffers of a norm before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]

    def forward(self, x: Tensor, *, debug: float = 1.0) -> Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return super().forward(x, debug=debug)


Call = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """Two layers and a tail, of one layer where a test is not about the tail: each layer is traced, in seconds."""

    def __init__(
        self,
        layer: Callable[[], nn.Module] = Layer,
        call: Call = lambda layer, x: layer(x),
        *,
        num_tail: int = 1,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.tail = stack_of(Layer, num_tail)
        self.call = call
        self.call_tail: Call = lambda tail, x: tail(x)

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.layers  # a break in a loop would have the compiler skip all of it
        return self.call_tail(self.tail, self.call(last, self.call(first, x)))


def steps(model: nn.Module, run: Callable[..., Tensor], *, num_steps: int = 2) -> tuple[dict[str, Any], int]:
    """Returns the results of the last step and the bytes that autograd has saved in it outside of checkpoints."""
    saved = 0

    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    for seed in range(num_steps):
        torch.manual_seed(seed)
        model.zero_grad()
        saved = 0
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = run(x).square().mean()
        loss.backward()
    found: dict[str, Any] = {"loss": loss.detach(), "random": torch.rand(1), **dict(model.named_buffers())}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {f"{n}.count": m.count for n, m in model.named_modules() if isinstance(m, Counter)}, saved


def compiled(
    model: nn.Module, *, backend: str = "aot_eager", **options: Any
) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, **options), counter


@cache
def plain(
    layer: Callable[[], nn.Module] = Layer, backend: str = "aot_eager", num_tail: int = 1
) -> tuple[dict[str, Any], int]:
    model = Model(layer, num_tail=num_tail)
    return steps(model, compiled(model, backend=backend)[0])


def only_products(_: object, op: OpOverload, *__: object, **___: object) -> bool:
    return op is torch.ops.aten.addmm.default


contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

FUNCTIONS: dict[str, Call] = {
    "checkpoint": graphckpt.checkpoint,
    "arguments": partial(graphckpt.checkpoint, use_reentrant=True, debug=True, determinism_check="none"),
    "a closure": lambda layer, x: graphckpt.checkpoint(lambda: layer(x, debug=1.0)),
    "contexts": partial(graphckpt.checkpoint, context_fn=contexts),
    "within one another": lambda layer, x: graphckpt.checkpoint(lambda y: graphckpt.checkpoint(layer, y), x),
}


def assert_one_graph(model: Model, policies: dict[str, Any], most: float = 0.9) -> int:
    """Compiles a model to one graph, which keeps every bit and saves less than without policies; returns the bytes."""
    expected, plain_bytes = plain(num_tail=len(model.tail))
    with graphckpt.apply(model, policies):
        found, saved = steps(model, (run := compiled(model, fullgraph=True))[0])
    assert differing(found, expected) == []
    assert saved < most * plain_bytes
    assert run[1].frame_count == 1
    return saved


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpoint_is_a_part_of_one_graph(name: str) -> None:
    assert_one_graph(Model(call=FUNCTIONS[name]), {})


@pytest.mark.parametrize("segments", [2, 3])
def test_checkpoint_sequential_is_a_part_of_one_graph(segments: int) -> None:
    model = Model(num_tail=3)
    model.call_tail = lambda tail, x: graphckpt.checkpoint_sequential(tail, segments, x)  # type: ignore[arg-type]
    assert_one_graph(model, {})


def test_a_program_may_put_checkpoint_in_place_of_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", graphckpt.checkpoint)
    model = Model(call=lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), num_tail=2)
    assert_one_graph(model, {"tail.*": True, "tail.1": "selective"})


TRACED: dict[str, dict[str, Any]] = {
    "full": {"layers.*": True},
    "the whole model": {"": True},
    "full within full": {"layers.*": True, "layers.*.norm": True},
    "a part that is compiled": {"layers.*": True, "layers.*.norm": {"compile": True}},
    "segments": {"tail": {"segments": 3}},
    "selective": {"layers.*": Selective("matmul")},
    "selective, a list": {"layers.*": Selective(["aten.addmm.default"])},
    "selective, a function": {"layers.*": Selective(only_products)},
    "an excluded child": {"layers.*": True, "layers.*.norm": False},
    "an excluded child in segments": {"tail": {"segments": 3}, "tail.*.norm": False},
    "selective with an excluded child": {"layers.*": Selective("attention"), "layers.*.act": False},
    "full in an excluded child": {"": True, "tail": False, "tail.*": True},
}


def num_tail_of(policies: dict[str, Any]) -> int:
    """Returns the length of the tail that policies need: three layers where they act on it."""
    return 3 if any(name.startswith("tail") for name in policies) else 1


@pytest.mark.parametrize("name", TRACED)
def test_policies_are_parts_of_one_graph(name: str) -> None:
    model = Model(num_tail=num_tail_of(TRACED[name]))
    saved = assert_one_graph(model, TRACED[name])
    if name.startswith("selective"):
        assert bytes_of_full() < saved, "the results of the ops are not saved"


@cache
def bytes_of_full() -> int:
    model = Model()
    with graphckpt.apply(model, {"layers.*": True}):
        return steps(model, compiled(model)[0])[1]


@pytest.mark.parametrize("rule", [True, Selective("attention"), {"segments": 2}], ids=str)
def test_an_excluded_child_saves_what_the_compiler_saves_of_it(rule: bool | Selective | dict[str, int]) -> None:
    """Of GELU that is the input, from which backward computes the output again, with or without a policy."""
    block, child = ("tail", "tail.*.act") if isinstance(rule, dict) else ("layers.*", "layers.*.act")
    saved: dict[str, int] = {}
    for name, policies in {"recomputed": {block: rule}, "excluded": {block: rule, child: False}}.items():
        model = Model(num_tail=num_tail_of(policies))
        with graphckpt.apply(model, policies):
            saved[name] = steps(model, compiled(model, fullgraph=True)[0])[1]
    inside = 1 if isinstance(rule, dict) else 2  # the last segment keeps all in any case
    assert saved["excluded"] - saved["recomputed"] == inside * 300 * 64 * 4


def test_wrapped_modules_are_parts_of_one_graph() -> None:
    model = Model()
    for layer in model.layers:
        graphckpt.checkpoint_wrapper(layer)
    assert_one_graph(model, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_layers_of_transformers_are_parts_of_one_graph(name: str) -> None:
    """Each rule keeps less than the compiled model without policies, and changes no bit."""
    architecture = next(each for each in ARCHITECTURES if each.name == name)
    inputs = {key: value for key, value in architecture.inputs().items() if key != "labels"}
    if "input_ids" in inputs:
        inputs["use_cache"] = False  # type: ignore[assignment]
    first = next(iter(architecture.layer_modules(architecture.build()).values()))
    child = next(key for key, module in first.named_children() if any(True for _ in module.parameters()))
    policies: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {architecture.layers: "selective"},
        "excluded": {architecture.layers: True, f"{architecture.layers}.{child}": False},
        "full": {architecture.layers: True},
    }
    results, saved = {}, {}
    for rule, fields in policies.items():
        torch._dynamo.reset()
        model = architecture.build()
        with graphckpt.apply(model, fields):
            run, counter = compiled(model, fullgraph=True)
            results[rule], saved[rule] = steps(model, lambda _, run=run: run(**inputs).logits.float())
        assert counter.frame_count == 1
        assert differing(results[rule], results["none"]) == [], rule
    assert saved["full"] < saved["excluded"] < saved["none"]
    assert saved["full"] < saved["selective"] < saved["none"]


@pytest.mark.slow
def test_a_plan_is_a_part_of_one_graph() -> None:
    expected, most = plain()
    model = Model()
    x = torch.randn(300, 16)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    plan = graphckpt.plan(model, step, memory_budget=0.6, candidates=[True, "selective"])
    with plan.apply():
        found, saved = steps(model, compiled(model, fullgraph=True)[0])
    assert differing(found, expected) == []
    assert saved < 0.8 * most


def test_blocks_that_keep_everything_are_parts_of_the_graph() -> None:
    expected, most = plain()
    model = Model()
    with graphckpt.apply(model, {"layers.*": False, "tail": {"compile": True}}):
        found, saved = steps(model, (run := compiled(model, fullgraph=True))[0])
    assert differing(found, expected) == []
    assert (saved, run[1].frame_count) == (most, 1)


def test_the_eager_backend_runs_pytorchs_checkpoint() -> None:
    """Without dropout, of which PyTorch's checkpoint draws another mask under that backend."""
    model = Model(call=graphckpt.checkpoint).eval()
    expected, _ = steps(model, model)
    model = Model(call=graphckpt.checkpoint).eval()
    with graphckpt.apply(model, {"tail.*": True}):
        found, _ = steps(model, compiled(model, backend="eager", fullgraph=True)[0])
    assert differing(found, expected) == []


@pytest.mark.slow
def test_the_default_backend_recomputes_with_the_same_masks() -> None:
    expected, most = plain(backend="inductor")
    model = Model(call=graphckpt.checkpoint)
    with graphckpt.apply(model, {"tail.*": True}):
        found, saved = steps(model, compiled(model, backend="inductor", fullgraph=True)[0])
    assert differing(found, expected) == []
    assert saved < 0.5 * most


DISK = {"offload": "disk", "min_elements": 1}
UNTRACED: dict[str, tuple[dict[str, Any], str]] = {
    "disk": ({"layers.*": True, "layers.1": {"activation_checkpointing": True, **DISK}}, "it has a store"),
    "disk, kept": ({"layers.1": DISK}, "it has a store"),
    "slab": ({"layers.1": {"activation_checkpointing": True, "contiguous": True}}, "it has a store"),
    "joined": ({"layers.0": True, "layers.1": "joined"}, "the rule 'joined'"),
    "log": ({"tail": {"segments": "log"}}, "segments='log'"),
    "numbers": ({"layers.1": Selective(["aten.addmm.default[0]"])}, "selective with numbers of calls"),
    "a child that stores": (
        {"layers.1": True, "layers.1.norm": {"activation_checkpointing": False, **DISK}},
        "a block within it has a policy",
    ),
    "a child with ops": ({"layers.1": True, "layers.1.up": "selective"}, "a block within it has a policy"),
    "a share": (
        {"layers.1": {"compile": {"activation_memory_budget": 0.5, "backend": "aot_eager"}}},
        "activation_memory_budget is its",
    ),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_a_policy_that_cannot_be_traced_acts_outside_of_the_graph(name: str) -> None:
    policies, why = UNTRACED[name]
    num_tail = num_tail_of(policies)
    expected, _ = plain(num_tail=num_tail)
    model = Model(num_tail=num_tail)
    block = list(policies)[0 if name == "log" or name.startswith("a child") else -1]
    with graphckpt.apply(model, policies) as handle:
        found, _ = steps(model, (run := compiled(model))[0])
        assert differing(found, expected) == []
        assert run[1].frame_count >= 1
        with handle.measure():  # in which the compiled model goes on as it has begun
            run[0](torch.ones(300, 16)).sum().backward()
        row = next(row for row in handle.explain(show=False).rows if row.block == block)
        assert f"leaves it out of the graph around it and runs it as it is: {why}" in row.note
        if name not in ("a share", "log"):
            assert row.reruns or row.place == "disk"
        with pytest.raises(Unsupported, match=f"{block}: .*{why}.* · fix: "):
            compiled(model, fullgraph=True)[0](torch.ones(300, 16))


def test_tiles_act_outside_of_the_graph() -> None:
    model = Model().eval()
    expected = {name: tensor.clone() for name, tensor in steps(model, model)[0].items()}
    with graphckpt.apply(model, {"layers.1": {"tiles": 2}}) as handle:
        found, _ = steps(model, compiled(model)[0])
        assert "the rule 'tiles' cannot be traced" in next(iter(handle._wrappers[0].context.notes))
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_without_gradients_all_but_a_loss_in_slices_is_traced() -> None:
    x = torch.ones(8, 16)
    model = Model(num_tail=3).eval()
    policies = {"layers.0": "joined", "layers.1": DISK, "tail": {"segments": "log"}}
    for changes in ({}, {"layers.1": {"tiles": 2}}):
        with graphckpt.apply(model, policies | changes), torch.no_grad():
            assert torch.equal(compiled(model, fullgraph=True)[0](x), model(x))
    with (
        graphckpt.apply(model, {"tail": Tiles(2, reduce="mean")}),
        torch.no_grad(),
        pytest.raises(Unsupported, match="the rule 'tiles' cannot be traced"),
    ):
        compiled(model, fullgraph=True)[0](x)


@pytest.mark.parametrize("layer", [Counter, Breaking])
@pytest.mark.parametrize("rule", ["checkpoint", "full", "selective"])
def test_a_block_that_breaks_the_graph_moves_its_state_once(layer: Callable[[], nn.Module], rule: str) -> None:
    """PyTorch's checkpoint, which would run it twice as it is, moves counters and statistics twice."""
    expected, _ = plain(layer)
    model = Model(layer, graphckpt.checkpoint if rule == "checkpoint" else lambda layer, x: layer(x))
    with graphckpt.apply(model, {} if rule == "checkpoint" else {"layers.*": rule}):
        assert differing(steps(model, compiled(model)[0])[0], expected) == []


@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_in_a_loop_that_update_a_cache(use_cache: bool) -> None:
    """The compiler cannot trace the cache inside of a checkpoint, and gives up on the loop, and then on its calls."""
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))

    def results(policies: dict[str, Any], *, is_compiled: bool = True) -> tuple[dict[str, Any], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=32, **NO_ENDS))
        with graphckpt.apply(model, policies):
            run, counter = compiled(model.train())
            run = run if is_compiled else model
            found, _ = steps(model, lambda _: run(input_ids=tokens, labels=tokens, use_cache=use_cache).loss)
        return found, counter.frame_count

    expected, num_graphs = results({}, is_compiled=not use_cache)
    found, num_graphs_full = results({"transformer.h.*": True})
    assert differing(found, expected) == []
    assert use_cache or num_graphs_full == num_graphs


NO_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}  # GPT-2's own are beyond a small vocabulary


def test_a_chain_that_breaks_the_graph_moves_its_state_once() -> None:
    def of_chain(call: Call) -> dict[str, Any]:
        torch.manual_seed(0)
        chain = stack_of(Breaking, 4)
        return steps(chain, torch.compile(lambda x: call(chain, x), backend="aot_eager"))[0]

    expected = of_chain(lambda chain, x: chain(x))
    assert differing(of_chain(lambda chain, x: graphckpt.checkpoint_sequential(chain, 2, x)), expected) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("excluded", [False, True])
def test_layers_compiled_in_place(excluded: bool) -> None:
    model = Model()
    expected, most = steps(model, model)
    model, counter = Model(), CompileCounterWithBackend("aot_eager")
    for layer in model.layers:
        layer.compile(backend=counter)
    with graphckpt.apply(model, {"layers.*": True} | ({"layers.*.norm": False} if excluded else {})):
        found, saved = steps(model, model)
    assert differing(found, expected) == []
    assert saved < 0.9 * most
    assert counter.frame_count > 0


def test_an_excluded_child_of_a_compiled_block_is_not_recomputed() -> None:
    options = {"compile": {"backend": "aot_eager"}}
    model = Model()
    with graphckpt.apply(model, {"layers.*": options}):
        expected, _ = steps(model, model)
    model = Model()
    policies = {"layers.*": {"activation_checkpointing": True, **options}, "layers.*.act": False}
    with graphckpt.apply(model, policies) as handle:
        assert differing(steps(model, model)[0], expected) == []
        with handle.measure():
            model(torch.ones(300, 16)).sum().backward()
        rows = {row.block: row for row in handle.explain(show=False).rows}
    assert rows["layers.1.act"].bytes_after >= 300 * 64 * 4
    assert "it is excluded from the block around it" in rows["layers.1.act"].note


def test_the_graph_follows_changes_of_policies() -> None:
    model = Model()
    run, counter = compiled(model)
    expected, most = steps(model, run)
    with graphckpt.apply(model, {"layers.*": True}):
        found, saved = steps(model, run)
        assert saved < 0.9 * most
        with disable_checkpointing():
            assert steps(model, run)[1] == most
        assert steps(model, run)[1] == saved
    assert differing(found, expected) == []
    assert steps(model, run)[1] == most
    with graphckpt.apply(model, {"layers.1": DISK}) as handle:
        assert differing(steps(model, run)[0], expected) == []
        assert handle._wrappers[0].context.notes
    assert counter.frame_count < 8


def test_a_transform_in_a_compiled_function_runs_blocks_as_they_are() -> None:
    model = Model().eval()
    with graphckpt.apply(model, {"layers.*": True}):

        def gradient(x: Tensor) -> Tensor:
            return torch.func.grad(lambda y: model(y).sum())(x)

        x = torch.ones(4, 16)
        assert torch.equal(torch.compile(gradient, backend="aot_eager", fullgraph=True)(x), gradient(x))


def test_explain_says_that_a_graph_is_not_recorded() -> None:
    model = Model()
    with graphckpt.apply(model, {"layers.*": True}) as handle:
        steps(model, compiled(model)[0])
        with pytest.raises(GraphError, match=r"Model: torch\.compile has made it a part of a larger graph.* · fix: "):
            handle.explain(show=False)
    model = Model()
    model.layers[1].compile(backend="aot_eager")
    with graphckpt.apply(model, {"layers.*": True}) as handle:
        steps(model, model)
        warnings = handle.explain(show=False).warnings
    assert [w.partition(": ")[0] for w in warnings if "a part of a larger graph" in w] == ["layers.1"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("has_run", [False, True])
def test_scripting_a_model_with_policies_is_one_error(has_run: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with graphckpt.apply(model, {"1": True}):
        if has_run:
            model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4))
        with pytest.raises(ConfigError, match=r"torch\.jit\.script cannot .* · fix: remove\(\) the handle first"):
            torch.jit.script(model)
        torch.export.export(model, (torch.ones(2, 4),))
    torch.jit.script(model)
