"""Which blocks have a row: each selected one, and the modules beside them, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers.hard_modules import chain
from helpers.layer_stacks import ResidualLayer, stack_of
from helpers.modules import as_module
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import graphckpt
from graphckpt import Segments, Tiles
from graphckpt.ledger.explanation import Explanation


def stage(num_layers: int) -> nn.Module:
    return stack_of(lambda: stack_of(lambda: nn.Linear(16, 16), 3), num_layers)


@as_module(lambda: {"stem": nn.Linear(16, 16), "stages": nn.ModuleList(map(stage, (2, 3))), "head": nn.Linear(16, 4)})
def Stages(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A model as ResNets are: stages of layers that have a stack of their own inside."""
    x = self.stem(x)
    for stage in self.stages:
        x = stage(x).tanh()
    return self.head(x)


def explain(model: nn.Module, policies: dict[str, Any]) -> Explanation:
    with graphckpt.apply(model, policies) as handle:
        with handle.measure():
            model(torch.ones(6, 16)).sum().backward()
        return handle.explain(show=False)


def blocks(seen: Explanation) -> list[str]:
    return [row.block for row in seen.rows if row.block != "(outside of blocks)"]


LAYERS = [f"stages.{stage}.{layer}" for stage, num in enumerate((2, 3)) for layer in range(num)]


@pytest.mark.parametrize("policy", [True, "keep", "selective", {"activation_checkpointing": False}])
def test_a_selected_block_is_one_row_whatever_its_policy(policy: Any) -> None:
    assert blocks(explain(Stages(), {"re:stages[.].[.].": policy})) == ["stem", *LAYERS, "head"]
    names = [str(number) for number in range(5)]
    assert blocks(explain(chain("mlp"), {"[123]": policy})) == names


def test_without_a_selection_the_layers_have_rows_and_no_stack_inside_of_them() -> None:
    assert blocks(explain(Stages(), {})) == ["stem", "stages.0", "stages.1", "head"]
    assert blocks(explain(chain("mlp"), {})) == [str(number) for number in range(5)]


def test_unselected_modules_are_rows_of_their_outermost_parent_and_blocks_within_another_have_a_row_too() -> None:
    assert blocks(explain(Stages(), {"stages.0.0": True})) == ["stem", "stages.0.0", "stages.0.1", "stages.1", "head"]
    assert blocks(explain(chain("mlp"), {"1": "keep", "1.up": "keep"}))[:3] == ["0", "1", "1.up"]


def test_modules_of_another_pipeline_stage_have_no_row() -> None:
    model = chain("mlp")
    for module in (model[1], model[3]):
        module.to("meta")
        module.forward = lambda x: x
    seen = explain(model, {"[12]": True})
    assert blocks(seen) == ["0", "2", "4"]
    assert not any(warning.startswith("1:") for warning in seen.warnings)


@as_module(lambda: {"inner": chain("mlp")[1], "gradient_checkpointing": True})
def Inner(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x)


