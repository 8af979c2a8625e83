"""Times steps in which every block is recomputed, by what is compared: nothing, samples, or every value.

All variants run in one process, on one model, in turns and in a new random order each turn; a ratio compares two
variants of one turn. Models are built anew several times. By default each block is checked once in 64 steps, too seldom
to be timed beside other work: what those steps take without a check due is measured, and what a check takes, and
``default / none`` is 1 plus a 64th of the second.

    python benchmarks/value_check.py [--builds 6] [--turns 5]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
from overhead import SUBJECTS, Subject, forward_backward
from report import header, spread, table, write
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import graphckpt
from graphckpt.engine.sampling import PERIOD

VARIANTS = ("none", "none due", "values")
SETTLED = 4  # steps, after which a call is checked only if it is due


def gpt2_768() -> nn.Module:
    settings = {"n_embd": 768, "n_layer": 4, "n_head": 12, "vocab_size": 512, "n_positions": 512, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**settings, loss_type="ForCausalLM", bos_token_id=1, eos_token_id=2)).train()


LARGE = Subject(
    name="GPT-2, 4 layers of width 768, batch 1 x 512",
    build=gpt2_768,
    inputs=lambda: (torch.randint(0, 512, (1, 512)),),
    loss=lambda model, ids: model(ids, labels=ids).loss,
    blocks="transformer.h.*",
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    steps=1,
)
MODELS = [*(replace(subject, steps=4) for subject in SUBJECTS[:3]), LARGE]


def steps_of(subject: Subject, rule: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Builds one model for all variants: the place of a model in memory changes its speed by more than a check."""
    torch.manual_seed(0)
    model, inputs = subject.build(), subject.inputs()
    handle = graphckpt.apply(model, {subject.blocks: rule})
    run = forward_backward(subject, model, inputs)
    blocks = [wrapper.context for wrapper in handle._wrappers]
    for _ in range(SETTLED):
        run()
    for block in blocks:
        block.sampler._turn = -1

    def step(variant: str) -> torch.Tensor:
        for block in blocks:
            block.determinism_check = "default" if variant == "none due" else variant
        return run()

    return {variant: partial(step, variant) for variant in VARIANTS}


def measure(subject: Subject, rule: Any, builds: int, turns: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of one step, by variant and turn."""
    seconds = defaultdict(list)
    for _ in range(builds):
        steps = steps_of(subject, rule)
        for turn in range(turns + 1):
            for variant in random.sample(VARIANTS, len(VARIANTS)):
                begin = process_time()
                for _ in range(subject.steps):
                    steps[variant]()
                if turn:  # the first is to warm up
                    seconds[variant].append((process_time() - begin) / subject.steps)
    return seconds


def row_of(subject: Subject, rule: str, builds: int, turns: int) -> dict[str, Any]:
    seconds = measure(subject, rule, builds, turns)
    ratios = {
        variant: spread([one / none for one, none in zip(seconds[variant], seconds["none"], strict=True)])
        for variant in VARIANTS[1:]
    }
    default = 1 + (ratios["values"]["median"] - 1) / PERIOD
    return {"model": subject.name, "rule": rule, "seconds": median(seconds["none"]), "sum": f"{default:.4f}", **ratios}


def of(ratios: dict[str, float]) -> str:
    return f"{ratios['median']:.4f} ({ratios['min']:.3f} to {ratios['max']:.3f})"


def main() -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=6, help="how often the models are built anew")
    parser.add_argument("--turns", type=int, default=5, help="turns per build")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    head = header(n=f"{options.builds} builds x {options.turns} turns")
    rows = []
    for subject in MODELS:
        for rule in ("full", "selective") if subject is not LARGE else ("full",):
            rows.append(row_of(subject, rule, options.builds, options.turns))
            print(rows[-1], flush=True)
    cells = [
        [
            row["model"],
            row["rule"],
            f"{1e3 * row['seconds']:.2f} ms",
            *map(of, (row["values"], row["none due"])),
            row["sum"],
        ]
        for row in rows
    ]
    titles = [
        "model",
        "rule",
        "step with none",
        "values / none",
        "default, none due / none",
        "1 + (values / none - 1) / 64",
    ]
    write("value_check", head, rows, table(titles, cells))


if __name__ == "__main__":
    main()
