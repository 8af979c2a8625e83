"""apply(): selectors, faults, removal, other libraries' wrappers, copies."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hard_modules import Mlp
from helpers.layer_stacks import linear_layers, stack_of
from helpers.train_graphs import Predict, SquareGraph
from helpers.yaml_bombs import BOMBS
from torch import Tensor, nn

import graphckpt
from graphckpt import ConfigError, Full, Segments, Selective, errors
from graphckpt.blocks.apply import Policies
from graphckpt.ledger.explanation import Explanation
from graphckpt.rules import Rule


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.encoder = nn.ModuleList([Mlp() for _ in range(12)])
        self.decoder = nn.Sequential(Mlp(), Mlp(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.encoder:
            x = layer(x)
        return self.decoder(x)


def build() -> Model:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Model().train()


def run(model: nn.Module) -> dict[str, int]:
    """Runs a step and returns how often each layer's first linear ran."""
    runs: dict[str, int] = {}
    hooks = [
        module.up.register_forward_pre_hook(lambda *_, n=name: runs.__setitem__(n, runs.get(n, 0) + 1))
        for name, module in model.named_modules()
        if isinstance(module, Mlp)
    ]
    torch.manual_seed(1)
    model(torch.ones(6, 16)).sum().backward()
    for hook in hooks:
        hook.remove()
    return runs


def recomputed(model: nn.Module) -> list[str]:
    return [name for name, count in run(model).items() if count == 2]


ENCODER = [f"encoder.{i}" for i in range(12)]
LAYERS = [*ENCODER, "decoder.0", "decoder.1"]


def test_one_switch_selects_the_layers_and_names_them() -> None:
    model = build()
    with graphckpt.apply(model, True) as handle:
        assert recomputed(model) == [*ENCODER, "decoder.0", "decoder.1"]
        assert repr(handle) == "Handle(Model; full: encoder.0-11 (12x), decoder.0-2 (3x))"
    with graphckpt.apply(model, "selective") as handle:
        assert "selective(matmul+attention): encoder.0-11 (12x)" in repr(handle)
    assert recomputed(model) == []


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ({"offload": "disk"}, "keep + disk"),
        ({"activation_checkpointing": True, "contiguous": True}, "full + slab"),
        (graphckpt.Tiles(8), "tiles(8)"),
        (graphckpt.Tiles(2, tile_dim=1, reduce="sum"), "tiles(2, tile_dim=1, reduce=sum)"),
        (Segments(), "segments(sqrt)"),
    ],
)
def test_a_handle_shows_rules_settings_and_stores(policy: Rule | dict[str, object], shown: str) -> None:
    with graphckpt.apply(build(), {"decoder": policy}) as handle:
        assert repr(handle) == f"Handle(Model; {shown}: decoder)"


FORMS: dict[str, tuple[Callable[[Model], Policies], list[str]]] = {
    "a name": (lambda _: {"encoder.1": True}, ["encoder.1"]),
    "a star": (lambda _: {"encoder.*": True}, ENCODER),
    "stars": (lambda _: {"*coder.*": True}, LAYERS),
    "one letter": (lambda _: {"encoder.?": True}, ENCODER[:10]),
    "a set": (lambda _: {"encoder.[13]": True}, ["encoder.1", "encoder.3"]),
    "a compiled expression": (lambda _: {re.compile(r"encoder\.(1|11)"): True}, ["encoder.1", "encoder.11"]),
    "an expression": (lambda _: {r"re:encoder\.[0-2]": True}, ENCODER[:3]),
    "a class as a key": (lambda _: {Mlp: True}, LAYERS),
    "a class's name": (lambda _: {"Mlp": True}, LAYERS),
    "the model": (lambda _: {"": True}, LAYERS),
    "a container with a forward": (lambda _: {"decoder": True}, ["decoder.0", "decoder.1"]),
    "a list": (lambda _: ["encoder.1", "decoder"], ["encoder.1", "decoder.0", "decoder.1"]),
    "a class": (lambda _: Mlp, LAYERS),
    "a pattern": (lambda _: re.compile(r"encoder\.1."), ["encoder.10", "encoder.11"]),
    "a module": (lambda model: model.encoder[3], ["encoder.3"]),
    "a container": (lambda model: model.decoder, ["decoder.0", "decoder.1"]),
    "modules": (lambda model: model.encoder[:2], ["encoder.0", "encoder.1"]),
    "a module as a key": (lambda model: {"encoder.*": True, model.encoder[0]: False}, [*ENCODER[1:]]),
    "a rule": (lambda _: Full(), LAYERS),
}


