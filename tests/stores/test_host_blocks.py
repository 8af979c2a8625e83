"""Offload to host memory as a user sets it, with threads in the place of a device's copy engines."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES, Architecture
from helpers.hard_modules import ZOO, B, D, chain, differing, plain_steps, run_steps
from helpers.thread_copies import FakeHost, ThreadCopies
from torch import nn

import graphckpt
from graphckpt import Graph, Segments, Selective, Tiles
from graphckpt.errors import StoreError
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.stores import Host


def offload(host: Host, rule: Any = None) -> dict[str, Any]:
    return {"activation_checkpointing": rule, "offload": host, "min_elements": 1}


POLICIES: dict[str, Callable[[Host], dict[str, Any]]] = {
    "all that is saved": lambda host: {"[123]": offload(host)},
    "the whole model": lambda host: {"": offload(host)},
    "full": lambda host: {"[123]": offload(host, True)},
    "selective": lambda host: {"[123]": offload(host, Selective("matmul"))},
    "segments": lambda host: {"": offload(host, Segments("sqrt"))},
    "tiles": lambda host: {"[123]": offload(host, Tiles(1))},
    "one block kept": lambda host: {"": offload(host, True), "2": False},
    "one block of three": lambda host: {"[123]": True, "2": offload(host, True)},
}


DECODERS = [a for a in ARCHITECTURES if a.name in ("gpt2", "t5", "qwen2_moe")]


@pytest.fixture
def copies() -> Iterator[ThreadCopies]:
    made = ThreadCopies(is_held=True)
    yield made
    if made.live_bytes:
        gc.collect()
    assert made.faults == []
    assert made.live_bytes == 0, "host memory is left behind"
    made.close()


@pytest.mark.parametrize("in_flight_bytes", [None, 0])
@pytest.mark.parametrize(
    "kind", [k for k in ZOO if k in ("mlp", "attention", "batch_norm", "containers", "edits_its_input")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bits_as_the_plain_step(copies: ThreadCopies, policy: str, kind: str, in_flight_bytes: int | None) -> None:
    model = chain(kind)
    with graphckpt.apply(model, POLICIES[policy](FakeHost(in_flight_bytes, copies))):
        ours = run_steps(model)
    assert differing(ours, plain_steps(kind)) == []
    assert len(copies.history) > 0


@pytest.mark.parametrize("rule", [None, True])
@pytest.mark.parametrize("architecture", DECODERS, ids=lambda a: a.name)
def test_transformers_keep_their_bits(copies: ThreadCopies, architecture: Architecture, rule: Any) -> None:
    results = []
    for rules in (None, offload(FakeHost(copies=copies), rule)):
        model, inputs = architecture.build(), architecture.inputs()
        torch.manual_seed(3)
        with graphckpt.apply(model, dict.fromkeys(architecture.layer_modules(model), rules) if rules else {}):
            loss = architecture.loss(model(**inputs))
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert copies.history


def wide(length: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(length)))


@pytest.mark.parametrize("in_flight_bytes", [None, 0])
@pytest.mark.parametrize("rule", [None, True, Segments("sqrt")], ids=["all that is saved", "full", "segments"])
def test_bytes_alive_after_forward_fall_by_what_explain_says(
    copies: ThreadCopies, rule: Any, in_flight_bytes: int | None
) -> None:
    """But for the last block, whose copies are still under way when forward ends."""

    def kept_by(model: nn.Sequential) -> int:
        model(torch.ones(64, 32)).sum().backward()
        x = torch.ones(64, 32)
        with LiveBytes(record_timeline=False) as live:
            live.track([x, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
            before = live.live_bytes
            loss = model(x).sum()
            kept = live.live_bytes - before
        loss.backward()
        return kept

    plain = kept_by(wide())
    model = wide()
    which = "" if isinstance(rule, Segments) else "[0-5]"
    with graphckpt.apply(model, {which: offload(FakeHost(in_flight_bytes, copies), rule)}) as handle:
        kept = kept_by(model)
        explanation = handle.explain(show=False)
    by_the_last = explanation.rows[-1].bytes_host if in_flight_bytes is None else 0
    assert plain - kept == explanation.bytes_saved - by_the_last
    assert explanation.bytes_host > 0


def test_the_next_block_comes_back_while_this_one_runs_again() -> None:
    """Its copy is issued before the block's own second run, and is joined only after it."""
    copies = ThreadCopies()
    model = wide()
    with graphckpt.apply(model, {"*": offload(FakeHost(copies=copies), True), "re:[0-9]\\.[0-9]": None}):
        model(torch.ones(64, 32)).sum().backward()
        copies.history.clear()
        model(torch.ones(64, 32)).sum().backward()
        back = [done for done in copies.history if done.what == "back"]
        out = [done for done in copies.history if done.what == "out"]
        assert len(out) == len(model)
        assert len(back) == len(model) - 1, "the last block's input is still there"
        for this, ahead in itertools.pairwise(back):
            assert ahead.issued_at < this.joined_at < ahead.joined_at


def test_nothing_is_allocated_on_the_host_after_the_second_step(copies: ThreadCopies) -> None:
    model = wide()
    with graphckpt.apply(model, {"[0-5]": offload(FakeHost(copies=copies))}):
        for step in range(30):
            model(torch.ones(64, 32)).sum().backward()
            if step == 1:
                made = copies.num_buffers
        assert copies.num_buffers == made
        model(torch.ones(64, 32))
        with torch.no_grad():
            model(torch.ones(99, 32))
        model(torch.ones(16, 32)).sum().backward()
        assert copies.num_buffers == made, "a smaller step fits"


def test_a_model_may_be_copied_while_blocks_offload(copies: ThreadCopies) -> None:
    model = wide(2)
    with graphckpt.apply(model, {"[01]": offload(FakeHost(copies=copies))}):
        model(torch.ones(4, 32)).sum().backward()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(torch.ones(4, 32)).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_no_host_memory_fails_in_forward_and_the_next_step_is_whole(
    copies: ThreadCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = wide(), wide()
    with graphckpt.apply(model, {"[0-5]": offload(FakeHost(copies=copies), True)}):
        with monkeypatch.context() as patch:
            buffer = copies.buffer
            patch.setattr(copies, "buffer", lambda n: buffer(n) if copies.num_buffers < 3 else refuse())
            with pytest.raises(StoreError, match=r"^3: offload: expected 8.00 KiB of host memory"):
                model(torch.ones(64, 32))
        for _ in range(3):
            model(torch.ones(64, 32)).sum().backward()
            plain(torch.ones(64, 32)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def refuse() -> Any:
    raise MemoryError("Cannot allocate memory")


def test_in_a_graph_with_accumulation_and_evaluation(copies: ThreadCopies) -> None:
    def losses(host: Host | None) -> list[float]:
        torch.manual_seed(0)
        model = chain("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        class Step(Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                for block in (self.model[1], self.model[2], self.model[3]):
                    block.config.activation_checkpointing = True
                    block.config.offload = host
                    block.config.min_elements = 1
                self.add_optimizer(optimizer)

            def build(self, x: torch.Tensor) -> torch.Tensor:
                loss = self.model(x).square().mean()
                loss.backward()
                return loss

        step, seen = Step(), []
        for number in range(4):
            seen.append(float(step(torch.full((B, D), number / 4))))
            model.eval()
            with torch.no_grad():
                seen.append(float(model(torch.ones(B, D)).sum()))
            model.train()
        return seen

    assert losses(FakeHost(copies=copies)) == losses(None)
    assert copies.history