class Checkpoints(Inner):
    """A layer with gradient checkpointing of its own, as those of Transformers have it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and self.training:
            return checkpoint(super().__call__, x, use_reentrant=False)
        return super().__call__(x)


@pytest.mark.parametrize("policy", ["keep", False])
def test_a_block_that_the_model_itself_recomputes_says_so(policy: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Checkpoints(), Checkpoints())
    seen = explain(model, {"[12]": policy})
    own = [row for row in seen.rows if row.is_own]
    assert [row.block for row in own] == ["1", "2"]
    assert all(row.rule == "own checkpointing" and row.reruns == 1 for row in own)
    assert all(row.note == "the model's own gradient checkpointing recomputes it" for row in own)
    assert seen.plain_peak_bytes is None
    assert "policies: the model's own gradient checkpointing recomputes layers" in " ".join(str(seen).split())
    assert {event.phase for event in seen.timeline} == {"forward", "recompute", "backward"}
    model.eval()
    assert not any(row.is_own for row in explain(model, {"[12]": policy}).rows)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"offload": "disk", "min_elements": 1}, "stores move saved tensors"),
        (Tiles(2), "tiles run a block in slices"),
        (True, None),
    ],
)
def test_a_missing_prediction_of_the_plain_peak_has_a_reason(policy: Any, why: str | None) -> None:
    seen = explain(chain("mlp"), {"[12]": policy})
    assert (seen.plain_peak_bytes is None) is (why is not None)
    line = f"no peak is predicted for the step without policies: {why}"
    assert (line in " ".join(str(seen).split())) is (why is not None)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        (
            {"offload": "cpu", "min_elements": 1},
            "offload to 'cpu' has no effect: the tensors are in host memory already",
        ),
        ({"offload": "disk", "min_elements": 10**6}, "disk: no tensor is moved, as all have fewer elements than"),
    ],
)
@pytest.mark.parametrize("rule", [False, True])
def test_a_store_that_moves_nothing_says_so_and_the_plain_peak_is_predicted(
    rule: bool, fields: dict[str, Any], note: str
) -> None:
    plain = explain(chain("mlp"), {"[12]": False})
    seen = explain(chain("mlp"), {"[12]": {"activation_checkpointing": rule, **fields}})
    assert seen.plain_peak_bytes == plain.peak_bytes
    assert note in " ".join(str(seen).split())
    assert "no peak is predicted" not in str(seen)


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize(("num_segments", "num_recomputed"), [(1, 0), (2, 1), (4, 3), ("log", 3)])
def test_the_segment_that_is_kept_is_a_part_of_its_block(
    num_segments: int | str, num_recomputed: int, is_measured: bool
) -> None:
    model, x = nn.Sequential(stack_of(lambda: nn.Linear(16, 16), 4)), torch.ones(6, 16)
    with graphckpt.apply(model, {"0": Segments(num_segments)}) as handle:
        with handle.measure() if is_measured else nullcontext():
            model(x).sum().backward()
        seen = handle.explain(show=False)
    assert blocks(seen) == ["0"]
    assert len(seen.rows) == 1, "nothing is saved outside of the block"
    assert (seen.rows[0].runs, seen.rows[0].reruns) == (1, num_recomputed)
    assert (seen.rows[0].bytes_before, seen.rows[0].bytes_after) == (seen.bytes_before, seen.bytes_after)
    assert seen.warnings == ()


def test_a_measurement_within_another_is_a_part_of_it() -> None:
    model = chain("mlp")
    whole = explain(model, {"[12]": True})
    with graphckpt.apply(model, {"[12]": True}) as handle:
        with handle.measure():
            with handle.measure():
                model(torch.ones(6, 16)).sum().backward()
            with pytest.raises(graphckpt.GraphError, match="has not ended"):
                handle.explain()
        assert handle.explain(show=False).rows == whole.rows


def test_a_model_on_the_meta_device_has_the_rows_and_peaks_of_a_real_one() -> None:
    model = chain("mlp")
    real = explain(model, {"[12]": True})
    model.zero_grad()
    model.to("meta")
    with graphckpt.apply(model, {"[12]": True}) as handle:
        with handle.measure():
            model(torch.ones(6, 16, device="meta")).sum().backward()
        seen = handle.explain(show=False)
    assert blocks(seen) == ["0", "1", "2", "3", "4"]
    assert (seen.rows, seen.plain_peak_bytes) == (real.rows, real.plain_peak_bytes)


Layer = partial(ResidualLayer, activation=torch.tanh, dropout=None)


@as_module(lambda: {"inner": Layer()})
def CallsCheckpoint(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(self.inner, x, use_reentrant=False)


@as_module(lambda: {"parts": nn.Sequential(Layer(), checkpoint_wrapper(Layer()))})
def HasWrapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.parts(x)


@as_module(lambda: {"layers": nn.ModuleList([Layer(), Layer()])})
def AroundLayers(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


WITHIN, AROUND = "PyTorch's checkpoint within it recomputes", "PyTorch's checkpoint is around it and recomputes"


@pytest.mark.parametrize("policy", [True, "selective", False])
@pytest.mark.parametrize(
    ("make", "selector", "note", "is_seen_at_once"),
    [
        (lambda: nn.Sequential(checkpoint_wrapper(Layer()), Layer()), "0", WITHIN, True),
        (lambda: nn.Sequential(checkpoint_wrapper(Layer()), Layer()), "0._checkpoint_wrapped_module", AROUND, True),
        (lambda: nn.Sequential(HasWrapped(), Layer()), "0", WITHIN, True),
        (lambda: nn.Sequential(CallsCheckpoint(), Layer()), "0", WITHIN, False),
        (AroundLayers, "layers.*", AROUND, True),
        (lambda: nn.Sequential(Layer(), Layer()), "0", "", True),
    ],
)
def test_a_block_that_pytorchs_checkpoint_recomputes_as_well_says_so(
    make: Callable[[], nn.Module], selector: str, note: str, is_seen_at_once: bool, policy: Any
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, 16)
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    with graphckpt.apply(model, {selector: policy}) as handle:
        for is_measured in (False, True):
            model.zero_grad()
            with handle.measure() if is_measured else nullcontext():
                model(x).square().sum().backward()
            assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), plain, strict=True))
            notes = " ".join(row.note for row in handle.explain(show=False).rows)
            is_noted = bool(note) and policy is not False and (is_measured or is_seen_at_once)
            assert (note if is_noted else "") in notes
            assert ("PyTorch's checkpoint" in notes) == is_noted