@pytest.mark.parametrize("form", FORMS)
def test_policies_mean_what_they_say(form: str) -> None:
    policies_for, names = FORMS[form]
    plain, model = build(), build()
    run(plain)
    with graphckpt.apply(model, policies_for(model)):
        assert recomputed(model) == names
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert recomputed(model) == []


UNMATCHED: list[tuple[object, str]] = [
    ("encodr.*", "'encodr.*' matches no module of Model · did you mean 'encoder.*' or 'decoder.*'"),
    ("encoder.12", "'encoder.12' matches no module of Model · did you mean 'encoder.2' or 'encoder.1' or 'encoder.11'"),
    ("zzz", "'zzz' matches no module of Model · the model has 'decoder', 'decoder.*'"),
    ("zzz", "fix: use a name or class of model.named_modules(), such as 'encoder.*'"),
    (re.compile("zzz"), "'zzz' matches no module of Model · the model has"),
    ("re:(", "'re:(' is not a valid regular expression: missing ), unterminated subpattern at position 0 · fix:"),
    (nn.Conv2d, "class Conv2d matches no module of Model · the model has 'Dropout', 'GELU', 'Linear', 'Mlp'"),
    ("Mpl", "'Mpl' matches no module of Model · did you mean 'Mlp'"),
    ("decoder.0.up.weight", "'decoder.0.up.weight' is a parameter of Model, expected a module · fix: use 'decoder.0.u"),
    (7, "expected a name pattern, a regular expression, a class or a module, got 7 · fix: a name of model.n"),
]
WRONG_FIELDS: list[tuple[dict[Any, object], str]] = [
    ({1: True}, r"1: unknown field · fix: use one of"),
    ({None: True}, r"None: unknown field · "),
    ({"compile": "yes"}, r"compile: expected a bool or a dict of options, got 'yes'"),
    ({"cpu_checkpointing": True}, r"cpu_checkpointing: unknown field · fix: write offload"),
    ({"contiguous": "yes"}, r"contiguous: expected a bool or None, got 'yes' · fix: use True, False or None"),
    ({"min_elements": -1}, r"min_elements: expected a non-negative int, got -1 · fix"),
    ({"offload": "gpu"}, r"offload: expected an offload target, got 'gpu' · did you mean 'cpu'\? · fix"),
    ({"offload": 3}, r"offload: expected an offload target, got 3 · fix: use one of 'cpu', 'disk', or False"),
    ({"offload": "cpu:/tmp"}, r"offload: 'cpu': expected nothing after a colon, got '/tmp' · fix: use 'cpu'"),
    ({"offload": "true"}, r"offload: .*got 'true' · did you mean True\?"),
    ({"offload": graphckpt.Disk}, r"offload: expected an object, got the class Disk · fix: Disk\(\)$"),
]
REFUSED: list[tuple[object, str]] = [
    (None, "apply: expected policies, got None · fix: use True for all layers"),
    ("encoder.*", r"apply: expected a rule, got 'encoder\.\*'.*\['layers\.\*'\] for blocks by name"),
    (7, "apply: expected a rule, got 7 "),
    ("missing.yaml", "missing.yaml: cannot be read: .* · fix: name a file that Plan.save has written"),
    ([7], "expected a name pattern, a regular expression, a class or a module, got 7"),
    (nn.Linear(2, 2), "a Linear is not a module of Model"),
    (
        {"activation_checkpointing": True, "offload": "disk"},
        r"^apply: expected selectors .* as keys, got 'activation_checkpointing', 'offload': fields.* · fix: \{'lay",
    ),
    ([{"encoder.0": True}], r"^apply: expected selectors in the list, got \{.*\} · fix: one mapping"),
    ({"encoder.0": {"offload": "disk:/no/dir"}}, r"^encoder\.0: offload: expected an existing folder, got '/no"),
    ({"encoder.0": "True"}, r"expected a rule, got 'True' · did you mean True\?"),
    ({"encoder.0": "FULL"}, r"expected a rule, got 'FULL' · did you mean 'full'\?"),
    ({"encoder.0": "none"}, r"expected a rule, got 'none' · did you mean None\?"),
    ({"encoder.0": Full}, r"expected an object, got the class Full · fix: Full\(\)$"),
    (
        {"encoder.0": {"segments": 2}, "decoder": Segments(9)},
        r"(?s)^- encoder.0: segments: expected an nn.Sequential, got Mlp · fix.*- decoder: segments: expected at most",
    ),
    ({"encoder": True}, r"^'encoder': ModuleList has no forward, so .* has no effect · fix: use 'encoder\.\*'$"),
    ({"encoder": {"compile": True}}, r"^'encoder': ModuleList has no forward, so this policy has no effect"),
    ({nn.ModuleList: "selective"}, r"^'ModuleList': ModuleList has no forward.*use 'encoder\.\*'$"),
    (
        {"encoder.0": False, "encoder.*": True},
        r"^'encoder\.0': .* no effect, since 'encoder\.\*' replaces it on every block · fix: put 'encoder\.0' last, or",
    ),
    (
        {"encoder.[01]": {"offload": "disk"}, "encoder.0": {"offload": None}, "encoder.1": {"offload": False}},
        r"since 'encoder\.0' and 'encoder\.1' replace it",
    ),
    *(({selector: True}, re.escape(message)) for selector, message in UNMATCHED),
    *(({"encoder.0": fields}, rf"encoder\.0\.{message}") for fields, message in WRONG_FIELDS),
]


