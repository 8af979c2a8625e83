"""A training run whose memory runs out: it replans, repeats the update, and its weights are those of any other run."""

from __future__ import annotations

import pytest
from helpers.memory_limit import MemoryLimit
from helpers.small_run import CONFIG, rows_of, same_weights, train

from graphckpt.train.build_model import TrainGraph

WIDE = """
data.seq_length = 128
model.config.update(n_embd=32, n_positions=128)
train.update(train_iter=4, train_micro_batch_size=8, num_accumulation_steps=2)
train.evaluation.enabled = False
"""


def limit_call(monkeypatch, number, limit):
    """Limits what the ``number``-th update allocates; returns the limits that were in place."""
    plain, used = TrainGraph.__call__, []

    def call(self, **batch):
        used.append(MemoryLimit(limit if len(used) == number else None))
        with used[-1]:
            return plain(self, **batch)

    monkeypatch.setattr(TrainGraph, "__call__", call)
    return used


def test_run_goes_on_with_the_same_bits(place, monkeypatch):
    (place / "tiny.py").write_text(CONFIG + WIDE, encoding="utf-8")
    with monkeypatch.context() as patch:
        used = limit_call(patch, 2, None)
        assert train("train.output_dir=plain") == 0
    peak = used[2].peak_bytes
    used = limit_call(monkeypatch, 2, int(0.8 * peak))
    with pytest.warns(UserWarning, match=r"memory ran out; the step is repeated: 2x keep -> .*full.*; predicted peak"):
        assert train("train.output_dir=limited") == 0
    assert [limit.num_raised for limit in used] == [0, 0, 1, 0]
    assert used[3].peak_bytes <= 0.8 * peak
    assert same_weights(place / "plain", place / "limited")
    assert rows_of(place / "plain") == rows_of(place / "limited")


def test_it_raises_where_the_config_says_so(place, monkeypatch, capsys):
    (place / "tiny.py").write_text(CONFIG + WIDE, encoding="utf-8")
    used = limit_call(monkeypatch, 1, 1_000_000)
    assert train("train.activation_checkpoint.on_out_of_memory=raise") == 2
    assert "memory ran out: tried to allocate" in capsys.readouterr().err
    assert len(used) == 2
