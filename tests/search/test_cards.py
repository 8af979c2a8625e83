"""``graphckpt estimate --cards``: the largest batch on each device, or the fastest policy for one batch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig, ViTConfig

import graphckpt
from graphckpt.cli import main
from graphckpt.errors import ConfigError
from graphckpt.search.cards import CardTable, compare_cards
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.simulation import profile
from graphckpt.simulation.profile import load_profile

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, vocab_size=32000)
NAMES = ["t4", "v100-32g", "a10g", "rtx4090", "h100"]


@pytest.fixture(autouse=True)
def _few_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "profile_names", lambda: [*NAMES, "cpu"])


def table_of(model: Any = LLAMA, *, batch: int | None = None, **options: Any) -> tuple[CardTable, list[str]]:
    lines: list[str] = []
    seq = {} if isinstance(model, ViTConfig) else {"seq": 1024}
    table = compare_cards(model, EstimateOptions(**{"dtype": "bf16", **seq, **options}), batch, lines.append)
    return table, [line for line in lines if line.startswith("simulating")]


@cache
def largest() -> tuple[CardTable, list[str]]:
    return table_of()


class TestLargest:
    def test_each_row_is_what_an_estimate_of_it_says(self) -> None:
        table, runs = largest()
        assert [row.device for row in table.rows] == ["t4", "a10g", "rtx4090", "v100-32g", "h100"]
        for row in table.rows[::2]:
            for name, one in row.policies.items():
                assert one is not None
                estimate = graphckpt.estimate(
                    LLAMA, device=row.device, batch=one.batch, seq=1024, dtype="bf16", policy=name
                ).policies[name]
                assert estimate.fits
                assert estimate.allocated_bytes == one.allocated_bytes
                assert estimate.nvidia_smi_bytes == one.nvidia_smi_bytes
                assert estimate.seconds == pytest.approx(one.seconds, rel=1e-6)
                assert estimate.tokens_per_second == pytest.approx(1024 * one.batch / one.seconds, rel=1e-6)
        assert len(runs) == len(set(runs)), "a step was simulated twice"
        # Three kinds of kernels, two policies, two batch sizes and one that checks these.
        assert len(runs) <= 3 * 2 * 3

    def test_one_sample_more_does_not_fit(self) -> None:
        table, _ = largest()
        row = table.rows[2]
        for name, one in row.policies.items():
            assert one is not None
            more = graphckpt.estimate(
                LLAMA, device=row.device, batch=one.batch + 1, seq=1024, dtype="bf16", policy=name, memory="500GiB"
            ).policies[name]
            assert one.nvidia_smi_bytes <= row.memory_bytes < more.nvidia_smi_bytes

    def test_devices_with_the_same_kernels_share_all_runs(self) -> None:
        table, runs = table_of(dtype="float32")  # no flash attention: the efficient kernel on all of them
        assert {row.attention for row in table.rows} == {("efficient",)}
        assert all("kernels of t4" in line for line in runs)

    def test_images(self) -> None:
        table, _ = table_of(ViTConfig(**SIZES, image_size=224, patch_size=16), dtype="float32")
        text = str(table)
        assert "samples/s" in text
        full = table.rows[0].policies["full"]
        assert full is not None
        estimate = graphckpt.estimate(
            ViTConfig(**SIZES, image_size=224, patch_size=16), device="t4", batch=full.batch, policy="full"
        )
        assert estimate.policies["full"].nvidia_smi_bytes == full.nvidia_smi_bytes

    def test_a_step_that_is_not_linear_in_the_batch_runs_at_each_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profile, "profile_names", lambda: ["t4"])
        config = MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=256, num_local_experts=3)
        table, runs = table_of(config, policy="keep")
        one = table.rows[0].policies["keep"]
        assert one is not None
        assert len(runs) == len(set(runs))
        estimate = graphckpt.estimate(config, device="t4", batch=one.batch, seq=1024, dtype="bf16", policy="keep")
        assert estimate.policies["keep"].nvidia_smi_bytes == one.nvidia_smi_bytes


class TestOneBatch:
    def test_a_row_has_the_fastest_policy_that_fits(self) -> None:
        kept = largest()[0].rows[0].policies["keep"]
        assert kept is not None
        table, runs = table_of(batch=kept.batch + 1)
        assert len(runs) == 3 * 2
        t4, *_, h100 = table.rows
        assert (t4.fastest, h100.fastest) == ("full", "keep")
        assert t4.policies["keep"] is None
        for row, name in ((t4, "full"), (h100, "keep")):
            one = row.policies[name]
            assert one is not None
            estimate = graphckpt.estimate(
                LLAMA, device=row.device, batch=one.batch, seq=1024, dtype="bf16", policy=name
            ).policies[name]
            assert (estimate.nvidia_smi_bytes, estimate.seconds) == (one.nvidia_smi_bytes, pytest.approx(one.seconds))
        assert "fits on 5 of 5: the smallest is t4, the fastest h100" in str(table)

    def test_no_device_fits(self) -> None:
        table, _ = table_of(batch=10**6, policy="keep")
        assert all(row.fastest is None and row.least_bytes > row.memory_bytes for row in table.rows)
        assert "fits on none of these · fix: a smaller --batch" in str(table)


class TestCommand:
    FOLDER = "small"

    def test_the_table_and_its_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        LlamaConfig(**SIZES, vocab_size=256, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "small")
        words = ["estimate", str(tmp_path / "small"), "--cards", "--seq", "256", "--batch", "4"]
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert "nvidia-smi  policy" in printed
        assert main([*words, "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert [row["device"] for row in values["cards"]] == ["t4", "a10g", "rtx4090", "v100-32g", "h100"]
        assert values["cards"][0]["policies"]["keep"]["batch"] == values["batch"] == 4
        assert values["cards"][0]["memory_bytes"] == load_profile("t4").memory_bytes

    def test_the_error_of_a_missing_device_names_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["estimate", "someone/model"]) == 2
        assert "--device: expected a device profile, got nothing · fix: --device h100, or --cards" in (
            capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--device", "h100"], "--cards: expected no --device with it, got --device h100"),
            (["--for", "trl"], "--cards: expected no --for with it"),
            (["--world-size", "8"], "--cards: expected one process with all memory of each device, got --world-size 8"),
            (["--memory", "24GiB"], "got --memory 24GiB · fix: leave it out, or name one --device"),
        ],
    )
    def test_what_has_no_table(self, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["estimate", "someone/model", "--cards", *words]) == 2
        assert text in capsys.readouterr().err

    def test_a_model_that_does_not_exist(self) -> None:
        with pytest.raises(ConfigError, match="not a folder, not in the cache"):
            table_of("someone/model")