@pytest.mark.parametrize(("policies", "message"), REFUSED)
def test_policies_that_are_refused_set_nothing(policies: object, message: str) -> None:
    model = build()
    with pytest.raises(ConfigError, match=message):
        graphckpt.apply(model, policies)
    assert recomputed(model) == []
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("plan.yaml", "blocks:\n  encoder.1: true\n  Linear: false\nplan: {}\n", ["encoder.1"]),
        ("policies.yml", "encoder.1: {activation_checkpointing: full, offload: cpu}\n", ["encoder.1"]),
        ("policies.json", '{"encoder.1": {"rule": "full"}}', ["encoder.1"]),
        (
            "aliases.yaml",
            "encoder.1: &one {activation_checkpointing: true}\nencoder.3: *one\n",
            ["encoder.1", "encoder.3"],
        ),
    ],
)
def test_policies_from_a_file(tmp_path: Path, name: str, text: str, names: list[str]) -> None:
    model = build()
    (tmp_path / name).write_text(text)
    for path in (tmp_path / name, str(tmp_path / name)):
        with graphckpt.apply(model, path):
            assert recomputed(model) == names


BAD_FILES = {
    "a list": ("- encoder.1\n", "expected a mapping of policies, got list"),
    "a key twice": (
        "blocks:\n  encoder.1: true\n  encoder.1: false\n",
        r"expected each key once, got 'encoder\.1' twice",
    ),
    "no YAML": ("{", "cannot be read"),
    **{name: (text, f"cannot be read: .*{message}") for name, (text, message) in BOMBS.items()},
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_without_policies(tmp_path: Path, name: str) -> None:
    text, message = BAD_FILES[name]
    (tmp_path / "policies.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"policies\.yaml: {message}"):
        graphckpt.apply(build(), tmp_path / "policies.yaml")


@pytest.mark.parametrize("field", ["activation_checkpointing", "offload", "contiguous", "compile", "stage_id"])
def test_long_values_are_shown_by_their_type(field: str) -> None:
    for model, policies in ((build().state_dict(), True), (build(), {"encoder.0": {field: torch.ones(99, 99)}})):
        with pytest.raises(ConfigError, match=r"got an object of type (OrderedDict|Tensor) · fix: ") as error:
            graphckpt.apply(model, policies)  # type: ignore[arg-type]
        assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("model", "message"),
    [
        *(
            (value, r"^apply: expected an nn\.Module, got .* · fix: apply\(model, policies\)")
            for value in ("h.*", nn.Linear, {})
        ),
        (nn.Tanh(), r"no list of layers was found in Tanh · fix: name the blocks"),
    ],
)
def test_a_model_without_layers_is_an_error(model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphckpt.apply(model, True)


def test_a_pattern_means_the_outermost_modules() -> None:
    model = build()
    with graphckpt.apply(model, {"*": True}) as handle:
        run(model)
        rules = {row.block: row.rule for row in handle.explain(show=False).rows}
    assert rules["embed"] == rules["decoder"] == "full"
    assert "encoder.1" not in [name for name, rule in rules.items() if rule == "full"]


def test_all_faults_are_told_at_once_and_nothing_is_set() -> None:
    model = build()
    with pytest.raises(ConfigError) as error:
        graphckpt.apply(
            model,
            {
                "encoder.0": True,
                "encodr.*": True,
                "encoder.1": {"activation_checkpoint": True},
                "encoder.2": "ful",
                "encoder.3": {"activation_checkpointing": True, "segments": 0},
                Mlp: {"tiles": "many"},
            },
        )
    lines = str(error.value).splitlines()
    expected = [
        "- 'encodr.*' matches no module of Model · did you mean 'encoder.*'",
        "- 'encoder.1': encoder.1.activation_checkpoint: unknown field · did you mean 'activation_che",
        "- 'encoder.2': encoder.2.activation_checkpointing: expected a rule, got 'ful' · did you mean 'full'?",
        "- 'encoder.3': encoder.3.segments: expected a positive int, 'sqrt' or 'log', got 0 · fix:",
        "- 'Mlp': encoder.0.tiles: expected a positive int, got 'many' · fix: use the number of slices",
    ]
    assert len(lines) == len(expected)
    assert all(map(str.startswith, lines, expected))
    assert recomputed(model) == []
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_later_selectors_override_field_by_field() -> None:
    model = build()
    rules = {
        "encoder.*": True,
        "encoder.1": {"stage_id": 3},
        "encoder.2": None,
        "encoder.3": False,
        "encoder.4": Selective("matmul"),
        "encoder.5": {"rule": "selective", "save": "matmul"},
        "encoder.6": {"activation_checkpointing": "selective"},
    }
    with graphckpt.apply(model, rules) as handle:
        counts = run(model)
        described = {row.block: row.rule for row in handle.explain(show=False).rows}
    assert [name for name in ENCODER if counts[name] == 1] == ["encoder.2", "encoder.3"]
    assert described["encoder.1"] == "full"
    assert described["encoder.4"] == described["encoder.5"] == "selective(matmul)"
    assert described["encoder.6"].startswith("selective")


def test_a_wrapped_model_keeps_type_keys_and_hooks() -> None:
    model = build()
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    seen: list[str] = []
    model.encoder[0].register_forward_hook(lambda *_: seen.append("hook"))
    model.encoder[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    with graphckpt.apply(model, {"encoder.*": True}):
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == kinds
        run(model)
        model.load_state_dict(build().state_dict())
    assert seen == ["hook", "backward"]


def test_remove_restores_everything_and_can_be_repeated() -> None:
    model = build()
    before = [dict(m.__dict__) for m in model.modules()]
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    handle = graphckpt.apply(model, {"encoder.*": True, "encoder.1.up": False})
    assert recomputed(model) == ENCODER
    run(model)
    handle.remove()
    handle.remove()
    assert [m.__dict__.keys() for m in model.modules()] == [fields.keys() for fields in before]
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert recomputed(model) == []
    graphckpt.apply(model, {"encoder.*": True}).remove()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules()), "before any step"
    with pytest.raises(KeyboardInterrupt), graphckpt.apply(model, {"encoder.*": True}):
        raise KeyboardInterrupt
    assert recomputed(model) == []


def test_two_handles_on_one_block_are_an_error_and_on_two_blocks_are_not() -> None:
    model = build()
    with graphckpt.apply(model, {"encoder.0": True}):
        with pytest.raises(ConfigError) as error:
            graphckpt.apply(model, {"encoder.[01]": True, "decoder.0": True})
        assert str(error.value) == (
            "encoder.0: it already has a policy · fix: remove() the handle, call graphckpt.remove(model), or "
            "apply(..., replace=True)"
        )
        assert recomputed(model) == ["encoder.0"]
        with graphckpt.apply(model, {"decoder.0": True}):
            assert recomputed(model) == ["encoder.0", "decoder.0"]
        assert recomputed(model) == ["encoder.0"]
    with graphckpt.apply(model, {"encoder.[01]": True}):
        assert recomputed(model) == ["encoder.0", "encoder.1"]


def accelerate_style(module: nn.Module, log: list[str]) -> None:
    """Wraps an instance's forward as accelerate's add_hook_to_module does."""
    old = module.forward

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        log.append("before")
        output = module._old_forward(*args, **kwargs)
        log.append("after")
        return output

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)
    module._old_forward = old


def test_a_wrapper_of_another_library_beneath_stays_active() -> None:
    model, log = build(), []
    accelerate_style(model.encoder[0], log)
    wrapped = model.encoder[0].forward
    with graphckpt.apply(model, {"encoder.0": True}):
        assert recomputed(model) == ["encoder.0"]
        assert log == ["before", "after", "before", "after"]
    assert model.encoder[0].forward is wrapped
    log.clear()
    assert recomputed(model) == []
    assert log == ["before", "after"]


def test_a_wrapper_of_another_library_on_top_stays_active() -> None:
    model, log = build(), []
    handle = graphckpt.apply(model, {"encoder.0": True})
    accelerate_style(model.encoder[0], log)
    assert recomputed(model) == ["encoder.0"]
    assert log == ["before", "after"]
    handle.remove()
    log.clear()
    assert recomputed(model) == [], "a policy that was removed must not act from beneath"
    assert log == ["before", "after"]


def test_a_graph_and_a_handle_on_one_model() -> None:
    model, log = build(), []

    graph = SquareGraph(model, {"encoder.0": True, "encoder.1": True}, torch.optim.SGD(model.parameters(), lr=0.0))
    graph(torch.ones(6, 16))
    with graphckpt.apply(model, {"encoder.1": "selective", "encoder.2": True}):
        for _ in range(5):
            graph(torch.ones(6, 16))
        assert recomputed(model) == ["encoder.1", "encoder.2"]
        accelerate_style(model.encoder[0], log)
        graph(torch.ones(6, 16))
        assert log == ["before", "after", "before"]  # the second run stops at what backward needs last
    assert recomputed(model) == []
    log.clear()
    graph(torch.ones(6, 16))
    assert log == ["before", "after", "before"]


def test_a_wrapper_put_on_while_a_graph_runs_ends_in_no_loop() -> None:
    model, log = build(), []

    class Wraps(SquareGraph):
        def build(self, x: Tensor) -> Tensor:
            if "_old_forward" not in model.encoder[0].__dict__:
                accelerate_style(self.model.encoder[0], log)
            return super().build(x)

    graph = Wraps(model, {"encoder.0": True}, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(4):
        log.clear()
        graph(torch.ones(6, 16))
        assert log == ["before", "after"]
        assert recomputed(model) == []


def test_copies_of_a_model_keep_its_policies_until_they_are_removed() -> None:
    model = build()
    with graphckpt.apply(model, {"": {"offload": "disk"}, "encoder.[01]": True}):
        run(model)
        model.zero_grad()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert recomputed(twin) == ["encoder.0", "encoder.1"]
            assert model.encoder[0].up.weight.grad is None, "the copy's forward must not be the model's"
            graphckpt.remove(twin)
            assert recomputed(twin) == []
            assert not any("forward" in vars(module) for module in twin.modules())
            graphckpt.remove(twin)
            with graphckpt.apply(twin, {"encoder.2": True}):
                assert recomputed(twin) == ["encoder.2"]
        assert recomputed(model) == ["encoder.0", "encoder.1"], "the model keeps its own"


def test_policies_can_be_replaced() -> None:
    model = build()
    first = graphckpt.apply(model, {"encoder.[01]": True})
    with pytest.raises(ConfigError, match="matches no"):
        graphckpt.apply(model, {"nothing": True}, replace=True)
    assert recomputed(model) == ["encoder.0", "encoder.1"], "a fault sets and removes nothing"
    second = graphckpt.apply(model, {"encoder.[12]": True}, replace=True)
    assert recomputed(model) == ["encoder.1", "encoder.2"]
    first.remove()
    assert recomputed(model) == ["encoder.1", "encoder.2"]
    second.remove()
    assert recomputed(model) == []


def test_a_model_with_modules_of_checkpoint_wrapper_can_be_cleared_and_nothing_else() -> None:
    model = build()
    graphckpt.checkpoint_wrapper(model.encoder[0])
    graphckpt.remove(model)
    assert recomputed(model) == []
    with pytest.raises(ConfigError, match=r"remove: expected an nn\.Module, got"):
        graphckpt.remove([build()])  # type: ignore[arg-type]


def test_a_policy_acts_again_once_the_wrapper_over_it_was_deleted() -> None:
    """A library may end its wrapper by deleting it from the instance, and with it what lay beneath."""
    model, log = build(), []
    handle = graphckpt.apply(model, {"encoder.0": True})
    (wrapper,) = handle._wrappers
    accelerate_style(model.encoder[0], log)
    wrapper.uninstall()  # as a Graph does after each call
    del model.encoder[0].forward
    wrapper.install()
    assert recomputed(model) == ["encoder.0"]
    handle.remove()
    assert "forward" not in vars(model.encoder[0])


def test_a_copy_keeps_the_wrapper_beneath() -> None:
    model, log = build(), []
    accelerate_style(model.encoder[0], log)
    with graphckpt.apply(model, {"encoder.0": True}):
        twin = copy.deepcopy(model)
    assert recomputed(twin) == ["encoder.0"]
    assert log == ["before", "after"] * 2
    model.zero_grad()


def test_a_block_is_taken_for_its_module() -> None:
    block = Predict(build()).model
    with graphckpt.apply(block, {"encoder.0": True}):
        assert recomputed(block.origin) == ["encoder.0"]


def test_a_shared_module_is_one_block_with_two_runs() -> None:
    shared = Mlp()
    model = nn.Sequential(nn.Linear(16, 16), shared, nn.Tanh(), shared)
    with graphckpt.apply(model, {"1": True}) as handle:
        model(torch.ones(6, 16)).sum().backward()
        (row,) = [row for row in handle.explain(show=False).rows if row.rule == "full"]
    assert (row.block, row.runs, row.reruns) == ("1", 2, 2)
    with graphckpt.apply(model, {"3": True}):
        model(torch.ones(6, 16)).sum().backward()


def test_flags_that_do_nothing_are_told() -> None:
    model = build()
    with graphckpt.apply(model, {"re:encoder|decoder.0": True, "decoder.0.up": True}) as handle:
        run(model)
        explanation = handle.explain(show=False)
    assert (
        "encoder: ModuleList has no forward, so this policy has no effect; set it on its items" in explanation.warnings
    )
    (inner,) = [row for row in explanation.rows if row.block == "decoder.0.up"]
    assert inner.note == "is recomputed with the block around it"


def test_selectors_with_an_effect_on_some_blocks_or_fields() -> None:
    for policies in (
        {"encoder": {"offload": "disk"}, "encoder.*": True},  # inherited by the items
        {"encoder.*": True, "encoder.0": False},
        {"encoder.0": {"activation_checkpointing": True, "offload": "disk"}, "encoder.*": "selective"},
        {"encoder": False, "encoder.0": True},
    ):
        graphckpt.apply(build(), policies).remove()


def test_items_of_a_list_inherit_its_settings() -> None:
    model = build()
    with graphckpt.apply(model, {"encoder": {"contiguous": True, "min_elements": 1}, "encoder.1": True}) as handle:
        run(model)
        rows = {row.block: (row.rule, row.place) for row in handle.explain(show=False).rows}
    assert [rows[f"encoder.{number}"] for number in range(3)] == [("keep", "slab"), ("full", "slab"), ("keep", "slab")]


def test_no_rules_an_empty_model_and_no_step() -> None:
    graphckpt.apply(nn.Identity(), {"": True}).remove()
    for policies in ({}, {"encoder.*": True}):
        with (
            graphckpt.apply(build(), policies) as handle,
            pytest.raises(graphckpt.GraphError, match=r"Model: no step has been measured yet · fix: run"),
        ):
            handle.explain()


def test_disable_checkpointing_is_for_one_with_block() -> None:
    model = build()
    with graphckpt.apply(model, {"encoder.*": True}):
        with graphckpt.blocks.disable_checkpointing():
            assert recomputed(model) == []
            with graphckpt.blocks.disable_checkpointing():
                pass
            assert recomputed(model) == []
        assert recomputed(model) == ENCODER
        with pytest.raises(KeyboardInterrupt), graphckpt.blocks.disable_checkpointing():
            raise KeyboardInterrupt
        assert recomputed(model) == ENCODER


def test_a_record_without_a_step_says_what_is_missing() -> None:
    model = build()
    handle = graphckpt.apply(model, {"encoder.*": True})
    with handle.measure():
        pass
    with pytest.raises(graphckpt.GraphError, match=r"has called no block of the model · fix: run one step inside of"):
        handle.explain()
    handle.remove()
    with pytest.raises(graphckpt.GraphError, match=r"no step has run under the policies, which were removed · fix: "):
        handle.explain()
    handle = graphckpt.apply(model, {"encoder.*": True})
    run(model)
    handle.remove()
    assert handle.explain(show=False).rows, "the record outlives the policies"


def test_a_thousand_layers() -> None:
    model = stack_of(lambda: nn.Linear(2, 2), 1000)
    with graphckpt.apply(model, {nn.Linear: True}) as handle:
        model(torch.ones(1, 2)).sum().backward()
    assert sum(row.reruns for row in handle.explain(show=False).rows) == 1000


def test_faults_that_differ_in_numbers_are_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        graphckpt.apply(build(), {f"layer{number}": True for number in range(80)})
    assert len(str(error.value).splitlines()) <= 2
    assert "more like it" in str(error.value)


def test_a_kept_block_that_keeps_more_than_before_is_explained() -> None:
    model = linear_layers(3, 4, nn.ReLU)
    with graphckpt.apply(model, {"0": True}) as handle:
        model(torch.ones(2, 4)).sum().backward()
    rows = {row.block: row for row in handle.explain(show=False).rows}
    assert rows["1"].bytes_after > rows["1"].bytes_before
    more_bytes = rows["1"].bytes_after - rows["1"].bytes_before
    assert rows["1"].note.startswith(f"it keeps {more_bytes} B more than before, such as its input: ")
    assert [rows[name].note for name in "02"] == ["", ""]


def test_the_advice_names_all_last_blocks_whose_recomputation_does_not_pay() -> None:
    widths = [64, 64, 64, 16, 8, 4]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh(), nn.Tanh()) for pair in pairwise(widths)))

    def measured(policies: dict[str, bool], exclude: list[str] | tuple[()] = ()) -> Explanation:
        with graphckpt.apply(model, policies, exclude=exclude) as handle, handle.measure():
            model(torch.ones(1024, 64)).sum().backward()
            model.zero_grad()
        return handle.explain(show=False)

    first = measured({"*": True})
    (advice,) = first.warnings
    names = advice.partition(":")[0].split(", ")
    listed = ", ".join(f'"{name}"' for name in names)
    assert advice.endswith(f" · fix: graphckpt.apply(model, {{'*': True}}, exclude=[{listed}])")
    assert names == [str(number) for number in range(5 - len(names), 5)] != ["4"]
    second = measured({"*": True}, names)
    assert second.peak_bytes <= first.peak_bytes
    assert second.warnings == ()
    fewer = {str(number): True for number in range(4 - len(names))}
    assert measured(fewer).peak_bytes > first.peak_bytes


