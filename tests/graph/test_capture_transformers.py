"""Transformers' models captured: the bits of the plain step, and no attention mask where the plain step has none."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.captured_steps import adamw, same
from torch import Tensor, nn
from transformers import masking_utils

from graphckpt import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MODELS = [a for a in ARCHITECTURES if a.name in ("gpt2", "llama", "bert", "t5")]


class Train(Graph):
    def __init__(self, model: nn.Module, architecture: Architecture, capture: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = architecture.loss
        self.add_optimizer(adamw(model))
        self.config.capture = capture

    def build(self, inputs: dict[str, Any]) -> Tensor:
        loss = self.loss(self.model(**inputs))
        loss.backward()
        return loss


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the attention kernel had a mask."""
    seen: list[bool] = []
    attend = nn.functional.scaled_dot_product_attention

    def see(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        seen.append(attn_mask is not None)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", see)
    return seen


def inputs_of(architecture: Architecture, more: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = architecture.inputs()
    if more is not None:
        inputs = {"input_ids": inputs["input_ids"], "labels": inputs["labels"], **more}
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def run(
    architecture: Architecture,
    capture: Any,
    *,
    rule: Any,
    more: Any = None,
    offload: bool = False,
    autocast: bool = False,
) -> tuple[list[Tensor], Train]:
    model = architecture.build().cuda()
    graph = Train(model, architecture, capture)
    if autocast:
        graph.config.enable_amp(dtype=torch.bfloat16)
    for path, layer in architecture.layer_modules(model).items():
        config = graph._tree.config(layer, f"model.{path}")
        config.update({"activation_checkpointing": rule, "offload": offload, "min_elements": 1})
    torch.manual_seed(3)
    losses = [graph(inputs_of(architecture, more)) for _ in range(6)]
    return [*losses, *(p.detach().clone() for p in model.parameters())], graph


def masks_of_both(
    architecture: Architecture, masks: list[bool], **settings: Any
) -> tuple[list[bool], list[bool], Train]:
    """Compares captured steps with plain ones, and returns the masks of both."""
    plain, _ = run(architecture, "eager", **settings)
    masks_of_plain, masks[:] = masks[:], []
    ours, graph = run(architecture, "cuda_graph", **settings)
    assert same(ours, plain)
    return masks_of_plain, masks, graph


@pytest.mark.parametrize("architecture", MODELS, ids=lambda a: a.name)
@pytest.mark.parametrize(("rule", "autocast"), [(None, False), (True, False), ("selective", False), (True, True)])
def test_captured_is_eager(architecture: Architecture, rule: Any, autocast: bool, masks: list[bool]) -> None:
    plain, ours, graph = masks_of_both(architecture, masks, rule=rule, autocast=autocast)
    assert ours == 4 * plain[: len(plain) // 6], "three steps and the recording"
    assert graph.explain(show=False).capture.startswith("cuda_graph, 1 capture, 3 replays, ")


@pytest.mark.parametrize("architecture", MODELS[:2], ids=lambda a: a.name)
def test_no_mask_without_a_cache(architecture: Architecture, masks: list[bool]) -> None:
    """Without a cache, the plain step looks whether a row holds several sequences."""
    plain, ours, _ = masks_of_both(architecture, masks, rule=True, more={"use_cache": False})
    assert plain
    assert not any(plain + ours)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_no_mask_where_transformers_takes_a_missing_one_for_traced(
    name: str, masks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions before 5.23 do."""
    for function in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        skips = getattr(masking_utils, function)

        def older(padding_mask: Any = None, *args: Any, skips: Any = skips, **kwargs: Any) -> bool:
            return not masking_utils.is_tracing(padding_mask) and skips(padding_mask, *args, **kwargs)

        monkeypatch.setattr(masking_utils, function, older)
    plain, ours, _ = masks_of_both(next(a for a in MODELS if a.name == name), masks, rule=True)
    assert ours == 4 * plain[: len(plain) // 6]


def test_rows_of_several_sequences_keep_their_mask(masks: list[bool]) -> None:
    llama = next(a for a in MODELS if a.name == "llama")
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]] * 2)
    plain, ours, _ = masks_of_both(llama, masks, rule=None, more={"use_cache": False, "position_ids": position_ids})
    assert all(plain + ours)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_mask_that_only_the_recording_has_is_not_offloaded(name: str, masks: list[bool]) -> None:
    """The plain step finds that the mask is all ones; a capture may not look."""
    architecture = next(a for a in MODELS if a.name == name)
    more = {"attention_mask": torch.ones_like(architecture.inputs()["input_ids"])}
    plain, _ = run(architecture, "eager", rule=True, more=more)
    assert not any(masks)
    ours, graph = run(architecture, "cuda_graph", rule=True, more=more, offload=True)
    assert any(masks)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, plain, strict=True))
    assert graph._step.captured.num_replays == 3
    assert any("stay on the device" in row.note for row in graph.explain(show=False).rows)


@pytest.mark.skipif("simulated_cuda.plugin" not in sys.modules, reason="a GPU does not work on after the error")
def test_several_sequences_in_a_row_after_the_recording_are_seen() -> None:
    llama = next(a for a in MODELS if a.name == "llama")
    one = torch.arange(12).expand(2, 12).contiguous()
    more = {"use_cache": False, "position_ids": one}
    _, graph = run(llama, "cuda_graph", rule=None, more=more)
    packed = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]] * 2)
    with pytest.raises(RuntimeError, match="position_ids contain packed sequences"):
        graph(inputs_of(llama, {**more, "position_ids": packed})).item()


def test_explain_says_where_a_mask_is_made() -> None:
    bert = next(a for a in MODELS if a.name == "bert")
    _, graph = run(bert, "cuda_graph", rule=None, more={"attention_mask": torch.ones(2, 12, dtype=torch.long)})
    assert "makes the attention mask in every captured step" in graph.explain(show=False).capture
