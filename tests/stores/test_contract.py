"""The contract of every store under every rule: bitwise equal results, a real effect, nothing left behind."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.bench import differing as differing_steps
from helpers.contract import seen_in
from helpers.hard_modules import ZOO, chain, differing, plain_steps, run_steps
from helpers.policies import HOLES, NESTED, ON_CHAIN, put
from helpers.thinning import is_chosen, slow_unless
from torch import nn

import graphckpt
from graphckpt import Disk, Host, RecomputeError, Segments, Selective
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.stores import offload_targets
from graphckpt.stores.tensor_store import TensorStore

pytestmark = pytest.mark.filterwarnings("ignore:offload to 'disk' saves")  # where the temporary folder is in memory

# The flags that reach each store.
STORES: dict[str, dict[str, Any]] = {
    "slab": {"contiguous": True},
    "disk": {"offload": "disk"},
    "cpu": {"offload": True},
    "cpu, little in flight": {"offload": Host(in_flight_bytes=300)},
    "cpu, slab": {"offload": True, "contiguous": True},
    "disk, slab": {"offload": Disk(in_flight_bytes=500), "contiguous": True},
}
HERE = [name for name in STORES if torch.cuda.is_available() or not name.startswith("cpu")]
MAIN = [name for name in HERE if "," not in name]


@pytest.fixture(params=HERE)
def flags(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STORES[request.param] | {"min_elements": 1}


def rows_for(model: nn.Module, count: int = 6, **settings: Any) -> torch.Tensor:
    return torch.randn(count, 16, device=next(model.parameters()).device, **settings)


def stores_of(handle: graphckpt.Handle) -> list[TensorStore]:
    stores = {id(w.context.store): w.context.store for w in handle._wrappers}
    return [store for store in stores.values() if isinstance(store, TensorStore)]


def test_every_kind_of_memory_has_a_case() -> None:
    assert {name.split(",")[0] for name in STORES} == {*offload_targets(), "slab"}


VARIED = {"mlp", "attention", "containers", "edits_its_input", "gru"}
"""Kinds of modules that all policies are checked on; on the others those are that keep, rerun, choose, and have holes.

