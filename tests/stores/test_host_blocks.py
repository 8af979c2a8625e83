"""Offload to host memory as a user sets it."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.hard_modules import B, D, chain
from helpers.layer_stacks import mlp_layers
from helpers.train_graphs import SquareGraph
from helpers.watched_copies import WatchedCopies
from torch import nn

import graphckpt
from graphckpt.errors import StoreError
from graphckpt.stores import Host

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def offload(rule: Any = None) -> dict[str, Any]:
    return {"activation_checkpointing": rule, "offload": True, "min_elements": 1}


DECODERS = [a for a in ARCHITECTURES if a.name in ("gpt2", "t5", "qwen2_moe")]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedCopies]:
    engine = WatchedCopies()
    monkeypatch.setattr("graphckpt.stores.host.CopyEngine", lambda device, note: engine)
    yield engine
    if engine.live_bytes:
        gc.collect()
    assert engine.live_bytes == 0, "host memory is left behind"


@pytest.mark.parametrize("rule", [None, True])
@pytest.mark.parametrize("architecture", DECODERS, ids=lambda a: a.name)
def test_transformers_keep_their_bits(copies: WatchedCopies, architecture: Architecture, rule: Any) -> None:
    results = []
    for rules in (None, offload(rule)):
        model = architecture.build().cuda()
        inputs = {name: value.cuda() for name, value in architecture.inputs().items()}
        torch.manual_seed(3)
        with graphckpt.apply(model, dict.fromkeys(architecture.layer_modules(model), rules) if rules else {}):
            loss = architecture.loss(model(**inputs))
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert copies.history


def wide(length: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return mlp_layers(length, 32).cuda()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def test_the_next_block_comes_back_while_this_one_runs_again(copies: WatchedCopies) -> None:
    """Its copy is issued before the block's own second run, and is joined only after it."""
    model = wide()
    with graphckpt.apply(model, {"*": offload(True), "re:[0-9]\\.[0-9]": None}):
        model(ones(64, 32)).sum().backward()
        copies.history.clear()
        model(ones(64, 32)).sum().backward()
        back = [done for done in copies.history if done.what == "back"]
        out = [done for done in copies.history if done.what == "out"]
        assert len(out) == len(model)
        assert len(back) == len(model) - 1, "the last block's input is still there"
        for this, ahead in itertools.pairwise(back):
            assert ahead.issued_at < this.joined_at < ahead.joined_at


def test_a_model_may_be_copied_while_blocks_offload() -> None:
    model = wide(2)
    with graphckpt.apply(model, {"[01]": offload()}):
        model(ones(4, 32)).sum().backward()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(ones(4, 32)).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_no_host_memory_fails_in_forward_and_the_next_step_is_whole(
    copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = wide(), wide()
    with graphckpt.apply(model, {"[0-5]": offload(True)}):
        with monkeypatch.context() as patch:
            buffer = copies.buffer
            patch.setattr(copies, "buffer", lambda n: buffer(n) if copies.num_buffers < 3 else refuse())
            with pytest.raises(StoreError, match=r"^3: offload: expected 8.00 KiB of host memory"):
                model(ones(64, 32))
        for _ in range(3):
            model(ones(64, 32)).sum().backward()
            plain(ones(64, 32)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def refuse() -> Any:
    raise MemoryError("Cannot allocate memory")


def test_in_a_graph_with_accumulation_and_evaluation(copies: WatchedCopies) -> None:
    def losses(host: Host | None) -> list[float]:
        torch.manual_seed(0)
        model = chain("mlp").cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        step, seen = SquareGraph(model, dict.fromkeys("123", True), optimizer), []
        for block in step.model[1:4]:
            block.config.update({"offload": host, "min_elements": 1})
        for number in range(4):
            seen.append(float(step(torch.full((B, D), number / 4, device="cuda"))))
            model.eval()
            with torch.no_grad():
                seen.append(float(model(ones(B, D)).sum()))
            model.train()
        return seen

    assert losses(Host()) == losses(None)
    assert copies.history
