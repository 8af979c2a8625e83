"""Policies on the blocks of a Graph, in both spellings, and what explain() tells of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modules import as_module
from helpers.train_graphs import Predict, Train, adamw, batches, mlp, run_graph, run_plain, same
from torch import Tensor, nn

from graphckpt import ConfigError, GraphError, GraphModule, Segments, Selective, Tiles


@as_module(lambda: {"norm": nn.LayerNorm(6), "up": nn.Linear(6, 12), "down": nn.Linear(12, 6), "drop": nn.Dropout(0.2)})
def Layer(self: Any, x: Tensor) -> Tensor:
    return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Layers in each kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.named = nn.ModuleDict({"a": Layer(), "b": Layer()})
        self.tail = nn.Sequential(Layer(), Layer(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in (*self.layers, *self.named.values()):
            x = layer(x)
        return self.tail(x)


def stack() -> Stack:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Stack().train()


def make(model: nn.Module | None = None) -> Train:
    model = stack() if model is None else model
    return Train(model, adamw(model))


def runs_of(graph: Train, calls: int = 1) -> dict[str, int]:
    """How often each layer's inner linear ran in one call: twice if it was recomputed."""
    runs: dict[str, int] = {}
    hooks = [
        module.up.register_forward_pre_hook(lambda *_, n=name: runs.__setitem__(n, runs.get(n, 0) + 1))
        for name, module in graph.model.origin.named_modules()
        if isinstance(module, Layer)
    ]
    run_graph(graph, calls)
    for hook in hooks:
        hook.remove()
    return {name: count // calls for name, count in runs.items()}


ALL = ["layers.0", "layers.1", "layers.2", "layers.3", "named.a", "named.b", "tail.0", "tail.1"]


def flag(*blocks: Any, value: Any = True) -> None:
    for block in blocks:
        block.config.activation_checkpointing = value


def flag_layers_1(graph: Train) -> None:
    flag(graph.model.layers[1])


def flag_like_libai(graph: Train) -> None:
    flag(*(block for block in graph.model.modules() if isinstance(block.origin, Layer)))


def flag_like_newer_libai(model: Any) -> None:
    for block in model.modules():
        if isinstance(block.to(nn.Module), Layer):
            block.to(GraphModule).activation_checkpointing = True


def flag_slices(model: Any) -> None:
    flag(model.layers[1:3], *model.tail[:1])
    model.layers[3:].to(GraphModule).activation_checkpointing = True


def flag_items(model: Any) -> None:
    assert all(block.name == name for name, block in model.named.items())
    flag(*dict(model.named.items()).values(), *model.layers)
    flag(model.named["a"], value=None)


def hole_in_all(model: Any) -> None:
    flag(model)
    flag(model.layers[2], model.named["b"], value=False)


SPELLINGS: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "as libai does": (flag_like_newer_libai, ALL),
    "by class and name": (
        lambda m: flag(*(b for n, b in m.named_modules() if isinstance(b, Layer) and n.startswith("layers"))),
        ALL[:4],
    ),
    "children": (lambda m: flag(*m.layers.children(), *dict(m.tail.named_children()).values()), [*ALL[:4], *ALL[6:]]),
    "slices": (flag_slices, ["layers.1", "layers.2", "layers.3", "tail.0"]),
    "items": (flag_items, [*ALL[:4], "named.b"]),
    "paths": (lambda m: flag(m.get_submodule("layers.2"), m.layers[-1], value="full"), ["layers.2", "layers.3"]),
    "holes": (hole_in_all, [name for name in ALL if name not in ("layers.2", "named.b")]),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_flagged_layers_run_again_and_no_bit_changes(spelling: str) -> None:
    graph, plain = make(), stack()
    set_flags, flagged = SPELLINGS[spelling]
    set_flags(graph.model)
    expected = {name: 2 if name in flagged else 1 for name in ALL}
    for calls in (1, 1, 4):
        assert runs_of(graph, calls) == expected
    plain_optimizer = adamw(plain)
    for count in (1, 1, 4):
        run_plain(plain, plain_optimizer, count=count)
    assert same(graph.model.origin, plain)


def test_both_spellings_are_one_flag() -> None:
    block = make().model.layers[0]
    block.config.activation_checkpointing = True
    assert block.to(GraphModule).activation_checkpointing is True
    block.to(GraphModule).activation_checkpointing = False
    assert block.config.activation_checkpointing is False
    block.to(GraphModule).set_stage(3)
    block.config.set_stage(2)
    assert (block.config.stage_id, block.to(GraphModule).stage_id) == (2, 2)
    assert block.config.block == "model.layers.0"
    newer = block.to(GraphModule)
    assert (newer.name, newer.name_prefix, newer.type) == ("0", "model.layers.", "MODULE")
    assert repr(newer) == "GraphModule(activation_checkpointing=False, stage_id=2)"
    assert repr(block.config) == "BlockConfig(activation_checkpointing=False, stage_id=2)"
    for spelling in (newer, block.config):
        with pytest.raises(ConfigError, match="placement has no meaning in PyTorch · fix: move the module"):
            spelling.set_stage(1, placement="cuda")
    with pytest.raises(AttributeError, match="GraphModule has no attribute 'offlaod'"):
        newer.offlaod


def test_unset_is_none_and_none_inherits() -> None:
    graph = make()
    config = graph.model.layers[0].config
    assert config.activation_checkpointing is None
    assert config.segments is config.tiles is config.stage_id is None
    graph.model.config.activation_checkpointing = True
    config.activation_checkpointing = False
    assert runs_of(graph)["layers.0"] == 1
    config.activation_checkpointing = None
    assert runs_of(graph)["layers.0"] == 2


def test_a_flag_may_change_after_the_first_call() -> None:
    graph, plain = make(), stack()
    plain_optimizer = adamw(plain)
    for flag in (True, False, "selective", None, Selective(["aten.relu.default"])):
        graph.model.layers[0].config.activation_checkpointing = flag
        assert runs_of(graph, 1) == {name: 2 if name == "layers.0" and flag not in (None, False) else 1 for name in ALL}
        run_graph(graph, 5)
        run_plain(plain, plain_optimizer, count=1)
        run_plain(plain, plain_optimizer, count=5)
        assert same(graph.model.origin, plain), flag


RULE = "activation_checkpointing"
WRONG: list[tuple[str, Any, str]] = [
    (RULE, "yes", "expected a rule, got 'yes' · fix: use 'full', 'joined', 'keep', 'segments', 'selective'"),
    (RULE, "ful", "expected a rule, got 'ful' · did you mean 'full'? · fix: use"),
    (RULE, 1, "expected a rule, got 1 · fix: use True, False, None"),
    ("segments", 0, "expected a positive int, 'sqrt' or 'log', got 0 · fix: use one of these"),
    ("segments", True, "expected a positive int, 'sqrt' or 'log', got True"),
    ("tiles", "two", "expected a positive int, got 'two' · fix: use the number of slices"),
    ("stage_id", 1.5, "expected an int from 0 on, got 1.5 · fix: use its number"),
    ("activation_checkpoint", True, f"unknown field · did you mean '{RULE}'? · fix: use one of"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_values_fail_where_they_are_set(field: str, value: Any, message: str) -> None:
    graph = make()
    for config in (graph.model.layers[2].config, graph.model.layers[2].to(GraphModule)):
        with pytest.raises(ConfigError) as error:
            setattr(config, field, value)
        assert str(error.value).startswith(f"model.layers.2.{field}: {message}")
    assert graph.model.layers[2].config.rule is None
    assert set(runs_of(graph).values()) == {1}


def test_fields_that_exclude_each_other() -> None:
    config = make().model.tail.config
    config.segments = 2
    with pytest.raises(ConfigError, match=r"model.tail: segments and tiles cannot both cut one block · fix: unset one"):
        config.tiles = 2
    with pytest.raises(ConfigError, match=r"model.tail.segments: it needs activation_checkpointing = True or None"):
        config.activation_checkpointing = False
    assert config.rule == Segments(2)
    config.segments = None
    config.tiles = 3
    assert config.rule == Tiles(3)


def test_a_rule_that_cannot_act_is_named_at_the_next_call_and_can_be_mended() -> None:
    graph = make()
    graph.model.layers[0].config.segments = 2
    graph.model.tail.config.segments = 7
    with pytest.raises(ConfigError) as error:
        run_graph(graph, 1)
    assert str(error.value) == (
        "- model.layers.0: segments: expected an nn.Sequential, got Layer · "
        "fix: set it on an nn.Sequential, or use activation_checkpointing = True on the layers\n"
        "- model.tail: segments: expected at most 3 for its children, got 7 · fix: use 'sqrt'"
    )
    graph.model.layers[0].config.segments = None
    graph.model.tail.config.segments = 3
    assert runs_of(graph)["tail.0"] == 2


def test_explain_after_one_two_and_three_calls() -> None:
    graph = make()
    with pytest.raises(GraphError, match=r"explain: no step has been measured yet · fix: call the graph inside `with "):
        graph.explain()
    flag_like_libai(graph)
    for calls in (1, 2, 3, 4):
        run_graph(graph, 1)
        explanation = graph.explain(show=False)
        rows = {row.block: row for row in explanation.rows}
        for name in ALL:
            row = rows[f"model.{name}"]
            assert (row.rule, row.runs, row.reruns) == ("full", 1, 1)
            assert 0 < row.bytes_after < row.bytes_before
            assert (row.forward_seconds is None) is (calls < 3)
            assert (row.recompute_seconds is None) is (calls < 3)
        assert rows["model.embed"].rule == "keep"
        assert rows["model.embed"].reruns == 0
        assert explanation.bytes_saved == explanation.bytes_before - explanation.bytes_after > 0
        assert explanation.peak_bytes is not None
        assert {event.phase for event in explanation.timeline} == {"forward", "backward", "recompute", "optimizer"}
    assert explanation.title == graph.name


def test_measure_records_the_calls_inside() -> None:
    graph = make()
    flag_layers_1(graph)
    run_graph(graph, 6)
    first = graph.explain(show=False)
    x, y = batches(1)[0]
    graph(x.repeat(3, 1), y.repeat(3))
    assert graph.explain(show=False).bytes_before == first.bytes_before
    with graph.measure():
        graph(x.repeat(3, 1), y.repeat(3))
    measured = graph.explain(show=False)
    assert measured.bytes_before > 2 * first.bytes_before
    assert measured.rows[1].forward_seconds is not None  # of the third call
    graph(x, y)
    assert graph.explain(show=False).bytes_before == measured.bytes_before
    assert graph.is_compiled


def test_without_config_measure_only_what_is_measured_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    graph, evaluation = make(), Train(stack())
    run_graph(evaluation, 1)
    with pytest.raises(GraphError, match="explain: an evaluation graph keeps nothing · fix: explain the training"):
        evaluation.explain()
    graph.config.measure = False
    run_graph(graph, 3)
    with pytest.raises(GraphError, match=r"no step has been measured yet · fix: call .* inside `with"):
        graph.explain()
    graph.config.measure = True
    run_graph(graph, 1)
    assert graph.explain(show=False).rows

    graph = make()
    graph.config.measure = False
    with graph.measure():
        run_graph(graph, 1)
    kept = graph.explain(show=False).bytes_before
    x, y = batches(1)[0]
    for _ in range(3):  # none of these replaces what was measured
        graph(x.repeat(3, 1), y.repeat(3))
    assert graph.explain(show=False).bytes_before == kept > 0
    assert not capsys.readouterr().out


def test_explain_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph = make()
    flag_layers_1(graph)
    run_graph(graph, 3)
    capsys.readouterr()
    picture = tmp_path / "step.svg"
    graph.explain(plot=str(picture))
    out = capsys.readouterr().out
    assert "model.layers.1" in out
    assert graph.name in out
    assert picture.stat().st_size > 1000
    graph.explain(show=False)
    assert capsys.readouterr().out == ""


def test_warnings_of_flags_that_do_not_pay() -> None:
    graph = make()
    graph.model.config.activation_checkpointing = True
    graph.model.layers.append(Layer())
    graph.unused, graph.idle = Layer(), Layer()
    for layer in (graph.unused, graph.idle):
        layer.config.activation_checkpointing = True
    run_graph(graph, 2)
    warnings = graph.explain(show=False).warnings
    assert "unused and 1 more: never ran with gradients, so the policy had no effect" in warnings
    assert any(w.startswith("model: it is one block as a whole, so all of it is alive again") for w in warnings)


def test_of_two_models_that_are_one_block_each_the_advice_is_one() -> None:
    class Two(Train):
        def __init__(self, model: nn.Module, other: nn.Module) -> None:
            super().__init__(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
            self.other = other
            self.model.config.activation_checkpointing = self.other.config.activation_checkpointing = True

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.other(self.model(x)).sum()
            loss.backward()
            return loss

    graph = Two(stack(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    run_graph(graph, 2)
    assert [w.partition(", so all of it is alive again")[0] for w in graph.explain(show=False).warnings] == [
        "model: it is one block as a whole",
        "other: it is one block as a whole",
    ]


def test_a_policy_takes_bytes_off_in_a_graph_as_explained() -> None:
    plain, ours = make(), make()
    flag_like_libai(ours)
    for graph in (plain, ours):
        run_graph(graph, 2)
    explained = ours.explain(show=False)
    assert explained.bytes_before == plain.explain(show=False).bytes_before == plain.explain(show=False).bytes_after
    assert explained.bytes_after < 0.5 * explained.bytes_before


def test_flags_without_gradients_do_nothing() -> None:
    graph = Train(stack())
    flag_like_libai(graph)
    with torch.no_grad():
        assert set(runs_of(graph).values()) == {1}
    model = stack()
    predicts = Train(model.eval())
    flag_like_libai(predicts)
    x, y = batches(1)[0]
    assert torch.equal(predicts(x, y), nn.functional.cross_entropy(model(x), y))


def test_a_module_that_is_replaced_within_a_block() -> None:
    graph = make(mlp())
    graph.model[1].config.activation_checkpointing = True
    run_graph(graph, 5)
    graph.model[1][1] = norm = nn.BatchNorm1d(6)
    for number in (1, 2, 3):
        run_graph(graph, 1)
        assert norm.num_batches_tracked == number


def test_a_layer_that_is_appended_is_known_to_be_in_no_optimizer() -> None:
    graph = make()
    run_graph(graph, 5)
    graph.model.tail.append(nn.Linear(3, 3))
    run_graph(graph, 2)
    assert graph.model.tail[3].weight.grad is None


def test_modules_that_change_between_calls() -> None:
    graph = make()
    flag_like_libai(graph)
    run_graph(graph, 5)
    graph.model.layers[1] = Layer()
    assert runs_of(graph)["layers.1"] == 1
    graph.model.layers[1].config.activation_checkpointing = True
    assert runs_of(graph)["layers.1"] == 2
    del graph.model.layers[0]
    graph.model.layers.append(Layer())
    graph.model.layers.extend([Layer(), make().model.layers[0]])
    graph.model.named.update({"c": make().model.layers[1]})
    assert all(type(module) is Layer for module in graph.model.origin.layers)
    assert type(graph.model.origin.named["c"]) is Layer
    assert runs_of(graph) == {
        **dict.fromkeys(("layers.0", "layers.1", "layers.2", "named.a", "named.b", "tail.0", "tail.1"), 2),
        **dict.fromkeys(("layers.3", "layers.4", "layers.5", "named.c"), 1),
    }


def test_an_evaluation_graph_keeps_nothing_for_a_backward() -> None:
    """Its outputs are cut off, so nothing could run backward; a forward with gradients would only hold memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    seen = []

    class Evaluate(Predict):
        def build(self, x: Tensor) -> Tensor:
            out = super().build(x)
            seen.append(out.requires_grad)
            return out

    assert torch.equal(Evaluate(model)(torch.ones(2, 4)), model(torch.ones(2, 4)).detach())
    assert seen == [False]