@pytest.mark.parametrize(
    ("policies", "notes"),
    [
        ({"encoder.[01]": {"min_elements": 9}}, ["encoder.0 and 1 more: min_elements has no effect here:"]),
        ({"": {"min_elements": 9}, "encoder.1": {"contiguous": True}}, []),
        ({"": {"contiguous": True}, "encoder.1": {"min_elements": 9}}, []),
        (
            {"encoder.*": {"offload": True, "min_elements": 1}},
            ["more: offload to 'cpu' has no effect: the tensors"],
        ),
        ({"encoder.*": True, "encoder.2.up": {"offload": "disk"}}, ["encoder.2.up: offload has no effect here"]),
        ({"encoder.*": graphckpt.Tiles(9)}, ["encoder.0-11: tiles: 6 slices in place of 9, the size of dimension 0"]),
    ],
)
def test_settings_without_effect_are_explained(policies: Policies, notes: list[str]) -> None:
    model = build()
    with graphckpt.apply(model, policies) as handle:
        run(model)
    said = " ".join(str(handle.explain(show=False)).split())
    assert [note for note in notes if note not in said] == []
    assert bool(notes) == (" has no effect" in said or " in place of " in said)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"partition": True}, "partition has no effect: torch.distributed is not initialized"),
        ({"offload": True}, "offload to 'cpu' has no effect: the tensors are in host memory already"),
    ],
)
def test_a_field_without_effect_is_logged_once(
    fields: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_WARNED", set())
    for _ in range(2):
        model = build()
        with graphckpt.apply(model, {"encoder.*": {"activation_checkpointing": True, "min_elements": 1, **fields}}):
            run(model)
    assert [record.message for record in caplog.records] == [f"graphckpt: encoder.0: {text}"]
