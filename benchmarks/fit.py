"""Compares the throughput that `graphckpt.find_batch_size` predicts for batch sizes with that of steps that run.

Each model is fitted for a list of batch sizes and a memory budget in which the plain step of the middle size just fits,
so that larger batches recompute. Then the step of each size runs under its plan, all sizes in each turn in random
order. A pair of sizes counts if its measured throughputs differ by over 10 %, and is right if the predictions have the
same order. As always, the largest and the fastest batch have run during the fit, and the times of batches that could
not be measured with everything kept are corrected by these.

    OMP_NUM_THREADS=1 python benchmarks/fit.py [--models gpt2 bert resnet] [--turns 5]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import combinations
from statistics import median
from time import process_time
from typing import Any

import torch
from report import header, table, write
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.search.fit_result import BatchFit

MIB = 2**20
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
PLAIN = 8  # the size whose plain step sets the budget
FAR = 0.10  # pairs that differ by less are not compared


def gpt2() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """GPT-2 of 6 layers of 128."""
    config = GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=1024, n_positions=128, use_cache=False)
    return GPT2LMHeadModel(config), lambda size: {"input_ids": _tokens(size), "labels": _tokens(size)}


def bert() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """BERT of 6 layers of 128."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=1024, num_labels=4))
    return model, lambda size: {"input_ids": _tokens(size), "labels": torch.zeros(size, dtype=torch.long)}


def resnet() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """ResNet of 12 basic layers in three stages."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [4, 4, 4], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**sizes, num_labels=4))
    return model, lambda size: {
        "pixel_values": torch.ones(size, 3, 64, 64),
        "labels": torch.zeros(size, dtype=torch.long),
    }


MODELS = {"gpt2": gpt2, "bert": bert, "resnet": resnet}


def _tokens(size: int) -> Tensor:
    return torch.ones(size, 128, dtype=torch.long)


def _source(row: BatchFit) -> str:
    return "checked" if row.checked_seconds is not None else "measured" if row.is_measured else "not measured"


class Steps:
    """The steps of a model, of any batch size."""

    def __init__(self, model: nn.Module, inputs: Callable[[int], dict[str, Tensor]]) -> None:
        self.model = model
        self._inputs = inputs
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)

    def make(self, size: int) -> tuple[nn.Module, Callable[[], None]]:
        """Returns the model and its step, as `graphckpt.find_batch_size` takes them."""
        batch = self._inputs(size)

        def step() -> None:
            self.model(**batch).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

        return self.model, step

    def seconds(self, row: BatchFit) -> float:
        """Returns the CPU seconds of a step under its plan."""
        assert row.plan is not None
        _, step = self.make(row.batch_size)
        with row.plan.apply(self.model):
            step()
            started = process_time()
            step()
            return process_time() - started

    def peak(self, row: BatchFit) -> int:
        """Returns the peak of live bytes under the plan."""
        assert row.plan is not None
        _, step = self.make(row.batch_size)
        with row.plan.apply(self.model):
            step()
            live = LiveBytes(record_timeline=False)
            state = [v for s in self._optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
            live.track([*self.model.parameters(), *self.model.buffers(), *state])
            with live:
                step()
        return live.peak_bytes


def run(name: str, turns: int, rng: random.Random) -> tuple[list[dict[str, Any]], str]:
    """Fits a model, runs its plans, and returns the rows and a text."""
    torch.manual_seed(0)
    steps = Steps(*MODELS[name]())
    plain = graphckpt.plan(*steps.make(PLAIN), memory_budget=2**40, candidates=["full"])
    started = process_time()
    found = graphckpt.find_batch_size(steps.make, batch_sizes=SIZES, memory_budget=plain.plain_peak_bytes)
    took = process_time() - started
    rows = [row for row in found.rows if row.plan is not None]
    times: dict[int, list[float]] = {row.batch_size: [] for row in rows}
    for _ in range(turns):
        for row in rng.sample(rows, len(rows)):
            times[row.batch_size].append(steps.seconds(row))
    results = [
        {
            "model": name,
            "batch_size": row.batch_size,
            "source": _source(row),
            "predicted_peak_bytes": row.plan.predicted_peak_bytes,
            "peak_bytes": steps.peak(row),
            "budget_bytes": found.budget_bytes,
            "predicted_rate": row.samples_per_second,
            "rate": row.batch_size / median(times[row.batch_size]),
            "recomputes": row.recomputes,
        }
        for row in rows
        if row.plan is not None
    ]
    far = [(a, b) for a, b in combinations(results, 2) if abs(a["rate"] - b["rate"]) > FAR * min(a["rate"], b["rate"])]
    right = [(a["rate"] > b["rate"]) == (a["predicted_rate"] > b["predicted_rate"]) for a, b in far]
    lines = [
        [
            str(row["batch_size"]),
            row["source"],
            "yes" if row["recomputes"] else "no",
            f"{row['predicted_peak_bytes'] / MIB:.1f}",
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{row['predicted_rate']:.1f}",
            f"{row['rate']:.1f}",
        ]
        for row in results
    ]
    columns = ["batch", "from", "recompute", "peak MiB, predicted", "it ran", "samples/s, predicted", "it ran"]
    verdict = (
        f"Order of throughput: {sum(right)} of {len(right)} pairs that differ by over {FAR:.0%} are right. "
        f"Budget {found.budget_bytes / MIB:.1f} MiB; peaks inside: "
        f"{sum(row['peak_bytes'] <= found.budget_bytes for row in results)} of {len(results)}; "
        f"fitting took {took:.0f} CPU seconds, and measured {', '.join(map(str, found.measured_sizes))}."
    )
    about = (MODELS[name].__doc__ or "").rstrip(".")
    return results, "\n".join([f"## {name}: {about}", "", table(columns, lines), "", verdict, ""])


def main() -> None:
    """Measures all models and writes one result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head = header(
        step="forward, backward and AdamW, float32",
        turns=f"{arguments.turns}, all sizes in each, in random order; the median counts",
        time="CPU time of the process",
    )
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    for name in arguments.models:
        found, text = run(name, arguments.turns, rng)
        rows += found
        texts.append(text)
    write("fit", head, rows, "\n".join(texts))


if __name__ == "__main__":
    main()
