"""Predicted bytes beside those that others have published."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from graphckpt.planning.steps import made_step
from graphckpt.simulation.cluster_profile import load_cluster
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

ROOT = Path(__file__).parents[1]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("published")


def test_the_old_softmax_computes_the_same_and_saves_its_input_too(published: ModuleType) -> None:
    results, storages = [], []
    for patch in (False, True):
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        original = F.softmax
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = x * 2
            if patch:
                with published.old_softmax():
                    y = F.softmax(scores, dim=-1)
            else:
                y = F.softmax(scores, dim=-1)
        assert F.softmax is original
        (y * torch.arange(4)).sum().backward()
        results.append((y.detach(), x.grad))
        storages.append({tensor.untyped_storage().data_ptr() for tensor in saved})
        assert (scores.untyped_storage().data_ptr() in storages[-1]) == patch
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(("kind", "bound"), [("eager", 1e-3), ("flash", 0.0025), ("full", 0)])
def test_a_block_keeps_the_bytes_of_the_formula(published: ModuleType, kind: str, bound: float) -> None:
    jobs = [job for job in published.jobs() if f", {kind}: " in job.row.name]
    assert len(jobs) == 5
    for job in jobs:
        assert 0 <= job.run(job.row).ratio - 1 <= bound


def test_a_small_step_of_that_time_takes_more_than_one_of_today(published: ModuleType) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    make = published.bert_2022(2, 1, **sizes)
    plain = published.simulate(make, "v100-16g")
    with published.old_softmax():
        old = published.simulate(make, "v100-16g")
    weights = 2 * 4 * 512 * 512 * 4  # bytes of the attention weights of one layer
    assert 2 * weights <= old.peak_bytes - plain.peak_bytes <= 3 * weights
    step, _ = made_step(make, FakeDevice(load_profile("v100-16g")), "make")
    assert step.run().peak_bytes == plain.peak_bytes


def test_without_torchtune_its_row_says_so(published: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise published.PackageNotFoundError(name)

    monkeypatch.setattr(published, "version", missing)
    (job,) = (job for job in published.jobs() if job.row.name.startswith("Llama 3.2"))
    row = job.run(job.row)
    assert (row.predicted_bytes, row.is_met) == (None, False)
    assert row.note == "not run: torchtune 0.4.0 is not installed"
    assert "not run: torchtune 0.4.0 is not installed" in published.text_of([row])


def test_selective_checkpointing_of_pytorch_keeps_one_result_more_of_each_layer(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the last matrix product, which is added to the residual stream and read by no backward."""
    titan = importlib.import_module("titan")
    sizes = {"channels": 256, "hidden": 896, "num_layers": 3, "heads": 4, "key_heads": 2}
    monkeypatch.setitem(titan.SIZES, "tiny", sizes)
    peaks = []
    for is_checkpointed in (True, False):
        with FakeCluster(8) as cluster:
            found = published.simulate(
                lambda is_checkpointed=is_checkpointed: titan.titan(
                    "tiny", 2, length=1024, num_words=8192, is_checkpointed=is_checkpointed
                ),
                "h100",
                None if is_checkpointed else {"layers.*": titan.SELECTIVE},
                cluster,
            )
        peaks.append(found.peak_bytes)
    result = 2 * 1024 * sizes["channels"] * 2  # bytes in bfloat16
    assert peaks[0] - peaks[1] == sizes["num_layers"] * result


@pytest.mark.filterwarnings("ignore:.*sequential all_reduce")
def test_tensor_parallelism_waits_for_its_collectives(published: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    titan = importlib.import_module("titan")
    sizes = {"channels": 1024, "hidden": 3584, "num_layers": 2, "heads": 8, "key_heads": 4}
    monkeypatch.setitem(titan.SIZES, "tiny", sizes)
    found = []
    for tensor_parallel in (1, 4):
        with FakeCluster(8, profile=load_cluster("dgx-h100")) as cluster:
            make = partial(titan.titan, "tiny", 2, 1024, 8192, is_checkpointed=True, tensor_parallel=tensor_parallel)
            step, _ = made_step(make, FakeDevice(load_profile("h100"), cluster=cluster), "published")
            found.append(step.run())
    assert found[1].exposed_seconds > found[0].exposed_seconds
    assert found[1].peak_bytes < found[0].peak_bytes


def test_the_page_has_the_rows_of_the_results(published: ModuleType) -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [job.row.name for job in published.jobs()]
    page = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    for row in rows:
        assert row["is_met"] or row["note"], f"{row['name']}: a row that misses has a reason"
        if (rate := row["published_per_second"]) is not None and "bert" not in row["name"]:
            cells = [row["name"], f"{rate:g} {row['unit']}", f"{row['predicted_per_second']:.3g}"]
            assert f"| {' | '.join(cells)} | {row['predicted_per_second'] / rate:.2f} |" in page
        if row["published_bytes"] is None:
            continue
        cells = [row["name"], row["quantity"]]
        cells += [f"{row[key] / 2**20:,.0f}" for key in ("published_bytes", "predicted_bytes")]
        assert f"| {' | '.join(cells)} | {row['ratio']:.4f} |" in page
    assert "within 2 %" in page


def test_recomputation_is_as_slow_as_published(published: ModuleType) -> None:
    values = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())["rows"]
    rows = [
        published.Row(**{key: value for key, value in row.items() if key not in ("ratio", "is_met")}) for row in values
    ]
    reported, predicted = published.slowdown(rows)
    assert abs(predicted / reported - 1) <= published.TIME_TOLERANCE
    percentages = re.search(
        r"slows the fp32 step of batch 1 x 4 down by ([\d.]+) %; predicted are ([\d.]+) %",
        " ".join((ROOT / "docs" / "published.md").read_text(encoding="utf-8").split()),
    )
    assert percentages is not None
    assert [f"{ratio - 1:.1%}".rstrip("%") for ratio in (reported, predicted)] == [*percentages.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["fp32, batch 4", "Adafactor"])
def test_a_row_is_within_two_percent(published: ModuleType, word: str, tmp_path: Path) -> None:
    (row,) = published.main(["--rows", word], tmp_path)
    assert abs(row.ratio - 1) <= published.TOLERANCE
    assert row.name in (tmp_path / "published.md").read_text()
