"""`graphckpt selftest`: everything is equal on this device, and faults that are planted are found and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from graphckpt import cli
from graphckpt.blocks import is_recomputing
from graphckpt.checks import selftest, subjects
from graphckpt.graph import Graph, capture
from graphckpt.simulation.write_profile import present_device
from graphckpt.stores.disk import DiskStore
from graphckpt.stores.host import CopyEngine
from graphckpt.stores.slab import SlabStore

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layers as the policies name, and a plan of one candidate: the peaks are compared, not what is chosen."""
    monkeypatch.setattr(subjects, "NUM_LAYERS", 3)
    monkeypatch.setattr(selftest, "plan", plan_of_full)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_cuda_build_without_a_device_checks_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    assert present_device(None, "--device") == torch.device("cpu")


def rows_of(device: str) -> list[selftest.CheckResult]:
    return list(selftest.run(present_device(device, "--device"), Graph))


def faults_of(rows: list[selftest.CheckResult]) -> list[tuple[str, str, str]]:
    return [(row.check, row.subject, row.store) for row in rows if row.is_fault]


def test_tensors_of_others_on_the_device_are_not_a_fault(device: str) -> None:
    others = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    outcome, text = selftest._predicted(present_device(device, "--device"), "allocated")
    assert outcome in (selftest.EQUAL, selftest.CLOSE), text
    del others


def test_every_rule_and_store_is_equal(device: str) -> None:
    rows, has_streams = rows_of(device), device == "cuda"
    # What other tests of this process have reserved on the device counts too.
    assert not [row for row in rows if row.is_fault and not (has_streams and row.check == "reserved bytes")]
    by_case = {(row.check, row.subject, row.store): row.outcome for row in rows}
    for rule in subjects.RULES:
        for subject in subjects.SUBJECTS:
            for store, fields in subjects.STORES.items():
                if rule == "keep" and not fields:
                    continue
                expected = "equal" if store != "host" or has_streams else "skipped"
                assert by_case[rule, subject.name, store] == expected
    for check in ("captured step", "offload under load"):
        assert by_case[check, "transformer", "device"] == ("equal" if has_streams else "skipped")
    assert by_case["allocated bytes", "transformer", "device"] in ("equal", "close" if has_streams else "equal")
    assert by_case["copies to disk", "transformer", "device"] == "measured"


def edited(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a method of a store that gets one byte wrong."""

    def get(*arguments: object) -> torch.Tensor:
        value = method(*arguments).clone()
        value.view(torch.uint8).flatten()[0] ^= 1
        return value

    return get


def with_a_draw(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a forward whose recomputation draws once more, as if the RNG state were another one."""

    def drawing(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            torch.rand(1, device=x.device)
        return forward(self, x)

    return drawing


def plan_too_low(*arguments: object, **options: object) -> object:
    plan = plan_of_full(*arguments, **options)  # type: ignore[arg-type]
    return replace(plan, predicted_peak_bytes=int(0.9 * plan.predicted_peak_bytes))


plan_of_full = partial(selftest.plan, candidates=["full"])


class Fault(NamedTuple):
    place: tuple[object, str, object]
    concerns: Callable[[tuple[str, str, str]], bool]
    """Whether a failed check may be due to it."""
    message: str = "differs from the plain step"


FAULTS = {
    "a slab": Fault((SlabStore, "get", edited(SlabStore.get)), lambda case: case[2] == "contiguous"),
    "a disk": Fault((DiskStore, "get", edited(DiskStore.get)), lambda case: case[2] == "disk"),
    "random numbers": Fault(
        (subjects._Residual, "forward", with_a_draw(subjects._Residual.forward)),
        lambda case: case[0] not in ("keep", "plain step, twice"),
    ),
    "a predicted peak": Fault(
        (selftest, "plan", plan_too_low), lambda case: case[0] == "allocated bytes", "predicted .* measured"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    place, concerns, message = FAULTS[fault]
    monkeypatch.setattr(selftest, "SUBJECTS", subjects.SUBJECTS[:1])  # the MLP: enough, and fast
    monkeypatch.setattr(*place)
    rows = rows_of("cpu")
    cases = faults_of(rows)
    assert cases
    assert all(map(concerns, cases))
    details = "\n".join(row.detail for row in rows if row.is_fault)
    assert re.search(message, details)
    text = selftest.report("a machine", rows, 1.0)
    assert f"{len(cases)} of " in text
    assert "please open an issue with this text" in text


def test_an_op_that_differs_from_itself_is_named_and_compared_by_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, noise = subjects.functional.scaled_dot_product_attention, torch.Generator().manual_seed(0)

    def unstable(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        return plain(*arguments, **options) * (1 + 1e-6 * torch.rand((), generator=noise))

    monkeypatch.setattr(subjects, "functional", SimpleNamespace(scaled_dot_product_attention=unstable))
    monkeypatch.setattr(selftest, "SUBJECTS", subjects.SUBJECTS[1:2])
    rows = rows_of("cpu")
    first = rows[0]
    assert first.check == "plain step, twice"
    assert first.outcome == "close"
    assert first.detail.startswith("the plain step differs from itself: what layers.0.0.1.out (Linear) gets, ")
    assert not [row for row in rows if row.is_fault and row.check in subjects.RULES]
    assert {row.outcome for row in rows if row.check == "full" and row.store != "host"} == {"close"}


def test_an_error_is_a_result_and_the_next_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no disk")

    monkeypatch.setattr(selftest, "SUBJECTS", subjects.SUBJECTS[:1])
    monkeypatch.setattr(selftest, "copy_rates", broken)
    row = rows_of("cpu")[-1]
    assert (row.check, row.outcome, row.detail) == ("copies to disk", "error", "RuntimeError: no disk")


def test_command_reports_and_returns_its_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "SUBJECTS", subjects.SUBJECTS[:1])
    monkeypatch.setattr(selftest, "RULES", {name: subjects.RULES[name] for name in ("keep", "full")})
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("graphckpt ")
    assert "checks passed" in text
    monkeypatch.setattr(SlabStore, "get", edited(SlabStore.get))
    assert cli.main(["selftest", "--device", "cpu", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert {check["outcome"] for check in results["checks"]} >= {"equal", "differs"}
    assert cli.main(["selftest", "--device", "tpu"]) == 2
    assert "error: --device: expected cuda, cuda:1, ... where there is one, or cpu, got tpu" in capsys.readouterr().err


_SHOWN = "a schedule that is late shows it"


@pytest.mark.gpu
@pytest.mark.one_schedule(_SHOWN)
def test_a_copy_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: CopyEngine, event: object) -> bool:
        recorded, event.event = event.event, None  # type: ignore[attr-defined]
        if recorded is not None:
            self._idle.append(recorded)
        return True

    monkeypatch.setattr(selftest, "SUBJECTS", subjects.SUBJECTS[:1])
    monkeypatch.setattr(CopyEngine, "wait", wait)
    cases = faults_of(rows_of("cuda"))
    assert cases
    assert {store for check, _, store in cases if check in subjects.RULES} == {"host"}


@pytest.mark.gpu
@pytest.mark.one_schedule(_SHOWN)
def test_a_replay_that_is_not_joined_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(self: capture._CapturedCudaGraph) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    monkeypatch.setattr(selftest, "SUBJECTS", ())
    monkeypatch.setattr(capture._CapturedCudaGraph, "replay", replay)
    assert ("captured step", "transformer", "device") in faults_of(rows_of("cuda"))
