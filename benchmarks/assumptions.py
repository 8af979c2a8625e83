"""Predicts one step of bert-large under each assumption that a plan for an absent device states, one changed at a time.

python benchmarks/assumptions.py [--device a100-80g]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from published import MIB, simulate
from report import header, table, write
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from graphckpt.planning.candidates import KEEP
from graphckpt.planning.step_clock import Blocks
from graphckpt.planning.steps import FakeStep, made_step
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

TOKENS = 512
LAYERS = "bert.encoder.layer.*"


@dataclass(frozen=True, kw_only=True)
class Setting:
    batch: int = 4
    attention: str = "sdpa"
    autocast: str | None = None
    optimizer: str = "foreach"
    policy: str = "everything kept"


def maker(setting: Setting) -> Callable[[], tuple[nn.Module, Callable[[], object]]]:
    def make() -> tuple[nn.Module, Callable[[], object]]:
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        config = BertConfig(**large, attn_implementation=setting.attention)
        model = BertForSequenceClassification(config).to("cuda").train()
        choice = {"loop": {"foreach": False}, "foreach": {}, "fused": {"fused": True}}[setting.optimizer]
        optimizer = torch.optim.AdamW(model.parameters(), **choice)
        tokens, labels = (
            torch.ones(setting.batch, TOKENS, dtype=torch.long),
            torch.zeros(setting.batch, dtype=torch.long),
        )

        def step() -> None:
            with torch.autocast("cuda", getattr(torch, setting.autocast)) if setting.autocast else nullcontext():
                loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return make


SETTINGS = [
    Setting(),
    Setting(attention="eager"),
    Setting(autocast="bfloat16"),
    Setting(attention="eager", autocast="bfloat16"),
    *(Setting(batch=1, policy="full", optimizer=kind) for kind in ("foreach", "fused", "loop")),
]


def measure(setting: Setting, device: str) -> dict[str, Any]:
    found = simulate(maker(setting), device, {LAYERS: True} if setting.policy == "full" else None)
    step, model = made_step(maker(setting), FakeDevice(load_profile(device)), "assumptions")
    assert isinstance(step, FakeStep)
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if name.startswith(LAYERS[:-1]) and name.count(".") == 3
    ]
    step.sample(Blocks(layers), [KEEP] * len(layers))  # states them
    return {**asdict(setting), **asdict(found), "assumptions": [*step.assumptions]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="a100-80g")
    options = parser.parse_args()
    head = header(
        device=options.device, model=f"bert-large with a classifier, {TOKENS} tokens a sample, random weights"
    )
    rows = [measure(setting, options.device) for setting in SETTINGS]
    columns = ["assumed", "batch", "policy", "peak MiB", "reserved MiB", "step ms"]
    cells = [
        [", ".join(row["assumptions"]), str(row["batch"]), row["policy"]]
        + [f"{row[name] / MIB:,.0f}" for name in ("peak_bytes", "reserved_bytes")]
        + [f"{row['seconds'] * 1e3:.0f}"]
        for row in rows
    ]
    write("assumptions", head, rows, table(columns, cells))


if __name__ == "__main__":
    main()