What a store sees of a policy are tensors to keep, in an order; tests/rules has all policies on all kinds.
"""


@pytest.mark.parametrize(
    ("policy", "kind", "store"),
    [
        pytest.param(*case, marks=slow_unless(is_chosen(case, {**ON_CHAIN, **HOLES}, ZOO, MAIN)))
        for case in itertools.product({**ON_CHAIN, **HOLES}, ZOO, MAIN)
        if case[1] in VARIED or case[0] in {"keep", "full", "selective", "every second child kept"}
    ],
)
def test_same_bits_as_the_plain_step(policy: str, kind: str, store: str, device: str) -> None:
    plain = plain_steps(kind, device=device)
    model = chain(kind).to(device)
    with put(model, (ON_CHAIN | HOLES)[policy], STORES[store] | {"min_elements": 1}) as handle:
        assert differing(run_steps(model, device=device), plain) == []
        stores = stores_of(handle)
        assert len(stores) == 1
        assert stores[0].num_alive == 0


@pytest.mark.parametrize(("kind", "store"), [("mlp", "disk, slab"), ("attention", HERE[-2])])
@pytest.mark.parametrize("policy", NESTED)
def test_same_bits_when_rules_nest(policy: str, kind: str, store: str, device: str) -> None:
    plain = plain_steps(kind, autocast=True, device=device)
    model = chain(kind).to(device)
    with put(model, NESTED[policy], STORES[store] | {"min_elements": 1}) as handle:
        assert differing(run_steps(model, autocast=True, device=device), plain) == []
        assert [store.num_alive for store in stores_of(handle)] == [0]


@pytest.mark.parametrize("kind", [kind for kind in ZOO if kind in ("mlp", "gru", "containers")])
def test_every_block_may_have_another_store(kind: str, device: str) -> None:
    plain = plain_steps(kind, length=6, device=device)
    model = chain(kind, length=6).to(device)
    rules = {
        "1": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
        "2": {"contiguous": True, "min_elements": 1},
        "3": {"activation_checkpointing": "selective", **STORES["cpu"], "min_elements": 1},
        "4": {"activation_checkpointing": True},
        "5": STORES["cpu"] | {"min_elements": 1},
        "6": {"activation_checkpointing": True, "contiguous": True, "min_elements": 1},
    }
    with graphckpt.apply(model, rules) as handle:
        assert differing(run_steps(model, device=device), plain) == []
        assert [store.num_alive for store in stores_of(handle)] == [0] * 3  # 2 and 6 share one, 3 and 5 too


def test_a_block_in_a_stored_one_may_stay_on_the_device() -> None:
    model, x = chain("mlp", length=6), torch.randn(300, 16)
    with graphckpt.apply(model, {"": {"contiguous": True}, "2": {"contiguous": False}}) as handle:
        model(x).sum().backward()
        with handle.measure():
            model(x).sum().backward()
        places = {row.block: row.place for row in handle.explain(show=False).rows}
    assert places["Sequential"] == "slab"
    assert places["2"] == "device"


def settled(live: LiveBytes, handle: graphckpt.Handle, expected: int) -> int:
    """Live bytes once the copies that are under way have ended."""
    end = time.monotonic() + 10
    while live.live_bytes != expected and time.monotonic() < end:
        time.sleep(0.005)
    return live.live_bytes


# how each rule saves on the chain's six blocks, at sizes at which everything but the weights moves
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "full": {"[1-6]": True},
    "selective": {"[1-6]": Selective("matmul")},
    "holes": {"[1-6]": True, "[1-6].down": False},
    "segments": {"": Segments(3)},
    "mixed": {"1": True, "2": Selective("matmul"), "4": False},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("store", MAIN)
def test_device_bytes_fall_by_exactly_what_explain_says(store: str, policy: str, device: str) -> None:
    x = torch.randn(300, 16, device=device)

    def added(model: nn.Module, expected: int | None, handle: graphckpt.Handle | None) -> int:
        for _ in range(2):  # the first call learns, the second has the slab
            model(x).sum().backward()
        with LiveBytes(device=device) as live:
            live.track([*model.parameters(), *model.buffers(), x])
            before = live.live_bytes
            loss = model(x).sum()
            before += loss.untyped_storage().nbytes()
            if expected is not None and handle is not None:
                settled(live, handle, before + expected)
            result = live.live_bytes - before
            loss.backward()
        return result

    plain = added(chain("mlp", length=6).to(device), None, None)
    model = chain("mlp", length=6).to(device)
    flags = {"offload": Host(in_flight_bytes=0)} if store == "cpu" else STORES[store]
    with put(model, POLICIES[policy], flags) as handle:
        model(x).sum().backward()
        with handle.measure():
            model(x).sum().backward()
        told = handle.explain(show=False)
        ours = added(model, told.bytes_after, handle)
    assert told.bytes_before == plain
    assert told.bytes_after == ours
    if store == "slab":
        assert told.bytes_host == told.bytes_disk == 0
    else:
        assert told.bytes_after < plain / (2 if policy == "segments" else 4)  # the last run of segments is kept whole
        assert (told.bytes_host if store == "cpu" else told.bytes_disk) > 0


@pytest.mark.parametrize("rule", [True, False])
def test_an_edit_of_what_is_kept_raises(rule: bool, flags: dict[str, Any], device: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(device)
    with graphckpt.apply(model, {"1": {"activation_checkpointing": rule, **flags}}):
        for _ in range(2):
            hidden = model[0](rows_for(model))
            loss = model[1](hidden).sum()
            with torch.no_grad():
                hidden.mul_(2)
            with pytest.raises(RecomputeError, match=r"1: .* modified in place"):
                loss.backward()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("store", ["slab", "disk"])
def test_a_hundred_steps_leave_no_more_than_forty(store: str) -> None:
    model = chain("mlp", length=4)
    with put(model, {"[12]": True}, STORES[store] | {"min_elements": 1}) as handle:

        def steps(count: int) -> tuple[int, int, int]:
            for number in range(count):
                model(rows_for(model, 64 if number % 3 else 48)).sum().backward()
            gc.collect()
            (used,) = stores_of(handle)
            assert used.num_alive == 0
            return rss_bytes(), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

        steps(20)
        rss, files, threads = steps(20)
        rss_later, files_later, threads_later = steps(80)
    assert (files_later, threads_later) == (files, threads)
    assert rss_later - rss < 2 << 20
    assert threading.active_count() <= threads


SHAPES_OF_STEPS = (
    "plain", "other_batch", "plain", "several_forwards", "two_losses_of_two_calls", "other_batch", "retained",
    "no_grad_between", "eval_between", "dropped_forward", "subset", "inputs_only", "fails_in_forward",
    "fails_in_backward", "copied_model", "in_a_thread", "saved_as_copies", "plain", "removed_between",
)  # fmt: skip


def wide() -> nn.Sequential:
    return nn.Sequential(*chain("mlp", length=6)[:-1], nn.Linear(16, 16))


@functools.cache
def plain_programme() -> dict[str, Any]:
    return seen_in(wide, None, SHAPES_OF_STEPS)


@pytest.mark.parametrize("policy", ["keep", "full", "selective", "holes", "segments"])
@pytest.mark.usefixtures("device")
def test_any_backward(policy: str, flags: dict[str, Any]) -> None:
    """Nothing is left in a store, whatever order forwards, backwards and errors come in."""
    rules = {name: {"activation_checkpointing": rule} for name, rule in POLICIES[policy].items()}
    rules[""] = {**rules.get("", {}), **flags}
    assert differing_steps(seen_in(wide, rules, SHAPES_OF_STEPS), plain_programme()) == []
